"""A session: one client's tensors, signatures and workers. The default one starts on first use."""

from __future__ import annotations

import atexit
import itertools
import linecache
import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import _getframe
from typing import Any

import torch

from dtorch import assemble
from dtorch.frames import source
from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, from_code, normalize
from dtorch.runtime.controller import Asked, Controller, Counted, Failed, Sent, Settled
from dtorch.runtime.promise import Promise
from dtorch.runtime.recorder import ONE, Recorder, Signature
from dtorch.runtime.shell import ControllerThread
from dtorch.runtime.template import dtype_of
from dtorch.spec import Spec, contiguous_stride
from dtorch.tensor import Tensor
from dtorch.transport.bulk import Lease, SegmentPool
from dtorch.transport.errors import (
    DTorchError,
    MeshError,
    OpError,
    SessionClosedError,
    WorkerLostError,
    op_error,
)
from dtorch.transport.messages import (
    Blob,
    Definition,
    Fetch,
    Forget,
    Layout,
    MeshInfo,
    Seed,
    SharedBlob,
    Statistics,
)

logger = logging.getLogger(__name__)

_new = object.__new__

INLINE_BYTES = 64 * 1024
"""Tensors up to this size travel inside messages; larger ones through shared memory."""


@dataclass(frozen=True)
class Options:
    """What ``dtorch.init`` decides. See there."""

    workers: str = "shared"
    virtual: tuple[tuple[str, str], ...] = ()
    listen: str | None = None
    sync: bool = False


