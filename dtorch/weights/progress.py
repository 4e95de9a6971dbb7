"""A progress bar for what takes long, where somebody looks at it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from dtorch.session import current_session

LONG_BYTES = 256 << 20
"""Work on fewer bytes than this is not worth a bar."""
STEP_BYTES = 64 << 20
"""How often the bar moves."""


class Progress:
    """``with Progress(total, "loading weights") as bar: ... bar.add(count)``: shows bytes as workers get through them.

    There is a bar only for much work, in a terminal or a notebook, outside of a running event loop, and where tqdm is
    installed. Then each step waits for the workers; otherwise nothing waits.
    """

    def __init__(self, total_bytes: int, title: str, wanted: bool = True) -> None:
        self._bar: Any = None
        self._asked = 0
        if wanted and total_bytes >= LONG_BYTES and is_watched():
            self._bar = _bar(total_bytes, title)

    def __enter__(self) -> Progress:
        return self

    def add(self, size_bytes: int) -> None:
        """So many more bytes were asked for."""
        if self._bar is not None:
            self._asked += size_bytes
            if self._asked >= STEP_BYTES:
                self._wait()

    def _wait(self) -> None:
        current_session().ask_statistics().result()
        self._bar.update(self._asked)
        self._asked = 0

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._bar is not None:
            try:
                if kind is None and self._asked:
                    self._wait()
            finally:
                self._bar.close()


def is_watched() -> bool:
    """Whether somebody may be looking, and a wait disturbs nobody else."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    if kernel is not None and "IPython" in sys.modules:
        return sys.modules["IPython"].get_ipython() is not None
    if asyncio._get_running_loop() is not None:
        return False
    return sys.stderr is not None and sys.stderr.isatty()


def _bar(total_bytes: int, title: str) -> Any:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]  # tqdm has no types of its own
    except ImportError:  # not among what dtorch needs
        return None
    return tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, leave=False)
