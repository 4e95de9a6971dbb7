"""Random ops: drawn once for the whole tensor, in the order of the program, so numbers do not depend on the mesh.

The executor runs the drawing part once a worker (``draw``), also on workers that hold nothing of the result: every worker's
generators then stand at the same place. Each device takes its piece of what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import Site, kernel
from dtorch.runtime.kernels.redistribute import neutral
from dtorch.runtime.layout import box, is_partial, partial_op, slices
from dtorch.runtime.template import Filler, bind, dtype_of
from dtorch.transport.messages import Definition


@kernel("random")
def random(site: Site) -> Callable[..., Any]:
    """Takes this device's piece of the drawn whole (given first); in-place ops copy it into their target."""
    definition = site.definition
    writes = definition.writes
    parts = []
    for layout in definition.outputs:
        whole = tuple((0, n) for n in layout.shape)
        assert site.coord is not None
        codes = tuple(layout.codes)
        part = box(tuple(layout.shape), codes, tuple(site.mesh.shape), site.coord)
        off = next(
            (
                partial_op(c)
                for axis, c in enumerate(codes)
                if is_partial(c) and partial_op(c) in ("sum", "product") and site.coord[axis] != 0
            ),
            None,
        )
        parts.append((part, whole, off))

    def cut(full: torch.Tensor, part: Any, whole: Any, off: str | None) -> torch.Tensor:
        piece = full if part == whole else full[slices(part, whole)]
        return neutral(piece.contiguous(), off) if off is not None else piece.clone()

    def run(drawn: tuple[torch.Tensor, ...], *tensors: Any) -> Any:
        if writes:
            target: torch.Tensor = tensors[writes[0]]
            part, whole, _ = parts[0]
            return target.copy_(drawn[0] if part == whole else drawn[0][slices(part, whole)])
        pieces = [cut(full, *p) for full, p in zip(drawn, parts, strict=True)]
        return pieces[0] if len(pieces) == 1 else tuple(pieces)

    return run


def draw(definition: Definition, fn: Callable[..., Any], device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The drawing part: of (tensors of any device that holds them whole, or None), numbers."""
    shapes = [tuple(o.shape) for o in definition.outputs]
    num_inputs = len(definition.inputs)
    call = bind(fn, definition.args, definition.kwargs, Filler(device, shapes), num_inputs, 1)

    def run(tensors: list[torch.Tensor] | None, numbers: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        if tensors is None or definition.writes:
            tensors = [
                torch.full(tuple(i.shape), 0.5, device=device).to(dtype_of(i.dtype)) for i in definition.inputs
            ] if tensors is None else [
                torch.empty(tuple(layout.shape), dtype=dtype_of(layout.dtype), device=device)
                if k in definition.writes
                else t
                for k, (t, layout) in enumerate(zip(tensors, definition.inputs, strict=True))
            ]
        made = call(*tensors, *numbers)
        return (made,) if isinstance(made, torch.Tensor) else tuple(made)

    return run
