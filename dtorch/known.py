"""Values that the client could work out by itself: those of small tensors that come from its own data alone, such as a check
of a mask that it was given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from dtorch import assemble
from dtorch.forecast.traffic import is_view
from dtorch.ops.table import resolve
from dtorch.runtime.arrivals import Arrival, InMessage
from dtorch.runtime.executor import Executor
from dtorch.runtime.layout import pieces
from dtorch.runtime.outgoing import Outgoing
from dtorch.runtime.template import dtype_of
from dtorch.spec import Spec
from dtorch.transport.messages import Blob, Definition, MeshInfo

SMALL_BYTES = 64 * 1024
"""Larger tensors are not worked out."""
_UNKNOWN = frozenset({"random", "read", "write", "sync_file", "program", "upload_shards"})

Picked = list[tuple[tuple[Any, ...], tuple[Any, ...]]]


def known_value(
    spec: Spec, slot: int, batches: Sequence[Outgoing], definitions: Mapping[int, Definition], meshes: Mapping[int, MeshInfo]
) -> torch.Tensor | None:
    """The value in ``slot`` after all batches; None where it depends on what the client does not know, or is large.

    The calls that lead to it run here, on the CPU, as a worker that hosts all devices would run them.
    """
    picked = _slice(slot, batches, definitions, meshes)
    if picked is None:
        return None
    failures: list[Any] = []
    executor = Executor(0, 0, resolve, lambda place: torch.device("cpu"), _no_group, failures.append)
    for mesh in meshes.values():
        executor.add_mesh(msgspec.structs.replace(mesh, workers=(0,) * len(mesh.devices)))
    calls: list[tuple[Any, ...]] = []
    uploads: list[Arrival] = []
    for call, blobs in picked:
        executor.add_definition(definitions[call[0]])
        if blobs:
            call = (*call[:-1], len(uploads))
            uploads += (InMessage(blob.data) for blob in blobs)
        calls.append(call)
    with torch.no_grad():
        executor.run(1, msgspec.msgpack.encode((calls, [])), uploads)
    if failures:
        return None
    devices, mesh_shape = spec.mesh.devices, tuple(spec.mesh.shape)
    wanted = assemble.providers(tuple(spec.shape), spec.codes, mesh_shape, devices)
    held = {device: executor.held(slot, (spec.mesh.device_type, device)) for device in wanted}
    return assemble.whole(tuple(spec.shape), spec.codes, mesh_shape, devices, held, spec.dtype)


def _slice(
    slot: int, batches: Sequence[Outgoing], definitions: Mapping[int, Definition], meshes: Mapping[int, MeshInfo]
) -> Picked | None:
    """The calls on which the value in ``slot`` depends, in order; None where it is not known or not small."""
    steps = list(_steps(batches, definitions, meshes))
    memory, last = _memory(steps)
    needed = {slot}
    touched = {last.get(slot, -1)}  # memory of what is needed, and of what was
    picked: Picked = []
    for (call, blobs, definition, outs, ins), (made, used) in zip(reversed(steps), reversed(memory), strict=True):
        if not needed:
            break
        if definition.writes:
            if touched.intersection(used[w] for w in definition.writes):
                return None
            continue
        if needed.isdisjoint(outs):
            continue
        is_small = all(
            math.prod(x.shape) * dtype_of(x.dtype).itemsize <= SMALL_BYTES for x in (*definition.inputs, *definition.outputs)
        )
        if not is_small or definition.kernel in _UNKNOWN or not all(isinstance(b, Blob) for b in blobs):
            return None
        needed.difference_update(outs)
        needed.update(ins)
        touched.update(made, used)
        picked.append((call, blobs))
    return None if needed else picked[::-1]


def _steps(
    batches: Sequence[Outgoing], definitions: Mapping[int, Definition], meshes: Mapping[int, MeshInfo]
) -> Iterator[tuple[Any, ...]]:
    """(call, its bytes if it is an upload, definition, output slots, input slots) of every call."""
    for batch in batches:
        for call in batch.calls:
            definition = definitions[call[0]]
            num_outs = 0 if definition.writes else len(definition.outputs)
            stop = 1 + num_outs + len(definition.inputs)
            blobs: tuple[Any, ...] = ()
            if definition.kernel == "upload":
                layout = definition.outputs[0]
                boxes, _ = pieces(tuple(layout.shape), tuple(layout.codes), tuple(meshes[layout.mesh].shape))
                blobs = batch.uploads[call[-1] : call[-1] + len(boxes)]
            yield call, blobs, definition, call[1 : 1 + num_outs], call[1 + num_outs : stop]


def _memory(steps: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[list[int], list[int]]], dict[int, int]]:
    """Which memory the outputs and inputs of each call lie in, and each slot in the end: views share that of what they look at.
    """
    numbers = itertools.count()
    at: dict[int, int] = {}
    found = []
    for _, _, definition, outs, ins in steps:
        used = [at.setdefault(slot, next(numbers)) for slot in ins]
        same = ins and is_view(definition)
        for slot in outs:
            at[slot] = used[0] if same else next(numbers)
        found.append(([at[slot] for slot in outs], used))
    return found, at


def _no_group(*facts: Any) -> Any:
    raise AssertionError("one process hosts all devices here")
