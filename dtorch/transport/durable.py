"""A link that outlives its connections: the shell around ``numbered.py``.

One end dials and dials again; the other is given each new connection (``attach``). Either gives up when no connection
has come back for ``grace_s``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import WSCloseCode

from .codec import Frame, split_part
from .errors import AuthError, ConnectionLostError, ProtocolError, QuotaError
from .link import CLOSE_TIMEOUT_S, Link
from .numbered import HEAD, Numbered, Pace
from .patience import within

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
ACK_DELAY_S = 0.2
"""How long a frame may wait for its acknowledgement to travel with another one."""

Dial = Callable[[int], Awaitable[tuple[Link, int]]]
"""Number of the last frame received -> a new connection, and the number of the last frame that the other end has had."""


class DurableLink(Link):
    """A link over one connection after another.

    Args:
        link: the first connection, on which the handshake is over.
        grace_s: how long the stream may be without a connection; time for which this process is held up does not count.
        dial: makes the next connection; None where the other end does.
        on_break: told of each connection that breaks, with the reason.

    Attributes:
        pace: how much should be on its way at most.
        land: given a part without its data, and how many bytes these are, says where they belong; such a part is then
            received without them. None: they come with it.
    """

    def __init__(
        self,
        link: Link,
        grace_s: float,
        dial: Dial | None = None,
        on_break: Callable[[str], None] | None = None,
    ) -> None:
        self._link: Link | None = link
        self._grace_s = grace_s
        self._dial = dial
        self._on_break = on_break
        self._numbered = Numbered()
        self.pace = Pace()
        self.land: Callable[[bytes, int], memoryview | None] | None = None
        link.landing = self._landing
        self._news = asyncio.Event()  # another connection, or the end
        self._room = asyncio.Event()  # something was acknowledged, or the end
        self._left: dict[Link, asyncio.Event] = {link: asyncio.Event()}  # set once a connection is not used any more
        self._ack_timer: asyncio.TimerHandle | None = None
        self.closed = False
        self.num_breaks = 0

    def expect_end(self) -> None:
        """The other end is about to leave: the next break is the end."""
        self._grace_s = 0.0

    @property
    def received(self) -> int:
        """Number of the last frame received."""
        return self._numbered.received

    @property
    def sent(self) -> int:
        """Number of the last frame sent."""
        return self._numbered.sent

    @property
    def acknowledged(self) -> int:
        """Number of the last frame sent that has arrived."""
        return self._numbered.acknowledged

    @property
    def pending_bytes(self) -> int:
        return self._numbered.unacked_bytes

    @property
    def connected(self) -> bool:
        return self._link is not None

    def send_nowait(self, *pieces: Frame) -> None:
        if self.closed:
            raise ConnectionLostError(self.reason or "the link is closed")
        self._put(*self._numbered.send(*pieces))

    def _put(self, *wire: Frame) -> None:
        if self._link is not None:
            try:
                self._link.send_nowait(*wire)
            except ConnectionLostError as error:
                logger.debug("not sent yet: %s", error)  # ``receive`` meets the break

    async def wait_sent(self) -> None:
        await self.wait_below(0)

    async def wait_below(self, limit_bytes: int) -> None:
        """Wait until at most so much is not acknowledged, or the link has ended."""
        while self._numbered.unacked_bytes > limit_bytes and not self.closed:
            self._room.clear()
            await self._room.wait()

    async def wait_acknowledged(self, number: int) -> None:
        """Wait until the frame of this number has arrived, or the link has ended."""
        while self._numbered.acknowledged < number and not self.closed:
            self._room.clear()
            await self._room.wait()

    async def receive(self) -> Frame | None:
        while not self.closed:
            link = self._link
            if link is None:
                if not await self._connection():
                    await self.close(self.reason or "the connection did not come back")
                continue
            wire = await link.receive()
            if wire is None:
                self._break(link)
                continue
            before = self._numbered.unacked_bytes
            try:
                frame = self._numbered.receive(wire)
            except ProtocolError as error:
                await self.close(str(error), WSCloseCode.PROTOCOL_ERROR)
                raise
            self._numbered.owe(link.num_landed)
            self.pace.arrived(before - self._numbered.unacked_bytes, asyncio.get_running_loop().time())
            self._room.set()
            if frame is not None:
                self._acknowledge()
                return frame
        return None

    def _acknowledge(self) -> None:
        owed = self._numbered.acknowledgement()
        if owed is not None:
            self._put(owed)
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._acknowledge_late)

    def _acknowledge_late(self) -> None:
        self._ack_timer = None
        owed = self._numbered.acknowledgement(now=True)
        if owed is not None and not self.closed:
            self._put(owed)

    def _landing(self, begin: memoryview) -> tuple[bytes, int, memoryview] | None:
        if self.land is None or HEAD.unpack_from(begin)[0] <= self._numbered.received:  # the latter: it comes again
            return None
        found = split_part(begin[HEAD.size :])
        if found is None:
            return None
        frame, before, size = found
        try:
            target = self.land(frame, size)
        except ProtocolError as error:
            logger.debug("it comes as it is: %s", error)  # and is refused in its turn
            return None
        return None if target is None else (bytes(begin[: HEAD.size]) + frame, HEAD.size + before, target)

    def _break(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self.num_breaks += 1
            if self._on_break is not None:
                self._on_break(link.reason)
        left = self._left.pop(link, None)
        if left is not None:
            left.set()

    async def _connection(self) -> bool:
        """Wait for the next connection; False when there will be none."""
        if self._dial is not None:
            return await self._redial(self._dial)
        self._news.clear()
        if self._grace_s <= 0:
            return False
        try:
            await within(self._news.wait(), self._grace_s)
        except asyncio.TimeoutError:
            return False
        return not self.closed

    async def _redial(self, dial: Dial) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._grace_s
        pause_s = FIRST_RETRY_S
        while not self.closed:
            try:
                link, received = await dial(self._numbered.received)
            except (AuthError, ProtocolError, QuotaError) as error:  # it is there, and does not want us back
                self.reason = str(error)
                return False
            except ConnectionLostError as error:
                if loop.time() + pause_s > until:
                    self.reason = f"no connection for {self._grace_s:g} s: {error}"
                    return False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_RETRY_S)
            else:
                self._carry_on(link, received)
                return True
        return False

    def _carry_on(self, link: Link, received: int) -> None:
        frames = self._numbered.again(received)
        self._link = link
        link.landing = self._landing
        self._left[link] = asyncio.Event()
        self._room.set()
        for wire in frames:
            self._put(*wire)

    async def attach(self, link: Link, received: int) -> None:
        """Carry on over a new connection, on which the handshake is over.

        Args:
            received: number of the last frame that the other end has had.

        Raises:
            ProtocolError: it cannot have had that many.
        """
        before = self._link
        self._carry_on(link, received)
        self._news.set()
        if before is not None:
            await before.close("another connection has taken over")

    async def wait_left(self, link: Link) -> None:
        """Wait until a connection is not used any more."""
        left = self._left.get(link)
        if left is not None:
            await left.wait()

    async def close(self, reason: str = "", code: int = WSCloseCode.OK) -> None:
        """Say goodbye and end."""
        if self.closed:
            return
        link = self._link
        if link is not None and code == WSCloseCode.OK:
            owed = self._numbered.acknowledgement(now=True)
            if owed is not None:
                self._put(owed)
        self.closed = True
        self.reason = self.reason or reason
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        self._news.set()
        self._room.set()
        for left in self._left.values():
            left.set()
        self._left.clear()
        self._link = None
        if link is not None:
            await link.close(reason, code)

    async def finish(self) -> None:
        """Wait a moment for what was sent to be acknowledged, then close. Another task must go on receiving."""
        try:
            await asyncio.wait_for(self.wait_sent(), CLOSE_TIMEOUT_S)
        except asyncio.TimeoutError:
            logger.debug("the other end has not acknowledged everything")
        await self.close()
