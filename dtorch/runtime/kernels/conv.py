"""Convolutions on pieces of the channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import Site, kernel, num_numbers
from dtorch.runtime.template import bind


@kernel("conv")
def conv(site: Site) -> Callable[..., Any]:
    """The op with as many groups as this device holds; a piece without input channels adds the bias alone.

    params: channel_dim, groups, groups_at (position of the argument), bias (number of the input, or None).
    """
    definition, params = site.definition, site.params
    out = definition.outputs[0]
    shape, dtype = site.local_shape(out), site.dtype(out)
    dim = params["channel_dim"]
    if 0 in shape:
        return lambda *_: torch.empty(shape, dtype=dtype, device=site.device)
    held = site.local_shape(definition.inputs[0])
    if held[dim] == 0:
        bias = params["bias"]

        def empty(*values: torch.Tensor) -> torch.Tensor:
            made = torch.zeros(shape, dtype=dtype, device=site.device)
            return made if bias is None else made + values[bias].reshape(-1, *(1,) * (len(shape) - dim - 1))

        return empty
    step = definition.inputs[0].shape[dim] // params["groups"]
    groups = max(held[dim] // step, 1)
    args, kwargs = list(definition.args), dict(definition.kwargs)
    if len(args) > params["groups_at"]:
        args[params["groups_at"]] = groups
    else:
        kwargs["groups"] = groups
    return bind(site.fn, args, kwargs, site.filler(), len(definition.inputs), num_numbers(definition))
