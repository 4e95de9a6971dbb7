"""Policies of the current task: whether illegal placements are repaired instead of raising."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_auto: ContextVar[bool] = ContextVar("dtorch_auto_redistribute", default=False)


@contextmanager
def auto_redistribute(enabled: bool = True) -> Iterator[None]:
    """Inside, ops whose inputs have no legal placements redistribute them at the least cost instead of raising
    ``PlacementError``. Belongs to the running task: concurrent tasks do not see it.

    Args:
        enabled: False switches an outer policy off again.
    """
    token = _auto.set(enabled)
    try:
        yield
    finally:
        _auto.reset(token)


def is_auto() -> bool:
    """Whether illegal placements are repaired here."""
    return _auto.get()
