"""Arguments of a definition as plain data, and back.

A definition's arguments travel as a tree of None, bool, int, float and str, in which a list is always tagged by its first
element::

    ["t", i]            tensor input i                 ["n", i]       dynamic number i of the call
    ["l", [...]]        list                           ["u", [...]]   tuple
    ["d", "float32"]    torch.dtype                    ["dev"]        the device on which the call runs
    ["s", a, b, c]      slice                          ["e"]          Ellipsis
    ["c", re, im]       complex                        ["m", name]    torch.memory_format or torch.layout
    ["shape", i]        local shape of output i        ["slot", i]    (reserved)

The client builds the tree (``freeze``); a worker fills it for the place where it runs (``bind``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.transport.errors import ProtocolError

_CONSTANTS = (torch.memory_format, torch.layout)
_DTYPES = {
    name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype)[6:]


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``; raises ProtocolError for a name torch does not know."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ProtocolError(f"unknown dtype {name!r}") from None


class TensorRef:
    """Stands for tensor input ``index`` in a client-side argument tree."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class NumberRef:
    """Stands for dynamic number ``index`` in a client-side argument tree."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class LocalShape:
    """Stands for the local shape of output ``index``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def freeze(value: Any) -> Any:
    """Client side: turn an argument tree into plain data. Raises TypeError for what cannot travel."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value if type(value) in (type(None), bool, int, float, str) else type(value).__mro__[1](value)
    if isinstance(value, TensorRef):
        return ["t", value.index]
    if isinstance(value, NumberRef):
        return ["n", value.index]
    if isinstance(value, LocalShape):
        return ["shape", value.index]
    if isinstance(value, list):
        return ["l", [freeze(v) for v in value]]
    if isinstance(value, tuple):
        return ["u", [freeze(v) for v in value]]
    if isinstance(value, torch.dtype):
        return ["d", dtype_name(value)]
    if isinstance(value, torch.device):
        return ["dev"]
    if isinstance(value, slice):
        return ["s", freeze(value.start), freeze(value.stop), freeze(value.step)]
    if value is Ellipsis:
        return ["e"]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, _CONSTANTS):
        return ["m", str(value)[6:]]
    raise TypeError(f"an argument of type {type(value).__name__} cannot be sent to workers")


class Filler:
    """What a worker puts in place of references that depend on where it runs."""

    def __init__(self, device: torch.device, local_shapes: Sequence[tuple[int, ...]]) -> None:
        self.device = device
        self.local_shapes = local_shapes

    def constant(self, node: Any) -> Any:
        """The value of a node without tensors and numbers."""
        return self.fill(node, (), ())

    def fill(self, node: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """The value of any node. Raises ProtocolError for a node that is not in the vocabulary."""
        if not isinstance(node, list):
            return node
        match node:
            case ["t", int(i)]:
                return tensors[i]
            case ["n", int(i)]:
                return numbers[i]
            case ["l", list(items)]:
                return [self.fill(v, tensors, numbers) for v in items]
            case ["u", list(items)]:
                return tuple(self.fill(v, tensors, numbers) for v in items)
            case ["d", str(name)]:
                return dtype_of(name)
            case ["dev"]:
                return self.device
            case ["s", start, stop, step]:
                return slice(*(self.fill(v, tensors, numbers) for v in (start, stop, step)))
            case ["e"]:
                return Ellipsis
            case ["c", re, im]:
                return complex(re, im)
            case ["m", str(name)] if isinstance(getattr(torch, name, None), _CONSTANTS):
                return getattr(torch, name)
            case ["shape", int(i)]:
                return tuple(self.local_shapes[i])
        raise ProtocolError(f"unknown argument node {node[:1]!r}")


def _is_constant(node: Any) -> bool:
    if not isinstance(node, list) or not node:
        return True
    if node[0] in ("t", "n"):
        return False
    if node[0] in ("l", "u"):
        return all(_is_constant(v) for v in node[1])
    if node[0] == "s":
        return all(_is_constant(v) for v in node[1:])
    return True


def bind(
    fn: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    filler: Filler,
    num_tensors: int,
    num_numbers: int,
) -> Callable[..., Any]:
    """A function of exactly the call's tensors, then its numbers, that calls ``fn`` with everything in place.

    The common shapes (tensors first, in order, then constants) cost no more than one extra frame; a call of tensors alone
    is ``fn`` itself.
    """
    positional = [node[1] if isinstance(node, list) and node and node[0] == "t" else None for node in args]
    leading = 0
    while leading < len(args) and positional[leading] == leading:
        leading += 1
    rest = args[leading:]
    if leading == num_tensors:
        if not rest and not kwargs and num_numbers == 0:
            return fn
        if num_numbers == 1 and rest == [["n", 0]] and not kwargs:
            return fn
        if all(map(_is_constant, rest)) and all(map(_is_constant, kwargs.values())) and num_numbers == 0:
            tail = tuple(filler.constant(v) for v in rest)
            named = {k: filler.constant(v) for k, v in kwargs.items()}
            return _with_constants(fn, num_tensors, tail, named)

    def call(*values: Any) -> Any:
        tensors, numbers = values[:num_tensors], values[num_tensors:]
        fill = filler.fill
        return fn(
            *[fill(a, tensors, numbers) for a in args],
            **{k: fill(v, tensors, numbers) for k, v in kwargs.items()},
        )

    return call


def _with_constants(
    fn: Callable[..., Any], num_tensors: int, tail: tuple[Any, ...], named: dict[str, Any]
) -> Callable[..., Any]:
    if num_tensors == 1:
        if not named:
            if len(tail) == 1:
                only = tail[0]
                return lambda a: fn(a, only)
            return lambda a: fn(a, *tail)
        return lambda a: fn(a, *tail, **named)
    if num_tensors == 2 and not tail:
        return lambda a, b: fn(a, b, **named)
    if num_tensors == 0:
        return lambda: fn(*tail, **named)
    return lambda *tensors: fn(*tensors, *tail, **named)
