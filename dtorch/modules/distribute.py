"""``distribute(module, mesh, plan)``: a plain torch module on a mesh, as it is.

Its parameters and buffers become torch-faced tensors (``face.py``), cut as the plan says; the code of the module stays
the same and runs on the mesh. Placements decide speed and memory, never values: a plan can be wrong about what feeds
what, and the ops then move their inputs to where they can run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch

from dtorch.face import TorchTensor, faced
from dtorch.mesh import DeviceMesh
from dtorch.modules.around import Back, Enter, Gather, Leave, Move, SplitTokens
from dtorch.modules.auto_plan import make_plan
from dtorch.modules.blocks import all_stages, borders, inside
from dtorch.modules.experts import exchange_tokens
from dtorch.modules.plans import SEQUENCE_AXES, STAGE_AXIS, Plan, placements, sizes, splits
from dtorch.modules.replay import attach, is_on
from dtorch.placement import Placement
from dtorch.session import Session, current_session
from dtorch.tensor import Tensor

_MARK = "_dtorch_mesh"

M = TypeVar("M")


def distribute(
    module: M,
    device_mesh: DeviceMesh,
    plan: Mapping[Any, str] | str | None = "auto",
    *,
    weights: str | os.PathLike[str] | Source | None = None,
    progress: bool = True,
) -> M:
    """Put the parameters and buffers of a torch module on a mesh; it then runs there, called as before.

    Plain torch tensors that are given to it, and torch-faced ones that every device holds, are split along dim 0 over
    the axis "dp" (and "ep"), where the mesh has one and that dim is the batch; dtorch tensors keep their placements. What
    it returns is torch-faced: a ``torch.Tensor`` with the methods of ``dtorch.Tensor``, whole on every other axis.

    Axes with these names do the following: "tp" splits layers; "dp" splits the batch, and with it the two halves of
    classifier-free guidance; "ulysess_cp" and "ring_cp" split the tokens of hidden states (B, T, D) from the first layer
    of the model's stack on; "ep" splits stacked experts, and the batch as "dp" does; "pp" holds pipeline stages, the meshes
    ``device_mesh.unbind("pp")``, between which activations move by themselves. Results of a model in stages are on the
    last one's mesh.

    Layers whose forward is a straight line are recorded once and then put at once (docs/modules.md), unless DTORCH_STRAIGHT=0.

    Args:
        module: any ``torch.nn.Module``, or what holds some under ``components``, as a pipeline of diffusers does; it is
            changed in place.
        device_mesh: where it goes. Styles split over the axis "tp", or over the only axis of a mesh without names;
            where there is none, every device holds the whole.
        plan: ``{pattern: style}``, where a pattern is the name of a submodule or parameter, with ``*`` for any part
            (or a compiled regular expression for the whole name), and a style is

            * "colwise": output features are split; "rowwise": input features are, and the results added up;
            * "vocab": rows of an embedding are split; "expert": stacked experts (dim 0) are, over "ep" or else "tp";
            * "replicate": every device holds all;
            * "stage:1": it lives on pipeline stage 1; also before another style, as in "stage:1 colwise". What has no stage
              goes with what is defined before it.

            "colwise:axis" names another mesh axis, and "colwise/64" cuts at multiples of 64 only, such as the size of
            an attention head; attention is cut between heads anyway. Where several patterns match, the last one counts.
            "auto" makes a plan from the module, with as many layers on each stage. None replicates everything.
        weights: a checkpoint, as for ``dtorch.load_safetensors``, whose values are taken in place of the module's own. Then
            parameters may be on the meta device, and workers read their own slices.
        progress: show a bar, in a terminal or notebook, if weights take a while.

    Returns:
        The same module.

    Raises:
        RuntimeError: names or shapes of ``weights`` differ from the module's, in the words of ``load_state_dict``.
        ValueError: a pattern that matches nothing, an unknown style, a stage or a split into more parts than there are, a
            module that is on a mesh already.
        MeshError: a style names an axis that the mesh lacks.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"distribute: expected a DeviceMesh, got {type(device_mesh).__name__}")
    roots, holder = _roots(module)
    for root in roots.values():
        _check_new(root, has_values=weights is None)
    made = make_plan(holder, device_mesh, plan, list(roots))
    mesh_of = _stage_meshes(holder, made, device_mesh)
    wanted = placements(holder, made, mesh_of, device_mesh)
    session = current_session()
    placed: dict[int, TorchTensor] = {}  # tied parameters stay tied
    with _source(weights, holder, progress) as source:
        for name, owner in holder.named_modules():
            here = mesh_of.get(name, device_mesh)
            for members in (owner._parameters, owner._buffers):
                for key, value in members.items():
                    if value is not None:
                        full = f"{name}.{key}" if name else key
                        members[key] = _place(session, source, full, value, here, wanted.get(full), placed)
            _refresh(owner)
            style = made.styles.get(name)
            if style is not None and style.is_gathered and splits(here, style.axis):
                owner.register_forward_hook(Gather(style.axis))
            if style is not None and style.kind == "expert" and here.size(style.axis) > 1:
                exchange_tokens(owner)
    _hook(roots, holder, made, mesh_of, device_mesh)
    if is_on():
        attach(reversed(list(holder.modules())))
    return module


