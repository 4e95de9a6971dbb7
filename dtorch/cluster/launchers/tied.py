"""``dtorch`` tied to the process that started it: at the end of its standard input it ends as by SIGTERM.

However a launcher goes, its children go too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def _hold() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def run() -> int:
    """Run the command line's command."""
    from dtorch.cli import main

    threading.Thread(target=_hold, name="dtorch-lifeline", daemon=True).start()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
