"""Hostile bytes: the codec, the handshake, a head's sessions and a worker's op decoder refuse them, and nobody else notices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from _cluster import PATIENCE_S, Cluster, cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtorch
from dtorch.cluster.head import STALL_S
from dtorch.cluster.keys import Key
from dtorch.cluster.member import WorkerEnd
from dtorch.cluster.meter import Meter
from dtorch.cluster.pool import Pool
from dtorch.cluster.quotas import Account, Limits
from dtorch.cluster.tenancy import Tenancy
from dtorch.ops import table
from dtorch.runtime.fair import FairExecutor
from dtorch.runtime.lineage import Bounds
from dtorch.runtime.turns import Turns
from dtorch.session import using
from dtorch.transport import cluster as said
from dtorch.transport import codec
from dtorch.transport.cluster import Attach, Attached, Ended, Part, Reserve, Submit
from dtorch.transport.dial import address_of, dial
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import ConnectionLostError, ProtocolError
from dtorch.transport.link import memory_pair
from dtorch.transport.messages import (
    PROTOCOL_VERSION,
    AskStatistics,
    Blob,
    Define,
    Definition,
    Fetch,
    Forget,
    Layout,
    MeshInfo,
    Seed,
    SharedBlob,
    StreamBlob,
)

FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

# ---- the codec

_decoders = (
    codec.decode_from_client, codec.decode_to_client, codec.decode_from_pool_worker, codec.decode_to_pool_worker,
    codec.decode_to_worker, codec.decode_from_worker,
)

LAYOUT = Layout(1, (4,), "float32", (0,))
NEG = Definition(1, "torch.neg", "local", [["t", 0]], {}, (LAYOUT,), (LAYOUT,))
GOOD: tuple[Any, ...] = (
    Attach(1, "1.x", 3, "me"),
    Reserve(1, 1, "cpu", (0, 1)),
    Define(1, (MeshInfo(1, "cpu", (2,), (0, 1)),), (NEG,)),
    Submit(1, 1, (1,), msgspec.msgpack.encode(([[1, 0, 1]], [[1, [0]]])), (1,), (Blob(b"x"), StreamBlob(1, 4))),
    Part(1, 1, 0, 4, 1, (), memoryview(b"1234")),
    Seed(1, 3),
    AskStatistics(1, 2, True, False),
    said.Enlist(1, 2, (("cpu", 0),), "w", {"rack": "a"}),
    said.Open(1, "ann", 1.0, 0, 0),
)


@FEW
@given(st.one_of(st.binary(max_size=200), st.builds(lambda n: b"\x91" * n, st.integers(0, 20_000))))
def test_decoders_refuse_random_bytes(data: bytes) -> None:
    for decode in _decoders:
        try:
            decode(data)
        except ProtocolError:
            continue


@FEW
@given(st.sampled_from(GOOD), st.data())
def test_decoders_refuse_or_take_changed_messages(message: Any, data: st.DataObject) -> None:
    frame = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    for decode in _decoders:
        for each in (bytes(frame), cut):
            try:
                decode(each)
            except ProtocolError:
                continue


# ---- a session in the head, alone

small = st.integers(-1, 4)
ints = st.one_of(small, st.sampled_from([1 << 31, 1 << 62]))
tuples = st.lists(ints, max_size=3).map(tuple)
layouts = st.builds(Layout, ints, tuples, st.sampled_from(["float32", "nonsense"]), tuples)
bodies = st.one_of(
    st.binary(max_size=30),
    st.lists(st.lists(ints, max_size=5), max_size=5).map(lambda calls: msgspec.msgpack.encode((calls, []))),
)
definitions = st.builds(
    Definition, small, st.sampled_from(["torch.neg", "torch.add", "torch.nothing", "dtorch.upload", "custom:os:system"]),
    st.sampled_from(["local", "upload", "random", "program", "redistribute", "nothing"]),
    st.just([["t", 0]]), st.just({}), st.lists(layouts, max_size=2).map(tuple), st.lists(layouts, max_size=2).map(tuple),
)
meshes = st.builds(MeshInfo, small, st.sampled_from(["cpu", "cuda", "x"]), tuples, tuples)
fetches = st.builds(
    Fetch, ints, ints, small, tuples, st.sampled_from([None, SharedBlob(1, 2, 0, 8), StreamBlob(1, 8)]), st.none(), tuples
)
sessions = st.sampled_from([1, 1, 1, 1, 2])  # 1: its own, 2: another's
messages = st.one_of(
    st.builds(Reserve, sessions, ints, st.sampled_from(["cpu", "x"]), tuples),
    st.builds(Define, sessions, st.lists(meshes, max_size=2).map(tuple), st.lists(definitions, max_size=2).map(tuple)),
    st.builds(
        Submit, sessions, ints, tuples, bodies, tuples, st.just(()), st.lists(fetches, max_size=2).map(tuple)
    ),
    st.builds(Part, sessions, ints, ints, st.binary(max_size=8).map(memoryview), small, ints),
    st.builds(Seed, sessions, st.none() | ints, ints, st.lists(ints, max_size=3).map(tuple)),
    st.builds(Forget, sessions, ints),
    st.builds(AskStatistics, sessions, ints, st.booleans(), st.booleans(), st.booleans()),
)


class Home:
    """A head without sockets: one worker, which notes what it is sent."""

    def __init__(self) -> None:
        self.pool = Pool()
        near, self.worker_side = memory_pair()
        end = WorkerEnd(self.pool.enlist([("cpu", 0), ("cpu", 1)]), DurableLink(near, 1.0), "")
        self.workers = {end.number: end}
        self.meter = Meter()
        self.lineage = Bounds()
        self.replace_s = 1.0
        self.over: list[int] = []

    def ended(self, tenancy: Tenancy) -> None:
        self.over.append(tenancy.number)

    def left(self, number: int) -> None:
        pass

    def session(self, number: int) -> tuple[Tenancy, Any]:
        near, far = memory_pair()
        account = Account(f"tenant {number}", Limits())
        account.open(number)
        key = Key(str(number), account.name, "client", "", 0.0)
        return Tenancy(number, key, account, DurableLink(near, 1.0), self), far

    def sent(self) -> list[Any]:
        inbox = self.worker_side._inbox  # type: ignore[attr-defined]
        found = [codec.decode_to_pool_worker(frame[16:]) for frame in inbox]
        inbox.clear()
        return found


@FEW
@given(st.lists(messages, max_size=12))
def test_whatever_a_client_says_stays_in_its_session(script: list[Any]) -> None:
    async def run() -> None:
        home = Home()
        hostile, _ = home.session(1)
        other, other_side = home.session(2)
        home.pool.reserve(2, "cpu", (0, 1))
        other._take(Define(2, (MeshInfo(1, "cpu", (2,), (0, 1)),), ()), b"")
        before = home.pool.devices_of(2)
        home.sent()
        other_side._inbox.clear()
        for message in script:
            frame = codec.encode(message)
            try:
                hostile._take(codec.decode_from_client(frame), frame)
            except ProtocolError as error:
                hostile.end("ProtocolError", str(error))
                break
        assert all(message.session == 1 for message in home.sent())
        assert not other_side._inbox
        assert not other.over
        assert home.pool.devices_of(2) == before
        assert 2 not in home.over
        hostile.end("SessionClosedError", "")
        assert home.pool.devices_of(1) == {}
        other.end("SessionClosedError", "")

    asyncio.run(run())


async def test_a_client_is_held_to_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home()
    for message, text in (
        (Submit(1, 1, (), msgspec.msgpack.encode(([], [])), (), (), (Fetch(1, 0, 1, (0,), SharedBlob(1, 2, 0, 8)),)), "shared"),
        (Part(1, 1, 0, 8, 1, (), memoryview(bytes(said.PART_BYTES + 1))), "above"),
        (Part(1, 1, 0, 8, 7, (), memoryview(b"1")), "unknown"),
        (Define(1, (MeshInfo(1, "cpu", (1 << 30,), (0,)),), ()), "does not fit"),
        (Define(1, (MeshInfo(1, "cpu", (1,), (0,), (1,)),), ()), "does not say"),
        (Define(1, (MeshInfo(1, "cpu", (1,), (0,)),), ()), "not there"),
        (Reserve(1, 1, "cpu", tuple(range(5000))), "at most"),
        (Attach(1), "once"),
        (Seed(2, 1), "speaks for session 2"),
        (Seed(1, None, 5), "stream 5 of random numbers was never seeded"),
    ):
        hostile, _ = home.session(1)
        with pytest.raises(ProtocolError, match=text):
            hostile._take(message, b"")
        hostile.end("x", "x")
    monkeypatch.setattr("dtorch.cluster.tenancy.MAX_STREAMS", 3)
    hostile, _ = home.session(1)
    for number in range(6):  # a stream that has ended counts no more
        hostile._take(Seed(1, 0, number, (number - 2,)), b"")
    hostile._take(Seed(1, 0, 6), b"")
    with pytest.raises(ProtocolError, match="more than 3 tasks have seeded"):
        hostile._take(Seed(1, 0, 7), b"")
    hostile.end("x", "x")
    monkeypatch.setattr("dtorch.cluster.tenancy.MAX_SAID", 3)
    hostile, _ = home.session(1)
    for number in range(3):
        hostile._take(Seed(1, number), b"")
    with pytest.raises(ProtocolError, match="more than 3 messages"):
        hostile._take(Seed(1, 4), b"")
    monkeypatch.setattr("dtorch.cluster.tenancy.CLIENT_LIMIT_BYTES", 1000)
    number = 0
    while not hostile.over:
        hostile._take(Reserve(1, number, "cpu", (0,)), b"")
        number += 1
    assert "does not read" in hostile.over


async def test_a_session_that_is_over_still_hears_that_its_last_word_has_arrived() -> None:
    tenancy, wire = Home().session(1)
    serving = asyncio.get_running_loop().create_task(tenancy.serve())
    client = DurableLink(wire, 1.0)
    tenancy.end("AuthError", "the key was revoked")
    client.send_nowait(codec.encode(Seed(1, 1)))  # said before it knew
    assert isinstance(codec.decode_to_client(await client.receive() or b""), Ended)
    client.send_nowait(codec.encode(Seed(1, 2)))
    await asyncio.wait_for(tenancy.link.wait_sent(), PATIENCE_S)
    await client.close()
    await asyncio.wait_for(serving, PATIENCE_S)
    await tenancy.link.close()


# ---- the op decoder of a worker


@FEW
@given(
    st.lists(meshes, max_size=2), st.lists(definitions, max_size=3), st.lists(bodies, min_size=1, max_size=3)
)
def test_an_executor_takes_or_refuses_whatever_it_is_told(
    announced: list[MeshInfo], defined: list[Definition], batches: list[bytes]
) -> None:
    turns = Turns()
    turns.add(1, "a", 1.0, 0)
    turns.take(1)
    executor = FairExecutor(
        1, 1, table.resolve, lambda _: torch.device("cpu"), lambda *_: pytest.fail("no groups"), lambda _: None, turns=turns,
        limit_bytes=1 << 20,
    )
    executor.add_mesh(MeshInfo(1, "cpu", (2,), (0, 1), (1, 1)))
    for mesh in announced:
        with _refusals():
            executor.add_mesh(msgspec.structs.replace(mesh, workers=(1,) * len(mesh.devices)))
    for definition in (NEG, *defined):
        executor.add_definition(definition)
    for seq, body in enumerate(batches):
        with _refusals():
            executor.run(seq, body, [])
        with _refusals():
            executor.refuse(seq, body, "no")
    assert all(len(store) <= (1 << 24) + 256 for store in executor.stores)
    turns.give(1)


class _refusals:
    """What a session's thread takes for the end of the session: any Exception, never worse."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        return error is None or (isinstance(error, Exception) and not isinstance(error, AssertionError | MemoryError))


