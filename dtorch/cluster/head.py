"""The head of a cluster: the one process that listens, to clients on one side and to workers on the other.

It holds a controller for each session and a link to each worker, and passes on what they say. Tensor data goes through it
only on the way from and to clients, in parts that it does not look into.

    GET  /v1/client, /v1/worker        websockets, see ``dtorch/transport/cluster.py``
    POST /v1/store/<operation>         the workers' rendezvous
    POST /v1/attend                    the processes beside the workers, see ``sentinel.py``
    GET  /v1/status, /v1/sessions      JSON
    POST /v1/drain/<worker>            JSON; for keys of the role "admin"
    GET  /healthz                      200, for probes; needs no key
    GET  /, /metrics, /api/v1/...      see ``sight.py``
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSCloseCode, web

from dtorch.cluster.audit import Audit
from dtorch.cluster.keys import Key, KeyFile
from dtorch.cluster.member import AWAY_S, ForSession, WorkerEnd
from dtorch.cluster.meter import Meter
from dtorch.cluster.pool import Member, Pool
from dtorch.cluster.quotas import Account
from dtorch.cluster.refusals import Refusals
from dtorch.cluster.sentinel import ATTEND_PATH
from dtorch.cluster.sight import KEY, Sight, role_for
from dtorch.cluster.tenancy import Tenancy
from dtorch.cluster.vigil import Vigil
from dtorch.runtime.lineage import Bounds
from dtorch.transport import codec
from dtorch.transport.cluster import (
    Attach,
    Attached,
    Devices,
    Ended,
    Enlist,
    Enlisted,
    Load,
    ToClient,
    ToPoolWorker,
)
from dtorch.transport.codec import Frame
from dtorch.transport.dial import TLS_CLOSING_S, keep_alive
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import AuthError, ConnectionLostError, ProtocolError, QuotaError
from dtorch.transport.link import CLOSE_TIMEOUT_S, Link, WebSocketLink
from dtorch.transport.messages import PROTOCOL_VERSION, Stop
from dtorch.transport.patience import Awake, within
from dtorch.transport.store import STORE_PATH, StoreService
from dtorch.transport.wire import take_over

logger = logging.getLogger(__name__)

CLIENT_PATH = "/v1/client"
WORKER_PATH = "/v1/worker"
CLIENT_FRAME_BYTES = 16 * 1024 * 1024
"""A client's frame above this is not even read."""
MAX_CALLS = 64 * 1024
"""Calls of a session that are remembered, to get over the loss of a worker."""
MAX_BATCH_BYTES = 16 * 1024 * 1024
"""Of the batches that they come in; equal ones count once."""
HEAD_KEEPS_BYTES = 64 * 1024 * 1024
"""Memory that a head's process keeps when it is free: parts that it passes on need no fresh pages then."""
HANDSHAKE_S = 10.0
TICK_S = 0.5
STALL_S = 300.0
"""A client that acknowledges nothing for so long while bytes wait for it does not read, and is cut off. It may be busy: a call
that keeps its interpreter's lock keeps it from reading. What waits for it meanwhile is bounded."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Options:
    """How a head listens.

    Attributes:
        host, port: where; port 0 takes a free one.
        tls_cert, tls_key: files in PEM form; both or none.
        keys: the file of API keys.
        audit: where to log, see ``audit.py``; None for nowhere.
        grace_s: how long a client may be without a connection before its session ends.
        worker_grace_s: how long a worker may be without any connection, its own or that of the process beside it.
        silent_s: how long nothing may be heard of a worker and of the process beside it: its host is gone, or out of reach.
        usage: where to keep what was used, see ``meter.py``; None for nowhere.
        open_metrics: whether /metrics needs no key.
        remember_bytes: of the data that a session's client sent, kept to get over the loss of a worker.
        replace_s: how long a session that has lost a worker waits for another one to join, when none is left that could do.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keys: Path = Path("keys.json")
    audit: Path | None = None
    grace_s: float = 3.0
    worker_grace_s: float = 0.8
    silent_s: float = 3.0
    usage: Path | None = None
    open_metrics: bool = False
    remember_bytes: int = 64 << 20
    replace_s: float = 30.0


