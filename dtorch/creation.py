"""Tensors made by the user: from data, and by torch's factories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.frames import source
from dtorch.mesh import DeviceMesh, current_mesh
from dtorch.ops._op import freeze_args
from dtorch.ops._out import written
from dtorch.ops.table import allow
from dtorch.placement import Placement, Replicate, normalize
from dtorch.runtime.layout import coords, is_shard, local_shape
from dtorch.runtime.signature import Signature
from dtorch.runtime.template import LocalShape, NumberRef
from dtorch.session import Session, current_session
from dtorch.tensor import Tensor
from dtorch.transport.messages import Definition

_new = object.__new__
_plain = torch._C.DisableTorchFunction
"""``with _plain():`` torch's factories give torch tensors, also inside ``with mesh:`` (see ``interop.py``)."""


def target_mesh(device_mesh: DeviceMesh | None, device: Any, name: str) -> DeviceMesh:
    """The mesh on which a factory works: the one given, the device, the mesh in force, or one CPU device."""
    if device_mesh is not None:
        if device is not None:
            raise ValueError(f"{name}: give device or device_mesh, not both")
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(f"{name}: device_mesh must be a DeviceMesh, not {type(device_mesh).__name__}")
        return device_mesh
    if device is not None:
        if isinstance(device, DeviceMesh):
            return device
        parsed = torch.device(device)
        here = current_mesh()
        if here is not None and parsed.type == here.device_type and parsed.index is None:
            return here
        return DeviceMesh(parsed.type, [parsed.index or 0])
    return current_mesh() or DeviceMesh("cpu", [0])


def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """``torch.tensor``: a distributed tensor with the values of ``data``, a copy of them.

    Args:
        data: numbers in nested lists, an array, a torch or a dtorch tensor; its shape is the result's.
        dtype: of the result; inferred as torch does by default.
        device: "cpu" or "cuda:1", in the place of a mesh of one device.
        requires_grad: kept as torch does. There are no gradients yet.
        device_mesh: where it lives; the mesh in force by default, else ``DeviceMesh("cpu", [0])``.
        placements: one a mesh axis; Replicate() by default.

    Raises:
        ValueError: both device and device_mesh are given.
        PlacementError: placements do not fit the mesh or the shape.
        MeshError: the mesh names devices that do not exist here.
    """
    if isinstance(data, Tensor):
        moved = data
        if device_mesh is not None or placements is not None:
            moved = data.redistribute(device_mesh=device_mesh, placements=placements)
        if dtype is not None and dtype != moved.dtype:
            moved = moved.to(dtype)
        return moved.clone() if moved is data else moved
    mesh = target_mesh(device_mesh, device, "tensor")
    with _plain():
        full = data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype)
    if dtype is not None and full.dtype != dtype:
        full = full.to(dtype)
    made = current_session().upload(full, mesh, placements)
    return made.requires_grad_() if requires_grad else made


def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None, **where: Any) -> Tensor:
    """``torch.as_tensor``: as ``dtorch.tensor``, but a dtorch tensor of that dtype is returned as it is, if nothing moves it.

    Args:
        data, dtype, device: as for ``dtorch.tensor``.
        where: ``device_mesh=`` and ``placements=``, as for ``dtorch.tensor``.
    """
    if isinstance(data, Tensor) and not where and (dtype is None or dtype == data.dtype):
        return data
    if not isinstance(data, Tensor):
        with _plain():
            data = torch.as_tensor(data)
    return tensor(data, dtype=dtype, device=device, **where)


