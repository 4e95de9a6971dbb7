"""What a client sends becomes tensors: cut where the devices are, copied once, each device's memory its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.runtime.worker import Worker
from dtorch.session import current_session
from dtorch.transport import bulk
from dtorch.transport.bulk import SegmentPool, forget_blobs, open_blob
from dtorch.transport.messages import Batch, Blob, Define, Definition, FromWorker, Layout, MeshInfo

MIB = 1 << 20
needs_memfd = pytest.mark.skipif(not bulk.HAS_ANONYMOUS, reason="no anonymous shared memory here")

PLACEMENTS: list[list[Any]] = [
    [Replicate(), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Replicate()],
    [Shard(1), Shard(0)],
    [Replicate(), Partial()],
    [Partial("avg"), Shard(0)],
]


@pytest.mark.parametrize("rows", [3, 1500], ids=["inside the message", "in shared memory"])
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_devices_get_their_pieces(rows: int, placements: list[Any]) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    plain = torch.randn(rows, 1501)
    x = dtorch.Tensor(plain, device_mesh=mesh, placements=placements)
    assert torch.equal(x.to_torch(), plain)
    before = plain.clone()
    x.mul_(2)
    x.mul_(2)
    assert torch.equal(x.to_torch(), before * 4)
    assert torch.equal(plain, before)


def test_a_piece_of_one_element_comes_with_any_stride() -> None:
    """As a diffusion model's time does: one number for a batch, expanded, and a device for each row."""
    x = dtorch.Tensor(torch.tensor(7.0).expand(2), device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
    assert x.to_torch().tolist() == [7.0, 7.0]


def test_pieces_of_devices_stay_apart() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    parts = [torch.full((300, 1000), float(i)) for i in range(3)]
    x = dtorch.from_shards(parts, device_mesh=mesh, placements=[Partial()])
    assert torch.equal(x.to_torch(), torch.full((300, 1000), 3.0))
    replicas = dtorch.Tensor(parts[1], device_mesh=mesh)
    replicas.add_(1)
    assert all(torch.equal(piece, parts[2]) for piece in replicas.to_shards())


def test_a_loop_that_uploads_uses_memory_again() -> None:
    mesh = DeviceMesh("cpu", [0])
    pool = current_session()._pool
    assert isinstance(pool, SegmentPool)
    before = pool.statistics()
    for step in range(10):
        plain = torch.full((MIB,), float(step))
        x = dtorch.Tensor(plain, device_mesh=mesh)
        y = x + 1
        assert y[0].item() == step + 1
        assert torch.equal(x.to_torch(), plain)
        del x, y
    after = pool.statistics()
    assert after.created - before.created <= 6
    kept = dtorch.Tensor(torch.full((MIB,), 5.0), device_mesh=mesh)
    for _ in range(4):
        dtorch.Tensor(torch.zeros(MIB), device_mesh=mesh)
        dtorch.synchronize()
    assert torch.equal(kept.to_torch(), torch.full((MIB,), 5.0))


class Bench:
    """A worker that hosts the devices of mesh 1, to which an upload of placement ``code`` is known as signature 1."""

    def __init__(self, devices: tuple[int, ...], size: int, code: int) -> None:
        self.said: list[FromWorker] = []
        self.worker = Worker(0, {}, {}.__getitem__, self._no_group, self.said.append)
        mesh = MeshInfo(1, "cpu", (len(devices),), devices, (0,) * len(devices))
        definition = Definition(1, "dtorch.upload", "upload", [["n", 0]], {}, (), (Layout(1, (size,), "uint8", (code,)),))
        self.worker.handle(Define(1, (mesh,), (definition,)))

    @staticmethod
    def _no_group(*_: Any) -> Any:
        raise AssertionError("one worker alone needs no group")

    def upload(self, *blobs: Any) -> None:
        self.worker.handle(Batch(1, 1, (1,), msgspec.msgpack.encode(([[1, 0, 0]], [])), blobs))

    def held(self, device: int) -> torch.Tensor:
        found = self.worker._sessions[1].held(0, ("cpu", device))
        assert isinstance(found, torch.Tensor)
        return found


@needs_memfd
def test_shared_memory_that_is_given_is_not_copied() -> None:
    pool = SegmentPool()
    bench = Bench((0, 1), 2 * MIB, 0)
    leases = pool.lease_many([MIB, MIB], give=True)
    for number, lease in enumerate(leases):
        lease.tensor.fill_(number)
    bench.upload(*(lease.blob for lease in leases))
    for device, lease in enumerate(leases):
        assert bench.held(device).data_ptr() == open_blob(lease.blob).data_ptr()
        bench.held(device).add_(1)
        assert lease.tensor.unique().tolist() == [device + 1]  # it is the same memory
    del bench
    pool.close()
    forget_blobs()


@needs_memfd
def test_replicas_share_pages_until_one_writes() -> None:
    pool = SegmentPool()
    bench = Bench((0, 1), MIB, -1)
    (lease,) = pool.lease_many([MIB])
    lease.tensor.fill_(3)
    bench.upload(lease.blob)
    bench.held(0).add_(1)
    assert bench.held(0).unique().tolist() == [4]
    assert bench.held(1).unique().tolist() == [3]
    assert lease.tensor.unique().tolist() == [3]  # may be sent again
    del bench
    pool.close()
    forget_blobs()


def test_a_blob_that_is_not_there_fails_the_call_that_uses_it() -> None:
    bench = Bench((0,), 4, -1)
    bench.upload()
    assert type(bench.said[0]).__name__ == "Failure"
    bench.upload(Blob(b"123"))  # too few bytes
    assert type(bench.said[-2]).__name__ == "Failure"
