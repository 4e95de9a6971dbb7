"""Hooks around the calls of a distributed module: what goes in gets the torch face and its place, what comes out is whole.

``Enter`` and ``Leave`` stand around the module that ``distribute`` was given, ``Move`` and ``Back`` around the parts of a
pipeline stage, ``SplitTokens`` before the layers of a stack, ``Gather`` after single layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtorch.face import TorchTensor, faced
from dtorch.interop import factories_off, factories_on
from dtorch.mesh import DeviceMesh
from dtorch.modules.plans import BATCH_AXES, SEQUENCE_AXES
from dtorch.ops._call import refuse_without_values
from dtorch.ops.redistribute import placed
from dtorch.placement import Placement, Replicate, Shard
from dtorch.session import current_session
from dtorch.tensor import Tensor

_REPLICATE = Replicate()
Args = tuple[Any, ...]
Named = dict[str, Any]


class Gather:
    """A forward hook: the result, or the first of several, is whole along one mesh axis."""

    def __init__(self, axis: str | int) -> None:
        self.axis = axis
        self._axes: dict[DeviceMesh, tuple[int, ...] | None] = {}  # of meshes met: the axis; None where it is not there

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        if type(out) is not TorchTensor:
            return out
        mesh = out.device_mesh
        try:
            axes = self._axes[mesh]
        except KeyError:
            is_there = isinstance(self.axis, int) or self.axis in (mesh.dim_names or ())
            axes = self._axes[mesh] = (mesh.axis(self.axis),) if is_there else None
        return out if axes is None else whole(out, axes)


class SplitTokens:
    """A forward pre-hook of one layer of a stack: hidden states (B, T, D) are split along T over the axes for context
    parallelism, unless they are already, or have one token. The ops behind keep it so."""

    def __call__(self, module: torch.nn.Module, args: Args, kwargs: Named) -> Any:
        return tuple(map(_by_sequence, args)), {name: _by_sequence(value) for name, value in kwargs.items()}


def _by_sequence(value: Any) -> Any:
    if type(value) is not TorchTensor or value.ndim != 3 or value.shape[1] < 2 or not value.dtype.is_floating_point:
        return value
    mesh, before = value.device_mesh, value.placements
    wanted = tuple(
        Shard(1) if name in SEQUENCE_AXES and size > 1 and p.is_replicate() else p
        for name, size, p in zip(mesh.dim_names or (), mesh.shape, before, strict=True)
    )
    return value if wanted == before else value.redistribute(wanted)


class Move:
    """A forward pre-hook of a part of a pipeline stage: tensors among the arguments go to that stage's mesh, placed on each
    axis as they are on the axis of that name, and factories make tensors there."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: torch.nn.Module, args: Args, kwargs: Named) -> Any:
        factories_on(self.mesh, self)

        def move(value: Any) -> Any:
            return moved(value, self.mesh) if type(value) is TorchTensor else value

        return mapped(move, args), {name: mapped(move, value) for name, value in kwargs.items()}


class Back:
    """The forward hook that ends what ``Move`` began."""

    def __init__(self, move: Move) -> None:
        self.move = move

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        factories_off(self.move)
        return out


class _Unscripted:
    """A hook at which torch.jit.script ends."""

    @property
    def __name__(self) -> str:  # asked for by torch.jit.script alone
        raise AttributeError(_refusal("torch.jit.script"))


class Enter(_Unscripted):
    """A forward pre-hook: plain and native tensors among the arguments get the torch face. What has one row for each
    sequence of the batch is split over the axes "dp" and "ep", if nothing has split it yet."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.whole: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
        names = mesh.dim_names or ("",) * mesh.ndim
        self.split: tuple[Placement, ...] = tuple(
            Shard(0) if name in BATCH_AXES and size > 1 else Replicate() for name, size in zip(names, mesh.shape, strict=True)
        )

    def __call__(self, module: torch.nn.Module, args: Args, kwargs: Named) -> Any:
        if torch.compiler.is_dynamo_compiling():
            raise NotImplementedError(_refusal("torch.compile"))
        if torch._C._get_tracing_state() is not None:
            raise NotImplementedError(_refusal("torch.jit.trace"))
        factories_on(self.mesh, self)  # before all that may fail: the other hook is called in any case
        return self.place(module, args, kwargs)

    def place(self, module: torch.nn.Module, args: Args, kwargs: Named) -> Any:
        """The arguments on the mesh."""
        for name, given in (*enumerate(args), *kwargs.items()):
            for value in tensors(given):
                if type(value) is not TorchTensor:
                    refuse_without_values(f"{type(module).__name__} on a mesh: argument {name!r}", value)
        first = next((t for t in tensors((args, kwargs)) if t.ndim), None)
        num_rows = first.shape[0] if first is not None else 0

        def enter(value: Any) -> Any:
            return self._enter(value, num_rows) if isinstance(value, (torch.Tensor, Tensor)) else value

        return mapped(enter, args), mapped(enter, kwargs)

    def _enter(self, value: Any, num_rows: int) -> TorchTensor:
        if isinstance(value, Tensor):  # placed by whoever made it
            return moved(faced(value), self.mesh)
        wanted = self.split if value.ndim > 0 and value.shape[0] == num_rows > 1 else self.whole
        if isinstance(value, TorchTensor):
            here = moved(value, self.mesh)
            return here.redistribute(wanted) if here.placements == self.whole != wanted else here
        return faced(current_session().upload(value.detach(), self.mesh, wanted))


def _refusal(what: str) -> str:
    return (
        f"{what} of a distributed module: its tensors live on a mesh and have no memory here, so there is nothing to compile; "
        "use dtorch.compile, which records a function once"
    )


class Leave(_Unscripted):
    """A forward hook: results are whole on every axis but "dp" and "ep", and no summands are left."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        factories_off(self.enter)

        def leave(value: Any) -> Any:
            if type(value) is not TorchTensor:
                return value
            mesh = value.device_mesh
            names = mesh.dim_names or ("",) * mesh.ndim
            return whole(value, tuple(i for i, name in enumerate(names) if name not in BATCH_AXES))

        return mapped(leave, out)


def whole(value: TorchTensor, axes: tuple[int, ...]) -> TorchTensor:
    """``value`` replicated along ``axes``, and summed up along others."""
    before = value.placements
    wanted = tuple([_REPLICATE if i in axes or p.is_partial() else p for i, p in enumerate(before)])
    return value if wanted == before else faced(placed(value._native, wanted))


def moved(value: TorchTensor, mesh: DeviceMesh) -> TorchTensor:
    """``value`` on ``mesh``, placed on each axis as it is on the axis of that name."""
    if value.device_mesh == mesh:
        return value
    if mesh.dim_names is None:
        return value.redistribute(device_mesh=mesh)
    return value.redistribute_by_dict(mesh)


def tensors(tree: Any) -> Iterator[Any]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(tree, (torch.Tensor, Tensor)):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` of every leaf of dicts, lists and tuples. A dict of a class of its own is changed in place."""
    kind = type(tree)
    if kind is dict:
        return {key: mapped(fn, value) for key, value in tree.items()}
    if isinstance(tree, dict):
        for key, value in list(tree.items()):
            changed = mapped(fn, value)
            if changed is not value:
                tree[key] = changed
        return tree
    if isinstance(tree, (list, tuple)) and kind is not torch.Size:
        items = [mapped(fn, value) for value in tree]
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    return fn(tree)
