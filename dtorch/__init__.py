"""Distributed PyTorch in one thread, with a global view.

Layout: this package is the top floor. ``tensor``, ``mesh``, ``placement``, ``creation`` and ``ops`` hold what users touch;
``session`` joins them to ``dtorch.runtime`` (recording, control, execution), which stands on ``dtorch.transport`` (messages,
links, groups). Names below are the public ones; ops of the op table are public under torch's names too.
"""

from __future__ import annotations

import importlib
import logging as _logging
from typing import Any

import torch as _torch

from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.future import TensorFuture
from dtorch.tensor import Tensor
from dtorch import ops as _ops  # noqa: F401  (fills the op table)
from dtorch.ops.table import PUBLIC as _PUBLIC
from dtorch.blocking import BlockingWarning
from dtorch.capture import compile
from dtorch.cluster.client import connect
from dtorch.control import (
    MemoryStats,
    Statistics,
    manual_seed,
    memory_stats,
    memory_stats_async,
    statistics,
    statistics_async,
    synchronize,
    synchronize_async,
)
from dtorch.creation import *  # noqa: F403
from dtorch.creation import __all__ as _creation
from dtorch import interop as _interop  # noqa: F401  (torch's factories under ``with mesh:``)
from dtorch.face import TorchTensor
from dtorch.modules.block_cache import FirstBlockCache, first_block_cache
from dtorch.modules.distribute import distribute
from dtorch.forecast.explain import explain
from dtorch.forecast.record import Explanation
from dtorch.finite import check_finite
from dtorch.inspection import HeldPiece, Inspection, inspect
from dtorch.ops.custom import register_op
from dtorch.plan_view import ModulePlan, plan_of
from dtorch.policy import auto_redistribute
from dtorch.profiling.profile import profile
from dtorch.scope import session
from dtorch.session import current_session, init, shutdown
from dtorch.streams import as_completed
from dtorch.visual import visualize_sharding
from dtorch.weights.reading import load_safetensors
from dtorch.weights.loading import load_into
from dtorch.weights.pretrained import empty_init, from_pretrained
from dtorch.weights.saving import save_safetensors
from dtorch.runtime.recorder import CaptureError
from dtorch.transport.errors import (
    AuthError,
    ConnectionLostError,
    DTorchError,
    MeshError,
    NonFiniteError,
    OpError,
    PlacementError,
    ProtocolError,
    QuotaError,
    SessionClosedError,
    WorkerLostError,
)

__version__ = "0.1.0"

_SUBMODULES = ("nn", "distributed_spec", "interop", "testing")

_logging.getLogger(__name__).addHandler(_logging.NullHandler())  # silent unless somebody listens

__all__ = [
    "AuthError",
    "BlockingWarning",
    "CaptureError",
    "ConnectionLostError",
    "DTorchError",
    "DeviceMesh",
    "Explanation",
    "HeldPiece",
    "Inspection",
    "MemoryStats",
    "MeshError",
    "ModulePlan",
    "NonFiniteError",
    "OpError",
    "Partial",
    "Placement",
    "PlacementError",
    "ProtocolError",
    "QuotaError",
    "Replicate",
    "SessionClosedError",
    "Shard",
    "Statistics",
    "Tensor",
    "TensorFuture",
    "TorchTensor",
    "WorkerLostError",
    "as_completed",
    "auto_redistribute",
    "check_finite",
    "compile",
    "connect",
    "current_session",
    "distribute",
    "FirstBlockCache",
    "first_block_cache",
    "empty_init",
    "explain",
    "from_pretrained",
    "init",
    "init_device_mesh",
    "inspect",
    "load_into",
    "load_safetensors",
    "manual_seed",
    "memory_stats",
    "memory_stats_async",
    "plan_of",
    "profile",
    "register_op",
    "save_safetensors",
    "shutdown",
    "session",
    "statistics",
    "statistics_async",
    "synchronize",
    "synchronize_async",
    "visualize_sharding",
    *_creation,
]


def __getattr__(name: str) -> Any:
    op = _PUBLIC.get(name)
    if op is not None:
        globals()[name] = made = getattr(op, "function", op)
        return made
    if name in _SUBMODULES:
        return importlib.import_module(f"dtorch.{name}")
    value = getattr(_torch, name, None)
    if isinstance(value, (_torch.dtype, _torch.memory_format, _torch.layout)) or name in (
        "no_grad", "inference_mode", "enable_grad", "is_grad_enabled", "set_grad_enabled", "finfo", "iinfo", "Size", "device",
        "get_default_dtype", "set_default_dtype", "inf", "nan", "pi", "e", "dtype", "manual_seed",
    ):
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dtorch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_SUBMODULES})
