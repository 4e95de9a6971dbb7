"""``dtorch.inspect``: what is known of a tensor without asking the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement
from dtorch.runtime.layout import Box, box, coords
from dtorch.spec import STALE
from dtorch.tensor import Tensor


@dataclass(frozen=True)
class HeldPiece:
    """What one device holds of a tensor.

    Attributes:
        device: such as "cpu:0".
        coord: of the device in the mesh, one a mesh axis.
        box: one interval (start, stop) a dim, in elements of the global tensor; empty where start == stop.
        size_bytes: of the piece.
    """

    device: str
    coord: tuple[int, ...]
    box: Box
    size_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Inspection:
    """A tensor at the moment of asking.

    Attributes:
        stride: of the global tensor, in elements.
        slot: number under which workers keep the tensor; used again once it is gone.
        session: number of the session that it belongs to.
        is_open: whether that session still runs; if not, the value is lost.
        is_stale: it is a copy that stands for a view and is read afresh before its next use.
        is_fetching: a fetch of the value is under way.
        num_waiters: who waits for that fetch.
        pieces: one a device, in the mesh's row-major order.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    requires_grad: bool
    slot: int
    session: int
    is_open: bool
    is_stale: bool
    is_fetching: bool
    num_waiters: int
    pieces: tuple[HeldPiece, ...]

    def __str__(self) -> str:
        placed = ", ".join(map(str, self.placements))
        fetch = f"a fetch is under way, {self.num_waiters} waiting" if self.is_fetching else "no fetch under way"
        lines = [
            f"{str(self.dtype)[6:]}{list(self.shape)} on [{placed}], {self.device_mesh}",
            f"slot {self.slot} of session {self.session}{'' if self.is_open else ' (closed)'}; {fetch}",
        ]
        for piece in self.pieces:
            cut = ", ".join(f"{start}:{stop}" for start, stop in piece.box)
            lines.append(f"  {piece.device} at {piece.coord}: [{cut}], {piece.size_bytes} bytes")
        return "\n".join(lines)


def native(x: Any) -> Tensor:
    """The ``dtorch.Tensor`` behind either face.

    Raises:
        TypeError: it is no tensor of dtorch.
    """
    found = getattr(x, "native", x)
    if not isinstance(found, Tensor):
        raise TypeError(f"expected a dtorch.Tensor, got {type(x).__name__}")
    return found


def inspect(x: Any) -> Inspection:
    """What is known of ``x`` here: spec, slot, which device holds which part, whether a fetch is under way. Asks no
    worker, starts no fetch and never waits.

    Raises:
        TypeError: ``x`` is no tensor of dtorch.
    """
    tensor = native(x)
    spec = tensor._spec
    mesh = spec.mesh
    mesh_shape = tuple(mesh.shape)
    pieces = []
    for device, coord in zip(mesh.devices, coords(mesh_shape), strict=True):
        part = box(tuple(spec.shape), spec.codes, mesh_shape, coord)
        size = spec.dtype.itemsize
        for start, stop in part:
            size *= stop - start
        pieces.append(HeldPiece(f"{mesh.device_type}:{device}", coord, part, size))
    fetching = getattr(tensor, "_fetching", None)
    waiting = None if fetching is None else fetching[1]._callbacks  # None once the value has come
    return Inspection(
        shape=spec.shape,
        stride=tuple(spec.stride),
        dtype=spec.dtype,
        device_mesh=mesh,
        placements=spec.placements,
        requires_grad=spec.requires_grad,
        slot=tensor._slot,
        session=spec.session.number,
        is_open=spec.session.is_open,
        is_stale=spec.link == STALE,
        is_fetching=waiting is not None,
        num_waiters=len(waiting or ()),
        pieces=tuple(pieces),
    )
