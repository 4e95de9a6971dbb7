"""What an upload to a head sends: bytes of the program's tensor while it waits, and copies of the rest."""

from __future__ import annotations

import gc

import pytest
import torch

from dtorch.cluster import buffers
from dtorch.cluster.buffers import RemotePool
from dtorch.transport.cluster import PART_BYTES
from dtorch.transport.messages import StreamBlob


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "ROOM_BYTES", 4 * PART_BYTES)
    monkeypatch.setattr(buffers, "TAIL_BYTES", 2 * PART_BYTES)


def numbers(size_bytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(size_bytes, dtype=torch.uint8).view(dtype)


def sent(pool: RemotePool, blob: StreamBlob) -> tuple[int, bytes]:
    """How much is lent, and all of it."""
    found = pool.upload(blob)
    assert len(found) == blob.size_bytes
    return len(found.lent), bytes(found.lent) + bytes(found.copied)


def test_what_the_program_waits_for_is_lent_and_the_end_is_copied() -> None:
    pool, data = RemotePool(), numbers(6 * PART_BYTES + 2)
    whole = bytes(data.view(torch.uint8).numpy())
    (lease,) = pool.filled([data], lend=True)
    found = pool.upload(lease.blob)
    assert len(found.lent) == 4 * PART_BYTES  # in whole parts
    data[-1] = data[0] = 0
    assert bytes(found.copied) == whole[4 * PART_BYTES :]
    assert bytes(found.lent) == bytes(data.view(torch.uint8).numpy())[: 4 * PART_BYTES]


@pytest.mark.parametrize(
    "data",
    [numbers(4 * PART_BYTES), numbers(8 * PART_BYTES).view(2, -1).t(), numbers(8 * PART_BYTES)[1::2]],
    ids=["not large", "not in order", "every other"],
)
def test_the_rest_is_copied(data: torch.Tensor) -> None:
    pool = RemotePool()
    whole = bytes(data.contiguous().view(-1).view(torch.uint8).numpy())
    (lease,) = pool.filled([data], lend=True)
    data.zero_()
    assert sent(pool, lease.blob) == (0, whole)


def test_nobody_lends_unasked() -> None:
    pool, data = RemotePool(), numbers(8 * PART_BYTES)
    (lease,) = pool.filled([data])
    assert sent(pool, lease.blob) == (0, bytes(data.view(torch.uint8).numpy()))


def test_the_last_pieces_of_an_upload_are_copied() -> None:
    pool = RemotePool()
    parts = [numbers(3 * PART_BYTES) + n for n in range(3)]
    leases = pool.filled(parts, lend=True)
    found = [sent(pool, lease.blob) for lease in leases]
    assert [lent // PART_BYTES for lent, _ in found] == [3, 3, 1]
    assert [data for _, data in found] == [bytes(part.view(torch.uint8).numpy()) for part in parts]


def test_what_nobody_waits_for_is_copied_after_all() -> None:
    pool, data = RemotePool(), numbers(6 * PART_BYTES)
    whole = bytes(data.view(torch.uint8).numpy())
    (lease,) = pool.filled([data], lend=True)
    pool.copy_lent()
    data.zero_()
    assert sent(pool, lease.blob) == (0, whole)


def test_memory_of_values_is_used_again() -> None:
    pool = RemotePool()
    lease = pool.lease(PART_BYTES)
    buffer = pool.buffer(lease.blob.stream)
    assert buffer is not None
    where, stream = lease.tensor.data_ptr(), lease.blob.stream
    piece = buffer[5:6]
    del lease, buffer
    gc.collect()
    assert pool.buffer(stream) is not None  # somebody may write there still
    del piece
    assert pool.buffer(stream) is None
    assert pool.lease(PART_BYTES).tensor.data_ptr() == where
    pool.close()
