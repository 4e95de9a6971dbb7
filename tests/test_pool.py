"""The deciders of a head: places, quotas, refusals, keys; and the beginning of a batch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtorch.cluster.audit import Audit
from dtorch.cluster.keys import KeyFile
from dtorch.cluster.pool import Pool
from dtorch.cluster.quotas import Account, Limits
from dtorch.cluster.refusals import MAX_ADDRESSES, Refusals
from dtorch.cluster.submitted import num_calls
from dtorch.cluster.uploads import Uploads
from dtorch.runtime.lineage import Stream
from dtorch.transport.cluster import Part
from dtorch.transport.errors import AuthError, MeshError, ProtocolError, QuotaError
from dtorch.transport.messages import Blob, StreamBlob


def cpus(num: int) -> list[tuple[str, int]]:
    return [("cpu", number) for number in range(num)]


# ---- places


def test_a_session_stays_within_a_worker_while_it_can() -> None:
    pool = Pool()
    for _ in range(2):
        pool.enlist(cpus(2))
    pool.reserve(1, "cpu", (0, 1))
    assert [pool.where(1, "cpu", d) for d in (0, 1)] == [(1, ("cpu", 0)), (1, ("cpu", 1))]
    pool.reserve(2, "cpu", (0, 1))  # the other worker has nobody
    assert [pool.where(2, "cpu", d) for d in (0, 1)] == [(2, ("cpu", 0)), (2, ("cpu", 1))]
    pool.reserve(1, "cpu", (1, 2, 3))
    spots = [(worker, ("cpu", number)) for worker in (1, 2) for number in (0, 1)]
    assert [pool.where(1, "cpu", d) for d in (0, 1, 2, 3)] == spots


def test_devices_are_had_all_or_none() -> None:
    pool = Pool()
    pool.enlist(cpus(2))
    pool.reserve(1, "cpu", (5,))
    with pytest.raises(MeshError, match="4 cpu devices are wanted, and the cluster has 2"):
        pool.reserve(1, "cpu", (0, 1, 2))
    assert set(pool.devices_of(1)) == {("cpu", 5)}
    with pytest.raises(KeyError):
        pool.where(1, "cpu", 0)
    with pytest.raises(MeshError, match="0 of them"):
        pool.reserve(1, "cuda", (0,))


def test_workers_come_and_go() -> None:
    pool = Pool()
    first, second = pool.enlist(cpus(1), "left"), pool.enlist(cpus(1), "left")
    assert (first.name, second.name) == ("left", "left-2")
    assert pool.find("left-2") is second
    assert pool.find("1") is first
    assert pool.find("nobody") is None
    pool.reserve(7, "cpu", (0, 1))
    assert pool.remove(1) == {7}
    assert pool.remove(1) == set()
    assert set(pool.devices_of(7).values()) == {(2, ("cpu", 0))}
    assert pool.enlist(cpus(1)).number == 3
    second.draining = True
    assert pool.counts() == {"cpu": 1}
    assert pool.counts(7) == {"cpu": 2}
    pool.release(7)
    assert second.sessions == set()
    pool.reserve(8, "cpu", (0,))
    assert pool.where(8, "cpu", 0) == (3, ("cpu", 0))


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "reserve", "release"]), st.integers(0, 5)), max_size=60))
def test_no_device_is_placed_twice_for_a_session_or_on_a_worker_that_is_gone(steps: list[tuple[str, int]]) -> None:
    pool = Pool()
    for what, number in steps:
        if what == "join":
            pool.enlist(cpus(number + 1))
        elif what == "leave":
            pool.remove(number)
        elif what == "release":
            pool.release(number)
        else:
            try:
                pool.reserve(number, "cpu", range(number + 1))
            except MeshError:
                continue
        for session in range(6):
            places = list(pool.devices_of(session).values())
            assert len(set(places)) == len(places)
            assert all(session in pool.members[worker].used[device] for worker, device in places)
        used = sum(len(sessions) for member in pool.members.values() for sessions in member.used.values())
        assert used == sum(len(pool.devices_of(session)) for session in range(6))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 4), st.sets(st.integers(0, 12))), max_size=12),
)
def test_each_device_gets_the_place_that_is_best_when_its_turn_comes(
    workers: list[int], asked: list[tuple[int, set[int]]]
) -> None:
    pool = Pool()
    for num in workers:
        pool.enlist(cpus(num))
    for session, devices in asked:
        had = pool.devices_of(session)
        mine = {worker for worker, _ in had.values()}
        load = {(n, d): len(s) for n, m in pool.members.items() for d, s in m.used.items() if session not in s}
        expected = {}
        for device in sorted(devices):
            if ("cpu", device) not in had and load:
                expected["cpu", device] = best = min(load, key=lambda p: (load[p], p[0] not in mine, p[0], p[1]))
                mine.add(best[0])
                del load[best]
        try:
            pool.reserve(session, "cpu", sorted(devices))
        except MeshError:
            expected = {}
        assert pool.devices_of(session) == had | expected


def test_what_a_lost_worker_had_goes_to_a_spare_and_else_beside_the_others() -> None:
    pool = Pool()
    for _ in range(3):
        pool.enlist(cpus(1))
    pool.reserve(1, "cpu", (0, 1))
    assert [pool.where(1, "cpu", d)[0] for d in (0, 1)] == [1, 2]
    assert pool.remove(2) == {1}
    assert pool.is_homeless(1)
    assert pool.rehome(1)
    assert pool.where(1, "cpu", 1)[0] == 3
    pool.remove(3)
    assert pool.rehome(1)
    assert [pool.where(1, "cpu", d) for d in (0, 1)] == [(1, ("cpu", 0))] * 2
    pool.remove(1)
    assert not pool.rehome(1)
    assert pool.kinds_wanted(1) == ("cpu",)
    pool.enlist([("cuda", 0)])
    assert not pool.rehome(1)
    assert pool.enlist(cpus(1)).sessions == set()
    assert pool.rehome(1)
    assert not pool.is_homeless(1)
    assert pool.members[5].sessions == {1}
    pool.release(1)
    assert pool.members[5].sessions == set()


def test_a_session_that_lost_touch_with_a_worker_gets_nothing_there_any_more() -> None:
    pool = Pool()
    for _ in range(2):
        pool.enlist(cpus(2))
    pool.reserve(1, "cpu", (0, 1))
    pool.reserve(2, "cpu", (0, 1))
    pool.shun(1, 1)
    assert pool.members[1].sessions == set()
    assert pool.rehome(1)
    assert [pool.where(1, "cpu", d) for d in (0, 1)] == [(2, ("cpu", 0)), (2, ("cpu", 1))]
    with pytest.raises(MeshError):
        pool.reserve(1, "cpu", (2,))
    pool.reserve(3, "cpu", (0,))
    assert pool.where(3, "cpu", 0)[0] == 1


def test_devices_move_and_leave_workers_that_drain() -> None:
    pool = Pool()
    for _ in range(3):
        pool.enlist(cpus(1))
    pool.reserve(1, "cpu", (0, 1))
    before = pool.devices_of(1)
    pool.move(1, ("cpu", 1))
    assert pool.where(1, "cpu", 1)[0] == 3
    pool.put_back(1, before)
    assert pool.devices_of(1) == before
    assert pool.members[3].sessions == set()
    pool.move(1, ("cpu", 1), ("cpu", 0))
    assert pool.where(1, "cpu", 1) == pool.where(1, "cpu", 0)
    pool.move(1, ("cpu", 1))
    assert pool.members[1].sessions == {1}  # its other device is there still
    with pytest.raises(MeshError, match="nothing lives on cpu:7"):
        pool.move(1, ("cpu", 7))
    pool.members[2].draining = True
    assert pool.vacate(1, 2)
    assert pool.members[2].sessions == set()
    pool.members[3].draining = True
    pool.members[1].draining = True
    held = pool.devices_of(1)
    assert not pool.vacate(1, 1)
    assert pool.devices_of(1) == held
    with pytest.raises(MeshError, match="no other cpu device"):
        pool.move(1, ("cpu", 0))


# ---- quotas


def test_an_account_counts_all_sessions_of_a_key() -> None:
    account = Account("ann", Limits(max_devices=3, max_bytes=100, max_ops=10, max_sessions=2))
    account.open(1)
    account.open(2)
    with pytest.raises(QuotaError, match="2 sessions"):
        account.open(3)
    account.reserve(1, "cpu", (0, 1))
    account.reserve(1, "cpu", (0, 1))
    with pytest.raises(QuotaError, match="2 more cpu devices are above the quota of key 'ann': 3 devices, 2 of which"):
        account.reserve(2, "cpu", (0, 1))
    account.reserve(2, "cpu", (0,))
    assert account.submit(1, 1, 6) == ""
    assert "10 ops in flight, 6 of which" in account.submit(2, 1, 5)
    account.finished(2, 1)
    assert account.submit(2, 2, 4) == ""
    assert account.submit(2, 3, 0) == ""  # frees and fetches are never refused
    account.finished(1, 1)
    account.finished(2, 2)
    account.held(1, 1, 60)
    account.held(2, 1, 50)
    assert "holds 110 bytes, above its quota of 100" in account.submit(1, 2, 1)
    assert account.use_of(1) == (2, 60, 1)
    account.close(1)
    assert (account.num_devices, account.held_bytes, account.sessions) == (1, 50, (2,))
    assert account.submit(2, 4, 1) == ""
    account.finished(9, 1)
    account.held(9, 1, 5)


def test_without_limits_there_are_none() -> None:
    account = Account("ann", Limits())
    account.open(1)
    account.reserve(1, "cpu", tuple(range(1000)))
    account.held(1, 1, 1 << 50)
    assert account.submit(1, 1, 1 << 40) == ""


@pytest.mark.parametrize("num", [0, 1, 15, 16, 1000, 70_000])
def test_calls_are_counted_from_the_first_bytes(num: int) -> None:
    assert num_calls(msgspec.msgpack.encode(([[1, 2]] * num, []))) == num


@pytest.mark.parametrize("body", [b"", b"\x92", b"\x91\x90", b"\x92\xc0\x90", msgspec.msgpack.encode({"a": 1})])
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        num_calls(body)


# ---- uploads under way


def test_uploads_are_kept_as_far_as_the_bound_goes() -> None:
    def part(stream: int, offset: int) -> Part:
        return Part(1, stream, offset, 8, 7, (0,), memoryview(b"1234"))

    uploads = Uploads()
    for stream, offset in ((1, 0), (2, 0), (1, 4), (2, 4)):
        uploads.add(part(stream, offset), b"%d at %d" % (stream, offset), 12)
    assert list(uploads.kept()) == [(7, (0,), b"1 at 0"), (7, (0,), b"1 at 4")]
    blobs = (StreamBlob(2, 8), Blob(b"inline"), StreamBlob(1, 8))
    assert uploads.take(blobs) == (Stream(1, 7, (0,), (b"1 at 0", b"1 at 4")),)
    assert uploads.take(blobs) == ()
    assert uploads.size_bytes == 0
    uploads.add(part(3, 4), b"its beginning went to somebody else", 100)
    assert list(uploads.kept()) == []


# ---- refusals and keys


def test_an_address_with_many_wrong_keys_is_not_listened_to_for_a_while() -> None:
    refusals = Refusals(max_refusals=3, window_s=10.0)
    for now in (0.0, 1.0, 2.0):
        assert refusals.listens_to("a", now)
        refusals.refused("a", now)
    assert not refusals.listens_to("a", 9.9)
    assert refusals.listens_to("b", 9.9)
    assert refusals.listens_to("a", 10.0)
    for number in range(2 * MAX_ADDRESSES):
        refusals.refused(str(number), 20.0)
    assert len(refusals._times) == MAX_ADDRESSES


def test_keys_are_kept_as_hashes_for_their_owner_alone(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "sub" / "keys.json")
    assert file.entries() == ()
    entry, key = file.create("ann", weight=2.0, priority=1, limits=Limits(max_devices=4))
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert key.rpartition("_")[2] not in file.path.read_text()
    assert KeyFile(file.path).verify(key) == entry
    assert (entry.role, entry.weight, entry.priority, entry.limits.max_devices) == ("client", 2.0, 1, 4)
    for wrong in ("", "dt", key[:-1], key + "x", key.replace("dt_", "xx_"), f"dt_{entry.id}_", "dt_\udcff_x", "x" * 10**6):
        with pytest.raises(AuthError):
            file.verify(wrong)
    other = KeyFile(file.path)
    second, _ = other.create("ann", "admin")
    assert [each.id for each in file.entries()] == [entry.id, second.id]  # what another process has written is seen
    assert file.revoke("nobody") == ()
    assert set(other.revoke("ann")) == {entry, second}
    with pytest.raises(AuthError):
        file.verify(key)


def test_keys_that_cannot_be_made(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    for facts in ({"name": ""}, {"name": "a\n"}, {"role": "king"}, {"weight": 0.0}, {"weight": float("inf")}):
        with pytest.raises(ValueError, match=r"^a (key|weight)"):
            file.create(**{"name": "ann", **facts})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0"):
        file.create("ann", limits=Limits(max_ops=-1))
    file.path.write_text('{"not": "keys"}')
    with pytest.raises(ValueError, match=r"is no file of keys"):
        file.entries()


def test_the_audit_log_is_a_json_object_a_line(tmp_path: Path) -> None:
    log = Audit(tmp_path / "log" / "audit.jsonl")
    log.note("key refused", address="a\nb", path="x" * 10_000)
    log.close()
    Audit(None).note("nothing")
    path = tmp_path / "log" / "audit.jsonl"
    line, = path.read_bytes().splitlines()
    facts = msgspec.json.decode(line)
    assert facts["event"] == "key refused"
    assert len(facts["path"]) == 500
    assert os.stat(path).st_mode & 0o777 == 0o600
