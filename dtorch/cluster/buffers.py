"""Memory of a client's streams, in the place of shared memory.

Bytes that an upload sends are copied, so that the program may go on and change its tensor, except those for which the program
waits anyway, as too much is on its way: these are *lent*, and sent from where they lie in the tensor.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dtorch.runtime.pages import KEPT_BYTES
from dtorch.transport.bulk import Lease
from dtorch.transport.cluster import PART_BYTES
from dtorch.transport.kept import KeptMemory
from dtorch.transport.messages import StreamBlob

ROOM_BYTES = 64 * 1024 * 1024
"""Of uploads not yet sent: above this the client's thread waits."""
TAIL_BYTES = 8 * 1024 * 1024
"""Of an upload above that so much is copied, to be on its way while the program makes the next one."""


class Bytes(NamedTuple):
    """What an upload sends: bytes of a tensor, and behind them a copy of the rest."""

    lent: memoryview
    copied: memoryview

    def __len__(self) -> int:
        return len(self.lent) + len(self.copied)


class RemotePool:
    """Buffers of streams; any thread may use it."""

    def __init__(self) -> None:
        self._memory = KeptMemory(KEPT_BYTES)
        self._numbers = itertools.count(1)
        self._buffers: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._lent: dict[int, Bytes] = {}  # stream of an upload that nobody has begun to send -> its bytes; guarded by _lock

    def lease(self, size_bytes: int) -> Lease:
        """A buffer, and the stream that brings its bytes or takes them away. It lasts while a tensor shares its storage."""
        number = next(self._numbers)
        memory = self._buffers[number] = self._memory.take(size_bytes)
        return Lease(torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes], StreamBlob(number, size_bytes))

    def filled(self, parts: Sequence[torch.Tensor], give: bool = False, lend: bool = False) -> list[Lease]:
        """The bytes of tensors, row-major, a stream each.

        Args:
            lend: the caller changes no tensor until the controller's ``wait_for_room`` has returned.
        """
        ahead = sum(part.nbytes for part in parts)
        lend = lend and ahead > ROOM_BYTES
        leases = []
        for part in parts:
            ahead -= part.nbytes
            tail = max(TAIL_BYTES - ahead, 0)
            if lend and part.nbytes - tail >= PART_BYTES and part.is_cpu and part.is_contiguous():
                leases.append(self._lend(part, tail))
            else:
                lease = self.lease(part.nbytes)
                lease.tensor.view(part.dtype).view(part.shape).copy_(part)
                leases.append(lease)
        return leases

    def _lend(self, part: torch.Tensor, tail: int) -> Lease:
        number = next(self._numbers)
        flat = part.as_strided((part.numel(),), (1,)).view(torch.uint8)
        cut = (part.nbytes - tail) // PART_BYTES * PART_BYTES
        with self._lock:
            self._lent[number] = Bytes(flat.numpy().data[:cut], self._copy(flat[cut:]))
        return Lease(flat, StreamBlob(number, part.nbytes))

    def _copy(self, data: torch.Tensor) -> memoryview:
        memory = self._memory.take(data.numel())
        torch.frombuffer(memory, dtype=torch.uint8)[: data.numel()].copy_(data)
        return memory.data[: data.numel()]

    def copy_lent(self) -> None:
        """Nobody waits for what is lent and not on its way: copy it."""
        if not self._lent:
            return
        with self._lock:
            for number, (lent, copied) in self._lent.items():
                if lent:
                    whole = torch.cat([torch.frombuffer(view, dtype=torch.uint8) for view in (lent, copied) if view])
                    self._lent[number] = Bytes(memoryview(b""), whole.numpy().data)

    def upload(self, blob: StreamBlob) -> Bytes:
        """The bytes of an upload that is about to be sent; what is lent stays so until it has arrived."""
        with self._lock:
            found = self._lent.pop(blob.stream, None)
        if found is None:
            buffer = self.buffer(blob.stream)
            assert buffer is not None  # the session keeps it until the batch is finished
            found = Bytes(memoryview(b""), buffer[: blob.size_bytes])
        return found

    def buffer(self, stream: int) -> memoryview | None:
        memory = self._buffers.get(stream)
        return None if memory is None else memory.data

    def close(self) -> None:
        """Keep no memory any more. Leased memory stays valid until its tensors are gone."""
        self._memory.keep(0)
