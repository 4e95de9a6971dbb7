"""Reading and writing at indices along dims that are sharded.

Index tensors are replicated here, so every device knows what the others will find, and how much of it: nothing is
negotiated. Devices that hold an element read or write it under its local index; others leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from dtorch.runtime.comm import Gather
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.kernels._lines import Whole
from dtorch.runtime.layout import Box, box, slices
from dtorch.transport.messages import Layout


def line(site: Site, layout: Layout) -> list[Box]:
    """What every device along the kernel's axes holds, in the order in which ``Gather`` answers; this one is among
    them."""
    mesh_shape = tuple(site.mesh.shape)
    assert site.coord is not None
    boxes = []
    for at in product(*(range(mesh_shape[axis]) for axis in site.axes)):
        coord = list(site.coord)
        for axis, k in zip(site.axes, at, strict=True):
            coord[axis] = k
        boxes.append(box(tuple(layout.shape), tuple(layout.codes), mesh_shape, tuple(coord)))
    return boxes


def wrapped(index: torch.Tensor, size: int, dim: int, negative: bool = True) -> torch.Tensor:
    """``index`` with negative entries counted from the end; IndexError when one is out of range."""
    low = -size if negative else 0
    if index.numel():
        least, most = int(index.min()), int(index.max())
        if least < low or most >= size:
            wrong = least if least < low else most
            raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {size}")
        if least < 0:
            return torch.where(index < 0, index + size, index)
    return index


@kernel("select", communicates=True)
def select(site: Site) -> Callable[..., Steps]:
    """select along a sharded dim: the device that holds the index hands it to the others."""
    layout = site.definition.inputs[0]
    size = layout.shape
    boxes = line(site, layout)
    own = site.box(layout)
    call_dim = int(site.params["dim"])
    fixed = site.params.get("index")
    rest = [b - a for d, (a, b) in enumerate(own) if d != call_dim]
    dtype = site.dtype(layout)

    def run(x: torch.Tensor, *numbers: Any) -> Steps:
        i = int(numbers[0] if fixed is None else fixed)
        n = size[call_dim]
        if not -n <= i < n:
            raise IndexError(f"select(): index {i} out of range for tensor of size {list(size)} at dim {call_dim}")
        i %= n
        holds = [b[call_dim][0] <= i < b[call_dim][1] for b in boxes]
        low, high = own[call_dim]
        mine = x.select(call_dim, i - low) if low <= i < high else x.new_empty([0, *rest])
        shapes = [tuple(rest) if held else (0, *rest) for held in holds]
        got = yield Gather(mine, site.axes, shapes, dtype)
        found: torch.Tensor = got[holds.index(True)]
        return found.to(site.device).clone(memory_format=torch.contiguous_format)

    return run


def owned(indices: Sequence[torch.Tensor], dims: Sequence[int], part: Box) -> torch.Tensor:
    """Which positions (of flat, broadcast indices) point into ``part``."""
    inside = torch.ones_like(indices[0], dtype=torch.bool)
    for index, dim in zip(indices, dims, strict=True):
        low, high = part[dim]
        inside &= (index >= low) & (index < high)
    return inside.nonzero().squeeze(-1)


@kernel("lookup", communicates=True)
def lookup(site: Site) -> Callable[..., Steps]:
    """x[.., index, .., index, ..] where indexed dims are sharded: every device gets what the others hold.

    Params:
        dims: the indexed dims of input 0; inputs 1.. are their indices.
        out_at: where the indices' dims stand in the result.
    """
    layout = site.definition.inputs[0]
    dims: list[int] = list(site.params["dims"])
    out_at = int(site.params["out_at"])
    boxes = line(site, layout)
    own = site.box(layout)
    dtype = site.dtype(layout)
    rest = [b - a for d, (a, b) in enumerate(own) if d not in dims]

    def run(x: torch.Tensor, *given: torch.Tensor) -> Steps:
        shaped = torch.broadcast_tensors(*[i.long() for i in given])  # type: ignore[no-untyped-call]
        shape = shaped[0].shape
        flat = [wrapped(i.reshape(-1), layout.shape[d], d) for i, d in zip(shaped, dims, strict=True)]
        places = [owned(flat, dims, b) for b in boxes]
        mine = owned(flat, dims, own)
        index: list[torch.Tensor | None] = [None] * x.ndim
        for i, d in zip(flat, dims, strict=True):
            index[d] = i[mine] - own[d][0]
        piece = torch.ops.aten.index.Tensor(x, index)
        shapes = [(*rest[:out_at], p.numel(), *rest[out_at:]) for p in places]
        got = yield Gather(piece, site.axes, shapes, dtype)
        out = torch.empty([*rest[:out_at], flat[0].numel(), *rest[out_at:]], dtype=dtype, device=site.device)
        for where, part in zip(places, got, strict=True):
            if where.numel():
                out.index_copy_(out_at, where, part.to(site.device))
        return out.reshape([*rest[:out_at], *shape, *rest[out_at:]])

    return run


@kernel("gather_lookup", communicates=True)
def gather_lookup(site: Site) -> Callable[..., Steps]:
    """gather along a sharded dim."""
    layout = site.definition.inputs[0]
    dim = int(site.params["dim"])
    boxes = line(site, layout)
    low, high = site.box(layout)[dim]
    dtype = site.dtype(layout)

    def run(x: torch.Tensor, index: torch.Tensor) -> Steps:
        index = wrapped(index, layout.shape[dim], dim, negative=False)
        flat = index.reshape(-1)
        places = [((flat >= b[dim][0]) & (flat < b[dim][1])).nonzero().squeeze(-1) for b in boxes]
        inside = (index >= low) & (index < high)
        found = x.new_empty(0)
        if high > low:
            found = x.gather(dim, torch.where(inside, index - low, 0))[inside]
        got = yield Gather(found, site.axes, [(p.numel(),) for p in places], dtype)
        out = torch.empty(flat.shape, dtype=dtype, device=site.device)
        for where, part in zip(places, got, strict=True):
            out[where] = part.to(site.device)
        return out.reshape(index.shape)

    return run


@kernel("redirect")
def redirect(site: Site) -> Callable[..., Any]:
    """Scatter-like ops that write x at an index along one dim, whose other inputs are whole.

    What points elsewhere is sent to a row of its own behind the local piece, which is dropped afterwards.

    Params:
        dim: the indexed dim.
        spread: the index has a dim for each of x's (scatter); otherwise it has one dim (index_add).
        negative: negative indices count from the end.
    """
    definition = site.definition
    layout = definition.inputs[0]
    dim = int(site.params["dim"])
    spread = bool(site.params["spread"])
    negative = bool(site.params.get("negative"))
    call = site.bound()
    part = site.box(layout)
    held = [site.box(i) for i in definition.inputs]
    low, high = part[dim] if part else (0, 1)
    size = layout.shape[dim] if part else 1
    whole = (low, high) == (0, size)
    in_place = bool(definition.writes)
    num_inputs = len(definition.inputs)

    def cut(value: torch.Tensor, own: Box) -> torch.Tensor:
        """The piece of an input that concerns the local x: its dims other than ``dim`` follow x's."""
        if value.ndim != len(part) or not part:
            return value
        for d, ((a, b), (start, stop)) in enumerate(zip(part, own, strict=True)):
            if d != dim and (start, stop) != (a, b):
                first, last = min(max(a, start), stop), min(b, stop)
                value = value.narrow(d, first - start, max(last - first, 0))
        return value

    def run(x: torch.Tensor, index: torch.Tensor, *more: Any) -> Any:
        sources = [cut(v, held[2 + k]) if 2 + k < num_inputs else v for k, v in enumerate(more)]
        if spread:
            index = cut(index, held[1])
        if whole:
            return call(x, index, *sources)
        index = wrapped(index, size, dim, negative)
        inside = (index >= low) & (index < high)
        extended = torch.cat([x, x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])], dim)
        made = call(extended, torch.where(inside, index - low, high - low), *sources)
        result = (extended if in_place else made).narrow(dim, 0, high - low)
        if in_place:
            return x.copy_(result)
        return result.contiguous()

    return run


