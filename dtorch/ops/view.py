"""Ops that look at the same elements under another shape or order, and their copying relatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import product
from math import prod
from sys import _getframe
from typing import Any

import torch

from dtorch.mesh import DeviceMesh
from dtorch.ops._affine import affine, partial_through, region
from dtorch.ops._call import Call, R, Sig, sharded
from dtorch.ops._out import taking_out
from dtorch.ops._rules import P_AVG, P, regroup, same_cuts
from dtorch.ops._tree import tensors_of
from dtorch.ops._ways import put
from dtorch.ops.table import FUNCTIONAL, METHODS, OPS, PUBLIC, row
from dtorch.runtime.layout import is_shard, shard_block, shard_code, shard_dim
from dtorch.tensor import TORCH, Tensor

MAX_REGIONS = 256
"""Copies made of more pieces than this are not done piecewise."""


def record(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an op of the table, past any front that stands before it."""
    return OPS[name].record(args, kwargs)


def tensor_codes(call: Call) -> list[int]:
    """The shard codes that input 0 has on any axis, and plain shards of all its dims."""
    x = call.tensors[0]
    return sorted({c for c in x.codes if is_shard(c)} | set(range(x.ndim)))


def ints(call: Call, position: int, *names: str) -> tuple[int, ...]:
    """Ints given as ``f(x, 1, 2)``, ``f(x, (1, 2))`` or by name."""
    given: Any = call.args[position:]
    for name in names:
        if not given and name in call.kwargs:
            given = call.kwargs[name]
    if isinstance(given, int):
        return (given,)
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return tuple(given)


# ---- the same elements


def keep(call: Call) -> list[Sig]:
    """Every placement stays."""
    sigs = [Sig((d,), (d,) * len(call.outputs)) for d in range(call.tensors[0].ndim)]
    return sigs + partial_through(call)


def keep_linear(call: Call) -> list[Sig]:
    """Shards and pending sums stay."""
    sigs = [Sig((d,), (d,) * len(call.outputs)) for d in range(call.tensors[0].ndim)]
    return sigs + [s for s in partial_through(call) if s.ins[0] in (P, P_AVG)]


def regroup_any(call: Call) -> list[Sig]:
    """view, reshape, flatten: see ``regroup``."""
    if any(isinstance(a, torch.dtype) for a in (*call.args, *call.kwargs.values())):
        x, out = call.tensors[0], call.outputs[0]
        whole = x.ndim if x.dtype.itemsize == out.dtype.itemsize else x.ndim - 1
        return [Sig((d,), (d,)) for d in range(whole)]
    return [s for s in regroup(call) if is_shard(s.ins[0])] + partial_through(call)


