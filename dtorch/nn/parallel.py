"""Linear and embedding layers that split their weights over the mesh axis named "tp".

A column-parallel linear splits its output features, a row-parallel one its input features; what the latter gives are
summands on "tp" (Partial). Other mesh axes hold whole copies of the weights, and a mesh without an axis "tp" holds
copies throughout. State dicts have the full shapes of ``torch.nn.Linear`` and ``torch.nn.Embedding``.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.creation import empty, target_mesh
from dtorch.mesh import DeviceMesh
from dtorch.nn.module import STRAIGHT, Parameter, is_init_skipped, layer
from dtorch.ops.redistribute import placed
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.runtime.layout import split
from dtorch.spec import Spec
from dtorch.tensor import Tensor

AXIS = "tp"

_Linear: Any = layer(torch.nn.Linear)
_Embedding: Any = layer(torch.nn.Embedding)


def _axis(mesh: DeviceMesh) -> int | None:
    names = mesh.dim_names
    return names.index(AXIS) if names is not None and AXIS in names else None


def _shard(mesh: DeviceMesh, dim: int, size: int, block: int) -> Placement:
    """Cut at multiples of ``block``; without naming the block where that makes no difference."""
    num = mesh.size(AXIS)
    return Shard(dim) if split(0, size, num, 1) == split(0, size, num, block) else Shard(dim, block)


def _on(mesh: DeviceMesh, placement: Placement) -> tuple[Placement, ...]:
    """``placement`` on the axis "tp", Replicate on others."""
    axis = _axis(mesh)
    return tuple(placement if i == axis else Replicate() for i in range(mesh.ndim))


class _Move:
    """Gives a tensor a placement on the axis "tp" and leaves those on other axes. Remembers what each spec becomes."""

    def __init__(self) -> None:
        self._known: dict[Spec, tuple[Placement, ...] | None] = {}

    def __call__(self, x: Tensor, dim: int | None = None, block: int = 1) -> Tensor:
        """Replicate, or Shard of ``dim`` (negative) at multiples of ``block``."""
        spec = x._spec
        try:
            wanted = self._known[spec]
        except KeyError:
            wanted = self._known[spec] = self._wanted(spec, dim, block)
            if len(self._known) > 1024:
                self._known.clear()
        return x if wanted is None else placed(x, wanted)

    @staticmethod
    def _wanted(spec: Spec, dim: int | None, block: int) -> tuple[Placement, ...] | None:
        mesh = spec.mesh
        axis = _axis(mesh)
        if axis is None:
            return None
        if dim is None:
            target: Placement = Replicate()
        else:
            own = len(spec.shape) + dim
            target = _shard(mesh, own, spec.shape[own], block)
        if spec.placements[axis] == target:
            return None
        return tuple(target if i == axis else p for i, p in enumerate(spec.placements))

    def __deepcopy__(self, memo: Any) -> _Move:
        return _Move()


class _ParallelLinear(_Linear):  # type: ignore[misc]  # a class made at run time
    """A linear whose weight is split along ``_dim``, or not at all."""

    _dim: int | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        block: int = 1,
        groups: int | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """As ``torch.nn.Linear``.

        Args:
            block: cut the split features only at multiples of it, such as the features of one attention head.
            groups: how many equal groups the split features form that are better not cut, such as the key/value heads,
                each with the query heads that use it. While every device can have a group, cuts fall between groups. With
                more devices than groups, they fall at multiples of ``block``; and where a group is no more than a block,
                the layer is not split: every device holds all of it.
            device_mesh: mesh of the parameters; the mesh in force, or one CPU device, by default.

        Raises:
            ValueError: the features do not make that many groups of whole blocks.
        """
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.block, self.groups = in_features, out_features, block, groups
        split_features = (out_features, in_features)[self._dim or 0]
        if block < 1 or (groups is not None and (groups < 1 or split_features % (groups * block))):
            raise ValueError(
                f"{type(self).__name__}: {split_features} features are not groups={groups} of whole blocks, block={block}"
            )
        self._to_replicate, self._to_shard = _Move(), _Move()
        self._make(target_mesh(device_mesh, device, type(self).__name__), bias, dtype)
        self.reset_parameters()

    def _cut(self, mesh: DeviceMesh) -> int | None:
        """Multiples at which the features are cut; None when they are not."""
        if self._dim is None or _axis(mesh) is None:
            return None
        if self.groups is None:
            return self.block
        group = (self.out_features, self.in_features)[self._dim] // self.groups
        if mesh.size(AXIS) <= self.groups:
            return group
        return self.block if self.block < group else None

    def _make(self, mesh: DeviceMesh, bias: bool, dtype: torch.dtype | None) -> None:
        where: Placement = Replicate()
        where_bias: Placement = Replicate()
        self._multiple = self._cut(mesh)
        if self._multiple is not None:
            assert self._dim is not None
            where = _shard(mesh, self._dim, (self.out_features, self.in_features)[self._dim], self._multiple)
            where_bias = where if self._dim == 0 else Partial()
        shape = (self.out_features, self.in_features)
        self.weight = Parameter(empty(shape, dtype=dtype, device_mesh=mesh, placements=_on(mesh, where)))
        if bias:
            made = empty(shape[0], dtype=dtype, device_mesh=mesh)
            self.bias = Parameter(made.redistribute(_on(mesh, where_bias)))
        else:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Torch's initial numbers."""
        if is_init_skipped():
            return
        bias = self.bias
        if bias is None or not any(p.is_partial() for p in bias.placements):
            super().reset_parameters()
            return
        # A summand is no place to draw into: draw whole, then split into summands.
        whole = Parameter(bias.redistribute([Replicate()] * bias.device_mesh.ndim), bias.requires_grad)
        self._parameters["bias"] = whole
        try:
            super().reset_parameters()
        finally:
            self._parameters["bias"] = bias
        bias.copy_(whole.redistribute(bias.placements))

    def extra_repr(self) -> str:
        text = super().extra_repr()
        text = f"{text}, block={self.block}" if self.block != 1 else text
        return f"{text}, groups={self.groups}" if self.groups is not None else str(text)


