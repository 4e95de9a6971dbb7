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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from typing_extensions import assert_never

from dtorch.runtime.awaited import Awaited
from dtorch.runtime.events import (
    PRINTED,
    Asked,
    AskedTrace,
    Closing,
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
    Place,
    Received,
    Regained,
    Send,
    Sent,
    Settled,
    Start,
    Submission,
    Submitted,
    Suspect,
    Vacated,
)
from dtorch.runtime.lineage import Bounds
from dtorch.runtime.recovery import Recovery
from dtorch.runtime.seeds import Seeds
from dtorch.runtime.touching import Touching
from dtorch.transport.codec import Frame, encode
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import (
    Allow,
    AskRandomState,
    AskStatistics,
    AskTrace,
    Batch,
    Define,
    Definition,
    Done,
    Failure,
    Forget,
    FromWorker,
    Held,
    Hello,
    MeshInfo,
    Pong,
    Program,
    RandomState,
    Resumed,
    Seed,
    Snapshots,
    StartTrace,
    Statistics,
    Stop,
    Trace,
)

__all__ = [
    "Asked", "AskedTrace", "Closing", "Controller", "Counted", "Defined", "Event", "Exited", "Failed", "Finished",
    "Forfeited", "Halting", "Instruction", "Interrupt", "Joined", "Kill", "Lost", "Migrating", "Received", "Regained",
    "Send", "Sent", "Settled", "Start", "Submission", "Submitted", "Suspect", "Vacated",
]  # fmt: skip


_WAIT = (Submitted, Defined, Sent, Asked, AskedTrace, Migrating)
"""What waits while the workers are halted: everything from the client but the end."""


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


@dataclass
class _Worker:
    number: int
    phase: Phase = Phase.STARTING
    queue: list[Frame] = field(default_factory=list)
    awaits_random_state: bool = False  # its queue waits for another worker's generator state
    last_words: str = ""  # why it is about to end, in its own words
    start: Start | None = None  # how it was started


