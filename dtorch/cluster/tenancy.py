"""One client's session in the head: its controller, and the shell that performs what the controller decides.

Everything that a client sends is checked here, and nothing that it can send reaches another session: numbers of tensors,
meshes and signatures are looked up in its own controller, streams and answers are told apart by the session's number, and
whatever goes wrong ends this session alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import msgspec
from typing_extensions import assert_never

from dtorch.cluster.keys import Key
from dtorch.cluster.member import WINDOW_BYTES, ForSession, WorkerEnd
from dtorch.cluster.meter import Meter
from dtorch.cluster.pool import Pool
from dtorch.cluster.quotas import Account
from dtorch.runtime.controller import (
    Asked,
    AskedTrace,
    Controller,
    Counted,
    Defined,
    Event,
    Exited,
    Failed,
    Finished,
    Forfeited,
    Halting,
    Instruction,
    Interrupt,
    Joined,
    Kill,
    Lost,
    Received,
    Regained,
    Send,
    Sent,
    Settled,
    Start,
    Submitted,
    Suspect,
)
from dtorch.transport import cluster, codec
from dtorch.transport.cluster import PART_BYTES, Part, Reserve, Submit
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import ConnectionLostError, MeshError, ProtocolError, QuotaError
from dtorch.transport.messages import (
    Allow,
    AskStatistics,
    AskTrace,
    Blob,
    Define,
    Done,
    Failure,
    Fetch,
    Forget,
    MeshInfo,
    Seed,
    SharedBlob,
    StartTrace,
    Statistics,
    StreamBlob,
    Trace,
)

logger = logging.getLogger(__name__)

CLIENT_WINDOW_BYTES = 8 * 1024 * 1024
"""Sent to a client and not acknowledged: above this no worker is given credit to send it more parts."""
CLIENT_LIMIT_BYTES = 64 * 1024 * 1024
"""Above this the client does not read, and is cut off."""
MAX_RUNNING = 1024
"""Batches that a client may have unfinished; one that keeps to the rules has 64."""
MAX_DEFINITIONS = 1 << 18
MAX_DEFINITION_BYTES = 256 * 1024 * 1024
MAX_MESHES = 1 << 14
MAX_SAID = 4096
"""Messages other than batches that may be on their way to workers."""
RUNNING_BYTES = 128 * 1024 * 1024
"""Of unfinished batches: above this the client is not read from."""
TURN_FRAMES = 16
"""Frames of one client after which other clients have a turn."""
MAX_MESH_DEVICES = 4096
SUSPECT_S = 2.0
LEAVE_S = 1.0
"""How long the batches of a client that leaves may take to end by themselves."""


class Cluster(Protocol):
    """What a session needs of its head."""

    pool: Pool
    workers: dict[int, WorkerEnd]
    meter: Meter

    def ended(self, tenancy: Tenancy) -> None:
        """The session is over and has let everything go."""
        ...


class Batch(msgspec.Struct, frozen=True):
    """A client's batch as the controller takes it: its definitions came before."""

    seq: int
    body: bytes
    signatures: tuple[int, ...]
    freed_meshes: tuple[int, ...]
    uploads: tuple[Blob | SharedBlob | StreamBlob, ...]
    fetches: tuple[Fetch, ...]
    refused: str = ""
    meshes: tuple[MeshInfo, ...] = ()
    definitions: tuple[Any, ...] = ()
    programs: tuple[Any, ...] = ()


