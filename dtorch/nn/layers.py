"""Forwards of torch's layers that go straight to the op table.

They do what torch's forward does, without looking every parameter up as an attribute and without torch's dispatch:
for layers that are called often and do little in the client.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.nn.module import FORWARD
from dtorch.ops.table import FUNCTIONAL


def _linear(self: Any, input: Any) -> Any:
    params = self._parameters
    return FUNCTIONAL["linear"](input, params["weight"], params["bias"])


def _rms_norm(self: Any, x: Any) -> Any:
    return FUNCTIONAL["rms_norm"](x, self.normalized_shape, self._parameters["weight"], self.eps)


def _layer_norm(self: Any, input: Any) -> Any:
    params = self._parameters
    return FUNCTIONAL["layer_norm"](input, self.normalized_shape, params["weight"], params["bias"], self.eps)


FORWARD[torch.nn.Linear] = _linear
if "rms_norm" in FUNCTIONAL:
    FORWARD[torch.nn.RMSNorm] = _rms_norm
if "layer_norm" in FUNCTIONAL:
    FORWARD[torch.nn.LayerNorm] = _layer_norm
