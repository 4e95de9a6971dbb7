"""Device meshes: an N-D array of devices of one kind, with optional names for its axes."""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from .runtime import layout
from .transport.errors import MeshError

device_kinds: set[str] = {"cpu", "cuda"}
"""Device types that a mesh may have. Whether a device exists is checked where workers are known."""

on_enter: list[Callable[[DeviceMesh], None]] = []
"""Called after ``with mesh:`` has made a mesh the default, in order. They must not raise."""

on_exit: list[Callable[[], None]] = []
"""Called when the block ends, before the outer default is back, in reverse order. They must not raise."""

# Default meshes of the running task, innermost last. Tuples are never changed in place and a task runs in a copy of
# its creator's context, so tasks and threads can not see each other's blocks.
_stack: contextvars.ContextVar[tuple[DeviceMesh, ...]] = contextvars.ContextVar("dtorch_mesh", default=())


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost ``with mesh:`` block of this task, or None outside of any."""
    stack = _stack.get()
    return stack[-1] if stack else None


class DeviceMesh:
    """An N-D array of different devices of one kind.

    Equal by value (device type, ids, shape and names), hashable, immutable. ``with mesh:`` makes it the default of the
    running task.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh: device ids: a nested list, a numpy array, a torch tensor, or an int for that one device.
            Left out: device 0.
        mesh_dim_names: one name an axis, all different.
        dim_names: the same, shorter to write.

    Raises:
        MeshError: the ids or names do not make a mesh.
    """

    __slots__ = ("__weakref__", "_family", "_hash", "device_type", "devices", "dim_names", "ndim", "shape")
    device_type: str
    devices: tuple[int, ...]  # row-major
    shape: tuple[int, ...]
    ndim: int
    dim_names: tuple[str, ...] | None
    # What a name means, in axes of the mesh that this one was sliced from: ("d2", "d3") for "d23", ("d2",) for "d2".
    # Shared by a mesh and everything sliced from it, so that a merged axis can be asked for anywhere; merge() adds to
    # it and nothing is ever removed or changed. Not part of the value.
    _family: dict[str, tuple[str, ...]]
    _hash: int

    def __init__(
        self,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        dim_names: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(device_type, str) or device_type not in device_kinds:
            known = ", ".join(map(repr, sorted(device_kinds)))
            raise MeshError(
                f"Expected a device type out of {known}, got {device_type!r}; "
                'give ids apart from the type, as in DeviceMesh("cuda", [0, 1]).'
            )
        if mesh_dim_names is not None and dim_names is not None and tuple(mesh_dim_names) != tuple(dim_names):
            raise MeshError(
                f"dim_names and mesh_dim_names mean the same, got {dim_names!r} and {mesh_dim_names!r}; give one."
            )
        devices, shape = _parse(mesh)
        names = dim_names if dim_names is not None else mesh_dim_names
        self._fill(device_type, devices, shape, None if names is None else _check_names(names, len(shape)), None)

    @classmethod
    def _make(
        cls,
        device_type: str,
        devices: tuple[int, ...],
        shape: tuple[int, ...],
        names: tuple[str, ...] | None,
        family: dict[str, tuple[str, ...]] | None,
    ) -> DeviceMesh:
        made = object.__new__(cls)
        made._fill(device_type, devices, shape, names, family)
        return made

    def _fill(
        self,
        device_type: str,
        devices: tuple[int, ...],
        shape: tuple[int, ...],
        names: tuple[str, ...] | None,
        family: dict[str, tuple[str, ...]] | None,
    ) -> None:
        put = object.__setattr__
        put(self, "device_type", device_type)
        put(self, "devices", devices)
        put(self, "shape", shape)
        put(self, "ndim", len(shape))
        put(self, "dim_names", names)
        put(self, "_family", {name: (name,) for name in names or ()} if family is None else family)
        put(self, "_hash", hash((device_type, devices, shape, names)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"DeviceMesh is immutable, so {name!r} can not be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"DeviceMesh is immutable, so {name!r} can not be deleted")

    # ---- facts

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        return self.dim_names

    @property
    def mesh(self) -> Any:
        """Device ids as a nested list."""
        ids: list[Any] = list(self.devices)
        for num in reversed(self.shape[1:]):
            ids = [ids[i : i + num] for i in range(0, len(ids), num)]
        return ids

    @property
    def key(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The mesh without its names: (device type, ids, shape)."""
        return self.device_type, self.devices, self.shape

    def size(self, axis: int | str | None = None) -> int:
        """Number of devices, in all or along one axis."""
        return len(self.devices) if axis is None else self.shape[self.axis(axis)]

    def axis(self, name: int | str) -> int:
        """Index of the axis called ``name``; an index is checked, and counts from the end when negative."""
        if isinstance(name, str):
            if self.dim_names is not None and name in self.dim_names:
                return self.dim_names.index(name)
            raise self._unknown(name)
        if isinstance(name, bool) or not hasattr(name, "__index__"):
            raise MeshError(f"Expected the index or name of a mesh axis, got {name!r} of type {type(name).__name__}.")
        index = operator.index(name)
        if not -self.ndim <= index < self.ndim:
            raise MeshError(f"Expected an axis from -{self.ndim} to {self.ndim - 1}, got {index}; {self} has no other.")
        return index % self.ndim

    def coords(self) -> list[tuple[int, ...]]:
        """Coordinates of the devices, in the order of ``devices``."""
        return layout.coords(self.shape)

    # ---- other meshes out of this one

    def unbind(self, axis: int | str) -> list[DeviceMesh]:
        """One mesh for each coordinate on ``axis``, made of the remaining axes.

        A mesh keeps at least one axis: unbinding a 1-D mesh gives meshes of one device, of shape ``(1,)`` and unnamed.
        """
        gone = self.axis(axis)
        rest = [i for i in range(self.ndim) if i != gone]
        names = None if self.dim_names is None or not rest else tuple(self.dim_names[i] for i in rest)
        shape = tuple(self.shape[i] for i in rest) or (1,)
        family = self._family if names else None
        return [
            self._make(self.device_type, self._take(rest, {gone: at}), shape, names, family)
            for at in range(self.shape[gone])
        ]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh with the named axes, in the order given, at coordinate 0 of all others.

        A name made by ``merge``, on this mesh or on one sliced from it, stands for the axes it merged.
        """
        wanted = names if isinstance(names, tuple) else (names,)
        if not wanted or not all(isinstance(name, str) for name in wanted):
            raise MeshError(
                f'Expected names of mesh axes, as in mesh["tp"] or mesh["dp", "tp"], got {names!r}; '
                "use unbind(axis) to take a mesh apart by coordinates."
            )
        if wanted == self.dim_names:
            return self
        groups = [self._axes_of(name) for name in wanted]
        axes = [axis for group in groups for axis in group]
        if len(set(axes)) != len(axes):
            raise MeshError(f"Expected each mesh axis once, got {', '.join(map(repr, wanted))}, which share an axis.")
        shape = tuple(prod(self.shape[axis] for axis in group) for group in groups)
        return self._make(self.device_type, self._take(axes, {}), shape, wanted, self._family)

    # Without this, iteration would fall back on __getitem__ with 0, 1, ...
    __iter__ = None

    def merge(self, name: str | None = None) -> DeviceMesh:
        """All axes of this mesh as one, row-major.

        The mesh that this one was sliced from remembers the name: after ``mesh["a", "b"].merge("ab")``,
        ``mesh["ab", "c"]`` works. Doing it twice changes nothing.

        Args:
            name: of the new axis. Left out: the old names, joined by ``"_"``.

        Raises:
            MeshError: the name already means something else.
        """
        if name is None:
            if self.dim_names is None:
                raise MeshError('Expected a name for the merged axis, as in merge("dp_tp"): this mesh has no names.')
            name = "_".join(self.dim_names)
        if not isinstance(name, str) or not name:
            raise MeshError(f"Expected a name for the merged axis, got {name!r}.")
        if self.dim_names == (name,):
            return self
        if self.dim_names is None:
            return self._make(self.device_type, self.devices, (len(self.devices),), (name,), None)
        parts = tuple(part for own in self.dim_names for part in self._family[own])
        known = self._family.setdefault(name, parts)
        if known != parts:
            raise MeshError(
                f"Expected a new name for the axes {', '.join(self.dim_names)}, got {name!r}, "
                f"which already means {', '.join(known)}; choose another name."
            )
        return self._make(self.device_type, self.devices, (len(self.devices),), (name,), self._family)

    flatten = merge

    def _take(self, axes: list[int], at: dict[int, int]) -> tuple[int, ...]:
        """Ids along ``axes``, row-major; other axes stay at the coordinate in ``at``, or 0."""
        strides = [prod(self.shape[axis + 1 :]) for axis in range(self.ndim)]
        offset = sum(strides[axis] * coord for axis, coord in at.items())
        return tuple(
            self.devices[offset + sum(strides[axis] * i for axis, i in zip(axes, coord, strict=True))]
            for coord in layout.coords(tuple(self.shape[axis] for axis in axes))
        )

    def _axes_of(self, name: str) -> list[int]:
        """The own axes that ``name`` stands for."""
        own = self.dim_names or ()
        if name in own:
            return [own.index(name)]
        parts = self._family.get(name)
        if parts is None:
            raise self._unknown(name)
        axes: list[int] = []
        while parts:
            for index, candidate in enumerate(own):
                meaning = self._family[candidate]
                if parts[: len(meaning)] == meaning:
                    axes.append(index)
                    parts = parts[len(meaning) :]
                    break
            else:
                raise self._unknown(name)
        return axes

    def _unknown(self, name: str) -> MeshError:
        if self.dim_names is None:
            return MeshError(f"Expected a mesh with names to look up {name!r}, got {self}; give it dim_names=(...).")
        known = list(self.dim_names)
        for merged, parts in list(self._family.items()):
            if merged not in known and all(part in self.dim_names for part in parts):
                known.append(merged)
        return MeshError(f"Expected a mesh axis out of {', '.join(map(repr, known))}, got {name!r}.")

    # ---- the default mesh

    def __enter__(self) -> DeviceMesh:
        _stack.set((*_stack.get(), self))
        try:
            for hook in on_enter:
                hook(self)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for hook in reversed(on_exit):
                hook()
        finally:
            self._leave()

    def _leave(self) -> None:
        # An async generator may be closed in another context than the one that opened it: take out nothing but self.
        stack = _stack.get()
        for index in reversed(range(len(stack))):
            if stack[index] is self:
                _stack.set(stack[:index] + stack[index + 1 :])
                return

    # ---- value semantics

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._hash == other._hash and self.key == other.key and self.dim_names == other.dim_names

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # A hash of strings differs between processes, so it is computed anew.
        return _rebuild, (self.device_type, self.devices, self.shape, self.dim_names, dict(self._family))

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __repr__(self) -> str:
        names = "" if self.dim_names is None else f", dim_names=({_quoted(self.dim_names)})"
        return f'DeviceMesh("{self.device_type}", {self.mesh}{names})'

    def _repr_html_(self) -> str:
        from .visual import mesh_html

        return mesh_html(self)


def init_device_mesh(
    device_type: str, mesh_shape: Iterable[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh of the devices 0, 1, 2, ... in row-major order.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh_shape: devices along each axis.
        mesh_dim_names: one name an axis.
    """
    shape = tuple(mesh_shape) if isinstance(mesh_shape, Iterable) else (mesh_shape,)
    if not shape or any(isinstance(num, bool) or not hasattr(num, "__index__") or num < 1 for num in shape):
        raise MeshError(f"Expected a mesh shape of sizes of at least 1, as in (2, 4), got {mesh_shape!r}.")
    ids: Any = list(range(prod(shape)))
    for num in reversed(shape[1:]):
        ids = [ids[i : i + num] for i in range(0, len(ids), num)]
    return DeviceMesh(device_type, ids, mesh_dim_names=mesh_dim_names)


