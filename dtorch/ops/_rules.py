"""Rule families: how an op's placements follow from what kind of op it is.

A rule looks at one mesh axis (``call.axis``) and lists the legal signatures beside "everything replicated". Rows of the op
table name a family and its parameters; no rule looks at values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dtorch.ops._call import Call, R, Rule, Sig, TensorArg, sharded
from dtorch.runtime.layout import PARTIAL_CODES, box, coords, is_shard, shard_block, shard_code, shard_dim, split

P = PARTIAL_CODES["sum"]
P_AVG = PARTIAL_CODES["avg"]
P_MAX = PARTIAL_CODES["max"]
P_MIN = PARTIAL_CODES["min"]
P_PRODUCT = PARTIAL_CODES["product"]


def replicate_only(call: Call) -> list[Sig]:
    """An op that needs whole tensors."""
    return []


# ---- pointwise


def pointwise(linear: str = "") -> Rule:
    """Elementwise with broadcasting.

    Args:
        linear: in which tensor inputs the op is linear, for pending sums: "" none, "all" jointly (x + y: all pending or
            none), "each" separately (x * y: one pending, the others replicated), "first" (x / y: only the first).
    """

    def rule(call: Call) -> list[Sig]:
        ndim = max((o.ndim for o in call.outputs), default=max((t.ndim for t in call.tensors), default=0))
        shape = call.outputs[0].shape if call.outputs else call.tensors[0].shape
        sigs = []
        for dim in range(ndim):
            ins = []
            for tensor in call.tensors:
                own = dim - (ndim - tensor.ndim)
                ins.append(own if own >= 0 and (tensor.shape[own] != 1 or shape[dim] == 1) else R)
            if any(code != R for code in ins):
                sigs.append(sharded(call, ins, dim))
        return sigs + _linear(call, linear)

    return rule


def _linear(call: Call, linear: str) -> list[Sig]:
    if not linear or any(not (t.dtype.is_floating_point or t.dtype.is_complex) for t in call.tensors):
        return []
    if any(not (o.dtype.is_floating_point or o.dtype.is_complex) for o in call.outputs):
        return []
    num = len(call.tensors)
    sigs = []
    for code in (P, P_AVG):
        if linear == "all":
            if num >= 2 or not _has_number(call):
                sigs.append(sharded(call, (code,) * num, code))
        else:
            for i in range(num if linear == "each" else min(num, 1)):
                if linear == "first" and not _first_is_tensor(call):
                    continue
                sigs.append(sharded(call, tuple(code if j == i else R for j in range(num)), code))
    return sigs


def _first_is_tensor(call: Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], TensorArg)


def _has_number(call: Call) -> bool:
    return any(isinstance(a, (int, float, complex)) and not isinstance(a, bool) for a in call.args[1:])


# ---- reductions


def reduced_dim(dim: int, dims: Sequence[int], keepdim: bool) -> int:
    """Where input dim ``dim`` (not reduced) stands in the output."""
    return dim if keepdim else dim - sum(1 for d in dims if d < dim)


def reduction(kind: str, kernel: str = "local", linear: bool = False, dim_at: int = 1) -> Rule:
    """Reduces dims of its first tensor.

    Args:
        kind: how results of pieces combine, a Partial's reduce op; "" when the reduced dims cannot be sharded,
            "whole" when ``kernel`` communicates and gives the replicated result.
        kernel: the worker's kernel for a sharded reduced dim.
        linear: a pending sum stays pending.
        dim_at: position of the argument ``dim``.
    """

    def rule(call: Call) -> list[Sig]:
        (x,) = call.tensors[:1]
        if not x.ndim:
            dims: tuple[int, ...] = ()
        else:
            dims = call.dims(dim_at, "dim", x.ndim)
        keepdim = bool(call.arg(dim_at + 1, "keepdim", False))
        rest = (R,) * (len(call.tensors) - 1)
        sigs = []
        for dim in range(x.ndim):
            if dim not in dims:
                sigs.append(sharded(call, (dim, *rest), reduced_dim(dim, dims, keepdim)))
            elif kind == "whole":
                sigs.append(sharded(call, (dim, *rest), R, kernel=kernel, params={"dims": list(dims), "keepdim": keepdim}))
            elif kind:
                params = {"dims": list(dims), "keepdim": keepdim, "kind": kind}
                sigs.append(sharded(call, (dim, *rest), PARTIAL_CODES[kind], kernel=kernel, params=params))
        if linear:
            sigs += _linear(call, "first")
        if kind in ("max", "min"):
            code = PARTIAL_CODES[kind]
            sigs.append(sharded(call, (code, *rest), code))
        return sigs

    return rule


# ---- contractions

Labels = Callable[[Call], "tuple[list[str], str, tuple[int, ...]]"]


def contraction(labels: Labels) -> Rule:
    """Products summed over shared labels, as in einsum.

    ``labels(call)`` gives one string of labels a tensor (a dim a letter), the labels of the output, and the indices of
    inputs that are added to the result (a bias) instead of multiplied.
    """

    def rule(call: Call) -> list[Sig]:
        ins, out, added = labels(call)
        sizes: dict[str, int] = {}
        for text, tensor in zip(ins, call.tensors, strict=True):
            for letter, size in zip(text, tensor.shape, strict=True):
                sizes[letter] = max(sizes.get(letter, 1), size) if size != 0 else 0
        sigs = []
        for letter in sorted(sizes, key=lambda c: out.find(c) if c in out else 99):
            contracted = letter not in out
            codes: list[int] = []
            for i, (text, tensor) in enumerate(zip(ins, call.tensors, strict=True)):
                if text.count(letter) > 1:
                    codes = []
                    break
                position = text.find(letter)
                if contracted and i in added:
                    codes.append(P)
                elif position >= 0 and (tensor.shape[position] != 1 or sizes[letter] == 1):
                    codes.append(position)
                else:
                    codes.append(R)
            if codes and any(is_shard(c) for c in codes):
                sigs.append(sharded(call, codes, P if contracted else out.index(letter)))
        if all(t.dtype.is_floating_point or t.dtype.is_complex for t in call.tensors):
            factors = [i for i in range(len(call.tensors)) if i not in added]
            for i in factors:
                codes = [P if j == i or j in added else R for j in range(len(call.tensors))]
                sigs.append(sharded(call, codes, P))
        return sigs

    return rule


# ---- dims that move, vanish or appear

DimMap = Callable[[Call], "dict[int, int]"]


def dim_map(mapping: DimMap, kernel: str = "local", linear: bool = True) -> Rule:
    """An op that keeps the dims in ``mapping(call)`` (input dim -> output dim) whole and untouched.

    All other dims must be replicated. Sharded inputs run ``kernel``.
    """

    def rule(call: Call) -> list[Sig]:
        rest = (R,) * (len(call.tensors) - 1)
        sigs = [sharded(call, (i, *rest), o, kernel=kernel) for i, o in mapping(call).items()]
        if linear:
            sigs += _linear(call, "first")
        return sigs

    return rule


def regroup(call: Call) -> list[Sig]:
    """view, reshape, flatten, unflatten: a sharded dim survives where it leads its group of dims.

    Cutting the leading dim of a group cuts the flattened group at multiples of what trails it; the output's leading dim can
    carry the same cuts as a Shard whose block is that multiple.
    """
    x, out = call.tensors[0], call.outputs[0]
    num = call.mesh_shape[call.axis]
    sigs = []
    blocked = {t for t in x.codes if is_shard(t) and shard_block(t) > 1}
    # a plain shard would fit these too, but its cuts lie elsewhere
    actual = blocked | set(range(x.ndim)) - {shard_dim(t) for t in blocked}
    for code in sorted(actual):
        mapped = regrouped(x.shape, out.shape, code, num)
        if mapped is not None:
            sigs.append(Sig((code,), (mapped,), kernel="view"))
    return sigs + _linear(call, "first")


def groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split the dims of two shapes of equal numel into minimal groups of equal product, left to right."""
    result = []
    i = j = 0
    while i < len(a) or j < len(b):
        left, right = [], []
        size_a = size_b = 1
        if i < len(a):
            left.append(i)
            size_a = a[i]
            i += 1
        if j < len(b):
            right.append(j)
            size_b = b[j]
            j += 1
        while size_a != size_b:
            if size_a < size_b:
                if i >= len(a):
                    break
                left.append(i)
                size_a *= a[i]
                i += 1
            else:
                if j >= len(b):
                    break
                right.append(j)
                size_b *= b[j]
                j += 1
        result.append((left, right))
    return result


