"""Forwards of torch's layers that go straight to the op table.

They do what torch's forward does, without looking every parameter up as an attribute and without torch's dispatch:
for layers that are called often and do little in the client.
"""

from __future__ import annotations

from sys import _getframe
from typing import Any

import torch

from dtorch.nn.module import FORWARD
from dtorch.ops.table import OPS

_linear_op, _rms_norm_op, _layer_norm_op = (OPS[f"torch.nn.functional.{name}"] for name in ("linear", "rms_norm", "layer_norm"))


def _linear(self: Any, input: Any) -> Any:
    params = self._parameters
    return _linear_op.record((input, params["weight"], params["bias"]), {}, _getframe(1))


def _rms_norm(self: Any, x: Any) -> Any:
    return _rms_norm_op.record((x, self.normalized_shape, self._parameters["weight"], self.eps), {}, _getframe(1))


def _layer_norm(self: Any, input: Any) -> Any:
    params = self._parameters
    args = input, self.normalized_shape, params["weight"], params["bias"], self.eps
    return _layer_norm_op.record(args, {}, _getframe(1))


FORWARD[torch.nn.Linear] = _linear
FORWARD[torch.nn.RMSNorm] = _rms_norm
FORWARD[torch.nn.LayerNorm] = _layer_norm