class Tenancy:
    """A session.

    Args:
        number: of the session in this head.
        key: of the client.
        account: what that key uses.
        link: to the client.
        name: for people.
    """

    def __init__(
        self, number: int, key: Key, account: Account, link: DurableLink, home: Cluster, name: str = ""
    ) -> None:
        self.number = number
        self.key = key
        self.account = account
        self.link = link
        self.name = name
        self.ticket = f"{number}.{secrets.token_urlsafe(32)}"
        self.opened = time.time()
        self.over = ""  # why it is over; "" while it is not
        self.error = ""  # then: the name of the exception that its client gets
        self._home = home
        self._controller = Controller(number, frozenset(), self._place)
        self._opened_on: set[int] = set()  # workers that know of the session
        self._running: dict[int, int] = {}  # batch -> bytes of its frame
        self._finished = asyncio.Event()  # some batch is, or the session is over
        self._leaving = False
        self._definition_bytes = 0  # of the live definitions, roughly
        self._num_said = 0
        self._num_frames = 0
        self._owed: dict[int, int] = {}  # credit that workers get once the client has read: worker -> bytes
        self._granting: asyncio.Task[None] | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    # ---- the client

    async def serve(self) -> None:
        """Do what the client says until it leaves, is gone for good, or is cut off."""
        try:
            while (frame := await self.link.receive()) is not None:
                if self.over:  # said before it knew; what counts now is that it acknowledges
                    continue
                self._take(codec.decode_from_client(frame), frame)
                await self._wait_for_workers()
                self._num_frames += 1
                if self._num_frames % TURN_FRAMES == 0:
                    await asyncio.sleep(0)
            self.end("ConnectionLostError", self.link.reason or "the client is gone")
        except ProtocolError as error:
            self.end("ProtocolError", str(error))
        except Exception as error:  # ours or the client's doing: no other session may be harmed by it
            logger.exception("session %d failed", self.number)
            self.end("ConnectionLostError", f"the head failed: {type(error).__name__}: {error}")

    def _take(self, message: cluster.FromClient, frame: bytes) -> None:
        if not isinstance(message, cluster.Attach) and message.session != self.number:
            raise ProtocolError(f"session {self.number} speaks for session {message.session}")
        match message:
            case Submit():
                self._submit(message, len(frame))
            case Part():
                self._forward(message, frame)
            case Define():
                self._define(message, len(frame))
            case Seed() | Forget() | Allow() | StartTrace():
                before = self._controller.num_definitions
                self._say(Sent(message))
                self._definition_bytes = self._definition_bytes * self._controller.num_definitions // max(before, 1)
            case AskStatistics(_, ticket, memory, reset_peak):
                self._say(Asked(ticket, memory, reset_peak))
            case AskTrace(_, ticket, stop):
                self._say(AskedTrace(ticket, stop))
            case Reserve():
                self._reserve(message)
            case cluster.Leave():
                self._leaving = True
                self._later(LEAVE_S, self._left)
                if not self._running:
                    self._left()
            case cluster.Attach():
                raise ProtocolError("a client attaches once a connection")
            case _:
                assert_never(message)

    def _say(self, event: Sent | Asked | AskedTrace) -> None:
        self._num_said += 1
        if self._num_said > MAX_SAID:
            raise ProtocolError(f"more than {MAX_SAID} messages are on their way, and no batch has finished meanwhile")
        self._handle(event)

    def _define(self, message: Define, size_bytes: int) -> None:
        self._definition_bytes += size_bytes
        num = self._controller.num_definitions + len(message.definitions) + len(message.programs)
        if num > MAX_DEFINITIONS or self._definition_bytes > MAX_DEFINITION_BYTES:
            raise ProtocolError(f"{num} signatures of {self._definition_bytes} bytes are defined and not forgotten")
        if self._controller.num_meshes + len(message.meshes) > MAX_MESHES:
            raise ProtocolError(f"more than {MAX_MESHES} meshes")
        for mesh in message.meshes:
            if mesh.workers or mesh.locals:
                raise ProtocolError("a client does not say where devices are")
            if min(mesh.shape, default=1) < 1 or math.prod(mesh.shape) != len(set(mesh.devices)) or (
                len(set(mesh.devices)) != len(mesh.devices)
            ):
                raise ProtocolError(f"mesh {mesh.mesh} of shape {mesh.shape} does not fit its devices")
        self._handle(Defined(message.meshes, message.definitions, message.programs))

    def _left(self) -> None:
        self.end("SessionClosedError", "the client has left")

    def _reserve(self, asked: Reserve) -> None:
        error = text = ""
        if len(asked.devices) > MAX_MESH_DEVICES or any(device < 0 for device in asked.devices):
            raise ProtocolError(f"a mesh has at most {MAX_MESH_DEVICES} devices, and their numbers are not negative")
        before = {d for d in self._home.pool.devices_of(self.number) if d[0] == asked.kind}
        new = tuple(d for d in asked.devices if (asked.kind, d) not in before)
        try:
            self.account.reserve(self.number, asked.kind, new)
            try:
                self._home.pool.reserve(self.number, asked.kind, new)
            except MeshError:
                self.account.unreserve(self.number, asked.kind, new)
                raise
        except (QuotaError, MeshError) as refused:
            error, text = type(refused).__name__, str(refused)
        self.send(cluster.Reserved(asked.ticket, error, text))

    def _submit(self, asked: Submit, size_bytes: int) -> None:
        if asked.seq in self._running or len(self._running) >= MAX_RUNNING:
            raise ProtocolError(f"batch {asked.seq} is running already, or {MAX_RUNNING} others are")
        if any(isinstance(fetch.into, SharedBlob) for fetch in asked.fetches):
            raise ProtocolError("shared memory does not reach another host")
        refused = self.account.submit(self.number, asked.seq, num_calls(asked.body))
        self._running[asked.seq] = size_bytes
        batch = Batch(
            asked.seq, asked.body, asked.signatures, asked.freed_meshes, asked.uploads, asked.fetches, refused
        )
        self._home.meter.uploaded(self.number, _upload_bytes(asked))
        if asked.fetches:
            self._home.meter.stepped(self.number)
        self._handle(Submitted(batch))

    def _forward(self, part: Part, frame: bytes) -> None:
        """Pass a part of an upload on, to the workers of the devices whose piece it is."""
        if len(part.data) > PART_BYTES:
            raise ProtocolError(f"a part of {len(part.data)} bytes is above {PART_BYTES}")
        workers = self._controller.workers_of(part.mesh, part.devices)
        if not workers:
            raise ProtocolError(f"bytes for mesh {part.mesh}, which is unknown")
        for number in workers:
            worker = self._home.workers.get(number)
            if worker is not None:
                worker.send_frame(frame)

    async def _wait_for_workers(self) -> None:
        """Back-pressure: a client whose workers are behind is not read from."""
        while sum(self._running.values()) > RUNNING_BYTES and not self.over:
            self._finished.clear()
            await self._finished.wait()
        for number in tuple(self._opened_on):
            worker = self._home.workers.get(number)
            if worker is not None and worker.link.pending_bytes > WINDOW_BYTES:
                await worker.link.wait_below(WINDOW_BYTES)

    def send(self, message: cluster.ToClient) -> None:
        self._send_frame(codec.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        if self.over:
            return
        with suppress(ConnectionLostError):
            self.link.send_nowait(frame)
        if self.link.pending_bytes > CLIENT_LIMIT_BYTES:
            self.end("ProtocolError", f"the client does not read: {self.link.pending_bytes} bytes wait for it")

    # ---- workers

    def received(self, worker: WorkerEnd, message: ForSession, frame: bytes) -> None:
        """A worker says something about this session."""
        if self.over or worker.number not in self._opened_on:
            return
        if isinstance(message, Part):
            self._home.meter.fetched(self.number, len(message.data))
            self._send_frame(frame)
            self._owed[worker.number] = self._owed.get(worker.number, 0) + len(message.data)
            self._grant()
            return
        if isinstance(message, Failure) and message.index < 0 and message.error < 0:
            self.end("ProtocolError", f"worker {worker.member.name} cannot go on with this session: {message.text}")
            return
        if isinstance(message, Done):
            self.account.held(self.number, worker.number, message.held_bytes)
            self._home.meter.held(self.number, worker.number, message.held_bytes)
            if message.values:
                self._home.meter.fetched(self.number, sum(len(p.data or b"") for v in message.values for p in v.pieces))
        try:
            self._handle(Received(worker.number, message))
        except ProtocolError as error:
            self.end("ProtocolError", str(error))

    def worker_gone(self, number: int, reason: str) -> None:
        """A worker of the pool is gone for good."""
        if number not in self._opened_on or self.over:
            return
        self._opened_on.discard(number)
        self.account.held(self.number, number, 0)
        try:
            self._handle(Exited(number, reason))
        except ProtocolError as error:
            self.end("ProtocolError", str(error))

    def _grant(self) -> None:
        if self.link.pending_bytes <= CLIENT_WINDOW_BYTES:
            self._pay()
        elif self._granting is None:
            self._granting = asyncio.get_running_loop().create_task(self._grant_later())

    async def _grant_later(self) -> None:
        await self.link.wait_below(CLIENT_WINDOW_BYTES // 2)
        self._granting = None
        self._pay()

    def _pay(self) -> None:
        for number, size in self._owed.items():
            worker = self._home.workers.get(number)
            if worker is not None and number in self._opened_on:
                worker.send(cluster.Credit(self.number, size))
        self._owed.clear()

    # ---- the controller

    def _place(self, kind: str, device: int) -> tuple[int, int]:
        return self._home.pool.where(self.number, kind, device)

    def _handle(self, event: Event) -> None:
        """Let the controller decide, and do it. Raises ProtocolError for what cannot be right."""
        try:
            self._perform(self._controller.handle(event))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError(f"{type(event).__name__} names what is not there: {error!r}") from error

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(number, frame):
                    worker = self._home.workers.get(number)
                    if worker is not None:
                        worker.send_frame(frame)
                case Finished(seq):
                    self._running.pop(seq, None)
                    self._num_said = 0
                    self._finished.set()
                    self.account.finished(self.number, seq)
                    self.send(cluster.Finished(seq))
                    if self._leaving and not self._running:
                        self._later(0.0, self._left)
                case Settled(ticket, values, error):
                    self.send(cluster.Answer(ticket, values, error))
                case Counted(ticket, answers):
                    self._num_said = 0
                    statistics = tuple(a for a in answers if isinstance(a, Statistics))
                    traces = tuple(a for a in answers if isinstance(a, Trace))
                    self.send(cluster.Traces(ticket, traces) if traces else cluster.Counts(ticket, statistics))
                case Failed(number, failure):
                    worker = self._home.workers.get(number)
                    self._home.meter.failed(
                        self.number, "" if worker is None else worker.member.name, failure.kind, failure.text
                    )
                    self.send(cluster.CallFailed(number, failure))
                case Start():
                    self._start(instruction)
                case Suspect(number, reason):
                    self._later(SUSPECT_S, partial(self.worker_gone, number, reason))
                case Lost(number, reason):
                    self.end("WorkerLostError", reason, number)
                case Interrupt() | Kill() | Halting() | Forfeited() | Regained():
                    raise AssertionError("only a controller that recovers says so")
                case _:
                    assert_never(instruction)

    def _start(self, start: Start) -> None:
        """The session begins to use a worker, which runs already."""
        worker = self._home.workers.get(start.worker)
        if worker is None:
            self._later(0.0, lambda: self._handle(Exited(start.worker, "it is not in the pool any more")))
            return
        key = self.key
        worker.open(self.number, key.name, key.weight, key.priority, self.account.limits.max_bytes)
        self._opened_on.add(start.worker)
        self._home.meter.entered(self.number, start.worker)
        self._perform(self._controller.handle(Joined(start.worker)))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            if not self.over:
                action()

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(timer)

    # ---- the end

    def end(self, error: str, text: str, worker: int = -1) -> None:
        """The session is over: the client is told, if it is there, and everything is let go."""
        if self.over:
            return
        self.over, self.error = text or error, error
        with suppress(ConnectionLostError):  # it may be gone already
            self.link.send_nowait(codec.encode(cluster.Ended(error, text, worker)))
        self._finished.set()
        for number in self._opened_on:
            end = self._home.workers.get(number)
            if end is not None:
                end.send(cluster.Drop(self.number))
        self._opened_on.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._granting is not None:
            self._granting.cancel()
        self._home.pool.release(self.number)
        self.account.close(self.number)
        self._home.ended(self)


def _upload_bytes(asked: Submit) -> int:
    return sum(len(blob.data) if isinstance(blob, Blob) else blob.size_bytes for blob in asked.uploads)


def num_calls(body: bytes) -> int:
    """Calls in a batch's body, read from its first bytes: msgpack of [calls, frees].

    Raises:
        ProtocolError: it does not begin like a body.
    """
    if len(body) >= 2 and body[0] == 0x92:
        kind = body[1]
        if kind & 0xF0 == 0x90:
            return kind & 0x0F
        if kind in (0xDC, 0xDD):
            size = 2 if kind == 0xDC else 4
            return int.from_bytes(body[2 : 2 + size], "big")
    raise ProtocolError("a batch's body is not what it should be")
