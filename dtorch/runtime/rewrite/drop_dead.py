"""Leave out calls whose results nobody reads."""

from __future__ import annotations

from dataclasses import replace

from dtorch.runtime.plan import Step
from dtorch.runtime.rewrite.block import Block, Item, makes, reads
from dtorch.runtime.rewrite.traits import is_pure


def drop_dead(block: Block) -> Block:
    """Calls go whose outputs all die with the block and are read by no call that stays.

    Only ops that write nothing, draw no random numbers and cannot fail on values (``traits.is_pure``): an index that may be
    out of range, a matrix that may be singular and a division of integers stay, since their errors are results. What is
    lost is only a failure for want of memory, of an op that no longer needs any.
    """
    wanted: set[int] = set()
    kept: list[Item] = []
    for item in reversed(block.items):
        unread = all(slot in block.dying and slot not in wanted for slot in makes(item))
        if unread and isinstance(item, Step) and item.outs and is_pure(item):
            continue
        wanted.update(reads(item))
        kept.append(item)
    return replace(block, items=tuple(reversed(kept)))
