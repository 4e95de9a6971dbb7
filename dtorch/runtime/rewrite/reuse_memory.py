"""Let a result take the memory of an input that dies with the call."""

from __future__ import annotations

from dataclasses import replace

from dtorch.runtime.moves import is_local
from dtorch.runtime.plan import Step
from dtorch.runtime.rewrite.block import Block, Item, makes, steps_of_item
from dtorch.runtime.rewrite.traits import makes_new_memory, writes_into


def reuse_memory(block: Block) -> Block:
    """An elementwise call writes into the memory of an input that it is the last to use (``Step.into``), and a
    redistribution that would copy such an input on its own device hands it over.

    The input must be released by this very call (so ``free_early`` comes first) and own its memory: made by a call of this
    block that makes new memory, and read only by calls that keep none of what they read. For an elementwise call it must
    have the output's layout and dtype; each element is read before it is written. Values and bits are the same; strides
    are, too, as the plan uses ``into`` only where all inputs turn out to be contiguous.
    """
    own: set[int] = set()  # slots whose tensors share memory with nothing
    items: list[Item] = []
    for item in block.items:
        if isinstance(item, Step):
            definition = item.definition
            if item.release:
                into = next((i for i, slot in enumerate(item.ins) if slot in own and _fits(item, i, block)), None)
                item = item if into is None else replace(item, into=into)
            if makes_new_memory(definition):
                own.update(item.outs)
            else:
                own.difference_update(item.ins)  # what it returns may be a view of them
        else:
            for step in steps_of_item(item):
                own.difference_update(step.ins)
                own.update(makes(item))
        items.append(item)
    return replace(block, items=tuple(items))


def _fits(step: Step, position: int, block: Block) -> bool:
    slot, definition = step.ins[position], step.definition
    if slot not in step.release or step.ins.count(slot) != 1:
        return False
    if definition.kernel == "redistribute":
        return is_local(definition, block.meshes)
    return writes_into(step) and definition.inputs[position] == definition.outputs[0]
