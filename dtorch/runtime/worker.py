"""A worker's side of the vocabulary: messages in, messages out. No sockets, no event loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from typing_extensions import assert_never

from dtorch.runtime.arrivals import Arrival, InMessage, InSegment, InStream
from dtorch.runtime.comm import Place
from dtorch.runtime.executor import Executor
from dtorch.runtime.layout import box, coords, slices
from dtorch.runtime.poison import Poison
from dtorch.runtime.rework import Rework
from dtorch.runtime.template import dtype_name
from dtorch.runtime.tracing import COPY, Tracer
from dtorch.transport.bulk import open_blob
from dtorch.transport.errors import DTorchError, ProtocolError
from dtorch.transport.messages import (
    Allow,
    AskHeld,
    AskRandomState,
    AskSnapshots,
    AskStatistics,
    AskTrace,
    Batch,
    Blob,
    Define,
    Done,
    Fetch,
    Forget,
    FromWorker,
    Halt,
    Piece,
    Ping,
    RandomState,
    Redo,
    Regroup,
    Resume,
    Seed,
    SharedBlob,
    StartTrace,
    Statistics,
    Stop,
    StreamBlob,
    ToWorker,
    Value,
    Welcome,
)

if TYPE_CHECKING:
    from dtorch.transport.groups import Group


class Streams(Protocol):
    """Bytes that come and go in parts, between hosts without shared memory."""

    def take(self, stream: int, size_bytes: int) -> torch.Tensor | DTorchError:
        """The bytes of an upload, or the error of a call that uses them."""
        ...

    def give(self, stream: int, offset: int, data: torch.Tensor) -> None:
        """Send part of a value: bytes (a uint8 vector) that go to ``offset`` of the receiver's buffer."""
        ...


