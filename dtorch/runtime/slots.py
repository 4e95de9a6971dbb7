"""Which slot numbers are free, lent to the client's hot path, or waiting for their release to be announced. Pure."""

from __future__ import annotations


class SlotPool:
    """Slots of one session.

    A slot is in exactly one place: ``_idle`` (free, sorted descending), lent to the hot path (``lend``; the hot path pops
    from the lent list), holding a tensor, or ``dead`` (its tensor is gone, workers do not know yet). Lowest numbers go
    first, so that a loop meets the same numbers, and its batches the same bytes, every time round.
    """

    def __init__(self) -> None:
        self._idle: list[int] = []
        self._next = 0
        self.num_used = 0

    @property
    def size(self) -> int:
        """Number of slots ever made: the length that a worker's store needs."""
        return self._next

    def lend(self, count: int) -> list[int]:
        """Take ``count`` slots; the caller pops from the end, lowest number first."""
        missing = count - len(self._idle)
        if missing > 0:
            fresh = list(range(self._next + missing - 1, self._next - 1, -1))
            self._next += missing
            fresh.extend(self._idle)
            self._idle = fresh
            self._idle.sort(reverse=True)
        taken = self._idle[-count:]
        del self._idle[-count:]
        return taken

    def restore(self, slots: list[int]) -> None:
        """Give back slots that are free again: lent but not used, or dead and announced."""
        if slots:
            self._idle.extend(slots)
            self._idle.sort(reverse=True)

    @property
    def num_idle(self) -> int:
        return len(self._idle)