# ---- real sockets


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("fuzz"), "cpu:2") as made:
        yield made


def works(home: Cluster) -> None:
    session = home.session(home.key("good"))
    with using(session):
        assert dtorch.ones(3, device_mesh=dtorch.DeviceMesh("cpu", [0, 1])).sum().item() == 3.0
    session.close()


def test_strangers_who_send_garbage_are_cut_off(home: Cluster) -> None:
    address, key = address_of(home.head.url), home.key("noisy")
    frames = [b"", b"\xc1", b"\x91" * 5000, codec.encode(Seed(1, 1)), codec.encode(Attach(99))]
    for first in frames:
        with pytest.raises((ProtocolError, ConnectionLostError)):
            asyncio.run(_attach(address, key, first))
    works(home)


async def _attach(address: str, key: str, first: bytes) -> None:
    link, answer = await dial(address, "/v1/client", key, first)
    await link.close()
    ended = codec.decode_to_client(answer)
    if isinstance(ended, Ended):
        raise ProtocolError(ended.text)


async def _talk(home: Cluster, key: str, *frames: bytes) -> str:
    """Open a session, say something, and tell why the head hung up."""
    link, answer = await dial(address_of(home.head.url), "/v1/client", key, codec.encode(Attach(PROTOCOL_VERSION)))
    attached = codec.decode_to_client(answer)
    assert isinstance(attached, Attached)
    for frame in frames:
        link.send_nowait(frame)
    heard = b""
    while (got := await link.receive()) is not None:
        heard = got
    await link.close()
    ended = codec.decode_to_client(heard[16:]) if len(heard) > 16 else None
    return ended.text if isinstance(ended, Ended) else link.reason or str(link.close_code)