def from_numpy(
    array: Any, *, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """``torch.from_numpy``, but a copy: workers do not share the array's memory.

    Args:
        array: of numpy; its shape and dtype are the result's.
        device_mesh, placements: where it lives, as for ``dtorch.tensor``.

    Raises:
        TypeError: it is no array, or of a dtype that torch does not have.
    """
    with _plain():
        full = torch.from_numpy(array)
    return tensor(full, device_mesh=device_mesh, placements=placements)


def from_shards(
    shards: Sequence[Any],
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """A tensor from per-device pieces in row-major mesh order; where it is Partial the pieces are summands.

    Args:
        shards: tensors or arrays, one a device, of one dtype and number of dims. Along a dim that is sharded their sizes
            add up, and are those that torch.chunk gives; along others they are equal.
        device_mesh, placements: where it lives, as for ``dtorch.tensor``.

    Raises:
        ValueError: the pieces do not fit together: their number, dtypes, or shapes under these placements.
    """
    mesh = target_mesh(device_mesh, None, "from_shards")
    with _plain():
        pieces = [torch.as_tensor(s) for s in shards]
    num = len(mesh.devices)
    if len(pieces) != num:
        raise ValueError(f"from_shards: {mesh} has {num} devices, {len(pieces)} pieces were given")
    ndim, dtype = pieces[0].ndim, pieces[0].dtype
    for i, piece in enumerate(pieces):
        if piece.ndim != ndim or piece.dtype != dtype:
            raise ValueError(
                f"from_shards: piece 0 is {dtype} with {ndim} dims, piece {i} is {piece.dtype} with {piece.ndim} dims"
            )
    placed = normalize(placements if placements is not None else (Replicate(),) * mesh.ndim, ndim, mesh)
    codes = tuple(p.code for p in placed)
    shape = tuple(_global_size(d, pieces, placed, mesh) for d in range(ndim))
    for i, (coord, piece) in enumerate(zip(coords(tuple(mesh.shape)), pieces, strict=True)):
        expected = local_shape(shape, codes, tuple(mesh.shape), coord)
        if tuple(piece.shape) != expected:
            raise ValueError(
                f"from_shards: a tensor of shape {list(shape)} placed as {list(placed)} has {list(expected)} at mesh "
                f"coordinate {coord}, piece {i} has {list(piece.shape)}. Pieces are cut as torch.chunk cuts: all "
                "of the same size but the last ones"
            )
    return current_session().upload_shards(pieces, shape, mesh, codes)


def _global_size(dim: int, pieces: list[torch.Tensor], placed: tuple[Placement, ...], mesh: DeviceMesh) -> int:
    axes = [axis for axis, p in enumerate(placed) if is_shard(p.code) and p.is_shard(dim)]
    total = 0
    for coord, piece in zip(coords(tuple(mesh.shape)), pieces, strict=True):
        if all(c == 0 for axis, c in enumerate(coord) if axis not in axes):
            total += piece.shape[dim]
    return total


# ---- factories

_signatures: dict[Any, Signature] = {}


def clear_cache() -> None:
    _signatures.clear()


class Factory:
    """A torch factory such as ``zeros``: same arguments, with ``device_mesh=`` and ``placements=`` besides.

    Args:
        name: torch function.
        shaped: its leading arguments are the shape (ints or one sequence); every device makes only its piece. Otherwise
            the whole is made on every device and cut.
        numbers: positions, after the shape, and names whose numbers vary without a new signature.
        random: draws from the session's generator.
    """

    def __init__(
        self, name: str, shaped: bool = False, numbers: frozenset[int | str] = frozenset(), random: bool = False
    ) -> None:
        self.name = f"torch.{name}"
        self.short_name = name
        self.fn: Callable[..., Any] = getattr(torch, name)
        self.shaped = shaped
        self.numbers = numbers
        self.random = random
        self.__name__ = self.__qualname__ = name
        self.__doc__ = (
            f"``torch.{name}`` on a mesh. ``device_mesh=``, ``placements=``: where the result lives (Replicate() on the mesh "
            "in force by default). Raises PlacementError for placements that do not fit, and what torch raises."
        )

    def __repr__(self) -> str:
        return f"<factory {self.name}>"

    def __call__(
        self,
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        device: Any = None,
        out: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        generator: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        from sys import _getframe

        if generator is not None:
            raise ValueError(f"{self.name}: generator= is not supported; dtorch.manual_seed seeds what is drawn from")
        if isinstance(out, Tensor):
            device_mesh = out.device_mesh if device_mesh is None and device is None else device_mesh
            kwargs["dtype"] = kwargs.get("dtype") or out.dtype
        mesh = target_mesh(device_mesh, device, self.name)
        session = current_session()
        if self.shaped and "size" in kwargs:
            args = (*args, kwargs.pop("size"))
        args = tuple(map(_plain_number, args))
        kwargs = {k: _plain_number(v) for k, v in kwargs.items()}
        if self.shaped:
            args = _gather_shape(args)
        if "dtype" not in kwargs:
            kwargs["dtype"] = None
        if kwargs["dtype"] is None:
            del kwargs["dtype"]
        nums = [a for i, a in enumerate(args) if self._dynamic(i, a)]
        nums += [v for k, v in kwargs.items() if self._dynamic(k, v)]
        static = tuple(
            type(a) if self._dynamic(i, a) else (type(a), tuple(a) if isinstance(a, (list, tuple)) else a)
            for i, a in enumerate(args)
        )
        named = tuple((k, type(v) if self._dynamic(k, v) else (type(v), v)) for k, v in kwargs.items())
        where = tuple(placements) if isinstance(placements, (list, tuple)) else placements  # others are refused below
        key = (self.name, session.serial, mesh, where, static, named, torch.get_default_dtype())
        sig = _signatures.get(key)
        if sig is None:
            sig = _signatures[key] = self._define(session, mesh, where, args, kwargs)
        recorder = sig.recorder
        slot = recorder.slot()
        sig.put(((sig.id, slot, *nums), *source(_getframe(1))))
        made = _new(Tensor)
        made._spec = sig.spec
        made._slot = slot
        if recorder.expects_after_put:
            recorder.after_put()
        if out is not None:
            return written(out, made)  # type: ignore[no-any-return]
        return made.requires_grad_() if requires_grad else made

    def _dynamic(self, where: int | str, value: Any) -> bool:
        return where in self.numbers and type(value) in (int, float)

    def _define(
        self, session: Session, mesh: DeviceMesh, placements: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        with _plain():
            meta = self.fn(*args, **kwargs, device="meta")
        shape = tuple(meta.shape)
        placed = normalize((Replicate(),) * mesh.ndim if placements is None else placements, len(shape), mesh)
        codes = tuple(p.code for p in placed)
        counter = iter(range(1 << 20))
        tree = tuple(NumberRef(next(counter)) if self._dynamic(i, a) else a for i, a in enumerate(args))
        named = {k: NumberRef(next(counter)) if self._dynamic(k, v) else v for k, v in kwargs.items()}
        named.setdefault("dtype", meta.dtype)
        kernel = "random" if self.random else "create_whole"
        if self.shaped and not self.random:
            kernel = "create"
            tree = (LocalShape(0), *tree[1:])
        frozen_args, frozen_kwargs = freeze_args(tree, {**named, "device": torch.device("cpu")})
        spec = session.spec(shape, tuple(meta.stride()), meta.dtype, mesh, codes)
        params = {"random": True} if self.random else {}

        def build(number: int) -> Definition:
            return Definition(
                number, self.name, kernel, frozen_args, frozen_kwargs, (), (spec.layout,), (), params
            )

        return session.define(build, (spec,), self.name, (), self.random)


def _plain_number(value: Any) -> Any:
    """The number in a tensor, an array or a scalar of numpy; anything else as it is."""
    return value.item() if hasattr(value, "item") and hasattr(value, "ndim") else value


def _gather_shape(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if args and isinstance(args[0], (list, tuple, torch.Size)):
        return (tuple(int(s) for s in args[0]), *args[1:])
    sizes = [a for a in args if isinstance(a, int)]
    return (tuple(sizes), *args[len(sizes) :])


zeros = Factory("zeros", shaped=True)
ones = Factory("ones", shaped=True)
empty = Factory("empty", shaped=True)
full = Factory("full", shaped=True, numbers=frozenset({1, "fill_value"}))
rand = Factory("rand", shaped=True, random=True)
randn = Factory("randn", shaped=True, random=True)
arange = Factory("arange")
linspace = Factory("linspace")
logspace = Factory("logspace")
eye = Factory("eye")
tril_indices = Factory("tril_indices")
triu_indices = Factory("triu_indices")
hann_window = Factory("hann_window")
hamming_window = Factory("hamming_window")
bartlett_window = Factory("bartlett_window")
blackman_window = Factory("blackman_window")
kaiser_window = Factory("kaiser_window")
empty_strided = Factory("empty_strided")
empty_permuted = Factory("empty_permuted")
randint = Factory("randint", random=True)
randperm = Factory("randperm", random=True)
_normal = Factory("normal", numbers=frozenset({0, 1}), random=True)

FACTORIES = {
    f.short_name: f
    for f in (
        zeros, ones, empty, full, rand, randn, arange, linspace, logspace, eye, tril_indices, triu_indices, hann_window,
        hamming_window, bartlett_window, blackman_window, kaiser_window, empty_strided, empty_permuted, randint, randperm,
        _normal,
    )
}

for _factory in FACTORIES.values():
    allow(_factory.name, _factory.fn)

__all__ = [*(name for name in FACTORIES if name != "normal"), "as_tensor", "from_numpy", "from_shards", "tensor"]