class ColumnParallelLinear(_ParallelLinear):
    """Output features are split over "tp": weight and bias are Shard(0), and so is the result along its last dim."""

    _dim = 0


class ColumnParallelLinearWithReplicateOutput(ColumnParallelLinear):
    """Column-parallel, and the result is gathered: every device of "tp" holds all of it."""

    def redistribute_output(self, out: Tensor) -> Tensor:
        return self._to_replicate(out)


class ColumnParallelLinearWithReplicateInputOutput(ColumnParallelLinearWithReplicateOutput):
    """Column-parallel; its input is gathered first, and its result afterwards."""

    def redistribute_input(self, x: Tensor) -> Tensor:
        return self._to_replicate(x)


class RowParallelLinear(_ParallelLinear):
    """Input features are split over "tp": weight Shard(1), bias and result Partial.

    The input should be split along its last dim, as a column-parallel linear leaves it; where it is not, each device
    takes its part, which costs nothing if it has the whole.
    """

    _dim = 1

    def redistribute_input(self, x: Tensor) -> Tensor:
        return self._to_replicate(x) if self._multiple is None else self._to_shard(x, -1, self._multiple)


class RowParallelLinearWithReplicateOutput(RowParallelLinear):
    """Row-parallel, and the summands are added up: every device of "tp" holds the result."""

    def redistribute_output(self, out: Tensor) -> Tensor:
        return self._to_replicate(out)


class ReplicateParallelLinear(_ParallelLinear):
    """A linear that every device holds and computes whole."""


class EmbeddingWithReplicateOutput(_Embedding):  # type: ignore[misc]  # a class made at run time
    """An embedding whose weight is split along its features over "tp", and whose result is gathered."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        device: Any = None,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        """As ``torch.nn.Embedding``.

        Args:
            device_mesh: mesh of the weight; the mesh in force, or one CPU device, by default.
        """
        mesh = target_mesh(device_mesh, device, type(self).__name__)
        shape = (num_embeddings, embedding_dim)
        weight = empty(shape, dtype=dtype, device_mesh=mesh, placements=_on(mesh, Shard(1)))
        super().__init__(*shape, *args, _weight=weight, device_mesh=mesh, **kwargs)
        self._to_replicate = _Move()
        self.reset_parameters()

    def redistribute_output(self, out: Tensor) -> Tensor:
        return self._to_replicate(out)


STRAIGHT[ColumnParallelLinearWithReplicateOutput.redistribute_output] = ()
STRAIGHT[ColumnParallelLinearWithReplicateInputOutput.redistribute_input] = ()
STRAIGHT[RowParallelLinear.redistribute_input] = ("_multiple",)
STRAIGHT[RowParallelLinearWithReplicateOutput.redistribute_output] = ()
STRAIGHT[EmbeddingWithReplicateOutput.redistribute_output] = ()
