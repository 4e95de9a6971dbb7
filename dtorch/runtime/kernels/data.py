"""Tensors that come from the client, and tensors made of nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.runtime.arrivals import Arrival
from dtorch.runtime.kernels import Site, kernel
from dtorch.runtime.kernels.redistribute import neutral
from dtorch.runtime.layout import is_partial, partial_op, pieces, rank_of, slices


@kernel("upload")
def upload(site: Site) -> Callable[..., Any]:
    """Takes this device's piece out of an upload: its distinct pieces are as many blobs of the batch."""
    layout = site.definition.outputs[0]
    found = pieces(tuple(layout.shape), tuple(layout.codes), tuple(site.mesh.shape))[1][_rank(site)]
    filled = _contributes(site, layout.codes)
    if filled is not None:
        shape, dtype = site.local_shape(layout), site.dtype(layout)
        return lambda *_: neutral(torch.empty(shape, dtype=dtype, device=site.device), filled)
    return _taking(site, found)


@kernel("upload_shards")
def upload_shards(site: Site) -> Callable[..., Any]:
    """Takes this device's piece of an upload in which every device has one of its own."""
    return _taking(site, _rank(site))


def _rank(site: Site) -> int:
    assert site.coord is not None
    return rank_of(site.coord, site.mesh.shape)


def _taking(site: Site, number: int) -> Callable[..., Any]:
    layout = site.definition.outputs[0]
    shape, dtype, device = site.local_shape(layout), site.dtype(layout), site.device

    def run(uploads: Sequence[Arrival], first: int) -> torch.Tensor:
        arrival = uploads[first + number]
        if device.type == "cpu":
            return arrival.own().view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device).copy_(arrival.read().view(dtype).view(shape))

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
