"""Begin communication early, wait for it late, and send what is ready together as one."""

from __future__ import annotations

from dataclasses import replace

from dtorch.runtime.plan import Step
from dtorch.runtime.rewrite.block import Block, Item, Launch, Wait, makes, reads, writes
from dtorch.runtime.rewrite.traits import LOCAL, travels, written

_Pending = tuple[Launch, frozenset[int]]
"""A launch that is not waited for yet, and the meshes that it concerns."""

QUIET = (*LOCAL, "redistribute")
"""Kernels of calls that may run while something is under way."""
MAX_TOGETHER = 16
"""Calls that one exchange serves at most."""


def overlap(block: Block) -> Block:
    """A redistribution between workers begins as soon as its input is there, and is waited for where its result is needed.

    Redistributions on the same meshes that are ready at the same place are launched together. Only local calls that
    neither write in place nor need the result move ahead of the wait; anything else (a write, a random op, another
    kernel, a program) is a barrier. Nothing changes where one worker hosts all devices: then nothing travels.
    """
    pending: list[_Pending] = []
    items: list[Item] = []

    def wait(which: list[_Pending]) -> None:
        for launch, meshes in which:
            pending.remove((launch, meshes))
            items.append(Wait(launch.steps))

    for item in block.items:
        step = item if isinstance(item, Step) else None
        if step is not None and travels(step.definition, block.meshes):
            wait([p for p in pending if _needs(item, p[0])])
            meshes = frozenset((step.definition.inputs[0].mesh, step.definition.outputs[0].mesh))
            if not _joined(items, pending, step, meshes):
                launch = Launch((step,))
                pending.append((launch, meshes))
                items.append(launch)
            continue
        if step is not None and step.definition.kernel in QUIET and not written(step.definition):
            wait([p for p in pending if _needs(item, p[0])])
        else:
            wait(list(pending))
        items.append(item)
    wait(list(pending))
    return replace(block, items=tuple(_plain(items)))


def _needs(item: Item, launch: Launch) -> bool:
    results = {slot for step in launch.steps for slot in step.outs}
    return bool(results & {*reads(item), *makes(item), *writes(item)})


def _joined(items: list[Item], pending: list[_Pending], step: Step, meshes: frozenset[int]) -> bool:
    """Add ``step`` to the launch right before it, if that one concerns the same meshes."""
    if not pending or items[-1] is not pending[-1][0] or pending[-1][1] != meshes:
        return False
    launch = pending[-1][0]
    if len(launch.steps) >= MAX_TOGETHER:
        return False
    items[-1] = together = Launch((*launch.steps, step))
    pending[-1] = (together, meshes)
    return True


def _plain(items: list[Item]) -> list[Item]:
    """A launch of one call that is waited for at once is that call."""
    out: list[Item] = []
    for item in items:
        if isinstance(item, Wait) and len(item.steps) == 1 and out and out[-1] == Launch(item.steps):
            out[-1] = item.steps[0]
        else:
            out.append(item)
    return out
