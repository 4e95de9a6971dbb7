"""``python -m dtorch explain``: what to explain, from words on a command line."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from dtorch.forecast.explain import explain, explain_script
from dtorch.forecast.record import Explanation
from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.modules.plans import near
from dtorch.weights.pretrained import empty_module

AXES = {1: ("tp",), 2: ("dp", "tp"), 3: ("pp", "dp", "tp")}
"""Names that the axes of a mesh have by default."""


class UsageError(Exception):
    """The words make no sense; says which, and what would."""


def explain_target(
    target: str,
    mesh: str | None,
    axes: str | None,
    plan: str,
    inputs: Sequence[str],
    device: str = "cpu",
    arguments: Sequence[str] = (),
) -> Explanation:
    """Explain what a command line names.

    Args:
        target: "package.module:name", "path/to/script.py:name", a script ("path/to/script.py" or "package.module"), or a
            directory with config.json.
        mesh: "2x3".
        axes: "dp,tp".
        plan: "auto", "none", or JSON: {"pattern": "style"}.
        inputs: "name=2x16:int64" each; without a name they are positional.
        arguments: of a script.
    """
    where = mesh_of(mesh, axes, device) if mesh is not None else None
    given = inputs_of(inputs)
    path, _, name = target.partition(":") if not re.match(r"[A-Za-z]:[\\/]", target) else (target, "", "")
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise UsageError(f"{path!r} has no config.json, so it describes no model")
        return explain(empty_module(Path(path)), _needed(where), plan_of(plan), given)
    if not path.endswith(".py") and not name and not _is_module(path):
        raise UsageError(
            f"{target!r} is no directory and no module; write package.module:name, path/to/file.py:name, path/to/script.py, "
            "package.module or a directory"
        )
    sys.path.insert(0, str(Path(path).resolve().parent) if path.endswith(".py") else "")
    try:
        if not name:
            return _script(path, arguments, where, plan_of(plan), given)
        found = _attribute(_module(path), name)
        if not isinstance(found, torch.nn.Module) and not callable(found):
            raise UsageError(f"{target!r} is a {type(found).__name__}; expected a module or a function that makes one")
        return explain(found, where, plan_of(plan), given)
    finally:
        sys.path.pop(0)


def _needed(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        raise UsageError("say where the model would go: --mesh 2x3")
    return mesh


def _is_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except (ImportError, ValueError):
        return False


def _script(path: str, arguments: Sequence[str], mesh: DeviceMesh | None, plan: Any, inputs: Any) -> Explanation:
    """What a script does; or, if it calls no module, the one module that it defines."""
    is_file = path.endswith(".py")
    if is_file and not Path(path).is_file():
        raise UsageError(f"no such file: {path!r}")
    names: dict[str, Any] = {}

    def run() -> None:
        made = runpy.run_path(path, run_name="__main__") if is_file else runpy.run_module(path, run_name="__main__")
        names.update(made)

    before = sys.argv
    sys.argv = [path, *arguments]
    try:
        found = explain_script(run)
    finally:
        sys.argv = before
    modules = {name: value for name, value in names.items() if isinstance(value, torch.nn.Module)}
    if found.parameters or found.communication or not modules:
        return found
    if len(modules) > 1:
        raise UsageError(f"{path!r} defines several modules; name one: {', '.join(f'{path}:{name}' for name in modules)}")
    return explain(next(iter(modules.values())), mesh, plan, inputs)


def _module(path: str) -> Any:
    if not path.endswith(".py"):
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
                raise
            raise UsageError(f"no module {path!r}") from None
    if not Path(path).is_file():
        raise UsageError(f"no such file: {path!r}")
    return import_module(Path(path).stem)


def _attribute(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            held = vars(found) if hasattr(found, "__dict__") else {}
            names = [n for n in dir(found) if not n.startswith("_") and callable(held.get(n, len))]  # nothing is imported
            raise UsageError(f"{module.__name__} has no {name!r}{near(part, names)}")
        found = getattr(found, part)
    return found


def mesh_of(text: str, axes: str | None = None, device: str = "cpu") -> DeviceMesh:
    """``mesh_of("2x3", "dp,tp")``. Raises UsageError."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UsageError(f"a mesh is written as 2x3, got {text!r}")
    shape = tuple(map(int, text.split("x")))
    names = tuple(axes.split(",")) if axes else AXES.get(len(shape))
    if names is None or len(names) != len(shape):
        raise UsageError(f"the mesh {text} has {len(shape)} axes; name them, such as --axes dp,tp (got {axes or 'none'})")
    return init_device_mesh(device, shape, mesh_dim_names=names)


def plan_of(text: str) -> Any:
    """A plan as ``distribute`` takes it. Raises UsageError."""
    if text in ("auto", "none"):
        return None if text == "none" else "auto"
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise UsageError(f'a plan is auto, none or JSON such as {{"*.q_proj": "colwise"}}, got {text!r} ({error})') from None


def inputs_of(words: Sequence[str]) -> Any:
    """Example inputs; None when there are none. Raises UsageError."""
    named: dict[str, torch.Tensor] = {}
    others: list[torch.Tensor] = []
    for word in words:
        match = re.fullmatch(r"(?:(\w+)=)?(\d+(?:x\d+)*)?(?::(\w+))?", word)
        dtype = getattr(torch, match[3], None) if match is not None and match[3] else torch.float32
        if match is None or not isinstance(dtype, torch.dtype):
            raise UsageError(f"an input is written as name=2x16:int64, got {word!r}")
        made = torch.zeros([int(n) for n in match[2].split("x")] if match[2] else [], dtype=dtype)
        if match[1]:
            named[match[1]] = made
        else:
            others.append(made)
    if named and others:
        raise UsageError("give names to all inputs, or to none")
    return named or tuple(others) or None
