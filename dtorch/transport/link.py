"""Links: ordered streams of frames between a controller and a worker.

``Link`` is the interface. ``WebSocketLink`` runs it over aiohttp on a unix socket or TCP; ``memory_pair`` runs it
inside one process, for tests. ``Server`` accepts links and ``connect`` (in ``dial.py``) makes one; both do the handshake:

    worker                                   controller
      | -- GET /v1/worker, Bearer token -----> |   401 unless the token is right
      | -- Hello(version, worker, pid) ------> |   closed with a reason unless the version is ours
      | <- Welcome(version, session) --------- |

A link belongs to the thread of its event loop. Compression, heartbeats and other timers are off.
"""

from __future__ import annotations

import abc
import asyncio
import hmac
import logging
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, web

from . import codec
from .codec import Frame
from .errors import ConnectionLostError, ProtocolError
from .messages import PROTOCOL_VERSION, Hello, Welcome
from .patience import within

logger = logging.getLogger(__name__)

WORKER_PATH = "/v1/worker"
HANDSHAKE_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 2.0
"""How long ``close`` may flush and wait for the peer's goodbye before it drops the connection."""

_UNIX_PATH_BYTES = 107  # sun_path of Linux, less the closing zero
REASON_BYTES = 120  # a close frame carries at most 123


Landing = Callable[[memoryview], "tuple[bytes, int, memoryview] | None"]


class Link(abc.ABC):
    """One end of an ordered, reliable stream of frames.

    Attributes:
        reason: why the link ended, for people; "" while it is open or after an ordinary end.
        session: number of the session that the peer serves, from its Welcome (0 on the accepting end).
        close_code: of the peer's goodbye, where websockets have one.
        landing: given the first bytes of a large frame, says what is to be received in its place, how many bytes of it come
            before the last ones, and the memory for these; or None. Links that cannot do it ask nobody.
        num_landed: bytes that have gone there and are not part of what was received.
    """

    reason: str = ""
    session: int = 0
    close_code: int = 0
    landing: Landing | None = None
    num_landed: int = 0

    @property
    @abc.abstractmethod
    def pending_bytes(self) -> int:
        """Bytes accepted by ``send_nowait`` that the peer is too slow to take; the system's own buffers not counted."""

    @abc.abstractmethod
    def send_nowait(self, *pieces: Frame) -> None:
        """Send one frame after all frames before it, without ever waiting. Its pieces must stay as they are until it is sent.

        Raises:
            ConnectionLostError: this end is closed or known to be cut. A cut may also show first in ``receive``.
        """

    def send_from_thread(self, frame: Frame) -> bool:
        """Send one frame from any thread, if it can go out at once; False: nothing was sent, use the loop's thread.

        Frames sent in both ways keep their order as long as the caller lets only one at a time happen.
        """
        return False

    @abc.abstractmethod
    async def wait_sent(self) -> None:
        """Wait until ``pending_bytes`` is 0 or the link has ended."""

    def get_extra_info(self, name: str) -> Any:
        """Of the connection: "socket", "peername", "sockname" and so on; None when it does not know."""
        return None

    def abort(self) -> None:
        """Cut the connection, as a fault of the network would."""
        raise NotImplementedError(f"{type(self).__name__} has no connection")

    @abc.abstractmethod
    async def receive(self) -> Frame | None:
        """The next frame, or None once the link has ended. One task at a time; cancelling it loses no frame."""

    @abc.abstractmethod
    async def close(self, reason: str = "", code: int = WSCloseCode.OK) -> None:
        """Send what is pending, say goodbye and end; ``receive`` gives None from now on. Calling again does nothing."""


