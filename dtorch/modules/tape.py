"""The calls of one straight line, as they were recorded once, to be recorded again for other inputs.

What is played are the very calls that the ops themselves would have put, with other slots: workers, profiles and errors see no
difference. ``tape_of`` decides whether calls can be played again: those that write, draw or use what is no input cannot. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

from dtorch.failures import SignatureFacts

At = tuple[CodeType | None, int]


class Step(NamedTuple):
    """One call.

    Attributes:
        ins: places of its inputs among the tape's tensors: the inputs, then what calls have made.
        numbers: what follows the slots of a call.
        at: the line that issued it; None: the line that called the module.
    """

    sig: int
    num_outs: int
    ins: tuple[int, ...]
    numbers: tuple[Any, ...]
    at: At | None


class Tape(NamedTuple):
    """Calls for inputs of certain specs.

    Attributes:
        results: places of the results among the tensors: the inputs, then what calls have made.
        others: places of what else was made, by mesh.
    """

    steps: list[Step]
    results: tuple[int, ...]
    others: dict[int, list[int]]


def tape_of(
    chunk: Sequence[Any],
    inputs: Sequence[int],
    results: Sequence[int],
    facts: Callable[[int], SignatureFacts],
    outer: At,
) -> Tape | None:
    """The calls that a module's call consists of; None where they cannot be played again.

    Args:
        chunk: what was put meanwhile, three entries a call.
        inputs: slots of the module's inputs, all different.
        results: slots of its results, all different.
        outer: the line that called the module.
    """
    places = {slot: place for place, slot in enumerate(inputs)}  # a slot may be another tensor's later on
    num_places = len(inputs)
    steps: list[Step] = []
    others: dict[int, list[int]] = {}
    makers: dict[int, int] = {}  # place -> call that made it
    used: set[int] = set()
    for index, (call, code, offset) in enumerate(zip(chunk[::3], chunk[1::3], chunk[2::3], strict=True)):
        known = facts(call[0])
        num_outs, num_ins = len(known.outputs), len(known.inputs)
        if known.writes or known.random or known.mutates or not num_outs or not num_ins or _is_ours(known.op):
            return None
        outs, ins, numbers = call[1 : 1 + num_outs], call[1 + num_outs : 1 + num_outs + num_ins], call[1 + num_outs + num_ins :]
        if any(slot not in places for slot in ins) or not set(inputs).isdisjoint(outs):
            return None
        if any(not layout.shape and not layout.dtype.startswith(_REAL) for layout in known.outputs):
            return None  # where torch wants a size, the value of such a tensor is read
        own = tuple([places[slot] for slot in ins])
        used.update(makers[place] for place in own if place in makers)
        for slot, layout in zip(outs, known.outputs, strict=True):
            others.setdefault(layout.mesh, []).append(num_places)
            makers[num_places] = index
            places[slot] = num_places
            num_places += 1
        line = None if code is outer[0] and offset == outer[1] else (code, offset)
        steps.append(Step(call[0], num_outs, own, numbers, line))
    made = tuple([places.get(slot, -1) for slot in results])
    if min(made) < len(inputs) or len(used.union(makers[place] for place in made)) < len(steps):
        return None  # nothing that was made here, or there are calls of another thread
    for mesh, here in others.items():
        others[mesh] = [place for place in here if place not in made]
    return Tape(steps, made, {mesh: found for mesh, found in others.items() if found})


def _is_ours(op: str) -> bool:
    """Whether a call is none of an op: an upload, a program, a file that is read or written."""
    return op.startswith("dtorch.") and op != "dtorch.redistribute"


_REAL = ("float", "bfloat", "complex", "bool")
