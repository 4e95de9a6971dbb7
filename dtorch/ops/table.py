"""The op table: every op, by name and by every entrance that reaches it.

``row`` adds ops; family files call it. One name stands for all forms torch has of it: ``torch.add``, ``Tensor.add``,
``Tensor.add_``, ``torch.nn.functional.relu``, ``torch.special.erf``; each form that exists is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dtorch.ops._call import FLAT, Call, Rule, flat_tensors
from dtorch.ops._choose import Verify
from dtorch.ops._op import Op
from dtorch.ops._out import taking_out
from dtorch.tensor import TORCH

OPS: dict[str, Op] = {}
"""Name -> op, for everything a worker may be asked to run."""

METHODS: dict[str, Callable[..., Any]] = {}
"""Name of a method of dtorch.Tensor -> what records it."""

PUBLIC: dict[str, Callable[..., Any]] = {}
"""Name at the top of dtorch -> what records it."""

FUNCTIONAL: dict[str, Callable[..., Any]] = {}
"""Name in dtorch.nn.functional -> what records it."""

_PLACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
_extra: dict[str, Callable[..., Any]] = {}


def row(
    names: str | Iterable[str],
    rule: Rule,
    *,
    numbers: frozenset[int | str] | bool = False,
    verify: Verify | None = None,
    random: bool = False,
    is_view: bool = False,
    in_place: bool = True,
    writes: int | None = None,
    mutates: Callable[[Call], tuple[int, ...]] | None = None,
    places: str = "torch torch.Tensor torch.nn.functional torch.special torch.linalg torch.fft",
) -> None:
    """Add ops.

    Args:
        names: op names, separated by spaces.
        rule: their placement rule.
        numbers: arguments whose numbers vary from call to call; True for all.
        in_place: also add ``name_`` where torch has it; it writes its first tensor.
        writes: the tensor that the op itself writes in place.
        mutates: of a call, inputs that it writes beside its results; needed where torch does not count such a write.
        places: where to look for the name.
    """
    for name in names.split() if isinstance(names, str) else names:
        found = False
        for place in places.split():
            found |= _add(place, name, rule, numbers, verify, random, is_view, writes, mutates)
        if in_place:
            for place in ("torch", "torch.Tensor", "torch.nn.functional"):
                _add(place, f"{name}_", rule, numbers, verify, random, is_view, 0)
        if not found and not in_place:
            raise LookupError(f"torch has no {name!r} in {places}")


def _add(
    place: str,
    name: str,
    rule: Rule,
    numbers: frozenset[int | str] | bool,
    verify: Verify | None,
    random: bool,
    is_view: bool,
    writes: int | None,
    mutates: Callable[[Call], tuple[int, ...]] | None = None,
) -> bool:
    fn = getattr(_PLACES[place], name, None)
    if fn is None or not callable(fn):
        return False
    full = f"{place}.{name}"
    op = TORCH.get(fn)
    if op is None:
        op = Op(
            full, fn, rule, numbers=numbers, verify=verify, writes=writes, random=random, is_view=is_view, mutates=mutates
        )
        OPS[full] = op
        TORCH[fn] = op
    if place == "torch":
        PUBLIC.setdefault(name, op)
        TORCH.setdefault(getattr(torch._C._VariableFunctions, name, fn), op)  # what torch's Python calls when given a list
    elif place == "torch.Tensor":
        METHODS[name] = op
        PUBLIC.setdefault(name, op)
    elif place == "torch.nn.functional":
        FUNCTIONAL[name] = op
    return True


def composite(
    torch_function: Callable[..., Any], *, method: str = "", public: str = "", functional: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: an op made of other ops. It runs in the client, on dtorch tensors, with torch's signature."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        TORCH[torch_function] = writing = taking_out(fn, torch_function)
        if method:
            METHODS[method] = fn
        if public:
            PUBLIC[public] = writing
        if functional:
            FUNCTIONAL[functional] = writing
        return fn

    return register


def allow(name: str, fn: Callable[..., Any]) -> None:
    """Let workers run ``fn`` under ``name`` (factories; ops that users register)."""
    _extra[name] = fn


def resolve(name: str) -> Callable[..., Any]:
    """The function of an op, for workers. Raises KeyError for names that are not in the table."""
    op = OPS.get(name)
    if op is not None:
        return op.fn
    if name.startswith("custom:"):
        from dtorch.ops import custom

        return custom.load(name)
    if name.startswith(FLAT):
        return flattened(resolve(name[len(FLAT) :]))
    found = _extra.get(name)
    return found if found is not None else unknown(name)


def flattened(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with the tensors of its nested result in a flat tuple."""

    def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(flat_tensors(fn(*args, **kwargs)))

    return call


def _no_such_op(name: str) -> Callable[..., Any]:
    raise KeyError(name)


unknown: Callable[[str], Callable[..., Any]] = _no_such_op
"""Finds the function of a name without a row; ``_fallback.py`` puts its own here."""


def clear_caches() -> None:
    """Forget every signature; called when a session ends or has too many."""
    from dtorch import creation
    from dtorch.ops import redistribute

    for op in OPS.values():
        op.forget()
    redistribute.clear_cache()
    creation.clear_cache()
    for clear in also_cleared:
        clear()


also_cleared: list[Callable[[], None]] = []
"""Caches of floors above that hold signatures."""


def cache_size() -> int:
    """Signatures that are cached."""
    return sum(len(op.cache) for op in OPS.values())
