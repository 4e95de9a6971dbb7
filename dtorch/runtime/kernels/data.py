"""Tensors that come from the client, and tensors made of nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import Site, kernel
from dtorch.runtime.kernels.redistribute import neutral
from dtorch.runtime.layout import coords, is_partial, local_shape, partial_op, slices


@kernel("upload")
def upload(site: Site) -> Callable[..., Any]:
    """Cuts this device's piece out of the full tensor's bytes."""
    layout = site.definition.outputs[0]
    dtype = site.dtype(layout)
    whole = tuple((0, n) for n in layout.shape)
    part = site.box(layout)
    filled = _contributes(site, layout.codes)

    def run(data: torch.Tensor) -> torch.Tensor:
        full = data.view(dtype).reshape(layout.shape) if data.numel() else torch.empty(layout.shape, dtype=dtype)
        piece = full if part == whole else full[slices(part, whole)]
        if filled is not None:
            return neutral(torch.empty(piece.shape, dtype=dtype, device=site.device), filled)
        made = torch.empty(piece.shape, dtype=dtype, device=site.device)
        return made.copy_(piece)

    return run


@kernel("upload_shards")
def upload_shards(site: Site) -> Callable[..., Any]:
    """Takes this device's piece out of the pieces of all devices, which lie one behind the other."""
    layout = site.definition.outputs[0]
    dtype = site.dtype(layout)
    mesh_shape = tuple(site.mesh.shape)
    sizes = [local_shape(tuple(layout.shape), tuple(layout.codes), mesh_shape, c) for c in coords(mesh_shape)]
    assert site.coord is not None
    me = coords(mesh_shape).index(site.coord)
    start = sum(math.prod(s) for s in sizes[:me])
    shape = sizes[me]
    stop = start + math.prod(shape)

    def run(data: torch.Tensor) -> torch.Tensor:
        if start == stop:
            return torch.empty(shape, dtype=dtype, device=site.device)
        made = torch.empty(shape, dtype=dtype, device=site.device)
        return made.copy_(data.view(dtype)[start:stop].reshape(shape))

    return run


def _contributes(site: Site, codes: tuple[int, ...]) -> str | None:
    """The op of a pending axis on which this device holds the neutral element; None when it holds the value."""
    assert site.coord is not None
    for axis, code in enumerate(codes):
        if is_partial(code) and partial_op(code) in ("sum", "product") and site.coord[axis] != 0:
            return partial_op(code)
    return None


@kernel("create")
def create(site: Site) -> Callable[..., Any]:
    """A factory called with the local shape in place of the global one; pending axes hold the neutral element but once."""
    made = site.bound()
    filled = _contributes(site, site.definition.outputs[0].codes)
    if filled is None:
        return made

    def run(*values: Any) -> torch.Tensor:
        return neutral(made(*values), filled)

    return run


@kernel("create_whole")
def create_whole(site: Site) -> Callable[..., Any]:
    """A factory called for the whole tensor, of which this device keeps its piece."""
    made = site.bound()
    layout = site.definition.outputs[0]
    whole = tuple((0, n) for n in layout.shape)
    part = site.box(layout)
    filled = _contributes(site, layout.codes)

    def run(*values: Any) -> torch.Tensor:
        full: torch.Tensor = made(*values)
        if filled is not None:
            return neutral(full[slices(part, whole)].contiguous(), filled)
        return full if part == whole else full[slices(part, whole)].clone(memory_format=torch.contiguous_format)

    return run