def _roots(module: Any) -> tuple[dict[str, torch.nn.Module], torch.nn.Module]:
    """The modules that are called, by name, and a module that has them all as parts."""
    if isinstance(module, torch.nn.Module):
        return {"": module}, module
    parts = getattr(module, "components", None)
    roots = {k: v for k, v in parts.items() if isinstance(v, torch.nn.Module)} if isinstance(parts, Mapping) else {}
    if not roots:
        raise TypeError(
            f"distribute: expected a torch.nn.Module, got {type(module).__name__}"
            + (", whose components hold none" if isinstance(parts, Mapping) else "")
        )
    return roots, torch.nn.ModuleDict(roots)


class Source(Protocol):
    """Where values come from, other than from the module itself."""

    def place(self, name: str, value: torch.Tensor, mesh: DeviceMesh, where: Sequence[Placement] | None) -> Tensor: ...
    def __enter__(self) -> Source: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...


def _source(weights: str | os.PathLike[str] | Source | None, module: torch.nn.Module, progress: bool) -> Any:
    if weights is None:
        return nullcontext()
    if isinstance(weights, (str, os.PathLike)):
        from dtorch.weights.loading import Weights

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
        if torch.nn.parameter.is_lazy(value):
            raise ValueError(f"distribute: {name!r} has no shape yet: call the module once before")
        if value.is_meta and has_values:
            raise ValueError(
                f"distribute: {name!r} is on the meta device, so it has no values: give weights=, or load them first"
            )


def _stage_meshes(holder: torch.nn.Module, plan: Plan, mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Name of a module with tensors of its own -> the mesh of its stage; empty without stages."""
    if not plan.stages:
        return {}
    meshes = mesh.unbind(STAGE_AXIS)
    return {name: meshes[stage] for name, stage in all_stages(holder, plan.stages).items()}


# ---- moving in


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


def _hook(
    roots: dict[str, torch.nn.Module], holder: torch.nn.Module, plan: Plan, mesh_of: dict[str, DeviceMesh], mesh: DeviceMesh
) -> None:
    names = mesh.dim_names or ()
    if any(name in names and mesh.size(name) > 1 for name in SEQUENCE_AXES):
        for part in holder.modules():
            if isinstance(part, torch.nn.ModuleList):
                for layer in part:
                    if sum(sizes(inner) is not None for inner in layer.modules()) > 1:
                        layer.register_forward_pre_hook(SplitTokens(), with_kwargs=True)
    stages = {name: mesh.unbind(STAGE_AXIS).index(here) for name, here in mesh_of.items()}
    for name, stage in borders(holder, stages).items():
        if name and name not in roots:
            part = holder.get_submodule(name)
            move = Move(mesh.unbind(STAGE_AXIS)[stage])
            part.register_forward_pre_hook(move, with_kwargs=True, prepend=True)
            part.register_forward_hook(Back(move), always_call=True)
    for prefix, root in roots.items():
        here = next((m for name, m in mesh_of.items() if not prefix or inside(name, [prefix])), mesh)
        root.__dict__[_MARK] = mesh
        enter = Enter(here)
        root.register_forward_pre_hook(enter, with_kwargs=True)
        root.register_forward_hook(Leave(enter), always_call=True)
