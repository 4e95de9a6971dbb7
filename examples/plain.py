"""The names that the examples take from dtorch, on plain torch and one device.

For comparison: `chat.py --plain` runs the same model file without the runtime. Every name that is not here is torch's.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def linear(
    in_features: int, out_features: int, bias: bool = True, block: int = 1, groups: int | None = None
) -> torch.nn.Linear:
    """A parallel linear on one device: `block` and `groups` are about splitting."""
    return torch.nn.Linear(in_features, out_features, bias)


nn = SimpleNamespace(
    **vars(torch.nn),
    ColumnParallelLinear=linear,
    ColumnParallelLinearWithReplicateOutput=linear,
    RowParallelLinear=linear,
    RowParallelLinearWithReplicateOutput=linear,
    ReplicateParallelLinear=linear,
    EmbeddingWithReplicateOutput=torch.nn.Embedding,
    skip_init=nullcontext,
)


def __getattr__(name: str) -> Any:
    return getattr(torch, name)


auto_redistribute = nullcontext


def init_device_mesh(device_type: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> torch.device:
    """One device, whatever the shape; `with` makes it the default, as a mesh would be."""
    return torch.device(device_type)


def Shard(dim: int) -> None:
    """No placement: there is one device."""


def Replicate() -> None:
    """No placement: there is one device."""


def Tensor(data: torch.Tensor, *, device_mesh: torch.device, placements: list[None]) -> torch.Tensor:
    return data.to(device_mesh)


def load_llama() -> ModuleType:
    """llama.py with these names in dtorch's place; whoever imports dtorch or llama elsewhere is not affected."""
    spec = importlib.util.spec_from_file_location("plain_llama", Path(__file__).with_name("llama.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get("dtorch")
    sys.modules["plain_llama"] = module  # dataclasses look their module up
    sys.modules["dtorch"] = sys.modules[__name__]
    try:
        spec.loader.exec_module(module)
    finally:
        if previous is None:
            del sys.modules["dtorch"]
        else:
            sys.modules["dtorch"] = previous
    return module
