"""Random ops: drawn once for the whole tensor, in the order of the program, so numbers do not depend on the mesh.

The executor runs the drawing part once a worker (``draw``), also on workers that hold nothing of the result: every
worker's generators then stand at the same place. Each device takes its piece of what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtorch.runtime.kernels import Site, kernel, num_numbers
from dtorch.runtime.kernels.redistribute import neutral
from dtorch.runtime.layout import box, is_partial, is_shard, partial_op, slices
from dtorch.runtime.template import Filler, bind, dtype_of
from dtorch.transport.messages import Definition, Layout, MeshInfo


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
        if off is not None:
            return neutral(piece.contiguous(), off)
        return piece if alone else piece.clone()

    alone = len(site.mesh.devices) == 1  # nobody else takes a piece
    masks = bool(definition.params.get("mask"))

    def run(drawn: tuple[torch.Tensor, ...], *tensors: Any) -> Any:
        if masks:
            part, whole, _ = parts[0]
            factor = drawn[0] if part == whole else drawn[0][slices(part, whole)]
            return tensors[0] * factor
        if writes:
            target: torch.Tensor = tensors[writes[0]]
            part, whole, _ = parts[0]
            return target.copy_(drawn[0] if part == whole else drawn[0][slices(part, whole)])
        pieces = [cut(full, *p) for full, p in zip(drawn, parts, strict=True)]
        return pieces[0] if len(pieces) == 1 else tuple(pieces)

    return run


def _is_in_pieces(layout: Layout, mesh_shape: Sequence[int]) -> bool:
    return any(n > 1 and (is_shard(c) or is_partial(c)) for c, n in zip(layout.codes, mesh_shape, strict=True))


def draw(
    definition: Definition, fn: Callable[..., Any], device: torch.device, meshes: Mapping[int, MeshInfo]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The drawing part: of (tensors of any device that holds them whole, or None), numbers.

    What is written in place, and what is held in pieces, is replaced by a tensor of the whole's shape and strides,
    because torch draws in the order of memory. With ``params["mask"]`` a factor is drawn for pieces: the op on ones.

    Args:
        meshes: of the inputs, by number.
    """
    shapes = [tuple(o.shape) for o in definition.outputs]
    num_inputs = len(definition.inputs)
    call = bind(fn, definition.args, definition.kwargs, Filler(device, shapes), num_inputs, num_numbers(definition))
    strides = definition.params.get("strides", ())
    masks = bool(definition.params.get("mask"))

    def whole(k: int, value: float) -> torch.Tensor:
        layout = definition.inputs[k]
        shape, dtype = tuple(layout.shape), dtype_of(layout.dtype)
        if k < len(strides) and not masks:
            return torch.empty_strided(shape, tuple(strides[k]), dtype=dtype, device=device).fill_(value)
        return torch.full(shape, value, device=device).to(dtype)

    replaced = [
        k in definition.writes or _is_in_pieces(layout, meshes[layout.mesh].shape)
        for k, layout in enumerate(definition.inputs)
    ]
    value = 1.0 if masks else 0.5

    def run(tensors: list[torch.Tensor] | None, numbers: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        used = [
            whole(k, value) if tensors is None or replaced[k] else tensors[k] for k in range(num_inputs)
        ]
        made = call(*used, *numbers)
        return (made,) if isinstance(made, torch.Tensor) else tuple(made)

    return run
