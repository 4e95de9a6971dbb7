"""Which tensor of a checkpoint is which tensor of a module.

Mostly the one of the same name. A model saved within a larger one has a prefix more, or less. A library may store tensors
under other names, or in other pieces, than its modules have (experts one by one, a fused projection in parts): transformers
says so in tables of its own, which are used here as they are; what they compute runs on the mesh.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch.weights.checkpoint import Checkpoint, Stored


@dataclass(eq=False)
class Recipe:
    """Tensors of a module that are computed from several stored ones.

    Attributes:
        converter: of transformers: collects tensors, then gives a dict of results.
        sources: (its pattern, what is stored).
        target: name in the module under which it was met first.
    """

    converter: Any
    target: str
    sources: list[tuple[str, str, Stored]] = field(default_factory=list)

    def make(self, read: Callable[[Stored], Any], module: torch.nn.Module) -> dict[str, Any]:
        """Name in the module -> tensor. ``read`` gives a torch-faced tensor of what is stored."""
        for pattern, name, stored in self.sources:
            self.converter.add_tensor(self.target, name, pattern, read(stored))
        made = self.converter.convert(self.target, model=module, config=getattr(module, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class Names:
    """Where the tensors of a module come from.

    Attributes:
        direct: name in the module -> the stored tensor that it is.
        recipes: name in the module -> how it is computed.
        unexpected: names in the checkpoint that belong to nothing.
        optional: patterns of names that a module can do without.
    """

    direct: dict[str, Stored] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    optional: tuple[str, ...] = ()

    def is_optional(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.optional)


def names_of(checkpoint: Checkpoint, module: torch.nn.Module, own: dict[str, Any]) -> Names:
    """Find the tensors of ``module`` (name -> tensor: ``own``) in a checkpoint."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(module, transformers.PreTrainedModel):
        return _of_transformers(checkpoint, module, own)
    renamed = _prefix(checkpoint, own)
    direct = {name: stored for name in own if (stored := checkpoint.get(renamed(name))) is not None}
    used = {renamed(name) for name in own}
    left = [name for name in checkpoint.tensors if name not in used and not _is_tied(checkpoint, name, used)]
    return Names(direct, {}, left)


def _is_tied(checkpoint: Checkpoint, name: str, used: set[str]) -> bool:
    """Whether a stored tensor is used under another of its names."""
    return any(kept == name and alias in used for alias, kept in checkpoint.aliases.items())


def _prefix(checkpoint: Checkpoint, own: dict[str, Any]) -> Callable[[str], str]:
    """Name in the module -> name in the checkpoint, where all names of one side lack the first part of the other's."""
    names = checkpoint.names()
    if not any(name in own for name in names):
        for head in sorted({name.partition(".")[0] for name in names}):
            if any(f"{head}.{name}" in names for name in own):
                return lambda name: f"{head}.{name}"
        for head in sorted({name.partition(".")[0] for name in own}):
            if any(f"{head}.{name}" in own for name in names):
                return lambda name: name.partition(".")[2] if name.startswith(head + ".") else name
    return lambda name: name


def _of_transformers(checkpoint: Checkpoint, module: Any, own: dict[str, Any]) -> Names:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = module.base_model_prefix
    found = Names(optional=tuple(getattr(module, "_keys_to_ignore_on_load_missing", None) or ()))
    ignored = tuple(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    made: dict[str, Recipe] = {}
    for name in sorted(checkpoint.names(), key=dot_natural_key):
        stored = checkpoint.get(name)
        assert stored is not None
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        if target not in own:
            if not any(re.search(text, name) for text in ignored) and name not in checkpoint.aliases:
                found.unexpected.append(name)
        elif pattern is None:
            found.direct[target] = stored
        else:
            recipe = made.get(target)
            if recipe is None:
                recipe = made[target] = Recipe(deepcopy(by_pattern[pattern]), target)
            recipe.sources.append((pattern, name, stored))
            for result in _targets(recipe.converter, target, own):
                found.recipes[result] = recipe
    return found


def _targets(converter: Any, first: str, own: dict[str, Any]) -> list[str]:
    """All names that a converter makes, of which ``first`` is made by its first pattern."""
    patterns = list(converter.target_patterns)
    at = first.find(patterns[0])
    if len(patterns) == 1 or at < 0:
        return [first]
    head, tail = first[:at], first[at + len(patterns[0]) :]
    return [name for pattern in patterns if (name := head + pattern + tail) in own]
