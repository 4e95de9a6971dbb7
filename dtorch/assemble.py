"""From pieces to the value: which devices to ask for a tensor, and how its pieces make the whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from dtorch.runtime.comm import fold
from dtorch.runtime.layout import Box, box, coords, is_partial, local_shape, partial_op, slices


@lru_cache(maxsize=4096)
def providers(
    shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...], devices: tuple[int, ...]
) -> tuple[int, ...]:
    """Devices whose pieces make the value: one holder of every distinct, non-empty box (all summands where pending)."""
    chosen: dict[tuple[Box, tuple[int, ...]], int] = {}
    for coord, device in zip(coords(mesh_shape), devices, strict=True):
        part = box(shape, codes, mesh_shape, coord)
        pending = tuple(c if is_partial(codes[axis]) else 0 for axis, c in enumerate(coord))
        if all(a < b for a, b in part):
            chosen.setdefault((part, pending), device)
    return tuple(chosen.values()) or (devices[0],)


def whole(
    shape: tuple[int, ...],
    codes: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    devices: Sequence[int],
    pieces: dict[int, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The full tensor from the pieces of ``providers``: pending axes reduced left to right, then boxes laid out."""
    positions = dict(zip(devices, coords(mesh_shape), strict=True))
    if len(pieces) == 1:
        (piece,) = pieces.values()
        if tuple(piece.shape) == shape:
            return piece
    items = [(positions[device], piece) for device, piece in pieces.items()]
    for axis, code in enumerate(codes):
        if not is_partial(code):
            continue
        lines: dict[tuple[int, ...], list[tuple[int, torch.Tensor]]] = {}
        for coord, piece in items:
            rest = (*coord[:axis], 0, *coord[axis + 1 :])
            lines.setdefault(rest, []).append((coord[axis], piece))
        items = [
            (rest, fold([piece for _, piece in sorted(line, key=lambda entry: entry[0])], partial_op(code)))
            for rest, line in lines.items()
        ]
    full = torch.empty(shape, dtype=dtype)
    everything = tuple((0, n) for n in shape)
    for coord, piece in items:
        full[slices(box(shape, codes, mesh_shape, coord), everything)] = piece
    return full


def shard_shapes(
    shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Local shapes of all devices, row-major."""
    return [local_shape(shape, codes, mesh_shape, coord) for coord in coords(mesh_shape)]
