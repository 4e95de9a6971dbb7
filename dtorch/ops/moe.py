"""A mixture of experts with stacked weights: experts may be split over mesh axes, tokens over the same or others."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.ops._call import Call, R, Sig, TensorArg, sharded
from dtorch.ops._op import Op
from dtorch.ops._rules import P
from dtorch.ops.table import FUNCTIONAL, OPS
from dtorch.runtime.kernels.experts import ACTIVATIONS, TENSORS, Form, mixture

_ROUTES = TENSORS[:3]


def mixture_of_experts(
    hidden: Any,
    indices: Any,
    scores: Any,
    up: Any,
    down: Any,
    gate: Any = None,
    *,
    up_bias: Any = None,
    down_bias: Any = None,
    gate_bias: Any = None,
    activation: str = "silu",
    fused: bool = False,
    transposed: bool = False,
) -> Any:
    """The experts' answers to each token, summed by the router's scores.

    Without capacity: no token is dropped, none is padded, and an expert may get none or all of them. E experts, K of them a
    token, D hidden features, I inner features; ``up`` holds I features, or 2 I when ``fused``.

    Placements on one mesh axis, beside everything replicated:

    * weights Shard(0), tokens Replicate: every device answers for its own experts; the result is Partial, and nothing moves;
    * weights Shard(0), tokens Shard: tokens travel to their experts and back, by all-to-all, with counts that only the
      devices know; the result is placed as the tokens are;
    * weights Replicate, tokens Shard: local;
    * inner features split (``up`` and ``gate`` Shard(1), ``down`` Shard(2), not ``fused``): the result is Partial.

    Experts need not divide the axis. Tokens may be split along any dim but the last, and indices and scores that are
    replicated are cut as the tokens are.

    Args:
        hidden: tokens, shape (..., D).
        indices: the experts of each token, int64, shape (..., K). Numbers outside [0, E) stand for no expert.
        scores: the weights of these experts in the sum, shape (..., K).
        up: shape (E, I, D), as K weights of ``nn.Linear``; down: (E, D, I).
        gate: shape (E, I, D): an expert is ``down(activation(gate(x)) * up(x))``; without, ``down(activation(up(x)))``.
        up_bias, gate_bias: shape (E, I); down_bias: (E, D).
        activation: one of "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh", "identity".
        fused: ``up`` has shape (E, 2 I, D), the gate in its first half, as transformers stores Mixtral and Qwen3-MoE.
        transposed: weights are (E, D, I) and (E, I, D), the transposes of these.

    Raises:
        ValueError: shapes do not fit together; both ``fused`` and ``gate``; an unknown activation.
        TypeError: indices are not int64; hidden states and weights have different dtypes.
        PlacementError: the placements are none of these.
    """
    values = (hidden, indices, scores, up, down, gate, up_bias, down_bias, gate_bias)
    given = {name: value for name, value in zip(TENSORS, values, strict=True) if value is not None}
    _check(given, activation, fused, transposed)
    return _OP.record((*values, activation, fused, transposed), {})


def _check(given: dict[str, Any], activation: str, fused: bool, transposed: bool) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: there are {', '.join(map(repr, ACTIVATIONS))}")
    if fused and "gate" in given:
        raise ValueError("fused=True: the gate is the first half of `up`, so `gate` must be None")
    if "gate_bias" in given and "gate" not in given:
        raise ValueError("a gate_bias without a gate")
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    for name in ("up", "down"):
        if len(shapes[name]) != 3:
            raise ValueError(f"{name} must be (experts, out, in), or (experts, in, out) if transposed, not {shapes[name]}")
    num, first, second = shapes["up"]
    outer, hidden = (second, first) if transposed else (first, second)
    if fused and outer % 2:
        raise ValueError(f"fused=True: {outer} features of `up` are not two halves")
    inner = outer // 2 if fused else outer
    chosen = shapes["indices"]
    wanted = {
        "hidden": (*chosen[:-1], hidden),
        "scores": chosen,
        "down": (num, inner, hidden) if transposed else (num, hidden, inner),
        "gate": shapes["up"],
        "up_bias": (num, outer),
        "gate_bias": (num, inner),
        "down_bias": (num, hidden),
    }
    for name, shape in wanted.items():
        if name in shapes and shapes[name] != shape:
            raise ValueError(
                f"{name} has shape {shapes[name]}, not {shape}: up is {shapes['up']}, indices are {chosen}, "
                f"fused={fused}, transposed={transposed}"
            )
    if given["indices"].dtype != torch.int64:
        raise TypeError(f"indices must be int64, not {given['indices'].dtype}")
    for name in given:
        if name not in ("indices", "scores") and given[name].dtype != given["hidden"].dtype:
            raise TypeError(f"hidden is {given['hidden'].dtype}, but {name} is {given[name].dtype}")


def _rule(call: Call) -> list[Sig]:
    activation, fused, transposed = call.args[len(TENSORS) :]
    given = {value.index: name for name, value in zip(TENSORS, call.args, strict=False) if isinstance(value, TensorArg)}
    names = [given[i] for i in range(call.num_inputs)]
    params = {"names": names, "activation": activation, "fused": fused, "transposed": transposed}

    def sig(routes: int, weights: dict[str, int] | int, out: int) -> Sig:
        codes = [routes if n in _ROUTES else weights if isinstance(weights, int) else weights.get(n, R) for n in names]
        return sharded(call, codes, out, kernel="experts", params=params)

    dims = range(call.tensors[0].ndim - 1)
    sigs = [sig(R, 0, P), *(sig(d, R, d) for d in dims), *(sig(d, 0, d) for d in dims)]
    if not fused and "down_bias" not in names:
        first, last = (2, 1) if transposed else (1, 2)
        sigs.append(sig(R, {"up": first, "gate": first, "down": last, "up_bias": 1, "gate_bias": 1}, P))
    return sigs


def _apply(*args: Any) -> torch.Tensor:
    """On plain tensors: the arguments of ``mixture_of_experts`` in their order."""
    given = {name: value for name, value in zip(TENSORS, args, strict=False) if value is not None}
    return mixture(*given.values(), names=tuple(given), form=Form(*args[len(TENSORS) :]))


_OP = OPS["moe.mixture_of_experts"] = Op(
    "moe.mixture_of_experts", _apply, _rule, stand_in=lambda hidden, *_: torch.empty_like(hidden)
)
FUNCTIONAL["mixture_of_experts"] = mixture_of_experts
