"""``out=``: the result is computed, then written where it was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from dtorch.ops._alias import swap
from dtorch.ops._meta import SMALL_ELEMENTS, outcome, stand_ins
from dtorch.tensor import Tensor

if TYPE_CHECKING:
    from dtorch.ops._op import Op


def write_out(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record ``op`` with ``out=`` among ``kwargs``; returns what was given as ``out``.

    Raises:
        TypeError: ``out`` is no dtorch tensor.
        RuntimeError, or what torch raises: it has a dtype that the result cannot be written as, or overlaps an input.
    """
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    if out is None:
        return op.record(args, kwargs)
    targets = check_out(op, out)
    _verify(op, args, {**kwargs, "out": out}, targets)
    result = op.record(args, kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    if op.random and (wrong := next((t for t, v in zip(targets, results, strict=True) if v.dtype != t.dtype), None)):
        raise RuntimeError(f"{op.short_name} expects an out tensor of {results[0].dtype}, got: {wrong.dtype}")
    return written(out, result)


def check_out(op: Op, out: Any) -> Any:
    """The tensors that were given as ``out``; raises TypeError where one is not on a mesh."""
    targets = out if isinstance(out, (tuple, list)) else (out,)
    for target in targets:
        if not isinstance(target, Tensor):
            raise TypeError(f"{op.name}(): argument 'out' must be a dtorch.Tensor, not {type(target).__name__}")
    return targets


def written(out: Any, result: Any) -> Any:
    """``out``, a tensor or a sequence of them, after ``result`` was written into it. What has another shape is resized.

    Raises:
        RuntimeError: the result cannot be written as ``out``'s dtype; torch's words.
    """
    targets = out if isinstance(out, (tuple, list)) else (out,)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for target, value in zip(targets, results, strict=True):
        if value.dtype != target.dtype and not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
        if target.shape == value.shape:
            target.copy_(value)
            continue
        if target.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(target.shape)}, which "
                f"does not match the required output shape {list(value.shape)}. Tensors that shared its memory keep theirs.",
                stacklevel=5,
            )
        swap(target, value.to(target.dtype) if value.dtype != target.dtype else value)
    return out


def taking_out(fn: Callable[..., Any], torch_function: Any) -> Callable[..., Any]:
    """``fn``, made of ops, with ``out=`` where ``torch_function`` has it and ``fn`` has not."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(torch_function, '__name__', '')}")
    if "out" in signature(fn).parameters or not any(a.is_out for schema in schemas for a in schema.arguments):
        return fn

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if isinstance(out, Tensor) and any(out is a for a in (*args, *kwargs.values())):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
                "location. Please clone() the tensor before performing the operation."
            )
        result = fn(*args, **kwargs)
        return result if out is None else written(out, result)

    return call


def _verify(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> None:
    """Let torch look at a call of its function, once for all calls alike."""
    order: dict[int, int] = {}
    facts: list[Any] = []
    metas: dict[int, torch.Tensor] = {}

    def walk(value: Any, to: Callable[[Tensor], Any]) -> Any:
        if isinstance(value, Tensor):
            return to(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            facts.append(len(value))
            made = [walk(v, to) for v in value]
            return made if isinstance(value, list) else tuple(made)
        facts.append((type(value), repr(value)))
        return value

    def seen(tensor: Tensor) -> None:
        facts.append((order.setdefault(id(tensor), len(order)), tensor._spec))

    walk(args, seen)
    for name, value in kwargs.items():
        facts.append(name)
        walk(value, seen)
    key = ("out", *facts)
    if key in op.repairs or sum(t.numel() for t in targets) > SMALL_ELEMENTS:
        return

    def meta(tensor: Tensor) -> torch.Tensor:
        return metas.setdefault(id(tensor), tensor._spec.new_meta())

    tree_args, tree_kwargs = walk(args, meta), {k: walk(v, meta) for k, v in kwargs.items()}
    given = list(metas.values())
    with torch._C.DisableTorchFunction(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if op.random or op.stand_in is not None or sum(m.numel() for m in given) > SMALL_ELEMENTS:
            outcome(op.stand_in or op.fn, tree_args, tree_kwargs, given, op.random)
        else:
            _try(op.fn, tree_args, tree_kwargs, given)
    op.repairs[key] = True


def _try(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], metas: list[torch.Tensor]) -> None:
    """Run the function on zeros; what it raises is passed on when it is because of ``out``."""
    try:
        real = stand_ins(args, kwargs, metas)
        fn(*real[0], **real[1])
    except Exception:
        real = stand_ins(args, kwargs, metas)
        real[1].pop("out")
        try:
            fn(*real[0], **real[1])
        except Exception:  # wrong for zeros, perhaps not for other values: recording the call will tell
            return
        raise
