"""What recorded calls would move between devices, and hold on them: kernels run on the meta device, where nothing is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import torch

from dtorch.ops.table import OPS, resolve
from dtorch.runtime import kernels
from dtorch.runtime.binding import Binder
from dtorch.runtime.comm import CHUNKED_BYTES, Exchange, Gather, Place, Reduce, Request, within
from dtorch.runtime.layout import coords, is_partial, is_shard, local_shape
from dtorch.runtime.plan import Step
from dtorch.runtime.rewrite.traits import writes_into
from dtorch.runtime.safetensors import itemsize
from dtorch.runtime.tracing import sent_bytes
from dtorch.transport.messages import Definition, Layout, MeshInfo

_VIEWS = frozenset({"view", "expand", "alias"})


@dataclass(frozen=True)
class Traffic:
    """What one call moves.

    Attributes:
        kind: such as "all-reduce"; several are joined by "+".
        bytes_per_device: that the busiest device sends; None where it depends on values.
    """

    kind: str
    bytes_per_device: int | None


class Meter:
    """Finds the traffic of calls, once a signature.

    Args:
        meshes: number -> mesh.
    """

    def __init__(self, meshes: Mapping[int, MeshInfo]) -> None:
        self._binder = Binder(0, resolve, lambda place: torch.device("meta"), _no_group)
        for mesh in meshes.values():
            self._binder.add_mesh(msgspec.structs.replace(mesh, workers=(0,) * len(mesh.devices)))
        self._known: dict[Any, Traffic | None] = {}

    def traffic(self, step: Step) -> Traffic | None:
        """What a call moves; None when nothing crosses devices."""
        key = (step.definition.sig, step.numbers)
        if key not in self._known:
            self._known[key] = self._measure(step)
        return self._known[key]

    def _measure(self, step: Step) -> Traffic | None:
        definition = step.definition
        if not kernels.find(definition.kernel).communicates:
            return None
        try:
            kinds, sent = self._run(step)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
            return Traffic("depends on values", None)
        most = max(sent.values(), default=0)
        if not most:
            return None
        name = _move(definition.inputs[0], definition.outputs[0]) if definition.kernel == "redistribute" else ""
        return Traffic(name or "+".join(kinds), most)

    def _run(self, step: Step) -> tuple[list[str], dict[Place, int]]:
        binder, definition = self._binder, step.definition
        bound = binder.bind(definition)
        assert bound is not None
        if bound.comm is None:  # each device finds all it needs on itself
            return [], {}
        assert bound.members is not None
        generators: dict[Place, Any] = {}
        with torch.no_grad():
            for index, fn in bound.functions.items():
                place = binder.places[index]
                pieces = [t for layout in definition.inputs if (t := self._piece(layout, place)) is not None]
                generators[place] = fn(*pieces, *step.numbers)
            kinds: dict[str, None] = {}
            sent: dict[Place, int] = dict.fromkeys(generators, 0)
            answers: dict[Place, Any] = dict.fromkeys(generators)
            while generators:
                requests: dict[Place, Request] = {}
                for place in list(generators):
                    try:
                        requests[place] = generators[place].send(answers[place])
                    except StopIteration:
                        del generators[place]
                for place, request in requests.items():
                    count = _sent(request, bound.members.num_along(getattr(request, "axes", ())))
                    sent[place] += count
                    if count:
                        kinds[_name(request, len(sent))] = None
                if requests:
                    answers = within(bound.comm.perform(bound.members, requests, True))
        return list(kinds), sent

    def _piece(self, layout: Layout, place: Place) -> torch.Tensor | None:
        info = self._binder.meshes[layout.mesh]
        if place[0] != info.kind or place[1] not in info.devices:
            return None
        coord = coords(tuple(info.shape))[list(info.devices).index(place[1])]
        shape = local_shape(tuple(layout.shape), tuple(layout.codes), tuple(info.shape), coord)
        return torch.empty(shape, dtype=getattr(torch, layout.dtype), device="meta")


_NAMES: dict[type, str] = {Exchange: "all-to-all", Gather: "all-gather", Reduce: "all-reduce"}


def _name(request: Request, num_devices: int) -> str:
    """What a request is usually called."""
    is_ring = isinstance(request, Exchange) and num_devices > 2 and len({place for place, _ in request.sends}) == 1
    return "send" if is_ring else _NAMES[type(request)]


def _no_group(*facts: Any) -> Any:
    raise AssertionError("one process hosts all devices here")


def _sent(request: Request, num_members: int) -> int:
    """Bytes that a device sends, as ``comm.Comm`` performs the request."""
    if isinstance(request, Reduce) and request.tensor is not None and num_members > 2:
        size = request.tensor.nbytes
        if size > CHUNKED_BYTES:
            return 2 * (num_members - 1) * size // num_members
    return sent_bytes(request, num_members)


def _move(source: Layout, target: Layout) -> str:
    """The usual name of a redistribution; "" where it has none."""
    if source.mesh != target.mesh:
        return "send"
    names: dict[str, None] = {}
    for before, after in zip(source.codes, target.codes, strict=True):
        if before == after or before == -1:
            continue
        if is_partial(before):
            names["reduce-scatter" if is_shard(after) else "all-reduce"] = None
        else:
            names["all-to-all" if is_shard(after) else "all-gather"] = None
    return "+".join(names)


# ---- memory


@lru_cache(maxsize=4096)
def piece_bytes(shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Bytes that each device of a mesh holds of a tensor, row-major."""
    size = itemsize(dtype)
    return tuple(math.prod(local_shape(shape, codes, mesh_shape, c)) * size for c in coords(mesh_shape))


