"""``distribute(module, mesh, plan)``: a plain torch module on a mesh, as it is.

Its parameters and buffers become torch-faced tensors (``face.py``), cut as the plan says; the code of the module stays
the same and runs on the mesh. Placements decide speed and memory, never values: a plan can be wrong about what feeds
what, and the ops then move their inputs to where they can run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

import torch

from dtorch.face import TorchTensor, faced
from dtorch.interop import factories_off, factories_on
from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, Replicate, Shard
from dtorch.plans import Style, auto_plan, parse, styles_of
from dtorch.session import Session, current_session
from dtorch.tensor import Tensor
from dtorch.transport.errors import MeshError

TENSOR_AXIS, DATA_AXIS = "tp", "dp"
_MARK = "_dtorch_mesh"


M = TypeVar("M", bound=torch.nn.Module)


def distribute(
    module: M,
    device_mesh: DeviceMesh,
    plan: dict[str, str] | dict[re.Pattern[str], str] | str | None = "auto",
    *,
    weights: str | os.PathLike[str] | Source | None = None,
    progress: bool = True,
) -> M:
    """Put the parameters and buffers of a torch module on a mesh; it then runs there, called as before.

    Plain torch tensors that are given to it are split along dim 0 over the axis "dp", where the mesh has one, and
    replicated on others; dtorch tensors keep their placements. What it returns is torch-faced: a ``torch.Tensor`` with
    the methods of ``dtorch.Tensor``, whole on every axis but "dp".

    Args:
        module: any ``torch.nn.Module``; it is changed in place.
        device_mesh: where it goes. Styles split over the axis "tp", or over the only axis of a mesh without names;
            where there is none, every device holds the whole.
        plan: ``{pattern: style}``, where a pattern is the name of a submodule or parameter, with ``*`` for any part
            (or a compiled regular expression for the whole name), and a style is "colwise" (output features are split),
            "rowwise" (input features are split, the results added up), "vocab" (rows of an embedding are split) or
            "replicate"; "colwise:axis" names another mesh axis, and "colwise/64" cuts at multiples of 64 only, such as
            the size of an attention head. Where several patterns match, the last one counts. "auto" makes a plan from
            the module. None replicates everything.
        weights: a checkpoint, as for ``dtorch.load_safetensors``, whose values are taken in place of the module's own. Then
            parameters may be on the meta device, and workers read their own slices.
        progress: show a bar, in a terminal or notebook, if weights take a while.

    Returns:
        The same module.

    Raises:
        RuntimeError: names or shapes of ``weights`` differ from the module's, in the words of ``load_state_dict``.
        ValueError: a pattern that matches nothing, an unknown style, or a module that is on a mesh already.
        MeshError: a style names an axis that the mesh lacks.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"distribute: expected a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"distribute: expected a DeviceMesh, got {type(device_mesh).__name__}")
    _check_new(module, has_values=weights is None)
    styles = _styles(module, device_mesh, plan)
    session = current_session()
    placed: dict[int, TorchTensor] = {}  # tied parameters stay tied
    wanted = _wanted(module, device_mesh, styles)
    with _source(weights, module, progress) as source:
        for name, owner in module.named_modules():
            for members in (owner._parameters, owner._buffers):
                for key, value in members.items():
                    if value is not None:
                        full = f"{name}.{key}" if name else key
                        members[key] = _place(session, source, full, value, device_mesh, wanted.get(full), placed)
            _refresh(owner)
            style = styles.get(name)
            if style is not None and style.is_gathered:
                owner.register_forward_hook(_Gather(device_mesh.axis(style.axis)))
    module.__dict__[_MARK] = device_mesh
    enter = _Enter(device_mesh)
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(_Leave(enter), always_call=True)
    return module


class Source(Protocol):
    """Where values come from, other than from the module itself."""

    def place(self, name: str, value: torch.Tensor, mesh: DeviceMesh, where: Sequence[Placement] | None) -> Tensor: ...
    def __enter__(self) -> Source: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...


def _source(weights: str | os.PathLike[str] | Source | None, module: torch.nn.Module, progress: bool) -> Any:
    if weights is None:
        return nullcontext()
    if isinstance(weights, (str, os.PathLike)):
        from dtorch.loading import Weights

        return Weights(weights, module, progress)
    return weights


