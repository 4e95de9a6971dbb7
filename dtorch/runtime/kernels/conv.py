"""Convolutions on pieces of the channels and of space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import Site, kernel
from dtorch.runtime.kernels.window import BODIES, View, body
from dtorch.runtime.layout import REPLICATE, is_partial
from dtorch.runtime.windows import Spread


@kernel("conv")
def without_halos(site: Site) -> Callable[..., Any]:
    """Space is whole here. params: those of the body."""
    layout, out = site.definition.inputs[0], site.definition.outputs[0]
    shape, dtype = site.local_shape(out), site.dtype(out)
    if 0 in shape:
        return lambda *_: torch.empty(shape, dtype=dtype, device=site.device)
    return BODIES[site.params["body"]](View(site, (), site.box(layout), site.box(out), tuple(layout.shape)))


def own_bias(site: Site) -> int | None:
    """The bias' place among the inputs, None when there is none or another device adds it: where the result is pending and
    the bias is not, the first along the axis does."""
    bias: int | None = site.params["bias"]
    assert site.coord is not None
    if bias is not None:
        codes = zip(site.definition.outputs[0].codes, site.definition.inputs[bias].codes, site.coord, strict=True)
        if any(is_partial(code) and own == REPLICATE and at for code, own, at in codes):
            return None
    return bias


@body("conv")
def conv(view: View) -> Callable[..., Any]:
    """params: channel_dim, groups, bias (number of the input, or None), stride, padding, dilation."""
    params, site = view.site.params, view.site
    dim = params["channel_dim"]
    channels = view.span[dim][1] - view.span[dim][0]
    if not channels:
        return _bias_alone(view)
    groups = max(channels * params["groups"] // view.shape[dim], 1)
    padding = view.among(params["padding"], dim + 1, 0)
    fn, bias = site.fn, own_bias(site)
    stride, dilation = params["stride"], params["dilation"]

    def run(x: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = fn(x, weight, None if bias is None else more[0], stride, padding, dilation, groups)
        return made

    return run


@body("conv_transpose")
def conv_transpose(view: View) -> Callable[..., Any]:
    """params: as for "conv", and output_padding. What the function makes beyond this device's part is cut off."""
    params, site = view.site.params, view.site
    dim = params["channel_dim"]
    channels = view.span[dim][1] - view.span[dim][0]
    if not channels:
        return _bias_alone(view)
    groups = max(channels * params["groups"] // view.shape[dim], 1)
    padding = view.among(params["padding"], dim + 1, 0)
    extra, part = list(params["output_padding"]), [slice(None)] * len(view.shape)
    for seen in view.looked:
        w = seen.window
        assert isinstance(w, Spread)
        first, last = view.span[seen.dim]
        start, stop = view.out[seen.out]
        end = w.lands(last - 1) + w.dilation * (w.kernel - 1) + 1
        extra[seen.dim - dim - 1] = max(stop - end, 0)
        begin = start - w.lands(first)
        part[seen.dim] = slice(begin, begin + stop - start)
    fn, bias = site.fn, own_bias(site)
    stride, dilation, index = params["stride"], params["dilation"], tuple(part)

    def run(x: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        made = fn(x, weight, None if bias is None else more[0], stride, padding, extra, groups, dilation)
        return made[index].contiguous()  # type: ignore[no-any-return]

    return run


def _bias_alone(view: View) -> Callable[..., Any]:
    """A sum over no channels."""
    site, bias = view.site, own_bias(view.site)
    out = site.definition.outputs[0]
    shape, dtype, dim = site.local_shape(out), site.dtype(out), site.params["channel_dim"]

    def run(*values: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(shape, dtype=dtype, device=site.device)
        return made if bias is None else made + values[bias].reshape(-1, *(1,) * (len(shape) - dim - 1))

    return run
