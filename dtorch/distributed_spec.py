"""Mesh and placement names under the module that users import them from."""

from __future__ import annotations

from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard

__all__ = ["DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "init_device_mesh"]
