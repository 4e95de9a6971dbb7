"""Heartbeats: the controller's side of the second link of each worker, past everything that is queued."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from dtorch.runtime.liveness import INTERVAL_S, Dead, Watch
from dtorch.transport import codec
from dtorch.transport.errors import ConnectionLostError, ProtocolError
from dtorch.transport.link import Link
from dtorch.transport.messages import Halt, Ping

logger = logging.getLogger(__name__)


class Pulse:
    """Pings workers and judges their silence. Belongs to the loop's thread.

    Args:
        states: of the workers' processes, for those on this machine; see ``Watch.tick``.
        on_dead: told of workers that count as lost.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        states: Callable[[], Mapping[int, str]],
        on_dead: Callable[[Dead], None],
    ) -> None:
        self._loop = loop
        self._states = states
        self._on_dead = on_dead
        self._links: dict[int, Link] = {}
        self._watch = Watch()
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0

    async def serve(self, worker: int, link: Link) -> None:
        """Hear a worker out, until its link ends."""
        self._links[worker] = link
        self._watch.join(worker, self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL_S, self._beat)
        try:
            while (frame := await link.receive()) is not None:
                codec.decode_from_worker(frame)
                self._watch.heard(worker, self._loop.time())
        except ProtocolError as error:
            logger.debug("worker %d's heartbeat: %s", worker, error)
        self.forget(worker)

    def halt(self, worker: int, session: int, epoch: int) -> None:
        """Tell a worker to halt."""
        self._send(worker, codec.encode(Halt(session, epoch)))

    def forget(self, worker: int) -> None:
        """A worker has ended."""
        self._links.pop(worker, None)
        self._watch.leave(worker)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._links.clear()

    def _send(self, worker: int, frame: bytes) -> None:
        link = self._links.get(worker)
        if link is not None and not link.pending_bytes:  # one that does not read gets no more
            try:
                link.send_nowait(frame)
            except ConnectionLostError as error:
                logger.debug("worker %d's heartbeat: %s", worker, error)

    def _beat(self) -> None:
        self._timer = self._loop.call_later(INTERVAL_S, self._beat) if self._links else None
        self._number += 1
        frame = codec.encode(Ping(self._number))
        for worker in list(self._links):
            self._send(worker, frame)
        for dead in self._watch.tick(self._loop.time(), self._states()):
            self._on_dead(dead)
