"""Ops that look through a window along dims that are sharded: neighbours hand over only what a window needs (the halo).

Each device works out which part of the input its part of the output reads, gets what it lacks of it, and runs torch's function
on that, without padding along the cut dims: what lies beyond the tensor is filled in. A *body* is that work; bodies are found
by ``params["body"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dtorch.runtime.comm import Exchange
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.layout import Box, is_shard, numel, shard_dim, slices
from dtorch.runtime.moves import plan_reads
from dtorch.runtime.windows import Looked, Slide, clipped, looked_of, spans


@dataclass(frozen=True)
class View:
    """What a body knows.

    Attributes:
        looked: the dims that are cut, or whose padding the op's own function cannot do.
        span: the part of the input that the body is given, padding included.
        out: the part of the outputs that it makes.
        shape: of the whole input.
    """

    site: Site
    looked: tuple[Looked, ...]
    span: Box
    out: Box
    shape: tuple[int, ...]

    def among(self, values: Sequence[int], first: int, at_cut: int) -> list[int]:
        """``values``, one a dim from ``first`` on, with ``at_cut`` for the dims that are cut."""
        cut = {seen.dim for seen in self.looked}
        return [at_cut if first + i in cut else v for i, v in enumerate(values)]


Body = Callable[[View], Callable[..., Any]]
BODIES: dict[str, Body] = {}


def body(name: str) -> Callable[[Body], Body]:
    def register(made: Body) -> Body:
        BODIES[name] = made
        return made

    return register


@kernel("window", communicates=True)
def window(site: Site) -> Callable[..., Steps]:
    """params: body, looked (dims seen through windows), fill (beyond the tensor), padded (dims to fill in though not cut)."""
    definition, params = site.definition, site.params
    layout = definition.inputs[0]
    source, target = site.placed(layout), site.placed(definition.outputs[0])
    explicit = {shard_dim(c) for c, num in zip(source.codes, source.mesh_shape, strict=True) if is_shard(c) and num > 1}
    explicit |= set(params.get("padded", ()))
    looked = tuple(seen for seen in map(looked_of, params["looked"]) if seen.dim in explicit)
    needed = spans(source, target, looked)
    moves = plan_reads(source, tuple(clipped(span, source.shape) for span in needed))
    own = moves.device(site.place)
    assert own.target is not None
    span = needed[source.places().index(site.place)]
    is_inside = own.target == span
    dtype, fill = site.dtype(layout), params.get("fill", 0)
    shapes = [site.local_shape(out) for out in definition.outputs]
    dtypes = [site.dtype(out) for out in definition.outputs]
    view = View(site, looked, span, site.box(definition.outputs[0]), source.shape)
    work = BODIES[params["body"]](view) if all(map(all, shapes)) else None

    def run(x: torch.Tensor, *rest: Any) -> Steps:
        got: list[torch.Tensor] = []
        if not moves.is_local:
            sends = [(dst, x[slices(part, own.source)]) for dst, part in own.sends]  # type: ignore[arg-type]
            got = yield Exchange(sends, [(src, tuple(b - a for a, b in part)) for src, part in own.receives], dtype)
        if work is None:
            made: Any = [torch.empty(s, dtype=d, device=site.device) for s, d in zip(shapes, dtypes, strict=True)]
            return made[0] if len(made) == 1 else tuple(made)
        if own.source == span:
            return work(x, *rest)
        size = [b - a for a, b in span]
        whole = x.new_empty(size) if is_inside else x.new_full(size, fill)
        if own.keep is not None and numel(own.keep):
            whole[slices(own.keep, span)] = x[slices(own.keep, own.source)]  # type: ignore[arg-type]
        for (_, part), piece in zip(own.receives, got, strict=True):
            whole[slices(part, span)] = piece.to(site.device)
        return work(whole, *rest)

    return run


# ---- pooling


@body("avg_pool")
def avg_pool(view: View) -> Callable[..., Any]:
    """params: kernel, stride, padding, ceil_mode, include (count_include_pad), divisor.

    Along cut dims the function sees windows that are full; where a window reaches beyond what counts, its mean is scaled up.
    """
    params, site = view.site.params, view.site
    sizes = params["kernel"]
    first = len(view.shape) - len(sizes)
    padding = view.among(params["padding"], first, 0)
    named = {} if params["divisor"] is None else {"divisor_override": params["divisor"]}
    dtype = site.dtype(site.definition.outputs[0])
    factors: list[torch.Tensor] = []
    for seen in view.looked if params["divisor"] is None else ():
        w = seen.window
        assert isinstance(w, Slide)
        low, high = (-w.before, view.shape[seen.dim] + w.before) if params["include"] else (0, view.shape[seen.dim])
        starts = [o * w.stride - w.before for o in range(*view.out[seen.out])]
        counts = [min(s + w.kernel, high) - max(s, low) for s in starts]
        if any(c != w.kernel for c in counts):
            factor = torch.tensor([w.kernel / c for c in counts], dtype=dtype, device=site.device)
            factors.append(factor.reshape(-1, *(1,) * (len(view.shape) - seen.out - 1)))
    fn, stride = site.fn, params["stride"]
    rest = (padding, params["ceil_mode"], params["include"])

    def run(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = fn(x, sizes, stride, *rest, **named)
        for factor in factors:
            made = made * factor
        return made

    return run


_MAX_POOL: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@body("max_pool")
def max_pool(view: View) -> Callable[..., Any]:
    """params: kernel, stride, padding, dilation, ceil_mode; indices are those in the whole input."""
    params = view.site.params
    sizes = params["kernel"]
    space = len(sizes)
    first = len(view.shape) - space
    padding = view.among(params["padding"], first, 0)
    fn, listed = _MAX_POOL[space], len(view.site.definition.outputs) > 1
    rest = (params["stride"], padding, params["dilation"], params["ceil_mode"], listed)
    dilation = {seen.dim: seen.window.dilation for seen in view.looked if isinstance(seen.window, Slide)}

    def globally(at: torch.Tensor, dim: int) -> torch.Tensor:
        at = at + view.span[dim][0]
        # Torch begins a window at its first element inside; here that can only show where nothing beats the padding.
        step = dilation.get(dim, 1)
        return torch.where(at < 0, at + (step - 1 - at) // step * step, at)

    def run(x: torch.Tensor) -> Any:
        if not listed:
            return fn(x, sizes, *rest)
        values, at = fn(x, sizes, *rest)
        return values, reindexed(at, x.shape[first:], view.shape[first:], lambda i, d: globally(i, first + d))

    return run


def reindexed(
    at: torch.Tensor, local: Sequence[int], whole: Sequence[int], globally: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Flat indices into dims of sizes ``local`` as flat indices into dims of sizes ``whole``; ``globally`` of (index, dim)."""
    total = torch.zeros_like(at)
    for d in range(len(local) - 1, -1, -1):
        total = total + globally(at % local[d], d) * math.prod(whole[d + 1 :])
        at = at // local[d]
    return total


