"""Executes batches of one session on the devices that this worker hosts.

Stores: one list a hosted place, indexed by slot. A slot holds a torch.Tensor, a ``Poison`` (the op that should have made it
failed), or None.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtorch.runtime import joint
from dtorch.runtime.arrivals import Arrival
from dtorch.runtime.binding import Binder
from dtorch.runtime.comm import Place
from dtorch.runtime.files import FileAccess
from dtorch.runtime.fusion import Fused, fuse
from dtorch.runtime.lowering import lower
from dtorch.runtime.memory import MemoryMeter
from dtorch.runtime.plan import (
    BINARY,
    GENERAL,
    KILL,
    SCALAR,
    TERNARY,
    UNARY,
    Begun,
    Finish,
    Joint,
    Local,
    Plan,
    Plans,
    Replay,
    Run,
    decode_body,
    steps_of,
)
from dtorch.runtime.poison import Halted, Poison
from dtorch.runtime.rewrite import RULES, rewrite
from dtorch.runtime.rewrite.block import Block
from dtorch.runtime.rewrite.traits import written
from dtorch.runtime.snapshots import Generators, Snapshots
from dtorch.runtime.tracing import BATCH, COMPUTE, FREE, PLAN, Tracer
from dtorch.transport.errors import ConnectionLostError, ProtocolError
from dtorch.transport.messages import Definition, Failure, MeshInfo, Program

if TYPE_CHECKING:
    from dtorch.transport.groups import Group

class Position(NamedTuple):
    """How far a session has executed: all batches before ``seq``, and some calls of that one."""

    seq: int
    done: int  # mask of these calls
    draws: int  # how many of them draw random numbers


@dataclass
class CompiledProgram:
    """A program made ready: its plan works on registers of hosted places ``places``."""

    program: Program
    plan: Plan
    places: tuple[int, ...]


class Executor:
    """One session on one worker.

    Args:
        worker: this worker's number.
        resolve: op name -> function, from the op table; raises KeyError.
        device_of: the torch device that stands for a place.
        make_group: process group of a set of workers.
        report: called with every failure.
        folders: where the session may read and write files; None: anywhere.
        rules: names of the rules that rewrite plans.
    """

    def __init__(
        self,
        session: int,
        worker: int,
        resolve: Callable[[str], Callable[..., Any]],
        device_of: Callable[[Place], torch.device],
        make_group: Callable[..., Group],
        report: Callable[[Failure], None],
        folders: Sequence[str] | None = None,
        rules: tuple[str, ...] = tuple(RULES),
    ) -> None:
        self.session = session
        self.worker = worker
        self._report = report
        self._rules = rules
        self.binder = self.make_binder(worker, resolve, device_of, make_group)
        self.meshes, self.places = self.binder.meshes, self.binder.places
        self._place_index = self.binder.place_index
        self.device_of = self.binder.device_of
        self._programs: dict[int, Program] = {}
        self._compiled: dict[int, CompiledProgram] = {}
        self._outer: int | None = None  # while a program replays: the batch index of the call that replays it
        self.stores: list[list[Any]] = []
        self._root = self.stores  # the stores themselves, also while a program has put registers in their place
        self._plans = Plans()
        self._num_errors = 0
        self._seq = 0
        self.uploads: list[Arrival] = []
        # Written by another thread when a worker is gone: above ``binder.epoch``, stop at the next call.
        self.halt_epoch = 0
        self.halted = False
        self.position = Position(0, 0, 0)
        self.torn: set[int] = set()  # storages that a call had begun to write when it was halted, by address
        self.generators = Generators()
        self.snapshots = Snapshots(self.generators)
        self.memory = MemoryMeter(self)
        self.tracer: Tracer | None = None  # while a profile runs
        self.traffic: dict[int, int] | None = None  # where it is counted: signature -> bytes sent to other devices
        self.counters = {
            "calls": 0, "batches": 0, "plan_hits": 0, "plan_misses": 0, "failures": 0, "exchanges": 0, "exchanged_bytes": 0
        }
        self.binder.files = FileAccess.within(folders, self.counters)

    make_binder = Binder

    @property
    def held_bytes(self) -> int:
        """What the session holds here, where that is counted."""
        return 0

    clock_ns = staticmethod(time.perf_counter_ns)
    """Measures the time that batches take."""

    def refuse(self, seq: int, body: bytes, reason: str) -> None:
        """Let every call of a batch fail with a QuotaError."""
        raise ProtocolError("only a head refuses batches, and only workers of a head know how")

    # ---- definitions

    def add_mesh(self, mesh: MeshInfo) -> None:
        while len(self.stores) < self.binder.add_mesh(mesh):
            self.stores.append([])

    def add_definition(self, definition: Definition) -> None:
        self.binder.definitions[definition.sig] = definition

    def add_program(self, program: Program) -> None:
        self._programs[program.sig] = program

    def forget(self, below: int) -> None:
        """Drop signatures below a number, and all plans."""
        self.binder.forget(below)
        for table in (self._programs, self._compiled):
            for sig in [s for s in table if s < below]:
                del table[sig]
        self._plans.clear()

    def regroup(self, epoch: int, hosts: dict[Place, int]) -> None:
        """Devices are on other workers from now on: drop what was made for the old ones."""
        self.binder.regroup(epoch, hosts)
        self._compiled.clear()
        self._plans.clear()

    @contextmanager
    def beside(self, stores: list[list[Any]], seq: int, uploads: list[Arrival]) -> Iterator[None]:
        """Calls of batch ``seq`` work on other stores within the block."""
        own = self.stores
        self._seq, self.uploads = seq, uploads
        self.stores = self._root = stores
        try:
            yield
        finally:
            self.stores = self._root = own

    # ---- plans

    def plan(self, body: bytes) -> Plan:
        found = self._plans.get(body)
        if found is not None:
            self.counters["plan_hits"] += 1
            return found
        self.counters["plan_misses"] += 1
        made = self._compile(body)
        self._plans.add(body, made)
        return made

    def program(self, sig: int) -> CompiledProgram:
        """The plan of a program, over registers."""
        made = self._compiled.get(sig)
        if made is None:
            program = self._programs.get(sig)
            if program is None:
                raise ProtocolError(f"signature {sig} names no program")
            plan = self._compile(program.body)
            if program.fuse:
                lasting = {*program.outputs, *(register for register, _ in program.kept)}
                plan.parts = fuse(plan.parts, lasting)
            places = {index for mesh in program.meshes for index in self.binder.hosted(mesh)}
            made = self._compiled[sig] = CompiledProgram(program, plan, tuple(sorted(places)))
        return made

    def replay(self, replay: Replay) -> None:
        """Run a program on registers of its own; what it captured is read from the stores, by reference."""
        compiled: CompiledProgram = replay.program
        program, plan = compiled.program, compiled.plan
        step = replay.step
        outer_stores, outer_call = self.stores, self._outer
        size = max(program.num_registers, plan.num_slots)
        registers: list[list[Any]] = [[] for _ in outer_stores]
        for index in compiled.places:
            made: list[Any] = [None] * size
            registers[index] = made
            store, root = outer_stores[index], self._root[index]
            for register, slot in zip(program.inputs, step.ins, strict=True):
                made[register] = store[slot]
            for register, slot in program.captured:
                made[register] = root[slot]
        self.stores = registers
        if outer_call is None:
            self._outer = step.index
        tracer = self.tracer
        outer_sigs: tuple[int, ...] = ()
        if tracer is not None:
            outer_sigs, tracer.outer = tracer.sigs, step.index if outer_call is None else outer_call
        try:
            self._run_parts(plan)
        except Halted:
            if plan.writes:
                self.tear(outer_stores, compiled.places, (*step.ins, *(slot for _, slot in program.captured)))
            raise
        finally:
            self.stores, self._outer = outer_stores, outer_call
            if tracer is not None:
                tracer.sigs, tracer.outer = outer_sigs, -1 if outer_call is None else outer_call
        for index in compiled.places:
            store, root, made = outer_stores[index], self._root[index], registers[index]
            for register, slot in zip(program.outputs, step.outs, strict=True):
                store[slot] = made[register]
            for register, slot in program.kept:
                root[slot] = made[register]

    def _compile(self, body: bytes) -> Plan:
        calls, frees = decode_body(body)
        steps = steps_of(calls, self.binder.definitions)
        dying = frozenset(slot for _, slots in frees for slot in slots)
        block = rewrite(Block(tuple(steps), dying, self.meshes), self._rules)
        final = [(hosted, slots) for mesh, slots in frees if (hosted := self.binder.hosted(mesh))]
        named = [slot for step in steps for slot in (*step.outs, *step.ins)]
        for step in steps:
            if step.definition.kernel == "program":
                program = self.program(step.definition.sig).program
                named += [slot for _, slot in (*program.captured, *program.kept)]
        parts = lower(block.items, self.binder, self.program)
        highest = max([-1, *named, *(slot for _, slots in final for slot in slots)])
        draws = any(step.definition.params.get("random") for step in steps)
        writes = any(map(written, (step.definition for step in steps)))
        return Plan(parts, final, highest + 1, len(steps), tuple(step.definition.sig for step in steps), draws, writes)

    # ---- execution

    def run(self, seq: int, body: bytes, uploads: list[Arrival]) -> bool:
        """Execute one batch. Failures of calls are reported and poison what depends on them; nothing is raised for them.

        Returns:
            Whether it was executed to its end; if not, this session has halted.
        """
        self.position = Position(seq, 0, 0)
        try:
            self._run(seq, body, uploads)
        except Halted:
            self.halted = True
            return False
        except ConnectionLostError as error:  # no group could be made; nothing of the batch has run
            self.lost_touch(0, error)
            self.halted = True
            return False
        self.position = Position(seq + 1, 0, 0)
        return True

    def _run(self, seq: int, body: bytes, uploads: list[Arrival]) -> None:
        self._seq = seq
        self.uploads = uploads
        tracer = self.tracer
        began = 0 if tracer is None else tracer.mark(-1)
        plan = self.plan(body)
        if tracer is not None:
            tracer.seq = seq
            tracer.add(PLAN, -1, -1, began, tracer.mark(-1))
        if plan.draws:
            self.snapshots.take(seq)
        self._root = self.stores
        for store in self.stores:
            missing = plan.num_slots - len(store)
            if missing > 0:
                store.extend([None] * (missing + 256))
        self._run_parts(plan)
        for places, slots in plan.frees:
            for index in places:
                store = self.stores[index]
                for slot in slots:
                    store[slot] = None
        self.counters["calls"] += plan.num_calls
        self.counters["batches"] += 1
        if tracer is not None:
            tracer.add(BATCH, -1, -1, began, tracer.mark(-1))

    def _run_parts(self, plan: Plan) -> None:
        memory = self.memory
        if self.tracer is not None:
            self.tracer.sigs = plan.sigs
        count = 0
        try:
            for part in plan.parts:
                if self.halt_epoch > self.binder.epoch and self._outer is None:
                    raise Halted
                if type(part) is Local:
                    for index, runs in part.runs.items():
                        self.run_local(index, runs)
                elif type(part) is Joint:
                    joint.run(self, part, self.uploads)
                elif type(part) is Fused:
                    part.run(self, self.run_local)
                elif type(part) is Begun:
                    part.flight = joint.Flight(self, part.joints)
                elif type(part) is Finish:
                    part.begun.flight.finish()
                    part.begun.flight = None
                else:
                    self.replay(part)
                count += 1
                if memory.watching:
                    memory.observe()
        except Halted:
            self._note_halt(plan, count)
            raise

    def _note_halt(self, plan: Plan, count: int) -> None:
        """Part ``count`` of a plan was not executed, or not to its end."""
        for begun in plan.underway(count):
            self.tear(self.stores, begun.bound.functions, [begun.step.ins[w] for w in written(begun.step.definition)])
        for part in plan.parts:
            if isinstance(part, Begun):
                part.flight = None
        if self._outer is None:
            self.position = Position(self._seq, *plan.executed(count))

    def lost_touch(self, call: int, error: ConnectionLostError) -> None:
        """Another worker does not answer. Unless that is known already, the controller should look into it."""
        if self.halt_epoch <= self.binder.epoch:
            kind = type(error).__name__
            self._report(Failure(self.session, self._seq, call, -1, 0, "", kind, str(error), ""))

    def tear(self, stores: list[list[Any]], places: Iterable[int], slots: Sequence[int]) -> None:
        """Some call may have written in part into these, or too much: the memory is of no use any more."""
        for index in places:
            values = (stores[index][slot] for slot in slots)
            self.torn.update(v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor))

    def observer(self) -> Callable[[Iterator[Any], int], Iterator[Any]] | None:
        """What looks on between the instructions of a run: (instructions, index of the hosted place) -> the same ones."""
        return self.memory.observe_step if self.memory.watching else None

    def run_local(self, index: int, runs: list[Run]) -> None:
        s = self.stores[index]
        observe = self.observer()
        tracer = self.tracer
        for run in runs:
            code = run.code
            rest = iter(code)
            form = run.form
            if observe is not None and form != KILL:
                rest = observe(rest, index)
            if tracer is not None:
                rest = tracer.timed(rest, index, run.calls, FREE if form == KILL else COMPUTE)
            while True:
                try:
                    if form == BINARY:
                        for f, out, a, b in rest:
                            s[out] = f(s[a], s[b])
                    elif form == UNARY:
                        for f, out, a in rest:
                            s[out] = f(s[a])
                    elif form == SCALAR:
                        for f, out, a, number in rest:
                            s[out] = f(s[a], number)
                    elif form == TERNARY:
                        for f, out, a, b, c in rest:
                            s[out] = f(s[a], s[b], s[c])
                    elif form == KILL:
                        for (slot,) in rest:
                            s[slot] = None
                    else:
                        for f, outs, ins, numbers, writes in rest:
                            result = f(*[s[i] for i in ins], *numbers)
                            if len(outs) == 1 and isinstance(result, torch.Tensor):
                                s[outs[0]] = result
                            elif not writes:
                                for out, value in zip(outs, result, strict=True):
                                    s[out] = value
                    break
                except Exception as error:
                    position = len(code) - length_hint(rest) - 1
                    self._failed(index, form, code[position], run.calls[position], error)

    def _failed(self, index: int, form: int, code: tuple[Any, ...], call: int, error: Exception) -> None:
        s = self.stores[index]
        if form == GENERAL:
            outs, ins, writes = code[1], code[2], code[4]
        else:
            outs, ins, writes = code[1:2], code[2:3] if form == SCALAR else code[2:], ()
        poison = next((s[i] for i in ins if type(s[i]) is Poison), None)
        if poison is None:
            poison = self.fail(call, self.places[index], error)
        for slot in (*outs, *(ins[w] for w in writes)):
            s[slot] = poison

    def fail(self, call: int, place: Place, error: BaseException) -> Poison:
        if self._outer is not None:
            call = self._outer
        number = self._num_errors
        self._num_errors += 1
        self.counters["failures"] += 1
        frames = traceback.format_exception(error)
        self._report(
            Failure(
                self.session, self._seq, call, number, 0, f"{place[0]}:{place[1]}", type(error).__name__, str(error),
                "".join(frames),
            )
        )
        return Poison(number)

    # ---- reading

    def held(self, slot: int, place: Place) -> Any:
        """What a hosted place has in ``slot``: a tensor, a Poison, or None."""
        store = self.stores[self._place_index[place]]
        return store[slot] if slot < len(store) else None

    def all_stores(self, index: int) -> list[list[Any]]:
        """What hosted place ``index`` holds: its store and, while a program replays, the program's registers."""
        root, now = self._root[index], self.stores[index]
        return [root] if root is now else [root, now]

    def index_of(self, place: Place) -> int:
        """Where a hosted place stands among ``places``."""
        return self._place_index[place]

    def hosts(self, place: Place) -> bool:
        return place in self._place_index
