"""Embeddings and losses whose classes are sharded, and means over a sharded batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.comm import Reduce
from dtorch.runtime.kernels import Site, Steps, kernel, num_numbers
from dtorch.runtime.kernels._lines import wide
from dtorch.runtime.layout import is_shard, shard_dim
from dtorch.runtime.template import bind


@kernel("embedding")
def embedding(site: Site) -> Callable[..., Any]:
    """Rows of this device's part of the vocabulary, zeros for the rest: a summand of the result.

    params: ids and weight, numbers of the inputs.
    """
    ids_at, weight_at = site.params["ids"], site.params["weight"]
    layout = site.definition.inputs[weight_at]
    (first, last), (left, right) = site.box(layout)
    size = layout.shape[0]
    checks = site.device.type == "cpu"

    def run(*values: torch.Tensor) -> torch.Tensor:
        ids, weight = values[ids_at], values[weight_at]
        if checks and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
            raise IndexError("index out of range in self")
        if first == last:
            return torch.zeros((*ids.shape, right - left), dtype=weight.dtype, device=weight.device)
        absent = (ids < first) | (ids >= last)
        rows = torch.nn.functional.embedding((ids - first).masked_fill_(absent, 0), weight)
        return rows.masked_fill_(absent.unsqueeze(-1), 0)

    return run


@kernel("loss_mean")
def loss_mean(site: Site) -> Callable[..., Any]:
    """A summand of a loss' mean: its local sum over the global count. params: reduction_at, count.

    As in torch, the losses of half precision are summed in single precision, each is computed in its own.
    """
    definition = site.definition
    at, count = site.params["reduction_at"], site.params["count"]
    dtype = site.dtype(definition.outputs[0])
    carried = wide(dtype)
    reduction = "sum" if carried == dtype else "none"
    args, kwargs = list(definition.args), dict(definition.kwargs)
    if len(args) > at:
        args[at] = reduction
    else:
        kwargs["reduction"] = reduction
    call = bind(site.fn, args, kwargs, site.filler(), len(definition.inputs), num_numbers(definition))

    def run(*values: Any) -> torch.Tensor:
        total: torch.Tensor = call(*values)
        total = total if reduction == "sum" else total.sum(dtype=carried)
        return (total / count if count else total * math.nan).to(dtype)

    return run


@kernel("cross_entropy", communicates=True)
def cross_entropy(site: Site) -> Callable[..., Steps]:
    """cross_entropy, or nll_loss where the input holds log-probabilities already.

    params: target and weight (numbers of inputs, weight may be None), class_dim, is_log, is_index (targets are class
    indices, not probabilities), reduction, smoothing, ignore_index.
    """
    params, layout = site.params, site.definition.inputs[0]
    dim, reduction = params["class_dim"], params["reduction"]
    smoothing, ignored_at = float(params["smoothing"]), params["ignore_index"]
    num = layout.shape[dim]
    class_axes = tuple(a for a in site.axes if is_shard(layout.codes[a]) and shard_dim(layout.codes[a]) == dim)
    batch_axes = tuple(a for a in site.axes if a not in class_axes)
    first, last = site.box(layout)[dim]
    held = list(site.local_shape(layout))
    kept = (*held[:dim], 1, *held[dim + 1 :])
    spots = (*held[:dim], *held[dim + 1 :])
    dtype = site.dtype(site.definition.outputs[0])
    carried = wide(dtype)
    along = [-1 if d == dim else 1 for d in range(len(held))]
    checks = site.device.type == "cpu"

    def log_probabilities(x: torch.Tensor) -> Steps:
        if params["is_log"]:
            return x
        top = x.amax(dim, keepdim=True) if held[dim] else x.new_full(kept, -math.inf)
        if class_axes:
            top = yield Reduce(top.contiguous(), class_axes, "max", kept, carried)
        shifted = x - top
        total = shifted.exp().sum(dim, keepdim=True)
        if class_axes:
            total = yield Reduce(total.contiguous(), class_axes, "sum", kept, carried)
        return shifted - total.log()

    def of_index(logs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> Any:
        """(local part of the losses, local part of the targets' weights)."""
        ignored = target == ignored_at
        local = target - first
        absent = ignored | (local < 0) | (local >= last - first)
        local = local.masked_fill(absent, 0)
        if held[dim]:
            picked = logs.gather(dim, local.unsqueeze(dim)).squeeze(dim).masked_fill(absent, 0)
        else:
            picked = torch.zeros(spots, dtype=carried, device=site.device)
        if weight is None:
            weights = ignored.logical_not().to(carried)
        elif held[dim]:
            weights = weight[local].masked_fill(absent, 0)
        else:
            weights = torch.zeros(spots, dtype=carried, device=site.device)
        losses = -picked if weight is None else -picked * weights
        if smoothing:
            each = logs if weight is None else logs * weight.reshape(along)
            spread = each.sum(dim).masked_fill(ignored, 0)
            losses = losses * (1 - smoothing) - spread * (smoothing / num)
        return losses, weights

    def of_probabilities(logs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        target = target.to(carried)
        if smoothing:
            target = target * (1 - smoothing) + smoothing / num
        each = logs * target
        return -(each if weight is None else each * weight.reshape(along)).sum(dim)

    def run(*values: torch.Tensor) -> Steps:
        target = values[params["target"]]
        weight = None if params["weight"] is None else values[params["weight"]].to(carried)
        logs = yield from log_probabilities(values[0].to(carried))
        if params["is_index"]:
            losses, weights = of_index(logs, target, weight)
        else:
            losses, weights = of_probabilities(logs, target, weight), None
        if class_axes:
            losses = yield Reduce(losses.contiguous(), class_axes, "sum", spots, carried)
            if weights is not None and weight is not None:
                weights = yield Reduce(weights.contiguous(), class_axes, "sum", spots, carried)
        if reduction != "none":
            losses = losses.sum()
        if reduction == "mean":
            both = torch.stack((losses, losses if weights is None else weights.sum()))
            if batch_axes:
                both = yield Reduce(both, batch_axes, "sum", (2,), carried)
            divisor: Any = both[1] if weights is not None else math.prod(layout.shape) // max(num, 1)
            losses = both[0] / divisor if weights is not None or divisor else both[0] * math.nan
        if checks and params["is_index"]:
            outside = ((target < 0) | (target >= num)) & (target != ignored_at)
            if bool(outside.any()):  # only now: the other devices wait for what was sent above
                raise IndexError(f"Target {int(target[outside].flatten()[0])} is out of bounds.")
        return losses.to(dtype)

    return run
