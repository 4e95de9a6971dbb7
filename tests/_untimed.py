"""Batches that end where the program says, for tests of what devices hold at most."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from dtorch.session import current_session


@contextmanager
def untimed() -> Iterator[None]:
    """Batches of the current session end where they are full and where a value is asked for, never by the clock.

    Batches carry the deaths of tensors, so what a device holds at most depends on where they end. Cyclic garbage dies whenever
    the collector runs, so that is off too.
    """
    recorder = current_session().recorder
    recorder.tick = lambda: None  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        del recorder.tick
        recorder.tick()  # the timer's answer to whatever was asked meanwhile
