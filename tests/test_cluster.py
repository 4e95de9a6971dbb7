"""A head, its workers and its clients, with real sockets: sessions, isolation, quotas, sharing, breaks, strangers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from _cluster import Cluster, cluster

import dtorch
from dtorch.cli import main
from dtorch.cluster.streams import SessionStreams
from dtorch.runtime.shares import BURST_S
from dtorch.session import Session, using
from dtorch.transport.errors import AuthError, ConnectionLostError, MeshError, QuotaError, SessionClosedError


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of two CPU devices each, for tests that leave them as they are."""
    with cluster(tmp_path_factory.mktemp("cluster"), "cpu:2", "cpu:2") as made:
        yield made


@pytest.fixture
def session(home: Cluster) -> Iterator[Session]:
    with home.client("somebody") as made:
        yield made


def put(data: torch.Tensor, num: int = 2, dim: int = 0) -> dtorch.Tensor:
    mesh = dtorch.DeviceMesh("cpu", list(range(num)))
    return dtorch.Tensor(data, device_mesh=mesh, placements=[dtorch.Shard(dim)])


# ---- one client


@pytest.mark.parametrize("num", [1, 2, 4], ids="{} devices".format)
def test_programs_run_as_they_do_without_a_head(session: Session, num: int) -> None:
    small, large = torch.arange(24.0).reshape(8, 3), torch.randn(512, 300)
    x, y = put(small, num), put(large, num, 1)
    assert torch.equal((x + x).redistribute(placements=[dtorch.Replicate()]).to_torch(), 2 * small)
    assert torch.equal((y * 2).to_torch(), 2 * large)
    assert torch.equal(torch.cat([(y * 2).to_shards()[i] for i in range(num)], 1), 2 * large)
    partial = put(torch.ones(8, 8), num, 0).sum(0)
    assert torch.equal(partial.to_torch(), torch.full((8,), 8.0))


def test_a_device_may_get_nothing_of_a_large_upload(session: Session) -> None:
    data = torch.randn(1, 40_000)
    x = put(data, 2)
    assert torch.equal((x + 1).to_torch(), data + 1)
    assert [len(piece) for piece in x.to_shards()] == [1, 0]


def test_large_partial_values_come_in_pieces(session: Session) -> None:
    data = torch.randn(4, 40_000)
    x = put(data, 4, 0)
    total = x.sum(0)
    assert total.placements[0].is_partial()
    torch.testing.assert_close(total.to_torch(), data.sum(0))
    assert [tuple(piece.shape) for piece in total.to_shards()] == [(40_000,)] * 4


def test_workers_get_their_own_slices_alone(home: Cluster, session: Session) -> None:
    came: dict[int, int] = {}  # worker -> bytes
    dtorch.ones(4, device_mesh=dtorch.DeviceMesh("cpu", [0, 1, 2, 3])).sum().item()  # both workers know the session

    def count(number: int, streams: SessionStreams) -> None:
        used = streams.take

        def take(stream: int, size_bytes: int) -> Any:
            found = used(stream, size_bytes)
            came[number] = came.get(number, 0) + (found.numel() if isinstance(found, torch.Tensor) else 0)
            return found

        streams.take = take  # type: ignore[method-assign]

    for number, worker in enumerate(home.workers):
        for lodger in list(worker._lodgers.values()):
            count(number, lodger.streams)
    data = torch.randn(1000, 1004)
    for dim in (0, 1):
        assert torch.equal(put(data, 4, dim).to_torch(), data)
    assert sorted(came.values()) == [data.nbytes, data.nbytes]  # half of each of the two
    x = dtorch.Tensor(data, device_mesh=dtorch.DeviceMesh("cpu", [0, 1, 2, 3]))
    assert all(torch.equal(piece, data) for piece in x.to_shards())
    assert sorted(came.values()) == [2 * data.nbytes, 2 * data.nbytes]  # once a worker, for two devices


def test_an_op_that_fails_is_told_with_its_line(session: Session) -> None:
    index = put(torch.tensor([0, 9]), 1)
    picked = put(torch.zeros(3), 1)[index]
    with pytest.raises(IndexError, match="picked = put"):
        picked.to_torch()
    assert put(torch.ones(2), 1).sum().item() == 2.0


def test_statistics_and_memory_come_from_the_workers(session: Session) -> None:
    x = put(torch.ones(1000, 4), 4)
    dtorch.synchronize()
    assert len(dtorch.statistics().workers) == 2
    assert sum(m.allocated for m in dtorch.memory_stats(x.device_mesh)) == 16_000


async def test_values_can_be_awaited(session: Session) -> None:
    x = put(torch.ones(4, 4))
    assert torch.equal(await (x + 1), torch.full((4, 4), 2.0))


