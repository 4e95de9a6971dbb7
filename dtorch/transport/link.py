"""Links: ordered streams of frames between a controller and a worker.

``Link`` is the interface. ``WebSocketLink`` runs it over aiohttp on a unix socket or TCP; ``memory_pair`` runs it
inside one process, for tests; ``wire.py`` takes a websocket's connection over from aiohttp, which is what workers and
controllers use. ``Server`` (in ``server.py``) accepts links and ``connect`` (in ``dial.py``) makes one; both do the handshake:

    worker                                   controller
      | -- GET /v1/worker, Bearer token -----> |   401 unless the token is right
      | -- Hello(version, worker, pid) ------> |   closed with a reason unless the version is ours
      | <- Welcome(version, session) --------- |

A link belongs to the thread of its event loop. Compression, heartbeats and other timers are off.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import threading
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Protocol

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, web

from .codec import Frame
from .errors import ConnectionLostError

logger = logging.getLogger(__name__)

WORKER_PATH = "/v1/worker"
HANDSHAKE_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 2.0
"""How long ``close`` may flush and wait for the peer's goodbye before it drops the connection."""

REASON_BYTES = 120  # a close frame carries at most 123


Landing = Callable[[memoryview], "tuple[bytes, int, memoryview] | None"]


class Source(Protocol):
    """What a ``Reader`` reads."""

    def pump(self, fd: int, in_loop: bool) -> bool:
        """Read what there is from a descriptor and handle it; False where the loop's thread has to go on with it."""
        ...


class Reader(Protocol):
    """Reads sockets in place of the loop, one thread at a time, which holds ``lock``."""

    lock: threading.RLock

    def add(self, source: Source, fd: int) -> None: ...
    def remove(self, source: Source) -> None: ...


class Link(abc.ABC):
    """One end of an ordered, reliable stream of frames.

    Attributes:
        reason: why the link ended, for people; "" while it is open or after an ordinary end.
        session: number of the session that the peer serves, from its Welcome (0 on the accepting end).
        close_code: of the peer's goodbye, where websockets have one.
        landing: given the first bytes of a large frame, says what is to be received in its place, how many bytes of it come
            before the last ones, and the memory for these; or None. Links that cannot do it ask nobody.
        num_landed: bytes that have gone there of the frame received last, and are not part of it.
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

    async def hear(self, handle: Callable[[Frame], bool], reader: Reader | None = None) -> None:
        """Call ``handle`` with each frame as it comes, until it says False or the link has ended; in place of ``receive``.
        What it raises is raised here.

        Args:
            reader: where it can, it reads in place of the loop, perhaps in another thread, and ``handle`` is called there.
        """
        while (frame := await self.receive()) is not None and handle(frame):
            pass

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

    @property
    def pending_bytes(self) -> int:
        return self._pending

    @property
    def websocket(self) -> web.WebSocketResponse | aiohttp.ClientWebSocketResponse:
        return self._ws

    def let_go(self) -> Callable[[], Awaitable[None]] | None:
        """Another link uses the connection from now on; the answer is what frees what else it holds."""
        self._closed = True
        release, self._release = self._release, None
        return release

    def get_extra_info(self, name: str) -> Any:
        return self._ws.get_extra_info(name)

    def abort(self) -> None:
        connection = self._ws.get_extra_info("socket")
        if connection is not None:
            _shutdown(connection)

    def send_nowait(self, *pieces: Frame) -> None:
        if self._closed:
            raise ConnectionLostError(self.reason or "the link is closed")
        frame = _joined(pieces)
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
        self._closed = True
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
