"""Plan a redistribution: which device sends which part of a tensor to which device.

Any two layouts are allowed: on one mesh, on meshes that overlap, on disjoint meshes, on different kinds of device.
In general

1. source axes with pending reductions are reduced (``Steps.reduce_axes``), which leaves the layout ``Steps.middle``;
2. boxes move from ``middle`` to ``Steps.target`` (``plan_boxes``);
3. destination axes that are to hold pending reductions are filled (``Steps.fill_axes``).

Planning is pure: every device that plans the same redistribution gets the same plan, so nothing has to be negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from dtorch.transport.messages import Definition, Layout, MeshInfo

from .layout import (
    REPLICATE,
    Box,
    box,
    coords,
    intersect,
    is_partial,
    is_shard,
    numel,
    partial_op,
    shard_dim,
)

Place = tuple[str, int]
"""A device, whatever mesh it is seen through: (kind, id)."""

AxisOp = tuple[int, str]
"""A mesh axis and the name of a reduction along it."""


@dataclass(frozen=True)
class Placed:
    """A global shape laid out on a mesh.

    Attributes:
        kind: device type, ``"cpu"`` or ``"cuda"``.
        devices: device ids of the mesh, row-major, all different.
        mesh_shape: devices along each mesh axis.
        shape: global shape.
        codes: one placement code a mesh axis, see ``layout.py``.
    """

    kind: str
    devices: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    codes: tuple[int, ...]

    def same_mesh(self, other: Placed) -> bool:
        return (self.kind, self.devices, self.mesh_shape) == (other.kind, other.devices, other.mesh_shape)

    def places(self) -> list[Place]:
        """The devices, row-major."""
        return [(self.kind, device) for device in self.devices]

    def boxes(self) -> list[Box]:
        """What each device holds, row-major."""
        return [box(self.shape, self.codes, self.mesh_shape, coord) for coord in coords(self.mesh_shape)]

    def with_codes(self, codes: tuple[int, ...]) -> Placed:
        return self if codes == self.codes else replace(self, codes=codes)


@dataclass(frozen=True)
class Transfer:
    """One box that goes from one device to another, in global coordinates."""

    src: Place
    dst: Place
    box: Box


@dataclass(frozen=True)
class DeviceMoves:
    """What one device has to do.

    ``keep`` and the boxes of ``receives`` tile ``target`` exactly once. The k-th box that A sends to B is the k-th box
    that B receives from A.

    Attributes:
        source: box that the device holds before, None when it is not in the source mesh.
        target: box that it holds after, None when it is not in the destination mesh.
        keep: box to copy from its own old piece, None when there is none.
        sends: (destination, box) in the plan's order; never to itself.
        receives: (source, box) in the plan's order; never from itself.
    """

    source: Box | None = None
    target: Box | None = None
    keep: Box | None = None
    sends: tuple[tuple[Place, Box], ...] = ()
    receives: tuple[tuple[Place, Box], ...] = ()

    @property
    def is_noop(self) -> bool:
        """The old piece is the new piece, and nobody else wants any of it."""
        return not self.sends and not self.receives and self.source == self.target


_NOTHING = DeviceMoves()


@dataclass(frozen=True)
class Moves:
    """A plan for all devices of two meshes.

    Attributes:
        transfers: every transfer between two different devices, in one order for all. A device that performs its own
            transfers (sends and receives alike) in this order can not deadlock, even if each of them blocks.
        devices: what each device of either mesh does.
        elements_between: number of elements that cross devices.
    """

    transfers: tuple[Transfer, ...]
    devices: dict[Place, DeviceMoves] = field(hash=False)
    elements_between: int

    def device(self, place: Place) -> DeviceMoves:
        return self.devices.get(place, _NOTHING)

    def sends(self, place: Place) -> list[tuple[Place, Box]]:
        return list(self.device(place).sends)

    def receives(self, place: Place) -> list[tuple[Place, Box]]:
        return list(self.device(place).receives)

    def keep(self, place: Place) -> Box | None:
        return self.device(place).keep

    def bytes_between(self, itemsize: int) -> int:
        """Bytes that cross devices, for elements of ``itemsize`` bytes."""
        return self.elements_between * itemsize

    @property
    def is_local(self) -> bool:
        """No transfer between different devices: each finds all it needs on itself."""
        return not self.transfers

    @property
    def is_noop(self) -> bool:
        """Every device already holds its destination piece, and the meshes have the same devices."""
        return all(device.is_noop for device in self.devices.values())


@dataclass(frozen=True)
class Steps:
    """How a redistribution is done. Layouts in here are canonical.

    Attributes:
        reduce_axes: source axes to reduce first, in this order (left to right).
        scatter: (axis, dim) when one reduce-scatter along that axis does everything; then nothing else need be done and
            the result is laid out as the destination. ``reduce_axes`` then holds that one axis and its reduction, so a
            caller that ignores this field is right too. Pieces follow ``layout.box``, so they may be uneven or empty.
        middle: the source after the reduction: reduced axes are replicated, kept partial axes are still partial.
        target: the destination before the filling: filled axes are replicated.
        fill_axes: destination axes that become partial, in the order of filling (right to left, the reverse of the
            order in which they will be reduced one day). For sum and product the coordinate 0 of the axis keeps the
            value and the others take the neutral element; for avg, max and min every coordinate keeps the value.
    """

    reduce_axes: tuple[AxisOp, ...]
    scatter: tuple[int, int] | None
    middle: Placed
    target: Placed
    fill_axes: tuple[AxisOp, ...]


@lru_cache(maxsize=4096)
def canonical(placed: Placed) -> Placed:
    """The same layout with mesh axes of size 1 replicated, whatever their code: one device holds everything there."""
    return placed.with_codes(
        tuple(
            code if num > 1 else REPLICATE for code, num in zip(placed.codes, placed.mesh_shape, strict=True)
        )
    )


@lru_cache(maxsize=4096)
def steps(src: Placed, dst: Placed) -> Steps:
    """Say how to bring a tensor from ``src`` to ``dst``.

    A partial axis is *kept* when both layouts are on the same mesh and have the same reduction pending there: each
    coordinate of that axis then redistributes its own summand. Unless the pending reductions commute (all of them
    sums and averages, or all alike), an axis may be kept only if all are, because reducing one before another would
    change the value.
    """
    assert src.shape == dst.shape, (src.shape, dst.shape)
    src, dst = canonical(src), canonical(dst)
    before = {axis: code for axis, code in enumerate(src.codes) if is_partial(code)}
    after = {axis: code for axis, code in enumerate(dst.codes) if is_partial(code)}
    kept: set[int] = set()
    if src.same_mesh(dst) and (before == after or _commute({*before.values(), *after.values()})):
        kept = {axis for axis, code in before.items() if after.get(axis) == code}
    reduce_axes = tuple((axis, partial_op(code)) for axis, code in before.items() if axis not in kept)
    fill_axes = tuple((axis, partial_op(code)) for axis, code in reversed(after.items()) if axis not in kept)
    return Steps(
        reduce_axes=reduce_axes,
        scatter=_scatter(src, dst) if len(reduce_axes) == 1 and not fill_axes else None,
        middle=_replicated(src, reduce_axes),
        target=_replicated(dst, fill_axes),
        fill_axes=fill_axes,
    )


def _commute(codes: set[int]) -> bool:
    return len(codes) <= 1 or {partial_op(code) for code in codes} <= {"sum", "avg"}


def _replicated(placed: Placed, axes: tuple[AxisOp, ...]) -> Placed:
    gone = {axis for axis, _ in axes}
    return placed.with_codes(tuple(REPLICATE if axis in gone else code for axis, code in enumerate(placed.codes)))


def _scatter(src: Placed, dst: Placed) -> tuple[int, int] | None:
    if not src.same_mesh(dst):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(src.codes, dst.codes, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    axis = differing[0]
    if not is_partial(src.codes[axis]) or not is_shard(dst.codes[axis]):
        return None
    dim = shard_dim(dst.codes[axis])
    others = (code for other, code in enumerate(dst.codes) if other != axis)
    return None if any(is_shard(code) and shard_dim(code) == dim for code in others) else (axis, dim)


@lru_cache(maxsize=1024)
def plan_boxes(src: Placed, dst: Placed) -> Moves:
    """Plan the transfers that turn ``src`` into ``dst``.

    Each destination box is tiled exactly once; empty boxes are skipped. A device uses its own data where it has it.
    Otherwise the sender is, among the replicas, the one that has the least to send so far (the first in mesh order
    when equal).

    Partial axes must be the same ones, with the same reductions, on the same mesh (``Steps.middle`` and
    ``Steps.target`` are such a pair); then boxes move only between devices that share the coordinates on those axes.
    """
    assert src.shape == dst.shape, (src.shape, dst.shape)
    src, dst = canonical(src), canonical(dst)
    kept = tuple(axis for axis, code in enumerate(src.codes) if is_partial(code))
    if kept or any(map(is_partial, dst.codes)):
        assert src.same_mesh(dst), "pending reductions can not move to another mesh: reduce them first"
        assert all(
            a == b for a, b in zip(src.codes, dst.codes, strict=True) if is_partial(a) or is_partial(b)
        ), "pending reductions differ: reduce before the moves, fill after them"

    return _plan(src, dst.places(), coords(dst.mesh_shape), dst.boxes(), kept)


@lru_cache(maxsize=1024)
def plan_reads(src: Placed, wanted: tuple[Box, ...]) -> Moves:
    """Plan the transfers after which each device of the mesh holds a box of its own choice; boxes may overlap (halos).

    A device keeps what it has and receives the rest, as in ``plan_boxes``. Boxes move only between devices that share
    the coordinates on partial axes.

    Args:
        wanted: a box inside the tensor for each device, row-major.
    """
    src = canonical(src)
    kept = tuple(axis for axis, code in enumerate(src.codes) if is_partial(code))
    return _plan(src, src.places(), coords(src.mesh_shape), wanted, kept)


def _plan(
    src: Placed,
    places: Sequence[Place],
    where: Sequence[tuple[int, ...]],
    boxes: Sequence[Box],
    kept: tuple[int, ...],
) -> Moves:
    """All transfers that give the device at ``where[i]`` of the destination mesh ``boxes[i]``."""
    sources = dict(zip(src.places(), src.boxes(), strict=True))
    targets = dict(zip(places, boxes, strict=True))
    # (coordinates on the kept axes) -> box -> the replicas that hold it. Different boxes of one group never overlap.
    holders: dict[tuple[int, ...], dict[Box, list[Place]]] = {}
    for coord, (place, held) in zip(coords(src.mesh_shape), sources.items(), strict=True):
        if numel(held):
            group = holders.setdefault(tuple(coord[axis] for axis in kept), {})
            group.setdefault(held, []).append(place)

    load = dict.fromkeys(sources, 0)  # elements that each source device sends so far
    keeps: dict[Place, Box] = {}
    sends: dict[Place, list[tuple[Place, Box]]] = {}
    receives: dict[Place, list[tuple[Place, Box]]] = {}
    transfers: list[Transfer] = []
    for coord, (place, wanted) in zip(where, targets.items(), strict=True):
        for held, replicas in holders.get(tuple(coord[axis] for axis in kept), {}).items():
            part = intersect(held, wanted)
            if part is None:
                continue
            if place in replicas:
                keeps[place] = part
                continue
            sender = min(replicas, key=load.__getitem__)
            load[sender] += numel(part)
            transfers.append(Transfer(sender, place, part))
            sends.setdefault(sender, []).append((place, part))
            receives.setdefault(place, []).append((sender, part))

    devices = {
        place: DeviceMoves(
            source=sources.get(place),
            target=targets.get(place),
            keep=keeps.get(place),
            sends=tuple(sends.get(place, ())),
            receives=tuple(receives.get(place, ())),
        )
        for place in {**sources, **targets}
    }
    return Moves(tuple(transfers), devices, sum(load.values()))


def placed(mesh: MeshInfo, layout: Layout) -> Placed:
    """A layout of a tensor on its mesh."""
    return Placed(mesh.kind, tuple(mesh.devices), tuple(mesh.shape), tuple(layout.shape), tuple(layout.codes))


def is_local(definition: Definition, meshes: dict[int, MeshInfo]) -> bool:
    """Whether a redistribution needs no other device: nothing is reduced, and each finds all of its new piece in its old."""
    source, target = (placed(meshes[x.mesh], x) for x in (definition.inputs[0], definition.outputs[0]))
    plan = steps(source, target)
    return source.same_mesh(target) and not plan.reduce_axes and plan_boxes(plan.middle, plan.target).is_local


def kept_whole(definition: Definition, meshes: dict[int, MeshInfo]) -> list[Place]:
    """Devices whose piece stays what it is, of a redistribution that is local."""
    source, target = (placed(meshes[x.mesh], x) for x in (definition.inputs[0], definition.outputs[0]))
    plan = steps(source, target)
    moves = plan_boxes(plan.middle, plan.target)
    kept = []
    for place, coord in zip(target.places(), coords(target.mesh_shape), strict=True):
        filled = any(op in ("sum", "product") and coord[axis] for axis, op in plan.fill_axes)
        if moves.device(place).is_noop and not filled:
            kept.append(place)
    return kept
