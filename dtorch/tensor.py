"""dtorch.Tensor: a symbol (slot, spec) with the methods of a torch tensor.

Methods come from the op table (``ops/_methods.py`` attaches them); this file holds what a tensor is, not what can be done
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from dtorch.blocking import check_loop
from dtorch.future import FetchFuture, TensorFuture
from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement
from dtorch.runtime.promise import Promise

if TYPE_CHECKING:
    import numpy as np

    from dtorch.spec import Spec


@cache
def device_of(kind: str) -> torch.device:
    """``torch.device(kind)``, which torch makes anew each time."""
    return torch.device(kind)


class Tensor(TensorFuture):
    """A tensor on a mesh, seen whole from one thread.

    ``dtorch.Tensor(data, device_mesh=mesh, placements=[...])`` distributes a full torch tensor (or nested list): shapes and
    bits are the tensor's own, however it is cut.

    Args:
        data: torch.Tensor, numpy array or nested list with the global values.
        device_mesh: mesh to put it on; the mesh of the enclosing ``with mesh:``, or one CPU device, by default.
        placements: one Placement a mesh axis; Replicate() on all by default. With Partial() the first device of the axis
            holds the value and the others zeros, so that the pieces sum to it.

    Raises:
        PlacementError: wrong number of placements, or a Shard dim out of range.
    """

    __slots__ = ("__weakref__", "_fetching", "_grad", "_link", "_persistent", "_slot", "_spec")

    _spec: Spec
    _slot: int
    _link: Any  # of a copy that stands for a view, see ops/_alias.py
    _persistent: bool  # of what torch.nn.Buffer made
    _fetching: tuple[int, Promise[Any]]  # mutations of the session when it was last asked for, and that fetch

    if TYPE_CHECKING:  # methods made from the op table

        def __getattr__(self, name: str) -> Any: ...
        def __add__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __setitem__(self, index: Any, value: Any) -> None: ...

    def __new__(
        cls,
        data: Any = None,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        from dtorch.creation import tensor

        if data is None:
            raise TypeError("dtorch.Tensor needs data: a torch.Tensor, an array or a nested list")
        if isinstance(data, (torch.Tensor, Tensor)):
            return tensor(data, dtype=dtype, device_mesh=device_mesh, placements=placements)
        return tensor(data, dtype=dtype or torch.get_default_dtype(), device_mesh=device_mesh, placements=placements)

    def __del__(self) -> None:
        try:
            spec = self._spec
        except AttributeError:  # never got that far
            return
        dead = spec.dead
        if not dead:
            spec.wake()
        dead.append(self._slot)

    # ---- what is known at once

    @property
    def shape(self) -> torch.Size:
        return self._spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.placements

    @property
    def device(self) -> torch.device:
        """Kind of the mesh's devices, without an index: the tensor is on all of them."""
        return device_of(self._spec.mesh.device_type)

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    @property
    def is_cuda(self) -> bool:
        return self._spec.mesh.device_type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self._spec.mesh.device_type == "cpu"

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def is_sparse(self) -> bool:
        return False

    @property
    def is_nested(self) -> bool:
        return False

    @property
    def is_quantized(self) -> bool:
        return False

    @property
    def is_leaf(self) -> bool:
        return True

    @property
    def grad_fn(self) -> None:
        return None

    @property
    def grad(self) -> Tensor | None:
        return getattr(self, "_grad", None)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._grad = value

    @property
    def requires_grad(self) -> bool:
        return self._spec.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def _is_param(self) -> bool:
        return self._spec.is_param

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self._spec = self._spec.session.respec(self._spec, is_param=bool(value))
        for call in on_mark:
            call(_getframe(1))

    @property
    def _is_buffer(self) -> bool:
        return hasattr(self, "_persistent")

    @_is_buffer.setter
    def _is_buffer(self, value: bool) -> None:
        for call in on_mark:
            call(_getframe(1))

    @property
    def persistent(self) -> bool:
        """Of a ``torch.nn.Buffer``: whether it belongs to its module's ``state_dict``. Other tensors do not have it."""
        return self._persistent

    @persistent.setter
    def persistent(self, value: bool) -> None:
        self._persistent = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Mark the tensor as one that wants a gradient. The flag is kept; nothing computes gradients yet."""
        self._spec = self._spec.session.respec(self._spec, requires_grad=bool(requires_grad))
        return self

    @property
    def itemsize(self) -> int:
        return self._spec.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self._spec.size_bytes

    def size(self, dim: int | None = None) -> Any:
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        return len(self._spec.shape)

    ndimension = dim

    def numel(self) -> int:
        return self._spec.shape.numel()

    nelement = numel

    def element_size(self) -> int:
        return self._spec.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """Strides of the global tensor, as torch's shape functions give them."""
        return self._spec.stride if dim is None else self._spec.stride[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        return self._spec.meta.is_contiguous(memory_format=memory_format)

    def is_floating_point(self) -> bool:
        return self._spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self._spec.dtype.is_complex

    def is_signed(self) -> bool:
        return self._spec.dtype.is_signed

    def get_device(self) -> int:
        return -1 if self.is_cpu else self._spec.mesh.devices[0]

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self.dtype.is_floating_point or self.dtype.is_complex or self.numel() != 1:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self.item())

    def __iter__(self) -> Any:
        if not self._spec.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __contains__(self, element: Any) -> bool:
        return bool((element == self).any().item())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.clone()
        copy._spec = self._spec.session.respec(self._spec, link=0)
        memo[id(self)] = copy
        return copy  # type: ignore[no-any-return]

    def __copy__(self) -> Tensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a dtorch.Tensor lives on workers and cannot be pickled; pickle x.to_torch()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.to_torch().numpy()
        return array if dtype is None else array.astype(dtype)

    __array_priority__ = 1000

    def __dlpack__(self, **options: Any) -> Any:
        """Blocks for the value, on the CPU, for ``torch.from_dlpack(x)`` and ``numpy.from_dlpack(x)``."""
        return self.to_torch().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return torch.zeros(0).__dlpack_device__()

    @property
    def data(self) -> Tensor:
        return self.detach()  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Any) -> None:
        self.copy_(value)

    # ---- values

    def _promise(self, now: bool = True) -> Promise[torch.Tensor]:
        return self._spec.session.fetch(self, now)

    def to_torch_async(self) -> FetchFuture:
        """Start to fetch the full value; a TensorFuture with get(), wait(timeout_s), is_ready(), exception(), await."""
        return FetchFuture(self._promise())

    def new_tensor(
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        """``torch.Tensor.new_tensor``: a replicated tensor of this dtype on this mesh, unless told otherwise."""
        from dtorch.creation import tensor

        mesh = self.device_mesh if device is None else None
        return tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad, device_mesh=mesh)

    def is_ready(self) -> bool:
        """Whether a fetch of the value that was started before has arrived; never blocks, starts nothing."""
        fetching = getattr(self, "_fetching", None)
        return fetching is not None and fetching[1].done

    def to_shards(self) -> list[torch.Tensor]:
        """The devices' local tensors, in row-major mesh order; blocks."""
        promise = self._spec.session.fetch_shards(self)
        check_loop()
        return promise.result()

    async def to_shards_async(self) -> list[torch.Tensor]:
        """As ``to_shards``, without blocking the loop."""
        return await self._spec.session.fetch_shards(self)

    def item(self) -> Any:
        """The single value as a Python number; blocks."""
        self._one()
        return self.to_torch().item()

    async def item_async(self) -> Any:
        """The single value as a Python number, without blocking the loop."""
        self._one()
        return (await self).item()

    def _one(self) -> None:
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")

    def tolist(self) -> Any:
        """The values as nested lists; blocks."""
        return self.to_torch().tolist()

    async def tolist_async(self) -> Any:
        """The values as nested lists, without blocking the loop."""
        return (await self).tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The full value as a numpy array; blocks."""
        return self.to_torch().numpy()

    def __repr__(self) -> str:
        spec = self._spec
        placed = ", ".join(map(str, spec.placements))
        values = repr(self.to_torch())
        if values.startswith("tensor(") and values.endswith(")"):
            values = values[7:-1]
        values = values.replace("\n       ", "\n")
        return (
            f"{values}\nshape={tuple(spec.shape)}, dtype={spec.dtype}, device_mesh={spec.mesh}, placements=[{placed}]"
        )

    def _repr_html_(self) -> str:
        from dtorch.visual import tensor_html

        return tensor_html(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 and spec else repr(self)

    # ---- placements

    def redistribute(
        self,
        placements: Sequence[Placement] | DeviceMesh | None = None,
        device_mesh: DeviceMesh | None = None,
        **names: Any,
    ) -> Tensor:
        """The same global tensor under other placements or on another mesh; either may be left out.

        Args:
            placements: one Placement an axis of the target mesh. Left out: this tensor's own, or Replicate() when the
                target mesh has another number of axes.
            device_mesh: target mesh; this tensor's own when left out.

        Raises:
            PlacementError: wrong number of placements, or a Shard dim out of range.
        """
        from dtorch.ops.redistribute import redistribute

        return redistribute(self, placements, device_mesh, **names)

    def redistribute_like(self, other: Tensor) -> Tensor:
        """Under the mesh and placements of ``other``."""
        if not isinstance(other, TensorFuture):
            raise TypeError(f"redistribute_like: expected a tensor on a mesh, got {type(other).__name__}")
        return self.redistribute(device_mesh=other.device_mesh, placements=other.placements)

    def redistribute_by_dict(
        self,
        device_mesh: DeviceMesh | None = None,
        placements_dict: dict[str, Placement] | None = None,
        default_placement_mode: str = "keep",
    ) -> Tensor:
        """Under placements given by mesh axis name; names that the target mesh lacks are ignored.

        Args:
            default_placement_mode: for axes that the dict does not name: "keep" this tensor's placement on the axis of
                that name (Replicate where it has none), "replicate", or "raise_error".
        """
        from dtorch.ops.redistribute import redistribute_by_dict

        return redistribute_by_dict(self, device_mesh, placements_dict or {}, default_placement_mode)

    # ---- torch's protocol

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        record = RECORDS.get(func)
        if record is not None:
            return record(args, kwargs or _NONE, _getframe(1))
        op = TORCH.get(func)
        if op is None:
            return missing(func, args, kwargs or {})
        quick = FRONTS.get(func, op)
        if hasattr(quick, "record"):
            RECORDS[func] = quick.record
        return op(*args, **kwargs) if kwargs else op(*args)


_NONE: dict[str, Any] = {}

on_mark: list[Callable[[FrameType], None]] = []
"""Called when a tensor was marked as a parameter or buffer, with the frame that did so."""

TORCH: dict[Any, Callable[..., Any]] = {}
"""torch function -> what records it; filled by the op table."""
FRONTS: dict[Any, Any] = {}
"""torch function -> its ``ops._ways.Front``, where it has one."""
RECORDS: dict[Any, Callable[..., Any]] = {}
"""torch function -> ``record`` of its op; filled as functions are met."""


def missing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function without a row: see ``ops/_fallback.py``."""
    from dtorch.ops._fallback import record_missing

    return record_missing(func, args, kwargs)
