"""Every kind of link passes one suite; the server refuses strangers, each on its own connection."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from dtorch.transport import codec, dial, link, wire
from dtorch.transport.dial import connect
from dtorch.transport.errors import AuthError, ConnectionLostError, ProtocolError
from dtorch.transport.link import Link, memory_pair
from dtorch.transport.messages import PROTOCOL_VERSION, Done, Hello
from dtorch.transport.server import Server

TOKEN = "s3cret"
HELLO = Hello(PROTOCOL_VERSION, 3, 99)
PATIENCE_S = 20.0  # an upper bound that only a failing test meets


async def soon(awaitable: Awaitable[bytes | None]) -> bytes | None:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


class Accepted:
    """Hands the accepting end of each link to the test, and keeps it until the peer is gone or the test lets go."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[tuple[Link, Hello]] = asyncio.Queue()
        self.let_go = asyncio.Event()

    async def __call__(self, end: Link, hello: Hello) -> None:
        self.links.put_nowait((end, hello))
        await self.let_go.wait()


@asynccontextmanager
async def serving(kind: str, folder: Path, on_link: Callable[[Link, Hello], Awaitable[None]]) -> AsyncIterator[Server]:
    where = {"path": str(folder / "s")} if kind == "unix" else {"host": "127.0.0.1"}
    server = await Server.start(**where, token=TOKEN, on_link=on_link, session=5)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def pair(kind: str, folder: Path) -> AsyncIterator[tuple[Link, Link]]:
    """(worker's end, controller's end)"""
    if kind == "memory":
        a, b = memory_pair()
        yield a, b
        await a.close()
        await b.close()
        return
    accepted = Accepted()
    async with serving(kind, folder, accepted) as server:
        near = await connect(server.address, TOKEN, HELLO)
        far, hello = await accepted.links.get()
        assert hello == HELLO
        try:
            yield near, far
        finally:
            await asyncio.gather(near.close(), far.close())
            accepted.let_go.set()


@pytest.fixture
def folder() -> object:
    with tempfile.TemporaryDirectory(prefix="dt") as name:  # short, for the limit of unix sockets
        yield Path(name)


every_kind = pytest.mark.parametrize("kind", ["memory", "unix", "tcp"])
every_socket = pytest.mark.parametrize("kind", ["unix", "tcp"])


@every_kind
async def test_frames_arrive_whole_and_in_order_both_ways(kind: str, folder: Path) -> None:
    frames = [bytes([i]) * size for i, size in enumerate([0, 1, 125, 126, 65535, 65536, 300_000])]
    async with pair(kind, folder) as (near, far):
        for a, b in ((near, far), (far, near)):
            for frame in frames:
                a.send_nowait(frame)
            for frame in frames:
                assert await soon(b.receive()) == frame
            assert a.pending_bytes == 0


@every_kind
async def test_order_holds_under_back_pressure(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, far):
        for a, b in ((near, far), (far, near)):
            frames = [i.to_bytes(4, "big") * 16_384 for i in range(200)]  # 64 KiB each, 13 MB together
            for frame in frames:
                a.send_nowait(frame)
            assert a.pending_bytes > 1_000_000
            a.send_nowait(b"last")
            for frame in frames:
                assert await soon(b.receive()) == frame
            assert await soon(b.receive()) == b"last"
            await asyncio.wait_for(a.wait_sent(), PATIENCE_S)
            assert a.pending_bytes == 0
            a.send_nowait(b"after")
            assert await soon(b.receive()) == b"after"


@every_kind
async def test_close_delivers_what_was_sent_before(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, far):
        frames = [bytes([i]) * 100_000 for i in range(60)]
        for frame in frames:
            far.send_nowait(frame)
        closing = asyncio.ensure_future(far.close("enough"))
        for frame in frames:
            assert await soon(near.receive()) == frame
        assert await soon(near.receive()) is None
        assert near.reason == "enough"
        assert await soon(near.receive()) is None
        await closing


@every_kind
async def test_both_ends_refuse_to_send_after_the_end(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, far):
        waiting = asyncio.ensure_future(far.receive())
        await near.close()
        await near.close()
        assert await soon(waiting) is None
        for end in (near, far):
            assert await soon(end.receive()) is None
            assert end.pending_bytes == 0
            await end.wait_sent()
            with pytest.raises(ConnectionLostError):
                end.send_nowait(b"x")


@every_kind
async def test_closing_wakes_both_readers(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, far):
        readers = [asyncio.ensure_future(end.receive()) for end in (near, far)]
        await asyncio.sleep(0)  # one turn of the loop: let the readers start
        await near.close()
        for reader in readers:
            assert await soon(reader) is None


