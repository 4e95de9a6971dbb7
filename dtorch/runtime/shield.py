"""Ctrl-C, which Python raises between any two steps of the main thread, put off to the end of what must not be cut in two."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions, without the conversion to enums, ten times as dear
import threading
from collections.abc import Callable
from types import FrameType

LOOK_S = 0.5
"""Python looks for signals before it blocks; one that comes in the moment after that, or to another thread, ends no wait. So
whoever blocks where it may be the main thread looks again this often."""

_SIGINT = int(_signal.SIGINT)
_usual = _signal.default_int_handler


class Shield:
    """``with Shield():`` an interrupt that comes inside is raised at the end. Where a program handles interrupts itself
    (``asyncio.run`` does), and in other threads, nothing is changed.

    Args:
        wake: called when one comes, to end what blocks inside.

    Attributes:
        was_asked: one has come.
    """

    __slots__ = ("_is_on", "_wake", "was_asked")

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        self.was_asked = False

    def __enter__(self) -> Shield:
        self._is_on = threading.get_ident() == threading.main_thread().ident and _signal.getsignal(_SIGINT) is _usual
        if self._is_on:
            try:
                _signal.signal(_SIGINT, self._note)
            except ValueError:  # a program that embeds Python, where ``threading`` takes another thread for the main one
                self._is_on = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            _signal.signal(_SIGINT, _usual)
            if self.was_asked:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.was_asked = True
        if self._wake is not None:
            self._wake()
