"""Normalisations: softmax and its kin along a dim, layer/rms norm over last dims, others over channels."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.ops._call import Call, R, Rule, Sig, TensorArg, sharded
from dtorch.ops._out import written
from dtorch.ops.table import composite, row


def _softmax(kind: str) -> Rule:
    def rule(call: Call) -> list[Sig]:
        ndim = call.tensors[0].ndim
        dim = call.arg(1, "dim", None)
        if not ndim or not isinstance(dim, int):
            return []
        dim %= ndim
        sigs = [sharded(call, (d,), d) for d in range(ndim) if d != dim]
        return [*sigs, sharded(call, (dim,), dim, kernel="softmax", params={"dim": dim, "kind": kind})]

    return rule


def index_of(call: Call, position: int, name: str) -> int | None:
    """Which tensor input an optional argument is; None when it is not given."""
    value = call.arg(position, name, None)
    return value.index if isinstance(value, TensorArg) else None


def _last_dims(kernel: str, eps_at: int, bias_at: int | None) -> Rule:
    """layer_norm, rms_norm: the last dims are normalised; weight and bias have these dims."""

    def rule(call: Call) -> list[Sig]:
        x = call.tensors[0]
        shape = call.arg(1, "normalized_shape")
        first = x.ndim - (1 if isinstance(shape, int) else len(shape))
        params: dict[str, Any] = {
            "dims": list(range(first, x.ndim)),
            "eps": call.arg(eps_at, "eps", 1e-5 if kernel == "layer_norm" else None),
            "weight": index_of(call, 2, "weight"),
            "bias": None if bias_at is None else index_of(call, bias_at, "bias"),
        }
        rest = call.num_inputs - 1
        sigs = [sharded(call, (d, *(R,) * rest), d) for d in range(first)]
        sigs += [
            sharded(call, (d, *(d - first,) * rest), d, kernel=kernel, params=params) for d in range(first, x.ndim)
        ]
        return sigs

    return rule


def _group_norm(call: Call) -> list[Sig]:
    """group_norm(input, num_groups, weight, bias, eps)."""
    x = call.tensors[0]
    params = {
        "groups": call.arg(1, "num_groups"), "over_batch": False, "eps": call.arg(4, "eps", 1e-5),
        "weight": index_of(call, 2, "weight"), "bias": index_of(call, 3, "bias"),
    }  # fmt: skip
    rest = call.num_inputs - 1
    sigs = [sharded(call, (0, *(R,) * rest), 0, kernel="filled")]
    for d in range(1, x.ndim):
        own = 0 if d == 1 else R
        sigs.append(sharded(call, (d, *(own,) * rest), d, kernel="channel_norm", params=params))
    return sigs


def _given_statistics(call: Call) -> list[Sig]:
    """Elements are for themselves; the other inputs follow the channels."""
    rest = call.num_inputs - 1
    own = ((d, 0 if d == 1 else R) for d in range(call.tensors[0].ndim))
    return [sharded(call, (d, *(code,) * rest), d, kernel="filled") for d, code in own]


def _instance_norm(call: Call) -> list[Sig]:
    """instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)."""
    x = call.tensors[0]
    running = [i for i in (index_of(call, 1, "running_mean"), index_of(call, 2, "running_var")) if i is not None]
    if x.ndim >= 3 and not call.arg(5, "use_input_stats", True):
        return _given_statistics(call)
    if x.ndim < 3:
        return []
    rest = call.num_inputs - 1
    by_channel = sharded(call, (1, *(0,) * rest), 1, kernel="filled")
    if running:  # as means over the batch, where they are
        return [by_channel] if all(call.tensors[i].codes[call.axis] != R for i in running) else []
    params = {
        "groups": x.shape[1], "over_batch": False, "eps": call.arg(7, "eps", 1e-5),
        "weight": index_of(call, 3, "weight"), "bias": index_of(call, 4, "bias"),
    }  # fmt: skip
    return [
        sharded(call, (0, *(R,) * rest), 0, kernel="filled"),
        by_channel,
        *(sharded(call, (d, *(R,) * rest), d, kernel="channel_norm", params=params) for d in range(2, x.ndim)),
    ]


def _batch_norm(call: Call) -> list[Sig]:
    """batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps).

    In training the statistics are those of the whole batch. The running ones are then written, so their placements
    must be the input's own on the channels: a replicated one is never cut.
    """
    is_functional = call.name.startswith("torch.nn.functional")
    x = call.tensors[0]
    if x.ndim < 2:
        return []
    rest = call.num_inputs - 1
    at = (1, 2, 3, 4) if is_functional else (3, 4, 1, 2)
    mean, var = index_of(call, at[0], "running_mean"), index_of(call, at[1], "running_var")
    training = bool(call.arg(5, "training", False))
    if not training:
        return _given_statistics(call)
    momentum = call.arg(6, "momentum", 0.1)
    if not isinstance(momentum, (int, float)):
        return []
    params = {
        "groups": x.shape[1], "over_batch": True, "eps": call.arg(7, "eps", 1e-5),
        "weight": index_of(call, at[2], "weight"), "bias": index_of(call, at[3], "bias"),
        "running_mean": mean, "running_var": var, "momentum": momentum,
    }  # fmt: skip
    written = [i for i in (mean, var) if i is not None]
    sigs = [
        sharded(call, (d, *(R,) * rest), d, kernel="channel_norm", params=params) for d in range(x.ndim) if d != 1
    ]
    if all(call.tensors[i].codes[call.axis] != R for i in written):
        sigs.append(sharded(call, (1, *(0,) * rest), 1, kernel="channel_norm", params=params))
    return sigs


row("softmax", _softmax("softmax"))
row("log_softmax", _softmax("log_softmax"))
row("softmin", _softmax("softmin"), places="torch.nn.functional")
row("layer_norm", _last_dims("layer_norm", 4, 3))
row("rms_norm", _last_dims("rms_norm", 3, None))
row("group_norm", _group_norm)
def _running(call: Call) -> tuple[int, ...]:
    """The running statistics, when the call updates them; torch writes them without counting it as a change."""
    is_functional = call.name.startswith("torch.nn.functional")
    at, flag = ((1, 2) if is_functional else (3, 4)), call.arg(5, "training", False)
    if "instance_norm" in call.name:
        flag = call.arg(5, "use_input_stats", True)
    found = (index_of(call, at[0], "running_mean"), index_of(call, at[1], "running_var"))
    return tuple(i for i in found if i is not None) if flag else ()


row("instance_norm", _instance_norm, mutates=_running, places="torch.nn.functional")
row("batch_norm", _batch_norm, mutates=_running)


@composite(torch.nn.functional.normalize, functional="normalize")
def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """``input`` over its norm along ``dim``, at least ``eps``."""
    result = input / input.norm(p, dim, keepdim=True).clamp_min(eps)
    return result if out is None else written(out, result)
