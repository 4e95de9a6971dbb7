"""Enumerates placements: runs a function on distributed tensors under every one and compares with plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard
from dtorch.runtime.layout import box, coords, slices

MESH_SHAPES: tuple[tuple[int, ...], ...] = ((3,), (2, 2))

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.complex64: 2e-5}


@dataclass
class Report:
    """What ``check`` met: placements that ran as they were, and those that were refused and then repaired."""

    legal: list[Any] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)


def mesh_of(*shape: int) -> DeviceMesh:
    """A CPU mesh of the shape."""
    return DeviceMesh("cpu", torch.arange(prod(shape)).reshape(shape).tolist())


def grid(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def like(x: Any, t: torch.Tensor) -> Any:
    """``t`` where ``x`` is."""
    return t if isinstance(x, torch.Tensor) else dtorch.tensor(t, device_mesh=x.device_mesh)


def moved() -> int:
    """Bytes that devices have sent to others so far."""
    return sum(worker["exchanged_bytes"] for worker in dtorch.statistics().workers.values())


def placements_of(tensor: torch.Tensor, num_axes: int, partial: bool = False, block: int = 1) -> list[tuple[Any, ...]]:
    """Every placement of a tensor on a mesh of ``num_axes`` axes; with ``block`` also shards cut at its multiples."""
    each: list[Any] = [Replicate(), *(Shard(d) for d in range(tensor.ndim))]
    if block > 1:
        each += [Shard(d, block) for d in range(tensor.ndim)]
    if partial:
        each.append(Partial())
    return list(product(each, repeat=num_axes))


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> dtorch.Tensor:
    """``tensor`` under ``placements``; where these are Partial, pieces are of mixed signs and none is zero."""
    axes = [axis for axis, p in enumerate(placements) if p.is_partial()]
    if not axes:
        return dtorch.tensor(tensor, device_mesh=mesh, placements=list(placements))
    shape = tuple(mesh.shape)
    summands = _summands(tensor, prod(shape[a] for a in axes))
    codes = tuple(-1 if p.is_partial() else p.code for p in placements)
    whole = tuple((0, n) for n in tensor.shape)
    pieces = []
    for coord in coords(shape):
        which = 0
        for axis in axes:
            which = which * shape[axis] + coord[axis]
        pieces.append(summands[which][slices(box(tuple(tensor.shape), codes, shape, coord), whole)].contiguous())
    return dtorch.from_shards(pieces, device_mesh=mesh, placements=list(placements))


def _summands(tensor: torch.Tensor, num: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(num)
    made = [torch.randint(-6, 7, tensor.shape, generator=draw).to(tensor.dtype) for _ in range(num - 1)]
    rest = tensor.clone()
    for piece in made:
        rest = rest - piece
    return [*made, rest]


def check(
    fn: Callable[..., Any],
    *tensors: torch.Tensor,
    mesh: Iterable[tuple[int, ...]] = MESH_SHAPES,
    partial: Sequence[int] | bool = (),
    limit: int = 32,
    legal: Sequence[Any] | bool = (),
    compare: Callable[[Any, Any], None] | None = None,
    tolerance: float | None = None,
    exact: bool = True,
    replicated: Sequence[int] = (),
    block: int = 1,
    **kwargs: Any,
) -> Report:
    """Compare ``fn`` on distributed tensors with ``fn`` on the plain ones.

    On one device the results must be equal bit for bit. On larger meshes every combination of placements either gives
    the same values or a PlacementError, and under ``auto_redistribute`` always the same values.

    Args:
        fn: called with all tensors, plain or distributed, and ``kwargs``.
        mesh: shapes of the meshes.
        partial: which tensors to try as Partial too; True for all.
        limit: combinations tried on each mesh; a fixed sample of them when there are more.
        legal: placements (one a tensor; on a one-axis mesh a Placement stands for itself) that must not be refused,
            or True: none may be refused.
        compare: of (result, expected), in place of closeness.
        exact: whether one device must give the very bits.
        replicated: tensors that are only tried replicated.
        block: also try shards cut at multiples of it.
    """
    expected = fn(*[t.clone() for t in tensors], **kwargs)
    one = mesh_of(1)
    for where in (None, 0, -1):  # a shard of one piece is the whole
        placed = [[Replicate() if where is None or not t.ndim else Shard(where)] for t in tensors]
        single = fn(*[distribute(t, one, own) for t, own in zip(tensors, placed, strict=True)], **kwargs)
        _compare(single, expected, exact, compare, tolerance, f"one device, {placed}")
    wanted = [] if isinstance(legal, bool) else [_normal(entry) for entry in legal]
    summed = range(len(tensors)) if partial is True else partial or ()
    report = Report()
    for shape in mesh:
        target = mesh_of(*shape)
        choices = [
            [(Replicate(),) * len(shape)] if i in replicated else placements_of(t, len(shape), i in summed, block)
            for i, t in enumerate(tensors)
        ]
        cache: list[dict[Any, dtorch.Tensor]] = [{} for _ in tensors]
        combinations = list(_sample(choices, limit, [w for w in wanted if len(w[0]) == len(shape)]))
        pending = []
        for combination in combinations:
            made = []
            for i, placed in enumerate(combination):
                if placed not in cache[i]:
                    cache[i][placed] = distribute(tensors[i], target, placed)
                made.append(cache[i][placed].clone())
            what = f"mesh {shape}, placements {combination}"
            try:
                result = fn(*made, **kwargs)
                report.legal.append(combination)
            except PlacementError as error:
                report.refused.append(combination)
                if legal is True or combination in wanted:
                    raise AssertionError(f"{what}: {error}") from error
                with dtorch.auto_redistribute():
                    result = fn(*made, **kwargs)
            pending.append((_start(result), what))
        for result, what in pending:
            _compare(result, expected, False, compare, tolerance, what)
    return report


def _normal(entry: Any) -> tuple[tuple[Any, ...], ...]:
    entry = entry if isinstance(entry, tuple) else (entry,)
    return tuple(p if isinstance(p, tuple) else (p,) for p in entry)


def _sample(choices: list[list[Any]], limit: int, wanted: list[Any]) -> list[Any]:
    total = prod(len(c) for c in choices)
    if total <= limit:
        return list(product(*choices))
    draw = random.Random(total)
    seen = dict.fromkeys(wanted)
    alike = [(p,) * len(choices) for p in choices[0] if all(p in c for c in choices)]
    each = [  # every placement of every tensor, as far as there is room
        tuple(placed if i == own else draw.choice(c) for i, c in enumerate(choices))
        for own, choice in enumerate(choices)
        for placed in choice
    ]
    draw.shuffle(each)
    for found in (*alike[: limit // 4], *each):
        if len(seen) < limit:
            seen[found] = None
    while len(seen) < limit:
        seen[tuple(draw.choice(c) for c in choices)] = None
    return list(seen)


def _start(result: Any) -> Any:
    """Ask for the values already, so that many fetches are under way at once."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, dtorch.Tensor):
            tensor.to_torch_async()
    return result


