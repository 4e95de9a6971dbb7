"""Ops of foreign code whose inputs are on several meshes, as between pipeline stages: all go to one of them."""

from __future__ import annotations

from typing import Any

from dtorch.mesh import DeviceMesh
from dtorch.ops._tree import tensors_of, with_tensors
from dtorch.tensor import Tensor


def are_apart(tree: Any) -> bool:
    """Whether the tensors in ``tree`` are on several meshes."""
    found = tensors_of(tree)
    return any(t._spec.mesh != found[0]._spec.mesh for t in found[1:])


def brought_together(args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with all tensors on one mesh, placed on each axis as on the axis of that name.

    Args:
        writes: the call writes into its first tensor, which must stay where it is.
    """
    found = tensors_of((args, kwargs))
    mesh = target(found, writes)
    moved = iter([move(t, mesh) for t in found])
    return with_tensors(args, moved), with_tensors(kwargs, moved)


def target(found: list[Any], writes: bool) -> DeviceMesh:
    """Where a call should run: where it writes, else where its parameters are, else where most of its bytes are, and of
    equals on the last devices: activations go on to the next stage."""
    if writes:
        return found[0]._spec.mesh  # type: ignore[no-any-return]
    weights = [t for t in found if t._spec.is_param]
    best = max(weights or found, key=lambda t: (t._spec.size_bytes, max(t._spec.mesh.devices)))
    return best._spec.mesh  # type: ignore[no-any-return]


def move(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """``tensor`` on ``mesh``, placed on each axis as it is on the axis of that name."""
    if tensor._spec.mesh == mesh:
        return tensor
    if mesh.dim_names is None:
        return tensor.redistribute(device_mesh=mesh)
    return tensor.redistribute_by_dict(mesh)