@kernel("put")
def put(site: Site) -> Callable[..., Any]:
    """index_put: input 0 is written at indices along ``dims``, from values that have x's other dims; the rest is whole.

    Params:
        dims: indexed dims; inputs 1.. are their indices, the last input holds the values.
        out_at: where the indices' dims stand among the values' dims.
        accumulate: add instead.
    """
    definition = site.definition
    layout = definition.inputs[0]
    dims: list[int] = list(site.params["dims"])
    out_at = int(site.params["out_at"])
    accumulate = bool(site.params["accumulate"])
    part = site.box(layout)
    rest = [d for d in range(len(part)) if d not in dims]
    has_values = len(definition.inputs) == 2 + len(dims)
    values_box = site.box(definition.inputs[-1]) if has_values else ()
    in_place = bool(definition.writes)

    def run(x: torch.Tensor, *given: Any) -> torch.Tensor:
        shaped = torch.broadcast_tensors(*[i.long() for i in given[: len(dims)]])  # type: ignore[no-untyped-call]
        shape = list(shaped[0].shape)
        flat = [wrapped(i.reshape(-1), layout.shape[d], d) for i, d in zip(shaped, dims, strict=True)]
        mine = owned(flat, dims, part)
        target = x if in_place else x.clone()
        index: list[torch.Tensor | None] = [None] * x.ndim
        for i, d in zip(flat, dims, strict=True):
            index[d] = i[mine] - part[d][0]
        if has_values:
            values: torch.Tensor = given[len(dims)]
            sizes = [layout.shape[d] for d in rest]
            full = [*sizes[:out_at], *shape, *sizes[out_at:]]
            missing = len(full) - values.ndim
            # The values' own dims that follow x's: take this device's part, unless it is all they have.
            for k, d in enumerate(rest):
                at = (k if k < out_at else k + len(shape)) - missing
                if at >= 0 and values.shape[at] != 1 and values_box[at] != part[d]:
                    start = values_box[at][0]
                    values = values.narrow(at, part[d][0] - start, part[d][1] - part[d][0])
            local = [part[d][1] - part[d][0] for d in rest]
            values = values.expand([*local[:out_at], *shape, *local[out_at:]])
            values = values.reshape([*local[:out_at], prod(shape), *local[out_at:]]).index_select(out_at, mine)
        else:
            number = given[len(dims)] if len(given) > len(dims) else site.params["value"]
            values = torch.tensor(number, dtype=x.dtype, device=x.device)
        if mine.numel():
            torch.ops.aten.index_put_.default(target, index, values, accumulate)
        return target

    return run