def _compare(
    result: Any,
    expected: Any,
    exact: bool,
    compare: Callable[[Any, Any], None] | None,
    tolerance: float | None,
    what: str,
) -> None:
    try:
        if isinstance(expected, (tuple, list)):
            assert type(result) is type(expected), f"a {type(result)}, not a {type(expected)}"
            assert len(result) == len(expected)
        if compare is not None and not exact:
            compare(_plain(result), expected)
            return
        pairs = zip(result, expected, strict=True) if isinstance(expected, (tuple, list)) else [(result, expected)]
        for got, want in pairs:
            if not isinstance(want, torch.Tensor):
                assert got == want, f"{got}, not {want}"
                continue
            assert tuple(got.shape) == tuple(want.shape), f"shape {got.shape}, not {want.shape}"
            assert got.dtype == want.dtype, f"{got.dtype}, not {want.dtype}"
            value = got.to_torch()
            assert value.shape == want.shape, f"the value has shape {value.shape}, not {want.shape}"
            if exact:
                assert torch.equal(
                    value.nan_to_num(1.5e9) if _has_nan(want) else value,
                    want.nan_to_num(1.5e9) if _has_nan(want) else want,
                ), f"{value}\nis not\n{want}"
            else:
                near = TOLERANCE.get(want.dtype, 1e-9) if tolerance is None else tolerance
                torch.testing.assert_close(value, want, rtol=near, atol=near, equal_nan=True)
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and bool(tensor.isnan().any())


def _plain(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return [_plain(r) for r in result]
    return result.to_torch() if isinstance(result, dtorch.Tensor) else result
