"""Ops along a sharded dim that depend on order."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dtorch.runtime.comm import Gather
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.kernels._lines import boxes_along, rank_along, shape_of, wide


@kernel("topk", communicates=True)
def topk(site: Site) -> Callable[..., Steps]:
    """The best of every piece's best. params: dim, k, largest, sorted."""
    layout = site.definition.inputs[0]
    dim, k = site.params["dim"], site.params["k"]
    largest, is_sorted = bool(site.params["largest"]), bool(site.params["sorted"])
    dtype, axes = site.dtype(layout), site.axes
    shapes = []
    for part in boxes_along(site, layout, axes):
        shape = list(shape_of(part))
        shape[dim] = min(k, shape[dim])
        shapes.append(tuple(shape))
    start, stop = site.box(layout)[dim]
    count = min(k, stop - start)

    def run(x: torch.Tensor) -> Steps:
        values, where = torch.topk(x, count, dim, largest, True)
        all_values = torch.cat((yield Gather(values.contiguous(), axes, shapes, dtype)), dim)
        all_where = torch.cat((yield Gather((where + start).contiguous(), axes, shapes, torch.int64)), dim)
        values, at = torch.topk(all_values, k, dim, largest, is_sorted)
        return values, torch.gather(all_where, dim, at)

    return run


_SCANS: dict[str, Callable[..., torch.Tensor]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
}
_TOTALS: dict[str, Callable[..., torch.Tensor]] = {
    "cumsum": torch.sum,
    "cumprod": torch.prod,
    "logcumsumexp": torch.logsumexp,
}
_JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cumsum": torch.add,
    "cumprod": torch.mul,
    "logcumsumexp": torch.logaddexp,
}
_STARTS = {"cumsum": 0.0, "cumprod": 1.0, "logcumsumexp": -math.inf}


@kernel("scan", communicates=True)
def scan(site: Site) -> Callable[..., Steps]:
    """A cumulative op: each piece's own, joined with the total of the pieces before it. params: dim, kind."""
    layout = site.definition.inputs[0]
    dim, kind, axes = site.params["dim"], site.params["kind"], site.axes
    dtype = site.dtype(site.definition.outputs[0])
    carried = wide(dtype)
    boxes = boxes_along(site, layout, axes)
    shapes = []
    for part in boxes:
        shape = list(shape_of(part))
        shape[dim] = 1
        shapes.append(tuple(shape))
    me = rank_along(site, axes)
    before = [i for i in range(me) if boxes[i][dim][0] < boxes[i][dim][1]]
    is_empty = boxes[me][dim][0] == boxes[me][dim][1]
    writes = bool(site.definition.writes)

    def run(x: torch.Tensor) -> Steps:
        y = x.to(carried)
        if is_empty:
            own = torch.full(shapes[me], _STARTS[kind], device=site.device).to(carried)
        else:
            own = _TOTALS[kind](y, dim, keepdim=True).to(carried)
        totals = yield Gather(own.contiguous(), axes, shapes, carried)
        out = _SCANS[kind](y, dim)
        if before:
            prefix = totals[before[0]]
            for i in before[1:]:
                prefix = _JOINS[kind](prefix, totals[i])
            out = _JOINS[kind](out, prefix)
        return x.copy_(out) if writes else out.to(dtype)

    return run
