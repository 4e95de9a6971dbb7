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
    """The best of every piece's best, one more than is asked for: where no two of these are equal, order and indices are
    those of the whole. Otherwise torch's choice among equals depends on the whole, which is then gathered; every device sees
    the same candidates and decides alike.

    params: dim, k, largest, sorted.
    """
    layout = site.definition.inputs[0]
    dim, k = site.params["dim"], site.params["k"]
    largest, is_sorted = bool(site.params["largest"]), bool(site.params["sorted"])
    dtype, axes = site.dtype(layout), site.axes
    pieces = [shape_of(part) for part in boxes_along(site, layout, axes)]
    shapes = [(*p[:dim], min(k + 1, p[dim]), *p[dim + 1 :]) for p in pieces]
    start, stop = site.box(layout)[dim]
    count = min(k + 1, stop - start)
    total = min(k + 1, layout.shape[dim])
    any_order = not is_sorted and k * 64 > layout.shape[dim]  # otherwise torch sorts all the same

    def run(x: torch.Tensor) -> Steps:
        if shapes == pieces:  # candidates are all there is
            whole = torch.cat((yield Gather(x.contiguous(), axes, pieces, dtype)), dim)
            return tuple(torch.topk(whole, k, dim, largest, is_sorted))
        values, where = torch.topk(x, count, dim, largest, True)
        all_values = torch.cat((yield Gather(values.contiguous(), axes, shapes, dtype)), dim)
        all_where = torch.cat((yield Gather((where + start).contiguous(), axes, shapes, torch.int64)), dim)
        values, at = torch.topk(all_values, total, dim, largest, True)
        if not any_order and not _has_equals(values, dim):
            return values.narrow(dim, 0, k).contiguous(), torch.gather(all_where, dim, at.narrow(dim, 0, k))
        whole = torch.cat((yield Gather(x.contiguous(), axes, pieces, dtype)), dim)
        return tuple(torch.topk(whole, k, dim, largest, is_sorted))

    return run


def _has_equals(ordered: torch.Tensor, dim: int) -> bool:
    """Whether neighbours along ``dim`` are equal, NaN to NaN."""
    num = max(ordered.shape[dim] - 1, 0)
    a, b = ordered.narrow(dim, 0, num), ordered.narrow(dim, ordered.shape[dim] - num, num)
    return bool(((a == b) | ((a != a) & (b != b))).any())


@kernel("scan_extreme", communicates=True)
def scan_extreme(site: Site) -> Callable[..., Steps]:
    """cummax, cummin with global indices: each piece's own, where nothing before it is better. params: dim, kind."""
    layout = site.definition.inputs[0]
    dim, axes = site.params["dim"], site.axes
    fn, beats = (torch.cummax, torch.ge) if site.params["kind"] == "cummax" else (torch.cummin, torch.le)
    dtype = site.dtype(layout)
    pieces = [shape_of(part) for part in boxes_along(site, layout, axes)]
    shapes = [(*p[:dim], min(p[dim], 1), *p[dim + 1 :]) for p in pieces]
    before = [i for i in range(rank_along(site, axes)) if pieces[i][dim]]
    start = site.box(layout)[dim][0]

    def later(one: list[torch.Tensor], two: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of two (values, indices) the second where it is as good, as torch does; NaN is better than anything."""
        wins = (two[0] != two[0]) | ((one[0] == one[0]) & beats(two[0], one[0]))
        return [torch.where(wins, b, a) for a, b in zip(one, two, strict=True)]

    def run(x: torch.Tensor) -> Steps:
        values, at = fn(x, dim)
        at = at + start
        last = max(x.shape[dim] - 1, 0)
        ends = [t.narrow(dim, last, min(x.shape[dim], 1)).contiguous() for t in (values, at)]
        all_values = yield Gather(ends[0], axes, shapes, dtype)
        all_at = yield Gather(ends[1], axes, shapes, torch.int64)
        if not before:
            return values, at
        best = [all_values[before[0]], all_at[before[0]]]
        for i in before[1:]:
            best = later(best, [all_values[i], all_at[i]])
        return tuple(later(best, [values, at]))

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
