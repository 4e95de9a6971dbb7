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
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

from typing_extensions import assert_never

from dtorch.cluster.keys import Key
from dtorch.cluster.member import ForSession, WorkerEnd
from dtorch.cluster.meter import Meter
from dtorch.cluster.pool import Pool, Spot
from dtorch.cluster.quotas import Account
from dtorch.cluster.submitted import Batch, num_calls, upload_bytes
from dtorch.cluster.uploads import Uploads
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
    Migrating,
    Received,
    Regained,
    Send,
    Sent,
    Settled,
    Start,
    Submitted,
    Suspect,
    Vacated,
)
from dtorch.runtime.lineage import Bounds
from dtorch.transport import cluster, codec
from dtorch.transport.cluster import PART_BYTES, STREAM_WINDOW_BYTES, Part, Reserve, Submit
from dtorch.transport.codec import Frame
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import ConnectionLostError, MeshError, ProtocolError, QuotaError
from dtorch.transport.messages import (
    Allow,
    AskStatistics,
    AskTrace,
    Define,
    Done,
    Failure,
    Forget,
    Halt,
    Seed,
    SharedBlob,
    StartTrace,
    Statistics,
    Trace,
)
from dtorch.transport.numbered import ACK_BYTES

logger = logging.getLogger(__name__)

