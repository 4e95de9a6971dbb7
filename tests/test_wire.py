"""Websockets past aiohttp: the same bytes on the wire, so that either end may be aiohttp's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from dtorch.cluster.streams import SessionStreams
from dtorch.runtime.ear import HAS_EAR, Ear
from dtorch.runtime.promise import Promise
from dtorch.runtime.turns import Turns
from dtorch.transport import codec, wire
from dtorch.transport.cluster import PART_BYTES, Part
from dtorch.transport.dial import dial
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import ConnectionLostError
from dtorch.transport.link import Link, WebSocketLink
from dtorch.transport.numbered import Numbered
from dtorch.transport.wire import WireLink, take_over

SIZES = (0, 1, 125, 126, 4096, 65_535, 65_536, 70_001, 1 << 20, 5 << 20)
MAX_BYTES = 8 << 20

Talk = Callable[[Link], Awaitable[None]]

needs_ear = pytest.mark.skipif(not HAS_EAR, reason="there is no epoll here")


async def echo(link: Link) -> None:
    while (frame := await link.receive()) is not None:
        link.send_nowait(frame)


@asynccontextmanager
async def server(talk: Talk, threads: bool = False) -> AsyncIterator[tuple[str, list[Link]]]:
    """Its address, and the links that it has had; it answers the first word of each with b"welcome"."""
    links: list[Link] = []

    async def accept(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(compress=False)
        await ws.prepare(request)
        first = WebSocketLink(ws)
        assert await first.receive() == b"hello"
        link = take_over(first, MAX_BYTES, threads)
        assert isinstance(link, WireLink)
        links.append(link)
        link.send_nowait(b"welcome")
        await talk(link)
        await link.close()
        return ws

    app = web.Application()
    app.router.add_get("/x", accept)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}", links
    finally:
        await runner.cleanup()


async def linked(address: str, past_aiohttp: bool = True) -> Link:
    link, frame = await dial(f"tcp:{address}", "/x", "t", b"hello", past_aiohttp=past_aiohttp)
    assert bytes(frame) == b"welcome"
    assert isinstance(link, WireLink) is past_aiohttp
    return link


def loops() -> list[Any]:
    try:
        import uvloop
    except ImportError:
        return [asyncio.new_event_loop]
    return [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("new_loop", loops())
@pytest.mark.parametrize("past_aiohttp", [True, False])
def test_frames_of_all_sizes_come_back(new_loop: Callable[[], asyncio.AbstractEventLoop], past_aiohttp: bool) -> None:
    async def work() -> None:
        async with server(echo) as (address, links):
            link = await linked(address, past_aiohttp)
            sent = [bytes((size + i) % 251 for i in range(min(size, 300))) * (size // 300 + 1) for size in SIZES]
            for data, size in zip(sent, SIZES, strict=True):
                link.send_nowait(data[: size // 2], memoryview(data)[size // 2 : size])
            for data, size in zip(sent, SIZES, strict=True):
                frame = await link.receive()
                assert frame is not None
                assert bytes(frame) == data[:size]
            await link.close("that was all")
            assert await link.receive() is None
            with pytest.raises(ConnectionLostError):
                link.send_nowait(b"more")
        assert links[0].reason == "that was all"

    loop = new_loop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()


async def test_messages_in_pieces_pings_and_foreign_masks_are_understood() -> None:
    """aiohttp as a client: it masks with random keys; and frames by hand."""
    async with server(echo) as (address, _), aiohttp.ClientSession() as session:
        ws = await session.ws_connect(f"http://{address}/x", autoping=False)
        await ws.send_bytes(b"hello")
        assert (await ws.receive()).data == b"welcome"
        await ws.ping(b"there?")
        pong = await ws.receive()
        assert (pong.type, pong.data) == (aiohttp.WSMsgType.PONG, b"there?")
        raw = ws._response.connection.transport  # type: ignore[union-attr]
        assert isinstance(raw, asyncio.Transport)
        raw.write(b"\x02\x82\x01\x02\x03\x04" + bytes((ord("a") ^ 1, ord("b") ^ 2)))  # not the last of its message
        raw.write(b"\x80\x81\x00\x00\x00\x00c")
        assert (await ws.receive()).data == b"abc"
        await ws.close()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x82\xff" + (MAX_BYTES + 1).to_bytes(8, "big") + bytes(4), aiohttp.WSCloseCode.MESSAGE_TOO_BIG),
        (b"\x81\x81\x00\x00\x00\x00t", aiohttp.WSCloseCode.UNSUPPORTED_DATA),
        (b"\x89\xfe\x01\x00" + bytes(4 + 256), aiohttp.WSCloseCode.MESSAGE_TOO_BIG),
    ],
    ids=["too large", "text", "a ping that is too large"],
)
async def test_what_is_not_in_the_protocol_ends_the_link(frame: bytes, code: int) -> None:
    async with server(echo) as (address, links), aiohttp.ClientSession() as session:
        ws = await session.ws_connect(f"http://{address}/x")
        await ws.send_bytes(b"hello")
        await ws.receive()
        raw = ws._response.connection.transport  # type: ignore[union-attr]
        assert isinstance(raw, asyncio.Transport)
        raw.write(frame)
        end = await ws.receive()
        assert (end.type, end.data) == (aiohttp.WSMsgType.CLOSE, code)
        assert links[0].reason
        await ws.close()


async def test_a_reader_that_is_behind_is_not_sent_without_end() -> None:
    go_on, counted = asyncio.Event(), []

    async def slow(link: Link) -> None:
        await go_on.wait()
        while (frame := await link.receive()) is not None:
            counted.append(len(frame))

    async with server(slow) as (address, links):
        link = await linked(address)
        num = 64
        for _ in range(num):
            link.send_nowait(bytes(1 << 20))
        far = links[0]
        assert isinstance(far, WireLink)
        await far.is_paused.wait()
        assert far._inbox_bytes <= wire._INBOX_BYTES + (1 << 20)
        assert link.pending_bytes > 0
        go_on.set()
        await link.wait_sent()
        assert link.pending_bytes == 0
        await link.close()
    assert counted == [1 << 20] * num


async def test_a_cut_is_noticed_by_both() -> None:
    async with server(echo) as (address, links):
        link = await linked(address)
        link.abort()
        assert await link.receive() is None
        await link.close()
    assert await links[0].receive() is None


# ---- data of parts go where they belong


def part(offset: int, data: bytes, total: int, devices: tuple[int, ...] = (3,)) -> Part:
    return Part(1, 9, offset, total, 2, devices, memoryview(data))


def test_a_part_says_where_its_data_begin() -> None:
    whole = part(7, bytes(range(256)) * 300, 99)
    head, data = codec.encode_part(whole)
    frame = head + bytes(data)
    assert frame == codec.encode(whole)
    found = codec.split_part(memoryview(frame)[:400])
    assert found is not None
    emptied, before, size = found
    assert (before, size) == (len(head), len(data))
    assert codec.decode_from_client(emptied) == part(7, b"", 99)
    assert codec.split_part(memoryview(frame)[: before - 1]) is None  # not all of it is seen
    assert codec.split_part(memoryview(codec.encode(part(0, b"x" * 90_000, 99, tuple(range(1000)))))[:400]) is None
    assert codec.split_part(memoryview(b"\xa4data\xc6" + bytes(400))) is None


def test_parts_that_land_are_put_in_their_turn() -> None:
    streams = SessionStreams(1, Turns(), lambda _: None, 0)
    data = bytes(range(200))

    def lands(offset: int, stop: int) -> bool:
        memory = streams.land(part(offset, b"", 200), stop - offset)
        if memory is not None:
            memory[:] = data[offset:stop]
        return memory is not None

    def put(offset: int, stop: int, landed: bool = False) -> None:
        streams.put(part(offset, b"" if landed else data[offset:stop], 200))

    assert not lands(0, 50)  # nobody knows the stream yet
    put(0, 50)
    assert not lands(60, 70)  # not the next one
    assert not lands(50, 201)
    assert lands(50, 100)
    assert lands(100, 150)  # ahead of ``put``
    assert lands(100, 150)  # again, as the connection broke meanwhile
    put(50, 100, landed=True)
    put(100, 150, landed=True)
    put(0, 50)  # from the beginning: another worker was lost
    assert lands(50, 200)
    put(50, 200, landed=True)
    assert bytes(streams.take(9, 200).numpy()) == data
    assert not lands(50, 100)


async def test_data_land_and_are_acknowledged() -> None:
    total, got = 5 * PART_BYTES + 5, []
    streams = SessionStreams(1, Turns(), lambda _: None, 0)
    landed = []

    def land(frame: bytes, size_bytes: int) -> memoryview | None:
        found = codec.decode_from_client(frame)
        assert isinstance(found, Part)
        memory = streams.land(found, size_bytes)
        landed.append(memory is not None)
        return memory

    async def take(link: Link) -> None:
        durable = DurableLink(link, 0.0)
        durable.land = land
        while (frame := await durable.receive()) is not None:
            found = codec.decode_from_client(frame)
            assert isinstance(found, Part)
            got.append((found.offset, len(found.data)))
            streams.put(found)

    data = torch.randint(0, 256, (total,), dtype=torch.uint8)
    async with server(take) as (address, _):
        durable = DurableLink(await linked(address), 0.0)
        reading = asyncio.ensure_future(durable.receive())
        for start in range(0, total, PART_BYTES):
            piece = data.numpy().data[start : start + PART_BYTES]
            durable.send_nowait(*codec.encode_part(Part(1, 9, start, total, 2, (3,), piece)))
        await durable.wait_sent()
        reading.cancel()
        await durable.close()
    assert torch.equal(streams.take(9, total), data)
    assert len(got) == 6
    assert [offset for offset, _ in got] == list(range(0, total, PART_BYTES))
    assert [size for _, size in got].count(0) == sum(landed)


async def test_what_comes_again_does_not_land_again() -> None:
    """1: a part lands. 2: its acknowledgement is lost, and it comes again after its memory belongs to somebody else."""
    landed = []

    def land(frame: bytes, size_bytes: int) -> memoryview | None:
        landed.append(bytearray(size_bytes))
        return memoryview(landed[-1])

    frames = []

    async def take(link: Link) -> None:
        durable = DurableLink(link, 0.0)
        durable.land = land
        while (frame := await durable.receive()) is not None:
            frames.append(len(frame))

    ours = Numbered()
    again = ours.send(*codec.encode_part(part(5, b"x" * 100_000, 200_000)))
    last = ours.send(b"the end")
    async with server(take) as (address, _):
        link = await linked(address)
        for wire_pieces in (again, again, last):
            link.send_nowait(*wire_pieces)
            await link.wait_sent()
        while len(frames) < 2:
            await link.receive()  # acknowledgements
        await link.close()
    assert [bytes(memory) for memory in landed] == [b"x" * 100_000]
    assert len(frames) == 2


async def test_each_part_that_landed_is_acknowledged_though_several_wait_to_be_taken() -> None:
    both, owes = asyncio.Event(), []
    num = 3  # the first one does not land

    def land(frame: bytes, size_bytes: int) -> memoryview | None:
        found = codec.decode_from_client(frame)
        assert isinstance(found, Part)
        if found.offset == (num - 1) * PART_BYTES:
            both.set()
        return memoryview(bytearray(size_bytes)) if found.offset else None

    async def take(link: Link) -> None:
        durable = DurableLink(link, 0.0)
        durable.land = land
        await both.wait()
        while await durable.receive() is not None:
            owes.append(durable._numbered._owed_bytes)

    async with server(take) as (address, _):
        durable = DurableLink(await linked(address), 0.0)
        reading = asyncio.ensure_future(durable.receive())
        data = memoryview(bytes(PART_BYTES))
        for number in range(num):
            durable.send_nowait(*codec.encode_part(Part(1, 9, number * PART_BYTES, num * PART_BYTES, 2, (3,), data)))
        await durable.wait_sent()
        reading.cancel()
        await durable.close()
    # Each part is counted as it is taken; with the second one an acknowledgement is sent.
    assert [round(size / PART_BYTES) for size in owes] == [1, 0, 1]


# ---- read by a thread that waits


class Waiting:
    """A thread that waits for so many frames, and reads them; the loop hears what is left to it."""

    def __init__(self, num_frames: int) -> None:
        self.ear = Ear(asyncio.get_running_loop())
        self.frames: list[bytes] = []
        self.all: Promise[None] = Promise(self.ear)
        self.heard = asyncio.Event()  # the link has ended
        self._num_frames = num_frames
        self._thread = threading.Thread(target=self.all.wait, args=(60,))
        self._thread.start()

    def handle(self, frame: Any) -> bool:
        self.frames.append(bytes(frame))
        if len(self.frames) == self._num_frames:
            self.all.set_result(None)
        return True

    async def hear(self, link: Link) -> None:
        await link.hear(self.handle, self.ear)
        self.heard.set()

    async def end(self) -> None:
        await asyncio.to_thread(self._thread.join, 60)
        assert not self._thread.is_alive()
        await asyncio.to_thread(self.ear.close)


def payload(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size % 5000)) + bytes(size - size % 5000)


@needs_ear
async def test_a_thread_that_waits_reads_frames_of_all_sizes_in_order() -> None:
    wanted = [payload(size) for size in SIZES + SIZES[::-1]]
    waiting = Waiting(len(wanted))
    async with server(waiting.hear, threads=True) as (address, _):
        link = await linked(address)
        for frame in wanted:
            link.send_nowait(frame)
        await waiting.all
        await link.close()
    await waiting.end()
    assert waiting.frames == wanted


@needs_ear
@pytest.mark.parametrize("step", [1, 3, 7])
async def test_a_thread_that_waits_puts_frames_together_that_come_in_bits(step: int) -> None:
    wanted = [payload(size) for size in (0, 1, 125, 126, 300)]
    waiting = Waiting(len(wanted))
    async with server(waiting.hear, threads=True) as (address, links):
        link = await linked(address)
        assert isinstance(link, WireLink)
        written = b"".join(link._head_of(2, len(frame)) + frame for frame in wanted)
        near = links[0]
        assert isinstance(near, WireLink)
        for at in range(0, len(written), step):
            link._transport.write(written[at : at + step])
            await asyncio.sleep(0)
        await waiting.all
        await link.close()
    await waiting.end()
    assert waiting.frames == wanted


class ByHand:
    """Reads when it is told to."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.descriptor = -1
        self.begun = asyncio.Event()

    def add(self, source: Any, fd: int) -> None:
        self.descriptor = fd
        self.begun.set()

    def remove(self, source: Any) -> None:
        self.descriptor = -1


