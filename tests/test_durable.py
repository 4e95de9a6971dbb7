"""Streams that outlive their connections: every frame arrives once and in order, whatever breaks."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.transport.codec import Frame
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import AuthError, ConnectionLostError, ProtocolError
from dtorch.transport.link import Link, memory_pair
from dtorch.transport.numbered import (
    ACK_FRAMES,
    HEAD,
    LEAST_WINDOW_BYTES,
    MOST_WINDOW_BYTES,
    WINDOW_S,
    Numbered,
    Pace,
)

PATIENCE_S = 20.0  # an upper bound that only a failing test meets

# ---- the decider


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a sends", "b sends", "a hears", "b hears", "break"]), max_size=80))
def test_what_is_sent_arrives_once_and_in_order(steps: list[str]) -> None:
    ends = {"a": Numbered(), "b": Numbered()}
    wires: dict[str, deque[bytes]] = {"a": deque(), "b": deque()}  # on the way to
    sent: dict[str, list[bytes]] = {"a": [], "b": []}
    heard: dict[str, list[bytes]] = {"a": [], "b": []}
    other = {"a": "b", "b": "a"}

    def hear(me: str) -> None:
        if wires[me]:
            frame = ends[me].receive(wires[me].popleft())
            if frame is not None:
                heard[me].append(bytes(frame))
            answer = ends[me].acknowledgement()
            if answer is not None:
                wires[other[me]].append(answer)

    def reconnect() -> None:
        for me in ends:
            wires[me].clear()
        for me in ends:
            wires[other[me]].extend(map(b"".join, ends[me].again(ends[other[me]].received)))

    for step in steps:
        if step == "break":
            reconnect()
            continue
        me, what = step.split()
        if what == "sends":
            frame = f"{me}{len(sent[me])}".encode()
            sent[me].append(frame)
            wires[other[me]].append(b"".join(ends[me].send(frame[:1], memoryview(frame)[1:])))
        else:
            hear(me)
    reconnect()
    while wires["a"] or wires["b"]:
        hear("a")
        hear("b")
    assert heard["a"] == sent["b"]
    assert heard["b"] == sent["a"]
    for me, end in ends.items():
        end.again(ends[other[me]].received)
        assert (end.unacked_bytes, end.acknowledged) == (0, len(sent[me]))


def test_acknowledgements_are_owed_and_paid() -> None:
    a, b = Numbered(), Numbered()
    for _ in range(ACK_FRAMES - 1):
        b.receive(b"".join(a.send(b"x")))
    assert b.acknowledgement() is None
    assert b.owes
    b.receive(b"".join(a.send(b"x")))
    paid = b.acknowledgement()
    assert paid is not None
    assert not b.owes
    assert b.acknowledgement(now=True) is None
    assert a.receive(paid) is None
    assert a.unacked_bytes == 0


def test_as_much_is_on_its_way_as_arrives_in_a_moment() -> None:
    pace = Pace()
    assert pace.window_bytes == LEAST_WINDOW_BYTES
    now = 100.0
    pace.arrived(1, now)
    for _ in range(20):
        now += WINDOW_S / 4
        pace.arrived(4 << 20, now)
    assert 15 << 20 < pace.window_bytes <= 16 << 20
    for _ in range(20):
        now += WINDOW_S / 4
        pace.arrived(64 << 20, now)
    assert pace.window_bytes == MOST_WINDOW_BYTES
    pace.arrived(1, now + 60)
    assert pace.window_bytes == LEAST_WINDOW_BYTES


def test_what_no_stream_could_have_sent_is_refused() -> None:
    for wire in (b"", b"short", HEAD.pack(2, 0), HEAD.pack(1, 5)):
        with pytest.raises(ProtocolError):
            Numbered().receive(wire)
    a = Numbered()
    a.send(b"x")
    with pytest.raises(ProtocolError, match="2 is acknowledged"):
        a.again(2)
    a.again(1)
    with pytest.raises(ProtocolError, match="wanted again"):
        a.again(0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=20))
def test_random_bytes_are_refused_or_ignored(frames: list[bytes]) -> None:
    end = Numbered()
    for frame in frames:
        try:
            end.receive(frame)
        except ProtocolError:
            continue
    assert end.received <= len(frames)


# ---- the shell


class Wire:
    """Two durable ends over memory links that a test can cut."""

    def __init__(self, grace_s: float = PATIENCE_S) -> None:
        near, far = memory_pair()
        self.open = True
        self.cuts: list[Link] = [near, far]
        self.far = DurableLink(far, grace_s)
        self.near = DurableLink(near, grace_s, self._dial)

    async def _dial(self, received: int) -> tuple[Link, int]:
        if not self.open:
            raise ConnectionLostError("no route")
        near, far = memory_pair()
        self.cuts = [near, far]
        had = self.far.received
        await self.far.attach(far, received)
        return near, had

    async def cut(self) -> None:
        await self.cuts[0].close()


async def take(link: Link, num: int) -> list[Frame | None]:
    return [await asyncio.wait_for(link.receive(), PATIENCE_S) for _ in range(num)]


async def test_frames_go_on_after_a_cut() -> None:
    wire = Wire()
    heard = asyncio.ensure_future(take(wire.far, 30))
    back = asyncio.ensure_future(take(wire.near, 30))
    for number in range(30):
        wire.near.send_nowait(b"to far %d" % number)
        wire.far.send_nowait(b"to near %d" % number)
        if number % 10 == 5:
            await wire.cut()
        await asyncio.sleep(0)
    assert await heard == [b"to far %d" % number for number in range(30)]
    assert await back == [b"to near %d" % number for number in range(30)]
    assert wire.near.num_breaks >= 1
    await wire.near.close()
    await wire.far.close()


async def test_an_end_that_stays_away_is_given_up() -> None:
    wire = Wire(grace_s=0.01)
    wire.open = False
    await wire.cut()
    assert await take(wire.near, 1) == [None]
    assert await take(wire.far, 1) == [None]
    assert "no route" in wire.near.reason
    for end in (wire.near, wire.far):
        assert end.closed
        with pytest.raises(ConnectionLostError):
            end.send_nowait(b"x")


async def test_an_end_that_is_not_wanted_back_gives_up_at_once() -> None:
    wire = Wire()

    async def refuse(_: int) -> tuple[Link, int]:
        raise AuthError("the key was revoked")

    wire.near._dial = refuse
    await wire.cut()
    assert await take(wire.near, 1) == [None]
    assert wire.near.reason == "the key was revoked"
    await wire.far.close()


async def test_a_sender_waits_for_room() -> None:
    wire = Wire()
    for _ in range(10):
        wire.near.send_nowait(bytes(1000))
    waiting = asyncio.ensure_future(wire.near.wait_below(0))
    acks = asyncio.ensure_future(wire.near.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    await take(wire.far, 10)
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert wire.near.pending_bytes == 0
    await wire.near.finish()
    assert await asyncio.wait_for(acks, PATIENCE_S) is None
    await wire.far.close()


async def test_garbage_ends_the_stream() -> None:
    near, far = memory_pair()
    end = DurableLink(far, PATIENCE_S)
    near.send_nowait(b"\x00" * 7)
    with pytest.raises(ProtocolError):
        await end.receive()
    assert end.closed
    await near.close()
