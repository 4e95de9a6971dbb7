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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dtorch.runtime.template import dtype_of
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Definition, Layout

KILL, UNARY, BINARY, SCALAR, TERNARY, GENERAL = range(6)

KILL_BYTES = 16 * 1024
"""Tensors smaller than this live to the end of the batch: forgetting them earlier costs more than it frees."""


@dataclass(frozen=True)
class Step:
    """One call, decoded."""

    index: int  # in the batch
    definition: Definition
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    numbers: tuple[Any, ...]


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
class Replay:
    """A call that replays a program (``executor.CompiledProgram``)."""

    step: Step
    program: Any


@dataclass
class Plan:
    parts: list[Local | Joint | Replay]
    frees: list[tuple[tuple[int, ...], list[int]]]  # hosted places, slots to forget at the end
    num_slots: int  # stores must be at least this long
    num_calls: int
    sigs: tuple[int, ...] = ()  # signature of each call


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


def last_uses(steps: Sequence[Step], frees: Sequence[tuple[int, list[int]]]) -> dict[int, list[int]]:
    """Step position -> slots of large tensors that are freed at the batch's end and not used after that step.

    A freed slot that no step mentions is not listed: it goes at the end, before which nothing else needs its memory less.
    """
    dying = {slot for _, slots in frees for slot in slots}
    seen: set[int] = set()
    kills: dict[int, list[int]] = {}
    for position in range(len(steps) - 1, -1, -1):
        step = steps[position]
        layouts = (*step.definition.outputs, *step.definition.inputs) if step.outs else step.definition.inputs
        for slot, layout in zip((*step.outs, *step.ins), layouts, strict=True):
            if slot in dying and slot not in seen:
                seen.add(slot)
                if size_bytes(layout) >= KILL_BYTES:
                    kills.setdefault(position, []).append(slot)
    return kills


def size_bytes(layout: Layout) -> int:
    """Bytes of the whole tensor, an upper bound for any device's piece."""
    return math.prod(layout.shape) * dtype_of(layout.dtype).itemsize


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