class Session:
    """State of one client. Made by :func:`current_session` and ``dtorch.init``."""

    _numbers = itertools.count(1)

    def __init__(self, options: Options) -> None:
        self.options = options
        self.number = next(Session._numbers)
        self.num_mutations = 0
        self.num_misses = 0  # calls whose signature had to be made
        self._virtual = dict(options.virtual)
        self._meshes: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
        self._specs: dict[Any, Spec] = {}
        self._lock = threading.RLock()
        self._tickets = itertools.count(1)
        self._fetches: dict[int, tuple[Promise[Any], Any, torch.Tensor | None, Tensor]] = {}
        self._counts: dict[int, Promise[tuple[Statistics, ...]]] = {}
        self._failures: dict[tuple[int, int], OpError] = {}
        self._unseen: dict[tuple[int, int], OpError] = {}
        self._signatures: dict[int, tuple[str, tuple[Layout, ...]]] = {}
        self._pool = SegmentPool()
        self._gone: DTorchError | None = None
        self._upload_signatures: dict[tuple[Spec, str], Signature] = {}
        self._uploading: list[tuple[int, Lease]] = []  # batch that reads it, segment
        kinds = {"cpu", *self._virtual} if options.workers == "shared" else set()
        shared = frozenset(k for k in kinds if self._virtual.get(k, k) == "cpu")
        self.thread = ControllerThread(
            Controller(self.number, shared),
            self,
            entry="dtorch.worker:main",
            worker_args={
                "virtual": self._virtual,
                "num_threads": torch.get_num_threads(),
                "rewrite": os.environ.get("DTORCH_REWRITE", ""),
            },
            listen=options.listen,
        )
        self.recorder = Recorder(self.thread, self._synchronize_op if options.sync else None)

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
                    info = MeshInfo(number, mesh.device_type, tuple(mesh.shape), tuple(mesh.devices))
                    known = self._meshes[key] = (number, self.recorder.add_mesh(info))
        return known

    def _check_devices(self, mesh: DeviceMesh) -> None:
        kind = self._virtual.get(mesh.device_type, mesh.device_type)
        if kind == "cuda":
            have = torch.cuda.device_count()
            if max(mesh.devices) >= have:
                raise MeshError(
                    f"{mesh} needs CUDA device {max(mesh.devices)}, this machine has {have} CUDA "
                    f"device{'' if have == 1 else 's'}. To develop without them: dtorch.init(virtual={{'cuda': 'cpu'}}) "
                    "or DTORCH_VIRTUAL=cuda=cpu"
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
    ) -> Spec:
        """The one Spec object of these facts."""
        key = (tuple(shape), tuple(stride), dtype, mesh, codes, is_param, requires_grad)
        found = self._specs.get(key)
        if found is None:
            number, dead = self.mesh_number(mesh)
            with self._lock:
                found = self._specs.get(key)
                if found is None:
                    found = self._specs[key] = Spec(
                        self, mesh, number, tuple(shape), tuple(stride), dtype, codes, is_param, requires_grad, dead,
                        self.recorder.wake,
                    )
        return found

    def respec(self, spec: Spec, **changes: Any) -> Spec:
        """``spec`` with some facts changed."""
        facts = {
            "shape": spec.shape, "stride": spec.stride, "dtype": spec.dtype, "mesh": spec.mesh, "codes": spec.codes,
            "is_param": spec.is_param, "requires_grad": spec.requires_grad,
        }
        return self.spec(**{**facts, **changes})

    def know_signature(self, number: int, op: str, inputs: tuple[Layout, ...]) -> None:
        """Remember what to say should a call of it fail."""
        self.num_misses += 1
        self._signatures[number] = (op, inputs)

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
            self._signatures.clear()
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
        return self._upload(spec, data, "upload")

    def upload_shards(
        self, pieces: Sequence[torch.Tensor], shape: tuple[int, ...], mesh: DeviceMesh, codes: tuple[int, ...]
    ) -> Tensor:
        """Put pieces that are already cut, one a device in row-major order."""
        spec = self.spec(shape, contiguous_stride(shape), pieces[0].dtype, mesh, codes)
        flat = [p.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for p in pieces]
        return self._upload(spec, torch.cat(flat), "upload_shards")

    def _upload(self, spec: Spec, data: torch.Tensor, kernel: str) -> Tensor:
        key = (spec, kernel)
        sig = self._upload_signatures.get(key)
        if sig is None:
            sig = self._upload_signatures[key] = self._define_upload(spec, kernel)
        size = data.numel() * data.element_size()
        blob: Blob | SharedBlob
        if size <= INLINE_BYTES:
            blob = Blob(data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if size else b"")
        else:
            lease = self._pool.lease(size)
            lease.tensor.view(data.dtype).view(data.shape).copy_(data)
            blob = lease.blob
        slot = self.recorder.upload(sig.id, blob, source(_getframe(1)))
        if isinstance(blob, SharedBlob):
            with self._lock:
                self._uploading.append((self.recorder.next_seq, lease))
        if self.recorder.is_sync:
            self.recorder.after_put()
        made = _new(Tensor)
        made._spec = spec
        made._slot = slot
        return made

    def _define_upload(self, spec: Spec, kernel: str) -> Signature:
        def build(number: int) -> Definition:
            # The number is the place of the bytes among the batch's uploads.
            return Definition(number, "dtorch.upload", kernel, [["n", 0]], {}, (), (spec.layout,))

        return self.define(build, (spec,), "dtorch.upload", ())

    def define(
        self, build: Callable[[int], Definition], specs: tuple[Spec, ...], name: str, inputs: tuple[Layout, ...]
    ) -> Signature:
        """A signature of one output, for definitions that no op of the table makes."""
        sig = Signature()
        recorder = self.recorder
        sig.id = recorder.define(build)
        sig.take, sig.put, sig.recorder = recorder.take, recorder.put, recorder
        sig.shape, sig.spec, sig.specs, sig.finish = ONE, specs[0], specs, None
        self.know_signature(sig.id, name, inputs)
        return sig

    def fetch(self, tensor: Tensor, now: bool = True) -> Promise[torch.Tensor]:
        """Ask for the full value; shared with a fetch of the same value that is under way."""
        self.check_open()
        under_way = getattr(tensor, "_fetching", None)
        if under_way is not None and under_way[0] == self.num_mutations and not under_way[1].done:
            return under_way[1]  # type: ignore[no-any-return]
        spec = tensor._spec
        shape, mesh_shape = tuple(spec.shape), tuple(spec.mesh.shape)
        devices = spec.mesh.devices
        wanted = assemble.providers(shape, spec.codes, mesh_shape, devices)

        def finish(pieces: dict[int, torch.Tensor]) -> torch.Tensor:
            return assemble.whole(shape, spec.codes, mesh_shape, devices, pieces, spec.dtype)

        promise = self._fetch(tensor, wanted, finish, now, spec.size_bytes)
        tensor._fetching = (self.num_mutations, promise)
        return promise

    def fetch_shards(self, tensor: Tensor) -> Promise[list[torch.Tensor]]:
        """Ask for every device's piece, in row-major mesh order."""
        self.check_open()
        devices = tensor._spec.mesh.devices

        def finish(pieces: dict[int, torch.Tensor]) -> list[torch.Tensor]:
            return [pieces[d] for d in devices]

        return self._fetch(tensor, devices, finish, True, 0)

    def _fetch(
        self, tensor: Tensor, devices: tuple[int, ...], finish: Callable[[dict[int, torch.Tensor]], Any], now: bool,
        size_bytes: int,
    ) -> Promise[Any]:
        spec = tensor._spec
        promise: Promise[Any] = Promise()
        ticket = next(self._tickets)
        into, layout, full = None, None, None
        pending = any(p.is_partial() for p in spec.placements)
        if size_bytes > INLINE_BYTES and not pending:
            lease = self._pool.lease(size_bytes)
            full = lease.tensor.view(spec.dtype).view(spec.shape)
            into, layout = lease.blob, spec.layout
        fetch = Fetch(ticket, tensor._slot, spec.layout.mesh, tuple(devices), into, layout)
        self._fetches[ticket] = (promise, finish, full, tensor)
        self.recorder.fetch(fetch, now)
        return promise

    # ---- the controller's thread

    def finished(self, seq: int) -> None:
        self.recorder.finished(seq)
        if self._uploading:
            with self._lock:
                self._uploading = [(at, lease) for at, lease in self._uploading if at > seq]

    def settled(self, settled: Settled) -> None:
        promise, finish, full, _ = self._fetches.pop(settled.ticket)
        if settled.error is not None:
            promise.set_exception(self._error_of(settled.error))
            return
        try:
            if full is not None:
                promise.set_result(full)
                return
            pieces: dict[int, torch.Tensor] = {}
            for value in settled.values:
                for piece in value.pieces:
                    dtype = dtype_of(piece.dtype)
                    data = bytearray(piece.data or b"")
                    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                    pieces[piece.device] = flat.reshape(piece.shape)
            promise.set_result(finish(pieces))
        except Exception as error:
            promise.set_exception(error)

    def counted(self, counted: Counted) -> None:
        self._counts.pop(counted.ticket).set_result(counted.statistics)

    def failed(self, failed: Failed) -> None:
        failure = failed.failure
        at = self.recorder.source(failure.seq, failure.index)
        signature = self.recorder.signature_of(failure.seq, failure.index)
        name, inputs = self._signatures.get(signature, ("dtorch", ())) if signature is not None else ("dtorch", ())
        location = f"{at[0]}:{at[1]}" if at is not None else ""
        line = linecache.getline(at[0], at[1]).strip() if at is not None else ""
        described = [self._describe(layout) for layout in inputs]
        text, kind = failure.text, failure.kind
        if kind == "RuntimeError" and "not enough memory" in text:
            kind = "OutOfMemoryError"
        facts = (
            name, text, kind, location, line, described, f"worker {failed.worker}", failure.device, failure.trace,
        )
        error = op_error(facts, {"OutOfMemoryError": torch.OutOfMemoryError})
        with self._lock:
            if len(self._failures) > 4096:
                del self._failures[next(iter(self._failures))]
            self._failures[failed.worker, failure.error] = error
            self._unseen[failed.worker, failure.error] = error

    def _describe(self, layout: Layout) -> str:
        placed = ", ".join(str(from_code(c)) for c in layout.codes)
        return f"{layout.dtype}{list(layout.shape)} on [{placed}]"

    def _error_of(self, which: tuple[int, int]) -> BaseException:
        with self._lock:
            if which[1] < 0 and self._failures:
                which = next(reversed(self._failures))
            self._unseen.pop(which, None)
            error = self._failures.get(which)
        if error is None:
            return OpError("dtorch", "the value depends on an op that failed")
        made = op_error(error.args, {"OutOfMemoryError": torch.OutOfMemoryError})
        if error.trace and hasattr(made, "add_note"):
            made.add_note(f"Traceback on {error.worker}:\n{error.trace.rstrip()}")
        return made

    def lost(self, worker: int, reason: str) -> None:
        self._end(WorkerLostError(f"worker {worker}", reason))

    def tick(self) -> None:
        self.recorder.tick()

    # ---- waiting

    def synchronize(self) -> Promise[None]:
        """Settled when all work recorded so far is done; fails with the first error that nobody has seen."""
        self.check_open()
        done: Promise[None] = Promise()
        answer = self._ask(reset_peak=False)

        def finish() -> None:
            error = answer.exception(0)
            with self._lock:
                unseen = next(iter(self._unseen), None)
            if error is None and unseen is not None:
                error = self._error_of(unseen)
                with self._lock:
                    self._unseen.clear()
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(None)

        answer.add_callback(finish)
        return done

    def ask_statistics(self, reset_peak: bool) -> Promise[tuple[Statistics, ...]]:
        """Every worker's statistics, after all work recorded so far."""
        self.check_open()
        return self._ask(reset_peak)

    def _ask(self, reset_peak: bool) -> Promise[tuple[Statistics, ...]]:
        self.recorder.flush()
        promise: Promise[tuple[Statistics, ...]] = Promise()
        ticket = next(self._tickets)
        self._counts[ticket] = promise
        self.thread.post(Asked(ticket, reset_peak))
        return promise

    def _synchronize_op(self) -> None:
        """DTORCH_SYNC=1: run what was just recorded, and raise its error here."""
        self.recorder.flush()
        if not self.thread.is_own_thread():
            self.synchronize().result()

    def seed(self, seed: int) -> None:
        """Seed the generators of all workers, in program order."""
        self.check_open()
        self.recorder.flush()
        self.thread.post(Sent(Seed(self.number, seed)))

    # ---- the end

    def check_open(self) -> None:
        if self.recorder.closed is not None:
            raise self._gone or SessionClosedError(self.recorder.closed)

    @property
    def is_open(self) -> bool:
        return self.recorder.closed is None

    def close(self) -> None:
        """Finish what is queued, end the workers, free everything. Tensors of the session are dead afterwards."""
        if self.is_open and not self.thread.is_own_thread():
            self.recorder.flush()
            self._end(SessionClosedError("the session of this tensor was shut down"))
        self.thread.close()
        for error in list(self._unseen.values()):
            warnings.warn(f"an op failed and nobody awaited it: {error}", RuntimeWarning, stacklevel=2)
        self._unseen.clear()

    def _end(self, error: DTorchError) -> None:
        """No more work: whoever waits gets ``error``."""
        from dtorch.ops import table

        self._gone = error
        self.recorder.close(str(error))
        table.clear_caches()
        for promise, *_ in list(self._fetches.values()):
            promise.set_exception(error)
        self._fetches.clear()
        for waiting in list(self._counts.values()):
            waiting.set_exception(error)
        self._counts.clear()


