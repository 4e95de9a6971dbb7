"""The accepting side of links: see ``link.py`` for the handshake."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import WSCloseCode, web

from . import codec
from .errors import ConnectionLostError, ProtocolError
from .link import CLOSE_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, WORKER_PATH, Link, WebSocketLink
from .messages import PROTOCOL_VERSION, Hello, Welcome
from .patience import within
from .wire import take_over

logger = logging.getLogger(__name__)

_UNIX_PATH_BYTES = 107  # sun_path of Linux, less the closing zero


class Server:
    """Accepts links of workers, and serves further routes under the same token.

    Attributes:
        address: what ``connect`` wants: ``"unix:/path"`` or ``"tcp:host:port"``.
    """

    def __init__(self, token: str, on_link: Callable[[Link, Hello], Awaitable[None]], session: int) -> None:
        self._token = token
        self._on_link = on_link
        self._session = session
        self._links: set[Link] = set()
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
        opened = WebSocketLink(ws)
        link: Link = opened
        self._links.add(link)
        try:
            hello = await self._greet(opened)
            if hello is not None:
                self._links.discard(opened)
                link = take_over(opened, codec.MAX_FRAME_BYTES, threads=True)
                self._links.add(link)
                link.send_nowait(codec.encode(Welcome(PROTOCOL_VERSION, self._session)))
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
        """The peer's Hello; or None after closing the link with a reason."""
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
        return hello


def _remove_socket(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:  # newer Pythons remove it as the listening socket closes
        logger.debug("%s is gone already", path)
