"""Websockets past aiohttp: the same bytes on the wire, so that either end may be aiohttp's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dtorch.transport import wire
from dtorch.transport.dial import dial
from dtorch.transport.errors import ConnectionLostError
from dtorch.transport.link import Link, WebSocketLink
from dtorch.transport.wire import WireLink, take_over

SIZES = (0, 1, 125, 126, 4096, 65_535, 65_536, 70_001, 1 << 20, 5 << 20)
MAX_BYTES = 8 << 20

Talk = Callable[[Link], Awaitable[None]]


async def echo(link: Link) -> None:
    while (frame := await link.receive()) is not None:
        link.send_nowait(frame)


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[tuple[str, list[Link]]]:
    """Its address, and the links that it has had; it answers the first word of each with b"welcome"."""
    links: list[Link] = []

    async def accept(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(compress=False)
        await ws.prepare(request)
        first = WebSocketLink(ws)
        assert await first.receive() == b"hello"
        link = take_over(first, MAX_BYTES)
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
