"""What may come of a call beside tensors."""

from __future__ import annotations

LOST = -2
"""As a ``Poison``'s error: no failure, the tensor went with a worker."""


class Poison:
    """Stands where a tensor should be: the op that should have made it failed.

    Attributes:
        error: the failure's number on this worker; -1: it happened elsewhere; LOST: the tensor went with a worker.
    """

    __slots__ = ("error",)

    def __init__(self, error: int) -> None:
        self.error = error


class Halted(Exception):
    """The session stops before the end of its batch, because a worker is gone."""
