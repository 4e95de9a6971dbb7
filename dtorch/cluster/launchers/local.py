"""Workers as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

from dtorch.cluster.launchers.base import Ended, Incarnation, WorkerSpec, arguments, environment
from dtorch.transport.errors import LaunchError

Spawn = Callable[[int], Awaitable[asyncio.subprocess.Process]]
"""Starts the process with that number."""

STOP_S = 5.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
MAX_FAILURES = 3
STEADY_S = 10.0
"""A worker that ran so long has not failed at its start."""

TIED = (sys.executable, "-m", "dtorch.cluster.launchers.tied")


class Processes:
    """Keeps processes running: starts those anew that are killed or fail; MAX_FAILURES failures in a row are enough."""

    def __init__(self) -> None:
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._ended: asyncio.Queue[Ended] = asyncio.Queue()
        self._stopping = False

    async def keep(self, num: int, spawn: Spawn) -> None:
        """Start ``num`` of them."""
        for slot in range(num):
            self._running[slot] = await spawn(slot)
        loop = asyncio.get_running_loop()
        self._keepers = [loop.create_task(self._keep(slot, spawn)) for slot in range(num)]

    async def _keep(self, slot: int, spawn: Spawn) -> None:
        loop = asyncio.get_running_loop()
        num_failures, pause_s = 0, FIRST_PAUSE_S
        while True:
            started = loop.time()
            status = await self._running[slot].wait()
            if self._stopping:
                return
            if status == 0:
                self._ended.put_nowait(Ended(slot))
                return
            if loop.time() - started > STEADY_S:
                num_failures, pause_s = 0, FIRST_PAUSE_S
            num_failures += status > 0  # below 0: it was killed by a signal
            if num_failures == MAX_FAILURES:
                self._ended.put_nowait(Ended(slot, f"it failed {num_failures} times in a row, with exit status {status}"))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            if self._stopping:
                return
            self._running[slot] = await spawn(slot)

    async def kill(self, which: Incarnation) -> None:
        process = self._running.get(which.slot)
        if process is not None and process.pid == which.pid and process.returncode is None:
            process.kill()

    async def wait_ended(self) -> Ended:
        return await self._ended.get()

    async def wait_all(self, stop: asyncio.Event) -> None:
        """Wait until all have ended for good, or ``stop`` is set.

        Raises:
            LaunchError: one of them fails again and again.
        """
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((stopped, asyncio.gather(*self._keepers)), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        while not self._ended.empty():
            gone = self._ended.get_nowait()
            if gone.error:
                raise LaunchError(f"process {gone.slot}: {gone.error}")

    async def stop(self) -> None:
        self._stopping = True
        for process in self._running.values():
            _signal(process, kill=False)
        if self._keepers:
            _, late = await asyncio.wait(self._keepers, timeout=STOP_S)
            for keeper in late:
                keeper.cancel()
        for process in self._running.values():
            _signal(process, kill=True)
            await process.wait()


class LocalLauncher(Processes):
    """A process for each worker."""

    async def start(self, spec: WorkerSpec, num_workers: int) -> None:
        await self.keep(num_workers, lambda slot: spawn(arguments(spec, slot), environment(spec)))


async def spawn(words: Sequence[str], more: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Run ``dtorch`` with these words, tied to this process.

    Args:
        more: for its environment.
    """
    return await asyncio.create_subprocess_exec(
        *TIED, *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env={**os.environ, **more},
        start_new_session=True,  # Ctrl-C is for the launcher, which ends them in order
    )


def _signal(process: asyncio.subprocess.Process, kill: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            (process.kill if kill else process.terminate)()
