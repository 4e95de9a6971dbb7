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


def _memory_of(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(memory.take(size_bytes), dtype=torch.uint8)[:size_bytes]


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
        # stream -> bytes, how many of them are there; those of one whose first ones are missing are not taken in
        self._coming: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._landed: dict[int, deque[tuple[int, int]]] = {}  # stream -> (offset, bytes) of parts ahead of ``put``
        self._window = STREAM_WINDOW_BYTES
        self._news = threading.Condition()
        self._closed = False

    @property
    def waiting_bytes(self) -> int:
        """Of uploads that no call has used yet."""
        return sum(buffer.numel() for buffer, _ in list(self._coming.values()) if buffer is not None)

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
        known = self._coming.get(part.stream)
        if known is None or part.offset == 0:
            self._begin(part, known)
        buffer, done = self._coming[part.stream]
        if done == MISSING:
            return
        if part.offset != done or (buffer is not None and done + size > buffer.numel()):
            raise ProtocolError(f"stream {part.stream} goes on at byte {part.offset} after {done}")
        if buffer is not None and len(part.data):
            buffer.numpy().data[done : done + size] = part.data
        self._coming[part.stream] = (buffer, done + size)

    def _begin(self, part: Part, known: tuple[torch.Tensor | None, int] | None) -> None:
        if part.total < 0:
            raise ProtocolError(f"stream {part.stream} is of {part.total} bytes")
        if known is None and len(self._coming) >= MAX_STREAMS:
            raise ProtocolError(f"{MAX_STREAMS} uploads wait to be used already")
        fits = not self._limit_bytes or self.waiting_bytes + part.total <= self._limit_bytes
        if part.offset:
            self._coming[part.stream] = (None, MISSING)
        elif known is not None and known[0] is not None and known[0].numel() == part.total:
            self._coming[part.stream] = (known[0], 0)  # the same memory, where parts may be landing
        else:
            self._coming[part.stream] = (_memory_of(part.total) if fits else None, 0)

    def land(self, part: Part, size_bytes: int) -> memoryview | None:
        """Where the data of a part belong that is about to come; ``put`` gets it without them, in its turn.

        None: it is the first of its stream, or not the next one.
        """
        buffer, done = self._coming.get(part.stream, (None, 0))
        if buffer is None or not done or not size_bytes:
            return None
        landed = self._landed.get(part.stream) or deque()
        again = bool(landed) and landed[-1] == (part.offset, size_bytes)  # the connection broke when it was landing
        expected = sum(landed[-1]) if landed else done
        stop = part.offset + size_bytes
        if stop > buffer.numel() or not (again or part.offset == expected):
            return None
        if not again:
            landed.append((part.offset, size_bytes))
            self._landed[part.stream] = landed
        return buffer.numpy().data[part.offset : stop]

    def take(self, stream: int, size_bytes: int) -> Any:
        """The bytes of an upload; in their place an error to be raised by the call that uses them, if one does here.

        A batch that uploads to some of its meshes goes to workers of others too, which get no bytes and use none.
        """
        buffer, done = self._coming.pop(stream, (None, -1))
        if done == MISSING:
            return WorkerLostError("a worker", "it had the beginning of this upload, which is not remembered; send it again")
        if done != size_bytes:
            return ProtocolError(f"{size_bytes} bytes of stream {stream} are used, {max(done, 0)} of which have come")
        if buffer is None:
            return QuotaError(f"an upload of {size_bytes} bytes is above the quota of {self._limit_bytes} bytes")
        return buffer

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