@every_kind
async def test_cancelling_receive_loses_nothing(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, far):
        reader = asyncio.ensure_future(far.receive())
        await asyncio.sleep(0)  # one turn of the loop: let the reader start
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        near.send_nowait(b"kept")
        assert await soon(far.receive()) == b"kept"


@every_kind
async def test_frames_are_heard_in_order_until_enough(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, far):
        near.send_nowait(b"0")
        near.send_nowait(b"1")
        heard: list[bytes] = []
        more = asyncio.Event()

        def handle(frame: codec.Frame) -> bool:
            heard.append(bytes(frame))
            if len(heard) == 2:
                more.set()
            far.send_nowait(b"!" + frame)  # from within
            return len(heard) < 100

        hearing = asyncio.ensure_future(far.hear(handle))
        await asyncio.wait_for(more.wait(), PATIENCE_S)
        for i in range(2, 120):
            near.send_nowait(str(i).encode())
        await asyncio.wait_for(hearing, PATIENCE_S)
        assert heard == [str(i).encode() for i in range(100)]
        for i in range(100):
            assert await soon(near.receive()) == f"!{i}".encode()
        assert [await soon(far.receive()) for _ in range(20)] == [str(i).encode() for i in range(100, 120)]
        hearing = asyncio.ensure_future(far.hear(handle))
        await near.close("enough")
        await asyncio.wait_for(hearing, PATIENCE_S)
        assert await soon(far.receive()) is None
        assert len(heard) == 100


@every_kind
async def test_what_a_hearer_raises_is_raised_to_whoever_hears(kind: str, folder: Path) -> None:
    def handle(frame: codec.Frame) -> bool:
        raise KeyError(bytes(frame))

    async with pair(kind, folder) as (near, far):
        hearing = asyncio.ensure_future(far.hear(handle))
        await asyncio.sleep(0)  # one turn of the loop: let it begin
        near.send_nowait(b"x")
        near.send_nowait(b"behind")
        with pytest.raises(KeyError, match="x"):
            await asyncio.wait_for(hearing, PATIENCE_S)
        assert await soon(far.receive()) == b"behind"


@every_socket
async def test_another_thread_sends_as_long_as_the_socket_takes_it(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, far):
        frames = [i.to_bytes(4, "big") * 50_001 for i in range(100)]

        def send_all() -> int:
            return next((n for n, frame in enumerate(frames) if not far.send_from_thread(frame)), len(frames))

        num_sent = await asyncio.to_thread(send_all)
        assert 0 < num_sent < len(frames)
        far.send_nowait(b"from the loop")  # after the rest of the frame that the socket took in part
        for frame in frames[:num_sent]:
            assert await soon(near.receive()) == frame
        assert await soon(near.receive()) == b"from the loop"
        await asyncio.wait_for(far.wait_sent(), PATIENCE_S)
        assert await asyncio.to_thread(far.send_from_thread, b"again")
        assert await soon(near.receive()) == b"again"
        await near.close()
        assert await soon(far.receive()) is None
        assert not far.send_from_thread(b"after the end")


@every_socket
async def test_session_number_comes_with_the_welcome(kind: str, folder: Path) -> None:
    async with pair(kind, folder) as (near, _):
        assert near.session == 5


@every_socket
@pytest.mark.parametrize("token", ["wrong", "", "s3cre", "s3cret2", "\u00fc"])
async def test_wrong_token_is_refused(kind: str, token: str, folder: Path) -> None:
    async with serving(kind, folder, Accepted()) as server:
        with pytest.raises(AuthError):
            await connect(server.address, token, HELLO)


@every_socket
async def test_wrong_version_is_told(kind: str, folder: Path) -> None:
    async with serving(kind, folder, Accepted()) as server:
        with pytest.raises(ProtocolError, match=r"speaks version \d+, the worker 999"):
            await connect(server.address, TOKEN, Hello(999, 0, 1))