def test_clients_that_turn_to_garbage_are_cut_off(home: Cluster) -> None:
    key = home.key("noisy")
    numbered = (1).to_bytes(8, "little") + bytes(8)
    huge = asyncio.run(_talk(home, key, numbered + bytes(17 << 20)))
    assert huge
    ahead, foreign = (7).to_bytes(8, "little") + bytes(9), numbered + codec.encode(Seed(1 << 40, 1))
    for garbage in (b"\x00", numbered + b"\xc1", ahead, foreign):
        assert asyncio.run(_talk(home, key, garbage))
    home.until(lambda: not home.head.sessions)
    works(home)


def test_another_sessions_ticket_is_of_no_use(home: Cluster) -> None:
    victim = home.session(home.key("victim"))
    ticket = home.do(lambda: home.head.sessions[victim.number].ticket)
    address = address_of(home.head.url)
    for guess in (f"{victim.number}.guess", f"{victim.number}", "999.x", "x", "1" * 5000, ticket):  # the last one: another key
        with pytest.raises(ProtocolError):
            asyncio.run(_attach(address, home.key("thief"), codec.encode(Attach(PROTOCOL_VERSION, guess))))
    with using(victim):
        assert dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cpu", [0])).sum().item() == 2.0
    victim.close()


def test_a_client_that_does_not_read_is_cut_off_and_others_go_on(home: Cluster) -> None:
    deaf = home.session(home.key("deaf"))
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(60.0)

    try:
        with using(deaf):
            x = dtorch.zeros(1 << 20, device_mesh=dtorch.DeviceMesh("cpu", [0]))
            dtorch.synchronize()
            deaf.thread.loop.call_soon_threadsafe(hold)
            held.wait()
            values = [deaf.fetch(x) for _ in range(8)]  # 32 MiB
        works(home)
        tenancy = home.do(lambda: home.head.sessions[deaf.number])
        # Its request is not even read from the socket, or its values wait on the worker: little is kept in the head.
        assert home.do(lambda: tenancy.link.pending_bytes) < 24 << 20
        home.do(lambda: tenancy.send(said.Devices({})))
        now = home.do(lambda: asyncio.get_running_loop().time())
        home.do(lambda: home.head._end_stalled(tenancy, now))
        home.do(lambda: home.head._end_stalled(tenancy, now + STALL_S + 1.0))
        assert "read nothing" in tenancy.over
    finally:
        release.set()
    for value in values:
        with pytest.raises(ProtocolError, match="read nothing"):
            value.result(60.0)
    deaf.close()
    works(home)


async def test_requests_without_a_key_get_nothing(home: Cluster, tmp_path: Path) -> None:
    base = home.head.url.replace("ws://", "http://")
    async with aiohttp.ClientSession() as http:
        async with http.get(base + "/healthz") as answer:
            assert answer.status == 200
        for path in (
            "/v1/status", "/v1/sessions", "/v1/client", "/v1/worker", "/v1/store/get", "/../keys.json", "/metrics",
            "/api/v1/usage", "/nothing",
        ):  # "/" is the page, which holds nothing of anybody
            async with http.get(base + path) as answer:
                assert answer.status in (401, 404, 405)
