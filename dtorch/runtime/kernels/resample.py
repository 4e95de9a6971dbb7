"""Bodies of kernel "window" for ops whose windows differ from output to output: adaptive pooling and interpolation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dtorch.runtime.kernels.reduce import identity
from dtorch.runtime.kernels.window import View, body, reindexed
from dtorch.runtime.windows import Held, Looked, Share, Taps


def _share(view: View, seen: Looked) -> list[tuple[int, int]]:
    """The windows of this device's outputs along a dim, within what it was given."""
    assert isinstance(seen.window, Share)
    first = view.span[seen.dim][0]
    found = (seen.window.reads(o, o + 1) for o in range(*view.out[seen.out]))
    return [(a - first, b - first) for a, b in found]


def _sizes(view: View, space: int) -> list[int]:
    return [b - a for a, b in view.out[len(view.out) - space :]]


@body("adaptive_avg")
def adaptive_avg(view: View) -> Callable[..., Any]:
    """Means along the cut dims, then torch's function along the others. params: space (number of dims)."""
    space, fn = view.site.params["space"], view.site.fn
    sizes = _sizes(view, space)
    is_left = len(view.looked) < space

    def run(x: torch.Tensor) -> torch.Tensor:
        for seen in view.looked:
            dim = seen.dim
            if isinstance(seen.window, Held):
                x = x.sum(dim, keepdim=True) / seen.window.size
            else:
                x = torch.stack([x.narrow(dim, a, b - a).mean(dim) for a, b in _share(view, seen)], dim)
        return fn(x, sizes) if is_left else x

    return run


_ADAPTIVE_MAX: dict[int, Callable[..., Any]] = {
    1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d
}  # fmt: skip


@body("adaptive_max")
def adaptive_max(view: View) -> Callable[..., Any]:
    """Rows are repeated until the windows along cut dims are all of one size and side by side; then torch's own function.

    params: space.
    """
    space, site = view.site.params["space"], view.site
    fn, listed = _ADAPTIVE_MAX[space], len(site.definition.outputs) > 1
    first = len(view.shape) - space
    sizes = _sizes(view, space)
    rows: dict[int, torch.Tensor] = {}
    for seen in view.looked:
        if isinstance(seen.window, Held):
            continue
        windows = _share(view, seen)
        most = max(b - a for a, b in windows)
        found = [min(a + k, b - 1) for a, b in windows for k in range(most)]
        rows[seen.dim] = torch.tensor(found, device=site.device)
    held = [seen.dim for seen in view.looked if isinstance(seen.window, Held)]
    dtype = site.dtype(site.definition.outputs[0])

    def run(x: torch.Tensor) -> Any:
        for dim in held:
            if not x.shape[dim]:
                shape = site.local_shape(site.definition.outputs[0])
                return torch.full(shape, identity(dtype, "max"), dtype=dtype, device=site.device)
            x = x.amax(dim, keepdim=True)
        for dim, index in rows.items():
            x = x.index_select(dim, index)
        if not listed:
            return fn(x, sizes)
        values, at = fn(x, sizes, return_indices=True)

        def globally(i: torch.Tensor, d: int) -> torch.Tensor:
            dim = first + d
            return rows[dim][i] + view.span[dim][0] if dim in rows else i

        return values, reindexed(at, x.shape[first:], view.shape[first:], globally)

    return run


@body("interpolate")
def interpolate(view: View) -> Callable[..., Any]:
    """Weighted sums of a few rows, dim by dim. Every spatial dim is looked at, cut or not."""
    dtype = view.site.dtype(view.site.definition.inputs[0])
    steps = []
    for seen in view.looked:
        assert isinstance(seen.window, Taps)
        part = slice(*view.out[seen.out])
        index, weight = (t[part].to(view.site.device) for t in seen.window.table())
        shape = (-1, *(1,) * (len(view.shape) - seen.dim - 1))
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        weights = [w.to(wide).reshape(shape) for w in weight.unbind(1)]
        rows = [i - view.span[seen.dim][0] for i in index.unbind(1)]
        steps.append((seen.dim, rows, weights, seen.window.smooth))

    def run(x: torch.Tensor) -> torch.Tensor:
        for dim, rows, weights, is_padded in steps:
            if len(rows) == 1:
                x = x.index_select(dim, rows[0])
                continue
            total = None
            for index, weight in zip(rows, weights, strict=True):
                term = x.index_select(dim, index) * weight
                term = term.masked_fill(weight == 0, 0) if is_padded else term  # taps that only fill up the table
                total = term if total is None else total + term
            assert total is not None
            x = total
        return x.to(dtype)

    return run
