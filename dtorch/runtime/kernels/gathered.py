"""Kernels for ops that cannot work on pieces alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.kernels._lines import Whole, box_without, local_part


@kernel("gathered", communicates=True)
def gathered(site: Site) -> Callable[..., Steps]:
    """The op on inputs made whole along the kernel's axes; results are cut to what their placements say."""
    definition = site.definition
    call = site.bound()
    inputs = [Whole(site, layout, site.axes) for layout in definition.inputs]
    outputs = [(box_without(site, layout, site.axes), site.box(layout)) for layout in definition.outputs]
    num = len(inputs)

    def run(*values: Any) -> Steps:
        tensors = []
        for whole, x in zip(inputs, values[:num], strict=True):
            tensors.append((yield from whole.steps(x)))
        made = call(*tensors, *values[num:])
        results = (made,) if isinstance(made, torch.Tensor) else made
        parts = [local_part(*boxes, result) for boxes, result in zip(outputs, results, strict=True)]
        if definition.writes:
            target: torch.Tensor = values[definition.writes[0]]
            return target if parts[0] is target else target.copy_(parts[0])
        return parts[0] if isinstance(made, torch.Tensor) else tuple(parts)

    return run


@kernel("filled")
def filled(site: Site) -> Callable[..., Any]:
    """The op on local pieces, for ops that refuse empty tensors: where the results are empty it is not called."""
    shapes = [site.local_shape(layout) for layout in site.definition.outputs]
    if all(all(shape) for shape in shapes):
        return site.bound()
    dtypes = [site.dtype(layout) for layout in site.definition.outputs]

    def run(*_: Any) -> Any:
        made = [torch.empty(s, dtype=d, device=site.device) for s, d in zip(shapes, dtypes, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    return run


@kernel("contracted")
def contracted(site: Site) -> Callable[..., Any]:
    """A product of pieces, for ops that refuse empty ones: without factors nothing is left but what is added.

    params: added (number of the input that is added, or None).
    """
    definition, added = site.definition, site.params["added"]
    out = definition.outputs[0]
    shape, dtype = site.local_shape(out), site.dtype(out)
    if all(all(site.local_shape(layout)) for layout in definition.inputs) and all(shape):
        return site.bound()

    def run(*values: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(shape, dtype=dtype, device=site.device)
        return made if added is None else made + values[added]

    return run
