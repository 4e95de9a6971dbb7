"""Reductions over dims that are sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.comm import Gather, Reduce
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.kernels._lines import boxes_along, shape_of, wide


@kernel("mean")
def mean(site: Site) -> Callable[..., Any]:
    """A summand of the mean: the local sum over the global count, so uneven and empty shards weigh what they hold."""
    shape = site.definition.inputs[0].shape
    dims = list(site.params["dims"])
    keepdim = bool(site.params["keepdim"])
    count = math.prod(shape[d] for d in dims)
    dtype = site.dtype(site.definition.outputs[0])
    carried = wide(dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        total = torch.sum(x, dims, keepdim, dtype=carried) if dims else x.to(carried)
        return (total / count if count else total * math.nan).to(dtype)

    return run


@kernel("nanmean", communicates=True)
def nanmean(site: Site) -> Callable[..., Steps]:
    """The sum of what is not NaN over the count of it."""
    dims = list(site.params["dims"])
    layout = site.definition.outputs[0]
    dtype, shape, axes = site.dtype(layout), site.local_shape(layout), site.axes
    carried = wide(dtype)

    def run(x: torch.Tensor) -> Steps:
        total = torch.nansum(x, dims, dtype=carried).reshape(shape)
        count = torch.isnan(x).logical_not_().sum(dims).reshape(shape)
        total = yield Reduce(total, axes, "sum", shape, carried)
        count = yield Reduce(count, axes, "sum", shape, torch.int64)
        return (total / count).to(dtype)

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
    """A piece's maximum or minimum (or both, one an output); an empty piece gives what changes nothing.

    ``params["kind"]``: "max", "min", or one of these an output.
    """
    call = site.bound()
    held = site.local_shape(site.definition.inputs[0])
    if all(held[d] for d in site.params["dims"]):
        return call
    kinds = site.params["kind"]
    kinds = [kinds] if isinstance(kinds, str) else kinds

    def run(*_: Any) -> Any:
        made = []
        for layout, kind in zip(site.definition.outputs, kinds, strict=True):
            dtype = site.dtype(layout)
            made.append(torch.full(site.local_shape(layout), identity(dtype, kind), dtype=dtype, device=site.device))
        return made[0] if len(made) == 1 else tuple(made)

    return run


@kernel("trace")
def trace(site: Site) -> Callable[..., Any]:
    """The sum of those elements of a piece that lie on the diagonal of the whole matrix."""
    (row, _), (column, _) = site.box(site.definition.inputs[0])
    dtype = site.dtype(site.definition.outputs[0])
    return lambda x: torch.diagonal(x, row - column).sum(dtype=dtype)


@kernel("extreme_at", communicates=True)
def extreme_at(site: Site) -> Callable[..., Steps]:
    """Extreme values and where they are first, by global index; of all elements when ``params["dim"]`` is None.

    Gives (values, indices), or the indices alone when there is one output.
    """
    layout = site.definition.inputs[0]
    dim, kind = site.params["dim"], site.params["kind"]
    outputs = site.definition.outputs
    shape = site.local_shape(outputs[-1])
    part = site.box(layout)
    held = shape_of(part)
    dtype, axes = site.dtype(layout), site.axes
    num = math.prod(site.mesh.shape[axis] for axis in axes)
    best = torch.amax if kind == "max" else torch.amin
    find = torch.argmax if kind == "max" else torch.argmin
    nowhere = torch.iinfo(torch.int64).max
    empty = 0 in held if dim is None else held[dim] == 0
    strides = [math.prod(layout.shape[d + 1 :]) for d in range(len(layout.shape))]

    def globally(at: torch.Tensor) -> torch.Tensor:
        if dim is not None:
            return torch.add(at, part[dim][0])
        total = torch.zeros_like(at)
        for d in range(len(held) - 1, -1, -1):
            total += (at % held[d] + part[d][0]) * strides[d]
            at = at // held[d]
        return total

    def run(x: torch.Tensor) -> Steps:
        if empty:
            values = torch.full(shape, identity(dtype, kind), dtype=dtype, device=site.device)
            where = torch.full(shape, nowhere, dtype=torch.int64, device=site.device)
        else:
            y = x.to(torch.uint8) if dtype == torch.bool else x
            found = find(y) if dim is None else find(y, dim, keepdim=True)
            values = (x.reshape(-1)[found] if dim is None else torch.gather(x, dim, found)).reshape(shape)
            where = globally(found).reshape(shape)
        all_values = torch.stack((yield Gather(values.contiguous(), axes, [shape] * num, dtype)))
        all_where = torch.stack((yield Gather(where, axes, [shape] * num, torch.int64)))
        top = best(all_values, 0)
        here = all_values == top
        if dtype.is_floating_point:
            here = here | (all_values.isnan() & top.isnan())
        first = all_where.masked_fill(here.logical_not_(), nowhere).amin(0)
        return first if len(outputs) == 1 else (top, first)

    return run


@kernel("moments", communicates=True)
def moments(site: Site) -> Callable[..., Steps]:
    """Variance or deviation, and the mean beside it, from each piece's count, mean and squared deviations.

    params: dims, correction, root (whether to take the square root).
    """
    layout = site.definition.inputs[0]
    outputs = site.definition.outputs
    dims, axes = list(site.params["dims"]), site.axes
    boxes = [shape_of(part) for part in boxes_along(site, layout, axes)]
    counts = [math.prod(held[d] for d in dims) for held in boxes]
    total = math.prod(layout.shape[d] for d in dims)
    divisor = float(max(total - site.params["correction"], 0))
    dtype = site.dtype(layout)
    carried = wide(dtype)
    real = carried.to_real()
    shape = site.local_shape(outputs[0])
    mine = math.prod(site.local_shape(layout)[d] for d in dims)

    def run(x: torch.Tensor) -> Steps:
        if mine and x.numel():
            squares, center = torch.var_mean(x.to(carried), dims, correction=0)
            squares, center = (squares * mine).reshape(shape), center.reshape(shape)
        else:
            squares = torch.zeros(shape, dtype=real, device=site.device)
            center = torch.zeros(shape, dtype=carried, device=site.device)
        centers = yield Gather(center.contiguous(), axes, [shape] * len(counts), carried)
        spreads = yield Gather(squares.contiguous(), axes, [shape] * len(counts), real)
        spread, middle = combine_moments(counts, centers, spreads, total)
        value = spread / divisor if divisor else spread / torch.zeros_like(spread)
        if site.params["root"]:
            value = value.sqrt()
        value = value.to(site.dtype(outputs[0]))
        return value if len(outputs) == 1 else (value, middle.to(site.dtype(outputs[1])))

    return run


def combine_moments(
    counts: list[int], centers: list[torch.Tensor], spreads: list[torch.Tensor], total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed squared deviations, mean) of pieces with these counts, means and squared deviations."""
    if not total:
        return torch.zeros_like(spreads[0]), torch.full_like(centers[0], math.nan)
    held = [i for i, n in enumerate(counts) if n]
    middle = centers[held[0]] * (counts[held[0]] / total)
    for i in held[1:]:
        middle = middle + centers[i] * (counts[i] / total)
    spread = torch.zeros_like(spreads[0])
    for i in held:
        away = centers[i] - middle
        away = away.abs() if away.is_complex() else away
        spread = spread + spreads[i] + away * away * counts[i]
    return spread, middle