def regrouped_cuts(call: Call, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> bool:
    x, out = call.tensors[0], call.outputs[0]
    return prod(x.shape) != prod(out.shape) or x.dtype != out.dtype or same_cuts(call, ins, outs)


def complex_parts(call: Call) -> list[Sig]:
    """view_as_real adds a last dim, view_as_complex drops one; the others stay."""
    num = min(call.tensors[0].ndim, call.outputs[0].ndim)
    return [Sig((d,), (d,)) for d in range(num)] + [s for s in partial_through(call) if s.ins[0] in (P, P_AVG)]


def expanded(call: Call) -> list[Sig]:
    x, out = call.tensors[0], call.outputs[0]
    lead = out.ndim - x.ndim
    sigs = partial_through(call)
    for dim, size in enumerate(x.shape):
        if size == out.shape[dim + lead]:
            sigs.append(Sig((dim,), (dim + lead,), "expand"))
    return sigs + [s for s in affine(call) if s.kernel == "remap" and x.shape[shard_dim(s.ins[0])] == 1]


row("view", regroup_any, verify=regrouped_cuts, is_view=True, in_place=False, places="torch.Tensor")
row("reshape flatten ravel unflatten", regroup_any, verify=regrouped_cuts, is_view=True, in_place=False)
row("detach", keep, is_view=True, in_place=False)
row("conj resolve_conj resolve_neg real imag", keep_linear, is_view=True, in_place=False)
row("view_as_real view_as_complex", complex_parts, is_view=True, in_place=False, places="torch")
row("expand broadcast_to", expanded, is_view=True, in_place=False)
row(
    "transpose swapaxes swapdims permute t movedim moveaxis adjoint squeeze unsqueeze narrow diagonal split "
    "split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind",
    affine,
    is_view=True,
    in_place=False,
)
row("unsafe_chunk unsafe_split", affine, in_place=False)
row("split", affine, is_view=True, in_place=False, places="torch")


def _contiguous(call: Call) -> list[Sig]:
    kernel = "own_copy" if call.outputs[0].alias is None else "alias"
    return [Sig(s.ins, s.outs, kernel) for s in keep(call)]


row("contiguous", _contiguous, is_view=True, in_place=False, places="torch.Tensor")


# ---- select, with the index as a dynamic number


def _select(call: Call) -> list[Sig]:
    x = call.tensors[0]
    dim = call.arg(1, "dim") % x.ndim
    sigs = [Sig((d,), (d - (d > dim),)) for d in range(x.ndim) if d != dim]
    sigs.append(Sig((dim,), (R,), "select", {"dim": dim}))
    return sigs + partial_through(call)


row("select", _select, numbers=frozenset({2, "index"}), is_view=True, in_place=False, places="torch torch.Tensor")


def select(input: Tensor, dim: int, index: Any) -> Tensor:
    """``torch.select``: the index does not become part of the signature, and is checked here."""
    spec = input._spec
    shape = spec.shape
    ndim = len(shape)
    index = int(index)
    if not -ndim <= dim < ndim:
        if ndim == 0:
            raise IndexError("select() cannot be applied to a 0-dim tensor.")
        raise IndexError(f"Dimension out of range (expected to be in range of [-{ndim}, {ndim - 1}], but got {dim})")
    if not -shape[dim] <= index < shape[dim]:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(shape)} at dimension {dim}"
        )
    sig = _selects.get((spec, dim))
    if sig is not None:
        return put(_select_op, sig, (input._slot, index), (input, dim, index), _getframe(1))  # type: ignore[no-any-return]
    return _select_op.slowly((input, dim, index), {}, _getframe(1), _selects, (spec, dim))  # type: ignore[no-any-return]


_select_op = OPS["torch.select"]
_selects = _select_op.new_cache()


# ---- fronts: functions that stand before an op


