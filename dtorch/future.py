"""TensorFuture: what every op returns, and what ``to_torch_async`` gives. Awaited from any loop or thread."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from dtorch.blocking import check_loop
from dtorch.runtime.promise import Promise

__tracebackhide__ = True  # pytest shows the caller's frames, not these; IPython looks for it among a frame's own variables


class TensorFuture:
    """A tensor whose value comes later.

    ``dtorch.Tensor`` is one; so is the result of ``dtorch.Tensor.to_torch_async``. Waiting never changes the value,
    and giving up a wait (timeout, cancellation) drops the waiter and nothing else.
    """

    __slots__ = ()

    def _promise(self, now: bool = True) -> Promise[torch.Tensor]:
        raise TypeError("an abstract TensorFuture has no value")

    async def value(self) -> torch.Tensor:
        """The full value as a plain torch.Tensor. Never blocks the event loop.

        Raises:
            OpError: the op that makes it failed (also an instance of torch's own exception type).
            WorkerLostError: a worker that held a part of it is gone.
            SessionClosedError: the runtime was shut down.
        """
        __tracebackhide__ = True
        return await self._promise(now=False)

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        return self._promise(now=False).__await__()

    def to_torch(self) -> torch.Tensor:
        """The full value as a plain torch.Tensor; blocks until it is there. Raises as ``value``."""
        __tracebackhide__ = True
        return self._wait().result()

    def get(self, timeout_s: float | None = None) -> torch.Tensor:
        """As ``to_torch``, waiting at most ``timeout_s`` seconds (TimeoutError)."""
        __tracebackhide__ = True
        return self._wait().result(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the value or its failure is there, at most ``timeout_s`` seconds; whether it is."""
        return self._wait().wait(timeout_s)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Block until settled; the failure, or None when there is a value."""
        return self._wait().exception(timeout_s)

    def _wait(self) -> Promise[torch.Tensor]:
        """The promise, for a caller that is about to block on it."""
        promise = self._promise()
        if not promise.done:
            check_loop()
        return promise


class FetchFuture(TensorFuture):
    """A value on its way from the workers.

    Attributes:
        tensor: whose value it is, where ``dtorch.as_completed`` made the future; else None.
    """

    __slots__ = ("_settles", "tensor")

    def __init__(self, promise: Promise[torch.Tensor], tensor: Any = None) -> None:
        self._settles = promise
        self.tensor = tensor

    def _promise(self, now: bool = True) -> Promise[torch.Tensor]:
        return self._settles

    def is_ready(self) -> bool:
        """Whether the value or its failure is there; never blocks."""
        return self._settles.done

    def __repr__(self) -> str:
        return f"<FetchFuture {'ready' if self._settles.done else 'pending'}>"
