"""Forget tensors after their last use, not at the end of the batch."""

from __future__ import annotations

from dataclasses import replace

from dtorch.runtime.rewrite.block import Block, Item, Launch, layouts, makes, reads, size_bytes, steps_of_item

FREE_BYTES = 16 * 1024
"""Tensors smaller than this live to the end of the batch: forgetting them earlier costs more than it frees."""


def free_early(block: Block) -> Block:
    """Slots of large tensors that die with the block are released by the last item that uses them.

    A dying slot that no item names stays to the end, before which nothing else needs its memory less.
    """
    sizes = {slot: size_bytes(lay) for item in block.items for step in steps_of_item(item) for slot, lay in layouts(step)}
    seen: set[int] = set()
    items: list[Item] = []
    for item in reversed(block.items):
        last = [slot for slot in dict.fromkeys([*makes(item), *reads(item)]) if slot not in seen]
        seen.update(last)
        release = tuple(slot for slot in last if slot in block.dying and sizes[slot] >= FREE_BYTES)
        items.append(replace(item, release=release) if release and not isinstance(item, Launch) else item)
    return replace(block, items=tuple(reversed(items)))