def front(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of dtorch tensors for ``torch.name``, ``Tensor.name`` and ``F.name``, wherever they exist."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for place in (torch, torch.Tensor, torch.nn.functional):
            target = getattr(place, name, None)
            if target is None:
                continue
            PUBLIC[name] = made = fn if place is torch.Tensor else taking_out(fn, target)
            TORCH[target] = _first_on_mesh(made, name == "__setitem__")
            if place is torch.Tensor:
                METHODS[name] = fn
            elif place is torch.nn.functional:
                FUNCTIONAL[name] = made
            else:
                TORCH.setdefault(getattr(torch._C._VariableFunctions, name, target), TORCH[target])
        return fn

    return register


def _first_on_mesh(fn: Callable[..., Any], writes: bool) -> Callable[..., Any]:
    """``fn`` for calls that torch hands over because of a later argument: a plain first one is taken as replicated."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not (others := tensors_of((args[1:], kwargs))):
            return fn(*args, **kwargs)
        spec = others[0]._spec
        copy = spec.session.upload(first.detach(), spec.mesh, None)
        made = fn(copy, *args[1:], **kwargs)
        if writes:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                first.copy_(copy.to_torch())
        return made

    return call


front("select")(select)


@front("contiguous")
def contiguous(input: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """``Tensor.contiguous``: as in torch, the tensor itself where it is contiguous already."""
    if memory_format is torch.contiguous_format and input._spec.is_contiguous:
        return input
    return OPS["torch.Tensor.contiguous"].record((input,), {"memory_format": memory_format}, _getframe(1))


# ---- views that follow another tensor


@front("expand_as")
def expand_as(input: Tensor, other: Any) -> Any:
    return record("torch.Tensor.expand", input, tuple(other.shape))


@front("view_as")
def view_as(input: Tensor, other: Any) -> Any:
    return record("torch.Tensor.view", input, tuple(other.shape))


@front("reshape_as")
def reshape_as(input: Tensor, other: Any) -> Any:
    return record("torch.reshape", input, tuple(other.shape))


@front("broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> tuple[Any, ...]:
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    shape = torch.broadcast_shapes(*[tuple(t.shape) for t in tensors])  # type: ignore[no-untyped-call]
    return tuple(record("torch.Tensor.expand", t, tuple(shape)) for t in tensors)


def _at_least(name: str, one: Callable[[Tensor], Tensor]) -> None:
    def call(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
            return tuple(one(t) for t in tensors[0])
        made = tuple(one(t) for t in tensors)
        return made[0] if len(made) == 1 else made

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``torch.{name}``"
    front(name)(call)


def at_least_1d(x: Any) -> Any:
    return x.reshape(1) if x.ndim == 0 else x


def at_least_2d(x: Any) -> Any:
    return x.reshape(1, 1) if x.ndim == 0 else x.unsqueeze(0) if x.ndim == 1 else x


def at_least_3d(x: Any) -> Any:
    if x.ndim == 0:
        return x.reshape(1, 1, 1)
    if x.ndim == 1:
        return x.unsqueeze(0).unsqueeze(2)
    return x.unsqueeze(2) if x.ndim == 2 else x


_at_least("atleast_1d", at_least_1d)
_at_least("atleast_2d", at_least_2d)
_at_least("atleast_3d", at_least_3d)


# ---- in place: the tensor becomes the view


def become(x: Tensor, view: Tensor) -> Tensor:
    """Make ``x`` what ``view``, a view of it, is. Other tensors that share its memory still do."""
    from dtorch.ops._alias import swap

    swap(x, view)
    return x


def _becoming(name: str) -> Callable[..., Any]:
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return become(input, METHODS[name](input, *args, **kwargs))

    call.__name__ = call.__qualname__ = f"{name}_"
    call.__doc__ = f"``Tensor.{name}_``: metadata changes only, also the placements."
    return call


for _name in ("squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims", "t"):
    front(f"{_name}_")(_becoming(_name))


@front("detach_")
def detach_(input: Tensor) -> Tensor:
    return input


# ---- attributes


def _adjoint(x: Tensor) -> Any:
    return x.mT.conj() if x.is_complex() else x.mT


def _reversed_dims(x: Tensor) -> Any:
    return record("torch.permute", x, tuple(range(x.ndim))[::-1])


def _last_two(x: Tensor) -> Any:
    if x.ndim < 2:
        raise RuntimeError(f"tensor.mT is only supported on matrices or batches of matrices. Got {x.ndim}-D tensor.")
    return record("torch.transpose", x, -2, -1)


def _hermitian(x: Tensor) -> Any:
    if x.ndim not in (0, 2):
        raise RuntimeError(f"tensor.H is only supported on matrices (2-D tensors). Got {x.ndim}-D tensor.")
    return _adjoint(x) if x.ndim else x.conj()


def _set_part(part: str) -> Callable[[Tensor, Any], None]:
    def assign(x: Tensor, value: Any) -> None:
        target = record(f"torch.{part}", x)
        if isinstance(value, (int, float)):
            target.fill_(value)
        else:
            target.copy_(value)

    return assign


_ATTRIBUTES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], None] | None]] = {
    "T": (_reversed_dims, None),
    "mT": (_last_two, None),
    "H": (_hermitian, None),
    "mH": (_adjoint, None),
    "real": (lambda x: record("torch.real", x) if x.is_complex() else x, _set_part("real")),
    "imag": (lambda x: record("torch.imag", x), _set_part("imag")),
}
for _name, (_get, _set) in _ATTRIBUTES.items():
    setattr(Tensor, _name, property(_get, _set))
    TORCH[getattr(torch.Tensor, _name).__get__] = _get


# ---- dtype and device


def _device_kind(value: Any) -> str:
    return torch.device(value).type


@front("to")
def to(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.to``: a dtype, another tensor, or a DeviceMesh. The mesh's own device kind changes nothing.

    Raises:
        RuntimeError: a device of another kind than the mesh's: redistribute(device_mesh=...) moves tensors.
    """
    if not kwargs and len(args) == 1 and type(args[0]) is torch.dtype:
        (dtype,) = args
        return input if dtype is input._spec.dtype else OPS["torch.Tensor.to"].record((input, dtype), {}, _getframe(1))
    dtype = kwargs.pop("dtype", None)
    device = kwargs.pop("device", None)
    copy = kwargs.pop("copy", False)
    memory_format = kwargs.pop("memory_format", None)
    other = kwargs.pop("other", None)
    kwargs.pop("non_blocking", None)
    if kwargs:
        raise TypeError(f"to() got an unexpected keyword argument {next(iter(kwargs))!r}")
    rest: list[Any] = []
    for a in args:
        if isinstance(a, torch.dtype):
            dtype = a
        elif isinstance(a, (Tensor, torch.Tensor)):
            other = a
        elif isinstance(a, (str, torch.device, DeviceMesh)) or (type(a) is int and not rest and device is None):
            device = a
        elif a is not None:
            rest.append(a)
    if len(rest) == 2:  # non_blocking, copy
        copy = rest[1]
    x = input
    if other is not None:
        dtype = dtype or other.dtype
        device = other.device_mesh if isinstance(other, Tensor) else None
    if isinstance(device, DeviceMesh):
        if device != x.device_mesh:
            x = x.redistribute(device_mesh=device)
    elif device is not None and type(device) is not int and _device_kind(device) != x.device_mesh.device_type:
        kind = _device_kind(device)
        raise RuntimeError(
            f"to({str(device)!r}): the tensor is on {x.device_mesh}. Move it with "
            f"redistribute(device_mesh=DeviceMesh({kind!r}, [...])), or fetch it with to_torch()"
        )
    if dtype is not None and dtype != x.dtype:
        named = {} if memory_format is None else {"memory_format": memory_format}
        return record("torch.Tensor.to", x, dtype, **named)
    if memory_format is not None and not x.is_contiguous(memory_format=memory_format):
        return record("torch.Tensor.to", x, x.dtype, memory_format=memory_format)
    return x.clone() if copy and x is input else x


def _stay(kind: str) -> None:
    def call(input: Tensor, *_: Any, **__: Any) -> Tensor:
        own = input.device_mesh.device_type
        if own != kind:
            raise RuntimeError(
                f"{kind}(): the tensor is on {input.device_mesh}. Move it with redistribute(device_mesh=DeviceMesh"
                f"({kind!r}, [...])), or fetch it with to_torch()"
            )
        return input

    call.__name__ = call.__qualname__ = kind
    call.__doc__ = f"The tensor itself on a {kind} mesh, an error on others."
    front(kind)(call)


_stay("cpu")
_stay("cuda")


@front("pin_memory")
def pin_memory(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


@front("type_as")
def type_as(input: Tensor, other: Any) -> Any:
    return to(input, other.dtype)


@front("type")
def type_(input: Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        return str(torch.empty(0, dtype=input.dtype).type())
    if isinstance(dtype, str):
        dtype = torch.empty(0).type(dtype).dtype
    elif not isinstance(dtype, torch.dtype):
        dtype = dtype.dtype
    return to(input, dtype)


# ---- copies in another order


def boxed(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, n) for n in sizes]


def _flip(call: Call) -> list[Sig]:
    x = call.tensors[0]
    if call.name.endswith("fliplr"):
        dims: tuple[int, ...] = (1,)
    elif call.name.endswith("flipud"):
        dims = (0,)
    else:
        dims = ints(call, 1, "dims")
    dims = tuple(d % x.ndim for d in dims)
    back = [(d, n - 1, -1) if d in dims else (d, 0, 1) for d, n in enumerate(x.shape)]
    params = {"regions": [region(0, 0, boxed(x.shape), back)]}
    sigs = [Sig((d,), (d,), "remap", params) if d in dims else Sig((d,), (d,)) for d in range(x.ndim)]
    return sigs + partial_through(call)


row("flip fliplr flipud", _flip, in_place=False)


def _roll(call: Call) -> list[Sig]:
    x = call.tensors[0]
    shifts, dims = call.arg(1, "shifts"), call.arg(2, "dims", ())
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
    sigs = partial_through(call)
    if not dims:
        if x.ndim != 1:
            return sigs
        dims = (0,)
    turned: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        turned[dim % x.ndim] = turned.get(dim % x.ndim, 0) + shift
    cuts: list[list[tuple[int, int, int]]] = []  # of each dim: (from, to, where it starts in the input)
    for d, n in enumerate(x.shape):
        s = turned.get(d, 0) % n if n else 0
        cuts.append([(0, s, n - s), (s, n, 0)] if s else [(0, n, 0)])
    regions = [
        region(0, 0, [(a, b) for a, b, _ in parts], [(d, start, 1) for d, (_, _, start) in enumerate(parts)])
        for parts in product(*cuts)
    ]
    for d in range(x.ndim):
        sigs.append(Sig((d,), (d,), "remap", {"regions": regions}) if d in turned else Sig((d,), (d,)))
    return sigs


row("roll", _roll, in_place=False)


@front("rot90")
def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """``torch.rot90``"""
    k = int(k) if isinstance(k, (Tensor, torch.Tensor)) else k
    torch.rot90(torch.empty([0] * input.ndim), k, list(dims))  # for torch's complaints
    a, b = dims
    if k % 4 == 1:
        return input.flip((b,)).transpose(a, b)
    if k % 4 == 2:
        return input.flip((a, b))
    if k % 4 == 3:
        return input.flip((a,)).transpose(a, b)
    return input.clone(memory_format=torch.contiguous_format)


def _repeat(call: Call) -> list[Sig]:
    x, out = call.tensors[0], call.outputs[0]
    times = list(ints(call, 1, "repeats", "dims"))
    times = [1] * (out.ndim - len(times)) + times
    lead = out.ndim - x.ndim
    sigs = partial_through(call)
    regions = []
    if prod(times[lead:]) <= MAX_REGIONS:
        for at in product(*(range(k) for k in times[lead:])):
            box = [*boxed(out.shape[:lead]), *((k * n, (k + 1) * n) for k, n in zip(at, x.shape, strict=True))]
            regions.append(region(0, 0, box, [(lead + d, 0, 1) for d in range(x.ndim)]))
    for d in range(x.ndim):
        if times[lead + d] == 1:
            sigs.append(Sig((d,), (lead + d,)))
        elif regions:
            sigs.append(Sig((d,), (lead + d,), "remap", {"regions": regions}))
    return sigs


row("repeat tile", _repeat, in_place=False)


def _repeat_interleave(call: Call) -> list[Sig]:
    """A number of repeats: every piece is repeated, so cuts fall on multiples of that number."""
    x = call.tensors[0]
    times, dim = call.arg(1, "repeats"), call.arg(2, "dim")
    if len(call.tensors) != 1 or not isinstance(times, int):
        return []
    sigs = partial_through(call)
    if dim is None:
        if x.ndim != 1:
            return sigs
        dim = 0
    dim %= x.ndim
    for code in tensor_codes(call):
        d = shard_dim(code)
        if d != dim:
            sigs.append(Sig((code,), (code,)))
        elif times and call.kwargs.get("output_size") is None:
            sigs.append(Sig((code,), (shard_code(d, shard_block(code) * times),)))
    return sigs


row("repeat_interleave", _repeat_interleave, in_place=False)


def _triangle(call: Call) -> list[Sig]:
    x = call.tensors[0]
    diagonal = call.arg(1, "diagonal", 0)
    sigs = [s for s in partial_through(call) if s.ins[0] in (P, P_AVG)]
    for d in range(x.ndim):
        if d < x.ndim - 2:
            sigs.append(Sig((d,), (d,)))
        else:
            sigs.append(Sig((d,), (d,), "triangle", {"diagonal": diagonal}))
    return sigs


row("tril triu", _triangle)


def _meshgrid(call: Call) -> list[Sig]:
    sigs = []
    swap = call.kwargs.get("indexing") == "xy"
    for i, tensor in enumerate(call.tensors):
        if tensor.ndim == 0:
            continue
        out = 1 - i if swap and i < 2 and len(call.tensors) > 1 else i
        sigs.append(sharded(call, [0 if j == i else R for j in range(len(call.tensors))], out))
    return sigs


row("meshgrid", _meshgrid, in_place=False, places="torch")

