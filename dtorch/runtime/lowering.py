"""From rewritten instructions to what the executor loops over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtorch.runtime.binding import Binder
from dtorch.runtime.plan import (
    KILL,
    Begun,
    Finish,
    Joint,
    Local,
    Replay,
    Run,
    Step,
    append,
    instruction,
)
from dtorch.runtime.rewrite.block import Item, Launch, Wait

Parts = list[Local | Joint | Begun | Finish | Replay]


def lower(items: Sequence[Item], binder: Binder, program_of: Callable[[int], Any]) -> Parts:
    """The parts of a plan, for the places that this worker hosts.

    Args:
        program_of: signature -> program made ready (``executor.CompiledProgram``).
    """
    parts: Parts = []
    begun: dict[int, tuple[Begun, set[int]]] = {}  # by the index of its first call
    for item in items:
        if isinstance(item, Launch):
            joints = [Joint(step, bound) for step in item.steps if (bound := binder.bind(step.definition)) is not None]
            if joints:
                launched, places = Begun(joints), {i for joint in joints for i in joint.bound.functions}
                begun[item.steps[0].index] = launched, places
                parts.append(launched)
        elif isinstance(item, Wait):
            if item.steps[0].index in begun:
                launched, places = begun.pop(item.steps[0].index)
                parts.append(Finish(launched))
                _forget(parts, places, item.release, item.steps[-1].index)
        elif item.definition.kernel == "program":
            program = program_of(item.definition.sig)
            parts.append(Replay(item, program))
            _forget(parts, program.places, item.release, item.index)
        else:
            _lower_call(parts, item, binder)
    return parts


def _lower_call(parts: Parts, step: Step, binder: Binder) -> None:
    bound = binder.bind(step.definition)
    if bound is None:
        return
    if bound.is_joint:
        parts.append(Joint(step, bound))
        _forget(parts, bound.functions, step.release, step.index)
        return
    functions = bound.functions if step.into is None else binder.bind_into(step.definition, step.into)
    for index, fn in functions.items():
        runs = _local(parts).runs.setdefault(index, [])
        append(runs, *instruction(step, fn), step.index)
        for slot in step.release:
            append(runs, KILL, (slot,), step.index)


def _local(parts: Parts) -> Local:
    last = parts[-1] if parts else None
    if not isinstance(last, Local):
        last = Local({})
        parts.append(last)
    return last


def _forget(parts: Parts, places: Any, slots: tuple[int, ...], call: int) -> None:
    """A local part of its own, so that it runs right here."""
    if slots:
        parts.append(Local({i: [Run(KILL, [(slot,) for slot in slots], [call] * len(slots))] for i in places}))