def held(layout: Layout, mesh: MeshInfo) -> dict[Place, int]:
    """Place -> bytes of the piece that it holds."""
    sizes = piece_bytes(tuple(layout.shape), tuple(layout.codes), tuple(mesh.shape), layout.dtype)
    return dict(zip([(mesh.kind, device) for device in mesh.devices], sizes, strict=True))


def peak_bytes(
    steps: Sequence[tuple[int, Step]], deaths: Iterable[tuple[int, int]], meshes: Mapping[int, MeshInfo]
) -> dict[Place, int]:
    """Place -> the most bytes that results of the calls hold there at once. Views hold what they look at; what dies is held
    until its last use, as workers do it within a batch.

    Args:
        steps: (position, call), in order.
        deaths: (position, slot): the slot's tensor died before the call of that position.
    """
    changes: dict[int, list[tuple[Layout, int]]] = {}  # position -> what begins (1) or ends (-1) to be held before that call
    for memory in _memories(steps, deaths):
        changes.setdefault(memory.begin, []).append((memory.layout, 1))
        if memory.end is not None:
            changes.setdefault(memory.end, []).append((memory.layout, -1))
    now: dict[Place, int] = {}
    most: dict[Place, int] = {}
    for position in sorted(changes):
        for layout, sign in sorted(changes[position], key=lambda change: change[1]):  # ends before begins
            for place, size in held(layout, meshes[layout.mesh]).items():
                now[place] = now.get(place, 0) + sign * size
        for place, size in now.items():
            most[place] = max(most.get(place, 0), size)
    return most


@dataclass
class _Memory:
    """What one call made, held before the calls from ``begin`` on and up to ``end`` (None: for ever)."""

    layout: Layout
    begin: int
    end: int | None = None
    slots: int = 1  # that still use it
    is_viewed: bool = False


def _memories(steps: Sequence[tuple[int, Step]], deaths: Iterable[tuple[int, int]]) -> list[_Memory]:
    dying = sorted(deaths, key=lambda death: death[0])
    at = 0
    made: list[_Memory] = []
    owner: dict[int, _Memory] = {}  # slot -> memory
    used: dict[int, int] = {}  # id of a memory -> its last use
    takers: list[tuple[_Memory, list[_Memory]]] = []  # results of elementwise calls, and their inputs

    def drop(slot: int) -> None:
        memory = owner.pop(slot, None)
        if memory is not None:
            memory.slots -= 1
            if not memory.slots:
                memory.end = used[id(memory)] + 1

    for position, step in steps:
        while at < len(dying) and dying[at][0] <= position:
            drop(dying[at][1])
            at += 1
        for slot in step.ins:
            if slot in owner:
                used[id(owner[slot])] = position
        base = owner.get(step.ins[0]) if step.ins and is_view(step.definition) else None
        for slot, layout in zip(step.outs, step.definition.outputs, strict=False):  # in place there are none
            drop(slot)
            if base is not None:
                owner[slot] = base
                base.slots += 1
                base.is_viewed = True
            elif not (step.ins and is_view(step.definition)):  # a view of what was there before costs nothing
                owner[slot] = _Memory(layout, position)
                used[id(owner[slot])] = position
                made.append(owner[slot])
                if writes_into(step):
                    takers.append((owner[slot], [owner[i] for i in step.ins if i in owner]))
    for _, slot in dying[at:]:
        drop(slot)
    for memory, given in takers:
        if any(g.end == memory.begin + 1 and g.layout == memory.layout and not g.is_viewed for g in given):
            memory.begin += 1  # it takes the memory of an input that dies, as rewrite.reuse_memory has it
    return made


def is_view(definition: Definition) -> bool:
    """Whether the results share memory with input 0."""
    if definition.kernel in _VIEWS:
        return not definition.params.get("copy")
    op = OPS.get(definition.op)
    return definition.kernel == "local" and op is not None and op.is_view and bool(definition.inputs)
