"""Reading and writing along one dim: gather, scatter, index_select, index_add and their like."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.ops._call import Call, R, Sig
from dtorch.ops._out import written
from dtorch.ops._rules import replicate_only
from dtorch.ops.index import INDEX, as_tensor, follows
from dtorch.ops.table import OPS, row
from dtorch.ops.view import front, select
from dtorch.placement import Replicate
from dtorch.policy import is_auto
from dtorch.spec import contiguous_stride
from dtorch.tensor import Tensor

# ---- along one dim


def _index_select(call: Call) -> list[Sig]:
    x, index = call.tensors[:2]
    dim = call.arg(1, "dim")
    dim = dim % x.ndim if x.ndim else 0
    sigs = [Sig((d, R), (d,)) for d in range(x.ndim) if d != dim]
    if index.ndim == 1 and x.ndim:
        sigs.append(Sig((R, 0), (dim,)))
    if x.ndim and index.ndim == 1:
        sigs.append(Sig((dim, R), (R,), "lookup", {"dims": [dim], "out_at": dim}))
    code = x.codes[call.axis]
    return [*sigs, Sig((code, R), (code,))] if code < R else sigs


row("index_select", _index_select, in_place=False)


def _gather(call: Call) -> list[Sig]:
    x, index = call.tensors[:2]
    if not x.ndim or not index.ndim:
        return []
    dim = call.arg(1, "dim") % x.ndim
    sigs = [Sig((d, d), (d,)) for d in range(x.ndim) if d != dim and x.shape[d] == index.shape[d]]
    sigs.append(Sig((R, dim), (dim,)))
    same = all(x.shape[d] == index.shape[d] for d in range(x.ndim) if d != dim)
    if same:
        sigs.append(Sig((dim, R), (R,), "gather_lookup", {"dim": dim}))
    code = x.codes[call.axis]
    return [*sigs, Sig((code, R), (code,))] if code < R else sigs


row("gather", _gather, in_place=False)


@front("take")
def take(input: Tensor, index: Any) -> Any:
    """``torch.take``"""
    index = as_tensor(index, input)
    if index.dtype != torch.long:
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {str(index.dtype)[6:]}")
    return INDEX(input.reshape(-1), [index])


@front("take_along_dim")
def take_along_dim(input: Tensor, indices: Any, dim: int | None = None, *, out: Any = None) -> Any:
    """``torch.take_along_dim``"""
    indices = as_tensor(indices, input)
    if dim is None:
        made = input.reshape(-1).gather(0, indices.reshape(-1))
    else:
        if input.ndim != indices.ndim:
            raise RuntimeError(
                "torch.take_along_dim(): input and indices should have the same number of dimensions, but got "
                f"{input.ndim} dimensions for input, and {indices.ndim} dimensions for indices"
            )
        dim %= input.ndim
        if input.shape[dim]:
            indices = indices.remainder(input.shape[dim])  # negative ones count from the end
        one = [1 if d == dim else n for d, n in enumerate(input.shape)]
        two = [1 if d == dim else n for d, n in enumerate(indices.shape)]
        common = list(torch.broadcast_shapes(tuple(one), tuple(two)))  # type: ignore[no-untyped-call]
        x = input.expand([input.shape[d] if d == dim else n for d, n in enumerate(common)])
        made = x.gather(dim, indices.expand([indices.shape[d] if d == dim else n for d, n in enumerate(common)]))
    return made if out is None else written(out, made)


def _scatter(call: Call) -> list[Sig]:
    """x may be sharded anywhere. Index and source are whole, or sharded like x beside the indexed dim."""
    x = call.tensors[0]
    if not x.ndim or len(call.tensors) < 2 or call.tensors[1].ndim != x.ndim:
        return []
    dim = call.arg(1, "dim") % x.ndim
    others = call.tensors[1:]
    params = {"dim": dim, "spread": True}
    sigs = []
    for d in range(x.ndim):
        if d != dim and all(t.ndim == x.ndim and t.shape[d] == x.shape[d] for t in others):
            sigs.append(Sig((d,) * len(call.tensors), (d,), "redirect", params))
        sigs.append(Sig((d, *(R,) * len(others)), (d,), "redirect", params))
    return sigs


def _spread_pairs(call: Call) -> list[tuple[int, int, int]]:
    x = call.tensors[0]
    return [(d, t.index, d) for t in call.tensors[1:] if t.ndim == x.ndim for d in range(x.ndim)]


def _source_pairs(call: Call) -> list[tuple[int, int, int]]:
    x = call.tensors[0]
    return [(d, t.index, d) for t in call.tensors[2:] if t.ndim == x.ndim for d in range(x.ndim)]


row("scatter scatter_add scatter_reduce", _scatter, verify=follows(_spread_pairs), numbers=frozenset({3, "value"}))


def _along(call: Call) -> list[Sig]:
    """index_add and its like: the index has one dim, the source is like x but for the indexed dim."""
    x = call.tensors[0]
    if not x.ndim:
        return []
    dim = call.arg(1, "dim") % x.ndim
    others = call.tensors[1:]
    params: dict[str, Any] = {"dim": dim, "spread": False, "negative": "index_fill" in call.name}
    sigs = []
    for d in range(x.ndim):
        if d != dim and any(t.ndim == x.ndim and (t.ndim > 1 or i) for i, t in enumerate(others)):
            own = [d if i and t.ndim == x.ndim else R for i, t in enumerate(others)]
            sigs.append(Sig((d, *own), (d,), "redirect", params))
        sigs.append(Sig((d, *(R,) * len(others)), (d,), "redirect", params))
    return sigs


row("index_add index_copy index_fill index_reduce", _along, verify=follows(_source_pairs))


# ---- masks


def _masked_scatter(call: Call) -> list[Sig]:
    """masked_scatter(mask, source): x may be sharded, the mask is whole or follows it, the source is whole."""
    x, mask = call.tensors[:2]
    if call.outputs[0].shape != x.shape or mask.dtype != torch.bool:
        return []
    sigs = []
    for d in range(x.ndim):
        own = d - (x.ndim - mask.ndim)
        for code in (R, own) if own >= 0 and mask.shape[own] == x.shape[d] != 1 else (R,):
            sigs.append(Sig((d, code, R), (d,), "masked_scatter"))
    return sigs


row("masked_scatter", _masked_scatter)
row("put", replicate_only, places="torch torch.Tensor")
row("diagonal_scatter as_strided_scatter as_strided as_strided_copy", replicate_only, in_place=False)


def _by_memory(name: str, *, is_like_input: bool = False) -> None:
    """For a function of the elements as they lie in memory: a tensor that must be gathered first is gathered in that order."""
    op = OPS[f"torch.{name}"]

    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        pieces = [p for p, n in zip(input.placements, input.device_mesh.shape, strict=True) if n > 1]
        if not is_auto() or all(p.is_replicate() for p in pieces):
            return op.record((input, *args), kwargs)
        order = sorted(range(input.ndim), key=lambda d: (-input.stride(d), -input.shape[d]))
        laid = input.permute(order)
        steps = contiguous_stride(laid.shape)
        if any(n > 1 and have != want for n, have, want in zip(laid.shape, laid.stride(), steps, strict=True)):
            raise RuntimeError(f"{name} of a sharded tensor whose elements are not one piece of memory; clone() it first")
        made = op.record((laid.redistribute([Replicate()] * input.device_mesh.ndim), *args), kwargs)
        return made.permute([order.index(d) for d in range(input.ndim)]) if is_like_input else made

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``torch.{name}``; a tensor that is not replicated is gathered."
    front(name)(call)


_by_memory("as_strided")
_by_memory("as_strided_copy")
_by_memory("as_strided_scatter", is_like_input=True)


@front("select_scatter")
def select_scatter(input: Tensor, src: Any, dim: int, index: int) -> Tensor:
    """``torch.select_scatter``"""
    made: Tensor = input.clone()
    expected = tuple(select(made, dim, index).shape)
    _same_shape("select_scatter", src, expected)
    place: list[Any] = [slice(None)] * made.ndim
    place[dim] = index
    made[tuple(place)] = src
    return made


@front("slice_scatter")
def slice_scatter(
    input: Tensor, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """``torch.slice_scatter``"""
    made: Tensor = input.clone()
    place: list[Any] = [slice(None)] * made.ndim
    place[dim] = slice(start, end, step)
    expected = list(made.shape)
    expected[dim] = len(range(*slice(start, end, step).indices(expected[dim])))
    _same_shape("slice_scatter", src, tuple(expected))
    made[tuple(place)] = src
    return made


def _same_shape(name: str, src: Any, expected: tuple[int, ...]) -> None:
    if tuple(src.shape) != expected:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, slice size = "
            f"{list(expected)} ({name})"
        )
