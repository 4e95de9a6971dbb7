"""Ops that join tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch

from dtorch.ops._affine import partial_through, region
from dtorch.ops._call import Call, R, Sig
from dtorch.ops._rules import P, replicate_only
from dtorch.ops.table import row
from dtorch.ops.view import at_least_1d, at_least_2d, at_least_3d, boxed, front, record
from dtorch.runtime.layout import is_shard, shard_block, shard_code, shard_dim


def _cat(call: Call) -> list[Sig]:
    """Along a sharded dim only what changes hands moves; inputs that are replicated may be mixed in there."""
    out = call.outputs[0]
    dim = call.arg(1, "dim", 0)
    dim = (dim if isinstance(dim, int) else 0) % max(out.ndim, 1)
    # torch lets empty vectors join anything
    skipped = [t.ndim == 1 and t.shape[0] == 0 and out.ndim != 1 for t in call.tensors]
    sigs = partial_through(call)
    for d in range(out.ndim):
        if d != dim:
            sigs.append(Sig(tuple(R if skip else d for skip in skipped), (d,)))
    regions, at = [], 0
    for i, (tensor, skip) in enumerate(zip(call.tensors, skipped, strict=True)):
        if skip:
            continue
        box = boxed(out.shape)
        box[dim] = (at, at + tensor.shape[dim])
        at += tensor.shape[dim]
        regions.append(region(0, i, box, [(d, 0, 1) for d in range(out.ndim)]))
    ins = []
    for tensor, skip in zip(call.tensors, skipped, strict=True):
        code = tensor.codes[call.axis]
        fits = code == R or (is_shard(code) and shard_dim(code) == dim)
        ins.append(R if skip else code if fits else dim)
    if any(is_shard(code) for code in ins):
        sigs.append(Sig(tuple(ins), (dim,), "remap", {"regions": regions}))
    return sigs


row("cat concat concatenate", _cat, in_place=False, places="torch")


def _stack(call: Call) -> list[Sig]:
    out = call.outputs[0]
    dim = call.arg(1, "dim", 0)
    dim = (dim if isinstance(dim, int) else 0) % out.ndim
    sigs = partial_through(call)
    for d in range(out.ndim - 1):
        sigs.append(Sig((d,) * len(call.tensors), (d + (d >= dim),)))
    return sigs


row("stack", _stack, in_place=False, places="torch")


def _block_diag(call: Call) -> list[Sig]:
    """Matrices along the diagonal of one; rows or columns may be sharded."""
    if any(t.ndim != 2 for t in call.tensors):
        return []
    regions, row_at, column_at = [], 0, 0
    for i, (rows, columns) in enumerate(t.shape for t in call.tensors):
        box = [(row_at, row_at + rows), (column_at, column_at + columns)]
        regions.append(region(0, i, box, [(0, 0, 1), (1, 0, 1)]))
        row_at, column_at = row_at + rows, column_at + columns
    params = {"regions": regions, "fill": False if call.outputs[0].dtype == torch.bool else 0}
    codes = [t.codes[call.axis] for t in call.tensors]
    sigs = []
    for d in (0, 1):
        ins = tuple(c if c == R or (is_shard(c) and shard_dim(c) == d) else d for c in codes)
        if any(is_shard(c) for c in ins):
            sigs.append(Sig(ins, (d,), "remap", params))
    return sigs


def _cartesian_prod(call: Call) -> list[Sig]:
    """Each element of the first vector makes a block of rows."""
    rows = prod(t.shape[0] for t in call.tensors[1:]) if all(t.ndim == 1 for t in call.tensors) else 0
    if not rows:
        return []
    code = call.tensors[0].codes[call.axis]
    block = shard_block(code) if is_shard(code) else 1
    return [Sig((shard_code(0, block), *(R,) * (call.num_inputs - 1)), (shard_code(0, block * rows),))]


row("block_diag", _block_diag, in_place=False, places="torch")
row("cartesian_prod", _cartesian_prod, in_place=False, places="torch")
row("combinations", replicate_only, in_place=False, places="torch")


def _join(tensors: Sequence[Any], dim: int, out: Any) -> Any:
    return record("torch.cat", list(tensors), dim, **({} if out is None else {"out": out}))


@front("hstack")
def hstack(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """``torch.hstack``"""
    made = [at_least_1d(t) for t in tensors]
    return _join(made, 0 if made[0].ndim == 1 else 1, out)


@front("vstack")
@front("row_stack")
def vstack(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """``torch.vstack``"""
    return _join([at_least_2d(t) for t in tensors], 0, out)


@front("dstack")
def dstack(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """``torch.dstack``"""
    return _join([at_least_3d(t) for t in tensors], 2, out)


@front("column_stack")
def column_stack(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """``torch.column_stack``"""
    return _join([t.reshape(t.numel(), 1) if t.ndim <= 1 else t for t in tensors], 1, out)


def _pad(call: Call) -> list[Sig]:
    """Every dim may be sharded. Of a padded one only rows that another device shows beside its own move: a border's reflection,
    its copies, or the other end's rows."""
    x, out = call.tensors[0], call.outputs[0]
    pads, mode = call.arg(1, "pad"), call.arg(2, "mode", "constant")
    value = call.arg(3, "value")
    pairs = list(zip(pads[::2], pads[1::2], strict=True))
    around = [(0, 0)] * (x.ndim - len(pairs)) + list(reversed(pairs))
    parts = [_along(d, n, a, b, mode) for d, (n, (a, b)) in enumerate(zip(x.shape, around, strict=True))]
    regions = [region(0, 0, [box for box, _ in part], [read for _, read in part]) for part in product(*parts)]
    params: dict[str, Any] = {"regions": regions}
    if mode == "constant":
        params["fill"] = _python(value or 0, out.dtype)
    sigs = [s for s in partial_through(call) if mode != "constant" or (not value and s.ins[0] == P)]
    for d, both in enumerate(around):
        sigs.append(Sig((d,), (d,), "filled") if both == (0, 0) else Sig((d,), (d,), "remap", params))
    return sigs


Part = tuple[tuple[int, int], tuple[int, int, int]]
"""An interval of an output dim, and how it reads the input dim: (output dim or -1, start, step)."""


def _along(dim: int, size: int, before: int, after: int, mode: str) -> list[Part]:
    """The parts of a padded dim: what stays, and the borders where they are not constant. Negative padding cuts off."""
    low = max(before, 0)
    high = max(low + size + min(before, 0) + min(after, 0), low)
    parts: list[Part] = [((low, high), (dim, max(-before, 0), 1))]
    left, right = {
        "constant": (None, None),
        "reflect": ((dim, before, -1), (dim, size - 2, -1)),
        "replicate": ((-1, 0, 1), (-1, size - 1, 1)),
        "circular": ((dim, size + min(after, 0) - before, 1), (dim, max(-before, 0), 1)),  # of what is not cut off
    }[mode]
    if left is not None and before > 0:
        parts.append(((0, before), left))
    if right is not None and after > 0:
        parts.append(((high, high + after), right))
    return parts


def _python(value: Any, dtype: torch.dtype) -> Any:
    return bool(value) if dtype == torch.bool else value


def _constant_pad(call: Call) -> list[Sig]:
    """constant_pad_nd(input, pad, value)"""
    return _pad(replace(call, args=(call.args[0], call.arg(1, "pad"), "constant", call.arg(2, "value", 0)), kwargs={}))


row("pad", _pad, in_place=False, places="torch.nn.functional")
row("constant_pad_nd", _constant_pad, in_place=False, places="torch")
