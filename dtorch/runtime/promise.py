"""A value that arrives later, from another thread: set once, awaited from any loop or thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """Lighter than ``concurrent.futures.Future``: it makes no lock until somebody blocks on it.

    ``_callbacks`` is None once the promise is settled; whoever takes the list out runs it. A waiter that gives up drops
    itself and nothing else.
    """

    __slots__ = ("_callbacks", "_error", "_result", "observed")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] | None = []
        self._result: T | None = None
        self._error: BaseException | None = None
        self.observed = False  # somebody has seen the outcome

    @property
    def done(self) -> bool:
        return self._callbacks is None

    def set_result(self, result: T) -> None:
        self._settle(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._settle(None, error)

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        callbacks = self._callbacks
        if callbacks is None:
            return
        self._result, self._error = result, error
        self._callbacks = None
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` once settled: in the settling thread, or at once when that has happened."""
        callbacks = self._callbacks
        if callbacks is None:
            callback()
            return
        callbacks.append(callback)
        # The settling thread may have walked the whole list just before the append; then nobody else would run it. It may
        # also have met it, so callbacks must not mind a second run.
        if self._callbacks is None:
            callback()

    def result(self, timeout_s: float | None = None) -> T:
        """Block until settled. Raises the failure, or TimeoutError."""
        if self._callbacks is not None and not self.wait(timeout_s):
            raise TimeoutError(f"no value within {timeout_s} s")
        self.observed = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until settled, or ``timeout_s`` seconds; True when settled."""
        if self._callbacks is None:
            return True
        gate = threading.Lock()
        gate.acquire()
        opened = _once(gate.release)
        self.add_callback(opened)
        return gate.acquire(timeout=-1 if timeout_s is None else timeout_s)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Block until settled and return the failure, if any."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"no value within {timeout_s} s")
        self.observed = True
        return self._error

    def __await__(self) -> Generator[Any, None, T]:
        if self._callbacks is not None:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def settled() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def wake() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(settled)

            self.add_callback(wake)
            yield from waiter.__await__()
        return self.result()


def _once(action: Callable[[], None]) -> Callable[[], None]:
    left = [action]

    def run() -> None:
        if left:
            left.pop()()

    return run