def test_more_devices_than_there_are_is_an_error_at_the_line(session: Session) -> None:
    with pytest.raises(MeshError, match="9 cpu devices are wanted, and the cluster has 4"):
        put(torch.ones(9), 9)
    with pytest.raises(MeshError, match="0 of them"):
        dtorch.zeros(1, device_mesh=dtorch.DeviceMesh("cuda", [0]))
    assert put(torch.ones(2)).sum().item() == 2.0


def test_the_environment_names_the_head(home: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_HEAD", home.head.url)
    monkeypatch.setenv("DTORCH_API_KEY", home.key("env"))
    dtorch.shutdown()
    try:
        assert dtorch.ones(3, device_mesh=dtorch.DeviceMesh("cpu", [0])).sum().item() == 3.0
        names = home.do(lambda: [tenancy.key.name for tenancy in home.head.sessions.values()])
        assert "env" in names
    finally:
        dtorch.shutdown()
    home.until(lambda: all(tenancy.key.name != "env" for tenancy in home.head.sessions.values()))


@pytest.mark.parametrize(
    ("url", "key", "error", "text"),
    [
        ("", "k", ValueError, "which head"),
        ("ws://127.0.0.1:9", "", ValueError, "wants an API key"),
        ("ws://127.0.0.1", "k", ValueError, "wss://host:port"),
        ("http//x:1", "k", ValueError, "wss://host:port"),
        ("ws://127.0.0.1:9", "k", ConnectionLostError, "no link"),
    ],
)
def test_a_head_that_cannot_be_reached_says_why(url: str, key: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        dtorch.connect(url, key)


def test_wrong_keys_and_wrong_roles_are_refused(tmp_path: Path) -> None:
    with cluster(tmp_path) as home:
        good = home.key("alice")
        number = good.split("_")[1]
        for wrong in ("nonsense", "dt_00000000_x", f"dt_{number}_wrong", good + "x"):
            with pytest.raises(AuthError):
                home.session(wrong)
        with pytest.raises(AuthError):
            home.session(home.worker_key)
        home.session(good).close()
        for _ in range(10):
            with pytest.raises(AuthError):
                home.session("nonsense")
        with pytest.raises(AuthError, match="too many"):  # not even the right one is looked at now
            home.session(good)
        events = [each["event"] for each in home.audit()]
        assert events.count("key refused") == 10
        assert events.count("role refused") == 1
        assert good not in (tmp_path / "audit.jsonl").read_text()


# ---- many clients


def test_sessions_do_not_meet(home: Cluster) -> None:
    sessions = [home.session(home.key(name), name) for name in ("ann", "ben")]
    kept = []
    try:
        for number, each in enumerate(sessions):
            with using(each):
                dtorch.manual_seed(7)
                kept.append(put(torch.full((4, 4), float(number)), 4))
        for number, (each, x) in enumerate(zip(sessions, kept, strict=True)):
            with using(each):
                assert torch.equal((x + 1).to_torch(), torch.full((4, 4), number + 1.0))
        with using(sessions[0]):
            failed = put(torch.zeros(3), 1)[put(torch.tensor([5]), 1)]
            with pytest.raises(IndexError):
                failed.to_torch()
        with using(sessions[1]):
            dtorch.synchronize()  # another's error is not its own
        devices = [home.do(lambda n=each.number: home.head.pool.devices_of(n)) for each in sessions]
        assert len(devices[0]) == len(devices[1]) == 4
    finally:
        for each in sessions:
            each.close()


def test_sessions_that_two_heads_call_the_same_do_not_meet(tmp_path: Path) -> None:
    @dtorch.compile
    def doubled(x: dtorch.Tensor) -> dtorch.Tensor:
        return x + x

    with contextlib.ExitStack() as stack:
        homes = [stack.enter_context(cluster(tmp_path / name, "cpu:2")) for name in ("left", "right")]
        sessions = [home.session(home.key("ann")) for home in homes]
        for each in sessions:
            stack.callback(each.close)
        assert sessions[0].number == sessions[1].number
        assert sessions[0].serial != sessions[1].serial
        for each in sessions:
            with using(each):
                mesh = dtorch.DeviceMesh("cpu", [0, 1])
                x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
                assert doubled(x + put(torch.ones(4), 2)).sum().item() == 16.0
                assert dtorch.statistics().ops > 0


def test_quotas_harm_their_owner_alone(home: Cluster) -> None:
    key = home.key("small", max_devices=2, max_bytes=1_000_000, max_ops=40, max_sessions=1)
    poor, rich = home.session(key), home.session(home.key("rich"))
    try:
        with pytest.raises(QuotaError, match="1 sessions"):
            home.session(key)
        with using(poor):
            with pytest.raises(QuotaError, match="4 more cpu devices are above the quota"):
                put(torch.ones(4), 4)
            x = put(torch.ones(4, 4))
            with pytest.raises(QuotaError, match="above the quota of 1000000 bytes"):
                dtorch.ones(1000, 1000, device_mesh=x.device_mesh).to_torch()
            with pytest.raises(QuotaError, match="above the quota of 1000000 bytes"):
                put(torch.ones(1000, 1000)).to_torch()
            with pytest.raises(QuotaError, match="random numbers"):
                dtorch.rand(1000, 1000, device_mesh=x.device_mesh).to_torch()
            y = x
            for _ in range(60):
                y = y + 1
            with pytest.raises(QuotaError, match="40 ops in flight"):
                y.to_torch()
            assert torch.equal((x + 1).to_torch(), torch.full((4, 4), 2.0))  # what it had is still there
            held = [x + float(i) for i in range(30)]
            assert sum(h.sum().item() for h in held) == 16 * (30 + sum(range(30)))
        with using(rich):
            z = put(torch.ones(4), 4)
            for _ in range(100):
                z = z + 1
            assert z.sum().item() == 404.0
    finally:
        poor.close()
        rich.close()


def test_a_session_that_ends_leaves_nothing_on_the_workers(home: Cluster) -> None:
    gone = home.session(home.key("gone"))
    with using(gone):
        x = put(torch.ones(100, 100), 4)
        assert x.sum().item() == 10_000.0
    number = gone.number
    lodgers = home.do(lambda: [worker._lodgers[number] for worker in home.workers])
    gone.close()
    home.until(lambda: number not in home.head.sessions)
    for lodger in lodgers:
        lodger.join(20.0)
        assert not hasattr(lodger, "_worker")
    assert home.do(lambda: [w._turns.busy_ns.get(number) for w in home.workers]) == [None, None]


# ---- breaks


def cut(home: Cluster, number: int) -> None:
    """Break the connection of a session, without a goodbye."""

    def abort() -> None:
        link = home.head.sessions[number].link._link
        assert link is not None
        link.abort()

    home.do(abort)


def test_a_break_loses_nothing(session: Session, home: Cluster) -> None:
    x = put(torch.zeros(4, 4), 4)
    data = torch.randn(700, 700)
    for number in range(6):
        for _ in range(50):
            x = x + 1
        y = put(data, 2)
        cut(home, session.number)
        assert torch.equal(y.to_torch(), data)
        assert x.sum().item() == 16.0 * 50 * (number + 1)
    assert session.thread.num_breaks >= 1  # type: ignore[union-attr]


def test_a_client_that_does_not_come_back_is_forgotten(tmp_path: Path) -> None:
    with cluster(tmp_path, "cpu:1", grace_s=0.2) as home:
        lost = home.session(home.key("lost"))
        with using(lost):
            x = put(torch.ones(4), 1)
            assert x.sum().item() == 4.0

            async def no_route(_: int) -> NoReturn:
                raise ConnectionLostError("no route to the head")

            link = lost.thread._link  # type: ignore[union-attr]
            link._dial = no_route
            cut(home, lost.number)
            home.until(lambda: not home.head.sessions)
            with pytest.raises(ConnectionLostError):
                x.to_torch()
        lost.close()


def test_a_worker_comes_back_after_a_break(tmp_path: Path) -> None:
    with cluster(tmp_path, "cpu:2", worker_grace_s=20.0) as home:
        session = home.session(home.key("ann"))
        try:
            with using(session):
                x = put(torch.ones(4))
                for number in range(4):
                    x = x + 1

                    def abort() -> None:
                        next(iter(home.head.workers.values())).link._link.abort()  # type: ignore

                    home.do(abort)
                    assert x.sum().item() == 4.0 * (number + 2)
        finally:
            session.close()


def test_a_loss_that_nobody_makes_good_is_told(tmp_path: Path) -> None:
    with cluster(tmp_path, "cpu:1", "cpu:1", replace_s=0.1) as home:
        session = home.session(home.key("ann"))
        with using(session):
            x = put(torch.ones(4), 2)
            assert x.sum().item() == 4.0
            home.do(home.workers[0].stop)
            home.until(lambda: len(home.head.workers) == 1)
            assert (x + 1).sum().item() == 8.0  # by the one that remains
            home.do(home.workers[1].stop)
            home.until(lambda: not home.head.sessions)
            with pytest.raises(dtorch.WorkerLostError, match="it left the pool; no worker with cpu devices has joined within"):
                (x + 1).to_torch()
        session.close()


# ---- sharing


def test_two_busy_tenants_get_alike_and_a_higher_priority_does_not_wait(tmp_path: Path) -> None:
    with cluster(tmp_path, "cpu:1") as home:
        busy = [home.session(home.key(name)) for name in ("left", "right")]
        urgent = home.session(home.key("urgent", priority=5))
        turns, holds = home.workers[0]._turns, [0]
        serve = turns._shares.serve

        def noted(session: int, seconds: float) -> None:
            holds.append(int(seconds * 1e9))
            serve(session, seconds)

        turns._shares.serve = noted  # type: ignore[method-assign]

        def work(session: Session, size: int) -> None:
            with using(session), contextlib.suppress(SessionClosedError):
                x = put(torch.zeros(size, size), 1)
                while True:
                    x = x @ x

        threads = [threading.Thread(target=work, args=(s, size)) for s, size in zip(busy, (400, 250), strict=True)]
        for thread in threads:
            thread.start()
        try:
            with using(urgent):
                x = put(torch.ones(2), 1)
                assert (x + 1).sum().item() == 4.0
                # Both have begun, then had a second together; the urgent one looks from time to time.
                while min(turns.busy_ns.get(s.number, 0) for s in busy) < 1e8:
                    assert (x + 1).sum().item() == 4.0
                before = [turns.busy_ns.get(s.number, 0) for s in busy]
                while sum(turns.busy_ns.get(s.number, 0) for s in busy) - sum(before) < 1e9:
                    assert (x + 1).sum().item() == 4.0
            left, right = (turns.busy_ns.get(s.number, 0) - b for s, b in zip(busy, before, strict=True))
        finally:
            for session in (*busy, urgent):
                session.close()
            for thread in threads:
                thread.join()
    # No further apart than what cannot be divided: an op of either (with whatever the machine did meanwhile), and the burst.
    assert abs(left - right) <= 2 * max(holds) + BURST_S * 1e9


# ---- who runs it


def test_a_revoked_key_ends_its_sessions(tmp_path: Path) -> None:
    with cluster(tmp_path, "cpu:1") as home:
        session, other = home.session(home.key("ann")), home.session(home.key("ben"))
        with using(session):
            x = put(torch.ones(2), 1)
            assert x.sum().item() == 2.0
            home.head.keys.revoke("ann")
            home.do(home.head._end_revoked)
            assert session.thread._thread.join(20.0) is None  # type: ignore[union-attr]
            with pytest.raises(AuthError, match="revoked"):
                (x + 1).to_torch()
        with using(other):
            assert put(torch.ones(2), 1).sum().item() == 2.0
        for each in (session, other):
            each.close()


def test_a_drained_worker_leaves_when_nobody_uses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path, "cpu:1", "cpu:1") as home:
        session = home.session(home.key("ann"))
        asking = ["--head", home.head.url, "--key", home.key("root", "admin")]
        with using(session):
            x = put(torch.ones(2), 1)
            assert x.sum().item() == 2.0
            assert main(["drain", "worker-2", *asking]) == 0
            home.until(lambda: len(home.head.workers) == 1)
            assert main(["drain", "1", *asking]) == 0
            assert (x + 1).sum().item() == 4.0  # it stays for those who use it, and for nobody else
            with pytest.raises(MeshError, match="has 1 of them"):
                put(torch.ones(2), 2)
        session.close()
        home.until(lambda: not home.head.workers)
        assert main(["drain", "nobody", *asking]) == 1
        assert main(["status", "--head", home.head.url, "--key", "wrong"]) == 1
        out = capsys.readouterr()
        assert "worker-2 leaves now" in out.out
        assert "worker-1 leaves once these sessions have ended: 1" in out.out
        assert "no such worker; there are: none" in out.err
        assert "401" in out.err


def test_keys_are_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--keys", str(tmp_path / "keys.json")]
    assert main(["keys", "create", "ann", "--weight", "2", "--max-bytes", "1000", *file]) == 0
    key = capsys.readouterr().out.strip()
    assert main(["keys", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert key not in listed
    assert "bytes=1000" in listed
    assert main(["keys", "revoke", "ann", *file]) == 0
    assert main(["keys", "revoke", "ann", *file]) == 1
    assert main(["head", "--listen", "nowhere", *file]) == 1
    assert main(["head", "--tls-cert", "x", *file]) == 1
    assert main(["worker", "--devices", "tpu:3", "--head", "ws://127.0.0.1:1"]) == 1
    assert main(["worker", "--labels", "rack", "--head", "ws://127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    for text in ("no key has", "HOST:PORT", "go together", "devices are given like", "NAME=VALUE"):
        assert text in err
