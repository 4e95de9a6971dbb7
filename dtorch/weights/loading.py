"""A checkpoint into a module: into parameters that are on a mesh already, or while ``distribute`` puts them there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from dtorch.face import TorchTensor, faced
from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, Replicate, Shard
from dtorch.session import current_session
from dtorch.tensor import Tensor
from dtorch.weights.checkpoint import Checkpoint, Stored, open_checkpoint
from dtorch.weights.naming import Names, names_of
from dtorch.weights.progress import Progress
from dtorch.weights.reading import Reader


def load_into(
    module: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True, progress: bool = True
) -> Any:
    """Load a checkpoint into a module whose parameters are on a mesh: a ``dtorch.nn.Module``, or what ``distribute`` made.

    Values are converted to the dtype that a parameter has, and cut as it is placed. Each worker reads its own slices.

    Args:
        path: as for ``load_safetensors``.
        strict: names must match exactly; for tied parameters one of their names will do.
        progress: show a bar, in a terminal or notebook, if it takes a while.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``torch.nn.Module.load_state_dict`` returns them.

    Raises:
        RuntimeError: as torch raises it: names that differ (if strict), or shapes.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"load_into: expected a torch.nn.Module, got {type(module).__name__}")
    found = Match(open_checkpoint(path), module)
    found.check(strict)
    done: set[int] = set()
    with torch.no_grad(), Progress(found.size_bytes, "loading weights", progress) as bar:
        reader = Reader(found.checkpoint, current_session(), bar)
        for name, target in found.own.items():
            if id(target) not in done and found.has(name):
                done.add(id(target))
                _fill(found, reader, name, target)
    return _IncompatibleKeys(found.missing, found.unexpected)


def _fill(found: Match, reader: Reader, name: str, target: Any) -> None:
    native = target.native if isinstance(target, TorchTensor) else target
    if isinstance(native, Tensor):
        native.copy_(found.read(reader, name, native.device_mesh, native.placements, native.dtype))
    else:  # a plain tensor, which stayed with the client
        made = found.read(reader, name, DeviceMesh("cpu", [0]), (Replicate(),), target.dtype)
        target.copy_(made.to_torch())


class Match:
    """How a checkpoint fits a module.

    Attributes:
        own: name -> tensor of the module, tied ones under all their names.
        missing, unexpected: names in the module only, and in the checkpoint only.
    """

    def __init__(self, checkpoint: Checkpoint, module: torch.nn.Module) -> None:
        self.checkpoint = checkpoint
        self._module = module
        state = module.state_dict(keep_vars=True)
        self.own: dict[str, Any] = {n: v for n, v in state.items() if isinstance(v, (torch.Tensor, Tensor))}
        self._names: Names = names_of(checkpoint, module, self.own)
        self._made: dict[int, dict[str, Any]] = {}
        self._by_tensor: dict[int, str] = {}
        for name, value in self.own.items():
            if name in self._names.direct or name in self._names.recipes:
                self._by_tensor.setdefault(id(value), name)
        self.unexpected = self._names.unexpected
        self.missing = [n for n in self.own if not self.has(n) and not self._names.is_optional(n)]

    @property
    def size_bytes(self) -> int:
        stored = [*self._names.direct.values()]
        stored += [s for recipe in set(self._names.recipes.values()) for _, _, s in recipe.sources]
        return sum(s.size_bytes for s in stored)

    def has(self, name: str) -> bool:
        return name in self.own and id(self.own[name]) in self._by_tensor

    def check(self, strict: bool) -> None:
        """Raises RuntimeError, in torch's words, for what forbids to load."""
        problems = []
        if strict and self.unexpected:
            problems.append(f"Unexpected key(s) in state_dict: {_quoted(self.unexpected)}. ")
        if strict and self.missing:
            problems.append(f"Missing key(s) in state_dict: {_quoted(self.missing)}. ")
        for name, stored in self._names.direct.items():
            if stored.shape != tuple(self.own[name].shape):
                problems.append(_mismatch(name, stored.shape, self.own[name].shape))
        if problems:
            kind = type(self._module).__name__
            raise RuntimeError(f"Error(s) in loading state_dict for {kind}:\n\t" + "\n\t".join(problems))

    def read(
        self, reader: Reader, name: str, mesh: DeviceMesh, placements: Sequence[Placement], dtype: torch.dtype
    ) -> Tensor:
        """The value of a tensor that ``has`` knows, on a mesh."""
        name = self._by_tensor[id(self.own[name])]
        stored = self._names.direct.get(name)
        if stored is not None:
            whole = [Replicate() if p.is_partial() else p for p in placements]
            made = reader.read(stored, mesh, tuple(p.code for p in whole), dtype)
        else:
            made = self._computed(reader, name, mesh)
            if tuple(made.shape) != tuple(self.own[name].shape):
                raise RuntimeError(
                    f"Error(s) in loading state_dict for {type(self._module).__name__}:\n\t"
                    + _mismatch(name, tuple(made.shape), self.own[name].shape)
                )
            made = made if made.dtype == dtype else made.to(dtype)
        return made.redistribute(list(placements))

    def _computed(self, reader: Reader, name: str, mesh: DeviceMesh) -> Tensor:
        recipe = self._names.recipes[name]
        results = self._made.get(id(recipe))
        if results is None:

            def piece(stored: Stored) -> TorchTensor:
                # cut over all devices: no worker reads what another one reads
                codes = tuple(Shard(0).code if stored.shape else -1 for _ in range(mesh.ndim))
                return faced(reader.read(stored, mesh, codes))

            results = self._made[id(recipe)] = recipe.make(piece, self._module)
        made = results[name]
        return made.native if isinstance(made, TorchTensor) else current_session().upload(made, mesh, None)


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _mismatch(name: str, stored: Sequence[int], own: Sequence[int]) -> str:
    return (
        f"size mismatch for {name}: copying a param with shape {torch.Size(stored)} from checkpoint, the shape in current "
        f"model is {torch.Size(own)}."
    )


