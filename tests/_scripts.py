"""Programs as users start them: one file, ``python3 test.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
WAIT_S = 90.0  # far above what anything takes; only a failing test waits this long


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def start(folder: Path, code: str, *, stdin: int | None = None, **env: str) -> subprocess.Popen[str]:
    """Start ``code`` as test.py in ``folder``; its words go to pipes."""
    file = folder / "test.py"
    file.write_text(textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, "test.py"], cwd=folder, env=environment(**env), text=True,
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(folder: Path, code: str, **env: str) -> str:
    """What a successful program prints. Nothing may stand on stderr."""
    process = start(folder, code, **env)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert err == ""
    return out
