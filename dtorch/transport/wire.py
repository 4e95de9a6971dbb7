"""A link over a websocket whose opening aiohttp has done, and that is read and written here.

Bytes are the same as aiohttp's. The payload of a large frame is received where it stays, and sent from where it lies, in as
many pieces as it is given; a client masks with a key of zeros, which changes nothing. aiohttp joins and copies each frame
several times. A small frame is handled in the step of the loop that reads it (``hear``); aiohttp wakes a task for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import ClientWebSocketResponse, WSCloseCode, web

from .codec import Frame
from .errors import ConnectionLostError
from .kept import LEAST_BYTES, KeptMemory
from .link import CLOSE_TIMEOUT_S, REASON_BYTES, Link, Reader, WebSocketLink
from .patience import within

logger = logging.getLogger(__name__)

_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_SCRATCH_BYTES = 64 * 1024
_INBOX_BYTES = 4 * 1024 * 1024
"""Of frames that nobody has taken yet: above this the socket is not read."""
_JOIN_BYTES = 4096
"""Frames below this go out as one piece."""
_memory = KeptMemory(32 * 1024 * 1024)
"""Of large payloads."""
_LANDING_BYTES, _BEGIN_BYTES = 64 * 1024, 512
"""Frames from this size on may land; so much of them is looked at."""


def take_over(link: WebSocketLink, max_bytes: int, threads: bool = False) -> Link:
    """Go on with a websocket's connection without aiohttp. Only while the peer waits for a word from this end.

    Args:
        max_bytes: of a frame; a larger one ends the link.
        threads: other threads will send too. It costs a descriptor.

    Returns:
        The link to use from now on: the given one, where the connection cannot be had.
    """
    ws = link.websocket
    try:
        if isinstance(ws, web.WebSocketResponse):
            request: Any = ws._req
            transport, before = request.transport, request.protocol
        else:
            connection: Any = ws._response.connection
            transport, before = connection.transport, connection.protocol
        if transport is None or transport.is_closing():
            return link
        taken = WireLink(transport, before, ws, max_bytes, link.let_go())
    except AttributeError as error:  # another aiohttp than the ones that are known
        logger.info("websockets stay with aiohttp: %s", error)
        return link
    transport.pause_reading()  # uvloop decides when it begins to read whether a protocol has buffers
    transport.set_protocol(taken)
    transport.resume_reading()
    if isinstance(ws, web.WebSocketResponse):
        ws._closed = True  # no goodbye of aiohttp's when the handler returns
    if threads:
        taken.open_direct()
    return taken


class WireLink(Link, asyncio.BufferedProtocol):
    """See ``take_over``, which makes it.

    Args:
        before: the connection's protocol so far, which is told of its end.
        ws: the websocket, kept because aiohttp closes the connection of one that is forgotten.
        release: awaited at the end.
    """

    def __init__(
        self, transport: Any, before: Any, ws: web.WebSocketResponse | ClientWebSocketResponse, max_bytes: int,
        release: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._transport = transport
        self._before = before
        self._ws = ws
        self._mask = 0x80 if isinstance(ws, ClientWebSocketResponse) else 0
        self._max_bytes = max_bytes
        self._release = release
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._stop = 0  # what of it is not parsed yet
        self._payload: memoryview | None = None  # of the frame that is coming
        self._filled = 0
        self._head = (0, False, b"")  # of that frame: opcode, is it the last of its message, key
        self._instead: bytes | None = None  # what is received in place of that frame, whose last bytes land elsewhere
        self._parts: list[Frame] = []  # of a message that comes in several frames
        self._inbox: deque[tuple[Frame, int]] = deque()  # with how many bytes of it landed
        self._inbox_bytes = 0
        self.is_paused = asyncio.Event()  # the socket is not read
        self._news = asyncio.Event()  # a frame, or the end
        self._drained = asyncio.Event()  # all is sent, or the end
        self._drained.set()
        self._parted = asyncio.Event()  # the peer has said goodbye, or the connection has ended
        self._closed = False
        self._handle: Callable[[Frame], bool] | None = None  # who hears frames as they come
        self._fault: BaseException | None = None  # what it raised
        self._reader: Reader | None = None  # reads the socket in place of the transport
        self._owes = False  # the loop's thread has to go on with what another one has read
        # For send_from_thread: a descriptor of our own, so that it can never become another file's while we write.
        self._loop = asyncio.get_running_loop()
        self._write_lock = threading.Lock()
        self._direct: int | None = None
        self._rest = b""  # what a direct write left over of its frame; goes out before anything else
        transport.set_write_buffer_limits(high=0)

    # ---- the link

    @property
    def pending_bytes(self) -> int:
        return 0 if self._parted.is_set() else int(self._transport.get_write_buffer_size())

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    def abort(self) -> None:
        self._transport.abort()

    def send_nowait(self, *pieces: Frame) -> None:
        if self._closed or self._parted.is_set():
            raise ConnectionLostError(self.reason or "the link is closed")
        self._write(_BINARY, *pieces)

    def open_direct(self) -> None:
        """Let other threads send, where there is no TLS between."""
        plain = self._transport.get_extra_info("socket")
        if plain is not None and self._transport.get_extra_info("sslcontext") is None:
            self._direct = os.dup(plain.fileno())  # does not block, as the original does not
            self._close_direct = weakref.finalize(self, os.close, self._direct)

    def send_from_thread(self, frame: Frame) -> bool:
        with self._write_lock:
            if self._direct is None or self._closed or self._rest or self._transport.get_write_buffer_size():
                return False
            head = self._head_of(_BINARY, len(frame))
            try:
                sent = os.writev(self._direct, (head, frame))
            except OSError:  # full, or cut: the loop's thread finds out which
                return False
            if sent < len(head) + len(frame):
                self._rest = (head + frame)[sent:]
                self._loop.call_soon_threadsafe(self._send_rest)
            return True

    def _send_rest(self) -> None:
        with self._write_lock:
            self._write_rest()

    def _write_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if rest and not self._transport.is_closing():
            self._transport.write(rest)

    def _end_direct(self) -> None:
        """No thread sends any more."""
        with self._write_lock:
            if self._direct is not None:
                self._direct = None
                self._close_direct()

    def _head_of(self, opcode: int, size: int) -> bytes:
        if size < 126:
            head = bytes((0x80 | opcode, self._mask | size))
        elif size < 1 << 16:
            head = bytes((0x80 | opcode, self._mask | 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((0x80 | opcode, self._mask | 127)) + size.to_bytes(8, "big")
        return head + bytes(4) if self._mask else head

    def _write(self, opcode: int, *pieces: Frame) -> None:
        size = sum(map(len, pieces))
        head = self._head_of(opcode, size)
        with self._write_lock:
            if self._rest:
                self._write_rest()
            if size < _JOIN_BYTES:
                self._transport.write(b"".join((head, *pieces)))
            else:
                self._transport.writelines((head, *pieces))

    async def wait_sent(self) -> None:
        await self._drained.wait()

    async def receive(self) -> Frame | None:
        while not self._closed:
            if self._inbox:
                frame, self.num_landed = self._inbox.popleft()
                self._inbox_bytes -= len(frame)
                if self.is_paused.is_set() and self._inbox_bytes <= _INBOX_BYTES // 2:
                    self.is_paused.clear()
                    self._transport.resume_reading()
                return frame
            if self._parted.is_set():
                await self.close()
                break
            self._news.clear()
            await self._news.wait()
        return None

    async def hear(self, handle: Callable[[Frame], bool], reader: Reader | None = None) -> None:
        while self._inbox:
            frame = await self.receive()
            if frame is None or not handle(frame):
                return
        self._handle = handle
        try:
            if reader is not None and self._direct is not None:
                self._transport.pause_reading()
                self._reader = reader
                reader.add(self, self._direct)
            while self._handle is not None and not self._closed and not self._parted.is_set():
                self._news.clear()
                await self._news.wait()
        finally:
            stopped, self._handle = self._handle is None, None
            self._end_reader()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if not stopped:
            await self.close()

    def _end_reader(self) -> None:
        """The transport reads again, if it is open."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.remove(self)
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def pump(self, fd: int, in_loop: bool) -> bool:
        if self._owes:
            if not in_loop:
                return False
            self._go_on()  # else there may be no room to read into
        try:
            num = os.readv(fd, (self.get_buffer(-1),))
        except BlockingIOError:
            return True
        except OSError as error:
            return self._ends(str(error), in_loop)
        if not num:
            return self._ends("", in_loop)
        if in_loop:
            self.buffer_updated(num)
            return True
        if self._payload is None:
            self._stop += num
            while self._handle is not None and self._is_plain_frame_here():
                self._next()
            if self._start == self._stop and self._handle is not None:
                return True
        else:
            self._filled += num
        self._owes = True
        self._loop.call_soon_threadsafe(self._go_on)
        return False

    def _is_plain_frame_here(self) -> bool:
        """Whether the next frame is whole, and nothing but bytes for whoever hears."""
        head = self._measured()
        if head is None or self._scratch[self._start] != 0x80 | _BINARY or self._parts or self.landing is not None:
            return False
        at, size = head
        return size <= min(self._stop - self._start - at, self._max_bytes)

    def _go_on(self) -> None:
        """The loop's thread parses what another one has read."""
        if not self._owes:
            return
        self._owes = False
        if self._reader is not None:
            with self._reader.lock:
                self.buffer_updated(0)
        else:
            self.buffer_updated(0)
        self._news.set()  # it may be that nobody hears any longer

    def _ends(self, reason: str, in_loop: bool = True) -> bool:
        """The peer has ended the connection, or it was cut."""
        self.reason = self.reason or reason
        if self._reader is not None:
            self._reader.remove(self)
        if in_loop:
            self._part()
            self._transport.close()
        else:
            self._loop.call_soon_threadsafe(self._ends, reason)
        return False

    async def close(self, reason: str = "", code: int = WSCloseCode.OK) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_reader()
        self._end_direct()
        self.reason = self.reason or reason
        self._news.set()
        self._inbox.clear()
        release, self._release = self._release, None
        try:
            if not self._transport.is_closing():
                self._write(_CLOSE, int(code).to_bytes(2, "big") + reason.encode()[:REASON_BYTES])
                self._transport.resume_reading()
                await within(self._parted.wait(), CLOSE_TIMEOUT_S)
                self._transport.close()
        except asyncio.TimeoutError:
            self._transport.abort()
        finally:
            if isinstance(self._ws, ClientWebSocketResponse):
                self._ws._response.close()
            if release is not None:
                await release()

    # ---- the connection

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.reason = self.reason or str(exc)
        self._part()
        self._drained.set()
        self._before.connection_lost(exc)

    def eof_received(self) -> bool:
        self._part()
        return False

    def _part(self) -> None:
        self._end_reader()
        self._end_direct()
        self._parted.set()
        self._news.set()

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._payload is not None:
            return self._payload[self._filled :]
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == _SCRATCH_BYTES:
            rest = bytes(self._scratch[self._start : self._stop])  # of a head
            self._scratch[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        return self._scratch[self._stop :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._payload is None:
            self._stop += nbytes
        else:
            self._filled += nbytes
            if self._filled == len(self._payload):
                self._come(self._payload)
        while self._payload is None and not self._transport.is_closing() and self._next():
            pass

    def _measured(self) -> tuple[int, int] | None:
        """Bytes of the next frame's head and of its payload, if the head is here."""
        start, have = self._start, self._stop - self._start
        if have < 2:
            return None
        second = self._scratch[start + 1]
        size, at = second & 0x7F, 2
        if size >= 126:
            at += 2 if size == 126 else 8
            if have < at:
                return None
            size = int.from_bytes(self._scratch[start + 2 : start + at], "big")
        at += 4 if second & 0x80 else 0
        return (at, size) if have >= at else None

    def _next(self) -> bool:
        """Begin with the next frame, if its head is there."""
        head = self._measured()
        if head is None:
            return False
        at, size = head
        start, have = self._start, self._stop - self._start
        first, second = self._scratch[start], self._scratch[start + 1]
        key = bytes(self._scratch[start + at - 4 : start + at]) if second & 0x80 else b""
        if size > self._max_bytes or (first & 0x08 and size > 125):
            self._refuse(WSCloseCode.MESSAGE_TOO_BIG, f"a frame of {size} bytes is above {self._max_bytes}")
            return False
        self._head = (first & 0x0F, bool(first & 0x80), key)
        if self.landing is not None and size >= _LANDING_BYTES and first == 0x80 | _BINARY and not any(key):
            if have < at + _BEGIN_BYTES:
                return False
            landing = self.landing(self._scratch[start + at : start + at + _BEGIN_BYTES])
            if landing is not None and landing[1] + len(landing[2]) == size:
                self._instead, before, target = landing
                there = min(len(target), have - at - before)
                target[:there] = self._scratch[start + at + before : start + at + before + there]
                self._start += at + before + there
                if there == len(target):
                    self._come(target)
                else:
                    self._payload, self._filled = target, there
                return True
        if size <= have - at and not any(key):
            self._start += at + size
            self._come(bytes(self._scratch[start + at : start + at + size]))
            return True
        payload = _memory.take(size).data if size >= LEAST_BYTES else memoryview(bytearray(size))
        there = min(size, have - at)
        if there:
            payload[:there] = self._scratch[start + at : start + at + there]
        self._start += at + there
        if there == size:
            self._come(payload)
        else:
            self._payload, self._filled = payload, there
        return True

    def _come(self, payload: Frame) -> None:
        """A frame is here."""
        self._payload = None
        opcode, is_last, key = self._head
        if self._instead is not None:
            frame, self._instead = self._instead, None
            self._deliver(frame, len(payload))
            return
        if any(key):
            data = np.frombuffer(payload, np.uint8)
            payload = (data ^ np.resize(np.frombuffer(key, np.uint8), len(data))).data
        if opcode == _CLOSE:
            self.close_code = int.from_bytes(payload[:2], "big")
            self.reason = self.reason or bytes(payload[2:]).decode(errors="replace")
            if not self._closed:
                self._write(_CLOSE, bytes(payload[:2]))
            self._part()
            self._transport.close()
        elif opcode == _PING:
            self._write(_PONG, bytes(payload))
        elif opcode in (_BINARY, _CONTINUED):
            self._parts.append(payload)
            if sum(map(len, self._parts)) > self._max_bytes:
                self._refuse(WSCloseCode.MESSAGE_TOO_BIG, f"a message is above {self._max_bytes} bytes")
            elif is_last:
                self._deliver(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
                self._parts = []
        elif opcode != _PONG:
            self._refuse(WSCloseCode.UNSUPPORTED_DATA, "frames of this kind are not in the protocol")

    def _deliver(self, frame: Frame, num_landed: int = 0) -> None:
        if self._closed:
            return
        if self._handle is not None:
            self.num_landed = num_landed
            try:
                if self._handle(frame):
                    return
            except BaseException as error:
                self._fault = error
            self._handle = None
            self._news.set()
            return
        self._inbox.append((frame, num_landed))
        self._inbox_bytes += len(frame)
        self._news.set()
        if self._inbox_bytes > _INBOX_BYTES and not self.is_paused.is_set():
            self.is_paused.set()
            self._transport.pause_reading()

    def _refuse(self, code: int, reason: str) -> None:
        self.reason = self.reason or reason
        self._write(_CLOSE, int(code).to_bytes(2, "big") + reason.encode()[:REASON_BYTES])
        self._part()
        self._transport.close()