class WebSocketLink(Link):
    """A link over an open aiohttp websocket, of either side.

    Args:
        ws: the websocket.
        release: awaited at the end, frees what else the connection holds.
    """

    def __init__(
        self,
        ws: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._ws = ws
        self._send: Callable[[bytes], Coroutine[Any, Any, None]] = ws.send_bytes
        self._release = release
        # Frames behind the one that waits for the socket; not empty only while _flusher runs.
        self._queue: deque[bytes] = deque()
        self._pending = 0
        self._flusher: asyncio.Task[None] | None = None
        self._closed = False
        # For send_from_thread: a descriptor of our own, so that it can never become another file's while we write.
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._direct: int | None = None
        self._rest = b""  # what a direct write left over of its frame; goes out before anything else
        self._write_lock = threading.Lock()
        if isinstance(ws, web.WebSocketResponse):
            self._open_direct(ws)

    @property
    def pending_bytes(self) -> int:
        return self._pending

    @property
    def websocket(self) -> web.WebSocketResponse | aiohttp.ClientWebSocketResponse:
        return self._ws

    def let_go(self) -> Callable[[], Awaitable[None]] | None:
        """Another link uses the connection from now on; the answer is what frees what else it holds."""
        self._end_direct()
        release, self._release = self._release, None
        return release

    def get_extra_info(self, name: str) -> Any:
        return self._ws.get_extra_info(name)

    def abort(self) -> None:
        connection = self._ws.get_extra_info("socket")
        if connection is not None:
            _shutdown(connection)

    def _open_direct(self, ws: web.WebSocketResponse) -> None:
        """Frames of a server are not masked, so without TLS they can be written past aiohttp."""
        plain = ws.get_extra_info("socket")
        if plain is None or ws.get_extra_info("sslcontext") is not None:
            return
        self._transport = ws._req.transport if ws._req is not None else None
        if self._transport is not None:
            self._direct = os.dup(plain.fileno())  # does not block, as the original does not
            self._close_direct = weakref.finalize(self, os.close, self._direct)

    def send_from_thread(self, frame: Frame) -> bool:
        with self._write_lock:
            direct = self._direct
            if direct is None or self._closed or self._flusher is not None or self._rest:
                return False
            if self._transport.get_write_buffer_size():
                return False
            size = len(frame)
            if size < 126:
                head = bytes((0x82, size))
            elif size < 1 << 16:
                head = b"\x82\x7e" + size.to_bytes(2, "big")
            else:
                head = b"\x82\x7f" + size.to_bytes(8, "big")
            try:
                sent = os.writev(direct, (head, frame))
            except OSError:  # full, or cut: the loop's thread finds out which
                return False
            if sent < len(head) + size:
                self._rest = (head + frame)[sent:]
                self._loop.call_soon_threadsafe(self._send_rest)
            return True

    def _send_rest(self) -> None:
        with self._write_lock:
            if self._rest and not self._transport.is_closing():
                self._transport.write(self._rest)
            self._rest = b""

    def send_nowait(self, *pieces: Frame) -> None:
        if self._closed:
            raise ConnectionLostError(self.reason or "the link is closed")
        frame = _joined(pieces)
        if self._rest:
            self._send_rest()
        if self._flusher is not None:
            self._queue.append(frame)
            self._pending += len(frame)
            return
        # send_bytes writes in its first step and suspends only if the socket is full, so that one step is all it needs.
        sending = self._send(frame)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except ConnectionError as error:
            raise ConnectionLostError(str(error)) from error
        self._pending = len(frame)
        self._flusher = asyncio.get_running_loop().create_task(self._flush(sending, waits_for, len(frame)))

    async def _flush(self, sending: Coroutine[Any, Any, None], waits_for: Any, size_bytes: int) -> None:
        try:
            await _resume(sending, waits_for)
            self._pending -= size_bytes
            while self._queue:
                frame = self._queue.popleft()
                await self._send(frame)
                self._pending -= len(frame)
        except ConnectionError as error:
            self.reason = self.reason or str(error)  # the reader learns of the cut by itself
            self._end_direct()
        finally:
            self._queue.clear()
            self._pending = 0
            self._flusher = None

    async def wait_sent(self) -> None:
        if self._flusher is not None:
            await asyncio.wait([self._flusher])

    async def receive(self) -> Frame | None:
        if self._closed:
            return None
        message = await self._ws.receive()
        if message.type is WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if message.type is WSMsgType.TEXT:
            await self.close("text frames are not in the protocol", WSCloseCode.UNSUPPORTED_DATA)
            return None
        if message.type is WSMsgType.CLOSE:
            self.close_code = int(message.data or 0)
            self.reason = self.reason or str(message.extra or "")
        elif message.type is WSMsgType.ERROR:
            self.reason = self.reason or str(message.data)
        await self.close()
        return None

    async def close(self, reason: str = "", code: int = WSCloseCode.OK) -> None:
        if self._closed and self._ws.closed and self._release is None:
            return
        self._end_direct()
        if self._rest:
            self._send_rest()
        self.reason = self.reason or reason
        release, self._release = self._release, None
        try:
            await asyncio.wait_for(self._goodbye(reason, code), CLOSE_TIMEOUT_S)
        except asyncio.TimeoutError:
            self.abort()  # the peer does not read
        except ConnectionError as error:
            logger.debug("goodbye to a peer that is gone: %s", error)
        finally:
            if self._flusher is not None:
                self._flusher.cancel()
            if release is not None:
                await release()

    def _end_direct(self) -> None:
        """No thread sends any more."""
        with self._write_lock:
            self._closed = True
            if self._direct is not None:
                self._direct = None
                self._close_direct()

    async def _goodbye(self, reason: str, code: int) -> None:
        if self._flusher is not None:
            await asyncio.wait([self._flusher])
        await self._ws.close(code=code, message=reason.encode()[:REASON_BYTES])


def _joined(pieces: tuple[Frame, ...]) -> bytes:
    only = pieces[0] if len(pieces) == 1 else None
    return only if isinstance(only, bytes) else b"".join(pieces)


def _shutdown(connection: Any) -> None:
    try:
        connection.shutdown(2)  # both ways
    except OSError as error:
        logger.debug("the connection was gone already: %s", error)


@types.coroutine
def _resume(started: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Run the rest of a coroutine that was stepped once by hand and now waits for ``waits_for``."""
    while True:
        try:
            value = yield waits_for
        except BaseException as error:  # cancellation too belongs to the coroutine
            step: Callable[[], Any] = lambda error=error: started.throw(error)  # type: ignore[misc] # noqa: E731
        else:
            step = lambda value=value: started.send(value)  # type: ignore[misc] # noqa: E731
        try:
            waits_for = step()
        except StopIteration:
            return


class _MemoryLink(Link):
    """One end of ``memory_pair``. What the sender has pending waits in the ``_inbox`` of the receiving end."""

    def __init__(self) -> None:
        self._peer: _MemoryLink = self
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._closed = False  # by this end
        self._news = asyncio.Event()  # the inbox or an end of the link has changed
        self._drained = asyncio.Event()  # this end's inbox is empty, or the link has ended
        self._drained.set()

    @property
    def pending_bytes(self) -> int:
        return 0 if self._closed else self._peer._inbox_bytes

    def send_nowait(self, *pieces: Frame) -> None:
        if self._closed or self._peer._closed:
            raise ConnectionLostError(self.reason or "the link is closed")
        frame = _joined(pieces)
        self._peer._inbox.append(frame)
        self._peer._inbox_bytes += len(frame)
        self._peer._drained.clear()
        self._peer._news.set()

    async def wait_sent(self) -> None:
        await self._peer._drained.wait()

    async def receive(self) -> Frame | None:
        while not self._closed:
            if self._inbox:
                frame = self._inbox.popleft()
                self._inbox_bytes -= len(frame)
                if not self._inbox:
                    self._drained.set()
                return frame
            if self._peer._closed:
                self.reason = self.reason or self._peer.reason
                await self.close()
                break
            self._news.clear()
            await self._news.wait()
        return None

    async def close(self, reason: str = "", code: int = WSCloseCode.OK) -> None:
        if self._closed:
            return
        self._closed = True
        self.reason = self.reason or reason
        self._inbox.clear()
        self._inbox_bytes = 0
        for end in (self, self._peer):
            end._news.set()
        self._drained.set()


def memory_pair() -> tuple[Link, Link]:
    """Two linked ends in this process and event loop. No handshake takes place."""
    a, b = _MemoryLink(), _MemoryLink()
    a._peer, b._peer = b, a
    return a, b


class Server:
    """Accepts links of workers, and serves further routes under the same token.

    Attributes:
        address: what ``connect`` wants: ``"unix:/path"`` or ``"tcp:host:port"``.
    """

    def __init__(self, token: str, on_link: Callable[[Link, Hello], Awaitable[None]], session: int) -> None:
        self._token = token
        self._on_link = on_link
        self._session = session
        self._links: set[WebSocketLink] = set()
        self._runner: web.AppRunner | None = None
        self._path: str | None = None
        self.address = ""

    @classmethod
    async def start(
        cls,
        *,
        path: str | None = None,
        host: str | None = None,
        port: int = 0,
        token: str,
        on_link: Callable[[Link, Hello], Awaitable[None]],
        routes: Iterable[web.AbstractRouteDef] = (),
        session: int = 0,
    ) -> Server:
        """Listen on a unix socket at ``path`` or on TCP ``host``.

        Args:
            path: where to make the socket; its folder should be private to the user.
            host: interface to listen on, in place of ``path``.
            port: 0 takes a free one.
            token: what every request must bear.
            on_link: owns the link after a good handshake; the link is closed when it returns.
            routes: further aiohttp routes; they too need the token.
            session: number told to workers in the Welcome.
        """
        if (path is None) == (host is None):
            raise ValueError("a server listens on a path or on a host: give exactly one")
        if not token:
            raise ValueError("a server needs a token that is not empty")
        if path is not None and len(os.fsencode(path)) > _UNIX_PATH_BYTES:
            raise ValueError(f"the socket path has {len(path)} characters, {_UNIX_PATH_BYTES} is the limit: {path}")
        self = cls(token, on_link, session)
        app = web.Application(middlewares=[self._check_token], client_max_size=64 * 1024 * 1024)
        app.router.add_get(WORKER_PATH, self._accept)
        app.router.add_routes(routes)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_TIMEOUT_S)
        await self._runner.setup()
        try:
            if path is not None:
                await web.UnixSite(self._runner, path).start()
                os.chmod(path, 0o600)
                self._path = path
                self.address = f"unix:{path}"
            else:
                await web.TCPSite(self._runner, host, port).start()
                self.address = f"tcp:{host}:{self._runner.addresses[0][1]}"
        except BaseException:
            await self._runner.cleanup()
            raise
        return self

    async def stop(self) -> None:
        """Close every link, then the listening socket."""
        links = list(self._links)
        await asyncio.gather(*(link.close("the server stops", WSCloseCode.GOING_AWAY) for link in links))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._path is not None:
            _remove_socket(self._path)
            self._path = None

    @web.middleware
    async def _check_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        right = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token.encode())
        if scheme != "Bearer" or not right:
            raise web.HTTPUnauthorized(text="a bearer token is needed, and it must be this server's")
        return await handler(request)

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(
            timeout=CLOSE_TIMEOUT_S, compress=False, heartbeat=None, max_msg_size=codec.MAX_FRAME_BYTES + 1
        )
        try:
            await ws.prepare(request)
        except ConnectionError:  # the peer has ended meanwhile
            return web.Response(status=400)
        link = WebSocketLink(ws)
        self._links.add(link)
        try:
            hello = await self._greet(link)
            if hello is not None:
                await self._on_link(link, hello)
        except ConnectionLostError as error:  # the peer has ended, or this side is about to
            logger.debug("a link was lost: %s", error)
        except Exception:
            logger.exception("the handler of a link failed")
            await link.close("internal error", WSCloseCode.INTERNAL_ERROR)
        finally:
            self._links.discard(link)
            await link.close()
        return ws

    async def _greet(self, link: WebSocketLink) -> Hello | None:
        """The peer's Hello, answered; or None after closing the link with a reason."""
        try:
            frame = await within(link.receive(), HANDSHAKE_TIMEOUT_S)
            if frame is None:
                return None
            hello = codec.decode_from_worker(frame)
            if not isinstance(hello, Hello):
                raise ProtocolError(f"expected Hello first, got {type(hello).__name__}")
            if hello.version != PROTOCOL_VERSION:
                raise ProtocolError(f"this controller speaks version {PROTOCOL_VERSION}, the worker {hello.version}")
        except asyncio.TimeoutError:
            await link.close("no Hello in time", WSCloseCode.POLICY_VIOLATION)
            return None
        except ProtocolError as error:
            logger.warning("refused a peer: %s", error)
            await link.close(str(error), WSCloseCode.PROTOCOL_ERROR)
            return None
        link.send_nowait(codec.encode(Welcome(PROTOCOL_VERSION, self._session)))
        return hello


def _remove_socket(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:  # newer Pythons remove it as the listening socket closes
        logger.debug("%s is gone already", path)
