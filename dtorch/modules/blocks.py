"""The repeated layers of a module, and which pipeline stage each of its parts belongs to. Pure: nothing is moved here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
"""Modules that hold others and are never called."""


def blocks(module: torch.nn.Module) -> list[str]:
    """Names of the layers that a model is a stack of, in order: the members of its outermost module lists."""
    found: list[str] = []
    for name, part in module.named_modules():
        if _is_list(part) and not inside(name, found):
            found += [f"{name}.{key}" if name else key for key, child in part.named_children() if _has_weights(child)]
    return found


def _is_list(part: torch.nn.Module) -> bool:
    """A list of modules, or a bare module that stands for one by the names of its members, as made of a checkpoint's."""
    if type(part) is torch.nn.Module:
        return bool(part._modules) and all(key.isdigit() for key in part._modules)
    return isinstance(part, torch.nn.ModuleList)


def inside(name: str, others: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``others`` or a part of one."""
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _has_weights(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def assign(num_blocks: int, num_stages: int) -> list[int]:
    """The stage of each block: neighbours together, as many in each stage as in the others, or one more."""
    cuts = [num_blocks * stage // num_stages for stage in range(num_stages + 1)]
    return [stage for stage, (start, stop) in enumerate(pairwise(cuts)) for _ in range(stop - start)]


def even_stages(module: torch.nn.Module, num_stages: int) -> dict[str, int]:
    """Name of a block -> stage.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    names = blocks(module)
    if len(names) < num_stages:
        raise ValueError(
            f"distribute: {type(module).__name__} is a stack of {len(names)} layers, which do not make {num_stages} pipeline "
            "stages; use a smaller mesh axis 'pp'"
        )
    return dict(zip(names, assign(len(names), num_stages), strict=True))


def all_stages(module: torch.nn.Module, given: dict[str, int]) -> dict[str, int]:
    """The stage of every module with parameters or buffers of its own.

    A module is where the innermost of ``given`` around it is; what none of them names goes with what is defined before it,
    and what comes first with the first stage there is.

    Args:
        given: name of a module or parameter -> stage.
    """
    named = {name.rpartition(".")[0] if not _is_module(module, name) else name: stage for name, stage in given.items()}
    found: dict[str, int] = {}
    latest = min(named.values(), default=0)
    shared: dict[int, int] = {}  # a weight that several modules share is on the stage of the first
    for name, part in module.named_modules():
        own = list(part.parameters(recurse=False))
        if not own and next(part.buffers(recurse=False), None) is None:
            continue
        around = [other for other in named if inside(name, [other]) or not other]
        if around:
            latest = named[max(around, key=len)]
        stage = next((shared[id(value)] for value in own if id(value) in shared), latest)
        for value in own:
            shared.setdefault(id(value), stage)
        found[name] = stage
    return found


def _is_module(module: torch.nn.Module, name: str) -> bool:
    part: torch.nn.Module | None = module
    for key in name.split(".") if name else ():
        part = part._modules.get(key) if part is not None else None
    return part is not None


def borders(module: torch.nn.Module, stages: dict[str, int]) -> dict[str, int]:
    """The outermost modules that are called and live on one stage with all their parts -> that stage."""
    found: dict[str, int] = {}
    for name, part in module.named_modules():
        if isinstance(part, LISTS) or inside(name, found):
            continue
        here = {stage for other, stage in stages.items() if not name or inside(other, [name])}
        if len(here) == 1:
            found[name] = here.pop()
            if not name:
                break
    return found


def stacked(module: torch.nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Name of a module -> the block it is in ("" outside of all), for ``names``."""
    own = blocks(module)
    return {name: next((block for block in own if inside(name, [block])), "") for name in names}