@kernel("vector_norm", communicates=True)
def vector_norm(site: Site) -> Callable[..., Steps]:
    """The p-norm of the pieces' p-norms. params: dims, order."""
    layout = site.definition.inputs[0]
    dims, order, axes = list(site.params["dims"]), float(site.params["order"]), site.axes
    out = site.definition.outputs[0]
    shape, dtype = site.local_shape(out), site.dtype(out)
    carried = wide(dtype)
    held = site.local_shape(layout)
    num = math.prod(site.mesh.shape[axis] for axis in axes)
    is_empty = not all(held[d] for d in dims)
    nothing = math.inf if order < 0 else 0.0

    def run(x: torch.Tensor) -> Steps:
        if is_empty:
            own = torch.full(shape, nothing, dtype=carried, device=site.device)
        else:
            wider = carried.to_complex() if x.is_complex() else carried
            own = torch.linalg.vector_norm(x.to(wider), order, dims).to(carried).reshape(shape)
        each = torch.stack((yield Gather(own.contiguous(), axes, [shape] * num, carried)))
        total = each.sum(0) if order == 0 else torch.linalg.vector_norm(each, order, 0)
        return total.to(dtype)

    return run


@kernel("logsumexp", communicates=True)
def logsumexp(site: Site) -> Callable[..., Steps]:
    """Shifted by the global maximum, so that nothing overflows."""
    dims, axes = list(site.params["dims"]), site.axes
    out = site.definition.outputs[0]
    shape, dtype = site.local_shape(out), site.dtype(out)
    carried = wide(dtype)
    held = site.local_shape(site.definition.inputs[0])
    kept = tuple(1 if d in dims else n for d, n in enumerate(held))
    is_empty = not all(held[d] for d in dims)

    def run(x: torch.Tensor) -> Steps:
        x = x.to(carried)
        top = x.new_full(kept, -math.inf) if is_empty else x.amax(dims, keepdim=True)
        top = yield Reduce(top.contiguous(), axes, "max", kept, carried)
        shift = top.masked_fill(top.abs() == math.inf, 0)
        total = (x - shift).exp_().sum(dims, keepdim=True)
        total = yield Reduce(total.contiguous(), axes, "sum", kept, carried)
        return (total.log() + shift).to(dtype).reshape(shape)

    return run
