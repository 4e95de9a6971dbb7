"""Policies of the current task: whether illegal placements are repaired instead of raising."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from sys import _getframe
from typing import Any

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


def repairing(record: Callable[..., Any]) -> Callable[..., Any]:
    """``record(args, kwargs, frame)`` inside ``auto_redistribute()``, which costs more."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any = None) -> Any:
        frame = frame or _getframe(1)
        if _auto.get():
            return record(args, kwargs, frame)
        token = _auto.set(True)
        try:
            return record(args, kwargs, frame)
        finally:
            _auto.reset(token)

    return call
