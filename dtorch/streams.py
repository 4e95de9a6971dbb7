"""``dtorch.as_completed``: values in the order in which they arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from dtorch.blocking import check_loop
from dtorch.future import FetchFuture, TensorFuture
from dtorch.runtime.promise import Promise


class Completed(AsyncIterator[FetchFuture], Iterator[FetchFuture]):
    """An iterator over futures, each given out once it is ready. Made by ``as_completed``.

    Promises settle in the controller's thread, which appends to ``_ready`` and then settles ``_waiter``; the consumer
    sets ``_waiter`` and then looks at ``_ready`` again. So whichever comes second sees the other.
    """

    def __init__(self, futures: Iterable[TensorFuture]) -> None:
        self._ready: deque[FetchFuture] = deque()
        self._waiter: Promise[None] = Promise()
        given = list(futures)
        for future in given:
            if not isinstance(future, TensorFuture):
                raise TypeError(
                    f"as_completed takes tensors and the futures of to_torch_async(), not {type(future).__name__}; "
                    "of a coroutine such as x.value() give the tensor x"
                )
        self._left = len(given)
        in_loop = asyncio._get_running_loop() is not None
        for index, future in enumerate(given):
            # All are asked for in one batch: with the loop's next tick, or with the last.
            promise = future._promise(not in_loop and index == len(given) - 1)
            self._watch(promise, future if isinstance(future, FetchFuture) else FetchFuture(promise, future))

    def _watch(self, promise: Promise[Any], future: FetchFuture) -> None:
        left = [future]

        def settled() -> None:
            try:
                self._ready.append(left.pop())
            except IndexError:  # a promise may run a callback twice
                return
            self._waiter.set_result(None)

        promise.add_callback(settled)

    def __aiter__(self) -> Completed:
        return self

    async def __anext__(self) -> FetchFuture:
        if not self._left:
            raise StopAsyncIteration
        while (future := self._take()) is None:
            await self._waiter
        return future

    def __iter__(self) -> Completed:
        return self

    def __next__(self) -> FetchFuture:
        if not self._left:
            raise StopIteration
        while (future := self._take()) is None:
            check_loop()
            self._waiter.result()
        return future

    def _take(self) -> FetchFuture | None:
        """A future that is ready. None: wait for ``_waiter`` and ask again."""
        if self._waiter.done:
            self._waiter = Promise()
        try:
            future = self._ready.popleft()
        except IndexError:
            return None
        self._left -= 1
        return future


def as_completed(futures: Iterable[TensorFuture]) -> Completed:
    """Iterate over tensors in the order in which their values arrive, with ``async for`` or, blocking, with ``for``.

    Yields a future that is ready: awaiting it does not wait, and raises if the op failed. Its ``tensor`` is the tensor
    that was given; a future made by ``to_torch_async`` is itself given back. All values are asked for at once, in one
    message. Leaving the loop early drops the waiter and nothing else; ``asyncio.timeout`` around it bounds it.

    Args:
        futures: tensors and futures; one that is given twice comes twice.

    Raises:
        TypeError: something else is among them.
    """
    return Completed(futures)
