"""What stands where a tensor should be."""

from __future__ import annotations


class Poison:
    """The op that should have made this tensor failed.

    Attributes:
        error: the failure's number on this worker; -1: it happened elsewhere.
    """

    __slots__ = ("error",)

    def __init__(self, error: int) -> None:
        self.error = error
