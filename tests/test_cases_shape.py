"""Faults that were reported of other systems, as tests: layouts, views, indexing, joins, randomness."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, PlacementError, Replicate, Shard
from tests._sharding import distribute, mesh_of

R = Replicate()


def S(dim: int) -> Any:
    return Shard(dim)


def same(tensor: Any, expected: torch.Tensor) -> None:
    value = tensor.to_torch()
    assert tuple(tensor.shape) == tuple(expected.shape)
    assert value.dtype == expected.dtype
    assert torch.equal(value, expected)


@pytest.mark.parametrize("num", range(1, 9))
def test_a_round_trip_through_shards_keeps_shape_and_bits(num: int) -> None:  # A02 A06
    mesh = mesh_of(num)
    for n in range(10):
        x = torch.arange(2.0 * n).reshape(n, 2)
        t = distribute(x, mesh, [R]).redistribute([S(0)])
        pieces = [p.shape[0] for p in t.to_shards()]
        assert min(pieces) >= 0
        assert sum(pieces) == n
        same(t.redistribute([R]), x)


def test_pieces_give_one_global_shape() -> None:  # A03
    t = dtorch.from_shards([torch.ones(n, 2) for n in (3, 3, 3, 1)], device_mesh=mesh_of(4), placements=[S(0)])
    assert t.shape == (10, 2)
    same(t, torch.ones(10, 2))
    with pytest.raises(ValueError, match="piece"):
        dtorch.from_shards([torch.ones(n, 2) for n in (3, 1, 3, 3)], device_mesh=mesh_of(4), placements=[S(0)])


def test_pieces_of_a_dim_cut_twice_tile_it_once() -> None:  # A07
    t = distribute(torch.arange(2), mesh_of(2, 4), [S(0), S(0)])
    held = [int(v) for piece in t.to_shards() for v in piece]
    assert sorted(held) == [0, 1]


def test_strides_after_a_redistribution_are_those_of_the_whole() -> None:  # A10
    x, w = torch.randn(4, 31, 10), torch.randn(6, 10)
    y = distribute(x, mesh_of(4), [S(1)]).redistribute([R])
    assert y.stride() == (310, 10, 1)
    assert all(p.is_contiguous() for p in y.to_shards())
    same(y.view(124, 10), x.view(124, 10))
    torch.testing.assert_close(F.linear(y, distribute(w, mesh_of(4), [R])).to_torch(), F.linear(x, w))
    assert distribute(torch.ones(3, 9), mesh_of(2), [S(1)]).to_shards()[1].stride() == (4, 1)


@pytest.mark.parametrize("length", [7, 8])
def test_a_sequence_sharded_activation_is_flattened(length: int) -> None:  # B02
    x = torch.randn(2, length, 4)
    t = distribute(x, mesh_of(4), [S(1)])
    with pytest.raises(PlacementError):
        t.flatten(0, 1)
    with dtorch.auto_redistribute():
        same(t.flatten(0, 1), x.flatten(0, 1))
    one = distribute(x[:1].clone(), mesh_of(4), [S(1)])
    flat = one.flatten(0, 1)
    assert flat.placements == (S(0),)
    same(flat, x[0])


def test_squeezing_a_sharded_dim_of_one_element_in_place() -> None:  # B04
    x = torch.arange(4.0).view(1, 4)
    t = distribute(x, mesh_of(2), [S(0)])
    assert t.squeeze_(0) is t
    same(t, x[0])
    same(t + 1, x[0] + 1)


def test_assignment_by_a_sharded_index_of_the_sharded_dim() -> None:  # C01
    mesh = mesh_of(2)
    z = distribute(torch.zeros(16), mesh, [S(0)])
    z[distribute(torch.arange(16), mesh, [S(0)])] = distribute(torch.ones(16), mesh, [S(0)])
    assert z.placements == (S(0),)
    same(z, torch.ones(16))


def test_assignment_by_lists_and_ints() -> None:  # C05
    mesh = mesh_of(2)
    a = distribute(torch.arange(3), mesh, [S(0)])
    a[[0, 1]] = a[[1, 0]]
    same(a, torch.tensor([1, 0, 2]))
    m = distribute(torch.zeros(3, 2, 5, 4), mesh, [S(3)])
    m[1] = distribute(torch.ones(7, 2, 5, 4), mesh, [S(3)]).mean(0)
    expected = torch.zeros(3, 2, 5, 4)
    expected[1] = 1
    same(m, expected)


def test_shards_are_renumbered_when_a_dim_goes() -> None:  # C06
    t = distribute(torch.ones(2, 2), mesh_of(2), [S(1)])
    u = t.sum(0)
    assert u.placements == (S(0),)
    same(u + u, torch.full((2,), 4.0))
    v = distribute(torch.ones(1, 10), mesh_of(2), [S(1)])[:, 0:1]
    assert v.shape == (1, 1)
    same(v + 1, torch.full((1, 1), 2.0))


def test_negative_dims() -> None:  # C07
    x = torch.arange(9).view(3, 3)
    t = distribute(x, mesh_of(2), [S(-2)])
    same(t.flip([-2, -1]), x.flip([0, 1]))
    same(t[-1], x[-1])
    same(t.sum(-2), x.sum(0))
    for dim in (0, 1):
        for fn in (
            lambda a, d: a.roll(1, d), lambda a, d: a.narrow(d, 1, 2), lambda a, d: a.select(d, -1),
            lambda a, d: torch.cat([a, a], d), lambda a, d: torch.stack([a, a], d), lambda a, d: a.unbind(d)[1],
            lambda a, d: a.index_select(d, torch.tensor([2, 0])), lambda a, d: a.split(2, d)[1],
            lambda a, d: a.repeat_interleave(2, d), lambda a, d: a.flip(d), lambda a, d: a.unsqueeze(d),
        ):
            same(fn(t, dim), fn(x, dim))
            below = dim - 2
            same(fn(t, below), fn(x, below))


def test_scatter_along_a_replicated_dim_stays_sharded() -> None:  # C09
    index = torch.tensor([[[0], [2], [1], [2]]])
    z = distribute(torch.zeros(1, 4, 3), mesh_of(2), [S(1)])
    out = z.scatter(-1, index, 1.0)
    z.scatter_(-1, index, 1.0)
    assert z.placements == out.placements == (S(1),)
    expected = torch.zeros(1, 4, 3).scatter(-1, index, 1.0)
    same(z, expected)
    same(out, expected)


def test_a_slice_of_a_sharded_dim_is_not_gathered() -> None:  # C10
    x = torch.randn(32, 32)
    t = distribute(x, mesh_of(4), [S(-1)])
    u = t[..., :16]
    assert u.placements == (S(1),)
    assert [p.numel() for p in u.to_shards()] == [32 * 4] * 4
    same(u, x[..., :16])


def test_clamp_in_place_of_a_pending_sum() -> None:  # D04
    x = torch.arange(8.0)
    s = distribute(x, mesh_of(2), [S(0)]).sum()
    alias = s
    try:
        s.clamp_(max=2)
        expected = 2.0
    except PlacementError:
        expected = 28.0
    assert s.item() == alias.item() == expected


@pytest.mark.parametrize("num", [2, 4])
def test_shifted_joins_with_one_element_a_device(num: int) -> None:  # E05
    x = torch.arange(4.0)
    t = distribute(x, mesh_of(num), [S(0)])
    same(torch.cat([t[3:], t[:3]]), torch.tensor([3.0, 0, 1, 2]))
    same(torch.cat([t[1:], t[:1]]), torch.tensor([1.0, 2, 3, 0]))
    same(t.roll(1), x.roll(1))


def test_distributing_draws_nothing_and_draws_differ() -> None:  # F11
    mesh = mesh_of(3)
    session = dtorch.current_session()
    session.seed(0)
    first = dtorch.rand(3, device_mesh=mesh)
    session.seed(0)
    distribute(torch.zeros(4), mesh, [S(0)]).redistribute([R])
    same(dtorch.rand(3, device_mesh=mesh), first.to_torch())
    torch.manual_seed(0)
    assert torch.equal(first.to_torch(), torch.rand(3))
    one, two = dtorch.randn(4, device_mesh=mesh), dtorch.randn(4, device_mesh=mesh)
    assert not torch.equal(one.to_torch(), two.to_torch())


def test_trunc_normal_ends() -> None:  # F11
    session = dtorch.current_session()
    t = distribute(torch.zeros(50), DeviceMesh("cpu", [0, 1, 2]), [S(0)])
    session.seed(3)
    torch.manual_seed(3)
    plain = torch.nn.init.trunc_normal_(torch.zeros(50))
    # torch's own steps, with values that stay on the mesh
    low, high = (1 + math.erf(-2 / math.sqrt(2))) / 2, (1 + math.erf(2 / math.sqrt(2))) / 2
    t.uniform_(2 * low - 1, 2 * high - 1).erfinv_().mul_(math.sqrt(2)).clamp_(-2, 2)
    assert t.placements == (S(0),)
    assert torch.isfinite(t.to_torch()).all()
    assert t.to_torch().abs().max() <= 2
    assert plain.shape == t.shape
