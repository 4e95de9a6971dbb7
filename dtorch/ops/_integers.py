"""Tensors of no dims that stand where torch wants an int: a size, a dim, a count.

torch reads their value, ``x.view(n, -1)`` with ``n = torch.tensor(2)``, and so must we: shapes and placements follow from it.
Which arguments are read is not in any list. It is seen by calling the function once, for each pattern of arguments, on
tensors without data, and watching which of the small ones it asks for a number.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.tensor import Tensor

_KEEP = ("__getitem__", "__setitem__")
"""Functions that take such tensors as they are: their index is looked up on the devices."""
_READ = torch.ops.aten._local_scalar_dense.default

Args = tuple[tuple[Any, ...], dict[str, Any]]


def with_integers(fn: Callable[..., Any], known: dict[Any, frozenset[int]], args: Any, kwargs: Any) -> Args | None:
    """The arguments with ints in place of the tensors whose values ``fn`` reads; None when there are none.

    Blocks until their values are known, where they are on a mesh.

    Args:
        known: pattern of arguments -> which tensors are read, counted in order; kept by the caller for each ``fn``.
    """
    leaves: list[Any] = []
    pattern = _pattern((args, kwargs), leaves)
    if not any(map(_is_integer, leaves)) or fn.__name__ in _KEEP:
        return None
    read = known.get(pattern)
    if read is None:
        read = known[pattern] = _watched(fn, args, kwargs, leaves)
    if not read:
        return None
    values = iter([int(leaf) if at in read else leaf for at, leaf in enumerate(leaves)])
    made: Args = _swapped((args, kwargs), values)
    return made


def _is_integer(value: Any) -> bool:
    return not value.ndim and not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool


def _pattern(tree: Any, leaves: list[Any]) -> Any:
    """What decides who reads what: kinds of arguments and where the small tensors are. Collects the tensors."""
    if isinstance(tree, (Tensor, torch.Tensor)):
        leaves.append(tree)
        return "integer" if _is_integer(tree) else "tensor"
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple, *(_pattern(value, leaves) for value in tree))
    if isinstance(tree, dict):
        return (dict, *((name, _pattern(value, leaves)) for name, value in tree.items()))
    return type(tree)


def _swapped(tree: Any, values: Any) -> Any:
    """The same tree with other leaves for its tensors, in order."""
    if isinstance(tree, (Tensor, torch.Tensor)):
        return next(values)
    if isinstance(tree, list):
        return [_swapped(value, values) for value in tree]
    if isinstance(tree, tuple) and type(tree) is not torch.Size:
        return tuple(_swapped(value, values) for value in tree)
    if isinstance(tree, dict):
        return {name: _swapped(value, values) for name, value in tree.items()}
    return tree


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Notes the tensors that are asked for their value, before the function itself runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:
            self.read.add(id(args[0]))
        return func(*args, **(kwargs or {}))


def _watched(fn: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Any]) -> frozenset[int]:
    watch = _Watch()
    with torch._C.DisableTorchFunction(), torch.no_grad():  # also inside ``with mesh:``
        small = [
            torch.ones((), dtype=leaf.dtype) if _is_integer(leaf) else torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            for leaf in leaves
        ]
        own, named = _swapped((args, kwargs), iter(small))
        with watch, suppress(Exception):  # it may well fail without data, after it has read
            fn(*own, **named)
    return frozenset(at for at, leaf in enumerate(small) if id(leaf) in watch.read)
