"""Weights from safetensors files onto a mesh. Workers read their own slices; the client reads headers only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from sys import _getframe
from typing import Any

import torch

from dtorch.frames import source
from dtorch.mesh import DeviceMesh
from dtorch.modules.auto_plan import make_plan
from dtorch.modules.plans import near
from dtorch.modules.plans import placements as split_of
from dtorch.placement import Placement, Replicate, normalize
from dtorch.runtime.signature import Signature
from dtorch.runtime.template import dtype_of
from dtorch.session import Session, current_session
from dtorch.spec import Spec, contiguous_stride
from dtorch.tensor import Tensor
from dtorch.transport.messages import Definition
from dtorch.weights.checkpoint import Checkpoint, Stored, open_checkpoint
from dtorch.weights.progress import Progress

_new = object.__new__
Plan = dict[Any, Any] | str | None


class Reader:
    """Records reads from one checkpoint.

    Args:
        checkpoint: where from.
        session: whose workers read.
        progress: told of every tensor that was asked for.
    """

    def __init__(self, checkpoint: Checkpoint, session: Session, progress: Progress | None = None) -> None:
        self.checkpoint = checkpoint
        self._session = session
        self._progress = progress
        self._signatures: dict[tuple[Spec, str, str], Signature] = {}

    def read(
        self, stored: Stored, mesh: DeviceMesh, codes: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor of the checkpoint on a mesh; every worker reads its own part, later, in program order.

        Args:
            codes: one placement code a mesh axis; nothing may be pending.
            dtype: what it is converted to on the way; as stored by default.
        """
        session = self._session
        made_of = dtype or dtype_of(stored.dtype)
        spec = session.spec(stored.shape, contiguous_stride(stored.shape), made_of, mesh, codes)
        key = (spec, stored.path, stored.dtype)
        sig = self._signatures.get(key)
        if sig is None:
            sig = self._signatures[key] = _define(session, spec, stored)
        recorder = sig.recorder
        slot = recorder.slot()
        sig.put(((sig.id, slot, stored.entry.start), *source(_getframe(1))))
        made = _new(Tensor)
        made._spec = spec
        made._slot = slot
        if recorder.expects_after_put:
            recorder.after_put()
        if self._progress is not None:
            self._progress.add(stored.size_bytes)
        return made


def _define(session: Session, spec: Spec, stored: Stored) -> Signature:
    params = {"path": stored.path, "size_bytes": stored.file_bytes, "stored": stored.dtype}

    def build(number: int) -> Definition:
        return Definition(number, "dtorch.read", "read", [["n", 0]], {}, (), (spec.layout,), (), params)

    return session.define(build, (spec,), f"dtorch.load_safetensors({os.path.basename(stored.path)!r})", ())


# ---- into a dict


def load_safetensors(
    path: str | os.PathLike[str],
    device_mesh: DeviceMesh,
    plan: Plan = None,
    *,
    dtype: torch.dtype | None = None,
    names: Callable[[str], bool] | Sequence[str] | None = None,
    progress: bool = True,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint on a mesh. Each worker reads the slices of its devices, and nothing else.

    Returns at once; values arrive as those of ops do. ``dtorch.statistics().workers`` counts "bytes_read" by worker.

    Args:
        path: a ``.safetensors`` file, an index (``*.index.json``), or a directory that holds one of the two. Where workers
            run on other hosts, it must be there under the same path.
        device_mesh: where the tensors live.
        plan: ``{pattern: style}`` as for ``dtorch.distribute``, where a pattern matches names of tensors or what stands
            before their last dot; a list of placements will do in place of a style. "auto" goes by names and shapes. None
            replicates.
        dtype: what floating-point tensors are converted to on the way; as stored by default.
        names: which tensors to load: their names, or a function of a name. All by default.
        progress: show a bar, in a terminal or notebook, if it takes a while.

    Returns:
        Name -> tensor. Names that share memory (see ``save_safetensors``) share one tensor.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is no safetensors file; a pattern of the plan, or a name, matches nothing.
        OpError: (where a value is asked for) a worker could not read its part.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"load_safetensors: expected a DeviceMesh, got {type(device_mesh).__name__}")
    checkpoint = open_checkpoint(path)
    chosen = _chosen(checkpoint, names)
    placed = placements_of({name: _of(checkpoint, name) for name in chosen}, device_mesh, plan)
    whole = (Replicate(),) * device_mesh.ndim
    made: dict[str, Tensor] = {}
    by_owner: dict[tuple[str, tuple[Placement, ...]], Tensor] = {}
    with Progress(sum(_of(checkpoint, n).size_bytes for n in chosen), "loading weights", progress) as bar:
        reader = Reader(checkpoint, current_session(), bar)
        for name in chosen:
            stored, where = _of(checkpoint, name), placed.get(name, whole)
            own = (checkpoint.aliases.get(name, name), where)
            if own not in by_owner:
                by_owner[own] = reader.read(stored, device_mesh, _codes(where), _converted(stored, dtype))
            made[name] = by_owner[own]
    return made


