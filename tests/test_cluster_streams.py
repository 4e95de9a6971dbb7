"""Large values through a head: workers and connections that end in the middle, readers that do not read."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _cluster import PATIENCE_S, Cluster, cluster, two_and_a_spare

import dtorch
from dtorch import Shard
from dtorch.cluster.buffers import ROOM_BYTES, TAIL_BYTES
from dtorch.cluster.tenancy import Tenancy
from dtorch.session import Session
from dtorch.transport.cluster import PART_BYTES, STREAM_WINDOW_BYTES, Part
from dtorch.transport.errors import OpError
from dtorch.transport.numbered import ACK_BYTES, MOST_WINDOW_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")

MIB = 2**20
ONE = dtorch.DeviceMesh("cpu", [0])
MESH = dtorch.DeviceMesh("cpu", [0, 1])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture
def session(home: Cluster) -> Iterator[Session]:
    with two_and_a_spare(home) as made:
        yield made


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers that live on."""
    with cluster(tmp_path_factory.mktemp("steady")) as made:
        for _ in range(2):
            made.process()
        yield made


@pytest.fixture
def lasting(steady: Cluster) -> Iterator[Session]:
    with steady.client("ann") as made:
        yield made


def numbers(size_bytes: int) -> torch.Tensor:
    return torch.arange(size_bytes // 4, dtype=torch.int32)


def put(data: torch.Tensor) -> dtorch.Tensor:
    return dtorch.Tensor(data, device_mesh=MESH, placements=[Shard(0)])


def kill_when_behind(victim: subprocess.Popen[bytes], home: Cluster) -> list[int]:
    """Stop a worker, so that an upload comes to a halt in its middle, and kill it then; the answer gets what waited, bytes."""
    (end,) = [end for end in home.head.workers.values() if end.pid == victim.pid]
    waited: list[int] = []
    used = end.link.wait_below

    async def wait_below(limit_bytes: int) -> None:
        if end.link.pending_bytes > limit_bytes:
            waited.append(end.link.pending_bytes)
            victim.kill()
        await used(limit_bytes)

    end.link.wait_below = wait_below  # type: ignore[method-assign]
    victim.send_signal(signal.SIGSTOP)
    return waited


def on_part(home: Cluster, session: Session, name: str, action: Callable[[Tenancy, int], None]) -> list[int]:
    """Do something in the head whenever a part of a session has gone by; the answer gets their offsets."""
    offsets: list[int] = []
    tenancy = home.head.sessions[session.number]
    used = getattr(tenancy, name)

    def wrapped(*args: Any) -> None:
        used(*args)
        part = next((each for each in args if isinstance(each, Part)), None)
        if part is not None:
            offsets.append(part.offset)
            action(tenancy, len(offsets))

    home.do(lambda: setattr(tenancy, name, wrapped))
    return offsets


def test_a_worker_killed_in_the_middle_of_an_upload_changes_no_bit(session: Session, home: Cluster) -> None:
    data = numbers(48 * MIB)
    waited = kill_when_behind(home.process_of(session, 1), home)
    x = put(data)
    assert torch.equal(x.to_torch(), data)
    assert torch.equal((x + 1).to_torch(), data + 1)
    assert dtorch.statistics().lost_workers == 1
    assert 0 < max(waited) <= MOST_WINDOW_BYTES + 2 * PART_BYTES


def test_of_what_a_head_does_not_remember_the_middle_is_an_error_and_the_session_goes_on(
    session: Session, home: Cluster
) -> None:
    data = numbers(80 * MIB)
    assert data.nbytes > max(ROOM_BYTES, home.head.options.remember_bytes)
    waited = kill_when_behind(home.process_of(session, 0), home)
    x = dtorch.Tensor(data, device_mesh=ONE)
    with pytest.raises(OpError, match="the beginning of this upload, which is not remembered; send it again"):
        x.to_torch()
    assert waited
    assert torch.equal(dtorch.Tensor(data, device_mesh=ONE).to_torch(), data)
    assert dtorch.statistics().lost_workers == 1


@pytest.mark.parametrize("num_parts", [1, 9])
def test_a_worker_killed_in_the_middle_of_a_value_changes_no_bit(session: Session, home: Cluster, num_parts: int) -> None:
    data = numbers(60 * MIB)
    x = put(data) + 1
    dtorch.synchronize()
    victim = home.process_of(session, 0)

    def action(_: Tenancy, __: int) -> None:
        if sum(offset < data.nbytes // 2 for offset in offsets) == num_parts:  # the other half is another worker's
            victim.kill()

    offsets = on_part(home, session, "received", action)
    assert torch.equal(x.to_torch(), data + 1)
    assert offsets.count(0) == 2  # it began again
    assert torch.equal((x + 1).to_torch(), data + 2)
    assert dtorch.statistics().lost_workers == 1


def break_at(*clients: int, workers: tuple[int, ...] = ()) -> Callable[[Tenancy, int], None]:
    """Break the client's connection after so many parts, and those of the workers."""

    def action(tenancy: Tenancy, num: int) -> None:
        links = [tenancy.link] if num in clients else []
        links += [end.link for end in tenancy._home.workers.values()] if num in workers else []
        for link in links:
            if link._link is not None:
                link._link.abort()

    return action


def test_connections_that_break_in_the_middle_of_an_upload_lose_nothing(lasting: Session, steady: Cluster) -> None:
    data = numbers(120 * MIB)
    kept = data.clone()
    offsets = on_part(steady, lasting, "_forward", break_at(3, 20, 40, 55, workers=(10, 20, 58)))
    x = put(data)
    num_there = len(offsets)
    data.zero_()  # nobody looks at it again
    assert num_there >= (data.nbytes - TAIL_BYTES) // PART_BYTES - 1
    assert torch.equal(x.to_torch(), kept)
    assert len(offsets) == kept.nbytes // PART_BYTES
    assert lasting.thread.num_breaks > 1  # type: ignore[union-attr]
    assert dtorch.statistics().lost_workers == 0


def test_connections_that_break_in_the_middle_of_a_value_lose_nothing(lasting: Session, steady: Cluster) -> None:
    data = numbers(60 * MIB)
    x = dtorch.Tensor(data, device_mesh=ONE)
    dtorch.synchronize()
    num = data.nbytes // PART_BYTES
    offsets = on_part(steady, lasting, "received", break_at(6, 20, workers=(20, num - 3, num - 1)))
    promise = lasting.fetch(x)
    x += 1  # in the memory that is sent from
    lasting.recorder.flush()
    assert torch.equal(promise.result(PATIENCE_S), data)
    assert offsets == list(range(0, data.nbytes, PART_BYTES))
    assert torch.equal(x.to_torch(), data + 1)
    assert lasting.thread.num_breaks >= 1  # type: ignore[union-attr]
    assert dtorch.statistics().lost_workers == 0


def test_a_head_holds_little_for_a_client_that_does_not_read(lasting: Session, steady: Cluster) -> None:
    """1: a value begins to come. 2: the client's thread is held up. 3: the workers may send no more. 4: it goes on."""
    go_on, stalled, came, paid, most = threading.Event(), threading.Event(), [0], [0], [0]
    tenancy = steady.head.sessions[lasting.number]
    pay = tenancy._pay

    def counted() -> None:
        paid[0] += sum(tenancy._owed.values())
        pay()

    def action(_: Tenancy, num: int) -> None:
        if num == 1:
            lasting.thread.loop.call_soon_threadsafe(go_on.wait, PATIENCE_S)
        came[0] += PART_BYTES
        most[0] = max(most[0], tenancy.link.pending_bytes)
        if came[0] > paid[0] + STREAM_WINDOW_BYTES - PART_BYTES and tenancy._granting is not None:
            stalled.set()

    steady.do(lambda: setattr(tenancy, "_pay", counted))
    x = dtorch.full((40 * MIB,), 7, dtype=torch.int32, device_mesh=ONE)
    dtorch.synchronize()
    on_part(steady, lasting, "received", action)
    promise = lasting.fetch(x)
    assert stalled.wait(PATIENCE_S)
    assert not promise.done
    go_on.set()
    assert torch.equal(promise.result(PATIENCE_S), torch.full((40 * MIB,), 7, dtype=torch.int32))
    assert ACK_BYTES < most[0] <= MOST_WINDOW_BYTES + STREAM_WINDOW_BYTES + 2 * PART_BYTES
