"""Bytes that a client sent, as the calls that use them find them: in the message, in shared memory, or come as a stream.

Whoever calls ``own`` gets memory that nobody else writes, and of bytes in shared memory that is not another copy: the pages
themselves where they are given, else pages that are copied as they are written.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dtorch.transport.bulk import adopt_blob, open_blob
from dtorch.transport.errors import DTorchError
from dtorch.transport.messages import SharedBlob

ADOPT_BYTES = 1024 * 1024
"""Shared memory of this size and more becomes a tensor's storage; of less, a copy costs less than a mapping."""


class Arrival(Protocol):
    """One piece of an upload, as a uint8 vector. Both raise DTorchError when the bytes are not there."""

    def own(self) -> torch.Tensor:
        """The bytes in memory that is the caller's, aligned as torch's."""
        ...

    def read(self) -> torch.Tensor:
        """The bytes, to be copied from at once."""
        ...


class InMessage:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def own(self) -> torch.Tensor:
        made = torch.empty(len(self._data), dtype=torch.uint8)
        return made.copy_(self.read()) if self._data else made

    def read(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._data), dtype=torch.uint8)


class InSegment:
    def __init__(self, blob: SharedBlob) -> None:
        self._blob = blob

    def own(self) -> torch.Tensor:
        adopted = adopt_blob(self._blob) if self._blob.size_bytes >= ADOPT_BYTES else None
        return self.read().clone() if adopted is None else adopted

    def read(self) -> torch.Tensor:
        return open_blob(self._blob)


class InStream:
    """Bytes of a stream, or why they are not there; the memory goes to the first who wants it."""

    def __init__(self, found: torch.Tensor | DTorchError) -> None:
        self._found = found
        self._is_taken = False

    def own(self) -> torch.Tensor:
        if self._is_taken:
            return self.read().clone()
        whole = self.read()
        self._is_taken = True
        return whole

    def read(self) -> torch.Tensor:
        if isinstance(self._found, DTorchError):
            raise self._found
        return self._found
