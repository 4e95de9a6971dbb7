"""``torch.nn.functional`` for dtorch tensors: rows of the op table, or torch's functions made of such."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as _torch

from dtorch.nn import _expand
from dtorch.ops.table import FUNCTIONAL

_expand.register(_torch)
_expand.register(torch.functional)


def __getattr__(name: str) -> Any:
    found: Any = FUNCTIONAL.get(name)
    found = getattr(_torch, name) if found is None else getattr(found, "function", found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*FUNCTIONAL, *(name for name in dir(_torch) if not name.startswith("_"))})
