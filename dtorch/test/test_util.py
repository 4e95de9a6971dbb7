"""Assertions on distributed tensors."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.future import TensorFuture

__test__ = False  # helpers, not tests


def assert_tensor_allclose(
    actual: Any, expected: Any, rtol: float | None = None, atol: float | None = None, equal_nan: bool = True
) -> None:
    """Compare two tensors (dtorch or torch) by their full values, as ``torch.testing.assert_close`` does: shape, dtype and
    values within the dtype's tolerance, or within ``rtol`` and ``atol`` (give both or neither).
    """
    torch.testing.assert_close(_full(actual), _full(expected), rtol=rtol, atol=atol, equal_nan=equal_nan)


def _full(value: Any) -> torch.Tensor:
    if isinstance(value, TensorFuture):
        return value.to_torch()
    return torch.as_tensor(value)
