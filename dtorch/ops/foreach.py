"""torch._foreach_*: an op on each tensor of a list. Each tensor has placements of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.tensor import TORCH, Tensor

_PREFIX = "_foreach_"
_SPECIAL: dict[str, Callable[..., Any]] = {
    "max": lambda x: x.max(),
    "mm": lambda x, other: torch.mm(x, other),
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, float(ord), dtype=dtype),
    "maximum": lambda x, other: x.clamp_min(other),
    "minimum": lambda x, other: x.clamp_max(other),
    "maximum_": lambda x, other: x.clamp_min_(other),
    "minimum_": lambda x, other: x.clamp_max_(other),
}
"""Those that are no method of a tensor, or take what the method does not."""


def _each(name: str, tensors: Any, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The results, one a tensor; lists among the arguments give one element to each."""
    lists = [a for a in (tensors, *given, *named.values()) if isinstance(a, (list, tuple))]
    num = len(lists[0])
    if any(len(other) != num for other in lists):
        raise RuntimeError(f"Tensor lists must have the same number of tensors, got {' and '.join(str(len(a)) for a in lists)}")

    def at(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    fn = _SPECIAL.get(name)
    made = []
    for i in range(num):
        first, rest, more = at(tensors, i), [at(a, i) for a in given], {k: at(v, i) for k, v in named.items()}
        if fn is not None:
            made.append(fn(first, *rest, **more))
        elif isinstance(first, (Tensor, torch.Tensor)):
            made.append(getattr(first, name)(*rest, **more))
        else:
            made.append(getattr(torch, name)(first, *rest, **more))
    return made


def _scaled(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """addcmul and addcdiv (tensor1, tensor2, value or scalars): the factors by name, as numbers."""
    factors = given[2] if len(given) > 2 else named.pop("value", named.pop("scalars", 1))
    if isinstance(factors, (Tensor, torch.Tensor)):
        factors = factors.tolist()
    return given[:2], {**named, "value": factors}


def _register(full: str) -> None:
    fn, name = getattr(torch, full), full.removeprefix(_PREFIX)
    in_place = name.endswith("_")

    def call(self: Any, *given: Any, **named: Any) -> Sequence[Any]:
        if name.startswith("addc"):
            given, named = _scaled(given, dict(named))
        made = _each(name, self, given, named)
        return self if in_place else tuple(made)

    call.__name__ = call.__qualname__ = full
    call.__doc__ = f"``torch.{full}``: {name} of each tensor."
    TORCH[fn] = call


for _name in dir(torch):
    _short = _name.removeprefix(_PREFIX)
    if _short != _name and (_short in _SPECIAL or hasattr(torch.Tensor, _short)):
        _register(_name)
