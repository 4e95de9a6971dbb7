"""A notebook's kernel: whether this process is one, and how a cell that waits there can be interrupted."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

TICK_S = 0.1


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    kernel = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    return kernel is not None and bool(kernel.initialized())


def tick_until_done(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any]) -> None:
    """Let the loop of a kernel turn from time to time until ``waiter`` is done.

    An interrupted cell is cancelled by a callback that does not wake the loop (ipykernel's issue 881): where nothing else
    happens, a cell that awaits a value would hear of it only once the value has come.
    """
    if not waiter.done():
        loop.call_later(TICK_S, tick_until_done, loop, waiter)
