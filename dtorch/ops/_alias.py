"""Views that could not be views.

A view of a tensor that is replicated, or whose sharded dims stay where they are, is a real view on every worker:
aliasing is torch's own. A view that had to communicate (a slice of a sharded dim) is a copy. Such a copy keeps a
*link* to what it looks at, so that a program sees the same values as with a real view:

* what is written into it is written back through the inverse of the view, into the tensor that it looks at;
* once anything may have been written into memory that it looks at, it is *stale*, and is read afresh before its next
  use.

Both cost nothing to tensors without a link: the state is part of the Spec, so a stale tensor has no signature
anywhere and comes by here on the slow path; ``LIVE`` is empty unless such views exist.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtorch import policy
from dtorch.ops._affine import Mapped, map_view
from dtorch.spec import LINKED, OWN, STALE
from dtorch.tensor import Tensor

if TYPE_CHECKING:
    from dtorch.ops._op import Op

VIEW_KERNELS = frozenset({"local", "view", "expand", "alias"})
"""Kernels whose results share memory where torch's do."""

LIVE: dict[int, weakref.ref[Tensor]] = {}
"""All tensors that have a link, by id."""


class Link:
    """How a linked tensor was made.

    Attributes:
        base: what it looks at: an alias of the user's tensor made for the purpose, or another linked tensor.
        op, args, kwargs: the call; ``_BASE`` stands for the base.
        index: which result of the call.
        shape: of the base, in elements of whose dims the view was taken.
    """

    __slots__ = ("args", "base", "index", "kwargs", "op", "shape")

    def __init__(self, op: Op, base: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> None:
        self.op = op
        self.base = base
        self.args = args
        self.kwargs = kwargs
        self.index = index
        self.shape = tuple(base.shape)

    def call(self, base: Any) -> Any:
        """The view of another base, by the op's function."""
        args, kwargs = _replace((self.args, self.kwargs), base)
        result = self.op.fn(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) else result[self.index]


class _Base:
    def __repr__(self) -> str:
        return "<base>"


_BASE = _Base()


def _replace(tree: Any, base: Any) -> Any:
    if tree is _BASE:
        return base
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)(_replace(v, base) for v in tree)
    if isinstance(tree, dict):
        return {k: _replace(v, base) for k, v in tree.items()}
    return tree


def _without(tree: Any, tensor: Tensor) -> Any:
    if tree is tensor:
        return _BASE
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)(_without(v, tensor) for v in tree)
    if isinstance(tree, dict):
        return {k: _without(v, tensor) for k, v in tree.items()}
    return tree


def attach(
    op: Op, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bases: Sequence[Tensor | None]
) -> Any:
    """Link results to the inputs that they would be views of (None: that result is no view, or a real one)."""
    outs = [result] if isinstance(result, Tensor) else list(result)
    aliases: dict[int, Tensor] = {}
    for index, (out, base) in enumerate(zip(outs, bases, strict=True)):
        if base is None:
            continue
        if base._spec.link == OWN:
            known = aliases.get(id(base))
            if known is None:
                from dtorch.ops.table import OPS

                known = aliases[id(base)] = OPS["torch.detach"].record((base,), {})
            source = known
        else:
            source = base
        out._link = Link(op, source, _without(args, base), _without(kwargs, base), index)
        if out._spec.link != LINKED:
            out._spec = out._spec.session.respec(out._spec, link=LINKED)
        _enter(out)
    return result


def _enter(tensor: Tensor) -> None:
    key = id(tensor)
    LIVE[key] = weakref.ref(tensor, lambda _: LIVE.pop(key, None))


def wrote(target: Tensor) -> None:
    """Something was written into ``target``: whoever may look at the same memory must look again."""
    mesh = target._spec.mesh
    own = target._spec.link != OWN
    for reference in list(LIVE.values()):
        tensor = reference()
        if tensor is not None and tensor is not target and tensor._spec.link == LINKED and tensor._spec.mesh == mesh:
            tensor._spec = tensor._spec.session.respec(tensor._spec, link=STALE)
    if own:
        _write_back(target)


def mutated(tensors: Sequence[Tensor], inputs: Sequence[int]) -> None:
    """A call wrote into some of its tensors: values fetched before are old, and so are views of them."""
    tensors[0]._spec.session.num_mutations += 1
    if not LIVE:
        return
    specs = [tensors[i]._spec for i in inputs]
    for i, spec in zip(inputs, specs, strict=True):
        tensors[i]._spec = spec  # it holds what was written, whatever an earlier round says
        wrote(tensors[i])


