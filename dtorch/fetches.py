"""Values on their way from the workers: asked for, received in pieces, handed over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtorch import assemble
from dtorch.failures import Failures
from dtorch.runtime.controller import Settled
from dtorch.runtime.layout import is_partial
from dtorch.runtime.promise import Promise, Reading
from dtorch.runtime.recorder import Recorder, again
from dtorch.runtime.template import dtype_of
from dtorch.spec import Spec
from dtorch.tensor import Tensor
from dtorch.transport.bulk import SegmentPool
from dtorch.transport.errors import DTorchError
from dtorch.transport.messages import Fetch, Piece

if TYPE_CHECKING:
    from dtorch.cluster.buffers import RemotePool

INLINE_BYTES = 64 * 1024
"""Tensors up to this size travel inside messages; larger ones through shared memory."""

_ALIGN = 64

_arrived: Promise[Any] = Promise()
_arrived.set_result(None)
"""Stands in a tensor for its last fetch once the value has been handed over, so that the tensor does not hold it."""


class _Fetching(NamedTuple):
    """A fetch under way.

    Attributes:
        tensor: kept, so that its slot is not freed before the workers have read it.
        full: where the workers write the whole value, when it is large.
        parts: else where they write each device's piece, when these are large.
        rows: the value's elements are those of these devices' pieces, one behind the other.
    """

    promise: Promise[Any]
    finish: Callable[[dict[int, torch.Tensor]], Any]
    tensor: Tensor
    full: torch.Tensor | None
    parts: dict[int, torch.Tensor] | None
    rows: tuple[int, ...] | None


class Fetches:
    """Fetches under way of one session.

    Args:
        recorder: where a request joins the program order.
        pool: memory for large values, shared with the workers or filled by streams.
        failures: where the errors of poisoned values are found.
        reading: what a thread does while it blocks for a value.
    """

    def __init__(
        self, recorder: Recorder, pool: SegmentPool | RemotePool, failures: Failures, reading: Reading | None = None
    ) -> None:
        self._reading = reading
        self._in_memory = isinstance(pool, SegmentPool)
        self._recorder = recorder
        self._pool = pool
        self._failures = failures
        self._tickets = itertools.count(1)
        self._under_way: dict[int, _Fetching] = {}

    def value(self, tensor: Tensor, now: bool, mutations: int) -> Promise[torch.Tensor]:
        """Ask for the full value; shared with a fetch of the same value that is under way.

        Args:
            now: send at once, not with the loop's next tick.
            mutations: how many ops in place the session has recorded: what was asked for before another is stale.
        """
        under_way = getattr(tensor, "_fetching", None)
        if under_way is not None and under_way[0] == mutations and not under_way[1].done:
            return under_way[1]  # type: ignore[no-any-return]
        spec = tensor._spec
        mesh = spec.mesh
        facts = (spec.layout.shape, spec.codes, mesh.shape, mesh.devices)

        def finish(pieces: dict[int, torch.Tensor]) -> torch.Tensor:
            return assemble.whole(*facts, pieces, spec.dtype)

        direct = not any(map(is_partial, spec.codes))
        return self._start(tensor, assemble.providers(*facts), finish, now, direct, mutations, assemble.rows(*facts))

    def shards(self, tensor: Tensor) -> Promise[list[torch.Tensor]]:
        """Ask for every device's piece, in row-major mesh order."""
        devices = tensor._spec.mesh.devices

        def finish(pieces: dict[int, torch.Tensor]) -> list[torch.Tensor]:
            return [pieces[d] for d in devices]

        return self._start(tensor, devices, finish, True, False, None)

    def _start(
        self, tensor: Tensor, devices: tuple[int, ...], finish: Callable[[dict[int, torch.Tensor]], Any], now: bool,
        direct: bool, mutations: int | None, rows: tuple[int, ...] | None = None,
    ) -> Promise[Any]:
        """Ask for the pieces of ``devices``; the promise gets what ``finish`` makes of them.

        Args:
            direct: the pieces make the whole by just being laid side by side.
            mutations: given when this is a fetch of the value, which others may share while it is under way.
            rows: see ``_Fetching``.
        """
        spec = tensor._spec
        promise: Promise[Any] = Promise(self._reading)
        ticket = next(self._tickets)
        into, layout, full, parts = None, None, None, None
        offsets: tuple[int, ...] = ()
        try:
            if self._in_memory and direct and spec.size_bytes > INLINE_BYTES:
                lease = self._pool.lease(spec.size_bytes)
                full = lease.tensor.view(spec.dtype).view(spec.shape)
                into, layout = lease.blob, spec.layout
            elif spec.size_bytes > INLINE_BYTES:
                shapes = _piece_shapes(spec, devices)
                sizes = [math.prod(shape) * spec.dtype.itemsize for shape in shapes]
                steps = [-(-size // _ALIGN) * _ALIGN for size in sizes]
                offsets = tuple(itertools.accumulate(steps, initial=0))[:-1]
                lease = self._pool.lease(sum(steps))
                into = lease.blob
                parts = {
                    device: lease.tensor[at : at + size].view(spec.dtype).view(shape)
                    for device, shape, at, size in zip(devices, shapes, offsets, sizes, strict=True)
                }
        except (OSError, OverflowError, MemoryError) as error:
            # Nobody could make the value either, most likely: ask for no pieces, only for what became of it.
            devices, finish, rows = (), _no_room(spec, error), None
        fetch = Fetch(ticket, tensor._slot, spec.layout.mesh, tuple(devices), into, layout, offsets)
        self._under_way[ticket] = _Fetching(promise, finish, tensor, full, parts, rows)
        if mutations is not None:
            tensor._fetching = (mutations, promise)
        try:
            self._recorder.fetch(fetch, now)
        except DTorchError as error:
            self._under_way.pop(ticket, None)
            promise.set_exception(error)
            raise
        return promise

    def settled(self, settled: Settled) -> None:
        """All parts are here. Called in the controller's thread."""
        fetching = self._under_way.pop(settled.ticket, None)
        if fetching is None:  # the session is over
            return
        promise, tensor = fetching.promise, fetching.tensor
        under_way = getattr(tensor, "_fetching", None)
        if under_way is not None and under_way[1] is promise:
            tensor._fetching = (under_way[0], _arrived)
        if settled.error is not None:
            error, call = self._failures.error_of(settled.error)
            promise.set_exception(error, lambda: self._failures.see(call))
            return
        try:
            if fetching.full is not None:
                promise.set_result(fetching.full)
            elif fetching.parts is not None:
                promise.set_result(fetching.finish(fetching.parts))
            else:
                found = {piece.device: piece for value in settled.values for piece in value.pieces}
                if fetching.rows is not None:
                    promise.set_result(_tensor_of([found[d] for d in fetching.rows], tensor._spec.layout.shape))
                else:
                    promise.set_result(fetching.finish({d: _tensor_of([piece], piece.shape) for d, piece in found.items()}))
        except Exception as error:
            promise.set_exception(error)

    def end(self, error: DTorchError) -> None:
        """The session is over: whoever waits gets ``error``."""
        while self._under_way:
            _, fetching = self._under_way.popitem()
            fetching.promise.set_exception(again(error))


def _piece_shapes(spec: Spec, devices: Sequence[int]) -> list[tuple[int, ...]]:
    shapes = assemble.shard_shapes(tuple(spec.shape), spec.codes, tuple(spec.mesh.shape))
    of = dict(zip(spec.mesh.devices, shapes, strict=True))
    return [of[device] for device in devices]


def _tensor_of(pieces: Sequence[Piece], shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of this shape whose elements are those of the pieces, one behind the other."""
    dtype = dtype_of(pieces[0].dtype)
    data = bytearray().join([piece.data or b"" for piece in pieces])
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _no_room(spec: Spec, error: Exception) -> Callable[[dict[int, torch.Tensor]], Any]:
    text = f"no memory in this process for the value, {spec}, {spec.size_bytes} bytes: {error}"

    def finish(_: dict[int, torch.Tensor]) -> Any:
        raise torch.OutOfMemoryError(text)

    return finish
