"""Layout arithmetic: which part of a global tensor a device of a mesh holds.

A *placement code* is an int, one for each mesh axis, and is what travels on the wire:

=========  ==========================================================================
code       meaning on that mesh axis
=========  ==========================================================================
``-1``     replicated
``-2..-6`` pieces that give the tensor when reduced: sum, avg, max, min, product
``>= 0``   sharded, ``dim + 64 * (block - 1)``: cut along ``dim`` at multiples of ``block``
=========  ==========================================================================

Mesh axes subdivide a dim from left to right, so two axes that shard the same dim nest. When several axes are partial,
the tensor is what comes out of reducing them from left to right (it matters for a sum and a max on one tensor).
A *box* is one half-open interval ``(start, stop)`` a dim, in global coordinates. Everything here is a pure function.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise, product
from math import prod

Interval = tuple[int, int]
Box = tuple[Interval, ...]

MAX_DIMS = 64
"""Dims of a tensor that a shard code can name (torch's own limit)."""

REPLICATE = -1
PARTIAL_CODES: dict[str, int] = {"sum": -2, "avg": -3, "max": -4, "min": -5, "product": -6}
PARTIAL_OPS: dict[int, str] = {code: op for op, code in PARTIAL_CODES.items()}


def is_partial(code: int) -> bool:
    return code < REPLICATE


def partial_op(code: int) -> str:
    """Reduction that a partial code names: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``."""
    return PARTIAL_OPS[code]


def partial_code(op: str) -> int:
    return PARTIAL_CODES[op]


def is_shard(code: int) -> bool:
    return code >= 0


def shard_dim(code: int) -> int:
    return code % MAX_DIMS


def shard_block(code: int) -> int:
    return code // MAX_DIMS + 1


def shard_code(dim: int, block: int = 1) -> int:
    """Code of a shard along ``dim``, cut only at multiples of ``block`` elements."""
    assert 0 <= dim < MAX_DIMS, f"a shard code needs a dim in [0, {MAX_DIMS}), got {dim}"
    assert block >= 1, f"a shard code needs a block of at least 1, got {block}"
    return dim + MAX_DIMS * (block - 1)


@lru_cache(maxsize=16384)
def split(start: int, stop: int, num: int, block: int = 1) -> tuple[Interval, ...]:
    """Cut ``[start, stop)`` into ``num`` pieces as ``torch.chunk`` does, padded with empty pieces ``(stop, stop)``.

    Cuts fall on multiples of ``block`` in global coordinates. The blocks at either end may be short.
    """
    first = start // block
    num_blocks = -(-stop // block) - first if stop > start else 0
    step = -(-num_blocks // num)
    cuts = [start, *(min((first + i * step) * block, stop) for i in range(1, num)), stop]
    if num_blocks == 0:
        return ((stop, stop),) * num
    return tuple((a, b) if a < b else (stop, stop) for a, b in pairwise(cuts))


@lru_cache(maxsize=65536)
def box(shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...], coord: tuple[int, ...]) -> Box:
    """Part of a tensor that the device at ``coord`` holds.

    Args:
        shape: global shape.
        codes: one placement code a mesh axis.
        mesh_shape: devices along each mesh axis.
        coord: coordinate of the device, one a mesh axis.
    """
    intervals = [(0, size) for size in shape]
    for code, num, at in zip(codes, mesh_shape, coord, strict=True):
        if code >= 0 and num > 1:
            dim = code % MAX_DIMS
            intervals[dim] = split(*intervals[dim], num, code // MAX_DIMS + 1)[at]
    return tuple(intervals)


@lru_cache(maxsize=65536)
def local_shape(
    shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...], coord: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of the piece that the device at ``coord`` holds; arguments as for ``box``."""
    return tuple(stop - start for start, stop in box(shape, codes, mesh_shape, coord))


@lru_cache(maxsize=16384)
def pieces(
    shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """The distinct boxes that devices hold, and for each device, row-major, which of them is its own."""
    numbers: dict[Box, int] = {}
    of = tuple(numbers.setdefault(box(shape, codes, mesh_shape, coord), len(numbers)) for coord in coords(mesh_shape))
    return tuple(numbers), of


@lru_cache(maxsize=256)
def _coords(mesh_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(product(*map(range, mesh_shape)))


def coords(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Coordinates of all devices of a mesh, row-major. ``coords(())`` is one device, ``[()]``."""
    return list(_coords(mesh_shape))


def rank_of(coord: Iterable[int], mesh_shape: Iterable[int]) -> int:
    """Position of ``coord`` in ``coords``."""
    rank = 0
    for at, num in zip(coord, mesh_shape, strict=True):
        rank = rank * num + at
    return rank


def numel(part: Box) -> int:
    """Elements in a box. The box of a 0-d tensor, ``()``, has one."""
    return prod(stop - start for start, stop in part)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None when that is empty."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def slices(part: Box, within: Box) -> tuple[slice, ...]:
    """Index that takes ``part`` out of a local tensor that holds ``within``."""
    return tuple(slice(a - origin, b - origin) for (a, b), (origin, _) in zip(part, within, strict=True))
