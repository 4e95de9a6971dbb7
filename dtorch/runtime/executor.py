"""Executes batches of one session on the devices that this worker hosts.

Stores: one list a hosted place, indexed by slot. A slot holds a torch.Tensor, a ``Poison`` (the op that should have made it
failed), or None.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch

from dtorch.runtime.binding import Binder, Bound
from dtorch.runtime.comm import Place
from dtorch.runtime.files import FileAccess
from dtorch.runtime.layout import coords, local_shape
from dtorch.runtime.memory import MemoryMeter
from dtorch.runtime.plan import (
    BINARY,
    GENERAL,
    KILL,
    SCALAR,
    TERNARY,
    UNARY,
    Joint,
    Local,
    Plan,
    Replay,
    Run,
    Step,
    append,
    decode_body,
    instruction,
    last_uses,
    steps_of,
)
from dtorch.runtime.template import dtype_of
from dtorch.runtime.tracing import BATCH, COMMUNICATION, COMPUTE, COPY, FREE, PLAN, Tracer, sent_bytes
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Definition, Failure, MeshInfo, Program

if TYPE_CHECKING:
    from dtorch.transport.groups import Group

MAX_PLANNED_CALLS = 32 * 1024
"""Calls in all compiled plans kept (about 0.7 KiB each); the oldest plans go first."""
MAX_BODIES_SEEN = 4096
"""Hashes of bodies that were met once. Only a body that comes again is worth a kept plan."""


_FED = ("upload", "upload_shards", "read")
"""Kernels that make a tensor out of bytes that all hosted places share."""


class Poison:
    """Stands where a tensor should be. ``error`` is the failure's number on this worker; -1: it happened elsewhere."""

    __slots__ = ("error",)

    def __init__(self, error: int) -> None:
        self.error = error


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
    """

    def __init__(
        self,
        session: int,
        worker: int,
        resolve: Callable[[str], Callable[..., Any]],
        device_of: Callable[[Place], torch.device],
        make_group: Callable[[tuple[int, ...], str], Group],
        report: Callable[[Failure], None],
        folders: Sequence[str] | None = None,
    ) -> None:
        self.session = session
        self.worker = worker
        self._report = report
        self.binder = Binder(worker, resolve, device_of, make_group)
        self.meshes, self.places = self.binder.meshes, self.binder.places
        self._place_index = self.binder.place_index
        self.device_of = self.binder.device_of
        self._programs: dict[int, Program] = {}
        self._compiled: dict[int, CompiledProgram] = {}
        self._outer: int | None = None  # while a program replays: the batch index of the call that replays it
        self.stores: list[list[Any]] = []
        self._root = self.stores  # the stores themselves, also while a program has put registers in their place
        self._plans: dict[bytes, Plan] = {}
        self._planned_calls = 0
        self._bodies_seen: dict[int, None] = {}
        self._num_errors = 0
        self._seq = 0
        self._uploads: list[torch.Tensor] = []
        self.memory = MemoryMeter(self)
        self.tracer: Tracer | None = None  # while a profile runs
        self.counters = {
            "calls": 0, "batches": 0, "plan_hits": 0, "plan_misses": 0, "failures": 0, "exchanges": 0, "exchanged_bytes": 0
        }
        self.binder.files = FileAccess.within(folders, self.counters)

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
        self._planned_calls = 0

    # ---- plans

    def plan(self, body: bytes) -> Plan:
        found = self._plans.get(body)
        if found is not None:
            self.counters["plan_hits"] += 1
            return found
        self.counters["plan_misses"] += 1
        made = self._compile(body)
        key = hash(body)
        if key not in self._bodies_seen:
            if len(self._bodies_seen) >= MAX_BODIES_SEEN:
                del self._bodies_seen[next(iter(self._bodies_seen))]
            self._bodies_seen[key] = None
            return made
        self._planned_calls += made.num_calls + 1
        while self._planned_calls > MAX_PLANNED_CALLS and self._plans:
            self._planned_calls -= self._plans.pop(next(iter(self._plans))).num_calls + 1
        self._plans[body] = made
        return made

    def _program(self, sig: int) -> CompiledProgram:
        """The plan of a program, over registers."""
        made = self._compiled.get(sig)
        if made is None:
            program = self._programs.get(sig)
            if program is None:
                raise ProtocolError(f"signature {sig} names no program")
            plan = self._compile(program.body)
            places = {index for mesh in program.meshes for index in self.binder.hosted(mesh)}
            made = self._compiled[sig] = CompiledProgram(program, plan, tuple(sorted(places)))
        return made

    def _replay(self, replay: Replay) -> None:
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
        kills = last_uses(steps, frees)
        parts: list[Local | Joint | Replay] = []
        highest = -1
        for position, step in enumerate(steps):
            highest = max([highest, *step.outs, *step.ins])
            if step.definition.kernel == "program":
                program = self._program(step.definition.sig)
                parts.append(Replay(step, program))
                highest = max([highest, *(slot for _, slot in (*program.program.captured, *program.program.kept))])
                if position in kills:
                    parts.append(Local({i: [_killing(kills[position], step.index)] for i in program.places}))
                continue
            bound = self.binder.bind(step.definition)
            if bound is None:
                continue
            if bound.kernel.communicates or bound.draws is not None or bound.kernel.name in _FED:
                parts.append(Joint(step, bound))
                if position in kills:
                    parts.append(Local({i: [_killing(kills[position], step.index)] for i in bound.functions}))
                continue
            local = parts[-1] if parts else None
            if not isinstance(local, Local):
                local = Local({})
                parts.append(local)
            for index, fn in bound.functions.items():
                runs = local.runs.setdefault(index, [])
                append(runs, *instruction(step, fn), step.index)
                for slot in kills.get(position, ()):
                    append(runs, KILL, (slot,), step.index)
        final = []
        for mesh, slots in frees:
            hosted = self.binder.hosted(mesh)
            if hosted:
                final.append((hosted, slots))
                highest = max([highest, *slots])
        return Plan(parts, final, highest + 1, len(steps), tuple(step.definition.sig for step in steps))

    # ---- execution

    def run(self, seq: int, body: bytes, uploads: list[torch.Tensor]) -> None:
        """Execute one batch. Failures of calls are reported and poison what depends on them; nothing is raised for them."""
        self._seq = seq
        self._uploads = uploads
        tracer = self.tracer
        began = 0 if tracer is None else tracer.mark(-1)
        plan = self.plan(body)
        if tracer is not None:
            tracer.seq = seq
            tracer.add(PLAN, -1, -1, began, tracer.mark(-1))
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
        for part in plan.parts:
            if type(part) is Local:
                for index, runs in part.runs.items():
                    self._run_local(index, runs)
                if memory.watching:
                    memory.observe()
            elif type(part) is Replay:
                self._replay(part)
            else:
                self._run_joint(part)  # type: ignore[arg-type]

    def _run_local(self, index: int, runs: list[Run]) -> None:
        s = self.stores[index]
        observe = self.memory.observe_step if self.memory.watching else None
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
            poison = self._fail(call, self.places[index], error)
        for slot in (*outs, *(ins[w] for w in writes)):
            s[slot] = poison

    def _fail(self, call: int, place: Place, error: BaseException) -> Poison:
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

    def _run_joint(self, joint: Joint) -> None:
        bound: Bound = joint.bound
        try:
            if bound.kernel.communicates:
                self._run_generators(joint.step, bound)
            elif bound.draws is not None:
                self._run_random(joint.step, bound)
            else:
                self._run_upload(joint.step, bound)
        except Exception as error:
            place = self.places[next(iter(bound.functions))] if bound.functions else ("cpu", 0)
            poison = self._fail(joint.step.index, place, error)
            for index in bound.functions:
                self._put_all(index, joint.step, poison)

    def _put_all(self, index: int, step: Step, value: Any) -> None:
        s = self.stores[index]
        for slot in step.outs or [step.ins[w] for w in step.definition.writes]:
            s[slot] = value

    def _run_upload(self, step: Step, bound: Bound) -> None:
        numbers = step.numbers
        if bound.kernel.name == "read":  # with what devices have read: those with the same piece read it once
            data: Any = {}
        else:
            data, numbers = self._uploads[numbers[0]], ()
        for index, fn in bound.functions.items():
            began = 0 if self.tracer is None else self.tracer.mark(index)
            made = self.stores[index][step.outs[0]] = fn(data, *numbers)
            if self.tracer is not None:
                self.tracer.add(COPY, index, step.index, began, self.tracer.mark(index), made.nbytes)

    def _run_random(self, step: Step, bound: Bound) -> None:
        assert bound.draws is not None
        inputs: list[Any] | None = None
        if bound.functions and step.ins:
            s = self.stores[next(iter(bound.functions))]
            inputs = [s[i] for i in step.ins]
        poison = next((t for t in inputs or [] if type(t) is Poison), None)
        if poison is not None:
            for index in bound.functions:
                self._put_all(index, step, poison)
            return
        first = next(iter(bound.functions), -1)
        began = 0 if self.tracer is None else self.tracer.mark(first)
        drawn = bound.draws(inputs, step.numbers)
        for index, fn in bound.functions.items():
            s = self.stores[index]
            if self.tracer is not None and index != first:
                began = self.tracer.mark(index)
            result = fn(drawn, *[s[i] for i in step.ins])
            if self.tracer is not None:
                self.tracer.add(COMPUTE, index, step.index, began, self.tracer.mark(index))
            if step.definition.writes:
                continue
            if len(step.outs) == 1:
                s[step.outs[0]] = result
            else:
                for slot, value in zip(step.outs, result, strict=True):
                    s[slot] = value

    def _run_generators(self, step: Step, bound: Bound) -> None:
        """Run a communicating kernel on all hosted places in lockstep.

        A poisoned input is replaced by zeros of its shape, so that other workers' exchanges stay matched; what comes out is
        poison again, here and, by the status that travels with each message, at its receivers.
        """
        comm, members = bound.comm, bound.members
        assert comm is not None
        assert members is not None
        definition = step.definition
        tracer = self.tracer
        poison: Poison | None = None
        generators: dict[Place, Any] = {}
        index_of: dict[Place, int] = {}
        for index, fn in bound.functions.items():
            place = self.places[index]
            s = self.stores[index]
            values = []
            for slot, layout in zip(step.ins, definition.inputs, strict=True):
                info = self.meshes[layout.mesh]
                if place[0] != info.kind or place[1] not in info.devices:
                    continue
                value = s[slot]
                if type(value) is Poison:
                    poison = value
                    value = self._stand_in(place, layout)
                values.append(value)
            generators[place] = fn(*values, *step.numbers)
            index_of[place] = index
        # One device may write its piece before another has looked at what it was sent of it.
        written = {
            s[slot].untyped_storage().data_ptr()
            for index in bound.functions
            for s in (self.stores[index],)
            for slot in (step.ins[w] for w in definition.writes)
            if isinstance(s[slot], torch.Tensor)
        }
        comm.ok = True
        results: dict[Place, Any] = {}
        answers: dict[Place, Any] = dict.fromkeys(generators)
        while generators:
            requests = {}
            for place in list(generators):
                began = 0 if tracer is None else tracer.mark(index_of[place])
                try:
                    requests[place] = generators[place].send(answers[place])
                except StopIteration as stop:
                    results[place] = stop.value
                    del generators[place]
                if tracer is not None:
                    tracer.add(COMPUTE, index_of[place], step.index, began, tracer.mark(index_of[place]))
            if requests:
                self.counters["exchanges"] += 1
                for request in requests.values() if written else ():
                    request.detach_from(written)
                marks = {} if tracer is None else {place: tracer.mark(index_of[place]) for place in requests}
                comm.sent_bytes = 0
                answers = comm.perform(members, requests, poison is None)
                self.counters["exchanged_bytes"] += comm.sent_bytes
                if tracer is not None:
                    for place, request in requests.items():
                        num = members.num_along(getattr(request, "axes", ()))
                        at = index_of[place]
                        size = sent_bytes(request, num)
                        tracer.add(COMMUNICATION, at, step.index, marks[place], tracer.mark(at), size)
        if poison is None and not comm.ok:
            poison = Poison(-1)
        for place, result in results.items():
            index = index_of[place]
            if poison is not None:
                self._put_all(index, step, poison)
                continue
            if definition.writes or result is None:
                continue
            s = self.stores[index]
            if isinstance(result, torch.Tensor):
                s[step.outs[0]] = result
            else:
                for slot, value in zip(step.outs, result, strict=True):
                    s[slot] = value

    def _stand_in(self, place: Place, layout: Any) -> torch.Tensor:
        info = self.meshes[layout.mesh]
        coord = coords(tuple(info.shape))[list(info.devices).index(place[1])]
        shape = local_shape(tuple(layout.shape), tuple(layout.codes), tuple(info.shape), coord)
        return torch.zeros(shape, dtype=dtype_of(layout.dtype), device=self.device_of(place))

    # ---- reading

    def held(self, slot: int, place: Place) -> Any:
        """What a hosted place has in ``slot``: a tensor, a Poison, or None."""
        store = self.stores[self._place_index[place]]
        return store[slot] if slot < len(store) else None

    def index_of(self, place: Place) -> int:
        """Where a hosted place stands among ``places``."""
        return self._place_index[place]

    def hosts(self, place: Place) -> bool:
        return place in self._place_index


def _killing(slots: list[int], call: int) -> Run:
    run = Run(KILL)
    for slot in slots:
        run.code.append((slot,))
        run.calls.append(call)
    return run
