"""What is known of calls that look alike, once the first of them has been defined. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtorch.runtime.recorder import Recorder

ONE, MANY, IN_PLACE = 0, 1, 2
"""What calls give: a tensor, several, or the tensor that they write."""


class Signature:
    """What a recorded call needs to know about its (op, static arguments, input specs)."""

    __slots__ = (
        "finish", "has_ints", "id", "is_plain", "itself", "links", "mutates", "put", "recorder", "shape", "spec", "specs",
        "take",
    )  # fmt: skip

    id: int
    recorder: Recorder
    take: Callable[[], int]  # pop of the recorder's lent slots; IndexError: ask the recorder's grant
    put: Callable[[tuple[Any, ...]], None]
    shape: int  # ONE, MANY or IN_PLACE
    spec: Any  # ONE: spec of the result; IN_PLACE: new spec of what was written, None when unchanged
    specs: tuple[Any, ...]  # of all outputs
    finish: Any  # MANY: makes the user's tuple of the outputs
    has_ints: bool  # whether calls carry numbers that may be too large for a message
    is_plain: bool  # ONE, without such numbers: what quick paths do by themselves
    links: tuple[int | None, ...] | None  # inputs that the outputs stand for views of, see ops/_alias.py; mostly None
    mutates: tuple[int, ...]  # inputs that are written beside making results (running statistics); mostly ()
    itself: int | None  # the one of these that is the result

    def __init__(self) -> None:
        self.links = self.itself = None
        self.mutates = ()
        self.has_ints = self.is_plain = False
