"""The controller's decisions: which worker gets which bytes, when a value is complete, what a lost worker means. Pure.

Events in, instructions out; the shell (``shell.py``) performs the instructions. The controller reads the headers of
batches, never their calls, and never touches tensor data.

A worker goes STARTING -> READY -> GONE. Frames for a worker that is still starting wait in ``_Worker.queue`` in program
order; everything a worker receives is a subsequence of the one program order.

A worker that starts late is told every live definition first: the batches that it gets contain calls that are not its
own, and random ops are drawn by all workers alike.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from typing_extensions import assert_never

from dtorch.transport.codec import encode
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import (
    Allow,
    AskRandomState,
    AskStatistics,
    AskTrace,
    Batch,
    Blob,
    Define,
    Definition,
    Done,
    Failure,
    Fetch,
    Forget,
    FromWorker,
    Hello,
    MeshInfo,
    Program,
    RandomState,
    Seed,
    SharedBlob,
    StartTrace,
    Statistics,
    Stop,
    StreamBlob,
    Trace,
    Value,
)

# ---- events


MAX_BODIES = 256
"""Bodies of batches remembered with the meshes that they touch."""


class Submission(Protocol):
    """A batch as the controller sees it: all but its calls. The recorder's ``Outgoing`` is one."""

    @property
    def seq(self) -> int: ...
    @property
    def body(self) -> bytes: ...
    @property
    def meshes(self) -> tuple[MeshInfo, ...]: ...
    @property
    def definitions(self) -> tuple[Definition, ...]: ...
    @property
    def programs(self) -> tuple[Program, ...]: ...
    @property
    def uploads(self) -> tuple[Blob | SharedBlob | StreamBlob, ...]: ...
    @property
    def fetches(self) -> tuple[Fetch, ...]: ...
    @property
    def freed_meshes(self) -> tuple[int, ...]: ...
    @property
    def signatures(self) -> Collection[int]: ...
    @property
    def refused(self) -> str: ...


@dataclass(frozen=True)
class Submitted:
    """The client sent a batch."""

    batch: Submission


@dataclass(frozen=True)
class Defined:
    """The client announced meshes and signatures ahead of the batch that uses them."""

    meshes: tuple[MeshInfo, ...]
    definitions: tuple[Definition, ...]
    programs: tuple[Program, ...]


@dataclass(frozen=True)
class Sent:
    """The client sent a message for all workers, in program order."""

    message: Seed | Forget | Allow | StartTrace


@dataclass(frozen=True)
class Asked:
    """The client wants every worker's statistics."""

    ticket: int
    memory: bool
    reset_peak: bool


@dataclass(frozen=True)
class AskedTrace:
    """The client wants every worker's clock and, with ``stop``, what it noted since the profile began."""

    ticket: int
    stop: bool


@dataclass(frozen=True)
class Joined:
    worker: int


@dataclass(frozen=True)
class Received:
    worker: int
    message: FromWorker


@dataclass(frozen=True)
class Exited:
    worker: int
    reason: str


@dataclass(frozen=True)
class Closing:
    pass


Event = Submitted | Defined | Sent | Asked | AskedTrace | Joined | Received | Exited | Closing

# ---- instructions


@dataclass(frozen=True)
class Start:
    """Start a process for these devices."""

    worker: int
    kind: str
    device: int
    shared: bool  # it hosts every CPU device that has no worker of its own


@dataclass(frozen=True)
class Send:
    worker: int
    frame: bytes


@dataclass(frozen=True)
class Finished:
    """Every worker concerned has executed batch ``seq``."""

    seq: int


@dataclass(frozen=True)
class Settled:
    """All parts of a fetch are here; ``error`` is (worker, failure number) when the value is poisoned."""

    ticket: int
    values: tuple[Value, ...]
    error: tuple[int, int] | None


@dataclass(frozen=True)
class Counted:
    """All workers have answered a request for statistics or for what they noted."""

    ticket: int
    answers: tuple[Statistics, ...] | tuple[Trace, ...]


@dataclass(frozen=True)
class Failed:
    """A call failed on a worker."""

    worker: int
    failure: Failure


