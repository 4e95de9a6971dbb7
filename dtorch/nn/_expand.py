"""Torch's functions that are written in Python, run on dtorch tensors.

Such a function begins with a guard that hands the whole call to ``__torch_function__``. Where the op table has no row
for the function, its own body will do: the torch calls in there reach rows of the table. ``expand`` makes a twin of
the function whose guard never strikes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from dtorch.tensor import TORCH

_GUARDS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_globals: dict[int, dict[str, Any]] = {}


def _never(*args: Any) -> bool:
    return False


def has_guard(fn: Any) -> bool:
    """Whether ``fn`` is a Python function that asks for ``__torch_function__``."""
    return isinstance(fn, FunctionType) and any(name in fn.__code__.co_names for name in _GUARDS)


def expand(fn: FunctionType) -> Callable[..., Any]:
    """A twin of ``fn`` that runs its body also on tensors with ``__torch_function__``."""
    home = fn.__globals__
    names = _globals.get(id(home))
    if names is None:
        names = _globals[id(home)] = {**home, **dict.fromkeys(_GUARDS, _never)}
    twin = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__ = fn.__kwdefaults__
    twin.__doc__ = fn.__doc__
    return twin


def register(module: ModuleType) -> None:
    """Let every guarded function of ``module`` that has no row run by its body."""
    for fn in list(vars(module).values()):
        if has_guard(fn) and fn not in TORCH:
            TORCH[fn] = expand(fn)
