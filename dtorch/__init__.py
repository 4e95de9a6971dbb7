"""Distributed PyTorch in one thread, with a global view."""

from __future__ import annotations

from typing import Any

import torch as _torch

from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.future import TensorFuture
from dtorch.tensor import Tensor
from dtorch import ops as _ops
from dtorch.ops.table import PUBLIC as _PUBLIC
from dtorch.creation import *  # noqa: F403
from dtorch.creation import FACTORIES as _FACTORIES
from dtorch.policy import auto_redistribute
from dtorch.session import init, shutdown
from dtorch.transport.errors import (
    AuthError,
    ConnectionLostError,
    DTorchError,
    MeshError,
    OpError,
    PlacementError,
    ProtocolError,
    QuotaError,
    SessionClosedError,
    WorkerLostError,
)


def __getattr__(name: str) -> Any:
    op = _PUBLIC.get(name)
    if op is not None:
        return op
    raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