def _check_new(module: torch.nn.Module, has_values: bool) -> None:
    for name, part in module.named_modules():
        mesh = part.__dict__.get(_MARK)
        if mesh is not None:
            which = f"its part {name!r}" if name else "it"
            raise ValueError(f"distribute: {type(module).__name__}: {which} is distributed already, over {mesh}")
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(value, (Tensor, TorchTensor)):
            raise ValueError(f"distribute: {name!r} is on a mesh already, {value.device_mesh}")
        if value.is_meta and has_values:
            raise ValueError(
                f"distribute: {name!r} is on the meta device, so it has no values: give weights=, or load them first"
            )


# ---- which style, which placement


def _styles(module: torch.nn.Module, mesh: DeviceMesh, plan: Any) -> dict[str, Style]:
    """Name of a submodule or parameter -> style; the axis is one that the mesh has."""
    if plan is None:
        return {}
    axis = _tensor_axis(mesh)
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f"distribute: plan must be a dict, 'auto' or None, not {plan!r}")
        return {} if axis is None else auto_plan(module, axis)
    if not isinstance(plan, dict):
        raise TypeError(f"distribute: plan must be a dict, 'auto' or None, not {type(plan).__name__}")
    params = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names = [name for name, _ in module.named_modules() if name] + params
    holders = {name.rpartition(".")[0] for name in params} | set(params)
    found: dict[str, Style] = {}
    for pattern, text in plan.items():
        if isinstance(pattern, re.Pattern):
            matched, pattern = [name for name in names if pattern.fullmatch(name)], pattern.pattern
        else:
            matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"distribute: {pattern!r} matches no submodule or parameter{_near(pattern, names)}")
        if not any(name in holders for name in matched):
            raise ValueError(
                f"distribute: {pattern!r} matches only submodules without parameters of their own; for all that is in "
                f"them write {matched[0] + '.*'!r}"
            )
        style = parse(text)
        if style.axis:
            _check_axis(mesh, style.axis, pattern)
        elif axis is not None:
            style = style.over(axis)
        else:
            continue
        for name in matched:
            found.pop(name, None)  # the last one comes last
            found[name] = style
    return styles_of(module, found)


def _near(pattern: str, names: list[str]) -> str:
    """Names that look like ``pattern``, also by their last part."""
    close = get_close_matches(pattern, names, n=4, cutoff=0.6)
    if not close:
        last = pattern.rsplit(".", 1)[-1].strip("*")
        short: dict[str, str] = {}
        for name in names:
            short.setdefault(name.rsplit(".", 1)[-1], name)
        close = [short[key] for key in get_close_matches(last, list(short), n=4, cutoff=0.5)]
    listed = close or names[:4]
    return f"; {'near it are' if close else 'there are'} {', '.join(map(repr, listed))}"


def _tensor_axis(mesh: DeviceMesh) -> str | int | None:
    if mesh.dim_names is None:
        return 0 if mesh.ndim == 1 else None
    return TENSOR_AXIS if TENSOR_AXIS in mesh.dim_names else None


def _check_axis(mesh: DeviceMesh, axis: str | int, pattern: str) -> None:
    if mesh.dim_names is None or axis not in mesh.dim_names:
        raise MeshError(f"distribute: the plan for {pattern!r} splits over the axis {axis!r}, which {mesh} lacks")


def _wanted(
    module: torch.nn.Module, mesh: DeviceMesh, styles: dict[str, Style]
) -> dict[str, tuple[Placement, ...]]:
    """Placements of the parameters that are not simply replicated."""
    found: dict[str, tuple[Placement, ...]] = {}
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        owner, key = name, None
        if name in params:
            owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        for own, value in part.named_parameters(recurse=False):
            if key is None or own == key:
                full = f"{owner}.{own}" if owner else own
                dim = style.dim(part, own, value)
                found.pop(full, None)
                if dim is not None:
                    axis = mesh.axis(style.axis)
                    if style.block > max(value.shape[dim], 1):
                        raise ValueError(
                            f"distribute: {full!r} should be cut at multiples of {style.block}, but its dim {dim} has "
                            f"{value.shape[dim]} elements"
                        )
                    where = style.shard(dim, value.shape[dim], mesh.shape[axis])
                    found[full] = tuple(where if i == axis else Replicate() for i in range(mesh.ndim))
    return found


