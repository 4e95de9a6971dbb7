"""Reductions over dims that are sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import Site, kernel


@kernel("mean")
def mean(site: Site) -> Callable[..., Any]:
    """A summand of the mean: the local sum over the global count, so uneven and empty shards weigh what they hold."""
    shape = site.definition.inputs[0].shape
    dims = list(site.params["dims"])
    keepdim = bool(site.params["keepdim"])
    count = math.prod(shape[d] for d in dims)
    dtype = site.dtype(site.definition.outputs[0])

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.sum(x, dims, keepdim, dtype=dtype) / count if dims else x.to(dtype) / count

    return run


def identity(dtype: torch.dtype, kind: str) -> Any:
    """The value that changes no maximum, minimum, sum or product of ``dtype``."""
    if kind == "sum":
        return 0
    if kind == "product":
        return 1
    low = kind == "max"
    if dtype.is_floating_point:
        return -math.inf if low else math.inf
    if dtype == torch.bool:
        return not low
    info = torch.iinfo(dtype)
    return info.min if low else info.max


@kernel("extreme")
def extreme(site: Site) -> Callable[..., Any]:
    """A piece's maximum, minimum (or any, all); an empty piece gives what changes nothing."""
    call = site.bound()
    layout = site.definition.outputs[0]
    shape = site.local_shape(layout)
    dtype = site.dtype(layout)
    kind = site.params["kind"]
    held = site.local_shape(site.definition.inputs[0])
    if all(held[d] for d in site.params["dims"]):
        return call
    return lambda *_: torch.full(shape, identity(dtype, kind), dtype=dtype, device=site.device)
