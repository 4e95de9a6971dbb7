"""Geometry that kernels share: who holds what along the mesh axes on which a kernel communicates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from dtorch.runtime.comm import Gather, Place, Reduce
from dtorch.runtime.kernels import Site, Steps
from dtorch.runtime.layout import REPLICATE, Box, box, is_partial, is_shard, partial_op, rank_of, slices
from dtorch.transport.messages import Layout


def boxes_along(site: Site, layout: Layout, axes: Sequence[int]) -> list[Box]:
    """Boxes of all devices that differ from this one in ``axes`` only, in the order of a Gather's answer."""
    shape = tuple(site.mesh.shape)
    assert site.coord is not None
    found = []
    for at in product(*(range(shape[axis]) for axis in axes)):
        coord = list(site.coord)
        for axis, i in zip(axes, at, strict=True):
            coord[axis] = i
        found.append(box(tuple(layout.shape), tuple(layout.codes), shape, tuple(coord)))
    return found


def rank_along(site: Site, axes: Sequence[int]) -> int:
    """This device's position in ``boxes_along``."""
    assert site.coord is not None
    rank = 0
    for axis in axes:
        rank = rank * site.mesh.shape[axis] + site.coord[axis]
    return rank


def places_along(site: Site, axes: Sequence[int]) -> list[Place]:
    """The devices of ``boxes_along``."""
    mesh = site.mesh
    assert site.coord is not None
    found = []
    for at in product(*(range(mesh.shape[axis]) for axis in axes)):
        coord = list(site.coord)
        for axis, i in zip(axes, at, strict=True):
            coord[axis] = i
        found.append((mesh.kind, mesh.devices[rank_of(coord, mesh.shape)]))
    return found


def shape_of(part: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in part)


def box_without(site: Site, layout: Layout, axes: Sequence[int]) -> Box:
    """The part this device would hold were the tensor replicated on ``axes``."""
    codes = tuple(REPLICATE if axis in axes else code for axis, code in enumerate(layout.codes))
    assert site.coord is not None
    return box(tuple(layout.shape), codes, tuple(site.mesh.shape), site.coord)


def cutting_axes(layout: Layout, axes: Sequence[int]) -> tuple[int, ...]:
    """Those of ``axes`` that shard the tensor."""
    return tuple(axis for axis in axes if is_shard(layout.codes[axis]))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of ``dtype`` are carried between devices."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Whole:
    """Makes an input whole on some mesh axes: reduces what is pending there, gathers what is cut.

    Attributes:
        part: the box of the result.
    """

    def __init__(self, site: Site, layout: Layout, axes: Sequence[int]) -> None:
        self.dtype = site.dtype(layout)
        self.pending = [(a, partial_op(layout.codes[a])) for a in axes if is_partial(layout.codes[a])]
        self.axes = cutting_axes(layout, axes)
        self.held = site.local_shape(layout)
        self.part = box_without(site, layout, axes)
        self.boxes = boxes_along(site, layout, self.axes)

    def steps(self, x: torch.Tensor) -> Steps:
        for axis, op in self.pending:
            x = yield Reduce(x, (axis,), op, self.held, self.dtype)
        if not self.axes:
            return x
        pieces = yield Gather(x.contiguous(), self.axes, [shape_of(b) for b in self.boxes], self.dtype)
        out = x.new_empty(shape_of(self.part))
        for piece, part in zip(pieces, self.boxes, strict=True):
            out[slices(part, self.part)] = piece
        return out


def local_part(have: Box, want: Box, x: torch.Tensor) -> torch.Tensor:
    """``want`` of a tensor that holds ``have``; its own memory unless they are the same."""
    return x if have == want else x[slices(want, have)].clone(memory_format=torch.contiguous_format)
