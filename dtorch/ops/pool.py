"""Pooling, interpolation and other ops on planes: batch and channels pass through; of space, halos move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.ops._affine import partial_through
from dtorch.ops._call import Call, R, Rule, Sig, sharded
from dtorch.ops._rules import P_AVG, P_MAX, P
from dtorch.ops.conv import per_dim
from dtorch.ops.reduce import is_inexact, keeps
from dtorch.ops.table import FUNCTIONAL, OPS, composite, row
from dtorch.runtime.kernels.reduce import identity
from dtorch.runtime.layout import is_shard, shard_block, shard_code, shard_dim, split
from dtorch.runtime.windows import Held, Looked, Share, Slide, Taps, Window, plain
from dtorch.tensor import TORCH

_functional = "torch.nn.functional"


def _leading(call: Call, space: int) -> list[Sig]:
    """All dims but the last ``space`` pass through."""
    rest = call.num_inputs - 1
    return [sharded(call, (d, *(d,) * rest), d, kernel="filled") for d in range(call.tensors[0].ndim - space)]


def _linear(call: Call) -> list[Sig]:
    return keeps(call, P, P_AVG) if is_inexact(call) else []


def _looking(
    call: Call, body: str, windows: Sequence[Window], more: dict[str, Any], outs: Sequence[int] | None = None
) -> list[Sig]:
    """The last dims may be sharded: each device fetches what its windows reach.

    Args:
        windows: one for each of the last dims, which are as many in input and outputs.
        outs: the outputs' code for each of these dims, the dim itself by default.
    """
    first = call.tensors[0].ndim - len(windows)
    looked = [plain(Looked(first + i, first + i, w)) for i, w in enumerate(windows)]
    params = {"body": body, "looked": looked, **more}
    codes = outs or [first + i for i in range(len(windows))]
    return [sharded(call, (first + i,), code, kernel="window", params=params) for i, code in enumerate(codes)]


def _only_space(space: int) -> Rule:
    return lambda call: _leading(call, space)


# ---- windows of one size


def _avg_pool(space: int) -> Rule:
    """avg_pool(kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)."""

    def rule(call: Call) -> list[Sig]:
        sigs = _leading(call, space) + _linear(call)
        if not is_inexact(call):
            return sigs
        kernel, stride, padding = _sizes(call, space, 1, 2, 3)
        more = {
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "ceil_mode": bool(call.arg(4, "ceil_mode", False)),
            "include": bool(call.arg(5, "count_include_pad", True)),
            "divisor": call.arg(6, "divisor_override", None),
        }
        windows = [Slide(k, s, 1, p) for k, s, p in zip(kernel, stride, padding, strict=True)]
        return sigs + _looking(call, "avg_pool", windows, more)

    return rule


def _max_pool(space: int) -> Rule:
    """max_pool(kernel_size, stride, padding, dilation, ceil_mode, return_indices)."""

    def rule(call: Call) -> list[Sig]:
        kernel, stride, padding = _sizes(call, space, 1, 2, 3)
        dilation = per_dim(call.arg(4, "dilation", 1), space)
        more = {
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "ceil_mode": bool(call.arg(5, "ceil_mode", False)),
            "fill": identity(call.tensors[0].dtype, "max"),
        }
        windows = [Slide(*w) for w in zip(kernel, stride, dilation, padding, strict=True)]
        return _leading(call, space) + _looking(call, "max_pool", windows, more)

    return rule


def _sizes(call: Call, space: int, kernel_at: int, stride_at: int, padding_at: int) -> tuple[list[int], list[int], list[int]]:
    """Kernel, stride (the kernel by default) and padding, one a dim."""
    kernel = per_dim(call.arg(kernel_at, "kernel_size"), space)
    stride = call.arg(stride_at, "stride", None)
    stride = kernel if stride is None or stride == [] or stride == () else per_dim(stride, space)
    return kernel, stride, per_dim(call.arg(padding_at, "padding", 0), space)


def _lp_pool(space: int, name: str) -> None:
    plain_function = getattr(torch.nn.functional, name)
    avg, top = OPS[f"{_functional}.avg_pool{space}d"], OPS[f"{_functional}.max_pool{space}d"]

    def call(input: Any, norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Any:
        if abs(norm_type) == math.inf:
            sign = 1 if norm_type > 0 else -1
            best = top(input.abs() if sign > 0 else -input.abs(), kernel_size, stride, 0, 1, ceil_mode)
            return best if sign > 0 else -best
        named = {} if stride is None else {"stride": stride}
        mean = avg(input.pow(norm_type), kernel_size, padding=0, ceil_mode=ceil_mode, **named)
        count = math.prod(per_dim(kernel_size, space))
        return (torch.sign(mean) * torch.relu(torch.abs(mean))).mul(count).pow(1.0 / norm_type)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``F.{name}``: made of average pooling, as in torch."
    composite(plain_function, functional=name)(call)


# ---- adaptive pooling


def _adaptive(space: int, kind: str) -> Rule:
    """Where all of a dim goes into one output, each device reduces what it holds; otherwise windows move."""
    body, code = f"adaptive_{kind}", P if kind == "avg" else P_MAX

    def rule(call: Call) -> list[Sig]:
        x, out = call.tensors[0], call.outputs[0]
        sigs = _leading(call, space) + (_linear(call) if kind == "avg" else [])
        if out.ndim != x.ndim or 0 in out.shape[-space:]:
            return sigs
        first = x.ndim - space
        joined = [out.shape[d] == 1 and len(call.outputs) == 1 for d in range(first, x.ndim)]
        sizes = zip(x.shape[first:], out.shape[first:], joined, strict=True)
        windows: list[Window] = [Held(n) if one else Share(n, m) for n, m, one in sizes]
        codes = [code if one else first + i for i, one in enumerate(joined)]
        return sigs + _looking(call, body, windows, {"space": space}, codes)

    return rule


# ---- interpolation

_MODES = {
    "nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "linear", "bilinear": "linear", "trilinear": "linear",
    "bicubic": "cubic", "lanczos": "lanczos",
}  # fmt: skip


def _interpolate(call: Call) -> list[Sig]:
    """interpolate(size, scale_factor, mode, align_corners, recompute_scale_factor, antialias): linear in every mode."""
    x, out = call.tensors[0], call.outputs[0]
    space = x.ndim - 2
    sigs = _leading(call, space) + _linear(call)
    mode = call.arg(3, "mode", "nearest")
    if not x.dtype.is_floating_point or 0 in x.shape:
        return sigs
    is_upsample = call.name.endswith("upsample")
    factors: list[float | None] = [None] * space
    given = call.arg(2, "scale_factor", None)
    if given is not None and (is_upsample or not call.arg(5, "recompute_scale_factor", None)):
        factors = [float(f) for f in given] if isinstance(given, (list, tuple)) else [float(given)] * space
    windows: list[Window]
    if mode == "area":
        windows = [Share(n, m) for n, m in zip(x.shape[2:], out.shape[2:], strict=True)]
        return sigs + _looking(call, "adaptive_avg", windows, {"space": space, "padded": list(range(2, x.ndim))})
    smooth = not is_upsample and bool(call.arg(6, "antialias", False))
    corners = bool(call.arg(4, "align_corners", None))
    if mode not in _MODES:
        return sigs
    windows = [
        Taps(_MODES[mode], n, m, f, corners, smooth, x.dtype == torch.float64)
        for n, m, f in zip(x.shape[2:], out.shape[2:], factors, strict=True)
    ]
    return sigs + _looking(call, "interpolate", windows, {"padded": list(range(2, x.ndim))})


# ---- planes taken apart and put together


def _shuffle(call: Call) -> list[Sig]:
    """pixel_shuffle: a row of input becomes ``factor`` rows of output, and groups of channels one channel."""
    x = call.tensors[0]
    factor = call.arg(1, "upscale_factor")
    sigs = [sharded(call, (d,), d, kernel="filled") for d in range(x.ndim - 3)] + keeps(call, P, P_AVG)
    for d, unit, out in ((x.ndim - 3, factor**2, 1), (x.ndim - 2, 1, factor), (x.ndim - 1, 1, factor)):
        sigs.append(_at_multiples(call, d, unit, out))
    return sigs


def _unshuffle(call: Call) -> list[Sig]:
    """pixel_unshuffle: windows side by side."""
    x = call.tensors[0]
    factor = call.arg(1, "downscale_factor")
    sigs = [sharded(call, (d,), d, kernel="filled") for d in range(x.ndim - 3)] + keeps(call, P, P_AVG)
    sigs.append(_at_multiples(call, x.ndim - 3, 1, factor**2))
    return sigs + _looking(call, "own", [Slide(factor, factor, 1, 0)] * 2, {})


def _at_multiples(call: Call, dim: int, unit: int, out: int) -> Sig:
    """Sharded ``dim`` cut at multiples of ``unit``; the output's dim is then cut at multiples of ``out``. Cuts that lie there
    by chance are as good."""
    codes = call.tensors[0].codes
    code, size, num = codes[call.axis], call.tensors[0].shape[dim], call.mesh_shape[call.axis]
    block = shard_block(code) if is_shard(code) and shard_dim(code) == dim else 1
    alone = sum(1 for c in codes if is_shard(c) and shard_dim(c) == dim) <= 1
    if block % unit and not (alone and split(0, size, num, block) == split(0, size, num, unit)):
        block = code_block = unit
    else:
        code_block, block = block, block if block % unit == 0 else unit
    made, whole = block * out // unit, size * out // unit
    if alone and split(0, whole, num, 1) == split(0, whole, num, made):
        made = 1
    return Sig((shard_code(dim, code_block),), (shard_code(dim, made),), "filled")


def _channel_shuffle(call: Call) -> list[Sig]:
    x = call.tensors[0]
    return [sharded(call, (d,), d, kernel="filled") for d in range(x.ndim) if d != 1] + keeps(call, P, P_AVG)


def _unfold(call: Call) -> list[Sig]:
    """F.unfold(kernel_size, dilation, padding, stride): (N, C, H, W) -> (N, C * K, L), L being rows of windows."""
    x, out = call.tensors[0], call.outputs[0]
    channel = x.ndim - 3
    sigs = ([sharded(call, (0,), 0, kernel="filled")] if channel else []) + keeps(call, P, P_AVG)
    kernel, dilation = per_dim(call.arg(1, "kernel_size"), 2), per_dim(call.arg(2, "dilation", 1), 2)
    padding, stride = per_dim(call.arg(3, "padding", 0), 2), per_dim(call.arg(4, "stride", 1), 2)
    sigs.append(_at_multiples(call, channel, 1, math.prod(kernel)))
    width = (x.shape[-1] + 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    looked = Looked(channel + 1, channel + 1, Slide(kernel[0], stride[0], dilation[0], padding[0]), width)
    code = x.codes[call.axis]
    block = shard_block(code) if is_shard(code) and shard_dim(code) == channel + 1 else 1
    params = {"body": "im2col", "looked": [plain(looked)], "kernel": kernel, "dilation": dilation, "padding": padding,
              "stride": stride}  # fmt: skip
    if out.ndim == x.ndim - 1 and width:
        rows = shard_code(channel + 1, block * width)
        sigs.append(Sig((shard_code(channel + 1, block),), (rows,), "window", params))
    return sigs


def _frames(call: Call) -> list[Sig]:
    """Tensor.unfold(dimension, size, step): windows along a dim, their elements in a dim of their own at the end."""
    x = call.tensors[0]
    if not x.ndim:
        return []
    dim, size, step = call.arg(1, "dimension") % x.ndim, call.arg(2, "size"), call.arg(3, "step")
    params = {"body": "own", "looked": [plain(Looked(dim, dim, Slide(size, step, 1, 0)))]}
    sigs = partial_through(call) + [sharded(call, (d,), d) for d in range(x.ndim) if d != dim]
    return [*sigs, sharded(call, (dim,), dim, kernel="window", params=params)]


def _fold(call: Call) -> list[Sig]:
    """F.fold(output_size, kernel_size, ...): (N, C * K, L) -> (N, C, H, W)."""
    x, out = call.tensors[0], call.outputs[0]
    channel = x.ndim - 2
    sigs = ([sharded(call, (0,), 0, kernel="filled")] if channel and out.ndim else []) + keeps(call, P, P_AVG)
    return [*sigs, _at_multiples(call, channel, math.prod(per_dim(call.arg(2, "kernel_size"), 2)), 1)]


def _grid_sample(call: Call) -> list[Sig]:
    """grid_sample(input (N, C, H, W), grid (N, h, w, 2)): linear in the input; each point of the grid is for itself."""
    x, grid = call.tensors
    if x.ndim < 3 or grid.ndim != x.ndim:
        return []
    sigs = [sharded(call, (0, 0), 0, kernel="filled"), sharded(call, (1, R), 1, kernel="filled")]
    sigs += [sharded(call, (R, d), d + 1, kernel="filled") for d in range(1, grid.ndim - 1)]
    return sigs + (keeps(call, P, P_AVG) if is_inexact(call) else [])


for _space in (1, 2, 3):
    row(f"avg_pool{_space}d", _avg_pool(_space), places=_functional)
    row(f"adaptive_avg_pool{_space}d", _adaptive(_space, "avg"), places=_functional)
    row(f"max_pool{_space}d max_pool{_space}d_with_indices", _max_pool(_space), places=_functional)
    row(f"adaptive_max_pool{_space}d adaptive_max_pool{_space}d_with_indices", _adaptive(_space, "max"), places=_functional)
    row(f"max_unpool{_space}d", _only_space(_space), places=_functional)
    _lp_pool(_space, f"lp_pool{_space}d")
row("interpolate upsample", _interpolate, places=_functional)
row("pixel_shuffle", _shuffle, places=_functional)
row("pixel_unshuffle", _unshuffle, places=_functional)
row("channel_shuffle", _channel_shuffle, places=_functional)
row("grid_sample", _grid_sample, places=_functional)
row("grid_sampler grid_sampler_2d grid_sampler_3d", _grid_sample, places="torch")
row("unfold", _unfold, places=_functional)
row("unfold", _frames, is_view=True, in_place=False, places="torch.Tensor")
row("fold", _fold, places=_functional)


def _by_flag(name: str) -> Callable[..., Any]:
    """What torch's own dispatch on ``return_indices`` calls back with: the function that knows the flag."""
    with_indices, plain_op = OPS[f"{_functional}.{name}_with_indices"], OPS[f"{_functional}.{name}"]

    def record(*args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
        return (with_indices if return_indices else plain_op)(*args, **kwargs)

    return record


for _space in (1, 2, 3):
    for _name in (f"max_pool{_space}d", f"adaptive_max_pool{_space}d"):
        _record = _by_flag(_name)
        FUNCTIONAL[_name] = _record
        for _torch in (getattr(torch.nn.functional, _name), getattr(torch, _name, None)):
            if _torch is not None:
                TORCH[_torch] = _record
