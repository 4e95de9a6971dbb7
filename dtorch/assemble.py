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


@lru_cache(maxsize=4096)
def rows(
    shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...], devices: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The ``providers`` in the order in which their pieces' elements, one behind the other, are the value's; None: they
    are not so in any."""
    if any(map(is_partial, codes)):
        return None
    wanted, at = providers(shape, codes, mesh_shape, devices), dict(zip(devices, coords(mesh_shape), strict=True))
    parts = sorted((box(shape, codes, mesh_shape, at[device]), device) for device in wanted)
    for part, _ in parts:
        cut = [axis for axis, (start, stop) in enumerate(part) if stop - start != shape[axis]]
        if any(start + 1 != stop for start, stop in part[: max(cut, default=0)]):
            return None
    return tuple(device for _, device in parts)


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
