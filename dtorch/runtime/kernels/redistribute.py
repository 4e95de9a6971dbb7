"""From any layout to any other: reduce what is pending, move boxes, mark what becomes pending. Plans come from ``moves``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.comm import Exchange, Place, Reduce, fold
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.layout import box, coords, slices
from dtorch.runtime.moves import Placed, is_local, plan_boxes
from dtorch.runtime.moves import steps as plan_steps
from dtorch.transport.messages import Definition, MeshInfo


def _alone(definition: Definition, meshes: dict[int, MeshInfo]) -> Callable[[Site], Callable[..., Any]] | None:
    return _copying if is_local(definition, meshes) else None


def _copying(site: Site) -> Callable[[torch.Tensor], torch.Tensor]:
    """Each device copies its part of its own piece."""
    plan = plan_steps(site.placed(site.definition.inputs[0]), site.placed(site.definition.outputs[0]))
    own = plan_boxes(plan.middle, plan.target).device(site.place)
    dtype, device, there = site.dtype(site.definition.inputs[0]), site.device, site.coord
    assert there is not None
    off = next((op for axis, op in plan.fill_axes if op in ("sum", "product") and there[axis] != 0), None)
    if off is None and own.keep is not None and own.keep == own.target == own.source:
        return lambda x: x.clone(memory_format=torch.contiguous_format)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()  # also where nothing of it is used, an input that failed must raise
        out = _assemble(x, own, [], False, dtype, device)
        return out if off is None else neutral(out, off)

    return run


@kernel("redistribute", communicates=True, alone=_alone)
def redistribute(site: Site) -> Callable[..., Steps]:
    """One input under one layout -> the same tensor under the output's layout. The result never shares memory with it."""
    source, target = site.placed(site.definition.inputs[0]), site.placed(site.definition.outputs[0])
    dtype = site.dtype(site.definition.inputs[0])
    plan = plan_steps(source, target)
    if plan.scatter is not None:
        return _reduce_scatter(site.place, source, target, *plan.scatter, plan.reduce_axes[0][1], dtype)
    moves = plan_boxes(plan.middle, plan.target)
    place = site.place
    here = _coordinate(source, place)
    local = None if here is None else tuple(
        stop - start for start, stop in box(plan.middle.shape, plan.middle.codes, source.mesh_shape, here)
    )
    shape = tuple(local) if local is not None else ()
    there = _coordinate(target, place)

    def run(x: torch.Tensor | None = None) -> Steps:
        fresh = False
        for axis, op in plan.reduce_axes:
            x = yield Reduce(x, (axis,), op, shape, dtype)
            fresh = True
        own = moves.device(place)
        received: list[torch.Tensor] = []
        if not moves.is_local:
            sends = [] if x is None else [(dst, x[slices(part, own.source)]) for dst, part in own.sends]  # type: ignore[arg-type]
            got = yield Exchange(
                sends, [(src, tuple(b - a for a, b in part)) for src, part in own.receives], dtype
            )
            received = got
        if there is None:
            return None
        out = _assemble(x, own, received, fresh, dtype, site.device)
        for axis, op in plan.fill_axes:
            if op in ("sum", "product") and there[axis] != 0:
                out = neutral(out, op)
        return out

    return run


def _assemble(
    x: torch.Tensor | None,
    own: Any,
    received: list[torch.Tensor],
    fresh: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    target = own.target
    if own.keep is not None and own.keep == target and x is not None:
        part = x if own.source == target else x[slices(target, own.source)]
        return part.contiguous() if fresh and own.source == target else part.clone(memory_format=torch.contiguous_format)
    out = torch.empty([b - a for a, b in target], dtype=dtype, device=device)
    if own.keep is not None and x is not None:
        out[slices(own.keep, target)] = x[slices(own.keep, own.source)]
    for (_, part), piece in zip(own.receives, received, strict=True):
        out[slices(part, target)] = piece.to(device)
    return out


def neutral(like: torch.Tensor, op: str) -> torch.Tensor:
    """What a device contributes to a pending sum or product so that it changes no bit: -0.0 (x + -0.0 is x), 0, or 1."""
    if op == "product":
        return torch.ones_like(like)
    zeros = torch.zeros_like(like)
    return zeros.neg_() if like.dtype.is_floating_point or like.dtype.is_complex else zeros


def _coordinate(placed: Placed, place: Place) -> tuple[int, ...] | None:
    if place[0] != placed.kind or place[1] not in placed.devices:
        return None
    return coords(placed.mesh_shape)[placed.devices.index(place[1])]


def _reduce_scatter(
    place: Place, source: Placed, target: Placed, axis: int, dim: int, op: str, dtype: torch.dtype
) -> Callable[..., Steps]:
    """Pending on ``axis`` -> sharded on it: every device sends each of the others its part and adds what it gets, in order."""
    mine = _coordinate(source, place)
    assert mine is not None
    all_coords = coords(source.mesh_shape)
    line = [i for i, c in enumerate(all_coords) if (*c[:axis], *c[axis + 1 :]) == (*mine[:axis], *mine[axis + 1 :])]
    whole = box(source.shape, source.codes, source.mesh_shape, mine)
    parts = [box(target.shape, target.codes, target.mesh_shape, all_coords[i]) for i in line]
    places = [(source.kind, source.devices[i]) for i in line]
    me = places.index(place)
    shape = tuple(b - a for a, b in parts[me])

    def run(x: torch.Tensor) -> Steps:
        pieces = [x[slices(part, whole)] for part in parts]
        got = yield Exchange(
            [(other, piece) for other, piece in zip(places, pieces, strict=True) if other != place],
            [(other, shape) for other in places if other != place],
            dtype,
        )
        others = iter(got)
        return fold([pieces[me] if other == place else next(others) for other in places], op).contiguous()

    return run
