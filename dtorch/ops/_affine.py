"""Views by what they do to coordinates, found by asking torch.

Every strided view selects, steps, reorders and repeats dims. Run on a meta tensor whose strides are powers of a mixed
radix, its result's strides and offset spell out which input dim stands behind each output dim. So one rule serves
transpose, narrow, split, diagonal, squeeze and plain indexing alike, and a claim that a dim can be left sharded is
tried out before it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.ops._call import Call, R, Sig, TensorArg
from dtorch.runtime.layout import is_partial, is_shard, shard_block, shard_code, shard_dim, split


@dataclass(frozen=True)
class Mapped:
    """How one output of a view reads input dims.

    Attributes:
        shape: of the output.
        dims: one (output dim or -1, start, step) an input dim: coordinate = start + step * output coordinate.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[int, int, int], ...]

    def whole(self, dim: int, size: int) -> int:
        """The output dim that is input dim ``dim``, untouched; -1 if there is none."""
        out, start, step = self.dims[dim]
        alone = sum(1 for other, _, _ in self.dims if other == out) == 1
        return out if out >= 0 and start == 0 and step == 1 and alone and self.shape[out] == size else -1


def fill(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Arguments of a Call with real tensors for its TensorArgs."""
    if isinstance(tree, TensorArg):
        return tensors[tree.index]
    if isinstance(tree, (list, tuple)):
        return type(tree)(fill(v, tensors) for v in tree)
    if isinstance(tree, dict):
        return {k: fill(v, tensors) for k, v in tree.items()}
    return tree


def map_view(view: Callable[[torch.Tensor], Any], shape: Sequence[int], dtype: torch.dtype) -> list[Mapped] | None:
    """What ``view`` does to a tensor of ``shape``; None when it is no plain strided view of it.

    Raises:
        what torch raises for the arguments.
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= 2 * size + 3
    strides.reverse()
    if step >= 2**62:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        probe = torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")
        result = view(probe)
    outs = [result] if isinstance(result, torch.Tensor) else list(result)
    storage = probe.untyped_storage()._cdata
    mapped = []
    for number, out in enumerate(outs):
        if not isinstance(out, torch.Tensor) or out.untyped_storage()._cdata != storage or out.dtype != dtype:
            return None

        def grown(dim: int, number: int = number, out: torch.Tensor = out) -> int | None:
            return _where_it_goes(view, shape, dtype, dim, number, out)

        found = _decode(out, tuple(shape), strides, grown)
        if found is None:
            return None
        mapped.append(found)
    return mapped


def _where_it_goes(
    view: Callable[[torch.Tensor], Any], shape: Sequence[int], dtype: torch.dtype, dim: int, number: int, out: torch.Tensor
) -> int | None:
    """The dim of an output that is input dim ``dim``, of one element: the one that grows with it; None when none does."""
    longer = torch.empty([2 if d == dim else n for d, n in enumerate(shape)], dtype=dtype, device="meta")
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            made = view(longer)
    except (RuntimeError, IndexError, ValueError):
        return None
    other = made if isinstance(made, torch.Tensor) else made[number]
    if other.ndim != out.ndim:
        return None
    changed = [d for d, (a, b) in enumerate(zip(other.shape, out.shape, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 else None


def _decode(
    out: torch.Tensor, shape: tuple[int, ...], strides: list[int], grown: Callable[[int], int | None]
) -> Mapped | None:
    starts = []
    rest = out.storage_offset()
    for stride in strides:
        starts.append(rest // stride)
        rest %= stride
    found: dict[int, tuple[int, int]] = {}
    singles = []
    for dim, (size, stride) in enumerate(zip(out.shape, out.stride(), strict=True)):
        if size == 1:
            singles.append(dim)
            continue
        rest = stride
        for k, unit in enumerate(strides):
            step, rest = divmod(rest, unit)
            if step:
                if k in found:
                    return None
                found[k] = (dim, step)
    for k, stride in enumerate(strides):
        if k not in found and shape[k] == 1:
            # a dim of one element that is still there: any output dim of one element with its stride will do
            alike = [d for d in singles if out.stride(d) == stride]
            same = grown(k) if len(alike) > 1 else None
            same = next(iter(alike), None) if same not in alike else same
            if same is not None:
                singles.remove(same)
                found[k] = (same, 1)
    dims = tuple(
        (found[k][0], starts[k], found[k][1]) if k in found else (-1, starts[k], 1) for k in range(len(shape))
    )
    return Mapped(tuple(out.shape), dims)


def region(out: int, source: int, box: Sequence[tuple[int, int]], dims: Sequence[tuple[int, int, int]]) -> list[Any]:
    """One region of kernel "remap" as plain data: output, input, box of the output, (output dim, start, step) an
    input dim."""
    return [out, source, [list(b) for b in box], [list(d) for d in dims]]


def partial_through(call: Call) -> list[Sig]:
    """A pending reduction stays pending: what is done to the pieces is done to the tensor. All inputs alike."""
    codes = {t.codes[call.axis] for t in call.tensors}
    if len(codes) != 1 or not is_partial(code := codes.pop()):
        return []
    return [Sig((code,) * len(call.tensors), (code,) * len(call.outputs))]


def affine(call: Call) -> list[Sig]:
    """The rule of strided views: dims that stay whole may be sharded, others are fetched by kernel "remap"."""
    from dtorch.ops.table import resolve

    fn = resolve(call.name)
    x = call.tensors[0]

    def view(tensor: torch.Tensor) -> Any:
        return fn(*fill(call.args, [tensor]), **fill(call.kwargs, [tensor]))

    mapped = map_view(view, x.shape, x.dtype)
    sigs = partial_through(call)
    if mapped is None or len(call.tensors) != 1:
        return sigs
    regions = [region(o, 0, [(0, n) for n in m.shape], m.dims) for o, m in enumerate(mapped)]
    for dim, size in enumerate(x.shape):
        whole = [m.whole(dim, size) for m in mapped]
        if all(o >= 0 for o in whole) and is_local(view, x, dim, mapped, call.mesh_shape[call.axis]):
            sigs.append(Sig((dim,), tuple(whole)))
            continue
        if any(sum(1 for o, _, _ in m.dims if o == m.dims[dim][0] >= 0) > 1 for m in mapped):
            outs = (R,) * len(mapped)
        else:
            outs = tuple(m.dims[dim][0] if m.dims[dim][0] >= 0 else R for m in mapped)
        sigs.append(Sig((dim,), outs, "remap", {"regions": regions}))
        code = x.codes[call.axis]
        if is_shard(code) and shard_dim(code) == dim and shard_block(code) > 1:
            kept = _blocks(mapped, dim, shard_block(code), outs, call.mesh_shape[call.axis])
            sigs.insert(0, Sig((code,), kept, "remap", {"regions": regions}))
    return sigs


def _blocks(mapped: Sequence[Mapped], dim: int, block: int, outs: tuple[int, ...], num: int) -> tuple[int, ...]:
    """``outs`` cut at multiples of ``block``, where all outputs are whole blocks (queries out of fused queries, keys and
    values, by heads). Pieces of another size need no blocks."""
    sizes = [m.shape[out] if out >= 0 else 0 for m, out in zip(mapped, outs, strict=True)]
    for m, size in zip(mapped, sizes, strict=True):
        _, start, step = m.dims[dim]
        if not size or step != 1 or start % block or size % block:
            return outs
    return tuple(
        out if split(0, size, num) == split(0, size, num, block) else shard_code(out, block)
        for out, size in zip(outs, sizes, strict=True)
    )


def is_local(
    view: Callable[[torch.Tensor], Any], x: TensorArg, dim: int, mapped: Sequence[Mapped], num: int
) -> bool:
    """Whether the same call on a piece of dim ``dim`` gives that piece of every output; tried with every size it can
    have."""
    sizes = {b - a for a, b in split(0, x.shape[dim], num, max(shard_block(x.codes[0]), 1) if x.codes else 1)}
    sizes |= {x.shape[dim], max(x.shape[dim] - 1, 0), 1, 0}
    for size in sizes - {x.shape[dim]}:
        shape = [size if d == dim else n for d, n in enumerate(x.shape)]
        try:
            local = map_view(view, shape, x.dtype)
        except (RuntimeError, IndexError, ValueError):
            return False
        if local is None or len(local) != len(mapped):
            return False
        for here, there in zip(local, mapped, strict=True):
            out = there.dims[dim][0]
            expected = tuple(size if d == out else n for d, n in enumerate(there.shape))
            if here.shape != expected:
                return False
            if 0 in shape or 1 in shape:
                continue  # strides of such dims say nothing
            if here.dims != there.dims:
                return False
    return True
