"""A worker as the head sees it: a place in the pool and a link that may break and come back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from dtorch.cluster.pool import Member
from dtorch.transport import codec
from dtorch.transport.cluster import Load, Open, Part, Retire, ToPoolWorker
from dtorch.transport.codec import Frame
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import ConnectionLostError
from dtorch.transport.messages import Done, Failure, Held, RandomState, Resumed, Snapshots, Statistics, Trace

ForSession = Done | Failure | Statistics | RandomState | Trace | Held | Snapshots | Resumed | Part
"""What a worker says about one session."""

AWAY_S = 60.0
"""How long a worker whose process runs may take to connect again. It may be busy; one that has ended is known to have."""


class WorkerEnd:
    """The head's end of one worker.

    Attributes:
        member: its entry in the pool.
        link: where frames go.
        ticket: with it a worker whose connection broke takes its place again.
    """

    def __init__(self, member: Member, link: DurableLink, address: str, pid: int = 0) -> None:
        self.member = member
        self.link = link
        self.address = address
        self.pid = pid  # on its own host
        self.ticket = f"{member.number}.{secrets.token_urlsafe(32)}"
        self.reason = ""  # why it is about to be given up
        self.given_up = False
        self.serving: asyncio.Task[None] | None = None  # hears it; cancelled when it is given up
        self.retires = False  # it wants to leave
        self.asked = False  # it was told to leave, or said that it does

    @property
    def number(self) -> int:
        return self.member.number

    def send(self, message: ToPoolWorker) -> None:
        self.send_frame(codec.encode(message))

    def send_frame(self, frame: Frame) -> None:
        """Frames for a worker that is gone are dropped: its sessions are told of its end."""
        try:
            self.link.send_nowait(frame)
        except ConnectionLostError:
            return

    def open(self, session: int, tenant: str, weight: float, priority: int, max_bytes: int) -> None:
        self.send(Open(session, tenant, weight, priority, max_bytes))

    async def serve(
        self, route: Callable[[WorkerEnd, ForSession | Load, Frame], None], retire: Callable[[WorkerEnd], bool]
    ) -> None:
        """Pass on what the worker says until it is gone.

        Args:
            retire: told that it wants to leave; True lets it wait until it is told to stop.

        Raises:
            ProtocolError: it sent what is not in the vocabulary.
        """
        while (frame := await self.link.receive()) is not None:
            message = codec.decode_from_pool_worker(frame)
            if isinstance(message, ForSession | Load):
                route(self, message, frame)
            elif isinstance(message, Retire) and not retire(self):
                self.reason, self.asked = self.reason or "it left the pool", True
                return
