"""Memory that is used again, and never while anybody refers to it."""

from __future__ import annotations

import threading

import pytest
import torch

from dtorch.transport.kept import LEAST_BYTES, KeptMemory, size_class

MIB = 2**20


def address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("size", [1, 65536, 65537, MIB, MIB + 1, 5 * MIB, 256 * MIB + 1])
def test_size_classes_waste_at_most_a_quarter(size: int) -> None:
    got = size_class(size)
    assert size <= got <= max(LEAST_BYTES, size * 1.25 + 1)


def test_memory_is_used_again_once_nothing_views_it() -> None:
    kept = KeptMemory(8 * MIB)
    memory = kept.take(MIB)
    where = address(memory.data)
    assert where % 64 == 0
    piece = memory.data[10:20]
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[6:8].view(torch.int16)
    del memory
    other = kept.take(MIB)
    assert address(other.data) != where  # a slice and a tensor refer to it
    del tensor
    assert kept.idle_bytes == 0
    del piece
    assert kept.idle_bytes == MIB
    assert address(kept.take(MIB - 100).data) == where
    assert kept.idle_bytes == MIB
    del other
    assert kept.take(100_000).nbytes == 100_000  # too small for these


def test_no_more_is_kept_than_asked_for() -> None:
    kept = KeptMemory(3 * MIB)
    taken = [kept.take(MIB) for _ in range(5)]
    last = address(taken[-1].data)
    for _ in range(5):
        taken.pop(0)
    assert kept.idle_bytes == 3 * MIB
    assert address(kept.take(MIB).data) == last
    kept.keep(0)
    assert kept.idle_bytes == 0
    memory = kept.take(MIB)
    del memory
    assert not kept._returned
    assert kept.idle_bytes == 0
    assert kept.take(0).nbytes == 1


def test_views_may_go_while_another_thread_takes() -> None:
    kept = KeptMemory(MIB)
    memory = kept.take(MIB)
    holder = [memory]
    del memory
    with kept._lock:  # another thread is in the middle of it
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
    assert kept.idle_bytes == MIB