class Worker:
    """Devices of one process, and the sessions that use them.

    Args:
        number: this worker's number.
        virtual: device kind as users write it -> kind that stands for it.
        resolve: op name -> function, from the op table.
        make_group: (members, kind) -> process group.
        send: passes a message to the controller.
        allow: told of names that ``resolve`` may import.
        streams: where blobs of streams come from and go to.
        executor: makes what runs a session's batches.
    """

    def __init__(
        self,
        number: int,
        virtual: dict[str, str],
        resolve: Callable[[str], Callable[..., Any]],
        make_group: Callable[[tuple[int, ...], str], Group],
        send: Callable[[FromWorker], None],
        allow: Callable[[tuple[str, ...]], None] | None = None,
        streams: Streams | None = None,
        executor: Callable[..., Executor] = Executor,
    ) -> None:
        self.number = number
        self._allow = allow
        self._virtual = virtual
        self._resolve = resolve
        self._make_group = make_group
        self._send = send
        self._streams = streams
        self._executor = executor
        self._sessions: dict[int, Executor] = {}
        self._reworks: dict[int, Rework] = {}
        self.stopped = False

    def device_of(self, place: Place) -> torch.device:
        """The torch device that stands for (kind, id)."""
        device = torch.device(self._virtual.get(place[0], place[0]))
        return device if device.type == "cpu" or device.index is not None else torch.device(device.type, place[1])

    def _session(self, number: int) -> Executor:
        executor = self._sessions.get(number)
        if executor is None:
            executor = self._sessions[number] = self._executor(
                number, self.number, self._resolve, self.device_of, self._make_group, self._send
            )
        return executor

    def handle(self, message: ToWorker) -> None:
        """Do what a message says; answers go through ``send``. Raises ProtocolError for what cannot be right."""
        match message:
            case Batch():
                self._batch(message)
            case Define(session, meshes, definitions, programs):
                executor = self._session(session)
                for mesh in meshes:
                    executor.add_mesh(mesh)
                for definition in definitions:
                    executor.add_definition(definition)
                for program in programs:
                    executor.add_program(program)
            case Forget(session, sig):
                self._session(session).forget(sig)
            case Allow(_, names):
                if self._allow is not None:
                    self._allow(names)
            case Seed(session):
                if not self._session(session).halted:
                    self._session(session).generators.mark(message)
            case AskRandomState(session, ticket):
                self._send(RandomState(session, ticket, self._session(session).generators.read()))
            case RandomState(session, _, states):
                self._session(session).generators.write(states)
            case AskStatistics(session, ticket, wants_memory, reset_peak, idle):
                executor = self._session(session)
                if idle:
                    _await_devices({executor.device_of(place) for place in executor.places})
                memory = executor.memory.report(executor.device_of, reset_peak) if wants_memory else ()
                self._send(Statistics(session, ticket, self.number, memory, dict(executor.counters)))
            case StartTrace(session, limit):
                executor = self._session(session)
                executor.tracer = Tracer(limit, lambda index: executor.device_of(executor.places[index]))
            case AskTrace(session, ticket, stop):
                executor = self._session(session)
                tracer = (executor.tracer if stop else None) or Tracer(0, lambda _: torch.device("cpu"))
                self._send(tracer.report(session, ticket, self.number, executor.places))
                if stop:
                    executor.tracer = None
            case AskHeld() | AskSnapshots() | Regroup() | Redo() | Resume():
                self._rework(message)
            case Halt(session, epoch):
                self.halt(session, epoch)
            case Stop():
                self.stopped = True
            case Welcome() | Ping():
                pass
            case _:
                assert_never(message)

    def halt(self, session: int, epoch: int) -> None:
        """A worker of the session is gone: stop at the next call, and wait for no other worker. Any thread may call this."""
        executor = self._sessions.get(session)
        if executor is not None and epoch > max(executor.binder.epoch, executor.halt_epoch):
            executor.halt_epoch = epoch
            executor.binder.abort()

    def is_halting(self, session: int) -> bool:
        """Whether the session was told to halt, and has not been regrouped since. Any thread may ask."""
        executor = self._sessions.get(session)
        return executor is not None and executor.halt_epoch > executor.binder.epoch

    def _rework(self, message: AskHeld | AskSnapshots | Regroup | Redo | Resume) -> None:
        executor = self._session(message.session)
        rework = self._reworks.get(message.session)
        if rework is None:
            rework = self._reworks[message.session] = Rework(executor, self._fetch)
        answer: FromWorker | None = None
        match message:
            case AskHeld():
                answer = rework.held(message)
            case AskSnapshots():
                answer = rework.snapshots(message)
            case Regroup():
                rework.regroup(message)
            case Redo():
                uploads = [self._arrival(blob) for blob in message.uploads]
                values = rework.redo(message, uploads)
                answer = Done(message.session, -1, 0, values, executor.held_bytes) if values else None
            case Resume():
                answer = rework.resume(message)
        if answer is not None:
            self._send(answer)

    def _batch(self, batch: Batch) -> None:
        executor = self._session(batch.session)
        if executor.halted:
            for blob in batch.uploads:
                if isinstance(blob, StreamBlob):  # if it is wanted, it comes again
                    self._streaming().take(blob.stream, blob.size_bytes)
            return
        started = executor.clock_ns()
        uploads = [self._arrival(blob) for blob in batch.uploads]
        if batch.refused:
            executor.refuse(batch.seq, batch.body, batch.refused)
        elif not executor.run(batch.seq, batch.body, uploads):
            return
        values: tuple[Value, ...] = ()
        if batch.fetches:
            values = tuple(value for f in batch.fetches if (value := self._fetch(executor, f)) is not None)
        self._send(Done(batch.session, batch.seq, executor.clock_ns() - started, values, executor.held_bytes))

    def _fetch(self, executor: Executor, fetch: Fetch) -> Value | None:
        mesh = executor.meshes[fetch.mesh]
        held = [(d, executor.held(fetch.slot, (mesh.kind, d))) for d in mesh.devices if executor.hosts((mesh.kind, d))]
        if not held:
            return None
        poison = next((value for _, value in held if type(value) is Poison), None)
        if poison is not None:
            return Value(executor.session, fetch.ticket, self.number, (), poison.error)
        try:
            pieces = self._pieces(executor, fetch, held)
        except Exception as error:
            # Such as no memory for the copy. The tensor itself is unharmed.
            failure = executor.fail(-1, (mesh.kind, held[0][0]), error)
            return Value(executor.session, fetch.ticket, self.number, (), failure.error)
        return Value(executor.session, fetch.ticket, self.number, tuple(pieces))

    def _pieces(self, executor: Executor, fetch: Fetch, held: list[tuple[int, torch.Tensor]]) -> list[Piece]:
        mesh = executor.meshes[fetch.mesh]
        stream = fetch.into if isinstance(fetch.into, StreamBlob) else None
        into = open_blob(fetch.into, fill=True) if isinstance(fetch.into, SharedBlob) else None
        pieces = []
        for device, value in held:
            if device not in fetch.devices:
                continue
            data = None
            tracer, at = executor.tracer, executor.index_of((mesh.kind, device))
            began = 0 if tracer is None else tracer.mark(at)
            tensor = value
            if stream is not None:
                offset = fetch.offsets[fetch.devices.index(device)]
                self._streaming().give(stream.stream, offset, _flat(tensor))
            elif into is None:
                data = _bytes(tensor)
            elif fetch.layout is not None:
                layout = fetch.layout
                coord = coords(tuple(mesh.shape))[list(mesh.devices).index(device)]
                part = box(tuple(layout.shape), tuple(layout.codes), tuple(mesh.shape), coord)
                whole = tuple((0, n) for n in layout.shape)
                into.view(tensor.dtype).view(tuple(layout.shape))[slices(part, whole)] = tensor
            else:
                offset = fetch.offsets[fetch.devices.index(device)]
                size = tensor.numel() * tensor.element_size()
                if size:
                    into[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            if tracer is not None:
                tracer.add(COPY, at, -1, began, tracer.mark(at), tensor.nbytes)
            pieces.append(Piece(device, tuple(tensor.shape), dtype_name(tensor.dtype), data))
        return pieces

    def _arrival(self, blob: Blob | SharedBlob | StreamBlob) -> Arrival:
        if isinstance(blob, SharedBlob):
            return InSegment(blob)
        if isinstance(blob, StreamBlob):
            return InStream(self._streaming().take(blob.stream, blob.size_bytes))
        return InMessage(blob.data)

    def _streaming(self) -> Streams:
        if self._streams is None:
            raise ProtocolError("streams are for workers of a head; this one has shared memory with its client")
        return self._streams


def _await_devices(devices: set[torch.device]) -> None:
    """Return when all that was given to the devices is executed. A call on a GPU returns before."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _bytes(tensor: torch.Tensor) -> bytes:
    """The elements, row-major."""
    plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg() and not tensor.is_conj()
    flat = tensor if plain and tensor.is_contiguous() else _flat(tensor)
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements, row-major, as a uint8 vector on the CPU."""
    whole = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may come with any stride
