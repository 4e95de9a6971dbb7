"""Waiting for others without counting time in which they could not have been heard.

A process may be held up for seconds: stopped, out of processors, on a machine that is asleep. What was said meanwhile lies in
its sockets, but its timers are due first. So time counts in short steps, and a step that came late does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

STEP_S = 0.25

T = TypeVar("T")


class Awake:
    """A clock that stands still while this process is held up. Pure.

    Args:
        step_s: how often ``tick`` is called; after twice that time it is late.
        now: seconds of any other clock.

    Attributes:
        time: seconds in which others could be heard.
    """

    def __init__(self, step_s: float, now: float) -> None:
        self._step_s = step_s
        self._last = now
        self.time = 0.0

    def tick(self, now: float) -> float:
        """Time has gone by on the other clock; the answer is ``time``."""
        passed, self._last = now - self._last, now
        if passed <= 2 * self._step_s:
            self.time += passed
        return self.time


async def within(work: Awaitable[T], timeout_s: float) -> T:
    """The outcome of ``work``, which is cancelled if it takes longer.

    Args:
        timeout_s: time for which this process is held up is not part of it.

    Raises:
        asyncio.TimeoutError: it took longer.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    step_s = min(STEP_S, timeout_s / 4)
    clock = Awake(step_s, loop.time())
    try:
        while not task.done():
            if clock.time >= timeout_s:
                raise asyncio.TimeoutError
            await asyncio.wait((task,), timeout=step_s)
            clock.tick(loop.time())
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
