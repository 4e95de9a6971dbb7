"""Indexing: ``x[...]``, ``x[...] = y``, and torch's functions that read or write at indices.

An index is taken apart as torch does it: first its slices, ints, None and Ellipsis, a view; then its tensors, a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import _getframe
from types import FrameType
from typing import Any

import torch

from dtorch import policy
from dtorch.ops._affine import affine, map_view
from dtorch.ops._call import Call, R, Sig, TensorArg
from dtorch.ops._choose import Verify
from dtorch.ops._op import Op
from dtorch.ops._ways import put
from dtorch.ops.table import OPS, row
from dtorch.ops.view import front, record, select
from dtorch.runtime.layout import box, coords
from dtorch.tensor import Tensor

_ALL = slice(None)


# ---- taking an index apart


@dataclass
class Index:
    """An index in two steps.

    Attributes:
        basic: slices, ints, None and Ellipsis; tensors stand in it as ``slice(None)``.
        trivial: the first step changes nothing.
        tensors: (dim after the first step, int64 tensor), ascending.
        masks: the bool tensors of the index as given: (dim after the first step, mask).
    """

    basic: tuple[Any, ...]
    trivial: bool
    tensors: list[tuple[int, Any]]
    masks: list[tuple[int, Any]]


def as_tensor(value: Any, like: Tensor) -> Any:
    """Lists, arrays and plain tensors in an index, as dtorch tensors beside ``like``."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, torch.Tensor):
        plain = value
    elif isinstance(value, (list, tuple, range)):
        items = list(value)
        if any(isinstance(v, (Tensor, torch.Tensor)) for v in items):
            items = [int(v) if isinstance(v, (Tensor, torch.Tensor)) else v for v in items]
        plain = torch.tensor(items) if items else torch.tensor(items, dtype=torch.long)
    else:
        plain = torch.as_tensor(value)
    return like._spec.session.upload(plain, like._spec.mesh, None)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, torch.Tensor, list, tuple, range)) or (
        hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0
    )


def _is_mask(tensor: Any) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def parse(x: Tensor, index: Any) -> Index:
    """Take an index apart; ints are checked here.

    Raises:
        IndexError: an int is out of range, too many dims, a mask of another shape.
    """
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if isinstance(index, list) and any(isinstance(v, (slice, type(None), type(Ellipsis))) for v in index):
        items = list(index)
    items = [as_tensor(v, x) if _is_array(v) else v for v in items]
    items = [v if v is None or v is Ellipsis or isinstance(v, (Tensor, slice, bool)) else _int(v) for v in items]
    used = 0
    for v in items:
        if isinstance(v, Tensor):
            used += v.ndim if _is_mask(v) else 1
        elif isinstance(v, slice) or (isinstance(v, int) and not isinstance(v, bool)):
            used += 1
    shape = tuple(x.shape)
    if used > len(shape):
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    if Ellipsis not in [v if v is Ellipsis else None for v in items]:
        items.append(Ellipsis)
    basic: list[Any] = []
    tensors: list[tuple[int, Any]] = []
    masks: list[tuple[int, Any]] = []
    at = out = 0  # dim of x, dim after the first step
    trivial = True
    for v in items:
        if v is Ellipsis:
            skipped = len(shape) - used
            basic.append(Ellipsis)
            at += skipped
            out += skipped
        elif v is None:
            basic.append(None)
            out += 1
            trivial = False
        elif isinstance(v, bool) or (isinstance(v, Tensor) and _is_mask(v) and v.ndim == 0):
            basic.append(None)
            trivial = False
            flags = as_tensor(torch.tensor([v]), x) if isinstance(v, bool) else v.reshape(1)
            masks.append((out, flags))
            out += 1
        elif isinstance(v, int):
            if not -shape[at] <= v < shape[at]:
                raise IndexError(f"index {v} is out of bounds for dimension {at} with size {shape[at]}")
            basic.append(v)
            at += 1
            trivial = False
        elif isinstance(v, slice):
            start, stop, step = (_bound(b) for b in (v.start, v.stop, v.step))
            if step is not None and step <= 0:
                raise ValueError("step must be greater than zero")
            v = slice(start, stop, step)
            basic.append(v)
            trivial &= v.indices(shape[at]) == (0, shape[at], 1)
            at += 1
            out += 1
        elif _is_mask(v):
            for k in range(v.ndim):
                if v.shape[k] != shape[at + k]:
                    raise IndexError(
                        f"The shape of the mask {list(v.shape)} at index {k} does not match the shape of the indexed "
                        f"tensor {list(shape)} at index {at + k}"
                    )
                basic.append(_ALL)
            masks.append((out, v))
            at += v.ndim
            out += v.ndim
        else:
            if v.dtype.is_floating_point or v.dtype.is_complex:
                raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
            basic.append(_ALL)
            tensors.append((out, v))
            at += 1
            out += 1
    return Index(tuple(basic), trivial, tensors, masks)


