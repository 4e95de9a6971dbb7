"""Stay awake for a moment when an answer or the next message is near: a sleeping core wakes slowly."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from time import perf_counter

SPIN_S = 0.0003
"""How long a loop polls without sleeping after it was touched."""
LOOK_S = 1.0
"""How often the machine's load is looked at: where others want the cores, nobody spins."""


class Spinner:
    """Keeps an event loop polling its sockets without sleeping until ``SPIN_S`` after the last ``touch``.

    Each turn is an ordinary iteration of the loop, so everything else goes on as always. Belongs to the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._until = 0.0
        self._turning = False
        self._idle_cores = False
        self._look_at = 0.0

    def touch(self) -> None:
        now = perf_counter()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._idle_cores = os.getloadavg()[0] < (os.cpu_count() or 1)
        if not self._idle_cores:
            return
        self._until = now + SPIN_S
        if not self._turning:
            self._turning = True
            self._call_soon(self._turn)

    def _turn(self) -> None:
        if perf_counter() < self._until:
            self._call_soon(self._turn)
        else:
            self._turning = False


SWITCH_S = 0.0002
"""How long a thread that computes in Python may keep the interpreter from the others while it is held (5 ms otherwise)."""


class QuickSwitches:
    """While anybody holds it, the interpreter hands itself over between threads within ``SWITCH_S``. What was set before comes
    back at the end. To be held for a moment only: threads that compute and threads that wake often slow each other down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._before_s = 0.0

    def hold(self) -> None:
        with self._lock:
            self._num_holders += 1
            if self._num_holders == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, SWITCH_S))

    def release(self) -> None:
        with self._lock:
            self._num_holders -= 1
            if not self._num_holders:
                sys.setswitchinterval(self._before_s)


quick_switches = QuickSwitches()
