"""Plans: how each weight of a plain torch module is split, and on which pipeline stage it lives.

A plan maps patterns of names to styles; this file reads one. ``auto_plan.py`` derives one from a module. Pure: nothing
is moved here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, Replicate, Shard
from dtorch.runtime.layout import split
from dtorch.transport.errors import MeshError

TENSOR_AXIS, DATA_AXIS, STAGE_AXIS, EXPERT_AXIS = "tp", "dp", "pp", "ep"
SEQUENCE_AXES = ("ulysess_cp", "ring_cp")
BATCH_AXES = (DATA_AXIS, EXPERT_AXIS)
"""Names of mesh axes that mean something to ``distribute``."""

STYLES = ("colwise", "rowwise", "vocab", "expert", "replicate", "stage")


@dataclass(frozen=True)
class Style:
    """How a layer's weights are split.

    Attributes:
        kind: one of ``STYLES`` but "stage".
        axis: of the mesh; "" where the plan names none.
        block: cut at multiples of this many features only.
        head: a smaller block that will do where it gives the same pieces: what one attention head has.
        is_gathered: the layer's result is made whole right away.
        is_lenient: devices may be left without a piece; plans that a user writes are not.
    """

    kind: str
    axis: str | int = ""
    block: int = 1
    is_gathered: bool = False
    head: int = 1
    is_lenient: bool = False

    def over(self, axis: str | int) -> Style:
        return replace(self, axis=axis)

    def shard(self, dim: int, size: int, num_devices: int) -> Shard:
        """A shard of ``dim`` with the smallest block that gives these pieces: equal pieces should have one name."""
        pieces = split(0, size, num_devices, self.block)
        small = next(b for b in (1, self.head, self.block) if split(0, size, num_devices, b) == pieces)
        return Shard(dim, small)

    def dim(self, owner: torch.nn.Module, value: torch.Tensor) -> int | None:
        """The dim of a parameter that is split; None for one that every device holds."""
        if self.kind == "replicate" or not value.ndim:
            return None
        if self.kind == "vocab":
            return 0
        if self.kind == "expert":
            return 0 if value.ndim >= 2 else None
        outs, ins = (1, 0) if is_transposed(owner, value) else (0, 1)
        if self.kind == "colwise":
            return 0 if value.ndim == 1 else outs
        return None if value.ndim == 1 else ins


@dataclass
class Plan:
    """What becomes of a module.

    Attributes:
        styles: name of a submodule or parameter -> style, the later of two that concern one parameter counts.
        stages: name of a submodule or parameter -> pipeline stage; empty without stages.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)


def parse(text: Any) -> tuple[Style | None, int | None]:
    """A style and a stage: of ``"colwise"``, ``"colwise:axis"``, ``"colwise/64:axis"``, ``"stage:1"``, ``"stage:1 rowwise"``.

    Raises:
        ValueError: no such style.
    """
    style: Style | None = None
    stage: int | None = None
    words = text.split() if isinstance(text, str) else []
    for word in words:
        match = re.fullmatch(r"(\w+)(?:/(\d+))?(?::(\w+))?", word)
        kind, block, after = match.groups() if match is not None else ("", None, None)
        if kind == "stage" and stage is None and block is None and after is not None and after.isdigit():
            stage = int(after)
        elif kind in STYLES and kind != "stage" and style is None and block != "0":
            style = Style(kind, after or "", int(block or 1), kind in ("rowwise", "vocab"))
        else:
            words = []
            break
    if not words:
        raise ValueError(
            f"distribute: {text!r} is no style; there are {', '.join(STYLES[:-1])}, as in 'colwise/64:tp', and 'stage:1', "
            "alone or before one of these"
        )
    return style, stage


def read(module: torch.nn.Module, mesh: DeviceMesh, given: Mapping[Any, Any]) -> Plan:
    """The plan that a dict of patterns describes for ``module``, without what follows from attention's heads.

    Raises:
        ValueError: a pattern that matches nothing, an unknown style, a stage that the mesh does not have.
        MeshError: a style names an axis that the mesh lacks.
    """
    params = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names = [name for name, _ in module.named_modules() if name] + params
    holders = {name.rpartition(".")[0] for name in params} | set(params)
    plan = Plan()
    for key, text in given.items():
        pattern, matched = matches(key, names)
        style, stage = parse(text)
        if stage is not None:
            num = mesh.size(_axis(mesh, STAGE_AXIS, pattern))
            if stage >= num:
                raise ValueError(
                    f"distribute: the plan puts {pattern!r} on stage {stage}, but the mesh axis {STAGE_AXIS!r} has {num} "
                    f"stages, 0 to {num - 1}"
                )
            plan.stages = _later(plan.stages, dict.fromkeys(matched, stage))
        if style is None:
            continue
        if not any(name in holders for name in matched):
            raise ValueError(
                f"distribute: {pattern!r} matches only submodules without parameters of their own; for all that is in "
                f"them write {matched[0] + '.*'!r}"
            )
        axis = _axis(mesh, style.axis, pattern) if style.axis else usual_axis(mesh, style.kind)
        if axis is not None:
            plan.styles = _later(plan.styles, dict.fromkeys(matched, style.over(axis)))
    return plan


