"""Forwards of torch's layers that go straight to the op table.

They do what torch's forward does, without looking every parameter up as an attribute and without torch's dispatch:
for layers that are called often and do little in the client.
"""

from __future__ import annotations

from sys import _getframe
from typing import Any

import torch

from dtorch.frames import users
from dtorch.nn.module import FORWARD, STRAIGHT
from dtorch.ops._ways import put
from dtorch.ops.table import OPS
from dtorch.runtime.signature import Signature
from dtorch.tensor import Tensor

_linear_op, _rms_norm_op, _layer_norm_op, _embedding_op = (
    OPS[f"torch.nn.functional.{name}"] for name in ("linear", "rms_norm", "layer_norm", "embedding")
)


_norms: dict[Any, Signature] = _rms_norm_op.new_cache()
_layer_norms: dict[Any, Signature] = _layer_norm_op.new_cache()


def _member(self: Any, name: str) -> Any:
    """A parameter, or what stands in its place (a parametrization, a pruned weight)."""
    params = self._parameters
    return params[name] if name in params else getattr(self, name)


def _linear(self: Any, input: Any) -> Any:
    weight, bias = _member(self, "weight"), _member(self, "bias")
    return _linear_op.record((input, weight) if bias is None else (input, weight, bias), {}, users(_getframe(1)))


def _rms_norm(self: Any, x: Any) -> Any:
    weight, frame = _member(self, "weight"), users(_getframe(1))
    args = x, self.normalized_shape, weight, self.eps
    if type(x) is Tensor is type(weight) and frame is not None:
        key = x._spec, weight._spec, self.normalized_shape, self.eps
        sig = _norms.get(key)
        if sig is not None:
            return put(_rms_norm_op, sig, (x._slot, weight._slot), args, frame)
        return _rms_norm_op.slowly(args, {}, frame, _norms, key)
    return _rms_norm_op.record(args, {}, frame)


def _layer_norm(self: Any, input: Any) -> Any:
    weight, bias, frame = _member(self, "weight"), _member(self, "bias"), users(_getframe(1))
    args = input, self.normalized_shape, weight, bias, self.eps
    if type(input) is Tensor is type(weight) is type(bias) and frame is not None:
        key = input._spec, weight._spec, bias._spec, self.normalized_shape, self.eps
        sig = _layer_norms.get(key)
        if sig is not None:
            return put(_layer_norm_op, sig, (input._slot, weight._slot, bias._slot), args, frame)
        return _layer_norm_op.slowly(args, {}, frame, _layer_norms, key)
    return _layer_norm_op.record(args, {}, frame)


def _embedding(self: Any, input: Any) -> Any:
    args = input, _member(self, "weight"), self.padding_idx, self.max_norm, self.norm_type
    return _embedding_op.record((*args, self.scale_grad_by_freq, self.sparse), {}, users(_getframe(1)))


FORWARD[torch.nn.Linear] = _linear
FORWARD[torch.nn.RMSNorm] = _rms_norm
FORWARD[torch.nn.LayerNorm] = _layer_norm
FORWARD[torch.nn.Embedding] = _embedding

STRAIGHT[_linear] = ("weight", "bias")
STRAIGHT[_rms_norm] = ("normalized_shape", "weight", "eps")
STRAIGHT[_layer_norm] = ("normalized_shape", "weight", "bias", "eps")
STRAIGHT[_embedding] = ("weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
