"""A client's side of a head: what ``ControllerThread`` is to an embedded session, over a link.

A thread with an event loop holds the link. The client's threads encode what they send and hand it over; parts of uploads are
cut from the tensor as the link takes them, so that nothing is copied ahead of its time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import platform
import ssl
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import assert_never

from dtorch.cluster.buffers import ROOM_BYTES, Bytes, RemotePool
from dtorch.runtime.controller import Asked, AskedTrace, Counted, Failed, Forfeited, Regained, Sent, Settled
from dtorch.runtime.layout import pieces
from dtorch.runtime.outgoing import Outgoing
from dtorch.runtime.promise import Promise
from dtorch.runtime.recorder import MAX_IN_FLIGHT
from dtorch.runtime.shell import Listener, new_loop
from dtorch.runtime.shield import LOOK_S
from dtorch.runtime.tracing import Spans
from dtorch.transport import cluster, codec, errors
from dtorch.transport.cluster import PART_BYTES, Attach, Attached, Leave, Part, Reserve, Submit
from dtorch.transport.codec import Frame
from dtorch.transport.dial import TLS_CLOSING_S, address_of, dial, keep_alive
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import AuthError, ConnectionLostError, DTorchError, ProtocolError
from dtorch.transport.link import Link
from dtorch.transport.messages import (
    PROTOCOL_VERSION,
    AskStatistics,
    AskTrace,
    Blob,
    Define,
    Definition,
    MeshInfo,
    SharedBlob,
    StreamBlob,
)

logger = logging.getLogger(__name__)

CLIENT_PATH = "/v1/client"
RESERVE_TIMEOUT_S = 60.0
LEAVE_S = 2.0


@dataclass(frozen=True)
class Target:
    """Which head, and as whom.

    Attributes:
        url: such as ``wss://host:port``.
        key: an API key of the role "client".
        tls: whom to trust; the system's authorities by default.
        name: for people who list sessions.
    """

    url: str
    key: str
    tls: ssl.SSLContext | None = None
    name: str = ""


@dataclass(frozen=True)
class _Upload:
    stream: int
    mesh: int
    devices: tuple[int, ...]  # whose piece it is
    data: Bytes


def _piece_devices(definition: Definition, mesh: MeshInfo) -> list[tuple[int, ...]]:
    """The devices that hold each piece of an upload."""
    if definition.kernel == "upload_shards":
        return [(device,) for device in mesh.devices]
    layout = definition.outputs[0]
    boxes, of = pieces(tuple(layout.shape), tuple(layout.codes), tuple(mesh.shape))
    found: list[list[int]] = [[] for _ in boxes]
    for device, number in zip(mesh.devices, of, strict=True):
        found[number].append(device)
    return list(map(tuple, found))


class RemoteController:
    """Links a session to a head. Same methods as ``ControllerThread``, and any thread may call them.

    Raises:
        AuthError: the head does not accept the key.
        ConnectionLostError: there is no head.
        ProtocolError: it is another version, or no head.
        ValueError: the URL names no head.
    """

    ear = None  # values come through a head, by a link that its loop reads

    def __init__(self, target: Target, listener: Listener, pool: RemotePool) -> None:
        self._target = target
        self._address = address_of(target.url)
        self._listener = listener
        self._pool = pool
        self._welcome: Attached | None = None
        self._link: DurableLink | None = None
        self._queue: deque[bytes | _Upload] = deque()  # to be sent, by the loop's thread
        self._pumping: asyncio.Task[None] | None = None
        self._meshes: dict[int, MeshInfo] = {}
        self._pieces_of: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # signature of an upload -> (mesh, devices) each
        self._reserving: dict[int, Promise[cluster.Reserved]] = {}
        self._tickets = itertools.count(1)
        self._num_submitted = 0  # changed by submit only, one thread at a time
        self._num_finished = 0  # changed by the loop's thread only
        self._queued_bytes = 0  # of uploads that wait; guarded by _room
        self._num_lent = 0  # uploads whose bytes lie in the program's tensors still; guarded by _room
        self._returning: set[asyncio.Task[None]] = set()
        self._room = threading.Condition()
        self._order = threading.Lock()  # held while something is handed over, so that its pieces stay together
        self._over = False
        self._leaving = False
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self.bytes_sent = 0
        self.devices: dict[str, int] = {}
        self.spans: Spans | None = None  # of a profile: the head has none to add
        self.pids: dict[int, int] = {}  # workers are not this machine's
        self.loop = new_loop()
        self._ready = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dtorch-remote", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._fault is not None:
            self._thread.join()
            raise self._fault

    @property
    def session(self) -> int:
        """The session's number in the head."""
        assert self._welcome is not None
        return self._welcome.session

    @property
    def num_breaks(self) -> int:
        """Connections that broke so far and came back."""
        return self._link.num_breaks if self._link is not None else 0

    # ---- the client's threads

    def submit(self, batch: Outgoing) -> None:
        self._num_submitted += 1
        session = self.session
        self._meshes.update((mesh.mesh, mesh) for mesh in batch.meshes)
        for definition in batch.definitions:
            if definition.kernel.startswith("upload"):
                mesh = self._meshes[definition.outputs[0].mesh]
                self._pieces_of[definition.sig] = [(mesh.mesh, devices) for devices in _piece_devices(definition, mesh)]
        items: list[bytes | _Upload] = []
        if batch.meshes or batch.definitions or batch.programs:
            items.append(codec.encode(Define(session, batch.meshes, batch.definitions, batch.programs)))
        uploads: list[Blob | StreamBlob] = []
        targets: dict[int, tuple[int, tuple[int, ...]]] = {}
        if any(isinstance(blob, StreamBlob) for blob in batch.uploads):
            for call in batch.calls:
                targets.update(enumerate(self._pieces_of.get(call[0], ()), start=call[-1]))
        for position, blob in enumerate(batch.uploads):
            assert not isinstance(blob, SharedBlob)
            uploads.append(blob)
            if isinstance(blob, StreamBlob):
                items.append(_Upload(blob.stream, *targets[position], self._pool.upload(blob)))
        items.append(
            codec.encode(
                Submit(
                    session, batch.seq, tuple(batch.signatures), batch.body, batch.freed_meshes, tuple(uploads),
                    batch.fetches,
                )
            )
        )
        self._hand_over(items)

    def post(self, event: Sent | Asked | AskedTrace) -> None:
        """Tell the head of something, in order."""
        message: cluster.FromClient
        match event:
            case Sent(said):
                message = said
            case Asked(ticket, memory, reset_peak, idle):
                message = AskStatistics(self.session, ticket, memory, reset_peak, idle)
            case AskedTrace(ticket, stop):
                message = AskTrace(self.session, ticket, stop)
            case _:
                assert_never(event)
        self._hand_over([codec.encode(message)])

    def reserve(self, kind: str, devices: tuple[int, ...]) -> None:
        """Ask for the devices of a mesh, and wait for the answer.

        Raises:
            MeshError: the cluster has too few.
            QuotaError: the key may not have so many.
            ConnectionLostError: no answer came.
        """
        self._ask(Reserve(self.session, self.ticket(), kind, devices))

    def ticket(self) -> int:
        """A number for a question to the head."""
        return next(self._tickets)

    def migrate(self, ticket: int, places: tuple[tuple[str, int], ...], target: tuple[str, int] | None) -> None:
        """Ask for devices to move, and wait until the head agrees; the outcome, named by ``ticket`` too, comes later.

        Raises:
            MeshError: there is no such device, or nowhere to move to.
            ConnectionLostError: no answer came.
        """
        self._ask(cluster.Migrate(self.session, ticket, places, target))

    def _ask(self, question: Reserve | cluster.Migrate) -> None:
        promise: Promise[cluster.Reserved] = Promise()
        self._reserving[question.ticket] = promise
        self._hand_over([codec.encode(question)])
        try:
            answer = promise.result(RESERVE_TIMEOUT_S)
        except TimeoutError:
            raise ConnectionLostError(f"the head has not answered within {RESERVE_TIMEOUT_S:g} s") from None
        finally:
            self._reserving.pop(question.ticket, None)
        if answer.error:
            raise error_of(answer.error, answer.text)

    def request_flush(self, delay_s: float) -> None:
        try:
            self.loop.call_soon_threadsafe(self._set_timer, delay_s)
        except RuntimeError:
            logger.debug("no flush: the link has ended")

    def wait_for_room(self) -> None:
        self._pool.copy_lent()
        if threading.current_thread() is self._thread:
            return
        if self._num_lent:
            self._wait_until(lambda: not self._num_lent)
        if not self._has_room(MAX_IN_FLIGHT, ROOM_BYTES):
            self._wait_until(lambda: self._has_room(MAX_IN_FLIGHT // 2, ROOM_BYTES // 2))

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        with self._room:
            while not is_so() and not self._over:
                self._room.wait(LOOK_S)

    def _has_room(self, num_batches: int, size_bytes: int) -> bool:
        return self._num_submitted - self._num_finished <= num_batches and self._queued_bytes <= size_bytes

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave, after what is queued: the head ends the session at once."""
        if self._thread.is_alive():
            try:
                self.loop.call_soon_threadsafe(self._leave)
            except RuntimeError:
                logger.debug("the link has ended already")
            if not self.is_own_thread():
                self._thread.join(timeout_s)

    def _hand_over(self, items: list[bytes | _Upload]) -> None:
        with self._order:
            if self._over:
                raise ConnectionLostError("the session with the head has ended")
            uploads = [item for item in items if isinstance(item, _Upload)]
            if uploads:
                with self._room:
                    self._queued_bytes += sum(len(upload.data) for upload in uploads)
                    self._num_lent += sum(bool(upload.data.lent) for upload in uploads)
            self._queue.extend(items)
            try:
                self.loop.call_soon_threadsafe(self._pump)
            except RuntimeError as error:
                raise ConnectionLostError("the session with the head has ended") from error

    # ---- this thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self._fault = error
            if self._ready.is_set():
                self._listener.broken(error)
        finally:
            self._end_waiting()
            self._ready.set()
            try:
                if self._address.startswith("tls:"):
                    self.loop.run_until_complete(asyncio.sleep(TLS_CLOSING_S))
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            finally:
                asyncio.set_event_loop(None)
                self.loop.close()

    async def _serve(self) -> None:
        link, _ = await self._dial(0)
        welcome = self._welcome
        assert welcome is not None
        self._link = durable = DurableLink(link, welcome.grace_s, self._dial)
        durable.land = self._land
        self._ready.set()
        try:
            while (frame := await durable.receive()) is not None:
                self._take(codec.decode_to_client(frame))
            if not self._over and not self._leaving:
                self._listener.gone(ConnectionLostError(f"the head at {self._target.url} is gone: {durable.reason}"))
        except ProtocolError as error:
            self._listener.gone(ConnectionLostError(f"the head at {self._target.url} cannot be followed: {error}"))
        finally:
            self._end_waiting()
            if self._pumping is not None:
                self._pumping.cancel()
                await asyncio.gather(self._pumping, return_exceptions=True)
            if self._closing is not None:
                await self._closing
            await durable.close()
            await asyncio.gather(*self._returning)

    async def _dial(self, received: int) -> tuple[Link, int]:
        target, welcome = self._target, self._welcome
        hello = Attach(PROTOCOL_VERSION, welcome.ticket if welcome else "", received, target.name or platform.node())
        link, frame = await dial(self._address, CLIENT_PATH, target.key, codec.encode(hello), target.tls, past_aiohttp=True)
        try:
            answer = codec.decode_to_client(frame)
            if isinstance(answer, cluster.Ended):
                raise error_of(answer.error, answer.text)
            if not isinstance(answer, Attached) or answer.version != PROTOCOL_VERSION:
                raise ProtocolError(f"expected Attached of version {PROTOCOL_VERSION}, got {answer!r:.100}")
        except BaseException:
            await link.close()
            raise
        keep_alive(link)
        self._welcome = answer
        self.devices = answer.devices
        return link, answer.received

    def _land(self, frame: bytes, size_bytes: int) -> memoryview | None:
        part = codec.decode_to_client(frame)
        buffer = self._pool.buffer(part.stream) if isinstance(part, Part) else None
        if buffer is None or not isinstance(part, Part) or not 0 <= part.offset <= len(buffer) - size_bytes:
            return None
        return buffer[part.offset : part.offset + size_bytes]

    def _take(self, message: cluster.ToClient) -> None:
        listener = self._listener
        match message:
            case cluster.Finished(seq):
                listener.finished(seq)
                self._num_finished += 1
                self._notify()
            case cluster.Answer(ticket, values, error):
                listener.settled(Settled(ticket, values, error))
            case cluster.Counts(ticket, statistics):
                listener.counted(Counted(ticket, statistics))
            case cluster.Traces(ticket, traces):
                listener.counted(Counted(ticket, traces))
            case cluster.CallFailed(worker, failure):
                listener.failed(Failed(worker, failure))
            case Part(stream=stream, offset=offset, data=data):
                buffer = self._pool.buffer(stream)
                if buffer is not None:  # somebody wants it still
                    if offset + len(data) > len(buffer):
                        raise ProtocolError(f"part of stream {stream} at byte {offset} is beyond its end")
                    buffer[offset : offset + len(data)] = data
            case cluster.Reserved(ticket):
                promise = self._reserving.pop(ticket, None)
                if promise is not None:
                    promise.set_result(message)
            case cluster.Devices(devices):
                self.devices = devices
            case cluster.Forfeited(worker, reason, tensors):
                listener.elastic.on_forfeited(Forfeited(worker, reason, tensors))
            case cluster.Regained():
                if message.silent_s is not None:
                    listener.elastic.on_silent(message.lost[0][0], message.silent_s)
                listener.elastic.on_regained(
                    Regained(message.lost, message.moved, message.recomputed_ops, message.copied_bytes, message.tickets),
                    message.halted_s,
                )
            case cluster.Ended(error, text, worker):
                self._end_waiting()
                if error == "WorkerLostError":
                    listener.lost(worker, text)
                elif not self._leaving:
                    listener.gone(error_of(error, text))
                if self._link is not None:
                    self._closing = self.loop.create_task(self._link.close())
            case Attached():
                raise ProtocolError("a session is attached once a connection")
            case _:
                assert_never(message)

    def _pump(self) -> None:
        """Send what is queued; from the first upload on, a task does it at the link's pace."""
        while self._queue and self._pumping is None and not self._over:
            item = self._queue[0]
            if isinstance(item, _Upload):
                self._pumping = self.loop.create_task(self._send_upload(item))
                return
            self._queue.popleft()
            self._send(item)

    async def _send_upload(self, upload: _Upload) -> None:
        assert self._link is not None
        whole, offset = len(upload.data), 0
        for view in upload.data:
            for start in range(0, len(view), PART_BYTES):
                await self._link.wait_below(self._link.pace.window_bytes)
                piece = view[start : start + PART_BYTES]
                part = Part(self.session, upload.stream, offset, whole, upload.mesh, upload.devices, piece)
                self._send(*codec.encode_part(part))
                offset += len(piece)
                with self._room:
                    self._queued_bytes -= len(piece)
                self._notify()
            if view and view is upload.data.lent:
                returning = self.loop.create_task(self._give_back(self._link, self._link.sent))
                self._returning.add(returning)
                returning.add_done_callback(self._returning.discard)
        self._queue.popleft()
        self._pumping = None
        self._pump()

    async def _give_back(self, link: DurableLink, number: int) -> None:
        """Lent bytes are not looked at again once the head has them."""
        await link.wait_acknowledged(number)
        with self._room:
            self._num_lent -= 1
            self._room.notify_all()

    def _send(self, *pieces: Frame) -> None:
        assert self._link is not None
        self.bytes_sent += sum(map(len, pieces))
        try:
            self._link.send_nowait(*pieces)
        except ConnectionLostError as error:
            logger.debug("not sent: %s", error)

    def _leave(self) -> None:
        self._leaving = True
        if self._link is None or self._link.closed:
            return
        link = self._link
        self._queue.append(codec.encode(Leave(self.session)))
        self._pump()

        def give_up() -> None:
            self._closing = self.loop.create_task(link.close())

        self.loop.call_later(LEAVE_S, give_up)

    def _notify(self) -> None:
        if self._has_room(MAX_IN_FLIGHT // 2 + 1, ROOM_BYTES // 2):
            with self._room:
                self._room.notify_all()

    def _end_waiting(self) -> None:
        with self._room:
            self._over = True
            self._room.notify_all()
        while self._reserving:
            _, promise = self._reserving.popitem()
            promise.set_exception(ConnectionLostError("the session with the head has ended"))

    def _set_timer(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._listener.tick()


def error_of(name: str, text: str) -> DTorchError:
    """The exception of that name, as a head names it."""
    kind: Any = getattr(errors, name, None)
    simple = (errors.MeshError, errors.QuotaError, AuthError, errors.SessionClosedError, ConnectionLostError, ProtocolError)
    return kind(text) if kind in simple else ConnectionLostError(f"{name}: {text}")
