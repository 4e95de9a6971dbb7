"""Functions with arguments that no row can carry: functions, option objects, tensors that stand for numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from dtorch import policy
from dtorch.ops._alias import swap
from dtorch.ops._op import Op
from dtorch.ops._rules import replicate_only
from dtorch.ops.shapes import Sized
from dtorch.ops.table import OPS, composite, row
from dtorch.ops.view import front, record
from dtorch.placement import Replicate
from dtorch.tensor import TORCH, Tensor

F = torch.nn.functional


# ---- random ones without a rule: drawn once for the whole

row("svd_lowrank pca_lowrank", replicate_only, random=True, in_place=False, places="torch")
row("multi_head_attention_forward", replicate_only, random=True, in_place=False, places="torch.nn.functional")
row(
    "fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices",
    replicate_only,
    random=True,
    in_place=False,
    places="torch.nn.functional",
)


# ---- tensors that stand for numbers


@front("narrow")
def narrow(input: Tensor, dim: int, start: Any, length: int) -> Any:
    """``torch.narrow``. A start that is a tensor is waited for."""
    if isinstance(start, (Tensor, torch.Tensor)):
        if start.ndim or start.dtype.is_floating_point or start.dtype.is_complex or start.dtype == torch.bool:
            raise RuntimeError("start must be an 0-dim integral Tensor.")
        start = int(start.item())
    return record("torch.narrow", input, dim, start, length)


@front("tensor_split")
def tensor_split(input: Tensor, *given: Any, **named: Any) -> Any:
    """``torch.tensor_split``. Indices that are a tensor are waited for."""
    def plain(value: Any) -> Any:
        if not isinstance(value, (Tensor, torch.Tensor)):
            return value
        if value.ndim > 1 or value.dtype != torch.int64:
            raise RuntimeError(
                "tensor_split expected tensor_indices_or_sections to be a zero-dimensional or one-dimensional tensor "
                f"of dtype long, but got {value.ndim} dims of {value.dtype}"
            )
        found = value.tolist()
        return tuple(found) if isinstance(found, list) else found

    if "tensor_indices_or_sections" in named:
        where = named.pop("tensor_indices_or_sections")
        named["indices" if where.ndim else "sections"] = where
    return record("torch.tensor_split", input, *map(plain, given), **{k: plain(v) for k, v in named.items()})


# ---- another size for the same memory

row("resize_", replicate_only, writes=0, in_place=False, places="torch.Tensor")
row("resize_as_", replicate_only, writes=0, in_place=False, places="torch torch.Tensor")


def _resizing(name: str) -> None:
    op = OPS[name]

    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if policy.is_auto() and any(not p.is_replicate() for p in input.placements):
            whole = input.redistribute([Replicate()] * input.device_mesh.ndim)
            op.record((whole, *args), kwargs)
            swap(input, whole)
            return input
        op.record((input, *args), kwargs)
        return input

    call.__name__ = call.__qualname__ = op.short_name
    call.__doc__ = f"``{name}`` of a replicated tensor; under the policy a sharded one becomes replicated."
    front(op.short_name)(call)


_resizing("torch.Tensor.resize_")
_resizing("torch.resize_as_")


# ---- shapes that depend on values

_LSTSQ = Sized("lstsq", lambda *a, **k: tuple(torch.linalg.lstsq(*a, **k)), vars(torch.return_types)["linalg_lstsq"])


@composite(torch.linalg.lstsq)
def lstsq(input: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None) -> Any:
    """``torch.linalg.lstsq``. It waits: whether there are residuals depends on the rank."""
    named = {} if driver is None else {"driver": driver}
    return _LSTSQ(input, b, rcond, **named)


# ---- questions about dtypes


def _result_type(a: Any, b: Any) -> torch.dtype:
    """``torch.result_type``, from what is known of the tensors."""
    return torch.result_type(*(x._spec.meta if isinstance(x, Tensor) else x for x in (a, b)))


TORCH[torch.result_type] = _result_type


# ---- functions and options as arguments


@composite(F.triplet_margin_with_distance_loss, functional="triplet_margin_with_distance_loss")
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Any, Any], Any] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """``F.triplet_margin_with_distance_loss``: the distance function runs here, on dtorch tensors."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise RuntimeError(
            "The anchor, positive, and negative tensors are expected to have the same number of dimensions, but got: "
            f"anchor {anchor.ndim}D, positive {positive.ndim}D, and negative {negative.ndim}D inputs"
        )
    distance: Callable[[Any, Any], Any] = distance_function or torch.pairwise_distance
    near: Any = distance(anchor, positive)
    far: Any = distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    loss = torch.clamp_min(margin + near - far, 0)
    return loss.sum() if reduction == "sum" else loss.mean() if reduction == "mean" else loss


def _linear_cross_entropy(*args: Any, chunking: tuple[tuple[str, Any], ...], **kwargs: Any) -> Any:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    return F.linear_cross_entropy(*args, options=LinearCrossEntropyOptions(**dict(chunking)), **kwargs)


def _optional(name: str, plain: Callable[..., Any], with_options: Callable[..., Any]) -> None:
    """A function of F with an ``options`` object, whose fields travel instead."""
    whole = Op(f"torch.nn.functional.{name}", plain, replicate_only)
    chunked = Op(f"{name}_with_options", with_options, replicate_only)
    OPS[whole.name], OPS[chunked.name] = whole, chunked

    def call(*args: Any, options: Any = None, **kwargs: Any) -> Any:
        if options is None:
            return whole.record(args, kwargs)
        return chunked.record(args, {**kwargs, "chunking": tuple(asdict(options).items())})

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``F.{name}`` on replicated tensors."
    composite(plain, functional=name)(call)


if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    _optional("linear_cross_entropy", F.linear_cross_entropy, _linear_cross_entropy)