CLIENT_LIMIT_BYTES = 64 * 1024 * 1024
"""Above this, and what its workers may send unasked, the client does not read, and is cut off."""
MAX_RUNNING = 1024
"""Batches that a client may have unfinished; one that keeps to the rules has 64."""
MAX_CALLS = 1 << 16
"""In a batch, or in a program; a client that keeps to the rules sends a thousand calls at once."""
MAX_DEFINITIONS = 1 << 18
MAX_DEFINITION_BYTES = 256 * 1024 * 1024
MAX_MESHES = 1 << 14
MAX_STREAMS = 1 << 14
"""Streams of random numbers that a session may have; each takes 5 KB on each of its workers."""
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
    lineage: Bounds  # of each session
    replace_s: float  # how long a session waits for a worker in the place of a lost one, when nobody else has such devices

    def ended(self, tenancy: Tenancy) -> None:
        """The session is over and has let everything go."""
        ...

    def left(self, number: int) -> None:
        """A session has left a worker."""
        ...


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
        self._controller = Controller(number, frozenset(), self._place, home.lineage)
        self._gone: dict[int, str] = {}  # workers that are lost, and what the session had there is not placed anew yet
        self._lacking: asyncio.TimerHandle | None = None  # then: the end of the wait for another worker
        self._ready = asyncio.Event()  # the session goes on
        self._halted_at: float | None = None
        self._silent_s: float | None = None  # of the last worker that was lost
        self._uploads = Uploads()
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

    def is_on(self, number: int) -> bool:
        """Whether the session uses a worker, or has not left it yet."""
        return number in self._opened_on

    # ---- the client

    async def serve(self) -> None:
        """Do what the client says until it leaves, is gone for good, or is cut off."""
        try:
            while (frame := await self.link.receive()) is not None:
                await self._wait_until_ready()
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

    def _take(self, message: cluster.FromClient, frame: Frame) -> None:
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
                if isinstance(message, Seed) and self._num_streams_with(message) > MAX_STREAMS:
                    raise ProtocolError(f"more than {MAX_STREAMS} tasks have seeded random numbers of their own")
                before = self._controller.num_definitions
                self._say(Sent(message))
                self._definition_bytes = self._definition_bytes * self._controller.num_definitions // max(before, 1)
            case AskStatistics(_, ticket, memory, reset_peak, idle):
                self._say(Asked(ticket, memory, reset_peak, idle))
            case AskTrace(_, ticket, stop):
                self._say(AskedTrace(ticket, stop))
            case Reserve():
                self._reserve(message)
            case cluster.Migrate():
                self._migrate(message)
            case cluster.Leave():
                self._leaving = True
                self._later(LEAVE_S, self._left)
                if not self._running:
                    self._left()
            case cluster.Attach():
                raise ProtocolError("a client attaches once a connection")
            case _:
                assert_never(message)

    def _num_streams_with(self, seed: Seed) -> int:
        return len(self._controller.seeds.alive.difference(seed.ended) | {seed.stream})

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
        for program in message.programs:
            _checked(program.body)
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

    def _migrate(self, asked: cluster.Migrate) -> None:
        """Devices are to be elsewhere: let the pool place them, one after the other, and the controller follow."""
        pool = self._home.pool
        before = pool.devices_of(self.number)
        error = text = ""
        try:
            for device in asked.places[:MAX_MESH_DEVICES]:
                pool.move(self.number, device, asked.target)
        except MeshError as refused:
            error, text = type(refused).__name__, str(refused)
            pool.put_back(self.number, before)
        self.send(cluster.Reserved(asked.ticket, error, text))
        if not error:
            self._handle(Migrating(asked.ticket, asked.places))

    def vacate(self, number: int) -> None:
        """A worker drains: let the session go elsewhere, if there is anywhere else."""
        if not self.over and self._home.pool.vacate(self.number, number) and number in self._opened_on:
            self._handle_safely(Migrating(0, (), leaving=number))

    def _submit(self, asked: Submit, size_bytes: int) -> None:
        if asked.seq in self._running or len(self._running) >= MAX_RUNNING:
            raise ProtocolError(f"batch {asked.seq} is running already, or {MAX_RUNNING} others are")
        if any(isinstance(fetch.into, SharedBlob) for fetch in asked.fetches):
            raise ProtocolError("shared memory does not reach another host")
        calls = _checked(asked.body)
        refused = self.account.submit(self.number, asked.seq, calls)
        self._running[asked.seq] = size_bytes
        streams = self._uploads.take(asked.uploads)
        batch = Batch(
            asked.seq, asked.body, asked.signatures, asked.freed_meshes, asked.uploads, asked.fetches, refused, streams
        )
        self._home.meter.uploaded(self.number, upload_bytes(asked))
        if asked.fetches:
            self._home.meter.stepped(self.number)
        self._handle(Submitted(batch))

    def _forward(self, part: Part, frame: Frame) -> None:
        """Pass a part of an upload on, to the workers of the devices whose piece it is."""
        if len(part.data) > PART_BYTES:
            raise ProtocolError(f"a part of {len(part.data)} bytes is above {PART_BYTES}")
        workers = self._controller.workers_of(part.mesh, part.devices)
        if not workers:
            raise ProtocolError(f"bytes for mesh {part.mesh}, which is unknown")
        self._uploads.add(part, frame, self._home.lineage.upload_bytes - self._controller.upload_bytes)
        self._send_to(workers, frame)

    def _send_to(self, workers: Iterable[int], frame: Frame) -> None:
        for number in workers:
            worker = self._home.workers.get(number)
            if worker is not None:
                worker.send_frame(frame)

    async def _wait_until_ready(self) -> None:
        """While the session gets over a loss, or moves, its client is not read from: all that it sends comes in order."""
        while (self._gone or self._controller.is_halted) and not self.over:
            self._ready.clear()
            await self._ready.wait()

    async def _wait_for_workers(self) -> None:
        """Back-pressure: a client whose workers are behind is not read from."""
        while sum(self._running.values()) > RUNNING_BYTES and not self.over:
            self._finished.clear()
            await self._finished.wait()
        for number in tuple(self._opened_on):
            worker = self._home.workers.get(number)
            if worker is not None and worker.link.pending_bytes > (window := worker.link.pace.window_bytes):
                await worker.link.wait_below(window)

    def send(self, message: cluster.ToClient) -> None:
        self._send_frame(codec.encode(message))

    def _send_frame(self, frame: Frame) -> None:
        if self.over:
            return
        with suppress(ConnectionLostError):
            self.link.send_nowait(frame)
        if self.link.pending_bytes > CLIENT_LIMIT_BYTES + STREAM_WINDOW_BYTES * len(self._opened_on):
            self.end("ProtocolError", f"the client does not read: {self.link.pending_bytes} bytes wait for it")

    # ---- workers

    def received(self, worker: WorkerEnd, message: ForSession, frame: Frame) -> None:
        """A worker says something about this session."""
        if self.over or worker.number not in self._opened_on:
            return
        if isinstance(message, Part):
            self._home.meter.fetched(self.number, len(message.data))
            self._send_frame(frame)
            owed = self._owed[worker.number] = self._owed.get(worker.number, 0) + len(message.data)
            if owed >= STREAM_WINDOW_BYTES // 2:
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
        self._handle_safely(Received(worker.number, message))

    def worker_gone(self, number: int, reason: str, silent_s: float | None = None) -> None:
        """A worker of the pool is gone for good, for this session at least.

        Args:
            silent_s: from its last sign of life until it counted as lost; None where it said that it leaves.
        """
        if self.over:
            return
        if number in self._opened_on:
            self._gone[number] = reason
            self._silent_s = silent_s
        self.find_places()

    def find_places(self) -> None:
        """Place what the session had on workers that are gone; when there is nowhere to, wait for a worker that joins."""
        if self.over:
            return
        pool = self._home.pool
        if not pool.rehome(self.number):
            if self._lacking is None:
                self._lacking = self._later(self._home.replace_s, self._give_up)
            return
        if self._lacking is not None:
            self._lacking.cancel()
            self._timers.discard(self._lacking)
            self._lacking = None
        while self._gone:
            number = next(iter(self._gone))
            self._handle_safely(Exited(number, self._gone.pop(number)))

    def _give_up(self) -> None:
        number, reason = next(iter(self._gone.items()), (-1, "a worker was lost"))
        kinds = ", ".join(self._home.pool.kinds_wanted(self.number))
        waited = f"no worker with {kinds} devices has joined within {self._home.replace_s:g} s"
        self.end("WorkerLostError", f"{reason}; {waited}", number)

    def _grant(self) -> None:
        if self.link.pending_bytes <= self.link.pace.window_bytes:
            self._pay()
        elif self._granting is None:
            self._granting = asyncio.get_running_loop().create_task(self._grant_later())

    async def _grant_later(self) -> None:
        await self.link.wait_below(max(self.link.pace.window_bytes // 2, ACK_BYTES))
        self._granting = None
        self._pay()

    def _pay(self) -> None:
        for number, size in self._owed.items():
            worker = self._home.workers.get(number)
            if worker is not None and number in self._opened_on:
                worker.send(cluster.Credit(self.number, size))
        self._owed.clear()

    # ---- the controller

    def _place(self, kind: str, device: int) -> Spot:
        return self._home.pool.where(self.number, kind, device)

    def _handle(self, event: Event) -> None:
        """Let the controller decide, and do it. Raises ProtocolError for what cannot be right."""
        was_halted = self._controller.is_halted
        try:
            self._perform(self._controller.handle(event))
        except ProtocolError:
            raise
        except Exception as error:  # a client's bytes are looked into here, and no other session may be harmed by them
            logger.debug("session %d: %s", self.number, type(event).__name__, exc_info=True)
            raise ProtocolError(f"{type(event).__name__} names what is not there: {error!r}") from error
        if was_halted and not self._controller.is_halted:
            self._go_on()

    def _handle_safely(self, event: Event) -> None:
        """The same for what does not come from the client: whatever is wrong ends the session."""
        if self.over:
            return
        try:
            self._handle(event)
        except ProtocolError as error:
            self.end("ProtocolError", str(error))

    def _go_on(self) -> None:
        """The workers go on: those that are new get what has come of the uploads that are under way."""
        for mesh, devices, frame in self._uploads.kept():
            self._send_to(self._controller.workers_of(mesh, devices), frame)
        self._ready.set()

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
                case Suspect():
                    self._later(SUSPECT_S, partial(self._check_suspect, instruction))
                case Lost(number, reason):
                    self.end("WorkerLostError", reason, number)
                case Interrupt(number, epoch):
                    self._send_to((number,), codec.encode(Halt(self.number, epoch)))
                case Kill(number) | Vacated(number):
                    self._leave(number)
                case Halting():
                    self._halted_at = self._halted_at or asyncio.get_running_loop().time()
                case Forfeited(number, reason, tensors):
                    self.send(cluster.Forfeited(number, reason, tensors))
                case Regained():
                    self._regained(instruction)
                case _:
                    assert_never(instruction)

    def _start(self, start: Start) -> None:
        """The session begins to use a worker, which runs already."""
        worker = self._home.workers.get(start.worker)
        if worker is None:
            self._later(0.0, partial(self._handle_safely, Exited(start.worker, "it is not in the pool any more")))
            return
        key = self.key
        worker.open(self.number, key.name, key.weight, key.priority, self.account.limits.max_bytes)
        self._opened_on.add(start.worker)
        self._home.meter.entered(self.number, start.worker)
        self._perform(self._controller.handle(Joined(start.worker)))

    def _leave(self, number: int) -> None:
        """The session has nothing on a worker any more, or nothing that counts."""
        if number not in self._opened_on:
            return
        self._opened_on.discard(number)
        self._owed.pop(number, None)
        self.account.held(self.number, number, 0)
        self._home.meter.held(self.number, number, 0)
        self._send_to((number,), codec.encode(cluster.Drop(self.number)))
        self._home.left(number)

    def _regained(self, regained: Regained) -> None:
        now = asyncio.get_running_loop().time()
        halted_s = now - (self._halted_at or now)
        self._halted_at = None
        self._home.meter.repeated(self.number, regained.recomputed_ops)
        silent_s = self._silent_s if regained.lost else None
        self.send(
            cluster.Regained(
                regained.lost, regained.moved, regained.recomputed_ops, regained.copied_bytes, halted_s, regained.tickets,
                silent_s,
            )
        )

    def _check_suspect(self, suspect: Suspect) -> None:
        """A worker has lost touch with another one, and nobody's end was reported: the two do not get on."""
        if self._controller.epoch == suspect.epoch and not self._gone:
            self._home.pool.shun(self.number, suspect.worker)
            self.worker_gone(suspect.worker, suspect.reason)

    def _later(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        def run() -> None:
            self._timers.discard(timer)
            if not self.over:
                action()

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(timer)
        return timer

    # ---- the end

    def end(self, error: str, text: str, worker: int = -1) -> None:
        """The session is over: the client is told, if it is there, and everything is let go."""
        if self.over:
            return
        self.over, self.error = text or error, error
        with suppress(ConnectionLostError):  # it may be gone already
            self.link.send_nowait(codec.encode(cluster.Ended(error, text, worker)))
        self._finished.set()
        self._ready.set()
        self._uploads.clear()
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


def _checked(body: bytes) -> int:
    """How many calls are in a body. Raises ProtocolError: more than anybody sends at once."""
    found = num_calls(body)
    if found > MAX_CALLS:
        raise ProtocolError(f"{found} calls in one batch or program; {MAX_CALLS} are the most")
    return found
