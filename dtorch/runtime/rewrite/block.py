"""Instructions as rules see them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtorch.runtime.plan import Step
from dtorch.runtime.rewrite.traits import written
from dtorch.runtime.template import dtype_of
from dtorch.transport.messages import Layout, MeshInfo


@dataclass(frozen=True)
class Launch:
    """Begin these calls, which communicate and do not need each other; what they send to other workers goes as one."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Wait:
    """The results of a launch are there from here on.

    Attributes:
        steps: those of the launch.
        release: slots to forget then.
    """

    steps: tuple[Step, ...]
    release: tuple[int, ...] = ()


Item = Step | Launch | Wait


@dataclass(frozen=True)
class Block:
    """The calls of a batch, or of a program.

    A slot is written by one call of a block at most, but for those that calls write in place.

    Attributes:
        items: in the order of execution.
        dying: slots that are forgotten at the block's end, whatever the rules do.
        meshes: what is known of each mesh, by number.
    """

    items: tuple[Item, ...]
    dying: frozenset[int]
    meshes: dict[int, MeshInfo]

    def __str__(self) -> str:
        """A line an item, such as ``2 = add(0, 1) free 0 1 into 0``."""
        return "\n".join(map(_line, self.items))


def _line(item: Item) -> str:
    if isinstance(item, Step):
        outs = ", ".join(map(str, item.outs))
        given = ", ".join([*map(str, item.ins), *(f"#{number}" for number in item.numbers)])
        text = f"{outs} = " if outs else ""
        text += f"{item.definition.op.rpartition('.')[2]}({given})"
    else:
        text = f"{type(item).__name__.lower()} {' + '.join(_line(replace(step, release=())) for step in item.steps)}"
    if not isinstance(item, Launch) and item.release:
        text += " free " + " ".join(map(str, item.release))
    if isinstance(item, Step) and item.into is not None:
        text += f" into {item.ins[item.into]}"
    return text


def steps_of_item(item: Item) -> tuple[Step, ...]:
    return (item,) if isinstance(item, Step) else item.steps


def reads(item: Item) -> Iterator[int]:
    """Slots whose tensors an item needs. A launch and its wait both need what is sent."""
    for step in steps_of_item(item):
        yield from step.ins


def makes(item: Item) -> Iterator[int]:
    """Slots that hold something new after an item."""
    if not isinstance(item, Launch):
        for step in steps_of_item(item):
            yield from step.outs


def writes(item: Item) -> Iterator[int]:
    """Slots whose tensors an item writes in place."""
    for step in steps_of_item(item):
        for w in written(step.definition):
            yield step.ins[w]


def layouts(step: Step) -> Iterator[tuple[int, Layout]]:
    """(slot, layout) of everything that a step names."""
    if step.outs:
        yield from zip(step.outs, step.definition.outputs, strict=True)
    yield from zip(step.ins, step.definition.inputs, strict=True)


def size_bytes(layout: Layout) -> int:
    """Bytes of the whole tensor, an upper bound for any device's piece."""
    return math.prod(layout.shape) * dtype_of(layout.dtype).itemsize