async def test_the_loop_goes_on_with_a_frame_that_a_thread_has_begun() -> None:
    frames, reader, over = [], ByHand(), asyncio.Event()

    def handle(frame: Any) -> bool:
        frames.append(bytes(frame))
        return True

    async def talk(link: Link) -> None:
        await link.hear(handle, reader)
        over.set()

    async with server(talk, threads=True) as (address, links):
        link = await linked(address)
        wanted = payload(3 << 20)
        link.send_nowait(wanted)
        await reader.begun.wait()
        near = links[0]
        assert isinstance(near, WireLink)
        has_begun = False
        while not has_begun:  # as a thread does: until it has the beginning, which fills its buffer
            has_begun = not near.pump(reader.descriptor, False)
        assert not near.pump(reader.descriptor, False)
        while not frames:
            assert near.pump(reader.descriptor, True)
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(link.close())
        while reader.descriptor >= 0:
            near.pump(reader.descriptor, True)
            await asyncio.sleep(0)
        await over.wait()
        await closing
    assert frames == [wanted]


@needs_ear
async def test_pings_and_goodbyes_are_left_to_the_loop() -> None:
    waiting = Waiting(3)
    async with server(waiting.hear, threads=True) as (address, _):
        link = await linked(address)
        assert isinstance(link, WireLink)
        link.send_nowait(b"one")
        link._write(9, b"are you there?")
        link.send_nowait(b"two")
        link._write(9, b"and now?")
        link.send_nowait(b"three")
        await waiting.all
        await link.close("enough")
        await waiting.heard.wait()
    await waiting.end()
    assert waiting.frames == [b"one", b"two", b"three"]


@needs_ear
async def test_a_cut_while_a_thread_waits_ends_the_link() -> None:
    waiting = Waiting(2)
    async with server(waiting.hear, threads=True) as (address, _):
        link = await linked(address)
        link.send_nowait(b"one")
        await link.wait_sent()
        link.abort()
        await waiting.heard.wait()
        await link.close()
        waiting.all.set_result(None)
    await waiting.end()
    assert waiting.frames in ([], [b"one"])


@needs_ear
async def test_what_the_handler_raises_in_a_thread_comes_out_in_the_loop() -> None:
    waiting = Waiting(1)
    raised: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def handle(frame: Any) -> bool:
        raise ValueError("not this")

    async def talk(link: Link) -> None:
        try:
            await link.hear(handle, waiting.ear)
        except ValueError as error:
            raised.set_result(error)

    async with server(talk, threads=True) as (address, _):
        link = await linked(address)
        link.send_nowait(b"one")
        assert str(await raised) == "not this"
        waiting.all.set_result(None)
        await link.close()
    await waiting.end()
