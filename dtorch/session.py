"""A session: one client's tensors, signatures and workers. The default one starts on first use."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from sys import _getframe
from typing import Any

import torch

from dtorch.elastic import Elastic, Move
from dtorch.failures import UNKNOWN, Failures, SignatureFacts, note, with_notes
from dtorch.fetches import INLINE_BYTES, Fetches
from dtorch.frames import source, where
from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, normalize
from dtorch.runtime.controller import Asked, AskedTrace, Counted, Failed, Sent, Settled
from dtorch.runtime.layout import pieces, slices
from dtorch.runtime.lineage import Bounds
from dtorch.runtime.promise import Promise
from dtorch.runtime.recorder import Recorder, again
from dtorch.runtime.shell import ControllerThread
from dtorch.runtime.signature import ONE, Signature
from dtorch.runtime.tracing import Spans
from dtorch.seeding import RandomStreams
from dtorch.spec import OWN, STALE, Spec, contiguous_stride
from dtorch.tensor import Tensor
from dtorch.transport.bulk import Lease
from dtorch.transport.errors import (
    ConnectionLostError,
    DTorchError,
    MeshError,
    SessionClosedError,
    WorkerLostError,
)
from dtorch.transport.groups import flat_bytes
from dtorch.transport.messages import (
    Blob,
    Definition,
    Forget,
    Layout,
    MeshInfo,
    Seed,
    SharedBlob,
    StartTrace,
    Statistics,
    StreamBlob,
    Trace,
)
from dtorch.wiring import Options, Wires, chosen_options, wire

logger = logging.getLogger(__name__)

_new = object.__new__


class Session:
    """State of one client. Made by ``current_session`` and ``dtorch.init``. Its ``serial`` is never given twice in this
    process, its ``number`` is its controller's, and heads count each for itself."""

    _numbers = itertools.count(1)

    def __init__(self, options: Options) -> None:
        self.options = options
        self.num_mutations = 0
        self.num_misses = 0  # calls whose signature had to be made
        self.num_programs = 0  # recordings of compiled functions
        self.num_played = 0  # calls of straight modules that were played
        self._virtual = dict(options.virtual)
        self._meshes: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
        self._named: set[tuple[Any, ...]] = set()
        self._mesh_texts: dict[int, str] = {}  # number of a mesh -> as text
        self._specs: dict[Any, Spec] = {}
        self._lock = threading.RLock()
        self._tickets = itertools.count(1)
        self._counts: dict[int, Promise[Any]] = {}
        self._failures = Failures()
        self._signatures: dict[int, SignatureFacts] = {}
        self.program_lines: dict[int, list[Any]] = {}  # signature of a program -> its calls with their source lines
        self.epoch = 0  # changes when signatures are forgotten
        self.nothings: dict[Any, Tensor] = {}  # see ops/_nothing.py
        self._upload_signatures: dict[tuple[Spec, str], Signature] = {}
        self._uploading: list[tuple[int, list[Lease]]] = []  # batch that reads it, or a later one; its memory
        self._finished_through = 0  # all batches up to here are finished, and of the later ones these:
        self._finished_beyond: set[int] = set()
        self.elastic = Elastic(self, self._failures)
        self.serial = next(Session._numbers)
        self._pool, self.thread, self.number = self._start(options, self.serial)
        # All workers draw alike, whatever the preloaded process has in its generator.
        self.thread.post(Sent(Seed(self.number, torch.initial_seed())))
        self.recorder = Recorder(self.thread, self._synchronize_op if options.sync else None)
        if not isinstance(self.thread, ControllerThread):
            self.recorder.where = where
        self._random = RandomStreams(self.recorder, lambda *mark: self.thread.post(Sent(Seed(self.number, *mark))))
        self._fetches = Fetches(self.recorder, self._pool, self._failures, self.thread.ear)

    def _start(self, options: Options, number: int) -> Wires:
        return wire(options, number, self)

    # ---- meshes and specs

    def mesh_number(self, mesh: DeviceMesh) -> tuple[int, list[int]]:
        """The mesh's number in this session and the list of its dead slots; announces it on first use.

        Raises:
            MeshError: it names devices that do not exist here.
        """
        key = mesh.key
        known = self._meshes.get(key)
        if known is None:
            self._check_devices(mesh)
            with self._lock:
                known = self._meshes.get(key)
                if known is None:
                    number = len(self._meshes) + 1
                    self._mesh_texts[number] = str(mesh)
                    info = MeshInfo(number, mesh.device_type, tuple(mesh.shape), tuple(mesh.devices))
                    known = self._meshes[key] = (number, self.recorder.add_mesh(info))
        if mesh.dim_names is not None and key not in self._named:  # the same devices may have been met without names
            self._named.add(key)
            self._mesh_texts[known[0]] = str(mesh)
        return known

    def _check_devices(self, mesh: DeviceMesh) -> None:
        if not isinstance(self.thread, ControllerThread):
            self.thread.reserve(mesh.device_type, tuple(mesh.devices))
            return
        kind, _, only = self._virtual.get(mesh.device_type, mesh.device_type).partition(":")
        if kind == "cuda":
            have = torch.cuda.device_count()
            highest = int(only) if only else max(mesh.devices)
            if highest >= have:
                raise MeshError(
                    f"{mesh} needs CUDA device {highest}, this machine has {have} CUDA "
                    f"device{'' if have == 1 else 's'}. To develop without them: "
                    "dtorch.init(virtual={'cuda': 'cpu'}) or DTORCH_VIRTUAL=cuda=cpu"
                )

    def spec(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        mesh: DeviceMesh,
        codes: tuple[int, ...],
        is_param: bool = False,
        requires_grad: bool = False,
        link: int = OWN,
    ) -> Spec:
        """The one Spec object of these facts."""
        key = (tuple(shape), tuple(stride), dtype, mesh, codes, is_param, requires_grad, link)
        found = self._specs.get(key)
        if found is None:
            number, dead = self.mesh_number(mesh)
            with self._lock:
                found = self._specs.get(key)
                if found is None:
                    found = self._specs[key] = Spec(
                        self, mesh, number, tuple(shape), tuple(stride), dtype, codes, is_param, requires_grad, dead,
                        self.recorder.wake, link,
                    )
        return found

    def respec(self, spec: Spec, **changes: Any) -> Spec:
        """``spec`` with some facts changed."""
        facts = {
            "shape": spec.shape, "stride": spec.stride, "dtype": spec.dtype, "mesh": spec.mesh, "codes": spec.codes,
            "is_param": spec.is_param, "requires_grad": spec.requires_grad, "link": spec.link,
        }
        return self.spec(**{**facts, **changes})

    def know_signature(
        self,
        number: int,
        op: str,
        inputs: tuple[Layout, ...],
        outputs: tuple[Layout, ...] = (),
        writes: bool = False,
        random: bool = False,
        mutates: bool = False,
    ) -> None:
        """Remember what a signature stands for: said when a call of it fails, and asked when calls become a program."""
        self.num_misses += 1
        self._signatures[number] = SignatureFacts(op, inputs, outputs, writes, random, mutates)

    def signature_facts(self, number: int) -> SignatureFacts:
        return self._signatures[number]

    @property
    def num_signatures(self) -> int:
        return len(self._signatures)

    def forget_signatures(self) -> None:
        """Start all caches afresh; signatures so far are not called again."""
        from dtorch.ops import table

        with self._lock:
            self.recorder.flush()
            table.clear_caches()
            self._upload_signatures.clear()
            self.nothings.clear()
            self._signatures = {}  # a profile may still hold the old one
            self.program_lines = {}
            self.epoch += 1
            self._specs.clear()
            self.thread.post(Sent(Forget(self.number, self.recorder.next_signature)))

    # ---- data in and out

    def upload(self, data: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> Tensor:
        """Put a full torch tensor on ``mesh``."""
        if placements is None:
            codes: tuple[int, ...] = (-1,) * mesh.ndim
        else:
            codes = tuple(p.code for p in normalize(placements, data.ndim, mesh))
        data = data.detach().resolve_conj().resolve_neg()
        spec = self.spec(data.shape, contiguous_stride(data.shape), data.dtype, mesh, codes)
        boxes, _ = pieces(spec.shape, codes, tuple(mesh.shape))
        whole = tuple((0, n) for n in spec.shape)
        return self._upload(spec, [data[slices(part, whole)] for part in boxes], "upload")

    def upload_shards(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], mesh: DeviceMesh, codes: tuple[int, ...]
    ) -> Tensor:
        """Put pieces that are already cut, one a device in row-major order."""
        spec = self.spec(shape, contiguous_stride(shape), parts[0].dtype, mesh, codes)
        return self._upload(spec, [p.detach().resolve_conj().resolve_neg() for p in parts], "upload_shards")

    def _upload(self, spec: Spec, parts: Sequence[torch.Tensor], kernel: str) -> Tensor:
        key = (spec, kernel)
        sig = self._upload_signatures.get(key)
        if sig is None:
            sig = self._upload_signatures[key] = self._define_upload(spec, kernel)
        leases: list[Lease] = []
        blobs: list[Blob | SharedBlob | StreamBlob]
        if sum(part.nbytes for part in parts) <= INLINE_BYTES:
            blobs = [Blob(_bytes(part)) for part in parts]
        else:
            # What one device alone gets is given away, unless it may have to be sent again.
            alone = self.options.lineage is None and len(parts) == len(spec.mesh.devices)
            leases = self._pool.filled(parts, alone, not self.thread.is_own_thread())
            blobs = [lease.blob for lease in leases]
        slot = self.recorder.upload(sig.id, blobs, source(_getframe(1)), [lease.tensor for lease in leases])
        if leases:
            with self._lock:
                self._uploading.append((self.recorder.next_seq, leases))
            if any(isinstance(blob, StreamBlob) for blob in blobs):
                self.recorder.flush()  # it may take a while: begin now
                self.thread.wait_for_room()
        self.recorder.bound_uploads()
        if self.recorder.expects_after_put:
            self.recorder.after_put()
        made = _new(Tensor)
        made._spec = spec
        made._slot = slot
        return made

    def _define_upload(self, spec: Spec, kernel: str) -> Signature:
        def build(number: int) -> Definition:
            # The number is the place of the first piece among the batch's uploads.
            return Definition(number, "dtorch.upload", kernel, [["n", 0]], {}, (), (spec.layout,))

        return self.define(build, (spec,), "dtorch.upload", ())

    def define(
        self,
        build: Callable[[int], Definition],
        specs: tuple[Spec, ...],
        name: str,
        inputs: tuple[Layout, ...],
        random: bool = False,
    ) -> Signature:
        """A signature for definitions that no op of the table makes."""
        sig = Signature()
        recorder = self.recorder
        sig.id = recorder.define(build)
        sig.take, sig.recorder = recorder.take, recorder
        sig.put = recorder.draw if random else recorder.put
        sig.shape, sig.spec, sig.specs, sig.finish = ONE, specs[0] if specs else None, specs, None
        self.know_signature(sig.id, name, inputs, tuple(s.layout for s in specs), False, random)
        return sig

    def fetch(self, tensor: Tensor, now: bool = True) -> Promise[torch.Tensor]:
        """Ask for the full value; shared with a fetch of the same value that is under way."""
        self.check_open()
        if tensor._spec.link == STALE:
            _refresh(tensor)
        return self._fetches.value(tensor, now, self.num_mutations)

    def fetch_shards(self, tensor: Tensor) -> Promise[list[torch.Tensor]]:
        """Ask for every device's piece, in row-major mesh order."""
        self.check_open()
        if tensor._spec.link == STALE:
            _refresh(tensor)
        return self._fetches.shards(tensor)

    # ---- the controller's thread

    def finished(self, seq: int) -> None:
        self.recorder.finished(seq)
        beyond = self._finished_beyond
        beyond.add(seq)
        while self._finished_through + 1 in beyond:
            self._finished_through += 1
            beyond.discard(self._finished_through)
        if self._uploading:
            with self._lock:
                self._uploading = [(at, kept) for at, kept in self._uploading if at > self._finished_through]

    def settled(self, settled: Settled) -> None:
        self._fetches.settled(settled)

    def counted(self, counted: Counted) -> None:
        promise = self._counts.pop(counted.ticket, None)
        if promise is not None:
            promise.set_result(counted.answers)

    def failed(self, failed: Failed) -> None:
        call = (failed.failure.seq, failed.failure.index)
        signature = self.recorder.signature_of(*call)
        facts = self._signatures.get(signature, UNKNOWN) if signature is not None else UNKNOWN
        meshes = dict.fromkeys(layout.mesh for layout in (*facts.inputs, *facts.outputs))
        shown = ", ".join(self._mesh_texts[number] for number in meshes if number in self._mesh_texts)
        self._failures.add(failed, facts.op, facts.inputs, self.recorder.source(*call), shown)

    def lost(self, worker: int, reason: str) -> None:
        self._end(WorkerLostError(f"worker {worker}", reason))

    def gone(self, error: DTorchError) -> None:
        self._end(error)

    def broken(self, error: BaseException) -> None:
        self._end(ConnectionLostError(f"the controller failed: {type(error).__name__}: {error}"))

    def tick(self) -> None:
        self.recorder.tick()

    # ---- waiting

    def synchronize(self) -> Promise[None]:
        """Settled when all work recorded so far is done; fails with the first error that nobody has seen."""
        self.check_open()
        done: Promise[None] = Promise()
        answer = self._asking(lambda ticket: Asked(ticket, memory=False, reset_peak=False, idle=True))

        def finish() -> None:
            error = answer.peek() or self._failures.take_loss()
            if error is None:
                unseen = self._failures.take_unseen()
                if unseen:
                    error = with_notes(unseen[0])
                    if len(unseen) > 1:
                        note(error, f"{len(unseen) - 1} more calls have failed since the last synchronize()")
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(None)

        answer.add_callback(finish)
        return done

    def ask_statistics(self, memory: bool = False, reset_peak: bool = False) -> Promise[tuple[Statistics, ...]]:
        """Every worker's statistics, after all work recorded so far; with ``memory`` also that of its devices."""
        self.check_open()
        return self._asking(lambda ticket: Asked(ticket, memory, reset_peak))

    def _asking(self, question: Callable[[int], Asked | AskedTrace]) -> Promise[Any]:
        self.recorder.flush()
        promise: Promise[Any] = Promise()
        ticket = next(self._tickets)
        self._counts[ticket] = promise
        try:
            self.thread.post(question(ticket))
        except ConnectionLostError as error:
            promise.set_exception(error)
        ended = self.recorder.closed
        if ended is not None:  # just now, and it may have missed this promise
            promise.set_exception(again(ended))
        return promise

    def start_trace(self, spans: Spans, limit: int) -> None:
        """Everybody notes what happens from here on: this process in ``spans``, each worker at most ``limit`` events.

        Raises:
            RuntimeError: a profile of this session is under way.
        """
        self.check_open()
        if self.recorder.spans is not None:
            raise RuntimeError("a profile of this session is under way already: end it before you begin another")
        self.recorder.flush()
        self.thread.post(Sent(StartTrace(self.number, limit)))
        self.recorder.spans = self.thread.spans = spans

    def ask_trace(self, stop: bool) -> Promise[tuple[Trace, ...]]:
        """Every worker's clock, after all work recorded so far; with ``stop`` also its events, and the profile ends."""
        promise = self._asking(lambda ticket: AskedTrace(ticket, stop))
        if stop:
            self.recorder.spans = self.thread.spans = None
        return promise

    @property
    def known_signatures(self) -> dict[int, SignatureFacts]:
        """What each signature stands for: the live table, until signatures are forgotten."""
        return self._signatures

    def _synchronize_op(self) -> None:
        """DTORCH_SYNC=1: run what was just recorded, and raise its error here."""
        self.recorder.flush()
        if not self.thread.is_own_thread():
            self.synchronize().result()

    def seed(self, seed: int) -> None:
        """Seed the generators of all workers, in program order: those that the running task draws from."""
        self.check_open()
        self._random.seed(seed)

    # ---- the end

    def check_open(self) -> None:
        """Raises what ended the session, if anything has."""
        ended = self.recorder.closed
        if ended is not None:
            raise again(ended)

    def migrate(self, source: Any, target: Any = None) -> Move:
        """See ``Elastic.migrate``; blocks until it is done."""
        return self.elastic.migrate(source, target).result()

    def drain(self, worker: int) -> Move:
        """See ``Elastic.drain``; blocks until it is done."""
        return self.elastic.drain(worker).result()

    @property
    def is_open(self) -> bool:
        return self.recorder.closed is None

    def close(self) -> None:
        """Finish what is queued, end the workers, free everything. Tensors of the session are dead afterwards."""
        if self.is_open and not self.thread.is_own_thread():
            try:
                self.recorder.flush()
            except ConnectionLostError as error:
                logger.debug("nothing could be sent any more: %s", error)
            self._end(SessionClosedError("the session of this tensor was shut down"))
        self.nothings.clear()
        self.thread.close()
        self._pool.close()
        unseen = self._failures.take_unseen()
        if unseen:
            first = unseen[0]
            more = f"\n({len(unseen) - 1} more calls have failed.)" if len(unseen) > 1 else ""
            text = f"an op failed and nobody awaited it: {type(first).__name__}: {first}{more}"
            path, _, line = first.location.rpartition(":")
            if not line.isdecimal():  # a notebook's cell
                path, line = first.location, "1"
            warnings.warn_explicit(text, RuntimeWarning, path or "dtorch", int(line))

    def _end(self, error: DTorchError) -> None:
        """No more work: whoever waits gets ``error``."""
        from dtorch.ops import table

        self.recorder.close(error)
        table.clear_caches()
        self._fetches.end(error)
        self.elastic.end(error)
        while self._counts:
            _, waiting = self._counts.popitem()
            waiting.set_exception(again(error))


