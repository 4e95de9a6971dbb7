"""Tensors put together from boxes of others: slices, flips, rolls, joins of sharded dims. Only elements that are
wanted move.

An output is made of *regions*. A region is a box of the output, each input dim of which is read at ``start + step *
coordinate`` along one output dim (counted from the region's own corner), or at ``start`` alone. What no region covers
holds ``params["fill"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dtorch.runtime.comm import Exchange, Place
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.layout import Box, coords, intersect, is_partial, numel, slices
from dtorch.runtime.moves import Placed


@dataclass(frozen=True)
class Region:
    out: int
    source: int
    box: Box
    dims: tuple[tuple[int, int, int], ...]  # (output dim or -1, start, step) an input dim

    def reach(self, held: Box) -> Box | None:
        """The part of the region that can be read from a device which holds ``held`` of the input."""
        reached = list(self.box)
        for (out, start, step), (low, high) in zip(self.dims, held, strict=True):
            if out < 0:
                if not low <= start < high:
                    return None
                continue
            first = self.box[out][0]
            if step > 0:
                a, b = -(-(low - start) // step), -(-(high - start) // step)
            else:
                a, b = (start - high) // -step + 1, (start - low) // -step + 1
            reached[out] = (max(reached[out][0], first + a), min(reached[out][1], first + b))
        part = tuple(reached)
        return part if all(a < b for a, b in part) else None

    def read(self, x: torch.Tensor, held: Box, part: Box) -> torch.Tensor:
        """Box ``part`` of the output out of the local tensor that holds ``held``; a view."""
        index: list[Any] = []
        back: list[int] = []  # input dims to turn round
        kept: list[int] = []  # output dim of each dim that is left
        for (out, start, step), (low, _) in zip(self.dims, held, strict=True):
            if out < 0:
                index.append(start - low)
                continue
            a, b = part[out]
            first = start + step * (a - self.box[out][0]) - low
            last = first + step * (b - a - 1)
            index.append(slice(min(first, last), max(first, last) + 1, abs(step)))
            if step < 0:
                back.append(len(kept))
            kept.append(out)
        piece = x[tuple(index)]
        if back:
            piece = piece.flip(back)
        for out in sorted({o for o in kept if kept.count(o) > 1}):
            one, two = (i for i, o in enumerate(kept) if o == out)
            piece = piece.diagonal(0, one, two)
            kept = [o for i, o in enumerate(kept) if i not in (one, two)] + [out]
        piece = piece.permute(sorted(range(len(kept)), key=kept.__getitem__))
        for dim in range(len(part)):
            if dim not in kept:
                piece = piece.unsqueeze(dim)
        return piece.expand([b - a for a, b in part])


@dataclass(frozen=True)
class Move:
    """A box of an output that one device makes for another (or for itself)."""

    region: int
    src: Place
    dst: Place
    box: Box


@lru_cache(maxsize=512)
def plan(ins: tuple[Placed, ...], outs: tuple[Placed, ...], regions: tuple[Region, ...]) -> tuple[Move, ...]:
    """All moves, in one order for all devices. All layouts are on one mesh; pending axes are alike and stay as they
    are."""
    mesh = outs[0]
    places, where = mesh.places(), coords(mesh.mesh_shape)
    pending = [a for a, code in enumerate(ins[0].codes) if is_partial(code) and mesh.mesh_shape[a] > 1]
    load = dict.fromkeys(places, 0)
    moves: list[Move] = []
    for number, region in enumerate(regions):
        holders: dict[tuple[int, ...], dict[Box, list[Place]]] = {}
        for place, coord, held in zip(places, where, ins[region.source].boxes(), strict=True):
            part = region.reach(held)
            if part is not None:
                group = holders.setdefault(tuple(coord[a] for a in pending), {})
                group.setdefault(part, []).append(place)
        for place, coord, target in zip(places, where, outs[region.out].boxes(), strict=True):
            for held, replicas in holders.get(tuple(coord[a] for a in pending), {}).items():
                wanted = intersect(held, target)
                if wanted is None:
                    continue
                if place in replicas:
                    moves.append(Move(number, place, place, wanted))
                    continue
                sender = min(replicas, key=load.__getitem__)
                load[sender] += numel(wanted)
                moves.append(Move(number, sender, place, wanted))
    return tuple(moves)


def regions_of(params: Sequence[Any]) -> tuple[Region, ...]:
    return tuple(
        Region(out, source, tuple((a, b) for a, b in box), tuple((o, s, t) for o, s, t in dims))
        for out, source, box, dims in params
    )


@kernel("remap", communicates=True)
def remap(site: Site) -> Callable[..., Steps]:
    """Outputs from regions of the inputs, in any placements of either; never shares memory with them."""
    definition = site.definition
    ins = tuple(site.placed(layout) for layout in definition.inputs)
    outs = tuple(site.placed(layout) for layout in definition.outputs)
    regions = regions_of(site.params["regions"])
    fill = site.params.get("fill")
    moves = plan(ins, outs, regions)
    place = site.place
    held = [site.box(layout) for layout in definition.inputs]
    targets = [site.box(layout) for layout in definition.outputs]
    dtype = site.dtype(definition.outputs[0])
    is_local = all(m.src == m.dst for m in moves)
    sends = [m for m in moves if m.src == place != m.dst]
    receives = [m for m in moves if m.dst == place != m.src]
    keeps = [m for m in moves if m.src == m.dst == place]

    def read(xs: Sequence[torch.Tensor], move: Move) -> torch.Tensor:
        region = regions[move.region]
        return region.read(xs[region.source], held[region.source], move.box).to(dtype)

    def run(*values: Any) -> Steps:
        xs: Sequence[torch.Tensor] = values[: len(held)]
        got: list[torch.Tensor] = []
        if not is_local:
            got = yield Exchange(
                [(m.dst, read(xs, m)) for m in sends],
                [(m.src, tuple(b - a for a, b in m.box)) for m in receives],
                dtype,
            )
        made = []
        for target in targets:
            shape = [b - a for a, b in target]
            if fill is None:
                made.append(torch.empty(shape, dtype=dtype, device=site.device))
            else:
                made.append(torch.full(shape, fill, dtype=dtype, device=site.device))
        for move in keeps:
            out = regions[move.region].out
            made[out][slices(move.box, targets[out])] = read(xs, move)
        for move, piece in zip(receives, got, strict=True):
            out = regions[move.region].out
            made[out][slices(move.box, targets[out])] = piece.to(site.device)
        return made[0] if len(made) == 1 else tuple(made)

    return run