# ---- the default session

_session: Session | None = None
_guard = threading.RLock()


def current_session() -> Session:
    """The session in use; started now if there is none."""
    session = _session
    if session is not None and session.recorder.closed is None:
        return session
    return init()


def init(
    workers: str | None = None,
    virtual: dict[str, str] | None = None,
    listen: str | None = None,
) -> Session:
    """Start the runtime, or start it afresh with other options. Optional: defaults start on first use.

    Args:
        workers: "shared" (one process hosts all CPU devices; default) or "per-device" (one process each, gloo between
            them). CUDA devices always have a process each. DTORCH_WORKERS sets the default.
        virtual: device kinds and what stands for them, such as ``{"cuda": "cpu"}``. DTORCH_VIRTUAL=cuda=cpu sets the
            default.
        listen: "host" or "host:port" makes the control plane listen on TCP instead of a private unix socket.

    Raises:
        ValueError: an unknown option.
    """
    global _session
    workers = workers or os.environ.get("DTORCH_WORKERS") or "shared"
    if workers not in ("shared", "per-device"):
        raise ValueError(f"workers must be 'shared' or 'per-device', not {workers!r}")
    if virtual is None:
        text = os.environ.get("DTORCH_VIRTUAL", "")
        virtual = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    for kind, other in virtual.items():
        if other not in ("cpu", "cuda"):
            raise ValueError(f"virtual={{{kind!r}: {other!r}}}: only 'cpu' and 'cuda' can stand for a device kind")
    sync = os.environ.get("DTORCH_SYNC", "") not in ("", "0")
    options = Options(workers, tuple(sorted(virtual.items())), listen, sync)
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
