"""Sessions of a head whose workers are killed, leave, move and drain: real processes, results to the bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from _cluster import Cluster, cluster

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.session import Session, using

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")

MESH = DeviceMesh("cpu", [0, 1])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture
def session(home: Cluster) -> Iterator[Session]:
    """Of two devices on two workers, and a third worker with nothing to do."""
    for _ in range(2):
        home.process()
    made = home.session(home.key("ann"))
    with using(made):
        dtorch.ones(2, device_mesh=MESH, placements=[Shard(0)]).sum().item()
        home.process()
        yield made
    made.close()


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def test_the_lost_closure_and_nothing_more_runs_again_on_a_spare(session: Session, home: Cluster) -> None:
    data = torch.arange(8.0).reshape(4, 2)
    x = dtorch.Tensor(data, device_mesh=MESH, placements=[Shard(0)])
    copied = dtorch.Tensor(data, device_mesh=MESH, placements=[Replicate()])
    y = x
    for _ in range(5):
        y = y + 1
    for _ in range(7):
        copied = copied * 2
    unused = x * 3
    del unused
    dtorch.synchronize()
    home.process_of(session, 1).kill()
    assert torch.equal(y.to_torch(), data + 5)
    assert torch.equal(copied.to_torch(), data * 2**7)
    home.until(lambda: len(home.head.workers) == 2)
    assert torch.equal((y + 1).to_torch(), data + 6)
    stats = dtorch.statistics()
    assert stats.lost_workers == 1
    assert stats.recomputed_ops == 6  # the upload and five additions
    assert stats.moved_bytes == data.nbytes
    assert home.do(lambda: home.head.pool.where(session.number, "cpu", 1)[0]) == 3


def decode(harm: Callable[[int], None]) -> list[torch.Tensor]:
    """A loop with all that makes trouble: a cache written through views, replicated state changed in place by what the
    devices tell each other, random numbers, uploads in parts and in one, and values read in the middle."""
    dtorch.manual_seed(3)
    source = torch.Generator().manual_seed(1)
    weights = dtorch.Tensor(torch.randn(8, 8, generator=source), device_mesh=MESH, placements=[Replicate()])
    x = dtorch.Tensor(torch.randn(6, 8, generator=source), device_mesh=MESH, placements=[Shard(0)])
    large = dtorch.Tensor(torch.randn(400, 400, generator=source), device_mesh=MESH, placements=[Shard(1)])
    cache = dtorch.zeros(6, 12, 8, device_mesh=MESH, placements=[Shard(0)])
    recent = cache[:, 4:8]
    read = []
    for step in range(10):
        harm(step)
        hidden = torch.tanh(torch.matmul(x, weights))
        cache[:, step].copy_(hidden)
        noise = dtorch.rand(6, 8, device_mesh=MESH, placements=[Shard(0)])
        x = torch.nn.functional.dropout(hidden + recent.sum(1) * 0.1, 0.2, True) + noise
        total = hidden.sum(0).redistribute([Replicate()])
        weights.mul_(0.99)
        weights[0].add_(total * 0.01)
        columns = weights.redistribute([Shard(1)])  # each device cuts for itself
        if step % 4 == 2:
            read.append(total.to_torch())
    recent.add_(1.0)
    after = dtorch.rand(3, device_mesh=MESH)
    return [*read, *(tensor.to_torch() for tensor in (x, cache, weights, columns, large, after))]


def test_killed_workers_change_no_bit_and_harm_no_other_session(session: Session, home: Cluster) -> None:
    undisturbed = decode(lambda _: None)
    other = home.session(home.key("ben"))
    with using(other):
        theirs = decode(lambda _: None)
        assert same(theirs, undisturbed)
        kept = dtorch.Tensor(torch.arange(6.0), device_mesh=MESH, placements=[Shard(0)])

    def kill(step: int) -> None:
        if step == 6:
            dtorch.synchronize()
            home.process_of(session, 1).kill()

    assert same(decode(kill), undisturbed)
    with using(other):
        assert torch.equal((kept + 1).to_torch(), torch.arange(6.0) + 1)
        assert same(decode(lambda _: None), undisturbed)

    def kill_all(step: int) -> None:
        if step == 4:
            victims = {home.process_of(session, device) for device in (0, 1)}
            for _ in victims:
                home.process()
            for victim in victims:
                victim.kill()

    assert same(decode(kill_all), undisturbed)
    with using(other):
        assert torch.equal((kept * 2).to_torch(), torch.arange(6.0) * 2)
    other.close()
    ledger = home.head.meter.ledger
    assert home.do(lambda: ledger.sessions[session.number].totals.repeated_ops) == dtorch.statistics().recomputed_ops
