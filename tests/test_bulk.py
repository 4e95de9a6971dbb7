"""Shared memory outlives its tensors' users, is reused, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtorch.transport import bulk
from dtorch.transport.bulk import OWN_SEGMENT_BYTES, Segment, SegmentPool, adopt_blob, forget_blobs, open_blob
from dtorch.transport.errors import ConnectionLostError, ProtocolError
from dtorch.transport.messages import SharedBlob

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
pytestmark = pytest.mark.skipif(not bulk.HAS_ANONYMOUS, reason="no anonymous shared memory here")


@pytest.fixture(autouse=True)
def _no_open_mappings() -> object:
    yield
    forget_blobs()


def open_fds() -> int:
    """Descriptors of segments; others come and go with the threads of earlier sessions."""
    return sum(os.path.realpath(f"/proc/self/fd/{fd}").startswith("/memfd:dtorch") for fd in os.listdir("/proc/self/fd"))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:dtorch")


def test_writes_are_seen_through_the_blob_both_ways() -> None:
    segment = Segment(10_000)
    segment.buffer[100:200] = 7
    there = open_blob(segment.blob(100, 100))
    assert torch.equal(there, torch.full((100,), 7, dtype=torch.uint8))
    there.fill_(9)
    assert int(segment.buffer[150]) == 9
    assert open_blob(segment.blob(0, 0)).numel() == 0
    segment.close()


def test_a_segment_of_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    before = sorted(os.listdir("/dev/shm"))
    code = (
        f"import sys, os; sys.path.insert(0, {str(ROOT)!r}); from dtorch.transport.bulk import Segment\n"
        "s = Segment(1 << 20); s.buffer[:3] = 5; b = s.blob(0, 3)\n"
        "sys.stdout.write(f'{b.pid} {b.fd}\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    pid, fd = map(int, child.stdout.readline().split())
    blob = SharedBlob(pid, fd, 0, 3)
    there = open_blob(blob)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    child.stdin.close()
    assert there.tolist() == [5, 5, 5]  # what was mapped stays
    with pytest.raises(ConnectionLostError, match="any more"):
        open_blob(blob)
    assert sorted(os.listdir("/dev/shm")) == before
    assert os.listdir(tmp_path) == []
    forget_blobs(pid)
    del there
    gc.collect()
    assert mapped() == 0


def test_tensors_stay_valid_after_close_and_free_the_memory_at_last() -> None:
    gc.collect()
    fds = open_fds()
    segment = Segment(MIB)
    tensor = segment.buffer[:8].view(torch.int64)
    tensor.fill_(42)
    there = open_blob(segment.blob(0, 8))
    segment.close()
    segment.close()
    assert segment.closed
    with pytest.raises(ValueError, match="closed"):
        segment.blob()
    forget_blobs()
    assert int(there.view(torch.int64)) == int(tensor) == 42
    del there, tensor, segment
    gc.collect()
    assert mapped() == 0
    assert open_fds() == fds


def test_a_forgotten_segment_closes_itself() -> None:
    gc.collect()
    fds = open_fds()
    Segment(MIB)
    gc.collect()
    assert open_fds() == fds
    assert mapped() == 0


def test_readers_map_a_segment_once_and_forget_closed_ones() -> None:
    one = Segment(MIB)
    first, second = open_blob(one.blob(0, 10)), open_blob(one.blob(10, 10))
    assert second.data_ptr() == first.data_ptr() + 10
    assert len(bulk._mappings) == 1
    one.close()
    two = Segment(MIB)
    open_blob(two.blob())
    assert len(bulk._mappings) == 1
    segments = [Segment(4096) for _ in range(bulk._MAX_OPEN_MAPPINGS + 5)]
    for segment in segments:
        open_blob(segment.blob())
    assert len(bulk._mappings) == bulk._MAX_OPEN_MAPPINGS


def test_blobs_are_not_believed(tmp_path: Path) -> None:
    segment = Segment(4096)
    good = segment.blob()
    with pytest.raises(ProtocolError, match="beyond"):
        open_blob(SharedBlob(good.pid, good.fd, 4000, 97))
    for pid, fd, offset, size in (
        (0, 1, 0, 1),
        (good.pid, -1, 0, 1),
        (good.pid, good.fd, -1, 1),
        (good.pid, good.fd, 0, -1),
    ):
        with pytest.raises(ProtocolError, match="names no bytes"):
            open_blob(SharedBlob(pid, fd, offset, size))
    with open(tmp_path / "f", "wb") as other, pytest.raises(ProtocolError, match="not a segment"):
        open_blob(SharedBlob(good.pid, other.fileno(), 0, 0))
    with pytest.raises(ValueError, match="not inside"):
        segment.blob(1, 4096)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(good.fd, 0)  # its size is sealed
    segment.close()


def test_pool_reuses_only_after_the_last_tensor_is_gone() -> None:
    pool = SegmentPool()
    lease = pool.lease(MIB)
    assert lease.tensor.numel() == MIB
    name = (lease.blob.fd, lease.tensor.data_ptr())
    value = lease.tensor.view(torch.float32)[5:10].view(5, 1).t()  # a view far from the first tensor
    del lease
    gc.collect()
    other = pool.lease(MIB)
    assert (other.blob.fd, other.tensor.data_ptr()) != name
    value.fill_(1.5)
    other.tensor.zero_()
    assert value.tolist() == [[1.5] * 5]
    del value
    again = pool.lease(MIB - 100)
    assert (again.blob.fd, again.tensor.data_ptr()) == name
    assert again.tensor.numel() == MIB - 100
    assert pool.statistics()[:3] == (2, 1, 2 * MIB)
    del again, other
    assert pool.statistics() == (2, 1, 0, 2 * MIB)
    pool.close()
    assert pool.statistics().idle_bytes == 0
    with pytest.raises(ValueError, match="closed"):
        pool.lease(1)
    gc.collect()
    assert mapped() == 0


def test_pool_bounds_what_is_idle() -> None:
    pool = SegmentPool(max_idle_bytes=3 * MIB)
    leases = [pool.lease(MIB) for _ in range(5)]
    del leases
    assert pool.statistics().idle_bytes == 3 * MIB
    pool.close()


def test_leases_survive_the_pool() -> None:
    pool = SegmentPool()
    tensor = pool.lease(0).tensor
    assert tensor.numel() == 0
    kept = pool.lease(64).tensor
    pool.close()
    del pool
    kept.fill_(3)
    assert kept.sum() == 192
    del kept, tensor
    gc.collect()
    assert mapped() == 0


def test_what_is_given_is_adopted_as_it_is_and_used_again_only_after_it() -> None:
    pool = SegmentPool()
    (first,) = pool.lease_many([MIB], give=True)
    first.tensor.fill_(1)
    adopted = adopt_blob(first.blob)
    assert adopted is not None
    assert adopted.data_ptr() == open_blob(first.blob).data_ptr()
    name = first.blob.fd
    del first
    gc.collect()
    assert pool.lease(MIB).blob.fd != name  # the owner is done with it, the reader is not
    view = adopted[5:10]
    del adopted
    assert pool.lease(MIB).blob.fd != name
    view.fill_(3)
    assert view.tolist() == [3] * 5
    del view
    gc.collect()
    kept = [pool.lease(MIB) for _ in range(3)]
    assert name in {lease.blob.fd for lease in kept}
    pool.close()


def test_what_others_read_too_is_copied_as_it_is_written() -> None:
    pool = SegmentPool()
    lease = pool.lease_many([MIB + 100])[0]
    lease.tensor.fill_(1)
    one, two = adopt_blob(lease.blob), adopt_blob(lease.blob)
    assert one is not None
    assert two is not None
    assert one.numel() == MIB + 100
    name, whole = lease.blob.fd, lease.tensor
    one[: MIB // 2] = 7
    two.fill_(9)
    assert int(whole.sum()) == MIB + 100
    assert one[MIB // 2 - 1 : MIB // 2 + 1].tolist() == [7, 1]
    del lease, whole, two
    gc.collect()
    kept = [pool.lease(MIB + 100) for _ in range(2)]
    assert name not in {other.blob.fd for other in kept}  # it is locked as long as it is mapped
    del one
    gc.collect()
    kept += [pool.lease(MIB + 100) for _ in range(2)]
    assert name in {other.blob.fd for other in kept}
    pool.close()


def test_a_piece_inside_a_segment_is_adopted_where_it_lies() -> None:
    pool = SegmentPool()
    leases = pool.lease_many([100, 5000, 3 * MIB])
    assert len({lease.blob.fd for lease in leases}) == 1  # small ones share one
    for number, lease in enumerate(leases):
        lease.tensor.fill_(number)
    for number, lease in enumerate(leases):
        adopted = adopt_blob(lease.blob)
        assert adopted is not None
        assert adopted.data_ptr() % 64 == 0
        assert adopted.unique().tolist() == [number]
    assert adopt_blob(SharedBlob(os.getpid(), leases[0].blob.fd, 8, 100)) is None  # torch's memory is aligned otherwise
    large = pool.lease_many([OWN_SEGMENT_BYTES, OWN_SEGMENT_BYTES])
    assert len({lease.blob.fd for lease in large}) == 2
    pool.close()


def test_a_reader_that_is_killed_lets_go(tmp_path: Path) -> None:
    pool = SegmentPool()
    (lease,) = pool.lease_many([MIB], give=True)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dtorch.transport.bulk import adopt_blob\n"
        "from dtorch.transport.messages import SharedBlob\n"
        f"kept = adopt_blob(SharedBlob({lease.blob.pid}, {lease.blob.fd}, 0, {MIB}, True))\n"
        "sys.stdout.write('adopted\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "adopted\n"
    name = lease.blob.fd
    del lease
    gc.collect()
    other = pool.lease(MIB)
    assert other.blob.fd != name
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    child.stdin.close()
    assert pool.lease(MIB).blob.fd == name
    pool.close()


def test_too_many_adoptions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_MAX_ADOPTED", len(bulk._adopted) + 1)
    pool = SegmentPool()
    lease = pool.lease(MIB)
    one = adopt_blob(lease.blob)
    assert one is not None
    assert adopt_blob(lease.blob) is None
    del one
    gc.collect()
    assert adopt_blob(lease.blob) is not None
    pool.close()


def test_named_segments_vanish_when_closed(tmp_path: Path) -> None:
    segment = Segment(4096, tmp_path)
    other = Segment(4096, tmp_path)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}
    segment.buffer.fill_(4)
    there = open_blob(segment.blob(0, 2), tmp_path)
    segment.close()
    other.close()
    assert list(tmp_path.iterdir()) == []
    assert there.tolist() == [4, 4]
    with pytest.raises(ConnectionLostError):
        open_blob(SharedBlob(os.getpid(), 9999, 0, 1), tmp_path)