def _write_back(tensor: Tensor) -> None:
    spec, slot = tensor._spec, tensor._slot
    link: Link = tensor._link
    with policy.auto_redistribute():
        _put(link, tensor)
    if tensor._slot == slot:
        tensor._spec = spec  # it already holds what was written


def _put(link: Link, value: Tensor) -> None:
    """base[where the view looks] = value."""
    base = link.base
    refresh(base)
    try:
        mapped = None if base.dtype != value.dtype else map_view(link.call, link.shape, base.dtype)
    except RuntimeError:  # a view that depends on strides
        mapped = None
    if mapped is None:
        if base.numel() == value.numel() and base.dtype == value.dtype and tuple(base.shape) == link.shape:
            base.copy_(value.reshape(tuple(base.shape)))
            return
        raise RuntimeError(
            f"a sharded view cannot alias: what was written in place to {link.op.short_name} of {base._spec} cannot be "
            "carried back; clone() it first"
        )
    (view,) = mapped
    used = [out for out, _, _ in view.dims if out >= 0]
    if len(set(used)) + 1 == len(used) and _put_diagonal(base, view, value):
        return
    if len(set(used)) != len(used) or any(n != 1 and d not in used for d, n in enumerate(view.shape)):
        raise RuntimeError(
            f"a sharded view cannot alias: {link.op.short_name} of {base._spec} shows elements more than once, or more "
            "than one diagonal; clone() it first"
        )
    index: list[Any] = []
    for size, (out, start, step) in zip(link.shape, view.dims, strict=True):
        if out < 0:
            index.append(start if size else slice(0, 0))
        else:
            count = view.shape[out]
            index.append(slice(start, start + step * (count - 1) + 1 if count else start, step))
    for dim in reversed(range(len(view.shape))):
        if dim not in used:
            value = value.select(dim, 0)
    order = [sorted(used).index(out) for out in used]
    base[tuple(index)] = value.permute(order) if order != sorted(order) else value


def _put_diagonal(base: Tensor, view: Mapped, value: Tensor) -> bool:
    """Write back a view that shows a diagonal of two dims and all else as it is; False for any other."""
    outs = [out for out, _, _ in view.dims]
    twice = next(out for out in outs if outs.count(out) > 1)
    pair = [d for d, out in enumerate(outs) if out == twice]
    rest = [d for d in range(len(outs)) if d not in pair]
    if any(view.whole(d, base.shape[d]) < 0 for d in rest):
        return False
    index: list[Any] = [slice(None)] * len(outs)
    for d in pair:
        _, start, step = view.dims[d]
        index[d] = torch.arange(view.shape[twice]) * step + start
    order = [outs[d] for d in rest]
    order.insert(pair[0] if pair[1] == pair[0] + 1 else 0, twice)
    base[tuple(index)] = value.permute(order)
    return True


def refresh(tensor: Tensor) -> bool:
    """Read a stale tensor afresh; whether it was stale."""
    if tensor._spec.link != STALE:
        return False
    link: Link = tensor._link
    refresh(link.base)
    args, kwargs = _replace((link.args, link.kwargs), link.base)
    with policy.auto_redistribute():
        result = link.op.record(args, kwargs)
    made = result if isinstance(result, Tensor) else result[link.index]
    spec = made._spec.session.respec(made._spec, link=LINKED, is_param=tensor._spec.is_param,
                                     requires_grad=tensor._spec.requires_grad)
    tensor._slot, made._slot = made._slot, tensor._slot
    tensor._spec = spec
    return True


def cut_loose(tensor: Tensor) -> None:
    """Let a linked tensor keep what it shows now: from here on it looks at nothing."""
    refresh(tensor)
    LIVE.pop(id(tensor), None)
    tensor._link = None
    tensor._spec = tensor._spec.session.respec(tensor._spec, link=OWN)


def refresh_all(tensors: Sequence[Tensor]) -> bool:
    """As ``refresh``, for all; whether any was stale."""
    stale = [t for t in tensors if t._spec.link == STALE]
    for tensor in stale:
        refresh(tensor)
    return bool(stale)


def swap(x: Tensor, view: Tensor) -> None:
    """Let ``x`` be ``view``, which was made of it; the object ``view`` then stands for what ``x`` was."""
    before = x._spec
    link = getattr(x, "_link", None)
    made = getattr(view, "_link", None)
    if made is not None and made.base is x:
        made.base = view
    x._slot, view._slot = view._slot, x._slot
    x._spec, view._spec = view._spec, before
    for tensor, own in ((x, made), (view, link)):
        tensor._link = own
        if own is not None:
            _enter(tensor)
    session = x._spec.session
    x._spec = session.respec(x._spec, is_param=before.is_param, requires_grad=before.requires_grad)
    session.num_mutations += 1