def _of(checkpoint: Checkpoint, name: str) -> Stored:
    stored = checkpoint.get(name)
    assert stored is not None, name
    return stored


def _chosen(checkpoint: Checkpoint, names: Any) -> list[str]:
    every = checkpoint.names()
    if names is None:
        return every
    if callable(names):
        return [name for name in every if names(name)]
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in every:
            raise ValueError(f"{str(checkpoint.path)!r} has no tensor {name!r}{near(name, every)}")
    return wanted


def _codes(placements: Sequence[Placement]) -> tuple[int, ...]:
    return tuple(p.code for p in placements)


def _converted(stored: Stored, dtype: torch.dtype | None) -> torch.dtype | None:
    """What a tensor becomes: only floating-point ones are converted."""
    return dtype if dtype is not None and dtype_of(stored.dtype).is_floating_point else None


def placements_of(tensors: dict[str, Stored], mesh: DeviceMesh, plan: Plan) -> dict[str, tuple[Placement, ...]]:
    """Name -> placements, for those that the plan splits. Raises as ``distribute`` does, and for what does not fit."""
    styles, given = plan, {}
    if isinstance(plan, dict):
        styles = {pattern: style for pattern, style in plan.items() if isinstance(style, str)}
        given = {pattern: where for pattern, where in plan.items() if not isinstance(where, str)}
    skeleton = _skeleton(tensors)
    found = split_of(skeleton, make_plan(skeleton, mesh, styles, ()), {}, mesh) if tensors else {}
    for pattern, where in given.items():
        matched = _matching(pattern, tensors)
        for name in matched:
            found[name] = normalize(where, len(tensors[name].shape), mesh)
            if any(p.is_partial() for p in found[name]):
                raise ValueError(f"load_safetensors: {name!r} cannot be loaded as {where}: a file holds no summands")
    return found


def _matching(pattern: Any, tensors: dict[str, Stored]) -> list[str]:
    if isinstance(pattern, re.Pattern):
        found = [name for name in tensors if pattern.fullmatch(name)]
    else:
        found = [n for n in tensors if fnmatchcase(n, pattern) or fnmatchcase(n.rpartition(".")[0], pattern)]
    if not found:
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        names = [*dict.fromkeys(name.rpartition(".")[0] for name in tensors if "." in name), *tensors]
        raise ValueError(f"load_safetensors: {text!r} matches no tensor{near(text, names)}")
    return found


def _skeleton(tensors: dict[str, Stored]) -> torch.nn.Module:
    """Modules without values under the names of a checkpoint, so that a plan can be applied to it."""
    with torch.device("meta"):
        root = torch.nn.Module()
        for name, stored in tensors.items():
            owner = root
            *path, last = name.split(".")
            for part in path:
                owner = owner._modules.setdefault(part, torch.nn.Module())  # type: ignore[assignment]  # never None
            value = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
            owner._parameters[last] = torch.nn.Parameter(value, requires_grad=False)
    return root
