"""Arguments of compiled functions: what makes two calls alike, which tensors come in, and what changed between two calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtorch.face import TorchTensor
from dtorch.ops._op import _ATOMS as ATOMS
from dtorch.tensor import Tensor

_LIST, _DICT, _FACE, _END = (f"<{name}>" for name in ("list", "dict", "face", "end"))
_NUMBERS = (int, float, bool)
_SEQUENCES = (list, tuple, torch.Size)
_LIBRARIES = ("torch", "dtorch", "numpy", "transformers", "diffusers")
"""Packages whose functions hold no modules of the user's."""


def key_of(value: Any, key: list[Any], ins: list[int]) -> bool:
    """Append what is static in ``value`` to ``key`` and the slots of its tensors to ``ins``; False where it is something
    that a program cannot take."""
    t = type(value)
    if t is Tensor:
        key.append(value._spec)
        ins.append(value._slot)
    elif t is TorchTensor:
        key.append(_FACE)
        key.append(value._native._spec)
        ins.append(value._native._slot)
    elif t in _NUMBERS:
        key.append(t)
        key.append(value)
    elif t in ATOMS:
        key.append(value)
    elif t in _SEQUENCES:
        key.append(_LIST)
        key.append(t)
        for item in value:
            if not key_of(item, key, ins):
                return False
        key.append(_END)
    elif t is dict:
        key.append(_DICT)
        for name, item in value.items():
            key.append(name)
            if not key_of(item, key, ins):
                return False
        key.append(_END)
    elif t is slice:
        key.append(slice)
        return key_of(value.start, key, ins) and key_of(value.stop, key, ins) and key_of(value.step, key, ins)
    else:
        return False
    return True


def tensors_in(tree: Any) -> list[Tensor]:
    """Native tensors of an argument, in the order of ``key_of``."""
    t = type(tree)
    if t is Tensor:
        return [tree]
    if t is TorchTensor:
        return [tree._native]
    if t is dict:
        return [found for value in tree.values() for found in tensors_in(value)]
    if t in _SEQUENCES:
        return [found for value in tree for found in tensors_in(value)]
    if t is slice:
        return [found for part in (tree.start, tree.stop, tree.step) for found in tensors_in(part)]
    return []


def refuse(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
    """The error that names the argument which a program cannot take."""
    name = getattr(fn, "__name__", type(fn).__name__)
    for path, value in leaves(fn, args, kwargs):
        if key_of(value, [], []):
            continue
        if isinstance(value, torch.Tensor):
            return TypeError(
                f"{name}: argument {path} is a plain torch.Tensor, whose values a replay would not see change. Put it on a "
                "mesh: dtorch.tensor(x, device_mesh=...)"
            )
        return TypeError(
            f"{name}: argument {path} is a {type(value).__name__}; a compiled function takes dtorch tensors, numbers, strings "
            "and lists, tuples and dicts of them. Let the function use it without being given it, or pass its tensors"
        )
    return TypeError(f"{name}: a compiled function takes dtorch tensors, numbers, strings and nestings of them")


def leaves(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of all that is not a nesting, under the names of the parameters: ``x``, ``masks[0]``, ``options['a']``."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        named = dict(inspect.signature(target).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # it has no signature, or the call does not fit: that error comes from the call
        named = {**{str(i): v for i, v in enumerate(args)}, **kwargs}
    for name, value in named.items():
        yield from _leaves(name, value)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}[{i}]", item)
    elif type(value) is dict:
        for name, item in value.items():
            yield from _leaves(f"{path}[{name!r}]", item)
    else:
        yield path, value


def facts(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], around: dict[str, Any]) -> dict[str, str]:
    """What a recording depends on, by name, to be compared with that of another call.

    Args:
        around: further facts, such as the mesh in force.
    """
    found = {}
    for path, value in leaves(fn, args, kwargs):
        native = value._native if type(value) is TorchTensor else value
        found[f"argument {path}"] = str(native._spec) if type(native) is Tensor else repr(value)[:80]
    return {**found, **{name: repr(value)[:80] for name, value in around.items()}}


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """``argument x: float32[4] -> float32[5]``, for all that differs."""
    return [
        f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]


def modules_of(fn: Any) -> tuple[torch.nn.Module, ...]:
    """Modules whose train or eval matters to a function: itself, what it is a method of, what it closes over, is bound to or
    names as a global, and all of their parts."""
    roots: list[Any] = []
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            roots.append(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                look(part)
        elif inspect.ismethod(value):
            look(value.__self__)
            look(value.__func__)
        elif inspect.isfunction(value) and value.__module__.partition(".")[0] not in _LIBRARIES:
            around = inspect.getclosurevars(value)
            for part in (*around.nonlocals.values(), *around.globals.values(), *(value.__defaults__ or ())):
                look(part)
        elif type(value) in (list, tuple):
            for part in value:
                look(part)

    look(fn)
    return tuple(dict.fromkeys(part for root in roots for part in root.modules()))
