"""``redistribute``: the one op that changes placements."""

from __future__ import annotations

from collections.abc import Sequence
from sys import _getframe
from types import FrameType

from dtorch.frames import source
from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, Replicate, normalize
from dtorch.runtime.signature import Signature
from dtorch.spec import STALE, Spec, contiguous_stride
from dtorch.tensor import Tensor
from dtorch.transport.errors import PlacementError
from dtorch.transport.messages import Definition

_signatures: dict[tuple[Spec, DeviceMesh | None, tuple[Placement, ...]], Signature] = {}
"""(spec, target mesh or None for its own, placements) -> how to record that move."""
_new = object.__new__


def redistribute(
    tensor: Tensor,
    placements: Sequence[Placement] | DeviceMesh | None = None,
    device_mesh: DeviceMesh | Sequence[Placement] | None = None,
) -> Tensor:
    """See ``dtorch.Tensor.redistribute``."""
    if isinstance(placements, DeviceMesh):  # torch's order: mesh first
        placements, device_mesh = (device_mesh if not isinstance(device_mesh, DeviceMesh) else None), placements
    spec = tensor._spec
    mesh = spec.mesh if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"redistribute: device_mesh must be a DeviceMesh, not {type(mesh).__name__}")
    if placements is None:
        if mesh.ndim == spec.mesh.ndim:
            wanted: tuple[Placement, ...] = spec.placements
        else:
            wanted = (Replicate(),) * mesh.ndim
    elif isinstance(placements, DeviceMesh):
        raise TypeError("redistribute: two meshes were given")
    else:
        wanted = normalize(placements, len(spec.shape), mesh)
    if mesh == spec.mesh and wanted == spec.placements:
        return tensor
    if spec.link == STALE:
        from dtorch.ops._alias import refresh

        refresh(tensor)
        spec = tensor._spec
    key = (spec, None if mesh == spec.mesh else mesh, wanted)
    sig = _signatures.get(key)
    if sig is None:
        sig = _signatures[key] = _define(spec, mesh, wanted)
    return _record(sig, tensor, _getframe(1))


def placed(tensor: Tensor, wanted: tuple[Placement, ...]) -> Tensor:
    """``redistribute`` on the tensor's own mesh, to placements that need no check: those of a tensor of as many dims."""
    sig = _signatures.get((tensor._spec, None, wanted))
    return redistribute(tensor, wanted) if sig is None else _record(sig, tensor, _getframe(1))


def _record(sig: Signature, tensor: Tensor, frame: FrameType) -> Tensor:
    recorder = sig.recorder
    try:
        slot = sig.take()
    except IndexError:
        slot = recorder.grant()
    sig.put(((sig.id, slot, tensor._slot), *source(frame)))
    out = _new(Tensor)
    out._spec = sig.spec
    out._slot = slot
    if recorder.expects_after_put:
        recorder.after_put()
    return out


def _define(spec: Spec, mesh: DeviceMesh, wanted: tuple[Placement, ...]) -> Signature:
    session = spec.session
    codes = tuple(p.code for p in wanted)
    target = session.spec(spec.shape, contiguous_stride(spec.shape), spec.dtype, mesh, codes)

    def build(number: int) -> Definition:
        return Definition(number, "dtorch.redistribute", "redistribute", [], {}, (spec.layout,), (target.layout,))

    return session.define(build, (target,), "dtorch.redistribute", (spec.layout,))


def clear_cache() -> None:
    _signatures.clear()


def redistribute_by_dict(
    tensor: Tensor, device_mesh: DeviceMesh | None, placements_dict: dict[str, Placement], mode: str
) -> Tensor:
    """See ``dtorch.Tensor.redistribute_by_dict``."""
    if mode not in ("keep", "replicate", "raise_error"):
        raise ValueError(f"default_placement_mode must be 'keep', 'replicate' or 'raise_error', not {mode!r}")
    mesh = tensor.device_mesh if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh) or not isinstance(placements_dict, dict):
        raise TypeError(
            "redistribute_by_dict: expected device_mesh=DeviceMesh(...) or None and placements_dict={axis name: placement}, "
            f"got {type(device_mesh).__name__} and {type(placements_dict).__name__}"
        )
    if mesh.dim_names is None:
        if mesh.size() == 1:  # such as a stage of a mesh that has pipeline stages only
            return redistribute(tensor, [Replicate()] * mesh.ndim, mesh)
        raise ValueError(f"redistribute_by_dict needs a mesh whose axes have names, not {mesh}")
    own = dict(zip(tensor.device_mesh.dim_names or (), tensor.placements, strict=False))
    wanted: list[Placement] = []
    for name in mesh.dim_names:
        if name in placements_dict:
            wanted.append(placements_dict[name])
        elif mode == "keep":
            wanted.append(own.get(name, Replicate()))
        elif mode == "replicate":
            wanted.append(Replicate())
        else:
            raise PlacementError(
                "redistribute_by_dict", [str(tensor._spec)], [], "",
                f"The mesh has an axis {name!r} for which placements_dict names no placement.",
            )
    return redistribute(tensor, wanted, mesh)
