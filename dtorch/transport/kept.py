"""Memory that is used again once nobody refers to it: the first touch of fresh pages costs more than copying into them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

LEAST_BYTES = 64 * 1024
_ALIGN = 64  # as torch's


class KeptMemory:
    """Gives memory out, and takes it back when the last view of it is gone, from any thread.

    Args:
        max_idle_bytes: what is idle above this goes back to the system, the longest idle first.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[np.ndarray[Any, Any]] = []  # the longest idle first; guarded by _lock
        # Appended to by finalizers, which may run inside any line of any thread and so never wait for the lock.
        self._returned: deque[np.ndarray[Any, Any]] = deque()

    def take(self, size_bytes: int) -> np.ndarray[Any, Any]:
        """So many bytes, aligned as torch's, with whatever content they had.

        Whoever slices ``data`` of it, or makes a tensor of it, holds it too.
        """
        with self._lock:
            self._collect()
            most = 2 * max(size_bytes, LEAST_BYTES)
            found = next((at for at in reversed(range(len(self._idle))) if size_bytes <= len(self._idle[at]) <= most), None)
            store = None if found is None else self._idle.pop(found)
        if store is None:
            store = _fresh(size_class(size_bytes))
        view = store[: max(size_bytes, 1)]
        weakref.finalize(view, self._take_back, store).atexit = False
        return view

    def _take_back(self, store: np.ndarray[Any, Any]) -> None:
        self._returned.append(store)
        if self._lock.acquire(blocking=False):  # whoever has it leaves at most this one for later
            try:
                self._collect()
            finally:
                self._lock.release()

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            self._collect()
            return sum(map(len, self._idle))

    def keep(self, max_idle_bytes: int) -> None:
        """From now on keep so much at most."""
        with self._lock:
            self._max_idle_bytes = max_idle_bytes
            self._collect()

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        idle = sum(map(len, self._idle))
        while idle > self._max_idle_bytes:
            idle -= len(self._idle.pop(0))


def _fresh(size_bytes: int) -> np.ndarray[Any, Any]:
    whole = np.empty(size_bytes + _ALIGN, np.uint8)
    start = -whole.ctypes.data % _ALIGN
    return whole[start : start + size_bytes]


def size_class(size_bytes: int) -> int:
    """The next of four steps per power of two, so that slightly different sizes meet in one class."""
    size = max(size_bytes, LEAST_BYTES)
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return -(-size // step) * step
