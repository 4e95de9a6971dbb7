"""Modules straight from disk: built without memory for their weights, which workers read slice by slice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from dtorch.mesh import DeviceMesh
from dtorch.modules.distribute import distribute
from dtorch.tensor import Tensor
from dtorch.weights.loading import Parts, Weights

_empty: ContextVar[bool] = ContextVar("dtorch_empty_init", default=False)


@contextmanager
def empty_init() -> Iterator[None]:
    """Inside, torch modules are built with their parameters on the meta device: no memory, and nothing to initialise.

    Buffers are real, as they mostly are not saved. Belongs to the running task.
    """
    handle = register_module_parameter_registration_hook(_to_meta)
    token = _empty.set(True)
    try:
        yield
    finally:
        _empty.reset(token)
        handle.remove()


def _to_meta(module: torch.nn.Module, name: str, param: Any) -> Any:
    if not _empty.get() or not isinstance(param, torch.nn.Parameter) or isinstance(param, Tensor) or param.is_meta:
        return None
    made = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def from_pretrained(
    directory: str | os.PathLike[str],
    device_mesh: DeviceMesh,
    plan: Any = "auto",
    *,
    model_class: type | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Any:
    """A model of transformers or diffusers from a directory that its ``save_pretrained`` wrote (or a download), on a mesh.

    The client never holds the weights: the module is built empty, and each worker reads its own slices.

    Args:
        directory: with ``config.json`` and safetensors; or a pipeline's, with ``model_index.json``.
        device_mesh: where the parameters live.
        plan: as for ``dtorch.distribute``; for all models of a pipeline.
        model_class: a class, or its name in the library; the one that the config names by default.
        dtype: of the parameters; what the config says by default.
        progress: show a bar, in a terminal or notebook, if it takes a while.

    Returns:
        The module as ``dtorch.distribute`` returns it, in eval mode; or the pipeline.

    Raises:
        FileNotFoundError: something is not there.
        ValueError: the config names no class that is known here.
        RuntimeError: names or shapes differ from those of the weights, as torch raises it.
    """
    folder = Path(directory)
    if (folder / "model_index.json").is_file():
        return _pipeline(folder, device_mesh, plan, dtype, progress)
    if not (folder / "config.json").is_file():
        there = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) if folder.is_dir() else "no such directory"
        raise FileNotFoundError(f"{str(folder)!r} has no config.json: {there or 'it is empty'}")
    module = empty_module(folder, model_class, dtype)
    return distribute(module, device_mesh, plan, weights=folder, progress=progress).eval()


def empty_module(folder: Path, model_class: type | str | None = None, dtype: torch.dtype | None = None) -> Any:
    """The module that a directory's config describes, its parameters on the meta device."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    if "_class_name" in config:
        return _of_diffusers(folder, model_class or config["_class_name"], dtype)
    return _of_transformers(folder, model_class, dtype)


def _of_transformers(folder: Path, model_class: type | str | None, dtype: torch.dtype | None) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    named = getattr(config, "architectures", None) or []
    wanted = model_class or (named[0] if named else None)
    cls = _class(transformers, wanted, folder) if wanted else transformers.AutoModel
    with empty_init():
        if hasattr(cls, "_from_config"):
            module = cls._from_config(config, **({} if dtype is None else {"dtype": dtype}))
        else:
            module = cls.from_config(config, **({} if dtype is None else {"dtype": dtype}))
    if (folder / "generation_config.json").is_file() and getattr(module, "generation_config", None) is not None:
        module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return module


def _of_diffusers(folder: Path, model_class: type | str, dtype: torch.dtype | None) -> Any:
    import diffusers

    cls: Any = _class(diffusers, model_class, folder)
    with empty_init():
        module = cls.from_config(cls.load_config(folder))
    return module if dtype is None else module.to(dtype)


def _class(library: Any, wanted: type | str, folder: Path) -> Any:
    found = getattr(library, wanted, None) if isinstance(wanted, str) else wanted
    if found is None:
        raise ValueError(
            f"{str(folder)!r} holds a {wanted}, which {library.__name__} {library.__version__} does not have; "
            "give model_class="
        )
    return found


def _pipeline(folder: Path, mesh: DeviceMesh, plan: Any, dtype: torch.dtype | None, progress: bool) -> Any:
    """The models of a pipeline empty, everything else by diffusers; then the whole onto the mesh."""
    import diffusers

    index = msgspec.json.decode((folder / "model_index.json").read_bytes(), type=dict[str, Any])
    parts = {}
    for part, entry in index.items():
        if isinstance(entry, list) and len(entry) > 1 and any((folder / part).glob("*.safetensors")):
            parts[part] = empty_module(folder / part, entry[1], dtype).eval()
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **parts)  # type: ignore[no-untyped-call]  # it has no types
    sources = {part: Weights(folder / part, module, progress) for part, module in parts.items()}
    return distribute(pipe, mesh, plan, weights=Parts(sources))
