"""What is known of a tensor before its value: shape, strides, dtype, mesh and placements. Interned, so compared by identity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, from_code
from dtorch.runtime.template import dtype_name
from dtorch.transport.messages import Layout

if TYPE_CHECKING:
    from dtorch.session import Session


OWN, LINKED, STALE = 0, 1, 2
"""A tensor with memory of its own or a real view; a copy that stands for a view; such a copy that is out of date."""


class Spec:
    """Facts shared by all tensors that look alike in one session. Made by ``Session.spec`` only.

    ``dead`` and ``wake`` belong to the recorder: a dying tensor appends its slot to ``dead`` (its mesh's list) and calls
    ``wake`` when it is the first. ``face`` belongs to ``face.py``.
    """

    __slots__ = (
        "_is_contiguous",
        "_meta",
        "codes",
        "dead",
        "dtype",
        "face",
        "is_param",
        "layout",
        "link",
        "mesh",
        "placements",
        "requires_grad",
        "session",
        "shape",
        "size_bytes",
        "stride",
        "wake",
    )

    def __init__(
        self,
        session: Session,
        mesh: DeviceMesh,
        mesh_number: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        codes: tuple[int, ...],
        is_param: bool,
        requires_grad: bool,
        dead: list[int],
        wake: Callable[[], None],
        link: int = OWN,
    ) -> None:
        self.session = session
        self.mesh = mesh
        self.shape = torch.Size(shape)
        self.stride = stride
        self.dtype = dtype
        self.codes = codes
        self.placements: tuple[Placement, ...] = tuple(from_code(c) for c in codes)
        self.is_param = is_param
        self.requires_grad = requires_grad
        self.dead = dead
        self.wake = wake
        self.link = link  # see ops/_alias.py
        self.layout = Layout(mesh_number, tuple(shape), dtype_name(dtype), codes)
        self.size_bytes = math.prod(shape) * dtype.itemsize
        self._meta: torch.Tensor | None = None
        self._is_contiguous: bool | None = None
        self.face: tuple[Any, ...] | None = None

    @property
    def is_contiguous(self) -> bool:
        """Whether torch calls a tensor of this shape and these strides contiguous."""
        if self._is_contiguous is None:
            self._is_contiguous = self.meta.is_contiguous()
        return self._is_contiguous

    @property
    def meta(self) -> torch.Tensor:
        """A tensor of this shape on torch's meta device; do not change it."""
        if self._meta is None:
            self._meta = self.new_meta()
        return self._meta

    def new_meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        placed = ", ".join(map(str, self.placements))
        return f"{dtype_name(self.dtype)}{list(self.shape)} on [{placed}]"

    __repr__ = __str__


def contiguous_stride(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    """Row-major strides, in elements, as ``torch.empty(shape).stride()`` gives them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
