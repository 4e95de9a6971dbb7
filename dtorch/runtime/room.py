"""How much may be on its way to the workers before the client's thread waits. Pure."""

from __future__ import annotations

MAX_BATCHES = 64
MAX_BYTES = 256 * 1024 * 1024
"""Bytes of batches and of what they upload that may be unfinished."""


class Room:
    """Batches that are sent and not yet executed by all workers.

    One thread at a time enters batches, and one at a time lets them leave; neither minds the other.

    Attributes:
        num_bytes: of all batches that are under way.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._entered_bytes = 0
        self._left_bytes = 0

    @property
    def num_batches(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return self._entered_bytes - self._left_bytes

    def enter(self, seq: int, size_bytes: int) -> None:
        self._sizes[seq] = size_bytes
        self._entered_bytes += size_bytes

    def leave(self, seq: int) -> None:
        """Every worker has executed the batch. Unknown ones are no matter."""
        self._left_bytes += self._sizes.pop(seq, 0)

    @property
    def is_full(self) -> bool:
        """Whether whoever would send more must wait, until ``is_roomy``. A single batch may be of any size."""
        return self.num_batches > MAX_BATCHES or (self.num_bytes > MAX_BYTES and self.num_batches > 1)

    @property
    def is_roomy(self) -> bool:
        """Half of the room is free again, so that a client that waited does not wait at every batch from now on."""
        return self.num_batches <= MAX_BATCHES // 2 and (self.num_bytes <= MAX_BYTES // 2 or self.num_batches <= 1)
