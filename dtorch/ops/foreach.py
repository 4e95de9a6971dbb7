"""``torch._foreach_*``: functions of lists of tensors, which optimizers and clipping call. Each is one op a tensor.

What is a list runs along with the first one, what is not goes to every call; so the results, bits included, are those of the
function that is named, called tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.tensor import TORCH, Tensor

_PREFIX = "_foreach_"
_NAMED = (
    "self", "tensors1", "tensor1", "tensor2", "other", "mat2", "src", "exponent", "scalar", "scalars", "weights", "weight",
    "value", "ord",
)
"""Names of arguments, in the order in which functions take them."""


def _powsum(x: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return (x if dtype is None else x.to(dtype)).abs().pow(float(ord)).sum()


def _norm(x: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return torch.linalg.vector_norm(x, float(ord), dtype=dtype)


def _extreme(of_two: Callable[..., Any], clamp: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, other: Any) -> Any:
        return clamp(x, other) if isinstance(other, (int, float)) else of_two(x, other)

    return call


def _method(name: str) -> Callable[..., Any]:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    return call


def _scaled(name: str) -> Callable[..., Any]:
    def call(x: Any, first: Any, second: Any, value: Any = 1) -> Any:
        return getattr(x, name)(first, second, value=value)

    return call


def _element(name: str, in_place: bool) -> Callable[..., Any] | None:
    """What ``_foreach_name`` does to one tensor; None when torch has no function that does."""
    special: dict[str, Callable[..., Any]] = {"norm": _norm, "powsum": _powsum, "max": torch.max, "copy": _method("copy_")}
    if name in special:
        return special[name]
    if name in ("addcmul", "addcdiv"):
        return _scaled(name + "_" * in_place)
    if name in ("maximum", "minimum", "clamp_min", "clamp_max"):
        clamp = "clamp_min" if name in ("maximum", "clamp_min") else "clamp_max"
        if in_place:
            return _method(clamp + "_")
        return _extreme(getattr(torch, "maximum" if clamp == "clamp_min" else "minimum"), getattr(torch, clamp))
    if not in_place and hasattr(torch, name):
        return getattr(torch, name)  # type: ignore[no-any-return]
    return _method(name + "_" * in_place) if hasattr(torch.Tensor, name + "_" * in_place) else None


def _check(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let torch look at a call with tensors that have no data, once for all calls alike; raises what torch raises."""
    facts: list[Any] = [fn]

    def walk(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            facts.append(len(value))
            return [walk(v) for v in value]
        if isinstance(value, (Tensor, torch.Tensor)):
            native = getattr(value, "native", value)
            meta = native._spec.meta if isinstance(native, Tensor) else value
            facts.append((tuple(meta.shape), meta.dtype))
            return meta
        facts.append(type(value))
        return value

    tree = [walk(args), *(walk([name, value])[1] for name, value in kwargs.items())]
    key = tuple(facts)
    if key in _checked:
        return

    def data(value: Any, listed: bool = False) -> Any:
        if isinstance(value, list):
            return [data(v, True) for v in value]
        if isinstance(value, torch.Tensor):
            return torch.empty_like(value, device="meta") if listed else torch.zeros(value.shape, dtype=value.dtype)
        return value

    given, *named = tree
    with torch._C.DisableTorchFunction(), torch.no_grad():
        fn(*[data(v) for v in given], **{name: data(v) for name, v in zip(kwargs, named, strict=True)})
    _checked.add(key)


_checked: set[Any] = set()


def _foreach(name: str) -> Callable[..., Any] | None:
    in_place = name.endswith("_")
    each = _element(name[len(_PREFIX) :].rstrip("_"), in_place)
    fn = getattr(torch, name)
    if each is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        _check(fn, args, kwargs)
        kwargs.pop("non_blocking", None)
        positional, named = list(args), dict(kwargs)
        for key in _NAMED:
            if key in named:
                positional.append(named.pop(key))
        if "addc" in name and isinstance(positional[-1], (Tensor, torch.Tensor)):
            positional[-1] = positional[-1].tolist()
        num = next(len(p) for p in positional if isinstance(p, (list, tuple)))
        rows = [[p[i] if isinstance(p, (list, tuple)) else p for p in positional] for i in range(num)]
        made = tuple(each(*row, **named) for row in rows)
        return positional[0] if in_place else made

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``torch.{name}``, one op a tensor."
    return call


for _name in dir(torch):
    if _name.startswith(_PREFIX) and (_made := _foreach(_name)) is not None:
        TORCH[getattr(torch, _name)] = _made
