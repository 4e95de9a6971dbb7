"""Rules that rewrite the instructions of a batch or a program before a worker makes its plan of them.

A rule is a pure function from a ``Block`` to a ``Block``, in a file of its own, that changes no bit of any result. Every
worker applies the same rules to the same instructions, its own or not, so all agree on the order of what they exchange.
``DTORCH_REWRITE`` names the rules to use, in any order; "none" is none of them. It is read where the workers start.

What a rule needs to know of an op is a table of names in ``traits.py``: an op that is not in it is left alone.
"""

from __future__ import annotations

from collections.abc import Callable

from dtorch.runtime.rewrite.block import Block
from dtorch.runtime.rewrite.drop_dead import drop_dead
from dtorch.runtime.rewrite.free_early import free_early
from dtorch.runtime.rewrite.move_once import move_once
from dtorch.runtime.rewrite.overlap import overlap
from dtorch.runtime.rewrite.reuse_memory import reuse_memory

RULES: dict[str, Callable[[Block], Block]] = {
    rule.__name__: rule for rule in (move_once, drop_dead, overlap, free_early, reuse_memory)
}
"""In the order in which they are applied."""


def rewrite(block: Block, rules: tuple[str, ...]) -> Block:
    """Apply the named rules."""
    for name in rules:
        block = RULES[name](block)
    return block


def chosen(text: str | None) -> tuple[str, ...]:
    """The rules that DTORCH_REWRITE asks for, in the order in which they are applied; all of them when it is not set.

    Raises:
        ValueError: it names a rule that does not exist.
    """
    if text is None or text.strip() in ("", "all"):
        return tuple(RULES)
    names = {name.strip() for name in text.split(",")} - {"", "none"}
    unknown = names - set(RULES)
    if unknown:
        raise ValueError(
            f"DTORCH_REWRITE={text!r} names no rule {', '.join(sorted(unknown))}; there are {', '.join(RULES)}, and 'none'"
        )
    return tuple(name for name in RULES if name in names)
