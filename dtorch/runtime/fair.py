"""An executor for workers that sessions share: it takes turns op by op, and keeps to the bytes it may hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import length_hint
from time import perf_counter_ns
from typing import Any

from dtorch.runtime.arrivals import Arrival
from dtorch.runtime.binding import Binder, Bound
from dtorch.runtime.executor import Executor
from dtorch.runtime.files import FileAccess
from dtorch.runtime.layout import coords, local_shape
from dtorch.runtime.plan import KILL, Begun, Finish, Local, Plan, Replay, Step
from dtorch.runtime.poison import Poison
from dtorch.runtime.spending import Source, Spending, kind, verb
from dtorch.runtime.template import dtype_of
from dtorch.runtime.turns import Turns
from dtorch.transport.errors import ProtocolError, QuotaError
from dtorch.transport.messages import Definition, Program

SMALL_BYTES = 4096
"""Outputs below this are counted with the next look at the stores instead of one by one."""
MAX_SLOTS = 1 << 20
"""Tensors that a session may have, and registers of a program."""
LOOK_PART = 20
"""Looking at the stores takes at most the ``LOOK_PART``-th part of the time."""


class Ledger:
    """Bytes that a session holds on this worker, and how many it may.

    Between two looks at the stores only what is added is counted, so the sum may be too high and is never too low but for
    small outputs. When it meets the limit, the stores are looked at.

    Args:
        limit_bytes: 0 for none.
        look: the bytes held, exactly.
    """

    def __init__(self, limit_bytes: int, look: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._look = look

    def look(self) -> int:
        self.held_bytes = self._look()
        return self.held_bytes

    def admit(self, size_bytes: int) -> None:
        """Called before so many bytes are allocated. Raises QuotaError when they would be too many."""
        if self.limit_bytes and self.held_bytes + size_bytes > self.limit_bytes:
            held = self.look()
            if held + size_bytes > self.limit_bytes:
                raise QuotaError(
                    f"{size_bytes} more bytes are above the quota of {self.limit_bytes} bytes on a worker, "
                    f"{held} of which are held; free some tensors, or ask whoever runs the cluster for more"
                )
        self.held_bytes += size_bytes


class FairBinder(Binder):
    """Binds functions that ask for the bytes of their results first, and let others have their turn.

    Attributes:
        ledger: of the session.
        step: lets others have their turn. Calls that the hosted places run together do so as they begin; between local
            instructions ``FairExecutor.observer`` does.
    """

    ledger = Ledger(0, lambda: 0)
    step: Callable[[], None] = staticmethod(lambda: None)

    def _make_bound(self, definition: Definition) -> Bound | None:
        bound = super()._make_bound(definition)
        if bound is None:
            return None
        if bound.is_joint:
            for index, fn in bound.functions.items():
                bound.functions[index] = self._polite(fn)
        if bound.communicates or definition.writes or not self.ledger.limit_bytes:
            return bound
        for index, fn in bound.functions.items():
            size = self._output_bytes(definition, index)
            if size >= SMALL_BYTES:
                bound.functions[index] = _admitted(fn, size, self.ledger)
        whole = sum(math.prod(out.shape) * dtype_of(out.dtype).itemsize for out in definition.outputs)
        if bound.draws is not None and whole > self.ledger.limit_bytes:
            # All workers draw alike, so all must refuse alike: by what is known everywhere, not by what is held here.
            bound.draws = _too_large(whole, self.ledger.limit_bytes)
        return bound

    def number_of(self, index: int) -> tuple[str, int]:
        """Kind and number, as this worker counts them, of a hosted place."""
        place = self.places[index]
        moved = self._backing.get(place)
        return place[0] if moved is None else moved.type, self._locals.get(place, place[1])

    def leads(self, definition: Definition) -> bool:
        """Whether this worker is the one that counts a call; it hosts the first device of the call's mesh."""
        mesh = self.meshes[(definition.outputs or definition.inputs)[0].mesh]
        return mesh.workers[0] == self.worker

    def _polite(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return fn(*args, **kwargs)

        return run

    def _output_bytes(self, definition: Definition, index: int) -> int:
        kind, device = self.places[index]
        total = 0
        for layout in definition.outputs:
            mesh = self.meshes[layout.mesh]
            if mesh.kind == kind and device in mesh.devices:
                coord = coords(tuple(mesh.shape))[list(mesh.devices).index(device)]
                shape = local_shape(tuple(layout.shape), tuple(layout.codes), tuple(mesh.shape), coord)
                total += math.prod(shape) * dtype_of(layout.dtype).itemsize
        return total


class FairExecutor(Executor):
    """One session on one worker that others use too.

    Args:
        facts: as of ``Executor``.
        turns: the turn on this worker, which this session has while it runs.
        limit_bytes: that its tensors may hold here; 0 for no limit.
        folders: as of ``Executor``.
        spending: told of what the session uses.
    """

    make_binder = FairBinder

    def __init__(
        self,
        *facts: Any,
        turns: Turns,
        limit_bytes: int = 0,
        folders: Sequence[str] | None = None,
        spending: Spending | None = None,
    ) -> None:
        super().__init__(*facts)
        self.binder.files = FileAccess.within(folders, self.counters)
        self._turns = turns
        self.ledger = Ledger(limit_bytes, self._held)
        assert isinstance(self.binder, FairBinder)
        self.binder.ledger = self.ledger
        self.binder.step = partial(turns.step, self.session)
        self.spending = spending or Spending(self.session)
        self.traffic = {}
        self.is_stale = False  # something has run since the last look at the stores
        self._looked_ns = self._look_cost_ns = 0
        self._plan: Plan | None = None  # of the last batch
        self._sources: dict[int, Source] = {}  # by signature

    @property
    def held_bytes(self) -> int:
        return self.ledger.held_bytes

    def clock_ns(self) -> int:
        return self._turns.spent_ns(self.session)

    def _held(self) -> int:
        began = perf_counter_ns()
        held: dict[tuple[str, int], int] = {}
        assert isinstance(self.binder, FairBinder)
        for index in range(len(self.places)):
            device = self.binder.number_of(index)
            held[device] = held.get(device, 0) + self.memory.allocated(index)
        self.spending.hold(held)
        self.is_stale = False
        self._looked_ns = perf_counter_ns()
        self._look_cost_ns = self._looked_ns - began
        return sum(held.values())

    def observer(self) -> Callable[[Iterator[Any], int], Iterator[Any]]:
        below = super().observer()

        def observe(instructions: Iterator[Any], index: int) -> Iterator[Any]:
            return _Stepping(instructions if below is None else below(instructions, index), self._turns, self.session)

        return observe

    def plan(self, body: bytes) -> Plan:
        plan = super().plan(body)
        if plan.num_slots > MAX_SLOTS:
            raise ProtocolError(f"slot {plan.num_slots - 1} is beyond the last one, {MAX_SLOTS - 1}")
        self._plan = plan
        return plan

    def _compile(self, body: bytes) -> Plan:
        # It takes a while for a large batch, and others need not wait: it touches nothing but this session's own.
        with self._turns.released(self.session):
            return super()._compile(body)

    def add_program(self, program: Program) -> None:
        if not 0 <= program.num_registers <= MAX_SLOTS:
            raise ProtocolError(f"a program of {program.num_registers} registers is beyond the limit of {MAX_SLOTS}")
        super().add_program(program)

    def run(self, seq: int, body: bytes, uploads: list[Arrival]) -> bool:
        if not super().run(seq, body, uploads):
            return False
        self._note(self._plan)
        self.is_stale = True
        if perf_counter_ns() - self._looked_ns >= LOOK_PART * self._look_cost_ns:
            self.ledger.look()
        return True

    def _note(self, plan: Plan | None) -> None:
        assert plan is not None
        if plan.census is None:
            plan.census = self._census(plan)
        ops, calls = plan.census
        traffic, self.traffic = self.traffic, {}
        sent: Counter[Source] = Counter()
        for sig, size in (traffic or {}).items():
            sent[self._source(sig)] += size
        self.spending.ran(ops, calls, sent)

    def _census(self, plan: Plan) -> tuple[Counter[str], Counter[Source]]:
        """Calls that this worker counts, by name, and those of them that communicate; with those inside programs."""
        ops: Counter[str] = Counter()
        calls: Counter[Source] = Counter()
        definitions = self.binder.definitions
        assert isinstance(self.binder, FairBinder)
        for sig, count in Counter(plan.sigs).items():
            definition = definitions[sig]
            inner: Plan | None = self.program(sig).plan if definition.kernel == "program" else None
            if inner is not None:
                inner_ops, inner_calls = self._census(inner)
                ops.update({name: count * number for name, number in inner_ops.items()})
                calls.update({source: count * number for source, number in inner_calls.items()})
            elif self.binder.leads(definition):
                ops[kind(definition)] += count
                bound = self.binder.bind(definition)
                if bound is not None and bound.communicates:
                    calls[self._source(sig)] += count
        return ops, calls

    def _source(self, sig: int) -> Source:
        found = self._sources.get(sig)
        if found is None:
            definition = self.binder.definitions[sig]
            found = self._sources[sig] = (kind(definition), verb(definition), definition.where)
        return found

    def forget(self, below: int) -> None:
        super().forget(below)
        for sig in [s for s in self._sources if s < below]:
            del self._sources[sig]

    def refuse(self, seq: int, body: bytes, reason: str) -> None:
        """Let every call of a batch fail. What it frees is freed."""
        self._seq = seq
        plan = self.plan(body)
        for store in self.stores:
            missing = plan.num_slots - len(store)
            if missing > 0:
                store.extend([None] * (missing + 256))
        if plan.num_calls:
            place = self.places[0] if self.places else ("cpu", 0)
            self._poison_plan(plan, self.fail(0, place, QuotaError(reason)))
        for places, slots in plan.frees:
            for index in places:
                for slot in slots:
                    self.stores[index][slot] = None

    def _poison_plan(self, plan: Plan, poison: Poison) -> None:
        for part in plan.parts:
            if isinstance(part, Local):
                for index, runs in part.runs.items():
                    for run in runs:
                        for code in run.code if run.form != KILL else ():
                            outs = code[1] if isinstance(code[1], tuple) else code[1:2]
                            written = (code[2][w] for w in code[4]) if isinstance(code[1], tuple) else ()
                            for slot in (*outs, *written):
                                self.stores[index][slot] = poison
            elif isinstance(part, Replay):
                self._poison(part.step, part.program.places, poison)
            elif not isinstance(part, Finish):
                for joint in part.joints if isinstance(part, Begun) else (part,):
                    self._poison(joint.step, joint.bound.functions, poison)

    def _poison(self, step: Step, indices: Iterable[int], poison: Poison) -> None:
        for index in indices:
            for slot in step.outs or [step.ins[w] for w in step.definition.writes]:
                self.stores[index][slot] = poison


def _admitted(fn: Callable[..., Any], size_bytes: int, ledger: Ledger) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        ledger.admit(size_bytes)
        return fn(*args, **kwargs)

    return run


def _too_large(size_bytes: int, limit_bytes: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise QuotaError(f"random numbers of {size_bytes} bytes are above the quota of {limit_bytes} bytes on a worker")

    return refuse


class _Stepping:
    """An iterator over instructions that lets others have their turn before each."""

    __slots__ = ("_instructions", "_session", "_step")

    def __init__(self, instructions: Iterator[Any], turns: Turns, session: int) -> None:
        self._instructions = instructions
        self._step = turns.step
        self._session = session

    def __iter__(self) -> _Stepping:
        return self

    def __next__(self) -> Any:
        self._step(self._session)
        return next(self._instructions)

    def __length_hint__(self) -> int:
        return length_hint(self._instructions)
