"""Do equal redistributions once."""

from __future__ import annotations

from dataclasses import replace

from dtorch.runtime.plan import Step
from dtorch.runtime.rewrite.block import Block, Item, makes, steps_of_item, writes
from dtorch.runtime.rewrite.traits import makes_new_memory


def move_once(block: Block) -> Block:
    """A redistribution of a tensor to a layout that it was brought to before is left out; its readers read the first.

    Both results must die with the block, so that nobody can tell them apart later, and no call of the block may write in
    place what shares memory with either, or with the source.
    """
    touched = _written(block)
    first: dict[object, int] = {}  # what is moved, and how -> slot of the result
    same: dict[int, int] = {}
    items: list[Item] = []
    for item in block.items:
        if isinstance(item, Step):
            item = replace(item, ins=tuple(same.get(slot, slot) for slot in item.ins))
            if item.definition.kernel == "redistribute" and not touched & {*item.ins, *item.outs}:
                (out,) = item.outs
                key = (item.ins, item.definition.inputs, item.definition.outputs)
                if out in block.dying and first.setdefault(key, out) != out:
                    same[out] = first[key]
                    continue
        items.append(item)
    return replace(block, items=tuple(items))


def _written(block: Block) -> set[int]:
    """Slots that may share memory with something that a call of the block writes in place."""
    touched = {slot for item in block.items for slot in writes(item)}
    if not touched:
        return touched
    made = {slot for item in block.items for slot in makes(item)}
    if touched - made:  # what comes from outside may be views of each other
        touched.update(slot for item in block.items for step in steps_of_item(item) for slot in step.ins if slot not in made)
    steps = [step for item in block.items for step in steps_of_item(item) if not makes_new_memory(step.definition)]
    size = 0
    while size != len(touched):
        size = len(touched)
        for step in (*steps, *reversed(steps)):
            if touched & {*step.ins, *step.outs}:
                touched.update(step.ins, step.outs)
    return touched