def regrouped(a: Sequence[int], b: Sequence[int], code: int, num: int) -> int | None:
    """The placement of a reshaped tensor's dim that carries the same cuts as shard ``code`` of the input; None if none can."""
    dim, block = shard_dim(code), shard_block(code)
    if math.prod(a) == 0:
        return code if list(a) == list(b) else None
    for left, right in groups(a, b):
        if dim not in left:
            continue
        leads = [d for d in left if a[d] != 1] or left
        if dim != leads[0]:
            return None
        targets = [d for d in right if b[d] != 1] or right
        if not targets:
            return None
        target = targets[0]
        trail_a = math.prod(a[d] for d in left) // a[dim]
        trail_b = math.prod(b[d] for d in right) // b[target]
        unit = block * trail_a
        if unit % trail_b == 0:
            return _canonical(target, unit // trail_b, b[target], num)
        pieces = -(-a[dim] // block)
        chunk = -(-pieces // num) * unit
        if chunk % trail_b == 0:
            return _canonical(target, chunk // trail_b, b[target], num)
        return None
    return None


def _canonical(dim: int, block: int, size: int, num: int) -> int:
    if split(0, size, num, 1) == split(0, size, num, block):
        return dim
    return shard_code(dim, block)


def same_cuts(
    call: Call, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]
) -> bool:
    """Whether input and output of a regrouping hold the same elements on every device (dims cut by several axes included)."""
    a, b = call.tensors[0].shape, call.outputs[0].shape
    if math.prod(a) == 0 or not any(is_shard(c) for c in ins[0]):
        return True
    for coord in coords(call.mesh_shape):
        here = box(a, ins[0], call.mesh_shape, coord)
        there = box(b, outs[0], call.mesh_shape, coord)
        if any(s >= e for s, e in here) and any(s >= e for s, e in there):
            continue
        for left, right in groups(a, b):
            if _interval(a, here, left) != _interval(b, there, right):
                return False
    return True


def _interval(shape: Sequence[int], intervals: Sequence[tuple[int, int]], dims: list[int]) -> tuple[int, int] | None:
    """The flat interval that a box covers of a group of dims; None when it is not one interval."""
    cut = [d for d in dims if intervals[d] != (0, shape[d])]
    if not cut:
        return (0, math.prod(shape[d] for d in dims))
    lead = cut[0]
    before = [d for d in dims if d < lead]
    if len(cut) > 1 or any(shape[d] != 1 for d in before):
        return None
    trail = math.prod(shape[d] for d in dims if d > lead)
    start, stop = intervals[lead]
    return (start * trail, stop * trail)


# ---- along one dim


def along(dim_at: int = 1, kernel: str | None = None, default: Any = -1, linear: bool = False, name: str = "dim") -> Rule:
    """An op that keeps its shape and works along one dim (softmax, cumsum, sort): other dims may be sharded.

    Args:
        kernel: the worker's kernel when the dim itself is sharded; None: it must be replicated.
    """

    def rule(call: Call) -> list[Sig]:
        x = call.tensors[0]
        dim = call.arg(dim_at, name, default)
        if x.ndim == 0 or dim is None or isinstance(dim, TensorArg):
            return []
        dim %= x.ndim
        rest = (R,) * (len(call.tensors) - 1)
        sigs = [sharded(call, (d, *rest), d) for d in range(x.ndim) if d != dim]
        if kernel is not None:
            sigs.append(sharded(call, (dim, *rest), dim, kernel=kernel, params={"dim": dim}))
        if linear:
            sigs += _linear(call, "first")
        return sigs

    return rule