def _later(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Both, the last one last."""
    return {**{name: value for name, value in before.items() if name not in new}, **new}


def matches(pattern: Any, names: list[str]) -> tuple[str, list[str]]:
    """(the pattern's text, the names that it matches). Raises ValueError when there are none."""
    if isinstance(pattern, re.Pattern):
        text, matched = pattern.pattern, [name for name in names if pattern.fullmatch(name)]
    elif isinstance(pattern, str):
        text, matched = pattern, [name for name in names if fnmatchcase(name, pattern)]
    else:
        raise TypeError(f"distribute: a plan's keys are texts or compiled patterns, not {type(pattern).__name__}")
    if not matched:
        raise ValueError(f"distribute: {text!r} matches no submodule or parameter{near(text, names)}")
    return text, matched


def near(pattern: str, names: list[str]) -> str:
    """Names that look like ``pattern``, also by their last part."""
    close = get_close_matches(pattern, names, n=4, cutoff=0.6)
    if not close:
        last = pattern.rsplit(".", 1)[-1].strip("*")
        short: dict[str, str] = {}
        for name in names:
            short.setdefault(name.rsplit(".", 1)[-1], name)
        close = [short[key] for key in get_close_matches(last, list(short), n=4, cutoff=0.5)]
    listed = close or names[:4]
    if not listed:
        return "; it has none"
    return f"; {'near it are' if close else 'there are'} {', '.join(map(repr, listed))}"


# ---- axes


def usual_axis(mesh: DeviceMesh, kind: str = "colwise") -> str | int | None:
    """The axis that a style splits over when it names none; None when the mesh has no such axis."""
    if mesh.dim_names is None:
        return 0 if mesh.ndim == 1 else None
    wanted = (EXPERT_AXIS, TENSOR_AXIS) if kind == "expert" else (TENSOR_AXIS,)
    return next((name for name in wanted if name in mesh.dim_names), None)


def _axis(mesh: DeviceMesh, axis: str | int, pattern: str) -> str | int:
    if mesh.dim_names is None or axis not in mesh.dim_names:
        has = "no axis has a name" if mesh.dim_names is None else f"it has {', '.join(map(repr, mesh.dim_names))}"
        raise MeshError(f"distribute: the plan for {pattern!r} splits over the axis {axis!r}, which {mesh} lacks: {has}")
    return mesh.axis(axis) if isinstance(axis, int) else axis


# ---- placements


def placements(
    module: torch.nn.Module, plan: Plan, mesh_of: dict[str, DeviceMesh], mesh: DeviceMesh
) -> dict[str, tuple[Placement, ...]]:
    """Placements of the parameters that are not simply replicated.

    Args:
        mesh_of: name of a module -> its mesh; others are on ``mesh``.

    Raises:
        ValueError: a user's plan cuts something into more pieces than it has.
    """
    found: dict[str, tuple[Placement, ...]] = {}
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, style in plan.styles.items():
        owner, key = name, None
        if name in params:
            owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        here = mesh_of.get(owner, mesh)
        for own, value in part.named_parameters(recurse=False):
            if key is not None and own != key:
                continue
            full = f"{owner}.{own}" if owner else own
            found.pop(full, None)
            dim = style.dim(part, value)
            if dim is not None and _has(here, style.axis):
                where = _split(full, style, dim, value.shape[dim], here)
                if splits(here, style.axis):
                    found[full] = where
    return found


def _has(mesh: DeviceMesh, axis: str | int) -> bool:
    return isinstance(axis, int) or axis in (mesh.dim_names or ())


def splits(mesh: DeviceMesh, axis: str | int) -> bool:
    """Whether ``mesh`` has more than one device along ``axis``; along one device a split is the whole."""
    return _has(mesh, axis) and mesh.size(axis) > 1


def _split(name: str, style: Style, dim: int, size: int, mesh: DeviceMesh) -> tuple[Placement, ...]:
    axis = mesh.axis(style.axis)
    num = mesh.shape[axis]
    pieces = -(-size // style.block)
    if style.block > max(size, 1):
        raise ValueError(
            f"distribute: {name!r} should be cut at multiples of {style.block}, but its dim {dim} has {size} elements"
        )
    if pieces < num and not style.is_lenient:
        unit = f"{pieces} blocks of {style.block}" if style.block > 1 else f"{size} elements"
        raise ValueError(
            f"distribute: {name!r} cannot be split by {style.kind!r} over the {num} devices of the mesh axis "
            f"{style.axis!r}: its dim {dim} has {unit}; use a smaller axis, or 'replicate' for this one"
        )
    where = style.shard(dim, size, num)
    return tuple(where if i == axis else Replicate() for i in range(mesh.ndim))


# ---- layers


def sizes(part: torch.nn.Module) -> tuple[int, int] | None:
    """(input features, output features) of a layer that multiplies by one matrix."""
    weight = part._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return None
    ins, outs = (0, 1) if is_transposed(part, weight) else (1, 0)
    return int(weight.shape[ins]), int(weight.shape[outs])


def is_transposed(part: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether the weight is stored as [inputs, outputs], as in layers that call themselves 1-d convolutions."""
    return weight.ndim == 2 and not isinstance(part, torch.nn.Linear) and hasattr(part, "nf")


def keep_ties(module: torch.nn.Module, styles: dict[str, Style]) -> None:
    """A weight that several layers share is split in one way: all by its rows, or not at all."""
    sharing: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(value), []).append(name.rpartition(".")[0])
    for names in sharing.values():
        kinds = {styles[n].kind if n in styles else "" for n in names}
        if len(names) > 1 and not kinds <= {"vocab", "colwise"}:
            for n in names:
                styles.pop(n, None)