def _int(value: Any) -> int:
    if isinstance(value, str):
        raise TypeError("new(): invalid data type 'str'")
    try:
        return operator.index(value)
    except TypeError:
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid indices "
            f"(got {type(value).__name__})"
        ) from None


def _bound(value: Any) -> int | None:
    return None if value is None else operator.index(value)


def _ready(parsed: Index) -> list[tuple[int, Any]]:
    """All index tensors; masks become the indices of their true elements, which waits for their number."""
    found = list(parsed.tensors)
    for at, mask in parsed.masks:
        if mask.dtype != torch.bool:
            mask = mask.to(torch.bool)
        for k, part in enumerate(mask.nonzero(as_tuple=True)):
            found.append((at + k, part))
    return sorted(found, key=lambda f: f[0])


def _only_int(parsed: Index, ndim: int) -> tuple[int, int] | None:
    """(dim, index) when one int is all there is beside whole dims."""
    ints = [v for v in parsed.basic if type(v) is int]
    if len(ints) != 1 or any(v is None or (isinstance(v, slice) and v != _ALL) for v in parsed.basic):
        return None
    items = [v for v in parsed.basic if v is not Ellipsis]
    spot = parsed.basic.index(ints[0])
    dots = parsed.basic.index(Ellipsis)
    return (spot if spot < dots else ndim - (len(parsed.basic) - spot), ints[0]) if items else None


# ---- reading


def _basic(call: Call) -> list[Sig]:
    return affine(call)


row("__getitem__", _basic, is_view=True, in_place=False, places="torch.Tensor")


