"""How a session gets over the loss of a worker, and how devices move to another one. Pure; part of the controller.

Both go the same way, one *epoch* each:

    1. every worker halts: where the program order stands (a move), or at its next call (a loss), and tells what it holds;
    2. devices get their new workers, and ``slices.rescue`` says what to copy and which calls to run again;
    3. every worker hears of it in one go, resumes, and the client's events that waited meanwhile follow.

Another loss in the middle begins the next epoch at 1. Workers that know nothing yet are *fresh*: they are told every
definition in step 3 and have nothing to tell in step 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dtorch.runtime.events import (
    Event,
    Finished,
    Forfeited,
    Halting,
    Instruction,
    Interrupt,
    Kill,
    Lost,
    Migrating,
    Place,
    Regained,
    Settled,
    Submission,
)
from dtorch.runtime.layout import is_partial, is_shard, shard_dim
from dtorch.runtime.lineage import Bounds, Lineage, bits
from dtorch.runtime.poison import LOST
from dtorch.runtime.slices import Part, Position, Rescue, Standing, Step, Tap, rescue
from dtorch.runtime.slices import Redo as Again
from dtorch.transport.codec import encode
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import (
    AskHeld,
    AskSnapshots,
    Copy,
    Define,
    Definition,
    Generators,
    Held,
    Layout,
    PlaceFinal,
    Redo,
    Redone,
    Regroup,
    Reread,
    Resume,
    Resumed,
    Snapshots,
    Stop,
)

if TYPE_CHECKING:
    from dtorch.runtime.controller import Controller

MAX_STRIKES = 2
"""Losses without any progress between them, after which only calls run again that nobody has died of: some other one may be
what ends the workers. After as many more nothing runs again."""


class Recovery:
    """Losses and moves of one session.

    Args:
        controller: whose workers, places and meshes these are; changed from here.
        bounds: of the lineage.

    Attributes:
        active: workers are halted; the client's events wait in ``held_back``.
        leaving: workers that were told to end.
    """

    def __init__(self, controller: Controller, bounds: Bounds) -> None:
        self._controller = controller
        self.lineage = Lineage(bounds, shared=controller.is_placed)
        self.epoch = 0
        self.active = False
        self.held_back: list[Event] = []
        self.leaving: set[int] = set()
        self._last_seq = 0
        self._done: dict[int, int] = {}  # worker -> the last batch that it has executed
        self._waiting: set[int] = set()  # workers whose answer of step 1 is awaited
        self._answers: dict[int, Held] = {}
        self._fresh: set[int] = set()
        self._spares: set[int] = set()  # workers started in place of lost ones
        self._reasons: dict[int, str] = {}  # workers lost since everybody resumed for the last time
        self._executed: dict[Place, Position] = {}  # places that were lost -> how far they had executed
        self._moves: dict[Place, int] = {}  # place -> the worker that it is to move to
        self._spots: dict[Place, Place] = {}  # place -> the device of the worker that it moves to, where others place devices
        self._relocated: set[Place] = set()  # places that move to other hardware of their worker
        self._backing: dict[Place, str] = {}  # "kind:number" of what stands for a place that was moved
        self._tickets: list[int] = []
        self._states: dict[int, Generators] = {}  # batch -> where they stood when it began
        self._origins: dict[int, int] = {}  # batch -> the one at whose beginning they stood as at its own
        self._missing: set[int] = set()  # batches for which that was asked
        self._resuming: set[int] = set()
        self._summary: Regained | None = None
        self._strikes = 0
        self._num_stillborn = 0  # spares that ended before they were up, one after the other
        self._has_tried = False  # somebody was told to run calls again, and nothing that came later is finished
        self._progress_at = 0  # a batch above this one that is finished means that things go well again

    # ---- what goes by

    def submitted(self, batch: Submission) -> None:
        keep, streams = getattr(batch, "keep", None), getattr(batch, "streams", ())
        self.lineage.add(batch.seq, batch.body, batch.uploads, keep, refused=bool(batch.refused), streams=streams)
        self._last_seq = batch.seq
        if self.lineage.is_full:
            running = self._controller.running
            self.lineage.prune(min(running) - 1 if running else batch.seq)

    def done(self, worker: int, seq: int) -> None:
        self._done[worker] = seq

    def finished(self, seq: int) -> None:
        if seq > self._progress_at:
            self._strikes = 0
            self._has_tried = False

    # ---- step 1

    def lose(self, number: int, reason: str, joined: bool) -> list[Instruction]:
        """A worker has ended, or does not answer any more.

        Args:
            joined: it had come up.
        """
        controller = self._controller
        was_spare = number in self._spares
        if not joined and not was_spare:
            return [Lost(number, reason)]
        executed = self._done.pop(number, -1) + 1, 0
        lost = [place for place, host in controller.hosts.items() if host == number]
        for place in lost:
            self._executed.setdefault(place, executed)
        self._moves = {place: target for place, target in self._moves.items() if target != number}
        self._reasons[number] = reason
        if self._has_tried:
            self._strikes += 1
            self._has_tried = False
        controller.calm()
        out: list[Instruction] = [Kill(number), *controller.answer_for(number)]
        asked, starting = controller.ready_and_starting()
        for worker in starting:  # it has received nothing, and what it was to receive is worked out anew
            controller.empty_queue(worker)
            self._fresh.add(worker)
        self._fresh.discard(number)
        self._spares.discard(number)
        out += self._begin()
        out += [Interrupt(worker, self.epoch) for worker in asked]
        out += self._ask(asked)
        if controller.is_placed:
            out += self._follow()
        elif lost:
            found = self._rehost(number, lost, spare=joined)
            if found is None:
                return [Lost(number, reason)]
            out += found
        return out if self._waiting else out + self._plan()

    def migrate(self, event: Migrating) -> list[Instruction]:
        """Devices are to move: once their new workers are up, everybody halts where the program order then stands."""
        controller = self._controller
        out: list[Instruction] = []
        self._tickets.append(event.ticket)
        if controller.is_placed:
            if event.leaving is not None:
                self.leaving.add(event.leaving)
            return self._follow() + self.joined()
        places = event.places
        if event.leaving is not None:
            places = tuple(place for place, host in controller.hosts.items() if host == event.leaving)
            self.leaving.add(event.leaving)
        if event.target is not None:
            out += controller.host(event.target)
            backing = self._backing.get(event.target, f"{event.target[0]}:{controller.local_of(event.target)}")
            for place in places:
                self._moves[place] = controller.hosts[event.target]
                self._backing[place] = backing
            return out + self.joined()
        remaining = [w for w in controller.workers if w not in self.leaving] if event.leaving is not None else []
        if remaining:
            for place in places:
                self._moves[place] = self._least_loaded(remaining)
        elif places:
            started, number = controller.start_like(controller.hosts[places[0]])
            out += started
            self._moves |= dict.fromkeys(places, number)
        for place in places:
            self._backing.setdefault(place, f"{place[0]}:{controller.local_of(place)}")
        return out + self.joined()

    def joined(self) -> list[Instruction]:
        """A worker is up; perhaps the moves were waiting for it."""
        controller = self._controller
        if self.active or not self._tickets or any(map(controller.is_starting, self._moves.values())):
            return []
        out = self._begin() + self._ask(list(controller.workers))
        return out if self._waiting else out + self._plan()

    def _begin(self) -> list[Instruction]:
        self.epoch += 1
        self.active = True
        self._answers.clear()
        self._missing.clear()
        self._resuming.clear()
        return [Halting()]

    def _ask(self, workers: list[int]) -> list[Instruction]:
        self._waiting = set(workers)
        return self._controller.broadcast(encode(AskHeld(self._controller.session, self.epoch)), workers)

    def _rehost(self, number: int, lost: list[Place], spare: bool) -> list[Instruction] | None:
        """New workers for the places of a lost one; None when there are none to be had.

        Args:
            spare: start one if possible; otherwise the remaining ones take over.
        """
        controller = self._controller
        remaining = [w for w in controller.workers if w not in self.leaving]
        if remaining and not spare:
            for place in lost:
                controller.hosts[place] = self._least_loaded(remaining)
            return []
        self._num_stillborn = 0 if spare else self._num_stillborn + 1
        if self._num_stillborn > MAX_STRIKES:
            return None
        starts = controller.replace(number, lost)
        self._fresh |= {start.worker for start in starts}
        self._spares |= {start.worker for start in starts}
        return [*starts]

    def _follow(self) -> list[Instruction]:
        """Let devices go where whoever places them has them now."""
        controller = self._controller
        out: list[Instruction] = []
        self._moves.clear()
        self._relocated.clear()
        for place, host in controller.hosts.items():
            worker, (kind, local) = controller.spot_of(place)
            had = self._backing.get(place, f"{place[0]}:{controller.local_of(place)}")
            if worker == host and had == f"{kind}:{local}":
                continue
            self._moves[place] = worker
            self._spots[place] = kind, local
            if worker == host and (kind != "cpu" or not had.startswith("cpu:")):
                self._relocated.add(place)
            started = controller.start_at(worker, place, fresh=self.active)
            if started and self.active:
                self._fresh.add(worker)
            out += started
        return out

    def _least_loaded(self, workers: list[int]) -> int:
        load = dict.fromkeys(workers, 0)
        for place, host in self._controller.hosts.items():
            host = self._moves.get(place, host)
            if host in load:
                load[host] += 1
        return min(workers, key=lambda worker: (load[worker], worker))

    # ---- answers

    def received(self, worker: int, message: Held | Snapshots | Resumed) -> list[Instruction]:
        """An answer. Those of an earlier epoch are out of date. Raises ProtocolError."""
        if message.epoch != self.epoch:
            if message.epoch > self.epoch:
                raise ProtocolError(f"worker {worker} answers for epoch {message.epoch}, which has not begun")
            return []
        match message:
            case Held():
                if worker not in self._waiting:
                    raise ProtocolError(f"worker {worker} tells what it holds, which nobody asked")
                self._waiting.discard(worker)
                self._answers[worker] = message
                return [] if self._waiting else self._plan()
            case Snapshots():
                self._states.update(message.states)
                self._missing -= message.states.keys()
                return [] if self._missing else self._plan()
            case Resumed():
                return self._resumed(worker, message)

    def _resumed(self, worker: int, message: Resumed) -> list[Instruction]:
        out: list[Instruction] = []
        self._resuming.discard(worker)
        summary = self._summary
        assert summary is not None
        self._summary = summary = replace(summary, copied_bytes=summary.copied_bytes + message.copied_bytes)
        running = self._controller.running
        for seq in [seq for seq in running if seq <= self._progress_at]:
            running[seq].discard(worker)
            if not running[seq]:
                del running[seq]
                out.append(Finished(seq))
        if self._resuming:
            return out
        self._reasons.clear()
        self._executed.clear()
        self._states.clear()
        self._spares -= self._fresh
        self._summary = None
        controller = self._controller
        idle = [w for w in self.leaving if w in controller.workers]
        if not controller.is_placed:
            return [*out, *controller.broadcast(encode(Stop()), idle), summary]
        for number in [w for w in idle if w not in controller.hosts.values()]:
            self.leaving.discard(number)
            out += controller.part_from(number)
        return [*out, summary]

    # ---- step 2

    def _plan(self) -> list[Instruction]:
        controller = self._controller
        places = list(controller.hosts)
        standings, executed = [], []
        for place in places:
            answer = self._answers.get(controller.hosts[place])
            held = {} if answer is None else {(p.kind, p.device): p.held for p in answer.places}
            if answer is None or place not in held:
                standing = Standing((0, 0), 0)
            else:
                done = int.from_bytes(answer.done, "little")
                standing = Standing((answer.seq, done), int.from_bytes(held[place], "little"))
            standings.append(standing)
            executed.append(self._executed.get(place, standing.position))
        known = {seq for answer in self._answers.values() for seq in answer.snapshots} | self._states.keys()
        found = rescue(
            self.lineage,
            places,
            {mesh.mesh: mesh for mesh in controller.meshes},
            standings,
            controller.awaited.pending(),
            executed=executed,
            snapshots=frozenset(known),
            redo=self._trust(),
        )
        if not self._answers and not self.lineage.draws_are_known(controller.seeds.alive):
            worker, reason = next(iter(self._reasons.items()))
            return [Lost(worker, f"{reason}; no worker is left that knows where the random numbers stood")]
        self._origins = self._find_origins(found, known)
        missing = set(self._origins.values()) - self._states.keys()
        if missing:
            return self._ask_states(missing)
        return self._go(found, places)

    def _trust(self) -> Again:
        if self._strikes <= MAX_STRIKES:
            return Again.ALL
        return Again.PROVEN if self._strikes <= 2 * MAX_STRIKES else Again.NONE

    def _furthest(self) -> Held | None:
        return max(self._answers.values(), key=lambda a: (a.seq, a.draws), default=None)

    def _find_origins(self, found: Rescue, known: set[int]) -> dict[int, int]:
        """For batches before which all generators must stand where they stood: the batch whose snapshot says where."""
        furthest = self._furthest()
        origins = {}
        for part in found.parts:
            seq = part.record.seq
            if found.stretch is None or seq < found.stretch:
                if any(step.facts.random for step in part.steps):
                    origins[seq] = seq
            elif seq == found.stretch and furthest is not None:
                origins[seq] = min((later for later in known if later >= seq), default=seq)
                if origins[seq] not in known:  # nobody has drawn since
                    self._states[seq] = furthest.states
        return origins

    def _ask_states(self, missing: set[int]) -> list[Instruction]:
        out: list[Instruction] = []
        self._missing = set(missing)
        for worker, answer in self._answers.items():
            seqs = missing & set(answer.snapshots)
            if seqs:
                missing = missing - seqs
                frame = encode(AskSnapshots(self._controller.session, self.epoch, tuple(sorted(seqs))))
                out += self._controller.broadcast(frame, [worker])
        assert not missing, "a state is wanted that nobody has"
        return out

    # ---- step 3

    def _go(self, found: Rescue, places: list[Place]) -> list[Instruction]:
        controller = self._controller
        before = [controller.hosts[place] for place in places]
        controller.hosts.update(self._moves)
        for place in self._moves.keys() & self._spots.keys():
            kind, local = self._spots[place]
            self._backing[place] = f"{kind}:{local}"
            controller.settle(place, local)
        hosts = [controller.hosts[place] for place in places]
        stays = [a == b and place not in self._relocated for place, a, b in zip(places, before, hosts, strict=True)]
        workers = controller.workers
        out: list[Instruction] = []
        if found.lost:
            worker, reason = next(iter(self._reasons.items()), (0, "it moved"))
            out.append(Forfeited(worker, reason, tuple(_describe(*lost) for lost in found.lost)))
        controller.refresh_meshes(self._backing)
        session, epoch = controller.session, self.epoch
        old = [worker for worker in workers if worker not in self._fresh]
        fresh = [worker for worker in workers if worker in self._fresh]
        out += controller.broadcast(encode(Define(session, tuple(controller.meshes), self._forgotten(found))), old)
        definitions = (*controller.definition_table.values(), *self._forgotten(found))
        everything = Define(session, tuple(controller.meshes), definitions, controller.programs)
        out += controller.broadcast(encode(everything), fresh)
        if not self._answers and self.lineage.seeds.seeds:
            for mark in self.lineage.seeds.marks(session):
                out += controller.broadcast(encode(mark), fresh)
        out += controller.broadcast(encode(self._regroup(found, places, before, hosts, stays)), workers)
        for part in found.parts:
            draws = found.stretch is not None and part.record.seq >= found.stretch
            marks = part.record.seeds.marks(session) if draws and part.record.seeds is not None else ()
            out += [Settled(tap.fetch.ticket, (), (0, LOST)) for tap in part.taps if tap.lost]
            if not part.steps and all(tap.lost for tap in part.taps) and not marks:
                continue
            redo = Redo(
                session,
                epoch,
                part.record.seq,
                tuple(map(_redone, part.steps)),
                part.record.uploads if part.record.uploads and any(s.facts.upload for s in part.steps) else (),
                tuple(_reread(tap) for tap in part.taps if not tap.lost),
                self._states.get(self._origins.get(part.record.seq, -1)),
                marks,
            )
            out += self._feed(part, places)
            out += controller.broadcast(encode(redo), workers)
        furthest = self._furthest()
        states = furthest.states if furthest is not None and found.stretch is None else None
        finals = self._finals(found, stays)
        out += controller.broadcast(encode(Resume(session, epoch, self._last_seq, finals, states)), workers)
        if self.lineage.pending is not None:  # whoever had halted has not heard of it
            for mark in self.lineage.pending.marks(session):
                out += controller.broadcast(encode(mark), workers)
        lost = {tap.fetch.ticket for part in found.parts for tap in part.taps if tap.lost}
        controller.awaited.again(lost, controller.workers_of)
        self._progress_at = self._last_seq
        self._has_tried = bool(found.parts)
        for seq in controller.running:
            controller.running[seq] = set(workers)
        self._summary = Regained(
            tuple(self._reasons.items()),
            tuple(place for place, same in zip(places, stays, strict=True) if not same or place in self._executed),
            found.recomputed,
            0,
            tuple(self._tickets),
        )
        self._resuming = set(workers)
        self._fresh.clear()
        self._moves.clear()
        self._spots.clear()
        self._relocated.clear()
        self._tickets.clear()
        self.active = False
        waiting, self.held_back = self.held_back, []
        for event in waiting:
            out += controller.handle(event)
        return out

    def _feed(self, part: Part, places: list[Place]) -> list[Instruction]:
        """Uploads that came in parts came before their batch, and come again before it, to whoever takes them again."""
        controller = self._controller
        takers = {places[p] for step in part.steps if step.facts.upload for p in bits(step.places)}
        meshes = {mesh.mesh: mesh for mesh in controller.meshes} if takers else {}
        out: list[Instruction] = []
        for stream in part.record.streams if takers else ():
            mesh = meshes[stream.mesh]
            devices = tuple(d for d in stream.devices or mesh.devices if (mesh.kind, d) in takers)
            for frame in stream.frames if devices else ():
                out += controller.broadcast(frame, controller.workers_of(mesh.mesh, devices))
        return out

    def _forgotten(self, found: Rescue) -> tuple[Definition, ...]:
        """Definitions that workers may have dropped since."""
        live = self._controller.definition_table
        used = {step.call[0] for part in found.parts for step in part.steps} - live.keys()
        return tuple(self.lineage.definitions[sig] for sig in sorted(used))

    def _regroup(
        self, found: Rescue, places: list[Place], before: list[int], hosts: list[int], stays: list[bool]
    ) -> Regroup:
        roots: list[tuple[int, ...]] = [()] * len(found.leaves)
        copies = []
        for leaf in found.leaves:
            roots[leaf.number] = tuple(
                p for p, source in leaf.sources.items() if p == source and stays[p]
            )
            copies += [
                Copy(leaf.number, leaf.slot, source, before[source], p, hosts[p])
                for p, source in leaf.sources.items()
                if p != source or not stays[p]
            ]
        return Regroup(self._controller.session, self.epoch, tuple(places), tuple(hosts), tuple(roots), tuple(copies))

    def _finals(self, found: Rescue, stays: list[bool]) -> tuple[PlaceFinal, ...]:
        finals = []
        for p, final in enumerate(found.finals):
            copied = tuple(
                (slot, leaf) for slot, (leaf, source) in final.leaves.items() if source != p or not stays[p]
            )
            finals.append(PlaceFinal(p, _bytes(final.live), _bytes(final.redone), copied, _bytes(final.lost)))
        return tuple(finals)


def _redone(step: Step) -> Redone:
    return Redone(
        step.index, list(step.call), tuple(bits(step.places)), tuple(step.recalls), tuple(step.kills), step.draw
    )


def _reread(tap: Tap) -> Reread:
    return Reread(tap.fetch, tuple(tap.recalls))


def _bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _describe(layout: Layout, op: str) -> str:
    placed = ", ".join(map(_placement, layout.codes))
    return f"{layout.dtype}{list(layout.shape)} on [{placed}], made by {op}"


def _placement(code: int) -> str:
    return f"Shard({shard_dim(code)})" if is_shard(code) else "Partial()" if is_partial(code) else "Replicate()"
