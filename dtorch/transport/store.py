"""A rendezvous store for process groups, kept by the controller and reached over the control plane.

torch.distributed wants a store in which the members of a group leave their addresses. A ``TCPStore`` would need a port
of its own and a global world; this one is three small parts on the session's own server and token:

    StoreState      what is in the store: plain code
    StoreService    aiohttp routes ``POST /v1/store/<operation>``, waiting as long polls
    SessionStore    the ``torch.distributed.Store`` that members hand to their process groups; blocking, any thread
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
from aiohttp import web
from torch import distributed
from torch._C._distributed_c10d import Store  # torch.distributed re-exports it in a way that type checkers miss

from .dial import split_address
from .errors import AuthError, ConnectionLostError, ProtocolError

STORE_PATH = "/v1/store/"
POLL_S = 10.0
"""The longest a request waits on the server; a client that wants to wait longer asks again."""

_STOP_POLL_S = 0.5

MAX_REQUEST_BYTES = 16 * 1024 * 1024
_DEFAULT_TIMEOUT = timedelta(seconds=300)
_MAX_IDLE_S = 60.0  # older connections may have been dropped by the server
_SLACK_S = 20.0  # how much later than asked for an answer may come before the server counts as gone


class StoreRequest(msgspec.Struct, frozen=True):
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""  # of compare_set: b"" matches a missing key
    amount: int = 0  # of add
    wait_s: float = 0.0  # of get and wait: how long to wait for the keys


class StoreReply(msgspec.Struct, frozen=True):
    found: bool = True  # get, wait, check: all keys are there; delete: it was there
    value: bytes = b""
    number: int = 0


class StoreState:
    """The keys of one session. Same meaning as torch's ``HashStore``: counters are decimal text."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Raises ValueError when the key holds something else than a number."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """The value after the attempt; ``expected`` itself when the key is missing and something was expected."""
        if key not in self._values and expected:
            return expected
        if self._values.get(key, b"") == expected:
            self._values[key] = value
        return self._values[key]

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def delete_prefix(self, prefix: str) -> int:
        """Drop every key that starts with ``prefix``, as when a group is gone; their number."""
        gone = [key for key in self._values if key.startswith(prefix)]
        for key in gone:
            del self._values[key]
        return len(gone)

    def num_keys(self) -> int:
        return len(self._values)


