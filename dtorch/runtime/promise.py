"""A value that arrives later, from another thread: set once, awaited from any loop or thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from math import inf
from time import perf_counter, perf_counter_ns
from typing import Any, Generic, Protocol, TypeVar

from dtorch.runtime.notebook import in_notebook, tick_until_done
from dtorch.runtime.shield import LOOK_S

T = TypeVar("T")

logger = logging.getLogger(__name__)

watcher: Callable[[str, int], None] | None = None
"""While a profile runs: told "wait" or "await" and when (ns) it began, at the end of each."""


class Reading(Protocol):
    """Reads what settles promises, in the thread that waits for one: see ``ear.Ear``."""

    def wait(self, is_done: Callable[[], bool], until_s: float) -> None: ...
    def nudge(self) -> None: ...
    def woken(self, asked_s: float, ran_s: float) -> None: ...


class Promise(Generic[T]):
    """Lighter than ``concurrent.futures.Future``: it makes no lock until somebody blocks on it.

    Args:
        reading: lets a thread that blocks do what settles the promise itself.

    Whoever takes the one entry out of ``_claim`` settles the promise; the list's ``pop`` decides between threads.
    ``_callbacks`` is None once the outcome is there. A waiter that gives up drops itself and nothing else.
    """

    __slots__ = ("__weakref__", "_callbacks", "_claim", "_error", "_on_seen", "_reading", "_result")

    def __init__(self, reading: Reading | None = None) -> None:
        self._reading = reading
        self._claim = [True]
        self._callbacks: list[Callable[[], None]] | None = []
        self._result: T | None = None
        self._error: BaseException | None = None
        self._on_seen: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        return self._callbacks is None

    def set_result(self, result: T) -> None:
        """Settle with a value. Nothing happens when the promise is settled already."""
        self._settle(result, None, None)

    def set_exception(self, error: BaseException, on_seen: Callable[[], None] | None = None) -> None:
        """Settle with a failure. Nothing happens when the promise is settled already.

        Args:
            error: raised to every waiter; it should be this promise's own, since raising it notes a traceback in it.
            on_seen: called when somebody is told of the failure for the first time, in that thread.
        """
        self._settle(None, error, on_seen)

    def _settle(self, result: T | None, error: BaseException | None, on_seen: Callable[[], None] | None) -> None:
        try:
            self._claim.pop()
        except IndexError:
            return
        callbacks = self._callbacks
        assert callbacks is not None
        self._result, self._error, self._on_seen = result, error, on_seen
        self._callbacks = None
        # A copy: a waiter that gives up takes its callback out of the list at any time.
        for callback in callbacks[:]:
            try:
                callback()
            except Exception:
                logger.exception("a callback of a promise failed")

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` once settled: in the settling thread, or at once when that has happened."""
        callbacks = self._callbacks
        if callbacks is None:
            callback()
            return
        callbacks.append(callback)
        # The settling thread may have copied the list just before the append; then nobody else would run it. It may
        # also have met it, so callbacks must not mind a second run.
        if self._callbacks is None:
            callback()

    def _drop(self, callback: Callable[[], None]) -> None:
        callbacks = self._callbacks
        if callbacks is not None:
            with contextlib.suppress(ValueError):  # taken out before
                callbacks.remove(callback)

    def result(self, timeout_s: float | None = None) -> T:
        """Block until settled. Raises the failure, or TimeoutError."""
        if self._callbacks is not None and not self.wait(timeout_s):
            raise TimeoutError(f"no value within {timeout_s} s")
        error = self._error
        if error is not None:
            self._tell()
            try:
                # Without what an earlier waiter noted in it; and this frame, which the new note refers to, lets go of
                # everything: no cycle keeps the waiter's variables alive.
                raise error.with_traceback(None)
            finally:
                del self, error
        return self._result  # type: ignore[return-value]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until settled, or ``timeout_s`` seconds; True when settled."""
        if self._callbacks is None:
            return True
        gate = threading.Lock()
        gate.acquire()
        opened = _once(gate.release)
        self.add_callback(opened)
        watching = watcher
        began = 0 if watching is None else perf_counter_ns()
        reading = self._reading
        until_s = inf if timeout_s is None else perf_counter() + timeout_s
        try:
            if reading is not None:
                self.add_callback(reading.nudge)
                reading.wait(lambda: self._callbacks is None, until_s)
            return _acquire(gate, until_s)
        finally:
            self._drop(opened)
            if reading is not None:
                self._drop(reading.nudge)
            if watching is not None:
                watching("wait", began)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Block until settled and return the failure, if any."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"no value within {timeout_s} s")
        self._tell()
        return self._error

    def peek(self) -> BaseException | None:
        """The failure of a settled promise, without counting as somebody who has seen it."""
        return self._error

    def _tell(self) -> None:
        on_seen, self._on_seen = self._on_seen, None
        if on_seen is not None:
            on_seen()

    def __await__(self) -> Generator[Any, None, T]:
        if self._callbacks is not None:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            reading = self._reading

            def settled(asked_s: float) -> None:
                if not waiter.done():
                    waiter.set_result(None)
                    if reading is not None:
                        reading.woken(asked_s, perf_counter())

            def wake() -> None:
                try:
                    loop.call_soon_threadsafe(settled, perf_counter())
                except RuntimeError:
                    logger.debug("a value came for a loop that is closed")

            self.add_callback(wake)
            if in_notebook():
                tick_until_done(loop, waiter)
            watching = watcher
            began = 0 if watching is None else perf_counter_ns()
            try:
                yield from waiter.__await__()
            finally:
                self._drop(wake)
                if watching is not None:
                    watching("await", began)
        return self.result()


def _acquire(gate: threading.Lock, until_s: float) -> bool:
    while not gate.acquire(timeout=min(max(until_s - perf_counter(), 0.0), LOOK_S)):
        if perf_counter() >= until_s:
            return False
    return True


def _once(action: Callable[[], None]) -> Callable[[], None]:
    left = [action]

    def run() -> None:
        try:
            todo = left.pop()
        except IndexError:  # run before, perhaps by another thread
            return
        todo()

    return run