def _bytes(part: torch.Tensor) -> bytes:
    return flat_bytes(part).numpy().tobytes() if part.numel() else b""


def _refresh(tensor: Tensor) -> None:
    from dtorch.ops import _alias

    _alias.refresh(tensor)


# ---- the default session

_session: Session | None = None
_guard = threading.RLock()
_own: ContextVar[Session | None] = ContextVar("dtorch_session", default=None)


@contextmanager
def using(session: Session) -> Iterator[None]:
    """Inside, ``session`` is the one in use, whatever the default is. Belongs to the running task."""
    token = _own.set(session)
    try:
        yield
    finally:
        _own.reset(token)


def current_session() -> Session:
    """The session in use; started now if there is none."""
    session = _own.get() or _session
    if session is not None and session.recorder.closed is None:
        return session
    with _guard:  # two threads that both find none must not end each other's
        session = _session
        return session if session is not None and session.recorder.closed is None else init()


def init(
    workers: str | None = None,
    virtual: dict[str, str] | None = None,
    listen: str | None = None,
    *,
    sync: bool | None = None,
    num_threads: int | None = None,
    start_timeout_s: float = 120.0,
    recover: bool | None = None,
    lineage: Bounds | None = None,
) -> Session:
    """Start the runtime, or start it afresh with other options. Optional: defaults start on first use.

    With DTORCH_HEAD set it connects to that head (see ``dtorch.connect``), whose workers are as they are: of the options,
    only ``sync`` has a say then.

    Args:
        workers: "shared" (one process hosts all CPU devices; default) or "per-device" (one process each, gloo between
            them). CUDA devices always have a process each. DTORCH_WORKERS sets the default.
        virtual: device kinds and what stands for them, such as ``{"cuda": "cpu"}``, or ``{"cuda": "cuda:0"}`` to put
            all ids onto one GPU. DTORCH_VIRTUAL=cuda=cpu sets the default.
        listen: "host" or "host:port" makes the control plane listen on TCP instead of a private unix socket.
        sync: run op by op, so that an op that fails on a worker raises at its own line; slow, for debugging.
            DTORCH_SYNC=1 sets the default.
        num_threads: of torch in each worker process; as many as this process has by default, so that results have the
            bits of plain torch.
        start_timeout_s: how long a worker process may take to start before the session is given up (WorkerLostError).
        recover: whether the session goes on when a worker is lost (docs/failure.md); by default where workers are
            "per-device", or as DTORCH_RECOVER=0 or 1 says. ``lineage`` bounds what is remembered for it.

    DTORCH_REWRITE names the rules that rewrite workers' plans ("none": none), see ``dtorch.runtime.rewrite``.

    Raises:
        ValueError: an option has a value that it cannot have.
    """
    options = chosen_options(workers, virtual, listen, sync, num_threads, start_timeout_s, recover, lineage)
    own = _own.get()
    if own is not None:
        return own
    if os.environ.get("DTORCH_HEAD"):
        from dtorch.cluster.client import connect

        return connect(sync=sync)
    return start(options)


def start(options: Options) -> Session:
    """End the session in use, if there is one, and make one with these options that takes its place."""
    global _session
    with _guard:
        shutdown()
        _session = Session(options)
        return _session


def shutdown() -> None:
    """End the workers. The next op, or ``dtorch.init``, starts afresh; tensors from before are dead."""
    global _session
    with _guard:
        session, _session = _session, None
        if session is not None:
            session.close()


def _at_exit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shutdown()


def _after_fork_in_child() -> None:
    global _session, _guard
    _guard = threading.RLock()
    session, _session = _session, None
    if session is not None:
        session.recorder.abandon("the session belongs to the parent process; a forked child starts its own")


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
