"""Inputs that each device cuts further for itself before a kernel sees them: a replicated input where a shard is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dtorch.runtime.kernels import Site
from dtorch.runtime.layout import slices
from dtorch.transport.messages import Definition


def as_seen(definition: Definition) -> Definition:
    """The definition with its inputs as the kernel sees them: after each device has cut what ``params["cuts"]`` names."""
    cuts = definition.params.get("cuts")
    if not cuts:
        return definition
    inputs = tuple(
        msgspec.structs.replace(layout, codes=tuple(cuts[str(i)])) if str(i) in cuts else layout
        for i, layout in enumerate(definition.inputs)
    )
    return msgspec.structs.replace(definition, inputs=inputs)


def cutting(made: Callable[..., Any], definition: Definition, site: Site) -> Callable[..., Any]:
    """``made``, given its part of the inputs that are to be cut."""
    parts = {}
    for key in definition.params["cuts"]:
        i = int(key)
        parts[i] = slices(site.box(site.definition.inputs[i]), site.box(definition.inputs[i]))

    def run(*values: Any) -> Any:
        cut = list(values)
        for i, part in parts.items():
            cut[i] = cut[i][part]
        return made(*cut)

    return run