def index_fn(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.index.Tensor(x, list(indices))
    return made


@dataclass(frozen=True)
class _Advanced:
    """Geometry of an index by tensors."""

    dims: tuple[int, ...]  # indexed dims of x
    out_at: int  # where the indices' dims stand in the result
    shape: tuple[int, ...]  # broadcast shape of the indices
    rest: tuple[int, ...]  # dims of x that are not indexed

    def out_dim(self, dim: int) -> int:
        """Where a dim that is not indexed stands in the result."""
        k = self.rest.index(dim)
        return k if k < self.out_at else k + len(self.shape)


def _geometry(x: TensorArg, indices: Sequence[Any]) -> _Advanced:
    dims = tuple(d for d, t in enumerate(indices) if t is not None)
    together = dims == tuple(range(dims[0], dims[-1] + 1))
    shape = tuple(torch.broadcast_shapes(*[t.shape for t in indices if t is not None]))  # type: ignore[no-untyped-call]
    return _Advanced(dims, dims[0] if together else 0, shape, tuple(d for d in range(x.ndim) if d not in dims))


def _index(call: Call) -> list[Sig]:
    """Dims that are not indexed, or the indices, may be sharded; of a sharded indexed dim only what is asked for
    moves."""
    x, indices = call.args[0], call.args[1]
    geometry = _geometry(x, indices)
    given = call.tensors[1:]
    whole = (R,) * len(given)
    sigs = [Sig((d, *whole), (geometry.out_dim(d),)) for d in geometry.rest]
    ndim = len(geometry.shape)
    for b in range(ndim):
        ins = []
        for t in given:
            own = b - (ndim - t.ndim)
            ins.append(own if own >= 0 and (t.shape[own] != 1 or geometry.shape[b] == 1) else R)
        if any(code != R for code in ins):
            sigs.append(Sig((R, *ins), (geometry.out_at + b,)))
    params = {"dims": list(geometry.dims), "out_at": geometry.out_at}
    sigs += [Sig((d, *whole), (R,), "lookup", params) for d in geometry.dims]
    code = x.codes[call.axis]
    if code < R:
        sigs.append(Sig((code, *whole), (code,)))
    return sigs


INDEX = OPS["aten.index"] = Op("aten.index", index_fn, _index)


_basic_op = OPS["torch.Tensor.__getitem__"]
_quick = _basic_op.new_cache()
_NUMBER = frozenset({int, type(None)})


def _quick_key(spec: Any, index: tuple[Any, ...]) -> Any:
    """A key for an index of slices, None and Ellipsis only, which need not be looked at before torch does; else None."""
    parts = [spec]
    for v in index:
        if type(v) is slice:
            start, stop, step = v.start, v.stop, v.step
            if type(start) not in _NUMBER or type(stop) not in _NUMBER or type(step) not in _NUMBER:
                return None
            parts += (start, stop, step)
        elif v is None or v is Ellipsis:
            parts.append("None" if v is None else "...")
        else:
            return None
    return tuple(parts)


def sliced(input: Tensor, index: Any, slowly: Callable[..., Any], frame: FrameType) -> Tensor | None:
    """``input[index]`` for an index of slices, None and Ellipsis only; None for others. ``slowly`` records what is new."""
    kind = type(index)
    if not (kind is slice or (kind is tuple and index) or index is None or index is Ellipsis):
        return None
    key = _quick_key(input._spec, index if kind is tuple else (index,))
    if key is None:
        return None
    sig = _quick.get(key)
    if sig is not None:
        return put(_basic_op, sig, (input._slot,), (input, index), frame)  # type: ignore[no-any-return]
    return slowly((input, index), {}, frame, _quick, key)  # type: ignore[no-any-return]


@front("__getitem__")
def getitem(input: Tensor, index: Any) -> Tensor:
    """``x[index]``, any index that torch takes. A mask waits for the number of its true elements.

    Raises:
        IndexError: as torch, at once where it is known here.
    """
    kind = type(index)
    if type(input) is not Tensor:  # a plain tensor, at an index that is on a mesh
        input = as_tensor(input, next(v for v in (index if kind is tuple else (index,)) if isinstance(v, Tensor)))
    if kind is int and input.ndim:
        return select(input, 0, index)
    made = sliced(input, index, _basic_op.slowly, _getframe(1))
    if made is not None:
        return made
    parsed = parse(input, index)
    x: Any = input
    if not parsed.trivial or not (parsed.tensors or parsed.masks):
        only = _only_int(parsed, input.ndim)
        x = select(input, *only) if only is not None else record("torch.Tensor.__getitem__", input, parsed.basic)
    tensors = _ready(parsed)
    if not tensors:
        return x  # type: ignore[no-any-return]
    scalars = [(d, t) for d, t in tensors if t.ndim == 0]
    if len(scalars) < len(tensors):
        for d, t in reversed(scalars):  # torch takes these as ints
            x = INDEX(x, [None] * d + [t])
            tensors = [(e - (e > d), u) for e, u in tensors if u is not t]
    return INDEX(x, _spread(tensors))  # type: ignore[no-any-return]


def _spread(tensors: Sequence[tuple[int, Any]]) -> list[Any]:
    indices: list[Any] = [None] * (tensors[-1][0] + 1)
    for d, t in tensors:
        indices[d] = t
    return indices


# ---- writing


def _assign(call: Call) -> list[Sig]:
    """Dims taken whole are written where they are; of others each device writes what it holds. The value is whole
    there."""
    x, index = call.args[0], call.args[1]
    value = call.args[2]

    def view(tensor: torch.Tensor) -> Any:
        return tensor[index]

    mapped = map_view(view, x.shape, x.dtype)
    if mapped is None or len(mapped) != 1:
        return []
    (out,) = mapped
    has_value = isinstance(value, TensorArg)
    params: dict[str, Any] = {"dims": [list(d) for d in out.dims], "shape": list(out.shape)}
    if not has_value and isinstance(value, (bool, complex)):
        if isinstance(value, complex):
            return []
        params["value"] = value
    sigs = []
    for d, size in enumerate(x.shape):
        to = out.whole(d, size)
        if to >= 0 and has_value:
            own = to - (len(out.shape) - value.ndim)
            if own >= 0 and value.shape[own] == size != 1:
                sigs.append(Sig((d, own), (d,), "assign", params))
        sigs.append(Sig((d, R) if has_value else (d,), (d,), "assign", params))
    return sigs


def _set(x: torch.Tensor, index: Any, value: Any) -> None:
    x[index] = value


Pairs = Callable[[Call], "list[tuple[int, int, int]]"]


def follows(pairs: Pairs) -> Verify:
    """A check over all mesh axes: where dims of other inputs follow dims of input 0, they are whole or cut alike.

    ``pairs(call)``: (dim of input 0, number of another input, its dim).
    """

    def verify(call: Call, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> bool:
        together = pairs(call)
        shapes = [t.shape for t in call.tensors]
        for coord in coords(call.mesh_shape):
            boxes = [box(shape, codes, call.mesh_shape, coord) for shape, codes in zip(shapes, ins, strict=True)]
            for dim, other, own in together:
                held = boxes[other][own]
                if held != boxes[0][dim] and held != (0, shapes[other][own]):
                    return False
        return True

    return verify


def _assign_pairs(call: Call) -> list[tuple[int, int, int]]:
    x, index, value = call.args[0], call.args[1], call.args[2]
    if not isinstance(value, TensorArg):
        return []
    mapped = map_view(lambda tensor: tensor[index], x.shape, x.dtype)
    if mapped is None:
        return []
    out = mapped[0]
    pairs = []
    for d, (to, _, _) in enumerate(out.dims):
        own = to - (len(out.shape) - value.ndim)
        if to >= 0 and own >= 0 and value.shape[own] != 1:
            pairs.append((d, value.index, own))
    return pairs


ASSIGN = OPS["assign"] = Op(
    "assign", _set, _assign, verify=follows(_assign_pairs), writes=0, numbers=frozenset({2})
)


def index_put_fn(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: Any, accumulate: bool = False
) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=x.dtype, device=x.device)
    made: torch.Tensor = torch.ops.aten.index_put_.default(x, list(indices), values, accumulate)
    return made


def index_put_new(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: Any, accumulate: bool = False
) -> torch.Tensor:
    return index_put_fn(x.clone(), indices, values, accumulate)


def _put(call: Call) -> list[Sig]:
    """x may be sharded anywhere; indices are whole, values may follow x's dims."""
    x, indices = call.args[0], call.args[1]
    value = call.args[2]
    geometry = _geometry(x, indices)
    has_value = isinstance(value, TensorArg)
    whole = (R,) * len(geometry.dims)
    params: dict[str, Any] = {
        "dims": list(geometry.dims), "out_at": geometry.out_at, "accumulate": bool(call.arg(3, "accumulate", False)),
    }
    if isinstance(value, bool):
        params["value"] = value
    elif isinstance(value, complex):
        return []
    ndim = len(geometry.rest) + len(geometry.shape)
    sigs = []
    for d in range(x.ndim):
        if has_value and d in geometry.rest:
            own = geometry.out_dim(d) - (ndim - value.ndim)
            if own >= 0 and value.shape[own] == x.shape[d] != 1:
                sigs.append(Sig((d, *whole, own), (d,), "put", params))
        sigs.append(Sig((d, *whole, R) if has_value else (d, *whole), (d,), "put", params))
    return sigs


def _put_pairs(call: Call) -> list[tuple[int, int, int]]:
    x, indices, value = call.args[:3]
    if not isinstance(value, TensorArg):
        return []
    geometry = _geometry(x, indices)
    missing = len(geometry.rest) + len(geometry.shape) - value.ndim
    owns = [(d, geometry.out_dim(d) - missing) for d in geometry.rest]
    return [(d, value.index, own) for d, own in owns if own >= 0 and value.shape[own] != 1]


PUT = OPS["aten.index_put_"] = Op(
    "aten.index_put_", index_put_fn, _put, verify=follows(_put_pairs), writes=0, numbers=frozenset({2})
)
PUT_NEW = OPS["aten.index_put"] = Op(
    "aten.index_put", index_put_new, _put, verify=follows(_put_pairs), numbers=frozenset({2})
)


def _stripped(value: Any, ndim: int) -> Any:
    """A value may have more dims of one element in front than what it is written to."""
    extra = value.ndim - ndim
    if extra > 0 and all(n == 1 for n in value.shape[:extra]):
        return value.reshape(tuple(value.shape[extra:]))
    return value


@front("__setitem__")
def setitem(input: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``, any index that torch takes, on any placement. Redistributes index and value where they do
    not fit.

    Raises:
        PlacementError: the tensor is Partial.
    """
    if not isinstance(value, (Tensor, int, float, complex, bool)):
        value = input._spec.session.upload(torch.as_tensor(value), input._spec.mesh, None)
    parsed = parse(input, index)
    with policy.auto_redistribute():
        if not parsed.tensors and not parsed.masks:
            _set_basic(input, parsed, value)
            return
        x: Any = input if parsed.trivial else record("torch.Tensor.__getitem__", input, parsed.basic)
        if not parsed.tensors and len(parsed.masks) == 1 and (not isinstance(value, Tensor) or value.numel() == 1):
            at, mask = parsed.masks[0]
            shaped = mask.to(torch.bool).reshape((*mask.shape, *[1] * (x.ndim - at - mask.ndim)))
            filled = value if not isinstance(value, Tensor) else value.to(x.dtype).reshape(())
            x.masked_fill_(shaped, filled)
            return
        tensors = _ready(parsed)
        scalars = [(d, t) for d, t in tensors if t.ndim == 0]
        if scalars and len(scalars) < len(tensors):
            for d, t in reversed(scalars):  # torch takes these as ints
                x = select(x, d, int(t))
                tensors = [(e - (e > d), u) for e, u in tensors if u is not t]
        index_put_(x, _spread(tensors), value)


def _set_basic(x: Tensor, parsed: Index, value: Any) -> None:
    only = _only_int(parsed, x.ndim)
    if only is not None and not x._spec.link and not any(p.is_shard(only[0] % x.ndim) for p in x.placements):
        view: Any = select(x, *only)
        if isinstance(value, Tensor):
            view.copy_(_stripped(value, view.ndim))
        else:
            view.fill_(value)
        return
    if isinstance(value, Tensor) and value.dtype != x.dtype and (value.dtype.is_complex and not x.is_complex()):
        value = value.to(x.dtype)
    ASSIGN(x, parsed.basic, value)


def index_put_(input: Tensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    """``Tensor.index_put_``"""
    return _put_into(PUT, input, indices, values, accumulate)


def index_put(input: Tensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    """``torch.index_put``"""
    return _put_into(PUT_NEW, input, indices, values, accumulate)


def _put_into(op: Op, input: Tensor, indices: Sequence[Any], values: Any, accumulate: bool) -> Tensor:
    found: list[Any] = []
    for t in indices:
        if t is None:
            found.append(None)
            continue
        t = as_tensor(t, input)
        if _is_mask(t):
            found.extend(t.to(torch.bool).nonzero(as_tuple=True))
        else:
            found.append(t)
    if isinstance(values, torch.Tensor):
        values = as_tensor(values, input)
    if isinstance(values, Tensor):
        dims = [d for d, t in enumerate(found) if t is not None]
        indexed = torch.broadcast_shapes(*[tuple(found[d].shape) for d in dims])  # type: ignore[no-untyped-call]
        values = _stripped(values, input.ndim - len(dims) + len(indexed))
        if values.dtype != input.dtype and op is PUT:
            values = values.to(input.dtype)
    made: Tensor = op(input, found, values, accumulate)
    return made


front("index_put_")(index_put_)
front("index_put")(index_put)