@kernel("assign")
def assign(site: Site) -> Callable[..., Any]:
    """x[index] = value for slices and ints, of which some cut sharded dims.

    Params:
        dims: (output dim or -1, start, step) an input dim, see ``remap``.
        shape: of x[index], with which the value broadcasts.
    """
    definition = site.definition
    part = site.box(definition.inputs[0])
    dims: list[list[int]] = site.params["dims"]
    shape: list[int] = site.params["shape"]
    has_value = len(definition.inputs) == 2
    value_box = site.box(definition.inputs[1]) if has_value else ()
    reached = [(0, n) for n in shape]
    index: list[Any] = []
    nothing = False
    for (out, start, step), (low, high) in zip(dims, part, strict=True):
        if out < 0:
            nothing |= not low <= start < high
            index.append(start - low)
            continue
        a = max(-(-(low - start) // step), 0)
        b = min(-(-(high - start) // step), shape[out])
        nothing |= a >= b
        reached[out] = (a, b)
        index.append(slice(start + step * a - low, start + step * (b - 1) + 1 - low, step))
    nothing |= any(a >= b for a, b in reached)
    kept = [out for out, _, _ in dims if out >= 0]
    fixed = site.params.get("value")

    def run(x: torch.Tensor, *given: Any) -> torch.Tensor:
        if nothing:
            return x
        target = x[tuple(index)]
        for out in range(len(shape)):
            if out not in kept:
                target = target.unsqueeze(out)
        if not has_value:
            target.fill_(given[0] if given else fixed)  # type: ignore[arg-type]
            return x
        value: torch.Tensor = given[0]
        extra = value.ndim - len(shape)
        if extra > 0:
            value = value.reshape(value.shape[extra:])
        missing = max(-extra, 0)
        own = value_box[max(extra, 0) :]
        for at in range(value.ndim):
            a, b = reached[at + missing]
            start, stop = own[at]
            if shape[at + missing] != 1 and value.shape[at] != 1 and (start, stop) != (a, b):
                value = value.narrow(at, a - start, b - a)
        if value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            value = value.clone()  # x[index] += 1 assigns a view of x to itself
        target.copy_(value)
        return x

    return run


@kernel("masked_scatter", communicates=True)
def masked_scatter(site: Site) -> Callable[..., Steps]:
    """The n-th true element of the whole mask takes the n-th of the source: masks travel, x and the source stay."""
    definition = site.definition
    layout = definition.inputs[0]
    mask_of = Whole(site, definition.inputs[1], site.axes)
    shape = tuple(layout.shape)
    mine = slices(site.box(layout), tuple((0, n) for n in shape))
    in_place = bool(definition.writes)

    def run(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Steps:
        whole = yield from mask_of.steps(mask)
        whole = whole.expand(shape)
        order = whole.reshape(-1).cumsum(0).reshape(shape)
        if order.numel() and int(order.reshape(-1)[-1]) > source.numel():
            raise RuntimeError("masked_scatter: the source has fewer elements than the mask has true ones")
        here = whole[mine]
        target = x if in_place else x.clone()
        target[here] = source.reshape(-1)[order[mine][here] - 1]
        return target

    return run
