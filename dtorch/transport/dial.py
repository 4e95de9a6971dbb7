"""Making links: where an address leads, who is trusted there, and the first words."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import WSCloseCode

from . import codec
from .codec import Frame
from .errors import AuthError, ConnectionLostError, ProtocolError
from .link import CLOSE_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, WORKER_PATH, Link, WebSocketLink
from .messages import PROTOCOL_VERSION, Hello, Welcome
from .patience import within
from .wire import take_over

TLS_CLOSING_S = 0.02
"""What connections with TLS that were closed may take to be let go by the event loop, before it ends."""


async def connect(address: str, token: str, hello: Hello) -> Link:
    """Link to the server at ``address`` and say ``hello``.

    Raises:
        AuthError: the server does not know the token.
        ConnectionLostError: no server there, or it went away.
        ProtocolError: the server refused the Hello or is no dtorch controller.
    """
    link, frame = await dial(address, WORKER_PATH, token, codec.encode(hello), past_aiohttp=True)
    try:
        welcome = codec.decode_to_worker(frame)
        if not isinstance(welcome, Welcome) or welcome.version != PROTOCOL_VERSION:
            raise ProtocolError(f"expected Welcome of version {PROTOCOL_VERSION}, got {welcome!r:.100}")
    except BaseException:
        await link.close()
        raise
    link.session = welcome.session
    return link


async def dial(
    address: str, path: str, token: str, first: bytes, tls: ssl.SSLContext | None = None, past_aiohttp: bool = False
) -> tuple[Link, Frame]:
    """A websocket to ``path`` at ``address``, and the answer to the frame ``first``.

    Args:
        address: as of ``split_address``.
        token: sent as a bearer token.
        tls: whom to trust, for a "tls" address; the system's authorities by default.
        past_aiohttp: see ``wire.py``.

    Raises:
        AuthError: the server does not know the token, or its certificate is not trusted.
        ConnectionLostError: no server there, or it went away.
        ProtocolError: the server refused the frame or speaks another protocol.
    """
    connector, url = _target(address)
    # The session ends with the link, or here when the handshake fails.
    session = aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {token}"})
    link: Link | None = None
    try:
        ws = await session.ws_connect(
            url + path,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
            compress=0,
            heartbeat=None,
            max_msg_size=codec.MAX_FRAME_BYTES + 1,
            ssl=True if tls is None else tls,
        )
        opened = WebSocketLink(ws, session.close)
        opened.send_nowait(first)
        link = take_over(opened, codec.MAX_FRAME_BYTES) if past_aiohttp else opened
        frame = await within(link.receive(), HANDSHAKE_TIMEOUT_S)
        if frame is None:
            refused = link.close_code in (WSCloseCode.PROTOCOL_ERROR, WSCloseCode.UNSUPPORTED_DATA)
            raise (ProtocolError if refused else ConnectionLostError)(link.reason or f"{address} hung up")
    except aiohttp.WSServerHandshakeError as error:
        await session.close()
        if error.status in (401, 403):
            raise AuthError(f"{address} does not accept this {'token' if path == WORKER_PATH else 'key'}") from error
        if error.status == 429:
            raise AuthError(f"{address} has refused too many keys from here and listens again in a minute") from error
        raise ProtocolError(f"{address} is no dtorch controller: HTTP status {error.status}") from error
    except aiohttp.ClientConnectorCertificateError as error:
        await session.close()
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        raise AuthError(
            f"the certificate of {address} is not trusted here: {why}. Name the authority that signed it: "
            "ca_file=..., --ca FILE or DTORCH_CA_FILE"
        ) from error
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        await _drop(link, session)
        if isinstance(error, ConnectionLostError):
            raise
        raise ConnectionLostError(f"no link to {address}: {error or 'no answer in time'}") from error
    except BaseException:
        await _drop(link, session)
        raise
    return link, frame


async def _drop(link: Link | None, session: aiohttp.ClientSession) -> None:
    if link is not None:
        await link.close()
    await session.close()


def split_address(address: str) -> tuple[str, str, int]:
    """``("unix", path, 0)``, ``("tcp", host, port)`` or ``("tls", host, port)``.

    Raises:
        ValueError: none of these.
    """
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return "unix", rest, 0
    host, _, port = rest.rpartition(":")
    if kind in ("tcp", "tls") and host and port.isdecimal():
        return kind, host, int(port)
    raise ValueError(f'an address is "unix:/path", "tcp:host:port" or "tls:host:port", not {address!r}')


def address_of(url: str) -> str:
    """The address that a URL such as ``wss://host:port`` stands for; ``ws`` and ``http`` are without TLS.

    Raises:
        ValueError: it names something else, or no port.
    """
    scheme, found, rest = url.partition("://")
    kind = {"ws": "tcp", "http": "tcp", "wss": "tls", "https": "tls"}.get(scheme)
    parts = urlsplit(f"//{rest}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if not found or kind is None or not host or port is None or parts.path.strip("/") or parts.username is not None:
        raise ValueError(f'a head is named like "wss://host:port", or "ws://host:port" without TLS, not {url!r}')
    return f"{kind}:{host}:{port}"


def _target(address: str) -> tuple[aiohttp.BaseConnector, str]:
    kind, place, port = split_address(address)
    if kind == "unix":
        return aiohttp.UnixConnector(place), "http://localhost"
    scheme = "http" if kind == "tcp" else "https"
    return aiohttp.TCPConnector(), f"{scheme}://[{place}]:{port}" if ":" in place else f"{scheme}://{place}:{port}"


def keep_alive(link: Link) -> None:
    """Let the kernel notice within about four seconds that the peer's host is gone or out of reach.

    The peer's kernel answers for it, so a process that is merely busy does not count as gone.
    """
    plain = link.get_extra_info("socket")
    if plain is None or plain.family == socket.AF_UNIX:
        return
    options = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 4000))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):  # not on every system
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def trust(ca_file: str | Path | None) -> ssl.SSLContext | None:
    """Whom to trust: the authority in a PEM file, or None for the system's. Raises OSError: it cannot be read."""
    return ssl.create_default_context(cafile=str(ca_file)) if ca_file else None
