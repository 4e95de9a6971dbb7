"""Normalisations over dims that are sharded: statistics of pieces are combined, elements stay where they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dtorch.runtime.comm import Gather, Reduce
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.kernels._lines import boxes_along, shape_of, wide
from dtorch.runtime.kernels.reduce import combine_moments


@kernel("softmax", communicates=True)
def softmax(site: Site) -> Callable[..., Steps]:
    """softmax, softmin or log_softmax (``params["kind"]``), shifted by the global maximum."""
    dim, kind, axes = site.params["dim"], site.params["kind"], site.axes
    out = site.definition.outputs[0]
    dtype = site.dtype(out)
    carried = wide(dtype)
    held = list(site.local_shape(out))
    is_empty = held[dim] == 0
    kept = (*held[:dim], 1, *held[dim + 1 :])

    def run(x: torch.Tensor) -> Steps:
        x = x.to(dtype).to(carried)
        x = x.neg() if kind == "softmin" else x
        top = x.new_full(kept, -math.inf) if is_empty else x.amax(dim, keepdim=True)
        top = yield Reduce(top.contiguous(), axes, "max", kept, carried)
        shifted = x - top
        powers = shifted.exp()
        total = yield Reduce(powers.sum(dim, keepdim=True).contiguous(), axes, "sum", kept, carried)
        return (shifted - total.log() if kind == "log_softmax" else powers / total).to(dtype)

    return run


@kernel("layer_norm", communicates=True)
def layer_norm(site: Site) -> Callable[..., Steps]:
    """params: dims (the normalised ones, last), eps, weight and bias (numbers of the inputs, or None)."""
    layout = site.definition.inputs[0]
    dims, axes, eps = list(site.params["dims"]), site.axes, site.params["eps"]
    weight, bias = site.params["weight"], site.params["bias"]
    counts = [math.prod(shape_of(part)[d] for d in dims) for part in boxes_along(site, layout, axes)]
    total = math.prod(layout.shape[d] for d in dims)
    dtype = site.dtype(layout)
    carried = wide(dtype)
    held = site.local_shape(layout)
    mine = math.prod(held[d] for d in dims)
    kept = tuple(1 if d in dims else n for d, n in enumerate(held))
    shape = (2, *kept)

    def run(*values: torch.Tensor) -> Steps:
        x = values[0].to(carried)
        if mine and x.numel():
            variance, center = torch.var_mean(x, dims, correction=0, keepdim=True)
            own = torch.stack((center, variance * mine))
        else:
            own = torch.zeros(shape, dtype=carried, device=site.device)
        each = yield Gather(own, axes, [shape] * len(counts), carried)
        spread, middle = combine_moments(counts, [e[0] for e in each], [e[1] for e in each], total)
        y = (x - middle) * torch.rsqrt(spread / max(total, 1) + eps)
        return _affine(y, values, weight, bias).to(dtype)

    return run


def _affine(y: torch.Tensor, values: tuple[torch.Tensor, ...], weight: int | None, bias: int | None) -> torch.Tensor:
    if weight is not None:
        y = y * values[weight]
    return y + values[bias] if bias is not None else y


@kernel("rms_norm", communicates=True)
def rms_norm(site: Site) -> Callable[..., Steps]:
    """params: dims, eps (None: the dtype's own), weight (number of the input, or None)."""
    layout = site.definition.inputs[0]
    dims, axes, weight = list(site.params["dims"]), site.axes, site.params["weight"]
    total = math.prod(layout.shape[d] for d in dims)
    dtype, out = site.dtype(layout), site.dtype(site.definition.outputs[0])
    carried = wide(dtype)
    eps = site.params["eps"]
    eps = torch.finfo(dtype).eps if eps is None else eps
    kept = tuple(1 if d in dims else n for d, n in enumerate(site.local_shape(layout)))

    def run(*values: torch.Tensor) -> Steps:
        x = values[0].to(carried)
        squares = yield Reduce(x.square().sum(dims, keepdim=True).contiguous(), axes, "sum", kept, carried)
        return _affine(x * torch.rsqrt(squares / max(total, 1) + eps), values, weight, None).to(out)

    return run


@kernel("channel_norm", communicates=True)
def channel_norm(site: Site) -> Callable[..., Steps]:
    """group_norm, instance_norm and batch_norm with statistics of the input, of dims (batch, channels, space...).

    params: groups; over_batch (statistics over the batch too); eps; weight, bias, running_mean, running_var (numbers of
    the inputs, or None); momentum. The running statistics are updated in place.
    """
    layout = site.definition.inputs[0]
    params, axes = site.params, site.axes
    groups, over_batch, eps = params["groups"], bool(params["over_batch"]), params["eps"]
    weight, bias = params["weight"], params["bias"]
    boxes = boxes_along(site, layout, axes)
    held = site.local_shape(layout)
    rows, channels = (1 if over_batch else held[0]), layout.shape[1]
    step = max(channels // groups, 1)
    dtype = site.dtype(layout)
    carried = wide(dtype)
    sizes = [shape_of(part) for part in boxes]
    counts = [math.prod(s) // max(s[1], 1) // (1 if over_batch else max(s[0], 1)) if 0 not in s else 0 for s in sizes]
    shapes = [(2, rows, s[1]) for s in sizes]
    group_of = torch.cat([torch.arange(*part[1]) // step for part in boxes]).to(site.device)
    weights = torch.cat([torch.full((s[1],), float(n)) for s, n in zip(sizes, counts, strict=True)])
    weights = weights.to(carried).to(site.device)
    first, last = site.box(layout)[1]
    own_groups = (torch.arange(first, last) // step).to(site.device)
    total = step * math.prod(layout.shape[2:]) * (layout.shape[0] if over_batch else 1)
    is_empty = 0 in held

    def run(*values: torch.Tensor) -> Steps:
        x = values[0].to(carried)
        if is_empty:
            own = torch.zeros((2, rows, held[1]), dtype=carried, device=site.device)
        else:
            flat = x.reshape(held[0], held[1], -1)
            flat = flat.transpose(0, 1).reshape(1, held[1], -1) if over_batch else flat
            variance, center = torch.var_mean(flat, 2, correction=0)
            own = torch.stack((center, variance * flat.shape[2]))
        each = torch.cat((yield Gather(own, axes, shapes, carried)), 2)
        zeros = torch.zeros((rows, groups), dtype=carried, device=site.device)
        middle = zeros.index_add(1, group_of, each[0] * weights) / max(total, 1)
        away = each[0] - middle[:, group_of]
        variance = zeros.index_add(1, group_of, each[1] + weights * away * away) / max(total, 1)
        tail = (1,) * (len(held) - 2)
        centers = middle[:, own_groups]
        scales = torch.rsqrt(variance[:, own_groups] + eps)
        y = (x - centers.reshape(rows, held[1], *tail)) * scales.reshape(rows, held[1], *tail)
        shaped = (x, *(v.reshape(-1, *tail) for v in values[1:]))
        y = _affine(y, shaped, weight, bias)
        if params.get("running_mean") is not None:
            _update(values[params["running_mean"]], centers.mean(0), params["momentum"])
        if params.get("running_var") is not None:
            unbiased = variance[:, own_groups].mean(0) * (total / max(total - 1, 1))
            _update(values[params["running_var"]], unbiased, params["momentum"])
        return y.to(dtype)

    return run


def _update(running: torch.Tensor, value: torch.Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