# ---- windows laid out


@body("im2col")
def im2col(view: View) -> Callable[..., Any]:
    """torch.nn.functional.unfold. params: kernel, dilation, padding, stride."""
    params = view.site.params
    padding = view.among(params["padding"], len(view.shape) - 2, 0)
    kernel, dilation, stride = (tuple(params[name]) for name in ("kernel", "dilation", "stride"))
    return lambda x: F.unfold(x, kernel, dilation, tuple(padding), stride)


@body("own")
def own_function(view: View) -> Callable[..., Any]:
    """The op itself on what it reads, in memory of its own."""
    call = view.site.bound()
    return lambda x: call(x).clone(memory_format=torch.contiguous_format)


@body("diag_embed")
def diag_embed(view: View) -> Callable[..., Any]:
    """Rows of matrices that hold their part of a diagonal. params: dims (rows, columns), offset."""
    params = view.site.params
    dim1, dim2 = params["dims"]
    first, last = view.span[-1]
    shift = first + max(params["offset"], 0)  # column of the first row's element
    skipped = max(-shift, 0)
    shape = [b - a for a, b in view.out]

    def run(x: torch.Tensor) -> torch.Tensor:
        made = x.new_zeros(shape)
        if -shape[dim1] < shift < shape[dim2]:
            line = made.diagonal(shift, dim1, dim2)
            line.copy_(x.narrow(-1, skipped, line.shape[-1]))
        return made

    assert last - first == shape[dim1]
    return run