@every_socket
@pytest.mark.parametrize("first", [b"", b"\xc1garbage", codec.encode(Done(1, 2, 3)), "text"], ids=range(4))
async def test_foreign_first_frame_ends_only_its_own_link(kind: str, first: bytes | str, folder: Path) -> None:
    accepted = Accepted()
    async with serving(kind, folder, accepted) as server:
        near = await connect(server.address, TOKEN, HELLO)
        far, _ = await accepted.links.get()
        connector, url = dial._target(server.address)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            ws = await session.ws_connect(url + link.WORKER_PATH)
            await (ws.send_str(first) if isinstance(first, str) else ws.send_bytes(first))
            answer = await asyncio.wait_for(ws.receive(), PATIENCE_S)
            assert answer.type is aiohttp.WSMsgType.CLOSE
            assert answer.extra  # a reason
        near.send_nowait(b"still here")
        assert await soon(far.receive()) == b"still here"
        assert accepted.links.empty()
        await asyncio.gather(near.close(), far.close())
        accepted.let_go.set()


@every_socket
async def test_garbage_instead_of_http_ends_only_its_own_connection(kind: str, folder: Path) -> None:
    async with serving(kind, folder, Accepted()) as server:
        _, place, port = dial.split_address(server.address)
        opening = asyncio.open_unix_connection(place) if kind == "unix" else asyncio.open_connection(place, port)
        reader, writer = await opening
        writer.write(b"\x00\xff" * 200 + b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert b" 400 " in answer.split(b"\r\n")[0]
        writer.close()
        await writer.wait_closed()
        with pytest.raises(AuthError):
            await connect(server.address, "wrong", HELLO)


async def test_oversized_frame_ends_the_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    async with pair("unix", folder) as (near, far):
        near.send_nowait(b"x" * 1000)
        near.send_nowait(b"x" * 1002)
        assert await soon(far.receive()) == b"x" * 1000
        assert await soon(far.receive()) is None
        assert far.reason


async def test_no_server_is_a_lost_connection(folder: Path) -> None:
    with pytest.raises(ConnectionLostError):
        await connect(f"unix:{folder}/none", TOKEN, HELLO)
    with pytest.raises(ValueError, match="not 'udp:1'"):
        await connect("udp:1", TOKEN, HELLO)


async def test_a_server_that_is_no_controller(folder: Path) -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.UnixSite(runner, str(folder / "s")).start()
    with pytest.raises(ProtocolError, match="404"):
        await connect(f"unix:{folder}/s", TOKEN, HELLO)
    await runner.cleanup()


async def test_a_failing_handler_ends_its_link_and_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(end: Link, hello: Hello) -> None:
        raise KeyError("boom")

    async with serving("unix", folder, fail) as server:
        near = await connect(server.address, TOKEN, HELLO)
        assert await soon(near.receive()) is None
        assert near.reason == "internal error"
    assert "boom" in caplog.text


async def test_a_peer_that_never_reads_cannot_hold_up_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CLOSE_TIMEOUT_S", 0.05)
    async with pair("unix", folder) as (_, far):
        for _ in range(100):
            far.send_nowait(b"x" * 100_000)
        await asyncio.wait_for(far.close(), PATIENCE_S)
        with pytest.raises(ConnectionLostError):
            far.send_nowait(b"x")
        assert far.pending_bytes == 0


async def test_stop_ends_links_and_removes_the_socket(folder: Path) -> None:
    accepted = Accepted()
    accepted.let_go.set()
    ended = asyncio.Event()

    async def hold(end: Link, hello: Hello) -> None:
        assert await end.receive() is None
        ended.set()

    server = await Server.start(path=str(folder / "s"), token=TOKEN, on_link=hold)
    assert os.stat(folder / "s").st_mode & 0o777 == 0o600
    near = await connect(server.address, TOKEN, HELLO)
    reader = asyncio.ensure_future(near.receive())
    await server.stop()
    assert await soon(reader) is None
    assert near.reason == "the server stops"
    assert ended.is_set()
    assert not (folder / "s").exists()


async def test_extra_routes_need_the_token_too(folder: Path) -> None:
    async def say(request: web.Request) -> web.Response:
        return web.Response(text="hi")

    server = await Server.start(host="127.0.0.1", token=TOKEN, on_link=Accepted(), routes=[web.get("/v1/extra", say)])
    _, url = dial._target(server.address)
    async with aiohttp.ClientSession() as session:
        async with session.get(url + "/v1/extra") as answer:
            assert answer.status == 401
        async with session.get(url + "/v1/extra", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert await answer.text() == "hi"
    await server.stop()


async def test_bad_arguments_are_told(folder: Path) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        await Server.start(token=TOKEN, on_link=Accepted())
    with pytest.raises(ValueError, match="token"):
        await Server.start(path=str(folder / "s"), token="", on_link=Accepted())
    with pytest.raises(ValueError, match="107"):
        await Server.start(path="/" + "x" * 200, token=TOKEN, on_link=Accepted())