@dataclass(frozen=True)
class Suspect:
    """A worker lost touch with another one. That one's end will be reported; if it is not, this worker's is assumed."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Lost:
    """A worker ended on its own: the session is over."""

    worker: int
    reason: str


Instruction = Start | Send | Finished | Settled | Counted | Failed | Suspect | Lost


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


@dataclass
class _Worker:
    number: int
    phase: Phase = Phase.STARTING
    queue: list[bytes] = field(default_factory=list)
    awaits_random_state: bool = False  # its queue waits for another worker's generator state
    last_words: str = ""  # why it is about to end, in its own words


@dataclass
class _Fetch:
    waiting: set[int]
    values: list[Value] = field(default_factory=list)


class Controller:
    """State of one session's control.

    Args:
        session: number carried by every message.
        shared_kinds: device kinds whose devices all live in worker 0; other kinds get one worker a device.
        place: where workers are not the session's own: (kind, device) -> worker, and the device's number there.
    """

    def __init__(
        self,
        session: int,
        shared_kinds: frozenset[str],
        place: Callable[[str, int], tuple[int, int]] | None = None,
    ) -> None:
        self.session = session
        self._shared_kinds = shared_kinds
        self._place = place
        self._locals: dict[tuple[str, int], int] = {}  # a device's number on its worker, where ``place`` says so
        self._workers: dict[int, _Worker] = {}
        self._hosts: dict[tuple[str, int], int] = {}
        self._mesh_workers: dict[int, tuple[int, ...]] = {}
        self._signature_mesh: dict[int, tuple[int, ...]] = {}
        self._meshes: list[MeshInfo] = []
        self._definitions: dict[int, Definition] = {}  # the live ones, for workers that start late
        self._programs: dict[int, Program] = {}
        self._running: dict[int, set[int]] = {}  # batch -> workers that have not finished it
        self._fetches: dict[int, _Fetch] = {}
        self._asked: dict[int, tuple[set[int], list[Any]]] = {}
        self._random_askers: dict[int, int] = {}  # ticket -> worker that waits for the state
        self._next_ticket = -1
        self._seed: Seed | None = None
        self._allow: Allow | None = None
        self._tracing: StartTrace | None = None
        self._bodies: dict[bytes, frozenset[int] | None] = {}  # of batches -> meshes that their calls touch
        self._has_random = False  # some random op is known
        self._drawn = False  # some random op has run since the last seed
        self._closing = False
        self._torn = False  # workers lost touch with each other: errors now are echoes of an end still to be reported
        self.num_sends = 0
        self.bytes_sent = 0

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(w.number for w in self._workers.values() if w.phase is not Phase.GONE)

    def worker_of(self, kind: str, device: int) -> int | None:
        return self._hosts.get((kind, device))

    @property
    def num_definitions(self) -> int:
        """Definitions and programs that are live."""
        return len(self._definitions) + len(self._programs)

    @property
    def num_meshes(self) -> int:
        return len(self._meshes)

    def workers_of(self, mesh: int) -> tuple[int, ...]:
        """The workers that host a mesh's devices; () when it is unknown."""
        return self._mesh_workers.get(mesh, ())

    def is_starting(self, worker: int) -> bool:
        """Was it asked for, and has neither joined nor ended?"""
        found = self._workers.get(worker)
        return found is not None and found.phase is Phase.STARTING

    def handle(self, event: Event) -> list[Instruction]:
        """What is to be done about an event. Raises ProtocolError when a worker sent what cannot be right."""
        match event:
            case Submitted(batch):
                return self._submitted(batch)
            case Defined(meshes, definitions, programs):
                return self._define(meshes, definitions, programs)
            case Sent(message):
                if isinstance(message, Seed):
                    self._seed, self._drawn = message, False
                elif isinstance(message, Allow):
                    self._allow = message
                elif isinstance(message, StartTrace):
                    self._tracing = message
                elif isinstance(message, Forget):
                    self._signature_mesh = {s: m for s, m in self._signature_mesh.items() if s >= message.sig}
                    self._definitions = {s: d for s, d in self._definitions.items() if s >= message.sig}
                    self._bodies.clear()
                    self._programs = {n: p for n, p in self._programs.items() if n >= message.sig}
                return self._broadcast(encode(message), self.workers)
            case Asked(ticket, memory, reset_peak):
                return self._ask(AskStatistics(self.session, ticket, memory, reset_peak))
            case AskedTrace(ticket, stop):
                if stop:
                    self._tracing = None
                return self._ask(AskTrace(self.session, ticket, stop))
            case Joined(worker):
                return self._joined(worker)
            case Received(worker, message):
                return self._received(worker, message)
            case Exited(worker, reason):
                return self._exited(worker, reason)
            case Closing():
                self._closing = True
                return self._broadcast(encode(Stop()), self.workers)
        assert_never(event)

    # ---- from the client

    def _define(
        self, meshes: tuple[MeshInfo, ...], definitions: tuple[Definition, ...], programs: tuple[Program, ...]
    ) -> list[Instruction]:
        out: list[Instruction] = []
        meshes_made = []
        for mesh in meshes:
            out += self._add_mesh(mesh)
            meshes_made.append(self._meshes[-1])
        for definition in definitions:
            self._signature_mesh[definition.sig] = self._meshes_of(definition)
            self._definitions[definition.sig] = definition
        for program in programs:
            self._programs[program.sig] = program
            if self._signature_mesh[program.sig]:
                self._signature_mesh[program.sig] = program.meshes
        return out + self._broadcast(encode(Define(self.session, tuple(meshes_made), definitions, programs)), self.workers)

    def _submitted(self, batch: Submission) -> list[Instruction]:
        out: list[Instruction] = []
        if batch.meshes or batch.definitions or batch.programs:
            out += self._define(batch.meshes, batch.definitions, batch.programs)
        if not self._drawn and self._has_random:
            self._drawn = self._touched(batch) is None
        meshes, concerned = self._concerned(batch)
        frame = encode(Batch(self.session, batch.seq, meshes, batch.body, batch.uploads, batch.fetches, batch.refused))
        for fetch in batch.fetches:
            self._fetches[fetch.ticket] = _Fetch(set(self._mesh_workers[fetch.mesh]))
        if concerned:
            self._running[batch.seq] = set(concerned)
        else:
            out.append(Finished(batch.seq))
        return out + self._broadcast(frame, concerned)

    def _meshes_of(self, definition: Definition) -> tuple[int, ...]:
        if definition.params.get("random"):
            self._has_random = True
            return ()
        layouts = (*definition.inputs, *definition.outputs)
        return tuple(sorted({layout.mesh for layout in layouts}))

    def _concerned(self, batch: Submission) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Meshes that a batch touches and the workers that hold their devices; () stands for all meshes."""
        everyone = self.workers
        if len(everyone) <= 1:
            return (), everyone
        meshes: set[int] = {fetch.mesh for fetch in batch.fetches}
        meshes.update(batch.freed_meshes)
        touched = self._touched(batch)
        if touched is None:
            return (), everyone
        meshes.update(touched)
        return tuple(sorted(meshes)), tuple(sorted({w for mesh in meshes for w in self._mesh_workers[mesh]}))

    def _touched(self, batch: Submission) -> frozenset[int] | None:
        """Meshes that the calls of a batch touch, None for all: worked out once for a body, so that a batch that was seen
        before costs the same however many calls it has."""
        try:
            return self._bodies[batch.body]
        except KeyError:
            pass
        meshes = [self._signature_mesh[signature] for signature in batch.signatures]
        found = frozenset(mesh for several in meshes for mesh in several) if all(meshes) else None
        if len(self._bodies) >= MAX_BODIES:
            del self._bodies[next(iter(self._bodies))]
        self._bodies[batch.body] = found
        return found

    def _add_mesh(self, mesh: MeshInfo) -> list[Instruction]:
        out: list[Instruction] = []
        hosts, numbers = [], []
        for device in mesh.devices:
            place = (mesh.kind, device)
            if place not in self._hosts:
                out += self._host(place)
            hosts.append(self._hosts[place])
            numbers.append(self._locals.get(place, device))
        local = tuple(numbers) if self._locals else ()
        self._meshes.append(msgspec.structs.replace(mesh, workers=tuple(hosts), locals=local))
        self._mesh_workers[mesh.mesh] = tuple(sorted(set(hosts)))
        return out

    def _host(self, place: tuple[str, int]) -> list[Instruction]:
        kind, device = place
        shared = kind in self._shared_kinds
        if self._place is not None:
            number, self._locals[place] = self._place(kind, device)
        else:
            number = 0 if shared else max([0, *self._workers]) + 1
        self._hosts[place] = number
        if number in self._workers:
            return []
        worker = _Worker(number)
        out: list[Instruction] = [Start(number, kind, device, shared)]
        elders = [w for w in self._workers.values() if w.phase is not Phase.GONE]
        self._workers[number] = worker
        if self._allow is not None:
            worker.queue.append(encode(self._allow))
        if self._tracing is not None:
            worker.queue.append(encode(self._tracing))
        if self._meshes:
            known = Define(
                self.session, tuple(self._meshes), tuple(self._definitions.values()), tuple(self._programs.values())
            )
            worker.queue.append(encode(known))
        if self._drawn and elders:
            worker.awaits_random_state = True
            self._random_askers[self._next_ticket] = number
            out += self._broadcast(encode(AskRandomState(self.session, self._next_ticket)), (elders[0].number,))
            self._next_ticket -= 1
        elif self._seed is not None:
            worker.queue.append(encode(self._seed))
        return out

    def _broadcast(self, frame: bytes, workers: tuple[int, ...]) -> list[Instruction]:
        out: list[Instruction] = []
        for number in workers:
            worker = self._workers[number]
            if worker.phase is Phase.READY and not worker.awaits_random_state:
                self.num_sends += 1
                self.bytes_sent += len(frame)
                out.append(Send(number, frame))
            elif worker.phase is not Phase.GONE:
                worker.queue.append(frame)
        return out

    def _ask(self, question: AskStatistics | AskTrace) -> list[Instruction]:
        workers = self.workers
        if not workers:
            return [Counted(question.ticket, ())]
        self._asked[question.ticket] = (set(workers), [])
        return self._broadcast(encode(question), workers)

    # ---- from workers

    def _joined(self, number: int) -> list[Instruction]:
        worker = self._workers.get(number)
        if worker is None or worker.phase is not Phase.STARTING:
            return []
        worker.phase = Phase.READY
        return self._drain(worker)

    def _drain(self, worker: _Worker) -> list[Instruction]:
        if worker.phase is not Phase.READY or worker.awaits_random_state:
            return []
        frames, worker.queue = worker.queue, []
        self.num_sends += len(frames)
        self.bytes_sent += sum(map(len, frames))
        return [Send(worker.number, frame) for frame in frames]

    def _received(self, worker: int, message: FromWorker) -> list[Instruction]:
        match message:
            case Done(_, seq, _, values):
                out: list[Instruction] = []
                for value in values:
                    out += self._value(worker, value.ticket, value)
                running = self._running.get(seq)
                if running is not None:
                    running.discard(worker)
                    if not running:
                        del self._running[seq]
                        out.append(Finished(seq))
                return out
            case Failure():
                return self._failure(worker, message)
            case Statistics() | Trace():
                ticket = message.ticket
                if ticket not in self._asked:
                    raise ProtocolError(f"worker {worker} answers question {ticket}, which nobody asked")
                waiting, got = self._asked[ticket]
                waiting.discard(worker)
                got.append(message)
                if waiting:
                    return []
                del self._asked[ticket]
                return [Counted(ticket, tuple(got))]
            case RandomState(_, ticket, _):
                if ticket not in self._random_askers:
                    raise ProtocolError(f"worker {worker} answers question {ticket}, which nobody asked")
                waiter = self._workers[self._random_askers.pop(ticket)]
                waiter.awaits_random_state = False
                waiter.queue.insert(0, encode(message))
                return self._drain(waiter)
            case Hello():
                return []
        assert_never(message)

    def _failure(self, worker: int, failure: Failure) -> list[Instruction]:
        if failure.index < 0 and failure.error < 0:
            self._workers[worker].last_words = failure.trace or failure.text
            return []
        if failure.kind == "ConnectionLostError":
            self._torn = True
            return [Suspect(worker, failure.text)]
        return [] if self._torn else [Failed(worker, failure)]

    def _value(self, worker: int, ticket: int, value: Value) -> list[Instruction]:
        fetch = self._fetches.get(ticket)
        if fetch is None:
            return []
        fetch.waiting.discard(worker)
        fetch.values.append(value)
        if fetch.waiting:
            return []
        if self._torn and any(v.error is not None for v in fetch.values):
            return []  # whoever waits will be told of the worker that is gone, not of what that did to others
        del self._fetches[ticket]
        errors = [(v.worker, v.error) for v in fetch.values if v.error is not None]
        known = [(w, e) for w, e in errors if e >= 0] or errors
        return [Settled(ticket, tuple(fetch.values), known[0] if known else None)]

    def _exited(self, number: int, reason: str) -> list[Instruction]:
        worker = self._workers.get(number)
        if worker is None or worker.phase is Phase.GONE:
            return []
        worker.phase = Phase.GONE
        worker.queue.clear()
        if worker.last_words:
            reason = f"{reason}; its last words: {worker.last_words.rstrip()}"
        return [] if self._closing else [Lost(number, reason)]
