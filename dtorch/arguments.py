"""Arguments of compiled functions: what makes two calls alike, which tensors come in, and what changed between two calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, MethodType, ModuleType
from typing import Any

import torch

from dtorch.face import TorchTensor
from dtorch.ops._op import _ATOMS as ATOMS
from dtorch.tensor import Tensor

_LIST, _DICT, _FACE, _END = (f"<{name}>" for name in ("list", "dict", "face", "end"))
_NUMBERS = (int, float, bool)
_PLAIN = (int, float, bool, str, type(None))
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


Holder = tuple[str, CellType | dict[str, Any]]
"""A name that a function uses and what holds its value: a cell of the closure, or a namespace."""


def names_of(fn: Any) -> tuple[Holder, ...]:
    """Names whose tensors and numbers a function may use without being given them: variables of its closure and its
    globals, of the functions among these too, and attributes of the object that it is a method of."""
    found: dict[tuple[int, str], Holder] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, functools.partial):
            look(value.func)
        elif inspect.ismethod(value):
            own = getattr(value.__self__, "__dict__", None)
            if type(own) is dict and not isinstance(value.__self__, torch.nn.Module):
                hold(own, _attributes(value))
            look(value.__func__)
        elif inspect.isfunction(value) and (value.__module__ or "").partition(".")[0] not in _LIBRARIES:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                found[id(cell), ""] = (name, cell)
                look(_held(name, cell))
            hold(value.__globals__, _names_in(value.__code__))

    def hold(space: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            value = space.get(name)
            if inspect.isfunction(value) or inspect.ismethod(value):
                look(value)
            elif name in space and not isinstance(value, (ModuleType, type, torch.nn.Module)) and not inspect.isbuiltin(value):
                found[id(space), name] = (name, space)

    look(fn)
    return tuple(found.values())


def _names_in(code: CodeType) -> Iterator[str]:
    """Globals and attributes that the code, and functions made inside it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names_in(constant)


def _attributes(method: MethodType) -> set[str]:
    """Attributes that a method and those which it calls on its object may look up."""
    found: set[str] = set()
    left: list[Any] = [method.__func__]
    while left:
        code = getattr(left.pop(), "__code__", None)
        new = set() if code is None else set(_names_in(code)) - found
        found |= new
        left += [part for name in new if inspect.isfunction(part := getattr(type(method.__self__), name, None))]
    return found


def _held(name: str, holder: CellType | dict[str, Any]) -> Any:
    try:
        return holder.get(name) if isinstance(holder, dict) else holder.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None


def key_of_names(names: tuple[Holder, ...], key: list[Any]) -> None:
    """Append what names stand for to ``key``: which tensor, by its slot, and which number or string."""
    for name, holder in names:
        value = _held(name, holder)
        t = type(value)
        if t is Tensor:
            key.append(value._slot)
        elif t is TorchTensor:
            key.append(value._native._slot)
        elif t in _PLAIN:
            key.append((t, value))
        else:
            key.append(None)


def facts_of_names(names: tuple[Holder, ...]) -> dict[str, str]:
    """As ``facts``, for names."""
    found = {}
    for name, holder in names:
        value = _held(name, holder)
        native = value._native if type(value) is TorchTensor else value
        if type(native) is Tensor:
            found[f"tensor {name}"] = f"slot {native._slot}"
        elif type(value) in _PLAIN:
            found[f"variable {name}"] = repr(value)[:80]
    return found
