"""Workers that are killed, frozen, moved and drained, in real processes: results have the same bits as without."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from _decode import MESH, decode, same

import dtorch
from dtorch import Replicate, Shard
from dtorch.session import Session, current_session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc")



@pytest.fixture
def session() -> Iterator[Session]:
    yield dtorch.init(workers="per-device")
    dtorch.shutdown()


def pid_of(session: Session, device: int) -> int:
    """Of the process that hosts a device, once it is there."""
    dtorch.synchronize()
    worker = session.thread.worker_of("cpu", device)  # type: ignore[union-attr]
    assert worker is not None
    return session.thread.pids[worker]


def test_a_killed_a_frozen_and_a_moved_worker_change_no_bit(session: Session) -> None:
    undisturbed = decode(lambda _: None)

    def kill(step: int) -> None:
        if step == 6:
            os.kill(pid_of(session, 1), signal.SIGKILL)

    assert same(decode(kill), undisturbed)
    stats = dtorch.statistics()
    assert stats.lost_workers == 1
    assert 0 < stats.recomputed_ops < stats.ops

    def kill_both(step: int) -> None:
        if step in (2, 7):
            for pid in session.thread.pids.values():
                os.kill(pid, signal.SIGKILL)

    assert same(decode(kill_both), undisturbed)
    assert dtorch.statistics().lost_workers == 5

    def freeze(step: int) -> None:
        if step == 4:
            os.kill(pid_of(session, 0), signal.SIGSTOP)

    assert same(decode(freeze), undisturbed)
    silent_s = session.elastic.losses[-1].silent_s
    assert silent_s is not None
    assert silent_s < 2.0

    drained = []

    def move(step: int) -> None:
        if step == 3:
            session.migrate("cpu:1")
        elif step == 6:
            drained.append(session.thread.worker_of("cpu", 0))  # type: ignore[union-attr]
            session.drain(drained[0])

    before = dtorch.statistics().recomputed_ops
    assert same(decode(move), undisturbed)
    assert dtorch.statistics().recomputed_ops == before
    assert drained[0] not in {session.thread.worker_of("cpu", device) for device in (0, 1)}  # type: ignore[union-attr]


def test_the_lost_closure_and_nothing_more_runs_again(session: Session) -> None:
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
    os.kill(pid_of(session, 1), signal.SIGKILL)
    assert torch.equal(y.to_torch(), data + 5)
    assert torch.equal(copied.to_torch(), data * 2**7)
    stats = dtorch.statistics()
    assert stats.recomputed_ops == 6  # the upload and five additions
    assert stats.moved_bytes == data.nbytes


def test_what_must_not_run_twice_is_lost_by_name_and_the_session_goes_on(session: Session) -> None:
    once = dtorch.register_op("custom_kernels:once", rule="pointwise", repeatable=False)
    x = dtorch.ones(4, device_mesh=MESH, placements=[Shard(0)])
    y = once(x)
    os.kill(pid_of(session, 1), signal.SIGKILL)
    named = r"float32\[4\] on \[Shard\(0\)\], made by custom:custom_kernels:once"
    with pytest.raises(dtorch.WorkerLostError, match=named) as caught:
        (y + 1).to_torch()
    assert len(caught.value.tensors) == 2
    assert torch.equal((x + 1).to_torch(), torch.full((4,), 2.0))
    assert torch.equal((once(x) + 1).to_torch(), torch.full((4,), 3.0))
    dtorch.synchronize()


def test_a_call_that_ends_every_worker_is_given_up(session: Session) -> None:
    deadly = dtorch.register_op("custom_kernels:deadly", rule="pointwise")
    x = dtorch.full((4,), 5.0, device_mesh=MESH, placements=[Replicate()])
    kept = x + 1
    dtorch.synchronize()
    with pytest.raises(dtorch.WorkerLostError, match=r"exited with code 7.*made by custom:custom_kernels:deadly"):
        deadly(x).to_torch()
    assert torch.equal(kept.to_torch(), torch.full((4,), 6.0))


@pytest.mark.parametrize(
    ("number", "how", "said"),
    [
        (5.0, "exited with code 7", "five is right out"),
        (6.0, "killed by SIGABRT", "here comes six\nFatal Python error: Aborted"),
    ],
)
def test_what_a_dying_worker_printed_last_reaches_the_user(number: float, how: str, said: str) -> None:
    talkative = dtorch.register_op("custom_kernels:talkative", rule="pointwise")
    dtorch.init(recover=False)
    try:
        x = dtorch.full((4,), number, device_mesh=MESH, placements=[Replicate()])
        with pytest.raises(dtorch.WorkerLostError) as caught:
            talkative(x).to_torch()
    finally:
        dtorch.shutdown()
    assert f"{how}; it printed last: {said}" in str(caught.value)


def test_moves_carry_live_bytes_and_views(session: Session) -> None:
    data = torch.randn(400, 100)
    x = dtorch.Tensor(data, device_mesh=MESH, placements=[Shard(0)])
    view = x[:, 3:5]
    for _ in range(3):
        dead = x * 2
    del dead
    dtorch.synchronize()
    live = sum(stats.allocated for stats in dtorch.memory_stats(MESH) if stats.device == "cpu:1")
    moved = session.migrate("cpu:1", "cpu:0")
    assert moved.devices == ("cpu:1",)
    assert moved.moved_bytes <= 1.05 * live
    view.add_(1.0)
    expected = data.clone()
    expected[:, 3:5] += 1
    assert torch.equal(x.to_torch(), expected)
    assert moved.pause_s >= 0


def test_wrong_moves_are_refused() -> None:
    dtorch.init(workers="shared")
    with pytest.raises(RuntimeError, match="recover=True"):
        current_session().migrate("cpu:0")
    session = dtorch.init(workers="per-device")
    with pytest.raises(dtorch.MeshError, match="nothing lives on cpu:7"):
        session.migrate("cpu:7")
    with pytest.raises(ValueError, match="there is no worker 9"):
        session.drain(9)
    with pytest.raises(dtorch.MeshError, match="a device is written 'cpu:1'"):
        session.migrate("cpu:x")
    dtorch.shutdown()
