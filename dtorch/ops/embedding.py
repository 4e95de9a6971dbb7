"""Embeddings and losses."""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.ops._call import Call, R, Rule, Sig, TensorArg, sharded
from dtorch.ops._rules import P_AVG, P, pointwise
from dtorch.ops.norm import index_of
from dtorch.ops.table import OPS, composite, row
from dtorch.policy import auto_redistribute
from dtorch.runtime.layout import is_shard


def _embedding(call: Call) -> list[Sig]:
    """embedding(input, weight, padding_idx, max_norm, norm_type, ...). A sharded vocabulary leaves a pending sum.

    ``max_norm`` writes into the weight, which then must be whole.
    """
    if call.arg(3, "max_norm", None) is not None or call.num_inputs != 2:
        return []
    weight, ids = index_of(call, 1, "weight"), index_of(call, 0, "input")
    if weight is None or ids is None:
        return []
    ndim = call.tensors[ids].ndim

    def ins(of_ids: int, of_weight: int) -> tuple[int, ...]:
        return (of_ids, of_weight) if ids == 0 else (of_weight, of_ids)

    sigs = [sharded(call, ins(d, R), d) for d in range(ndim)]
    sigs.append(sharded(call, ins(R, 1), ndim))
    sigs.append(sharded(call, ins(R, 0), P, kernel="embedding", params={"ids": ids, "weight": weight}))
    return sigs + [sharded(call, ins(R, code), code) for code in (P, P_AVG)]


def _one_hot(call: Call) -> list[Sig]:
    return [sharded(call, (d,), d) for d in range(call.tensors[0].ndim)]


def _is_legacy(call: Call, size_average_at: int, reduce_at: int) -> bool:
    """Whether the arguments that ``reduction`` replaced are used."""
    old = (call.arg(size_average_at, "size_average", None), call.arg(reduce_at, "reduce", None))
    return old != (None, None)


def _elementwise(size_average_at: int, reduce_at: int, reduction_at: int) -> Rule:
    """A loss an element, then summed, averaged or left as it is."""

    def rule(call: Call) -> list[Sig]:
        if _is_legacy(call, size_average_at, reduce_at):
            return []
        reduction = call.arg(reduction_at, "reduction", "mean")
        if reduction == "none":
            return pointwise()(call)
        shape = _broadcast(call)
        if reduction == "sum":
            return [Sig(ins, (P,)) for ins in _cuts(call, shape)]
        count = shape[0] if reduction == "batchmean" else math.prod(shape)
        if reduction not in ("mean", "batchmean") or (reduction == "batchmean" and not shape):
            return []
        params = {"reduction_at": reduction_at, "count": count}
        return [Sig(ins, (P,), "loss_mean", params) for ins in _cuts(call, shape)]

    return rule


def _broadcast(call: Call) -> tuple[int, ...]:
    ndim = max(t.ndim for t in call.tensors)
    aligned = [(1,) * (ndim - t.ndim) + t.shape for t in call.tensors]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*aligned, strict=True))


def _cuts(call: Call, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Codes of the inputs when the broadcast result is cut along each of its dims."""
    found = []
    for dim in range(len(shape)):
        codes = []
        for tensor in call.tensors:
            own = dim - (len(shape) - tensor.ndim)
            codes.append(own if own >= 0 and (tensor.shape[own] != 1 or shape[dim] == 1) else R)
        if any(is_shard(c) for c in codes):
            found.append(tuple(codes))
    return found


def _mse(call: Call) -> list[Sig]:
    """mse_loss, l1_loss, smooth_l1_loss, huber_loss with a weight divide by the weights."""
    if isinstance(call.kwargs.get("weight"), TensorArg) or call.num_inputs > 2:
        return []
    return _elementwise(2, 3, 4)(call)


def _weighted(call: Call) -> list[Sig]:
    return _elementwise(3, 4, 5)(call)


def _huber(call: Call) -> list[Sig]:
    """huber_loss(input, target, reduction, delta, weight)."""
    return [] if call.num_inputs > 2 else _elementwise(99, 99, 2)(call)


def _margin_cosine(call: Call) -> list[Sig]:
    """cosine_embedding_loss(input1, input2, target): the last dim is compared, the first is the batch."""
    reduction = call.arg(6, "reduction", "mean")
    if _is_legacy(call, 4, 5) or call.num_inputs != 3 or call.tensors[0].ndim != 2 or call.tensors[1].ndim != 2:
        return []
    if reduction == "none":
        return [sharded(call, (0, 0, 0), 0)]
    if reduction == "sum":
        return [sharded(call, (0, 0, 0), P)]
    params = {"reduction_at": 6, "count": call.tensors[0].shape[0]}
    return [sharded(call, (0, 0, 0), P, kernel="loss_mean", params=params)]


def _classes(is_log: bool) -> Rule:
    """cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)."""

    def rule(call: Call) -> list[Sig]:
        x = call.tensors[0]
        target, weight = index_of(call, 1, "target"), index_of(call, 2, "weight")
        if not x.ndim or target != 1 or _is_legacy(call, 3, 5) or (is_log and "2d" in call.name):
            return []
        dim = 0 if x.ndim == 1 else 1
        is_index = is_log or not call.tensors[1].dtype.is_floating_point
        reduction = call.arg(6, "reduction", "mean")
        params = {
            "target": target, "weight": weight, "class_dim": dim, "is_log": is_log, "is_index": is_index,
            "reduction": reduction, "smoothing": 0.0 if is_log else call.arg(7, "label_smoothing", 0.0),
            "ignore_index": call.arg(4, "ignore_index", -100),
        }  # fmt: skip
        num = call.num_inputs
        sigs = []
        for d in range(x.ndim):
            if d == dim:
                ins: list[Any] = [d, R if is_index else d, 0][:num]
                sigs.append(sharded(call, ins, R, kernel="cross_entropy", params=params))
                continue
            own = d if not is_index or d < dim else d - 1
            ins = [d, own, R][:num]
            if reduction == "mean":
                sigs.append(sharded(call, ins, R, kernel="cross_entropy", params=params))
            else:
                sigs.append(sharded(call, ins, P if reduction == "sum" else (d if d < dim else d - 1)))
        return sigs

    return rule


row("embedding", _embedding, places="torch.nn.functional")
row("one_hot", _one_hot, places="torch.nn.functional")
row("mse_loss l1_loss smooth_l1_loss", _mse, places="torch.nn.functional")
row("huber_loss", _huber, places="torch.nn.functional")
row("binary_cross_entropy binary_cross_entropy_with_logits", _weighted, places="torch.nn.functional")
row("kl_div soft_margin_loss", _elementwise(2, 3, 4), places="torch.nn.functional")
row("hinge_embedding_loss", _elementwise(3, 4, 5), places="torch.nn.functional")
row("margin_ranking_loss", _elementwise(4, 5, 6), places="torch.nn.functional")
row("poisson_nll_loss", _elementwise(4, 6, 7), places="torch.nn.functional")
row("cosine_embedding_loss", _margin_cosine, places="torch.nn.functional")
row("cross_entropy", _classes(is_log=False), places="torch.nn.functional")
row("nll_loss", _classes(is_log=True), places="torch.nn.functional")


@composite(torch.nn.functional.one_hot, functional="one_hot")
def one_hot(tensor: Any, num_classes: int = -1) -> Any:
    """As torch's. Without ``num_classes`` it waits for the largest value, which decides the shape."""
    if num_classes == -1 and tensor.numel():
        with auto_redistribute():
            num_classes = int(tensor.max().item()) + 1
    return OPS["torch.nn.functional.one_hot"].record((tensor, num_classes), {})