class Controller:
    """State of one session's control.

    Args:
        session: number carried by every message.
        shared_kinds: device kinds whose devices all live in worker 0; other kinds get one worker a device.
        place: where workers are not the session's own: (kind, device) -> worker, and which device that is there. Asked anew
            when a worker is lost, and when devices are to move.
        recover: how much to remember, so that the session can go on when a worker is lost; None: it ends then.
    """

    def __init__(
        self,
        session: int,
        shared_kinds: frozenset[str],
        place: Callable[[str, int], tuple[int, Place]] | None = None,
        recover: Bounds | None = None,
    ) -> None:
        self.session = session
        self._place = place
        self._recovery = None if recover is None else Recovery(self, recover)
        self._shared_worker = 0
        self._shared_kinds = shared_kinds
        self._locals: dict[tuple[str, int], int] = {}  # a device's number on its worker, where ``place`` says so
        self._workers: dict[int, _Worker] = {}
        self.hosts: dict[Place, int] = {}
        self._mesh_workers: dict[int, tuple[int, ...]] = {}
        self._touching = Touching()
        self.meshes: list[MeshInfo] = []
        self._definitions: dict[int, Definition] = {}  # the live ones, for workers that start late
        self._programs: dict[int, Program] = {}
        self.running: dict[int, set[int]] = {}  # batch -> workers that have not finished it
        self.awaited = Awaited()
        self._asked: dict[int, tuple[set[int], list[Any]]] = {}
        self._random_askers: dict[int, int] = {}  # ticket -> worker that waits for the state
        self._next_ticket = -1
        self.seeds = Seeds()
        self._allow: Allow | None = None
        self._tracing: StartTrace | None = None
        self._closing = False
        self._torn = False  # workers lost touch with each other: errors now are echoes of an end still to be reported
        self.num_sends = 0
        self.bytes_sent = 0

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(w.number for w in self._workers.values() if w.phase is not Phase.GONE)

    def worker_of(self, kind: str, device: int) -> int | None:
        return self.hosts.get((kind, device))

    @property
    def is_halted(self) -> bool:
        """Whether the workers stand still, for a loss or a move. What the client says meanwhile would have to wait."""
        return self._recovery is not None and self._recovery.active

    @property
    def is_placed(self) -> bool:
        """Whether somebody else says where devices are."""
        return self._place is not None

    @property
    def upload_bytes(self) -> int:
        """Of uploads that are remembered."""
        return 0 if self._recovery is None else self._recovery.lineage.upload_bytes

    @property
    def num_definitions(self) -> int:
        """Definitions and programs that are live."""
        return len(self._definitions) + len(self._programs)

    @property
    def num_meshes(self) -> int:
        return len(self.meshes)

    def workers_of(self, mesh: int, devices: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The workers that host a mesh's devices, or some of them; () when it is unknown."""
        found = self._mesh_workers.get(mesh, ())
        if not devices or len(found) < 2:
            return found
        kind = next(m.kind for m in self.meshes if m.mesh == mesh)
        return tuple(sorted({self.hosts[kind, d] for d in devices if (kind, d) in self.hosts}))

    def is_starting(self, worker: int) -> bool:
        """Was it asked for, and has neither joined nor ended?"""
        found = self._workers.get(worker)
        return found is not None and found.phase is Phase.STARTING

    def handle(self, event: Event) -> list[Instruction]:
        """What is to be done about an event. Raises ProtocolError when a worker sent what cannot be right."""
        recovery = self._recovery
        if recovery is not None and recovery.active and isinstance(event, _WAIT):
            recovery.held_back.append(event)
            return []
        match event:
            case Submitted(batch):
                return self._submitted(batch)
            case Defined(meshes, definitions, programs):
                return self._define(meshes, definitions, programs)
            case Sent(message):
                if isinstance(message, Seed):
                    if message.seed is None and message.stream not in {0, self.seeds.stream, *self.seeds.alive}:
                        raise ProtocolError(f"stream {message.stream} of random numbers was never seeded")
                    self.seeds.mark(message)
                    self.seeds.ended.clear()
                    if recovery is not None:
                        recovery.lineage.seeded(message)
                elif isinstance(message, Allow):
                    self._allow = message
                elif isinstance(message, StartTrace):
                    self._tracing = message
                elif isinstance(message, Forget):
                    self._touching.forget(message.sig)
                    self._definitions = {s: d for s, d in self._definitions.items() if s >= message.sig}
                    self._programs = {n: p for n, p in self._programs.items() if n >= message.sig}
                    if recovery is not None:
                        recovery.lineage.forget(message.sig)
                return self._broadcast(encode(message), self.workers)
            case Asked(ticket, memory, reset_peak, idle):
                return self._ask(AskStatistics(self.session, ticket, memory, reset_peak, idle))
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
            case Migrating():
                if recovery is None:
                    raise ProtocolError("devices move only in a session that recovers")
                return recovery.migrate(event)
            case Closing():
                self._closing = True
                if recovery is not None:
                    recovery.lineage.clear()
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
            meshes_made.append(self.meshes[-1])
        for definition in definitions:
            self._touching.define(definition)
            self._definitions[definition.sig] = definition
        for program in programs:
            self._programs[program.sig] = program
            self._touching.add_program(program)
        if self._recovery is not None:
            self._recovery.lineage.define(definitions, programs)
        return out + self._broadcast(encode(Define(self.session, tuple(meshes_made), definitions, programs)), self.workers)

    def _submitted(self, batch: Submission) -> list[Instruction]:
        out: list[Instruction] = []
        if batch.meshes or batch.definitions or batch.programs:
            out += self._define(batch.meshes, batch.definitions, batch.programs)
        if self._touching.has_random and self._touching.of(batch) is None:
            self.seeds.draw()
        meshes, concerned = self._concerned(batch)
        frame = encode(Batch(self.session, batch.seq, meshes, batch.body, batch.uploads, batch.fetches, batch.refused))
        for fetch in batch.fetches:
            self.awaited.add(batch.seq, fetch, self._mesh_workers[fetch.mesh])
        if self._recovery is not None:
            self._recovery.submitted(batch)
        if concerned:
            self.running[batch.seq] = set(concerned)
        else:
            out.append(Finished(batch.seq))
        return out + self._broadcast(frame, concerned)

    def _concerned(self, batch: Submission) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Meshes that a batch touches and the workers that hold their devices; () stands for all meshes."""
        everyone = self.workers
        if len(everyone) <= 1:
            return (), everyone
        meshes: set[int] = {fetch.mesh for fetch in batch.fetches}
        meshes.update(batch.freed_meshes)
        touched = self._touching.of(batch)
        if touched is None:
            return (), everyone
        meshes.update(touched)
        return tuple(sorted(meshes)), tuple(sorted({w for mesh in meshes for w in self._mesh_workers[mesh]}))

    def _add_mesh(self, mesh: MeshInfo) -> list[Instruction]:
        out: list[Instruction] = []
        hosts, numbers = [], []
        for device in mesh.devices:
            place = (mesh.kind, device)
            if place not in self.hosts:
                out += self._host(place)
            hosts.append(self.hosts[place])
            numbers.append(self._locals.get(place, device))
        local = tuple(numbers) if self._locals else ()
        self.meshes.append(msgspec.structs.replace(mesh, workers=tuple(hosts), locals=local))
        self._mesh_workers[mesh.mesh] = tuple(sorted(set(hosts)))
        return out

    def _host(self, place: Place) -> list[Instruction]:
        kind, device = place
        shared = kind in self._shared_kinds
        if self._place is not None:
            number, (_, self._locals[place]) = self._place(kind, device)
        else:
            number = self._shared_worker if shared else self._next_worker()
        self.hosts[place] = number
        return [] if number in self._workers else self._begin(Start(number, kind, device, shared))

    def _next_worker(self) -> int:
        return max([0, *self._workers]) + 1

    def _begin(self, start: Start) -> list[Instruction]:
        """Start a worker that is to know everything that the others know."""
        number = start.worker
        out: list[Instruction] = [start]
        leaving = set() if self._recovery is None else self._recovery.leaving
        alive = [w for w in self._workers.values() if w.phase is not Phase.GONE]
        elders = [w for w in alive if w.number not in leaving] or alive
        worker = self._workers[number] = _Worker(number, start=start)
        self.empty_queue(number)
        if self.meshes:
            known = Define(
                self.session, tuple(self.meshes), tuple(self._definitions.values()), tuple(self._programs.values())
            )
            worker.queue.append(encode(known))
        if self.seeds.drawn and elders:
            worker.awaits_random_state = True
            self._random_askers[self._next_ticket] = number
            out += self._broadcast(encode(AskRandomState(self.session, self._next_ticket)), (elders[0].number,))
            self._next_ticket -= 1
        elif self.seeds.seeds:
            worker.queue += map(encode, self.seeds.marks(self.session))
        return out

    def _broadcast(self, frame: Frame, workers: Iterable[int]) -> list[Instruction]:
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
        out = self._drain(worker)
        return out if self._recovery is None else out + self._recovery.joined()

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
                recovery = self._recovery
                if recovery is not None and seq > 0:
                    recovery.done(worker, seq)
                for value in values:
                    out += self.awaited.came(worker, value, self._torn)
                running = self.running.get(seq)
                if running is not None:
                    running.discard(worker)
                    if not running:
                        del self.running[seq]
                        out.append(Finished(seq))
                        if recovery is not None:
                            recovery.finished(seq)
                return out
            case Failure():
                return self._failure(worker, message)
            case Statistics() | Trace():
                ticket = message.ticket
                if ticket not in self._asked:
                    raise ProtocolError(f"worker {worker} answers question {ticket}, which nobody asked")
                self._asked[ticket][1].append(message)
                return self._answered(ticket, worker)
            case RandomState(_, ticket, _):
                if ticket not in self._random_askers:
                    raise ProtocolError(f"worker {worker} answers question {ticket}, which nobody asked")
                waiter = self._workers[self._random_askers.pop(ticket)]
                if not waiter.awaits_random_state:
                    return []  # it was told in another way
                waiter.awaits_random_state = False
                waiter.queue.insert(0, encode(message))
                return self._drain(waiter)
            case Held() | Snapshots() | Resumed():
                if self._recovery is None:
                    raise ProtocolError(f"worker {worker} answers {type(message).__name__}, which nobody asked")
                return self._recovery.received(worker, message)
            case Hello() | Pong():
                return []
        assert_never(message)

    def _answered(self, ticket: int, worker: int) -> list[Instruction]:
        waiting, got = self._asked[ticket]
        waiting.discard(worker)
        if waiting:
            return []
        del self._asked[ticket]
        return [Counted(ticket, tuple(got))]

    def _failure(self, worker: int, failure: Failure) -> list[Instruction]:
        if failure.index < 0 and failure.error < 0:
            self._workers[worker].last_words = failure.trace or failure.text
            return []
        if failure.kind == "ConnectionLostError" and self._recovery is not None and self._recovery.active:
            return []  # an echo of the loss that everybody is halting for
        if failure.kind == "ConnectionLostError":
            self._torn = True
            return [Suspect(worker, failure.text, self.epoch)]
        return [] if self._torn else [Failed(worker, failure)]

    def _exited(self, number: int, reason: str) -> list[Instruction]:
        worker = self._workers.get(number)
        if worker is None or worker.phase is Phase.GONE:
            return []
        joined = worker.phase is Phase.READY
        worker.phase = Phase.GONE
        worker.queue.clear()
        if worker.last_words:
            reason = f"{reason.partition(PRINTED)[0]}; its last words: {worker.last_words.rstrip()}"
        if self._closing:
            return []
        recovery = self._recovery
        if recovery is None:
            return [Lost(number, reason)]
        if number in recovery.leaving and number not in self.hosts.values():
            recovery.leaving.discard(number)
            return self.answer_for(number)
        return recovery.lose(number, reason, joined)

    # ---- for the recovery

    @property
    def epoch(self) -> int:
        """How many losses and moves there were."""
        return 0 if self._recovery is None else self._recovery.epoch

    @property
    def definition_table(self) -> dict[int, Definition]:
        return self._definitions

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(self._programs.values())

    def broadcast(self, frame: Frame, workers: Iterable[int]) -> list[Instruction]:
        return self._broadcast(frame, workers)

    def host(self, place: Place) -> list[Instruction]:
        """See to it that a place has a worker."""
        return [] if place in self.hosts else self._host(place)

    def local_of(self, place: Place) -> int:
        """The device's number on its worker."""
        return self._locals.get(place, place[1])

    def calm(self) -> None:
        """From here on errors are not taken for echoes of a loss."""
        self._torn = False

    def answer_for(self, number: int) -> list[Instruction]:
        """Nobody waits for a lost worker's statistics."""
        return [i for ticket in list(self._asked) for i in self._answered(ticket, number)]

    def ready_and_starting(self) -> tuple[list[int], list[int]]:
        alive = [w for w in self._workers.values() if w.phase is not Phase.GONE]
        starting = [w.number for w in alive if w.phase is Phase.STARTING or w.awaits_random_state]
        return [w.number for w in alive if w.number not in starting], starting

    def empty_queue(self, number: int) -> None:
        """A worker that has received nothing yet is told only what does not depend on the program."""
        worker = self._workers[number]
        worker.awaits_random_state = False
        worker.queue = [encode(known) for known in (self._allow, self._tracing) if known is not None]

    def start_like(self, number: int) -> tuple[list[Instruction], int]:
        """One more worker, of the same making as another one."""
        start = self._workers[number].start
        assert start is not None
        new = self._next_worker()
        return self._begin(replace(start, worker=new)), new

    def replace(self, number: int, places: Iterable[Place]) -> list[Start]:
        """Start what takes the places of a lost worker. It is told nothing but what does not depend on the program."""
        starts: list[Start] = []
        for place in places:
            if self._place is not None:
                new, (_, self._locals[place]) = self._place(*place)
                start = Start(new, *place, False)
            else:
                old = self._workers[number].start
                assert old is not None
                start = starts[0] if starts else replace(old, worker=self._next_worker())
            if start.worker not in self._workers:
                self._workers[start.worker] = _Worker(start.worker, start=start)
                self.empty_queue(start.worker)
                starts.append(start)
            self.hosts[place] = start.worker
        if number == self._shared_worker and starts:
            self._shared_worker = starts[0].worker
        return starts

    def spot_of(self, place: Place) -> tuple[int, Place]:
        """Where a place is to be, says whoever places devices."""
        assert self._place is not None
        return self._place(*place)

    def settle(self, place: Place, number: int) -> None:
        """A place is another device of its worker from now on."""
        self._locals[place] = number

    def start_at(self, number: int, place: Place, fresh: bool) -> list[Instruction]:
        """Start a worker for a place, unless it is there.

        Args:
            fresh: it is told nothing but what does not depend on the program.
        """
        if number in self._workers:
            return []
        start = Start(number, *place, False)
        if not fresh:
            return self._begin(start)
        self._workers[number] = _Worker(number, start=start)
        self.empty_queue(number)
        return [start]

    def part_from(self, number: int) -> list[Instruction]:
        """A worker has no device of the session any more: it is told nothing from now on, and nobody waits for it."""
        worker = self._workers[number]
        worker.phase = Phase.GONE
        worker.queue.clear()
        out: list[Instruction] = [Vacated(number), *self.answer_for(number)]
        for seq, waiting in list(self.running.items()):
            waiting.discard(number)
            if not waiting:
                del self.running[seq]
                out.append(Finished(seq))
        return out

    def refresh_meshes(self, backing: dict[Place, str]) -> None:
        """Meshes are where their devices are now."""
        for i, mesh in enumerate(self.meshes):
            places = [(mesh.kind, device) for device in mesh.devices]
            hosts = tuple(self.hosts[place] for place in places)
            local = tuple(self._locals.get(place, place[1]) for place in places) if self._locals else ()
            moved = tuple(backing.get(place, "") for place in places)
            self.meshes[i] = msgspec.structs.replace(
                mesh, workers=hosts, locals=local, backing=moved if any(moved) else ()
            )
            self._mesh_workers[mesh.mesh] = tuple(sorted(set(hosts)))
