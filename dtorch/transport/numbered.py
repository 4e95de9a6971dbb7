"""A stream of frames that outlives its connections: numbered, acknowledged, sent again, applied once. Pure.

On the wire a frame follows 16 bytes: its number (from 1; 0 for a bare acknowledgement) and the number of the last frame
that the sender has received. A sender keeps what is not acknowledged. After a break each end tells the other the number of
the last frame it has had, and the other sends again what came after; frames that came twice are dropped.
"""

from __future__ import annotations

import struct
from collections import deque

from .codec import Frame
from .errors import ProtocolError

Wire = tuple[Frame, ...]
"""Pieces of what goes onto the wire, one behind the other."""

HEAD = struct.Struct("<QQ")
ACK_FRAMES = 32
ACK_BYTES = 3 * 1024 * 1024
"""An acknowledgement of its own is sent once so many frames or bytes have come without one: less than any window, so that who
waits for it does not wait long."""
WINDOW_S = 0.1
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES = 4 * 1024 * 1024, 32 * 1024 * 1024


class Pace:
    """How much may be on its way: what the other end acknowledges in ``WINDOW_S``, so that a message need not wait longer
    than that behind others, within bounds."""

    def __init__(self) -> None:
        self.window_bytes = LEAST_WINDOW_BYTES
        self._bytes = 0
        self._since = 0.0

    def arrived(self, size_bytes: int, now: float) -> None:
        """So much was acknowledged, at a time in seconds."""
        self._bytes += size_bytes
        passed = now - self._since
        if passed >= WINDOW_S:
            self.window_bytes = int(min(max(self._bytes / passed * WINDOW_S, LEAST_WINDOW_BYTES), MOST_WINDOW_BYTES))
            self._bytes, self._since = 0, now


class Numbered:
    """One end of such a stream.

    Attributes:
        received: number of the last frame received.
        unacked_bytes: of frames sent that the other end has not acknowledged.
    """

    def __init__(self) -> None:
        self.received = 0
        self.unacked_bytes = 0
        self._sent = 0
        self._kept: deque[Wire] = deque()  # frames _sent - len + 1 .. _sent, with their heads
        self._owed_frames = 0  # received and not yet acknowledged
        self._owed_bytes = 0

    def send(self, *pieces: Frame) -> Wire:
        """What goes onto the wire for the next frame, in pieces that must stay as they are until it is acknowledged."""
        self._sent += 1
        wire = (HEAD.pack(self._sent, self.received), *pieces)
        self._owed_frames = self._owed_bytes = 0
        self._kept.append(wire)
        self.unacked_bytes += sum(map(len, wire))
        return wire

    def receive(self, wire: Frame) -> Frame | None:
        """The frame that came, or None when there is nothing new in it.

        Raises:
            ProtocolError: no stream of the other end could have sent this.
        """
        if len(wire) < HEAD.size:
            raise ProtocolError(f"a frame of {len(wire)} bytes has no number")
        number, acknowledged = HEAD.unpack_from(wire)
        self._acknowledge(acknowledged)
        if number == 0 or number <= self.received:
            return None
        if number != self.received + 1:
            raise ProtocolError(f"frame {number} came after frame {self.received}")
        self.received = number
        self._owed_frames += 1
        self._owed_bytes += len(wire)
        return wire[HEAD.size :]

    @property
    def sent(self) -> int:
        """Number of the last frame sent."""
        return self._sent

    @property
    def acknowledged(self) -> int:
        """Number of the last frame sent that the other end has acknowledged."""
        return self._sent - len(self._kept)

    def owe(self, size_bytes: int) -> None:
        """More bytes have come than frames show."""
        self._owed_bytes += size_bytes

    @property
    def owes(self) -> bool:
        """Whether frames were received that the other end does not know to have arrived."""
        return self._owed_frames > 0

    def acknowledgement(self, now: bool = False) -> bytes | None:
        """A bare acknowledgement, once enough is owed (``now``: once anything is)."""
        if not (self._owed_frames >= ACK_FRAMES or self._owed_bytes >= ACK_BYTES or (now and self._owed_frames)):
            return None
        self._owed_frames = self._owed_bytes = 0
        return HEAD.pack(0, self.received)

    def again(self, received: int) -> list[Wire]:
        """On a new connection: what is to be sent again, when the other end has had the frames up to ``received``.

        Raises:
            ProtocolError: it cannot have had that many, or has had fewer than it acknowledged.
        """
        self._acknowledge(received)
        if received < self._sent - len(self._kept):
            raise ProtocolError(f"frame {received + 1} is wanted again after it was acknowledged")
        return list(self._kept)

    def _acknowledge(self, number: int) -> None:
        if number > self._sent:
            raise ProtocolError(f"frame {number} is acknowledged, {self._sent} were sent")
        first = self._sent - len(self._kept) + 1
        for _ in range(number - first + 1):
            self.unacked_bytes -= sum(map(len, self._kept.popleft()))