# ---- while a module is distributed


class Weights:
    """Where ``distribute`` takes the values of a module from, in place of the module's own.

    Args:
        path: as for ``load_safetensors``.
        module: about to be distributed; its parameters may be on the meta device.

    Raises:
        RuntimeError: names or shapes differ.
        ValueError: something has values neither in the module nor in the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], module: torch.nn.Module, progress: bool = True) -> None:
        self._match = Match(open_checkpoint(path), module)
        self._match.check(strict=True)
        _make_buffers(module, self._match)
        self._progress = Progress(self._match.size_bytes, "loading weights", progress)
        self._reader = Reader(self._match.checkpoint, current_session(), self._progress)

    def __enter__(self) -> Weights:
        self._progress.__enter__()
        return self

    def __exit__(self, *facts: Any) -> None:
        self._progress.__exit__(*facts)

    def place(self, name: str, value: torch.Tensor, mesh: DeviceMesh, where: Sequence[Placement] | None) -> Tensor:
        """The tensor that stands for ``value`` on the mesh."""
        if not self._match.has(name):
            return current_session().upload(value, mesh, where)
        return self._match.read(self._reader, name, mesh, where or [Replicate()] * mesh.ndim, value.dtype)


class Parts:
    """Where the values of several modules come from: each has a name, which stands before those of its tensors."""

    def __init__(self, sources: dict[str, Weights]) -> None:
        self._sources = sources

    def __enter__(self) -> Parts:
        for source in self._sources.values():
            source.__enter__()
        return self

    def __exit__(self, *facts: Any) -> None:
        for source in self._sources.values():
            source.__exit__(*facts)

    def place(self, name: str, value: torch.Tensor, mesh: DeviceMesh, where: Sequence[Placement] | None) -> Tensor:
        """The tensor that stands for ``value`` on the mesh."""
        part, _, rest = name.partition(".")
        source = self._sources.get(part)
        return current_session().upload(value, mesh, where) if source is None else source.place(rest, value, mesh, where)


def _make_buffers(module: torch.nn.Module, found: Match) -> None:
    """Give values to buffers on the meta device that no checkpoint holds, by the module's own ``_init_weights``."""
    init = getattr(module, "_init_weights", None)
    for prefix, owner in module.named_modules():
        lost = [
            key for key, value in owner._buffers.items()
            if value is not None and value.is_meta and not found.has(f"{prefix}.{key}" if prefix else key)
        ]  # fmt: skip
        if not lost:
            continue
        before = {}
        for key in lost:
            value = owner._buffers[key]
            assert value is not None
            made = owner._buffers[key] = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            before[key] = made._version
        if callable(init):
            init(owner)
        left = [key for key in lost if getattr(owner._buffers[key], "_version", 1) == before[key]]
        if left:
            name = f"{prefix}.{left[0]}" if prefix else left[0]
            raise ValueError(
                f"distribute: the buffer {name!r} is on the meta device and not in {str(found.checkpoint.path)!r}, so it has "
                "no values: build the module inside `with dtorch.empty_init():`, which keeps buffers, instead of "
                "`with torch.device('meta'):`"
            )
