"""Stay awake for a moment when an answer or the next message is near: a sleeping core wakes slowly."""

from __future__ import annotations

import asyncio
import sys
import threading
from time import perf_counter

SPIN_S = 0.0003
"""How long a thread polls without sleeping, from the moment when something was near."""
GAP_S = 0.0002
"""Between two looks of a thread that polls: after a longer gap somebody else has had the core."""
PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.32
"""For how long nobody polls then: twice as long as the last time, if that was over for less than ``WELL_S``."""
WELL_S = 0.25


class Contention:
    """Whether polling would take a core from others who want it, who would be given it for a millisecond and more in the
    very moment when the answer comes. What tells it is that the thread that polls was made to wait. Pure; seconds."""

    def __init__(self) -> None:
        self._not_before_s = 0.0
        self._pause_s = PAUSE_S

    def may_poll(self, now: float) -> bool:
        return now >= self._not_before_s

    def looked(self, before: float, now: float) -> bool:
        """A thread that polls looked at these two times, one after the other, or one was woken and ran; the answer is whether
        to go on polling."""
        if now - before <= GAP_S:
            return True
        if now - self._not_before_s > WELL_S:
            self._pause_s = PAUSE_S
        self._not_before_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return False


class Spinner:
    """Keeps an event loop polling its sockets without sleeping until ``SPIN_S`` after the last ``touch``.

    Each turn is an ordinary iteration of the loop, so everything else goes on as always. Belongs to the loop's thread.

    Args:
        contention: shared with whoever else polls, or notices that others want the cores.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, contention: Contention | None = None) -> None:
        self._call_soon = loop.call_soon
        self._until = 0.0
        self._looked = 0.0
        self._turning = False
        self._contention = contention or Contention()

    def touch(self) -> None:
        """Something was handled, and more is near."""
        now = self._looked = perf_counter()
        if not self._contention.may_poll(now):
            return
        self._until = now + SPIN_S
        if not self._turning:
            self._turning = True
            self._call_soon(self._turn)

    def rest(self) -> None:
        """Nothing is near any more."""
        self._until = 0.0

    def _turn(self) -> None:
        before, now = self._looked, perf_counter()
        self._looked = now
        if self._contention.looked(before, now) and now < self._until:
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