class StoreService:
    """Serves a ``StoreState`` in the loop's thread. Pass ``routes()`` to ``Server.start``, which checks the token."""

    def __init__(self, state: StoreState | None = None) -> None:
        self.state = state or StoreState()
        self._changed: asyncio.Event | None = None  # waiters share it; replaced at each change
        self._closed = False

    def routes(self) -> list[web.RouteDef]:
        return [web.post(STORE_PATH + "{operation}", self._handle)]

    def close(self) -> None:
        """Let everyone who waits go, empty-handed. Call before ``Server.stop``."""
        self._closed = True
        self._announce()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            asked = _decode_request(body)
            reply = await self._perform(request.match_info["operation"], asked)
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            return web.Response(status=400, text=str(error))
        if reply is None:
            return web.Response(status=404, text="no such operation")
        return web.Response(body=msgspec.msgpack.encode(reply), content_type="application/msgpack")

    async def _perform(self, operation: str, asked: StoreRequest) -> StoreReply | None:
        state = self.state
        if operation == "set":
            state.set(asked.keys[0], asked.value)
            self._announce()
            return StoreReply()
        if operation == "add":
            number = state.add(asked.keys[0], asked.amount)
            self._announce()
            return StoreReply(number=number)
        if operation == "compare_set":
            value = state.compare_set(asked.keys[0], asked.expected, asked.value)
            self._announce()
            return StoreReply(value=value)
        if operation == "get":
            found = await self._wait_keys(asked.keys[:1], asked.wait_s)
            return StoreReply(found, (state.get(asked.keys[0]) or b"") if found else b"")
        if operation == "wait":
            return StoreReply(await self._wait_keys(asked.keys, asked.wait_s))
        if operation == "check":
            return StoreReply(state.check(asked.keys))
        if operation == "delete":
            return StoreReply(state.delete(asked.keys[0]))
        if operation == "num_keys":
            return StoreReply(number=state.num_keys())
        return None

    async def _wait_keys(self, keys: Sequence[str], wait_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(max(wait_s, 0.0), POLL_S)
        while not self.state.check(keys):
            left = until - loop.time()
            if left <= 0 or self._closed:
                return False
            if self._changed is None:
                self._changed = asyncio.Event()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except asyncio.TimeoutError:
                return self.state.check(keys)
        return True

    def _announce(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


def _decode_request(body: bytes) -> StoreRequest:
    if len(body) > MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {len(body)} bytes is above {MAX_REQUEST_BYTES}")
    return _request_decoder.decode(body)


_request_decoder = msgspec.msgpack.Decoder(StoreRequest)
_reply_decoder = msgspec.msgpack.Decoder(StoreReply)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class SessionStore(Store):
    """The session's store as torch wants it. Every call blocks; never call from the thread of the server's loop.

    Keep a reference for as long as a process group made with it lives: torch's C++ calls back into this object.

    Args:
        address: of the session's server, ``"unix:/path"``, ``"tcp:host:port"`` or ``"tls:host:port"``.
        token: the session's.
        prefix: put before every key; groups need different ones.
        timeout: how long ``get`` and ``wait`` wait.
        tls: whom to trust at a "tls" address; the system's authorities by default.
        stopped: asked twice a second while they wait; True ends the wait with ConnectionLostError.
    """

    def __init__(
        self,
        address: str,
        token: str,
        prefix: str = "",
        timeout: timedelta = _DEFAULT_TIMEOUT,
        tls: ssl.SSLContext | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self._tls = tls
        self._address = address
        self._where = split_address(address)
        self._token = token
        self._prefix = prefix
        self._timeout = timeout
        self._stopped = stopped
        # Connections not in use. A call takes one or makes one, so a thread that waits holds up no other.
        self._free: deque[tuple[http.client.HTTPConnection, float]] = deque()  # and when it was last used
        weakref.finalize(self, _close_all, self._free)

    def with_prefix(self, prefix: str) -> SessionStore:
        """The same store, its keys below ``prefix`` too."""
        return SessionStore(self._address, self._token, self._prefix + prefix, self._timeout, self._tls, self._stopped)

    def clone(self) -> SessionStore:
        return self.with_prefix("")

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", StoreRequest((self._prefix + key,), _as_bytes(value)))

    def get(self, key: str) -> bytes:
        return self._wait_for("get", [key], self._timeout).value

    def add(self, key: str, amount: int) -> int:
        return self._call("add", StoreRequest((self._prefix + key,), amount=amount)).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        asked = StoreRequest((self._prefix + key,), _as_bytes(desired_value), _as_bytes(expected_value))
        return self._call("compare_set", asked).value

    def check(self, keys: list[str]) -> bool:
        return self._call("check", StoreRequest(self._full(keys))).found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", keys, self._timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        return self._call("delete", StoreRequest((self._prefix + key,))).found

    def num_keys(self) -> int:
        return self._call("num_keys", StoreRequest()).number

    def close(self) -> None:
        """Close idle connections. The store stays usable."""
        _close_all(self._free)

    def _full(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._prefix + key for key in keys)

    def _wait_for(self, operation: str, keys: Sequence[str], timeout: timedelta) -> StoreReply:
        full = self._full(keys)
        until = time.monotonic() + timeout.total_seconds()
        poll_s = POLL_S if self._stopped is None else _STOP_POLL_S
        while True:
            if self._stopped is not None and self._stopped():
                raise ConnectionLostError("somebody who was waited for is gone")
            left = max(until - time.monotonic(), 0.0)
            reply = self._call(operation, StoreRequest(full, wait_s=min(left, poll_s)), min(left, poll_s))
            if reply.found:
                return reply
            if time.monotonic() >= until:
                raise distributed.DistStoreError(
                    f"no {', '.join(keys)} in the store after {timeout.total_seconds():g} s"
                )

    def _call(self, operation: str, asked: StoreRequest, wait_s: float = 0.0) -> StoreReply:
        body = msgspec.msgpack.encode(asked)
        status, data = self._post(operation, body, wait_s + _SLACK_S)
        if status == 401:
            raise AuthError(f"{self._address} does not accept this token")
        if status == 400:
            raise ValueError(data.decode(errors="replace"))
        if status != 200:
            raise ProtocolError(f"{self._address} answered {operation} with HTTP status {status}")
        try:
            return _reply_decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self._address} answered {operation} with foreign bytes: {error}") from error

    def _post(self, operation: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """One request, on a free connection or on a new one. Never sent twice, since ``add`` would count twice."""
        connection = self._take()
        try:
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/msgpack"}
            connection.request("POST", STORE_PATH + operation, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectionLostError(f"the store at {self._address} is gone: {error!r}") from error
        except BaseException:
            connection.close()
            raise
        self._free.append((connection, time.monotonic()))
        return answer.status, data

    def _take(self) -> http.client.HTTPConnection:
        while self._free:
            try:
                connection, used = self._free.pop()
            except IndexError:  # another thread took the last one
                break
            if time.monotonic() - used < _MAX_IDLE_S:
                return connection
            connection.close()
        kind, place, port = self._where
        if kind == "tls":
            return http.client.HTTPSConnection(place, port, context=self._tls)
        return _UnixConnection(place) if kind == "unix" else http.client.HTTPConnection(place, port)


def _close_all(connections: deque[tuple[http.client.HTTPConnection, float]]) -> None:
    while connections:
        connections.pop()[0].close()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
