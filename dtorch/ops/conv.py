"""Convolution: batches are independent, groups of channels too, and of space only what a window needs beside it moves."""

from __future__ import annotations

from typing import Any

from dtorch.ops._call import Call, R, Rule, Sig, sharded
from dtorch.ops._rules import P_AVG, P
from dtorch.ops.norm import index_of
from dtorch.ops.reduce import is_inexact
from dtorch.ops.table import row
from dtorch.runtime.layout import box, coords, is_shard, shard_dim
from dtorch.runtime.windows import Looked, Slide, Spread, plain


def _conv(space: int, transposed: bool = False) -> Rule:
    """conv(input, weight, bias, stride, padding, dilation, groups), or transposed with output_padding, groups before dilation.

    weight: (out, in / groups, ...), transposed (in, out / groups, ...).
    """

    def rule(call: Call) -> list[Sig]:
        x = call.tensors[0]
        channel = x.ndim - space - 1
        num = call.num_inputs
        params = _geometry(call, space, channel, transposed)
        groups = params["groups"]
        # One kernel serves all axes: the one without halos unless some axis cuts space.
        cut = any(is_shard(c) and shard_dim(c) > channel for c in x.codes)
        kernel = "window" if cut or params["padded"] else "conv"
        rows, columns = (1, 0) if transposed else (0, 1)  # weight's dims of output and input channels

        def sig(of_x: int, of_weight: int, of_bias: int, out: int, kernel: str = kernel) -> Sig:
            return sharded(call, (of_x, of_weight, of_bias)[:num], out, kernel=kernel, params=params)

        sigs = [sig(0, R, R, 0)] if channel == 1 else []
        if groups == 1:
            sigs += [sig(R, rows, 0, channel), sig(channel, columns, P, P)]
            sigs += [sig(channel, columns, R, P)] if num > 2 else []  # the first device adds the bias
        else:
            sigs.append(sig(channel, 0, 0, channel))
        sigs += [sig(d, R, R, d, "window") for d in range(channel + 1, x.ndim)]
        for code in (P, P_AVG) if is_inexact(call) else ():
            sigs += [sig(code, R, code, code), sig(R, code, code, code)]
        if num > 2 and is_inexact(call):
            sigs += [sig(P, R, R, P), sig(R, P, R, P)]
        return sigs

    return rule


def _geometry(call: Call, space: int, channel: int, transposed: bool) -> dict[str, Any]:
    """What the kernels know of a convolution beside its tensors."""
    kernel = call.tensors[1].shape[2:]
    stride = per_dim(call.arg(3, "stride", 1), space)
    dilation = per_dim(call.arg(7 if transposed else 5, "dilation", 1), space)
    padding = call.arg(4, "padding", 0)
    before, padded = per_dim(0 if isinstance(padding, str) else padding, space), []
    if min(before, default=0) < 0:
        raise RuntimeError("negative padding is not supported")  # torch says so only where the numbers are
    if padding == "same":  # the odd element comes behind, which torch's function cannot be told in numbers
        before = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
        padded = [channel + 1 + i for i in range(space) if dilation[i] * (kernel[i] - 1) % 2]
    kind: type[Slide] | type[Spread] = Spread if transposed else Slide
    looked = [
        plain(Looked(channel + 1 + i, channel + 1 + i, kind(kernel[i], stride[i], dilation[i], before[i])))
        for i in range(space)
    ]
    return {
        "body": "conv_transpose" if transposed else "conv",
        "looked": looked,
        "padded": padded,
        "stride": stride,
        "padding": before,
        "dilation": dilation,
        "output_padding": per_dim(call.arg(5, "output_padding", 0), space) if transposed else [],
        "channel_dim": channel,
        "groups": call.arg(6, "groups", 1),
        "bias": index_of(call, 2, "bias"),
    }


def per_dim(value: Any, num: int) -> list[int]:
    """A size given once for all dims, or one a dim."""
    given = [value] if isinstance(value, int) else [int(v) for v in value]
    return given * num if len(given) == 1 else given


def whole_groups(call: Call, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the cuts of input channels, weight and output channels fall between the same groups."""
    x, weight = call.tensors[:2]
    groups = call.arg(6, "groups", 1)
    if groups == 1:
        return True
    channel = 1 if x.ndim == weight.ndim else 0
    sizes = (x.shape[channel], weight.shape[0], call.outputs[0].shape[channel])
    for coord in coords(call.mesh_shape):
        parts = (
            box(x.shape, ins[0], call.mesh_shape, coord)[channel],
            box(weight.shape, ins[1], call.mesh_shape, coord)[0],
            box(call.outputs[0].shape, outs[0], call.mesh_shape, coord)[channel],
        )
        held = set()
        for (start, stop), size in zip(parts, sizes, strict=True):
            step = size // groups
            if start == stop:
                held.add((0, 0))
            elif start % step or stop % step:
                return False
            else:
                held.add((start // step, stop // step))
        if len(held) > 1:
            return False
    return True


for _space in (1, 2, 3):
    row(f"conv{_space}d", _conv(_space), verify=whole_groups)
    row(f"conv_transpose{_space}d", _conv(_space, transposed=True), verify=whole_groups)
