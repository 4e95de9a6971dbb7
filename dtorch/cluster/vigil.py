"""Which workers of a head are alive: the shell around ``runtime/liveness.py``.

Each worker has a link, and beside it a small process that tells the state of the worker's (``sentinel.py``). So a worker that
is killed is known to have ended at once, one that is stopped is known to be, and one that is only busy is known to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import web

from dtorch.cluster.member import WorkerEnd
from dtorch.cluster.sentinel import ENDED, TICKET_HEADER
from dtorch.runtime.liveness import INTERVAL_S, STOPPED, Watch
from dtorch.transport.cluster import Credit
from dtorch.transport.patience import Awake

logger = logging.getLogger(__name__)

ALONE_S = 10.0
"""Silence of a worker beside which nobody is, and which may be busy, until it is given up."""
ASK_TICKS = 2
"""Such a worker is spoken to every ``ASK_TICKS`` intervals, so that it has something to acknowledge."""


class Vigil:
    """Judges the workers of a head. Belongs to the loop's thread.

    Args:
        workers: of the head, by number.
        find: the worker that has a ticket, or None.
        grace_s: how long a worker may be without any connection, its own or that of the process beside it.
        silent_s: how long nothing may be heard of a worker and of the process beside it.
        on_dead: told of a worker that is lost, and why.
        on_sign: told of each sign of life of a worker.
    """

    def __init__(
        self,
        workers: Mapping[int, WorkerEnd],
        find: Callable[[str], WorkerEnd | None],
        grace_s: float,
        silent_s: float,
        on_dead: Callable[[WorkerEnd, str], None],
        on_sign: Callable[[int], None],
    ) -> None:
        self._workers = workers
        self._find = find
        self._grace_s = grace_s
        self._silent_s = silent_s
        self._on_dead = on_dead
        self._on_sign = on_sign
        self._watch = Watch()
        self._attended: Counter[int] = Counter()  # worker -> requests of the process beside it that are open
        self._acknowledged: dict[int, int] = {}  # worker -> frames that it was known to have
        self._broken: dict[int, float] = {}  # worker -> since when it is without any connection

    def joined(self, number: int) -> None:
        """A worker is in the pool from now on."""
        self._watch.join(number, time.monotonic(), ALONE_S)

    def left(self, number: int) -> None:
        self._watch.leave(number)
        self._acknowledged.pop(number, None)
        self._broken.pop(number, None)

    def heard(self, number: int) -> None:
        """A worker has said something."""
        self._watch.heard(number, time.monotonic())
        self._on_sign(number)

    async def attend(self, request: web.Request) -> web.StreamResponse:
        """The request of the process beside a worker, which does not end: a byte for each look at the worker's process."""
        end = self._find(request.headers.get(TICKET_HEADER, ""))
        if end is None:
            return await _answer(request, 410, "this worker was given up, or was never here")
        number = end.number
        self._attended[number] += 1
        try:
            while states := await request.content.readany():
                if self._workers.get(number) is not end:
                    return await _answer(request, 410, "this worker was given up")
                state = chr(states[-1])
                if state == ENDED:
                    self._lose(end, "its process has ended")
                    break
                self._watch.attested(number, time.monotonic(), state, self._silent_s)
                if state != STOPPED:
                    self._on_sign(number)
        except (ConnectionError, aiohttp.ClientError) as error:
            logger.debug("worker %d is not attended any more: %s", number, error)
        finally:
            self._attended[number] -= 1
            if not self._attended[number]:
                del self._attended[number]
        return await _answer(request, 200, "ok")

    async def run(self) -> None:
        """Look at all workers again and again."""
        clock, num_ticks = Awake(INTERVAL_S, time.monotonic()), 0
        while True:
            await asyncio.sleep(INTERVAL_S)
            now = clock.tick(time.monotonic())
            num_ticks += 1
            for number, end in list(self._workers.items()):
                self._look(number, end, now, num_ticks % ASK_TICKS == 0)
            for dead in self._watch.tick(time.monotonic(), {}):
                self._lose(self._workers[dead.worker], dead.reason)

    def _look(self, number: int, end: WorkerEnd, now: float, asks: bool) -> None:
        link = end.link
        if self._acknowledged.get(number) != link.acknowledged:
            self._acknowledged[number] = link.acknowledged
            self.heard(number)
        if link.connected or self._attended[number]:
            self._broken.pop(number, None)
        elif now - self._broken.setdefault(number, now) >= self._grace_s:
            self._lose(end, link.reason or "its connection closed, and did not come back")
        if asks and link.connected and not self._attended[number]:
            end.send(Credit(0, 0))

    def _lose(self, end: WorkerEnd, reason: str) -> None:
        self.left(end.number)
        self._on_dead(end, reason)


async def _answer(request: web.Request, status: int, text: str) -> web.StreamResponse:
    """End a request, of which no more is read."""
    response = web.Response(status=status, text=text)
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        await response.write_eof()
    request.protocol.force_close()
    return response
