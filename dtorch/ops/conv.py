"""Convolution, pooling and interpolation: batches are independent, channels where the op keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.ops._call import Call, R, Rule, Sig, sharded
from dtorch.ops._rules import P_AVG, P
from dtorch.ops.norm import index_of
from dtorch.ops.reduce import is_inexact, keeps
from dtorch.ops.table import FUNCTIONAL, OPS, row
from dtorch.runtime.layout import box, coords
from dtorch.tensor import TORCH


def _conv(space: int, transposed: bool = False) -> Rule:
    """conv(input, weight, bias, stride, padding, dilation, groups), or transposed with output_padding before groups.

    weight: (out, in / groups, ...), transposed (in, out / groups, ...).
    """
    groups_at = 6

    def rule(call: Call) -> list[Sig]:
        x = call.tensors[0]
        groups = call.arg(groups_at, "groups", 1)
        channel = x.ndim - space - 1
        num = call.num_inputs
        params = {
            "channel_dim": channel, "groups": groups, "groups_at": groups_at, "bias": index_of(call, 2, "bias"),
        }  # fmt: skip
        rows, columns = (1, 0) if transposed else (0, 1)  # weight's dims of output and input channels

        def sig(of_x: int, of_weight: int, of_bias: int, out: int) -> Sig:
            return sharded(call, (of_x, of_weight, of_bias)[:num], out, kernel="conv", params=params)

        sigs = [sig(0, R, R, 0)] if channel == 1 else []
        if groups == 1:
            sigs += [sig(R, rows, 0, channel), sig(channel, columns, P, P)]
        else:
            sigs.append(sig(channel, 0, 0, channel))
        for code in (P, P_AVG) if is_inexact(call) else ():
            sigs += [sig(code, R, code, code), sig(R, code, code, code)]
        return sigs

    return rule


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


def _leading(space: int) -> Rule:
    """All dims but the last ``space`` pass through."""

    def rule(call: Call) -> list[Sig]:
        x = call.tensors[0]
        rest = call.num_inputs - 1
        return [sharded(call, (d, *(d,) * rest), d, kernel="filled") for d in range(x.ndim - space)]

    return rule


def _linear_leading(space: int) -> Rule:
    def rule(call: Call) -> list[Sig]:
        return _leading(space)(call) + (keeps(call, P, P_AVG) if is_inexact(call) else [])

    return rule


def _interpolate(call: Call) -> list[Sig]:
    """Batch and channels pass through; every mode but nearest's kin rounds, and all are linear."""
    return _linear_leading(call.tensors[0].ndim - 2)(call)


def _batch(call: Call) -> list[Sig]:
    """Only the batch passes through: every tensor has it first."""
    if any(not t.ndim for t in call.tensors):
        return []
    return [sharded(call, (0,) * call.num_inputs, 0, kernel="filled")]


def _shuffle(call: Call) -> list[Sig]:
    ndim = call.tensors[0].ndim
    return [sharded(call, (d,), d, kernel="filled") for d in range(ndim - 3)] + keeps(call, P, P_AVG)


def _fold(call: Call) -> list[Sig]:
    x, out = call.tensors[0], call.outputs[0]
    batched = x.ndim == 4 if call.name.endswith("unfold") else x.ndim == 3
    return ([sharded(call, (0,), 0, kernel="filled")] if batched and out.ndim else []) + keeps(call, P, P_AVG)


for _space in (1, 2, 3):
    row(f"conv{_space}d", _conv(_space), verify=whole_groups)
    row(f"conv_transpose{_space}d", _conv(_space, transposed=True), verify=whole_groups)
    _functional = "torch.nn.functional"
    row(f"avg_pool{_space}d adaptive_avg_pool{_space}d", _linear_leading(_space), places=_functional)
    row(f"max_pool{_space}d max_pool{_space}d_with_indices", _leading(_space), places=_functional)
    row(f"adaptive_max_pool{_space}d adaptive_max_pool{_space}d_with_indices", _leading(_space), places=_functional)
    row(f"lp_pool{_space}d max_unpool{_space}d", _leading(_space), places=_functional)
row("interpolate upsample", _interpolate, places="torch.nn.functional")
row("pixel_shuffle pixel_unshuffle channel_shuffle", _shuffle, places="torch.nn.functional")
row("grid_sample", _batch, places="torch.nn.functional")
row("fold unfold", _fold, places="torch.nn.functional")


def _by_flag(name: str) -> Callable[..., Any]:
    """What torch's own dispatch on ``return_indices`` calls back with: the function that knows the flag."""
    with_indices, plain = OPS[f"torch.nn.functional.{name}_with_indices"], OPS[f"torch.nn.functional.{name}"]

    def record(*args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
        return (with_indices if return_indices else plain)(*args, **kwargs)

    return record


for _space in (1, 2, 3):
    for _name in (f"max_pool{_space}d", f"adaptive_max_pool{_space}d"):
        _record = _by_flag(_name)
        FUNCTIONAL[_name] = _record
        for _torch in (getattr(torch.nn.functional, _name), getattr(torch, _name, None)):
            if _torch is not None:
                TORCH[_torch] = _record
