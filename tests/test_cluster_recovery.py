"""Sessions of a head whose workers are killed, leave, move and drain: real processes, results to the bit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _cluster import Cluster, cluster, two_and_a_spare
from _decode import MESH, decode, same

import dtorch
from dtorch import Replicate, Shard
from dtorch.cli import main
from dtorch.cluster import tenancy
from dtorch.cluster.metrics import metrics
from dtorch.runtime.liveness import FROZEN_S
from dtorch.session import Session, using

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")



@pytest.fixture
def home(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture
def session(home: Cluster) -> Iterator[Session]:
    with two_and_a_spare(home) as made:
        yield made


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
            for victim in victims:
                victim.kill()
            home.until(lambda: not home.head.workers)
            for _ in victims:
                home.process()

    assert same(decode(kill_all), undisturbed)
    with using(other):
        assert torch.equal((kept * 2).to_torch(), torch.arange(6.0) * 2)
    other.close()
    ledger = home.head.meter.ledger
    assert home.do(lambda: ledger.sessions[session.number].totals.repeated_ops) == dtorch.statistics().recomputed_ops


def test_devices_move_in_the_background_with_live_bytes_only(home: Cluster) -> None:
    for _ in range(2):
        home.process("cpu:1")
    session, other = home.session(home.key("ann")), home.session(home.key("ben"))
    with using(other):
        theirs = dtorch.Tensor(torch.arange(6.0), device_mesh=MESH, placements=[Shard(0)])
        assert theirs.sum().item() == 15.0
    with using(session):
        undisturbed = decode(lambda _: None)
        data = torch.randn(400, 100)
        x = dtorch.Tensor(data, device_mesh=MESH, placements=[Shard(0)])
        view = x[:, 3:5]
        for _ in range(3):
            dead = x * 2
        del dead
        with pytest.raises(dtorch.MeshError, match="no other cpu device for cpu:1"):
            session.migrate("cpu:1")
        with pytest.raises(dtorch.MeshError, match="nothing lives on cpu:7"):
            session.migrate("cpu:7")
        home.process("cpu:2")
        live = sum(stats.allocated for stats in dtorch.memory_stats(MESH) if stats.device == "cpu:1")
        moved = session.migrate("cpu:1")
        assert moved.devices == ("cpu:1",)
        assert moved.moved_bytes <= 1.05 * live
        assert moved.pause_s >= 0
        assert home.do(lambda: home.head.pool.where(session.number, "cpu", 1)[0]) == 3
        view.add_(1.0)
        expected = data.clone()
        expected[:, 3:5] += 1
        assert torch.equal(x.to_torch(), expected)

        def move(step: int) -> None:
            if step == 3:
                session.migrate("cpu:1", "cpu:0")
            elif step == 6:
                session.migrate(["cpu:0", "cpu:1"])

        assert same(decode(move), undisturbed)
        leaving = home.process_of(session, 0)
        leaving.terminate()  # as an engine ends a worker
        assert leaving.wait() == 0
        assert torch.equal(x.to_torch(), expected)
        assert dtorch.statistics().recomputed_ops == 0
        assert not session.elastic.losses
    with using(other):
        assert theirs.sum().item() == 15.0
        assert not other.elastic.losses
    for each in (session, other):
        each.close()


def test_a_drained_worker_leaves_once_all_sessions_have_moved(home: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    asking = ["--head", home.head.url, "--key", home.key("root", "admin")]
    for _ in range(2):
        home.process("cpu:1")
    sessions = [home.session(home.key(name)) for name in ("ann", "ben")]
    results = []
    for session in sessions:
        with using(session):
            results.append(decode(lambda _: None))
            session.kept = dtorch.ones(4, device_mesh=MESH, placements=[Shard(0)])  # type: ignore[attr-defined]
    home.process("cpu:2")

    def drain(step: int) -> None:
        if step == 4:
            assert main(["drain", "worker-2", *asking]) == 0
            home.until(lambda: len(home.head.workers) == 2)
        elif step == 7:
            assert main(["drain", "worker-1", *asking]) == 0

    with using(sessions[0]):
        assert same(decode(drain), results[0])
        assert dtorch.statistics().recomputed_ops == 0
        assert not sessions[0].elastic.losses
    with using(sessions[1]):
        assert sessions[1].kept.sum().item() == 4.0  # type: ignore[attr-defined]
        assert same(decode(lambda _: None), results[1])
    home.until(lambda: list(home.head.workers) == [3])
    assert main(["drain", "worker-3", *asking]) == 0  # nowhere to go, until another one joins
    home.process("cpu:2")
    home.until(lambda: list(home.head.workers) == [4])
    for session in sessions:
        with using(session):
            assert session.kept.sum().item() == 4.0  # type: ignore[attr-defined]
        session.close()
    out = capsys.readouterr().out
    assert "worker-2 leaves once these sessions have moved: 1, 2" in out
    assert "worker-3 leaves once these sessions have ended: 1, 2; there is nowhere else for them" in out


def test_what_is_not_remembered_is_lost_by_name_and_the_session_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, remember_bytes=8 << 20) as home:
        for _ in range(4):
            home.process()
        session = home.session(home.key("ann"))
        with using(session):
            large = dtorch.Tensor(torch.ones(3, 1 << 20), device_mesh=MESH, placements=[Shard(1)])
            data = torch.randn(1 << 10, 1 << 10)
            x = dtorch.Tensor(data, device_mesh=MESH, placements=[Shard(0)])
            lost = large + 1
            dtorch.synchronize()
            home.process_of(session, 1).kill()
            with pytest.raises(dtorch.WorkerLostError, match=r"float32\[3, 1048576\] on \[Shard\(1\)\]") as caught:
                lost.to_torch()
            assert len(caught.value.tensors) == 2
            assert torch.equal((x + 1).to_torch(), data + 1)
            dtorch.synchronize()
            del large, lost

            coming = torch.randn(1 << 10, 1 << 10)
            y = dtorch.Tensor(coming, device_mesh=MESH, placements=[Shard(0)])
            home.process_of(session, 0).kill()  # while it is sent, or before, or after
            assert torch.equal((y + 1).to_torch(), coming + 1)
            assert torch.equal((x + y).to_torch(), data + coming)

            home.process_of(session, 0).send_signal(signal.SIGSTOP)
            assert torch.equal((x - y).to_torch(), data - coming)
            assert dtorch.statistics().lost_workers == 3
            silent = [loss.silent_s for loss in session.elastic.losses if loss.silent_s is not None]
            assert len(silent) == 3
            assert silent[2] > FROZEN_S / 2  # a worker that is stopped gives no sign of life
        session.close()
        repeated = home.do(lambda: home.head.meter.ledger.tenants["ann"].repeated_ops)
        told = home.do(lambda: metrics(home.head)).decode()
        assert f"dtorch_recomputed_ops_total {repeated:.1f}" in told
        assert "dtorch_failure_detection_seconds_count 3.0" in told


def test_two_workers_that_do_not_reach_each_other_are_used_apart(home: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "SUSPECT_S", 0.05)
    for _ in range(2):
        home.worker("cpu:1")
    session, other = home.session(home.key("ann")), home.session(home.key("ben"))
    data = torch.arange(6.0)
    with using(other):
        theirs = dtorch.Tensor(data, device_mesh=MESH, placements=[Shard(0)])
        assert torch.equal(theirs.redistribute([Replicate()]).to_torch(), data)
    with using(session):
        x = dtorch.Tensor(data, device_mesh=MESH, placements=[Shard(0)])
        assert torch.equal(x.redistribute([Replicate()]).to_torch(), data)
        home.worker("cpu:1")
        for worker in home.workers[:2]:
            home.do(worker._lodgers[session.number]._groups[0].abort)
        assert torch.equal((x + 1).redistribute([Replicate()]).to_torch(), data + 1)
        dtorch.synchronize()  # behind it, the loss is told
        (loss,) = session.elastic.losses
        (shunned,) = loss.workers
        hosts = home.do(lambda: {worker for worker, _ in home.head.pool.devices_of(session.number).values()})
        assert hosts == {1, 2, 3} - {shunned}
    with using(other):  # which gets on with all of them
        assert torch.equal((theirs + 1).redistribute([Replicate()]).to_torch(), data + 1)
        assert not other.elastic.losses
    assert len(home.head.workers) == 3
    for each in (session, other):
        each.close()