def _place(
    session: Session,
    source: Source | None,
    name: str,
    value: torch.Tensor,
    mesh: DeviceMesh,
    where: tuple[Placement, ...] | None,
    placed: dict[int, TorchTensor],
) -> TorchTensor:
    made = placed.get(id(value))
    if made is None:
        if source is None:
            native = session.upload(value.detach(), mesh, where)
        else:
            native = source.place(name, value.detach(), mesh, where)
        if isinstance(value, torch.nn.Parameter):
            native._spec = session.respec(native._spec, requires_grad=value.requires_grad, is_param=True)
        made = placed[id(value)] = faced(native)
        made.__dict__.update(value.__dict__)
        if isinstance(value, torch.nn.Parameter):
            made._is_param = True
    return made


def _refresh(owner: torch.nn.Module) -> None:
    """Recurrent layers keep a list of their parameters beside."""
    renew = owner.__dict__.get("_flat_weights") and getattr(owner, "_init_flat_weights", None)
    if renew:
        renew()


# ---- around a call


class _Gather:
    """A forward hook: the result, or the first of several, is whole along one mesh axis."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        if type(out) is TorchTensor:
            return _whole(out, (self.axis,))
        return out


class _Enter:
    """A forward pre-hook: plain and native tensors among the arguments get the torch face."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        names = mesh.dim_names or ()
        self.data_axis = names.index(DATA_AXIS) if DATA_AXIS in names else None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        factories_on(self.mesh, self)  # before all that may fail: the other hook is called in any case
        for name, given in (*enumerate(args), *kwargs.items()):
            for value in _tensors(given):
                if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_meta):
                    what = "on the meta device" if value.is_meta else f"of layout {value.layout}"
                    raise TypeError(
                        f"{type(module).__name__} on a mesh: argument {name!r} is a tensor {what}; only dense tensors "
                        "with values can be put there"
                    )
        first = next((t for t in _tensors((args, kwargs)) if t.ndim), None)
        num_rows = first.shape[0] if first is not None else 0

        def enter(value: Any) -> Any:
            return self._enter(value, num_rows) if isinstance(value, (torch.Tensor, Tensor)) else value

        return _map(enter, args), _map(enter, kwargs)

    def _enter(self, value: Any, num_rows: int) -> TorchTensor:
        if isinstance(value, (TorchTensor, Tensor)):
            made = value if isinstance(value, TorchTensor) else faced(value)
            return made if made.device_mesh == self.mesh else made.redistribute(device_mesh=self.mesh)
        where: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.data_axis is not None and value.ndim and value.shape[0] == num_rows and num_rows > 1:
            where[self.data_axis] = Shard(0)
        return faced(current_session().upload(value.detach(), self.mesh, where))


class _Leave:
    """A forward hook: results are whole on every axis but "dp", and no summands are left."""

    def __init__(self, enter: _Enter) -> None:
        self.enter = enter

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> Any:
        factories_off(self.enter)
        axes = tuple(i for i in range(self.enter.mesh.ndim) if i != self.enter.data_axis)

        def leave(value: Any) -> Any:
            return _whole(value, axes) if type(value) is TorchTensor else value

        return _map(leave, out)


def _whole(value: TorchTensor, axes: tuple[int, ...]) -> TorchTensor:
    """``value`` replicated along ``axes``, and summed up along others."""
    placements = value.placements
    wanted = tuple(Replicate() if i in axes or p.is_partial() else p for i, p in enumerate(placements))
    return value if wanted == placements else value.redistribute(wanted)


def _tensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (torch.Tensor, Tensor)):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` of every leaf of dicts, lists and tuples. A dict of a class of its own is changed in place."""
    kind = type(tree)
    if kind is dict:
        return {key: _map(fn, value) for key, value in tree.items()}
    if isinstance(tree, dict):
        for key, value in list(tree.items()):
            changed = _map(fn, value)
            if changed is not value:
                tree[key] = changed
        return tree
    if isinstance(tree, (list, tuple)) and kind is not torch.Size:
        items = [_map(fn, value) for value in tree]
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    return fn(tree)
