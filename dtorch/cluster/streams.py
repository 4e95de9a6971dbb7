"""A session's streams on a worker: uploads that arrive in parts, values that leave in parts as their client takes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.turns import Dropped, Turns
from dtorch.transport.cluster import PART_BYTES, STREAM_WINDOW_BYTES, Part
from dtorch.transport.errors import ProtocolError, QuotaError, WorkerLostError
from dtorch.transport.kept import KeptMemory

MISSING = -2
"""In place of the number of bytes: the first ones never came."""
MAX_STREAMS = 4096
"""Uploads of one session that may wait to be used."""
memory = KeptMemory(0)
"""For uploads, whose tensors lie where they came in; of all sessions of this process, which says how much it keeps."""


class _Coming:
    """An upload that comes.

    Attributes:
        data: where it belongs; None when it is not taken in: it is too large, or its first bytes are missing.
        done: how many bytes are there; MISSING.
    """

    __slots__ = ("data", "done")

    def __init__(self, data: memoryview | None, done: int = 0) -> None:
        self.data = data
        self.done = done


class SessionStreams:
    """Streams of one session on one worker.

    ``put``, ``land``, ``credit`` and ``close`` are called in the thread of the link, the others in the session's.

    Args:
        send: passes a part to the head.
        limit_bytes: of uploads that wait to be used; 0 for no limit.
    """

    def __init__(self, session: int, turns: Turns, send: Callable[[Part], None], limit_bytes: int) -> None:
        self._session = session
        self._turns = turns
        self._send = send
        self._limit_bytes = limit_bytes
        self._coming: dict[int, _Coming] = {}  # by stream
        self._landed: dict[int, deque[tuple[int, int]]] = {}  # stream -> (offset, bytes) of parts ahead of ``put``
        self._window = STREAM_WINDOW_BYTES
        self._news = threading.Condition()
        self._closed = False

    @property
    def waiting_bytes(self) -> int:
        """Of uploads that no call has used yet."""
        return sum(len(coming.data) for coming in list(self._coming.values()) if coming.data is not None)

    def put(self, part: Part) -> None:
        """A part of an upload; parts come in order. Raises ProtocolError.

        An upload may begin again: this worker may have had some of it when another one was lost. One that does not begin at
        its beginning began on a worker that was lost: the call that uses it fails.
        """
        size = len(part.data)
        landed = self._landed.get(part.stream)
        if landed and landed[0][0] == part.offset:
            size = landed.popleft()[1]
            if not landed:
                del self._landed[part.stream]
        coming = self._coming.get(part.stream)
        if coming is None or part.offset == 0:
            coming = self._coming[part.stream] = self._begin(part, coming)
        data, done = coming.data, coming.done
        if done == MISSING:
            return
        if part.offset != done or (data is not None and done + size > len(data)):
            raise ProtocolError(f"stream {part.stream} goes on at byte {part.offset} after {done}")
        if data is not None and len(part.data):
            data[done : done + size] = part.data
        coming.done = done + size

    def _begin(self, part: Part, known: _Coming | None) -> _Coming:
        if part.total < 0:
            raise ProtocolError(f"stream {part.stream} is of {part.total} bytes")
        if known is None and len(self._coming) >= MAX_STREAMS:
            raise ProtocolError(f"{MAX_STREAMS} uploads wait to be used already")
        fits = not self._limit_bytes or self.waiting_bytes + part.total <= self._limit_bytes
        if part.offset:
            return _Coming(None, MISSING)
        if known is not None and known.data is not None and len(known.data) == part.total:
            return _Coming(known.data)  # the same memory, where parts may be landing
        return _Coming(memory.take(part.total).data[: part.total] if part.total and fits else None)

    def land(self, part: Part, size_bytes: int) -> memoryview | None:
        """Where the data of a part belong that is about to come; ``put`` gets it without them, in its turn.

        None: it is the first of its stream, or not the next one.
        """
        coming = self._coming.get(part.stream)
        if coming is None or coming.data is None or not coming.done or not size_bytes:
            return None
        landed = self._landed.get(part.stream) or deque()
        again = bool(landed) and landed[-1] == (part.offset, size_bytes)  # the connection broke when it was landing
        expected = sum(landed[-1]) if landed else coming.done
        stop = part.offset + size_bytes
        if stop > len(coming.data) or not (again or part.offset == expected):
            return None
        if not again:
            landed.append((part.offset, size_bytes))
            self._landed[part.stream] = landed
        return coming.data[part.offset : stop]

    def take(self, stream: int, size_bytes: int) -> Any:
        """The bytes of an upload; in their place an error to be raised by the call that uses them, if one does here.

        A batch that uploads to some of its meshes goes to workers of others too, which get no bytes and use none.
        """
        coming = self._coming.pop(stream, None) or _Coming(None)
        if coming.done == MISSING:
            return WorkerLostError("a worker", "it had the beginning of this upload, which is not remembered; send it again")
        if coming.done != size_bytes:
            return ProtocolError(f"{size_bytes} bytes of stream {stream} are used, {coming.done} of which have come")
        if coming.data is None and size_bytes:
            return QuotaError(f"an upload of {size_bytes} bytes is above the quota of {self._limit_bytes} bytes")
        return torch.empty(0, dtype=torch.uint8) if coming.data is None else torch.frombuffer(coming.data, dtype=torch.uint8)

    def give(self, stream: int, offset: int, data: torch.Tensor) -> None:
        """Send bytes as fast as the client takes them. Raises Dropped when the session ends meanwhile.

        They may change once this returns. What the head has given credit for by then has arrived there, and is sent from where
        it lies; what may be under way still is copied.
        """
        view = data.numpy().data
        for start in range(0, len(view), PART_BYTES):
            piece = view[start : start + PART_BYTES]
            self._wait_for_window(len(piece))
            if start + len(piece) > len(view) - STREAM_WINDOW_BYTES:
                piece = memoryview(bytes(piece))
            self._send(Part(self._session, stream, offset + start, 0, 0, (), piece))

    def _wait_for_window(self, size: int) -> None:
        with self._news:
            if self._window >= size or self._closed:
                self._window -= size
                return
        with self._turns.released(self._session), self._news:
            while self._window < size and not self._closed:
                self._news.wait()
            self._window -= size
            if self._closed:
                raise Dropped

    def credit(self, size_bytes: int) -> None:
        with self._news:
            self._window += size_bytes
            self._news.notify_all()

    def close(self) -> None:
        """Let go of what waits."""
        with self._news:
            self._closed = True
            self._news.notify_all()
