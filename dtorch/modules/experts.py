"""Experts of transformers' models, whose weights are stacked, on a mesh that splits them.

transformers lets a function stand in for the forward of every such module (``ExpertsInterface``). Ours records the one op
that exchanges tokens (``ops/moe.py``); its own implementations, made for one device, would gather the weights of all
experts first.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from dtorch import policy
from dtorch.face import TorchTensor, faced
from dtorch.ops.moe import mixture_of_experts

_NAME = "dtorch"
_HOME = "transformers.integrations.moe"
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "Tanh": "tanh",
    "LinearActivation": "identity",
}
"""Class of an activation -> its name in ``mixture_of_experts``."""


def exchange_tokens(module: torch.nn.Module) -> bool:
    """Let a module of stacked experts run as one op that exchanges tokens, if it can. Returns whether."""
    home = sys.modules.get(_HOME)
    config = getattr(module, "config", None)
    if home is None or not hasattr(config, "_experts_implementation") or not _is_plain(module, home):
        return False
    home.ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    own: Any = copy.copy(config)  # others with this config stay as they are
    own._experts_implementation = _NAME
    module.config = own
    return True


def _is_plain(module: Any, home: Any) -> bool:
    """Whether a module computes what the op does: down(activation(gate) * up), or down(activation(up))."""
    has_gate = getattr(module, "has_gate", None)
    return (
        has_gate is not None
        and isinstance(getattr(module, "gate_up_proj" if has_gate else "up_proj", None), torch.Tensor)
        and isinstance(getattr(module, "down_proj", None), torch.Tensor)
        and type(getattr(module, "act_fn", None)).__name__ in _ACTIVATIONS
        and (not has_gate or (type(module)._apply_gate is home._default_apply_gate and module.is_concatenated))
        and not module.has_post_expert_norm
    )


def _forward(self: Any, hidden: TorchTensor, indices: TorchTensor, scores: TorchTensor) -> TorchTensor:
    """``forward(hidden_states (N, D), top_k_index (N, K), top_k_weights (N, K))`` of transformers' experts."""
    up = "gate_up_proj" if self.has_gate else "up_proj"
    bias = {}
    if self.has_bias:
        bias = {"up_bias": getattr(self, f"{up}_bias").native, "down_bias": self.down_proj_bias.native}
    with policy.auto_redistribute():
        made = mixture_of_experts(
            hidden.native,
            indices.native,
            scores.native,
            getattr(self, up).native,
            self.down_proj.native,
            activation=_ACTIVATIONS[type(self.act_fn).__name__],
            fused=self.has_gate,
            transposed=self.is_transposed,
            **bias,
        )
    return faced(made)
