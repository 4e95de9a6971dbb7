"""From a batch's bytes to a plan: which local runs and which communicating calls, for the places that this worker hosts.

Pure but for binding kernels. A plan is made once for a batch's bytes and found again by them; running it is the
executor's work.

Store indices are slots. A local run is a list of instructions of one form, so that its loop does no dispatch:

    KILL    (slot,)                          forget a tensor after its last use
    UNARY   (f, out, a)                      s[out] = f(s[a])
    BINARY  (f, out, a, b)                   s[out] = f(s[a], s[b])
    SCALAR  (f, out, a, number)              s[out] = f(s[a], number)
    TERNARY (f, out, a, b, c)
    GENERAL (f, outs, ins, numbers, writes)  any; outs () when it writes in place
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Definition

KILL, UNARY, BINARY, SCALAR, TERNARY, GENERAL = range(6)

@dataclass(frozen=True)
class Step:
    """One call, decoded.

    Attributes:
        release: slots to forget right after it.
        into: position of the input whose memory the output takes, where it fits.
    """

    index: int  # in the batch
    definition: Definition
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    numbers: tuple[Any, ...]
    release: tuple[int, ...] = ()
    into: int | None = None


@dataclass
class Run:
    """Instructions of one form for one device; ``calls`` has the batch index of each."""

    form: int
    code: list[tuple[Any, ...]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


@dataclass
class Local:
    """Runs of every hosted place concerned; places do not depend on each other here."""

    runs: dict[int, list[Run]]  # index of the hosted place -> its runs


@dataclass
class Joint:
    """A call that the hosted places run together: it communicates, draws random numbers or reads an upload."""

    step: Step
    bound: Any  # the executor's


@dataclass
class Begun:
    """Joint calls that begin here and end at the ``Finish`` that holds this object.

    Attributes:
        flight: what is under way (``joint.Flight``), between the two.
    """

    joints: list[Joint]
    flight: Any = None


@dataclass
class Finish:
    begun: Begun


@dataclass
class Replay:
    """A call that replays a program (``executor.CompiledProgram``)."""

    step: Step
    program: Any


@dataclass
class Plan:
    parts: list[Any]  # Local, Joint, Begun, Finish, Replay or, where a program allows it, fusion.Fused
    frees: list[tuple[tuple[int, ...], list[int]]]  # hosted places, slots to forget at the end
    num_slots: int  # stores must be at least this long
    num_calls: int
    sigs: tuple[int, ...] = ()  # signature of each call
    draws: bool = False  # some call draws random numbers
    writes: bool = False  # some call writes in place
    census: Any = None  # kept here by whoever counts calls

    def executed(self, count: int) -> tuple[int, int]:
        """(mask of the calls, number of those that draw) that are done once the first ``count`` parts are."""
        mask = draws = 0
        for part in self.parts[:count]:
            local = part if isinstance(part, Local) else getattr(part, "part", None)  # of a fusion.Fused
            if local is not None:
                for runs in local.runs.values():
                    for run in runs:
                        for call in run.calls if run.form != KILL else ():
                            mask |= 1 << call
            else:
                joints = [part] if isinstance(part, (Joint, Replay)) else part.begun.joints if isinstance(part, Finish) else []
                for joint in joints:
                    mask |= 1 << joint.step.index
                    draws += bool(joint.step.definition.params.get("random"))
        return mask, draws

    def underway(self, count: int) -> list[Joint]:
        """Joint calls that part ``count`` or an earlier one has begun and that are not done."""
        begun: list[Joint] = []
        for part in self.parts[: count + 1]:
            if isinstance(part, Begun):
                begun += part.joints
            elif isinstance(part, Joint):
                begun.append(part)
        done, _ = self.executed(count)
        return [joint for joint in begun if not done >> joint.step.index & 1]


MAX_PLANNED_CALLS = 32 * 1024
"""Calls in all compiled plans kept (about 0.7 KiB each); the oldest plans go first."""
MAX_BODIES_SEEN = 4096
"""Hashes of bodies that were met once. Only a body that comes again is worth a kept plan."""


class Plans:
    """Plans kept for bodies that have come before."""

    def __init__(self) -> None:
        self._plans: dict[bytes, Plan] = {}
        self._num_calls = 0
        self._seen: dict[int, None] = {}
        self.get = self._plans.get

    def add(self, body: bytes, plan: Plan) -> None:
        """A plan was made; it is kept from the second time on."""
        key = hash(body)
        if key not in self._seen:
            if len(self._seen) >= MAX_BODIES_SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = None
            return
        self._num_calls += plan.num_calls + 1
        while self._num_calls > MAX_PLANNED_CALLS and self._plans:
            self._num_calls -= self._plans.pop(next(iter(self._plans))).num_calls + 1
        self._plans[body] = plan

    def clear(self) -> None:
        self._plans.clear()
        self._num_calls = 0


_decode = msgspec.msgpack.Decoder(tuple[list[list[Any]], list[tuple[int, list[int]]]]).decode


def decode_body(body: bytes) -> tuple[list[list[Any]], list[tuple[int, list[int]]]]:
    """(calls, [(mesh, freed slots)]) of a batch; raises ProtocolError."""
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a batch's body is not what it should be: {error}") from None


def steps_of(calls: Sequence[Sequence[Any]], definitions: dict[int, Definition]) -> list[Step]:
    """Split flat calls into outputs, inputs and numbers. Raises ProtocolError for calls that fit no definition."""
    steps = []
    for index, call in enumerate(calls):
        definition = definitions.get(call[0]) if call else None
        if definition is None:
            raise ProtocolError(f"call {index} names an unknown signature {call[:1]}")
        num_outs = 0 if definition.writes else len(definition.outputs)
        num_ins = len(definition.inputs)
        slots = call[1 : 1 + num_outs + num_ins]
        if len(slots) != num_outs + num_ins or not all(type(s) is int and 0 <= s < 1 << 24 for s in slots):
            raise ProtocolError(f"call {index} of {definition.op} does not fit its definition")
        steps.append(
            Step(index, definition, tuple(slots[:num_outs]), tuple(slots[num_outs:]), tuple(call[1 + len(slots) :]))
        )
    return steps


def instruction(step: Step, fn: Callable[..., Any]) -> tuple[int, tuple[Any, ...]]:
    """The form and the instruction of a local call."""
    outs, ins, numbers = step.outs, step.ins, step.numbers
    if len(outs) == 1:
        if not numbers:
            if len(ins) == 1:
                return UNARY, (fn, outs[0], ins[0])
            if len(ins) == 2:
                return BINARY, (fn, outs[0], ins[0], ins[1])
            if len(ins) == 3:
                return TERNARY, (fn, outs[0], ins[0], ins[1], ins[2])
        elif len(ins) == 1 and len(numbers) == 1:
            return SCALAR, (fn, outs[0], ins[0], numbers[0])
    return GENERAL, (fn, outs, ins, numbers, step.definition.writes)


def append(runs: list[Run], form: int, code: tuple[Any, ...], call: int) -> None:
    """Add an instruction to the last run when it has the same form, else start a run."""
    if not runs or runs[-1].form != form:
        runs.append(Run(form))
    runs[-1].code.append(code)
    runs[-1].calls.append(call)
