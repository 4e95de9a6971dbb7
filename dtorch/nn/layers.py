"""Forwards of torch's layers that go straight to the op table.

They do what torch's forward does, without looking every parameter up as an attribute and without torch's dispatch:
for layers that are called often and do little in the client.
"""

from __future__ import annotations

from sys import _getframe
from typing import Any

import torch

from dtorch.frames import users
from dtorch.nn.module import FORWARD
from dtorch.ops.table import OPS

_linear_op, _rms_norm_op, _layer_norm_op, _embedding_op = (
    OPS[f"torch.nn.functional.{name}"] for name in ("linear", "rms_norm", "layer_norm", "embedding")
)


def _member(self: Any, name: str) -> Any:
    """A parameter, or what stands in its place (a parametrization, a pruned weight)."""
    params = self._parameters
    return params[name] if name in params else getattr(self, name)


def _linear(self: Any, input: Any) -> Any:
    weight, bias = _member(self, "weight"), _member(self, "bias")
    return _linear_op.record((input, weight) if bias is None else (input, weight, bias), {}, users(_getframe(1)))


def _rms_norm(self: Any, x: Any) -> Any:
    return _rms_norm_op.record((x, self.normalized_shape, _member(self, "weight"), self.eps), {}, users(_getframe(1)))


def _layer_norm(self: Any, input: Any) -> Any:
    args = input, self.normalized_shape, _member(self, "weight"), _member(self, "bias"), self.eps
    return _layer_norm_op.record(args, {}, users(_getframe(1)))


def _embedding(self: Any, input: Any) -> Any:
    args = input, _member(self, "weight"), self.padding_idx, self.max_norm, self.norm_type
    return _embedding_op.record((*args, self.scale_grad_by_freq, self.sparse), {}, users(_getframe(1)))


FORWARD[torch.nn.Linear] = _linear
FORWARD[torch.nn.RMSNorm] = _rms_norm
FORWARD[torch.nn.LayerNorm] = _layer_norm
FORWARD[torch.nn.Embedding] = _embedding