def _rebuild(
    device_type: str,
    devices: tuple[int, ...],
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    family: dict[str, tuple[str, ...]],
) -> DeviceMesh:
    return DeviceMesh._make(device_type, devices, shape, names, family)


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")


def _parse(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids, row-major, and shape."""
    nested = 0 if mesh is None else mesh
    devices: list[int] = []
    shape = _walk(nested.tolist() if hasattr(nested, "tolist") else nested, devices, mesh) or (1,)
    if not devices:
        raise MeshError(f"Expected at least one device, got {mesh!r}; give ids, as in [0, 1].")
    negative = next((device for device in devices if device < 0), None)
    if negative is not None:
        raise MeshError(f"Expected device ids of at least 0, got {negative}; ids count the devices of one kind from 0.")
    if len(set(devices)) != len(devices):
        repeated = sorted({device for device in devices if devices.count(device) > 1})
        raise MeshError(f"Expected each device id once, got {repeated} more than once in {mesh!r}; drop the copies.")
    return tuple(devices), shape


def _walk(nested: Any, devices: list[int], whole: Any) -> tuple[int, ...]:
    """Append the ids in ``nested`` to ``devices`` and return its shape."""
    if isinstance(nested, (list, tuple, range)):
        shapes = {_walk(item, devices, whole) for item in nested}
        if len(shapes) > 1:
            raise MeshError(f"Expected nested lists of equal lengths, got {whole!r}; every row needs as many ids.")
        return (len(nested), *(shapes.pop() if shapes else ()))
    if isinstance(nested, bool) or not hasattr(nested, "__index__"):
        raise MeshError(f"Expected device ids as ints, got {nested!r} of type {type(nested).__name__} in {whole!r}.")
    devices.append(operator.index(nested))
    return ()


def _check_names(names: Sequence[str], ndim: int) -> tuple[str, ...]:
    given = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) and name for name in given):
        raise MeshError(f"Expected names of mesh axes as strings, got {names!r}.")
    if len(given) != ndim:
        raise MeshError(f"Expected {ndim} names, one for each mesh axis, got {len(given)}: {names!r}.")
    if len(set(given)) != len(given):
        raise MeshError(f"Expected a different name for each mesh axis, got {names!r}.")
    return given
