"""Any chain of redistributions gives the tensor back bit for bit, cut as torch.chunk cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtorch
from dtorch import DeviceMesh, Partial, Placement, Replicate, Shard

MESHES: list[tuple[str, Any]] = [
    ("cpu", [0]),
    ("cpu", [0, 1]),
    ("cpu", [1, 0]),
    ("cpu", [1, 2]),
    ("cpu", [2, 3]),
    ("cpu", [0, 1, 2]),
    ("cpu", [[0, 1], [2, 3]]),
    ("cpu", [[3, 2], [0, 1]]),
    ("cpu", [[0, 1, 2]]),
    ("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    ("cuda", [0, 1]),
    ("cuda", [[0, 1], [2, 3]]),
]
"""Overlapping, disjoint, of another order, of another kind (virtual)."""

SHARED = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module", autouse=True)
def _virtual_cuda() -> Any:
    dtorch.init(virtual={"cuda": "cpu"})
    yield
    dtorch.shutdown()


def _meshes() -> st.SearchStrategy[DeviceMesh]:
    return st.sampled_from(MESHES).map(lambda facts: DeviceMesh(*facts))


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> tuple[DeviceMesh, list[Placement]]:
    mesh = draw(_meshes())
    choices = [Replicate(), Partial(), *(Shard(dim) for dim in range(-ndim, ndim))]
    return mesh, [draw(st.sampled_from(choices)) for _ in range(mesh.ndim)]


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[DeviceMesh, list[Placement]]]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return shape, draw(st.lists(layouts(len(shape)), min_size=1, max_size=5))


def _values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """All different, with what is easily lost among them: negative zero, infinities, NaN with a payload."""
    flat = torch.arange(1, 1 + math.prod(shape), dtype=torch.int64).to(dtype)
    if dtype.is_floating_point:
        odd = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf], dtype=dtype)
        flat[: len(odd)] = odd[: flat.numel()]
        if dtype is torch.float32 and flat.numel() > 5:
            flat.view(torch.int32)[5] = 0x7FC01234
    return flat.reshape(tuple(shape))


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def _chunks(size: int, num: int) -> list[int]:
    cut = [piece.numel() for piece in torch.empty(size).chunk(num)]
    return cut + [0] * (num - len(cut))


def _check_pieces(x: dtorch.Tensor, full: torch.Tensor) -> None:
    """Sizes of torch.chunk, nested from left to right; along each axis they sum to the dim."""
    mesh, placements = x.device_mesh, x.placements
    pieces = x.to_shards()
    assert len(pieces) == len(mesh.devices)

    def walk(axis: int, first: int, num: int, shape: tuple[int, ...]) -> None:
        if axis == mesh.ndim:
            assert tuple(pieces[first].shape) == shape
            return
        parts, step = mesh.shape[axis], num // mesh.shape[axis]
        placement = placements[axis]
        sizes = None
        if isinstance(placement, Shard):
            sizes = _chunks(shape[placement.dim], parts)
            assert sum(sizes) == shape[placement.dim]
        for i in range(parts):
            local = shape
            if sizes is not None and isinstance(placement, Shard):
                local = (*shape[: placement.dim], sizes[i], *shape[placement.dim + 1 :])
            walk(axis + 1, first + i * step, step, local)

    walk(0, 0, len(pieces), tuple(full.shape))


@settings(SHARED, max_examples=250)
@given(chains(), st.sampled_from([torch.float32, torch.float32, torch.int64, torch.bfloat16, torch.bool]))
def test_chains_keep_every_bit(
    chain: tuple[tuple[int, ...], list[tuple[DeviceMesh, list[Placement]]]], dtype: torch.dtype
) -> None:
    shape, stops = chain
    full = _values(shape, dtype)
    mesh, placements = stops[0]
    x = dtorch.Tensor(full, device_mesh=mesh, placements=placements)
    reached = [x]
    for mesh, placements in stops[1:]:
        x = x.redistribute(device_mesh=mesh, placements=placements)
        reached.append(x)
    for x in reached:
        assert (x.shape, x.dtype) == (full.shape, full.dtype)
        assert _bits(x.to_torch()) == _bits(full)
        _check_pieces(x, full)


@settings(SHARED, max_examples=40)
@given(st.data(), st.lists(st.integers(0, 9), max_size=3))
def test_from_shards_takes_what_to_shards_gives(data: st.DataObject, shape: list[int]) -> None:
    full = _values(shape, torch.float32)
    mesh, placements = data.draw(layouts(len(shape)))
    placements = [Replicate() if isinstance(p, Partial) else p for p in placements]
    x = dtorch.Tensor(full, device_mesh=mesh, placements=placements)
    pieces = x.to_shards()
    try:
        again = dtorch.from_shards(pieces, device_mesh=mesh, placements=placements)
    except ValueError:
        # Dims nested in two axes can be cut into pieces from which the whole cannot be told; an error is then right.
        dims = [p.dim for p in x.placements if isinstance(p, Shard)]
        assert len(set(dims)) < len(dims)
        return
    assert tuple(again.shape) == full.shape
    assert _bits(again.to_torch()) == _bits(full)


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1), Partial()])
def test_pending_reductions(reduce_op: str, target: Placement) -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    pieces = [torch.randint(1, 5, (4, 5)).float() for _ in range(3)]
    stacked = torch.stack(pieces)
    expected = {
        "sum": lambda: pieces[0] + pieces[1] + pieces[2],
        "avg": lambda: (pieces[0] + pieces[1] + pieces[2]) / 3,
        "max": lambda: stacked.amax(0),
        "min": lambda: stacked.amin(0),
        "product": lambda: pieces[0] * pieces[1] * pieces[2],
    }[reduce_op]()
    x = dtorch.from_shards(pieces, device_mesh=mesh, placements=[Partial(reduce_op)])
    assert torch.equal(x.to_torch(), expected)
    moved = x.redistribute([target])
    assert list(moved.placements) == [target]
    torch.testing.assert_close(moved.to_torch(), expected)


def test_redistribute_names_what_it_wants() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(12.0).reshape(4, 3)
    x = dtorch.Tensor(full, device_mesh=mesh, placements=[Shard(0), Replicate()])
    assert list(x.redistribute_by_dict(placements_dict={"tp": Shard(1)}).placements) == [Shard(0), Shard(1)]
    replicated = x.redistribute_by_dict(placements_dict={"tp": Shard(1)}, default_placement_mode="replicate")
    assert list(replicated.placements) == [Replicate(), Shard(1)]
    assert list(x.redistribute_by_dict(placements_dict={"pp": Shard(1)}).placements) == [Shard(0), Replicate()]
    with pytest.raises(ValueError, match="dp"):
        x.redistribute_by_dict(placements_dict={"tp": Shard(1)}, default_placement_mode="raise_error")
    one = x.redistribute_by_dict(DeviceMesh("cpu", [0]), {"tp": Shard(1)})  # names are of no use on one device
    assert (one.device_mesh.size(), list(one.placements)) == (1, [Replicate()])
    with pytest.raises(ValueError, match="axes have names"):
        x.redistribute_by_dict(DeviceMesh("cpu", [0, 1]), {"tp": Shard(1)})
    like = dtorch.zeros((4, 3), device_mesh=DeviceMesh("cpu", [2, 3]), placements=[Shard(1)])
    moved = x.redistribute_like(like)
    assert (moved.device_mesh, list(moved.placements)) == (like.device_mesh, [Shard(1)])
    assert torch.equal(moved.to_torch(), full)


def test_large_pieces_do_not_travel_inside_messages() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    full = torch.arange(3 * 70_001, dtype=torch.float32).reshape(3, 70_001)
    x = dtorch.Tensor(full, device_mesh=mesh, placements=[Shard(1)])
    assert torch.equal(torch.cat(x.to_shards(), 1), full)
    assert torch.equal(x.redistribute([Partial()]).to_torch(), full)
    assert torch.equal(x.redistribute([Shard(0)]).to_torch(), full)
    assert torch.equal(x.redistribute(device_mesh=DeviceMesh("cuda", [0, 1])).to_torch(), full)
