"""Products whose bits depend on who requires a gradient.

``torch.matmul`` of many matrices and one makes one product of it where that takes no copy, or where the one matrix requires a
gradient; otherwise it is many products, which may round otherwise. Workers keep no gradients, so they are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtorch.spec import contiguous_stride

_ALONE = frozenset({"matmul", "__matmul__", "__rmatmul__", "linear"})
_WITHIN = frozenset({"multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions that multiply by their weights."""


def wanting_gradients(name: str, tensors: Sequence[Any]) -> list[int]:
    """Inputs that workers must treat as requiring a gradient for the bits of plain torch; mostly none.

    Args:
        name: of the op, without its module.
    """
    if name not in _ALONE and name not in _WITHIN:
        return []
    specs = [tensor._spec for tensor in tensors]
    found = [i for i, spec in enumerate(specs) if spec.requires_grad]
    if not found or max(len(spec.shape) for spec in specs) < 3:
        return []
    first = specs[0]
    is_folded_anyway = len(first.shape) >= 3 and first.stride == contiguous_stride(first.shape)
    return [] if name in _ALONE and is_folded_anyway else found