class Head:
    """State of the listening process. Belongs to its event loop's thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pool = Pool()
        self.workers: dict[int, WorkerEnd] = {}
        self.sessions: dict[int, Tenancy] = {}
        self.accounts: dict[str, Account] = {}  # by name of the key
        self.keys = KeyFile(options.keys)
        self.audit = Audit(options.audit)
        self.meter = Meter(options.usage)
        self.lineage = Bounds(MAX_CALLS, MAX_BATCH_BYTES, options.remember_bytes)
        self.replace_s = options.replace_s
        self.url = ""
        self._vigil = Vigil(
            self.workers, self._holder, options.worker_grace_s, options.silent_s, self._give_up, self.meter.heard
        )
        self._last_session = 0
        self._refusals = Refusals()
        self._store = StoreService()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: tuple[asyncio.Task[None], ...] = ()
        self._runner: web.AppRunner | None = None
        self._stalls: dict[int, tuple[int, float]] = {}  # session -> what the client has acknowledged, since when
        self.started = time.time()

    # ---- start and stop

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken, or a file of TLS cannot be read.
            ValueError: the file of keys holds something else.
        """
        options = self.options
        tls: ssl.SSLContext | None = None
        if options.tls_cert is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(options.tls_cert, options.tls_key)
        self.keys.entries()
        app = web.Application(middlewares=[self._guard], client_max_size=CLIENT_FRAME_BYTES)
        app.router.add_get(CLIENT_PATH, self._client)
        app.router.add_get(WORKER_PATH, self._worker)
        app.router.add_post(ATTEND_PATH, self._vigil.attend)
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/sessions", self._list_sessions)
        app.router.add_post("/v1/drain/{worker}", self._drain)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_routes(self._store.routes())
        app.router.add_routes(Sight(self).routes())
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_TIMEOUT_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, options.host, options.port, ssl_context=tls).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"{'ws' if tls is None else 'wss'}://{host}:{self._runner.addresses[0][1]}"
        self._watching = self._run(self._watch()), self._run(self._vigil.run())
        self.audit.note("head started", url=self.url)

    async def stop(self) -> None:
        """End every session and every worker, then the listening socket."""
        for tenancy in list(self.sessions.values()):
            tenancy.end("ConnectionLostError", "the head stops")
        self._store.close()
        for end in self.workers.values():
            _stop(end, "the head stops")
        leaving = [task for task in self._tasks if task not in self._watching]
        if leaving:
            await asyncio.wait(leaving, timeout=CLOSE_TIMEOUT_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self.options.tls_cert is not None:
            await asyncio.sleep(TLS_CLOSING_S)
        self.audit.note("head stopped")
        self.audit.close()
        self.meter.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        """From time to time: are keys revoked, does anybody not read?

        Patience is counted by a clock that stands still while this process is held up.
        """
        loop = asyncio.get_running_loop()
        clock = Awake(TICK_S, loop.time())
        while True:
            await asyncio.sleep(TICK_S)
            now = clock.tick(loop.time())
            self.meter.tick()
            try:
                self._end_revoked()
            except (OSError, ValueError) as error:
                logger.error("the file of keys cannot be read: %s", error)
            for tenancy in list(self.sessions.values()):
                self._end_stalled(tenancy, now)

    def _end_revoked(self) -> None:
        known = {key.id: key for key in self.keys.entries()}
        for tenancy in list(self.sessions.values()):
            key = known.get(tenancy.key.id)
            if key is None:
                self.audit.note("session revoked", session=tenancy.number, key=tenancy.key.id)
                tenancy.end("AuthError", "the key was revoked")
            else:
                tenancy.account.limits = key.limits

    def _end_stalled(self, tenancy: Tenancy, now: float) -> None:
        link = tenancy.link
        acknowledged = link.acknowledged
        before, since = self._stalls.get(tenancy.number, (-1, now))
        if not link.connected or not link.pending_bytes or acknowledged != before:
            self._stalls[tenancy.number] = (acknowledged, now)
        elif now - since > STALL_S:
            tenancy.end("ProtocolError", f"the client has read nothing for {STALL_S:g} s")

    # ---- who may

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        needed = role_for(request.path, self.options.open_metrics) or _role(request)
        if needed == "nobody":
            return await handler(request)
        now = asyncio.get_running_loop().time()
        address = request.remote or "?"
        if not self._refusals.listens_to(address, now):
            raise web.HTTPTooManyRequests(text="too many wrong keys from here; try again in a minute")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        try:
            key = self.keys.verify(given if scheme == "Bearer" else "")
        except AuthError as error:
            self._refusals.refused(address, now)
            self.audit.note("key refused", address=address, path=request.path)
            raise web.HTTPUnauthorized(text=str(error)) from None
        if needed is not None and key.role not in (needed, "admin"):
            self.audit.note("role refused", address=address, path=request.path, key=key.id, role=key.role)
            raise web.HTTPForbidden(text=f"this needs a key of the role {needed!r}, not {key.role!r}")
        request[KEY] = key
        return await handler(request)

    async def _first(self, request: web.Request) -> tuple[web.WebSocketResponse, Link, Frame | None]:
        max_bytes = CLIENT_FRAME_BYTES if request.path == CLIENT_PATH else codec.MAX_FRAME_BYTES
        ws = web.WebSocketResponse(
            timeout=CLOSE_TIMEOUT_S, compress=False, heartbeat=None,
            max_msg_size=max_bytes,
        )
        await ws.prepare(request)
        link = WebSocketLink(ws)
        keep_alive(link)
        try:
            frame = await within(link.receive(), HANDSHAKE_S)
        except asyncio.TimeoutError:
            await link.close("nothing was said in time", WSCloseCode.POLICY_VIOLATION)
            frame = None
        return ws, link if frame is None else take_over(link, max_bytes), frame

    async def _refuse(self, link: Link, reason: str, **facts: Any) -> None:
        self.audit.note("refused", reason=reason, **facts)
        await link.close(reason, WSCloseCode.PROTOCOL_ERROR)

    # ---- clients

    async def _client(self, request: web.Request) -> web.StreamResponse:
        key = request[KEY]
        ws, link, frame = await self._first(request)
        if frame is None:
            return ws
        try:
            asked = codec.decode_from_client(frame)
            if not isinstance(asked, Attach):
                raise ProtocolError(f"expected Attach first, got {type(asked).__name__}")
            _check_version(asked.version)
            tenancy = self._session(key, asked, link, request.remote or "?")
            answer = Attached(
                PROTOCOL_VERSION, tenancy.number, tenancy.ticket, tenancy.link.received,
                self.pool.counts(tenancy.number), self.options.grace_s,
            )
            _say(link, answer)
            if asked.ticket:
                await tenancy.link.attach(link, asked.received)
            else:
                self._run(tenancy.serve())
            await tenancy.link.wait_left(link)
        except (ProtocolError, QuotaError) as error:
            _say(link, Ended(type(error).__name__, str(error)))
            await self._refuse(link, str(error), key=key.id, address=request.remote)
        except ConnectionLostError as error:
            logger.debug("a client left in its handshake: %s", error)
        finally:
            await _hang_up(request, link)
        return ws

    def _session(self, key: Key, asked: Attach, link: Link, address: str) -> Tenancy:
        """The session that a client opens, or goes on with."""
        if asked.ticket:
            number, _, _ = asked.ticket.partition(".")
            found = self.sessions.get(int(number)) if number.isdecimal() and len(number) < 20 else None
            if found is None or not hmac.compare_digest(found.ticket.encode(), asked.ticket.encode("utf-8", "replace")):
                raise ProtocolError("the session is over, or was never here")
            if found.key.id != key.id:
                raise ProtocolError("the session was opened with another key")
            return found
        account = self.accounts.setdefault(key.name, Account(key.name, key.limits))
        account.limits = key.limits
        new = self._last_session + 1
        account.open(new)
        self._last_session = new
        durable = DurableLink(link, self.options.grace_s)
        tenancy = self.sessions[new] = Tenancy(new, key, account, durable, self, asked.name[:100])
        self.meter.opened(new, key.name, tenancy.name)
        self.audit.note("session opened", session=new, key=key.id, tenant=key.name, address=address)
        return tenancy

    def ended(self, tenancy: Tenancy) -> None:
        """A session is over and has let everything go."""
        self.sessions.pop(tenancy.number, None)
        self.meter.ended(tenancy.number, tenancy.error, tenancy.over)
        self._stalls.pop(tenancy.number, None)
        self._store.state.delete_prefix(f"{tenancy.number}/")
        self.audit.note("session ended", session=tenancy.number, key=tenancy.key.id, reason=tenancy.over)
        self._run(tenancy.link.finish())
        for end in list(self.workers.values()):
            self._stop_drained(end)

    def left(self, number: int) -> None:
        """A session has left a worker."""
        end = self.workers.get(number)
        if end is not None:
            self._stop_drained(end)

    # ---- workers

    async def _worker(self, request: web.Request) -> web.StreamResponse:
        ws, link, frame = await self._first(request)
        if frame is None:
            return ws
        try:
            asked = codec.decode_from_pool_worker(frame)
            if not isinstance(asked, Enlist):
                raise ProtocolError(f"expected Enlist first, got {type(asked).__name__}")
            _check_version(asked.version)
            end = self._enlist(asked, link, request.remote or "?")
            _say(link, Enlisted(PROTOCOL_VERSION, end.number, end.ticket, end.link.received, AWAY_S))
            if asked.ticket:
                await end.link.attach(link, asked.received)
            else:
                end.serving = self._run(self._serve_worker(end))
                self._use()
            await end.link.wait_left(link)
        except ProtocolError as error:
            await self._refuse(link, str(error), address=request.remote)
        except ConnectionLostError as error:
            logger.debug("a worker left in its handshake: %s", error)
        finally:
            await _hang_up(request, link)
        return ws

    def _enlist(self, asked: Enlist, link: Link, address: str) -> WorkerEnd:
        if asked.ticket:
            found = self._holder(asked.ticket)
            if found is None:
                raise ProtocolError("this worker was given up")
            return found
        if not asked.devices or len(set(asked.devices)) != len(asked.devices):
            raise ProtocolError(f"a worker offers distinct devices, not {asked.devices}")
        member = self.pool.enlist(asked.devices, asked.name, asked.labels)
        end = self.workers[member.number] = WorkerEnd(
            member, DurableLink(link, AWAY_S), address, asked.pid
        )
        self._vigil.joined(member.number)
        self.meter.joined(member.number)
        self.audit.note("worker joined", worker=member.name, devices=asked.devices, labels=asked.labels, address=address)
        self._tell_devices()
        return end

    def _use(self) -> None:
        """A worker has joined: for sessions that have lost one, and for those on workers that drain."""
        for tenancy in list(self.sessions.values()):
            tenancy.find_places()
        for member in list(self.pool.members.values()):
            if member.draining:
                self._vacate(member)

    def _holder(self, ticket: str) -> WorkerEnd | None:
        """The worker that has this ticket."""
        number, _, _ = ticket.partition(".")
        found = self.workers.get(int(number)) if number.isdecimal() and len(number) < 20 else None
        right = found is not None and hmac.compare_digest(found.ticket.encode(), ticket.encode("utf-8", "replace"))
        return found if right else None

    def _give_up(self, end: WorkerEnd, reason: str) -> None:
        """A worker is lost; it finds out when it is back, and joins anew."""
        end.reason, end.given_up = end.reason or reason, True
        if end.serving is not None:
            end.serving.cancel()

    async def _serve_worker(self, end: WorkerEnd) -> None:
        try:
            await end.serve(self._route, self._retire)
            reason = end.reason or end.link.reason or "its connection closed"
        except ProtocolError as error:
            reason = f"it sent what cannot be right: {error}"
        except asyncio.CancelledError:
            if not end.given_up:
                raise
            reason = end.reason
        self._vigil.left(end.number)
        self.workers.pop(end.number, None)
        self.pool.remove(end.number)
        silent_s = self.meter.gone(end.number, end.member.name, reason, asked=end.asked)
        self.audit.note("worker left", worker=end.member.name, reason=reason)
        for tenancy in list(self.sessions.values()):
            tenancy.worker_gone(end.number, reason, silent_s)
        self._tell_devices()
        await end.link.close(reason)  # last, as it waits for a peer that may not answer

    def _route(self, end: WorkerEnd, message: ForSession | Load, frame: Frame) -> None:
        self._vigil.heard(end.number)
        if isinstance(message, Load):
            self.meter.loaded(end.number, message)
            return
        tenancy = self.sessions.get(message.session)
        if tenancy is not None:
            tenancy.received(end, message, frame)

    def _tell_devices(self) -> None:
        for tenancy in self.sessions.values():
            tenancy.send(Devices(self.pool.counts(tenancy.number)))

    def _vacate(self, member: Member) -> None:
        """Let all sessions go elsewhere, as far as there is anywhere else."""
        for number in sorted(member.sessions):
            self.sessions[number].vacate(member.number)

    def _retire(self, end: WorkerEnd) -> bool:
        """A worker wants to leave. True lets it wait for sessions that go elsewhere; it does not wait for the others."""
        if end.retires:
            return False
        end.retires = end.member.draining = True
        self._vacate(end.member)
        self._tell_devices()
        return self._is_left(end)

    def _is_left(self, end: WorkerEnd) -> bool:
        """Whether some session is about to leave a worker."""
        return any(each.is_on(end.number) for each in self.sessions.values() if each.number not in end.member.sessions)

    def _stop_drained(self, end: WorkerEnd) -> None:
        if not end.member.draining or end.reason or self._is_left(end):
            return
        if end.retires or not end.member.sessions:
            _stop(end, "it left the pool" if end.retires else "it was drained")

    # ---- for people

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _status(self, _: web.Request) -> web.Response:
        workers = [
            {
                "number": end.number,
                "name": end.member.name,
                "devices": [f"{kind}:{number}" for kind, number in end.member.devices],
                "labels": end.member.labels,
                "address": end.address,
                "pid": end.pid,
                "sessions": sorted(end.member.sessions),
                "state": "draining" if end.member.draining else "up" if end.link.connected else "reconnecting",
            }
            for end in self.workers.values()
        ]
        facts = {
            "url": self.url, "since": self.started, "devices": self.pool.counts(), "num_sessions": len(self.sessions),
            "workers": workers,
        }
        return _json(facts)

    async def _list_sessions(self, request: web.Request) -> web.Response:
        key = request[KEY]
        sessions = []
        for tenancy in self.sessions.values():
            if key.role != "admin" and tenancy.key.name != key.name:
                continue
            num_devices, held_bytes, num_ops = tenancy.account.use_of(tenancy.number)
            sessions.append(
                {
                    "number": tenancy.number, "tenant": tenancy.key.name, "name": tenancy.name, "since": tenancy.opened,
                    "devices": num_devices, "held_bytes": held_bytes, "ops_in_flight": num_ops,
                    "state": "connected" if tenancy.link.connected else "reconnecting",
                }
            )
        return _json(sessions)

    async def _drain(self, request: web.Request) -> web.Response:
        member = self.pool.find(request.match_info["worker"])
        if member is None:
            names = ", ".join(each.name for each in self.pool.members.values()) or "none"
            return web.Response(status=404, text=f"no such worker; there are: {names}")
        member.draining = True
        self.audit.note("drain", worker=member.name, key=request[KEY].id)
        self._vacate(member)
        self._tell_devices()
        waits_for = sorted(member.sessions)
        moves = [each.number for each in self.sessions.values() if each.is_on(member.number) and each.number not in waits_for]
        self._stop_drained(self.workers[member.number])
        return _json({"worker": member.name, "waits_for_sessions": waits_for, "moves_sessions": moves})


async def _hang_up(request: web.Request, link: Link) -> None:
    """Close a connection after its last word; one with TLS does not wait for the peer to end TLS as well."""
    await link.close()
    if request.secure and isinstance(request.transport, asyncio.Transport):
        request.transport.abort()


def _stop(end: WorkerEnd, reason: str) -> None:
    end.reason, end.asked = reason, True
    end.send(Stop())
    end.link.expect_end()


def _role(request: web.Request) -> str | None:
    """The role that a path asks for; None: any key will do; "nobody": it needs none."""
    path = request.path
    if path == CLIENT_PATH:
        return "client"
    if path in (WORKER_PATH, ATTEND_PATH) or path.startswith(STORE_PATH):
        return "worker"
    if path == "/healthz":
        return "nobody"
    return "admin" if path.startswith("/v1/drain/") else None


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"this head speaks version {PROTOCOL_VERSION}, its peer {version}")


def _say(link: Link, message: ToClient | ToPoolWorker) -> None:
    link.send_nowait(codec.encode(message))


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
