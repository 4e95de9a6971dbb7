"""Views, indexing, joins, random ops and data-dependent shapes under every placement, against plain torch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard
from tests._sharding import check, distribute, mesh_of

X = torch.arange(60.0).reshape(5, 3, 4) - 20
M = torch.arange(20.0).reshape(5, 4) - 7
V = torch.arange(7.0)
ONE = torch.arange(12.0).reshape(1, 4, 3)

VIEWS: dict[str, tuple[Any, torch.Tensor]] = {
    "transpose": (lambda x: x.transpose(0, -1), X),
    "transpose_function": (lambda x: torch.transpose(x, -2, 1), X),
    "swapaxes": (lambda x: x.swapaxes(0, 2), X),
    "swapdims": (lambda x: torch.swapdims(x, 0, -1), X),
    "permute": (lambda x: x.permute(2, 0, 1), X),
    "permute_list": (lambda x: torch.permute(x, (-1, 0, 1)), X),
    "t": (lambda x: x.t(), M),
    "T": (lambda x: x.T, M),
    "mT": (lambda x: x.mT, X),
    "H": (lambda x: x.H, M),
    "adjoint": (lambda x: x.adjoint(), X),
    "movedim": (lambda x: x.movedim(0, -1), X),
    "moveaxis": (lambda x: torch.moveaxis(x, (0, 1), (-1, 0)), X),
    "squeeze": (lambda x: x.squeeze(), ONE),
    "squeeze_dim": (lambda x: x.squeeze(-3), ONE),
    "squeeze_dims": (lambda x: torch.squeeze(x, (0, 1)), ONE),
    "unsqueeze": (lambda x: x.unsqueeze(-1), X),
    "unsqueeze_0": (lambda x: torch.unsqueeze(x, 0), M),
    "expand": (lambda x: x.expand(2, 3, 4, -1), ONE.expand(1, 4, 3)[:1].clone().reshape(1, 4, 3)[:, :, :3]),
    "expand_batch": (lambda x: x.expand(3, 5, 4), M),
    "expand_as": (lambda x: x.expand_as(torch.empty(2, 5, 4)), M),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (2, 5, 4)), M),
    "view": (lambda x: x.view(15, 4), X),
    "view_size": (lambda x: x.view(torch.Size((5, 12))), X),
    "view_minus": (lambda x: x.view(5, -1), X),
    "view_split": (lambda x: x.view(5, 2, 2), M),
    "reshape": (lambda x: x.reshape(4, 5), M),
    "reshape_transposed": (lambda x: x.transpose(0, 1).reshape(-1), M),
    "flatten": (lambda x: x.flatten(0, 1), X),
    "flatten_all": (lambda x: torch.flatten(x), X),
    "ravel": (lambda x: x.ravel(), X),
    "unflatten": (lambda x: x.unflatten(-1, (2, 2)), X),
    "view_as": (lambda x: x.view_as(torch.empty(20)), M),
    "reshape_as": (lambda x: x.reshape_as(torch.empty(2, 10)), M),
    "view_dtype": (lambda x: x.view(torch.int32), X),
    "view_narrower": (lambda x: x.view(torch.int16), X),
    "narrow": (lambda x: x.narrow(0, 1, 3), X),
    "narrow_whole": (lambda x: x.narrow(-1, 0, 4), X),
    "narrow_negative": (lambda x: torch.narrow(x, 0, -3, 2), X),
    "select": (lambda x: x.select(0, -1), X),
    "select_function": (lambda x: torch.select(x, -1, 2), X),
    "diagonal": (lambda x: x.diagonal(1, 0, 2), X),
    "diagonal_2d": (lambda x: torch.diagonal(x, -1), M),
    "unfold": (lambda x: x.unfold(0, 2, 2), X),
    "split": (lambda x: x.split(2), X),
    "split_dim": (lambda x: torch.split(x, [1, 0, 3], -1), X),
    "split_with_sizes": (lambda x: x.split_with_sizes([3, 2]), X),
    "chunk": (lambda x: x.chunk(3, 0), X),
    "tensor_split": (lambda x: torch.tensor_split(x, 3, -1), X),
    "tensor_split_at": (lambda x: x.tensor_split((1, 4)), X),
    "hsplit": (lambda x: x.hsplit(3), X),
    "vsplit": (lambda x: torch.vsplit(x, [1, 2]), X),
    "dsplit": (lambda x: x.dsplit(2), X),
    "unbind": (lambda x: x.unbind(0), M),
    "unbind_last": (lambda x: torch.unbind(x, -1), M),
    "atleast_2d": (lambda x: torch.atleast_2d(x), V),
    "atleast_3d": (lambda x: torch.atleast_3d(x), M),
    "detach": (lambda x: x.detach(), X),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), X),
    "rows": (lambda x: x[1:4], X),
    "steps": (lambda x: x[::2, ..., 1:], X),
    "int": (lambda x: x[2], X),
    "negative": (lambda x: x[..., -1], X),
    "new_axis": (lambda x: x[None, 1:, 0, None], X),
    "empty": (lambda x: x[3:3], X),
    "beyond": (lambda x: x[2:100, :100], X),
}


def test_a_dim_of_one_element_is_followed_past_new_ones() -> None:
    """Which of several dims of one element is the sharded one is no matter of strides."""
    x = distribute(torch.arange(3.0)[:, None], mesh_of(2), [Shard(1)])
    assert x[:, None, :, None].placements == (Shard(2),)
    assert x[:, :, None].placements == x.unsqueeze(-1).placements == (Shard(1),)
    assert x.unsqueeze(0).placements == x[None].transpose(0, 1).placements == (Shard(2),)
    assert torch.equal(x[:, None, :, None].to_torch(), torch.arange(3.0).reshape(3, 1, 1, 1))


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    fn, x = VIEWS[name]
    check(fn, x, partial=True)


def _written_through(fn: Any) -> Any:
    def run(x: Any) -> Any:
        base = x * 1
        view = fn(base)
        for part in view if isinstance(view, (tuple, list)) else (view,):
            if not isinstance(part, torch.Tensor) or not part._is_view() or part.stride().count(0) == 0:
                part.mul_(2)
        return base

    return run


WRITABLE = [
    n
    for n, (fn, x) in VIEWS.items()
    if "expand" not in n and "broadcast" not in n and "view_" not in n and n not in ("unfold",)
]


@pytest.mark.parametrize("name", WRITABLE)
def test_a_write_through_a_view_shows_in_its_base_as_in_torch(name: str) -> None:
    fn, x = VIEWS[name]
    with dtorch.auto_redistribute():
        check(_written_through(fn), x, limit=20)


COPIES: dict[str, tuple[Any, torch.Tensor]] = {
    "flip": (lambda x: x.flip(0, -1), X),
    "flip_list": (lambda x: torch.flip(x, [-2]), X),
    "fliplr": (lambda x: x.fliplr(), X),
    "flipud": (lambda x: torch.flipud(x), X),
    "roll": (lambda x: x.roll(2, 0), X),
    "roll_two": (lambda x: torch.roll(x, (1, -2), (0, -1)), X),
    "roll_flat": (lambda x: x.roll(3), V),
    "roll_all": (lambda x: x.roll(3), M),
    "rot90": (lambda x: x.rot90(), M),
    "rot90_3": (lambda x: torch.rot90(x, 3, (0, 2)), X),
    "repeat": (lambda x: x.repeat(2, 1, 3), X),
    "repeat_new": (lambda x: x.repeat(2, 1, 1), M),
    "tile": (lambda x: x.tile(2), M),
    "tile_function": (lambda x: torch.tile(x, (2, 2, 1)), M),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 0), M),
    "repeat_interleave_flat": (lambda x: torch.repeat_interleave(x, 2), V),
    "repeat_interleave_tensor": (lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), -1), M),
    "tril": (lambda x: x.tril(), X),
    "tril_diagonal": (lambda x: torch.tril(x, 1), M),
    "triu": (lambda x: x.triu(-1), M),
    "triu_": (lambda x: (x * 1).triu_(1), M),
    "diag": (lambda x: x.diag(), V),
    "diag_of_matrix": (lambda x: torch.diag(x, 1), M),
    "diag_embed": (lambda x: torch.diag_embed(x, 1), M),
    "diagflat": (lambda x: torch.diagflat(x), V),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1)), X),
    "pad_value": (lambda x: F.pad(x, (-1, 2), value=3.0), X),
    "pad_reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), X),
    "type": (lambda x: x.to(torch.float64), X),
    "to_other": (lambda x: x.to(torch.empty(0, dtype=torch.int64)), X),
    "index_list": (lambda x: x[[4, 0, 2]], X),
    "index_tensor": (lambda x: x[torch.tensor([[1, -1], [0, 3]])], X),
    "index_last": (lambda x: x[..., torch.tensor([3, 0])], X),
    "index_two": (lambda x: x[torch.tensor([1, 4]), :, torch.tensor([0, 3])], X),
    "index_two_beside": (lambda x: x[:, torch.tensor([1, 2]), torch.tensor([[0], [3]])], X),
    "index_mixed": (lambda x: x[1:, 0, [1, 1, 0]], X),
    "index_scalar": (lambda x: x[torch.tensor(2)], X),
    "index_scalar_mixed": (lambda x: x[torch.tensor(2), :, [1, 1, 0]], X),
    "mask": (lambda x: x[x > 3], X),
    "mask_rows": (lambda x: x[torch.tensor([True, False, True, True, False])], X),
    "mask_list": (lambda x: x[:, [True, False, True]], X),
    "mask_and_index": (lambda x: x[torch.tensor([True, False, True, False, False]), 1], X),
    "true": (lambda x: x[True], M),
    "index_select": (lambda x: x.index_select(0, torch.tensor([4, 4, 1])), X),
    "index_select_last": (lambda x: torch.index_select(x, -1, torch.tensor([0, 2])), X),
    "take": (lambda x: x.take(torch.tensor([[0, 19], [-1, 3]])), M),
    "masked_select": (lambda x: x.masked_select(x > 0), X),
    "nonzero": (lambda x: x.nonzero(), M),
    "nonzero_tuple": (lambda x: torch.nonzero(x, as_tuple=True), M),
    "argwhere": (lambda x: torch.argwhere(x), M),
    "where": (lambda x: torch.where(x > 2), M),
    "unique": (lambda x: torch.unique(x // 3), M),
    "unique_all": (lambda x: torch.unique(x // 3, return_inverse=True, return_counts=True), M),
    "unique_consecutive": (lambda x: (x // 3).unique_consecutive(dim=0), V),
    "bincount": (lambda x: torch.bincount(x.long()), V),
    "then": (lambda x: x[x > 3].exp().sum(), M),
    "select_scatter": (lambda x: x.select_scatter(torch.ones(5, 4), 1, -1), X),
    "slice_scatter": (lambda x: torch.slice_scatter(x, torch.ones(2, 3, 4), 0, 1, 5, 2), X),
    "diagonal_scatter": (lambda x: x.diagonal_scatter(torch.ones(4)), M),
    "masked_scatter": (lambda x: x.masked_scatter(torch.arange(4) > 1, torch.arange(20.0)), M),
    "masked_fill": (lambda x: x.masked_fill(x > 2, -1.0), X),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str) -> None:
    fn, x = COPIES[name]
    check(fn, x)


I3 = torch.tensor([[2, 0, 1, 2]] * 3)
MANY: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "cat": (lambda a, b: torch.cat([a, b]), (M, M[:2])),
    "cat_last": (lambda a, b: torch.cat((a, b), -1), (M, M[:, :3].clone())),
    "concat_types": (lambda a, b: torch.concat([a, b]), (M, M[:2].long())),
    "cat_same": (lambda a: torch.cat([a[3:], a[:3]]), (M,)),
    "cat_three": (lambda a, b: torch.cat([a, b, a]), (V, V[:2])),
    "stack": (lambda a, b: torch.stack([a, b]), (M, M + 1)),
    "stack_last": (lambda a, b: torch.stack([a, b], dim=-1), (M, M + 1)),
    "hstack": (lambda a, b: torch.hstack([a, b]), (M, M + 1)),
    "vstack": (lambda a, b: torch.vstack([a, b]), (V, V + 1)),
    "dstack": (lambda a, b: torch.dstack([a, b]), (M, M + 1)),
    "column_stack": (lambda a, b: torch.column_stack([a, b]), (V, V + 1)),
    "block_diag": (lambda a, b: torch.block_diag(a, b), (M, M[:2])),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="ij"), (V, V[:3])),
    "meshgrid_xy": (lambda a, b: torch.meshgrid(a, b, indexing="xy"), (V, V[:3])),
    "broadcast_tensors": (lambda a, b: torch.broadcast_tensors(a, b), (M, V[:4])),
    "cartesian_prod": (lambda a, b: torch.cartesian_prod(a, b), (V, V[:3])),
    "index_by": (lambda x, i: x[i], (M, torch.tensor([4, 0, 4]))),
    "index_by_two": (lambda x, i, j: x[i, j], (M, torch.tensor([4, 0, 4]), torch.tensor([[1], [0]]))),
    "gather": (lambda x, i: x.gather(0, i), (M, torch.tensor([[0, 4, 2, 1], [3, 3, 3, 0]]))),
    "gather_last": (lambda x, i: torch.gather(x, -1, i), (M[:3].clone(), I3)),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), (M, torch.tensor([[2, 0]] * 5))),
    "take_along_flat": (lambda x, i: torch.take_along_dim(x, i), (M, torch.tensor([7, 0, 19]))),
    "set_rows": (lambda x, v: _set(x, slice(1, 4), v), (M, torch.ones(3, 4))),
    "set_steps": (lambda x, v: _set(x, (slice(None, None, 2), 1), v), (M, torch.ones(1))),
    "set_column": (lambda x, v: _set(x, (slice(None), -1), v), (M, V[:5] * 10)),
    "set_row": (lambda x, v: _set(x, 3, v), (M, V[:4] * 10)),
    "set_wide": (lambda x, v: _set(x, (Ellipsis, slice(1, 3)), v), (X, torch.ones(1, 3, 1))),
    "set_longer": (lambda x, v: _set(x, slice(0, 2), v), (M, torch.ones(1, 2, 4))),
    "set_list": (lambda x, v: _set(x, [3, 0], v), (M, torch.ones(2, 4) * 5)),
    "set_tensor": (lambda x, i, v: _set(x, (i, slice(None), 1), v), (X, torch.tensor([0, 4]), torch.ones(2, 3) * 5)),
    "set_two": (lambda x, i, v: _set(x, (i, i), v), (M, torch.tensor([0, 3, -1]), V[:3] * 10)),
    "set_sliced": (lambda x, i, v: _set(x, (slice(1, 4), i), v), (M, torch.tensor([0, 3]), torch.ones(3, 2) * 9)),
    "set_mask": (lambda x, v: _set(x, x > 2, v), (M, torch.arange(10.0) * 100)),
    "set_mask_rows": (lambda x, v: _set(x, torch.tensor([True, False, True, False, False]), v), (M, torch.ones(4) * 9)),
    "set_itself": (lambda x: _set(x, slice(0, 3), x[2:5]), (M,)),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (M, torch.tensor([0, 3]), torch.ones(2, 4))),
    "index_put_add": (
        lambda x, i, v: (x * 1).index_put_((i,), v, accumulate=True), (M, torch.tensor([3, 0, 3]), torch.ones(3, 4))
    ),
    "index_add": (lambda x, i, v: x.index_add(0, i, v, alpha=2), (M, torch.tensor([3, 0, 3]), torch.ones(3, 4))),
    "index_add_": (lambda x, i, v: (x * 1).index_add_(-1, i, v), (M, torch.tensor([3, 0]), torch.ones(5, 2))),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), (M, torch.tensor([3, 0]), torch.ones(2, 4))),
    "index_fill": (lambda x, i: x.index_fill(0, i, 5.0), (M, torch.tensor([3, -5]))),
    "scatter": (lambda x, i, v: x.scatter(0, i, v), (M, torch.tensor([[0, 4, 2, 1]]), torch.ones(1, 4))),
    "scatter_number": (lambda x, i: x.scatter(1, i, 9.0), (M, torch.tensor([[0, 3]] * 5))),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), (M, I3[:, :4] + 2, torch.ones(3, 4))),
    "scatter_reduce": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "prod", include_self=False), (M, I3[:, :4] + 2, torch.ones(3, 4) * 3)
    ),
    "scatter_": (lambda x, i, v: (x * 1).scatter_(-1, i, v), (M[:3].clone(), I3, torch.ones(3, 4))),
    "where": (lambda c, a, b: torch.where(c, a, b), (M > 2, M, V[:4])),
}


def _set(x: Any, index: Any, value: Any) -> Any:
    x = x * 1
    x[index] = value
    return x


@pytest.mark.parametrize("name", MANY)
def test_several_inputs(name: str) -> None:
    fn, tensors = MANY[name]
    check(fn, *tensors, limit=24)


@pytest.mark.parametrize("number", [3, 2.5, True])
def test_assigning_numbers(number: Any) -> None:
    for index in (0, slice(1, 4), (slice(None), -1), [1, 3], (1, 2), torch.tensor([0, 4]), Ellipsis):
        check(lambda x, index=index: _set(x, index, number), M)


def test_complex_views() -> None:
    z = torch.complex(M, M + 1)
    check(lambda z: torch.view_as_real(z), z)
    check(lambda z: z.real * z.imag, z)
    check(lambda z: z.conj(), z)
    check(lambda z: z.mH, z)
    check(lambda x: torch.view_as_complex(x), torch.stack([M, M], -1))


def test_legal_without_a_gather() -> None:
    check(lambda x: x[1:4], M, mesh=[(3,)], legal=True)
    check(lambda x: x.flip(0), M, mesh=[(3,)], legal=True)
    check(lambda x: x.roll(1, -1), M, mesh=[(3,)], legal=True)
    check(lambda x: x[3], M, mesh=[(3,)], legal=True)
    check(lambda x: x.tril(), M, mesh=[(3,)], legal=True)
    check(lambda x: x.split(2), M, mesh=[(3,)], legal=True)
    check(lambda x: x[[1, 2]], M, mesh=[(3,)], legal=True)
    t = distribute(M, mesh_of(3), [Shard(0)])
    assert t[1:4].placements == (Shard(0),)
    assert [tuple(p.shape) for p in t[1:4].to_shards()] == [(1, 4)] * 3
    assert t.repeat_interleave(3, 0).placements == (Shard(0, 3),)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_copies_that_stand_for_views(placement: Any) -> None:
    def same(a: Any, b: torch.Tensor) -> None:
        assert torch.equal(a.to_torch(), b)

    t, x = distribute(M, mesh_of(3), [placement]), M.clone()
    t[:, 1:3] += 1
    x[:, 1:3] += 1
    t[1:3] *= 2
    x[1:3] *= 2
    same(t, x)
    v, w = t[1:4], x[1:4]
    column, plain_column = v.t()[1:3], w.t()[1:3]
    t[2] = 7
    x[2] = 7
    same(v, w)
    column.fill_(5)
    plain_column.fill_(5)
    for a, b in ((t, x), (v, w), (column, plain_column)):
        same(a, b)
    t.zero_()
    x.zero_()
    same(column + 1, plain_column + 1)
    v.add_(column[0, 0] + 3)
    w.add_(plain_column[0, 0] + 3)
    same(t, x)
    shown, plain = t.unbind(0)[3], x.unbind(0)[3]
    t.transpose_(0, 1)
    x.transpose_(0, 1)
    t.mul_(3)
    x.mul_(3)
    same(shown, plain)
    same(t, x)


def test_a_copy_that_torch_makes_is_one_here_too() -> None:
    """A piece may be contiguous, or of one element, where the whole is not."""
    x = M[:, :3].clone()
    for placement in (Replicate(), Shard(0), Shard(1)):
        t = distribute(x, mesh_of(3), [placement])
        for copy in (lambda a: a.t().contiguous(), lambda a: a.t()[1:].contiguous(), lambda a: a[[0]]):
            before = copy(t)
            before.add_(100)
            assert torch.equal(t.to_torch(), x)


def test_index_errors_are_raised_at_once() -> None:
    t = distribute(M, mesh_of(3), [Shard(0)])
    for bad in (5, -6, (0, 4), (0, 0, 0)):
        with pytest.raises(IndexError):
            t[bad]
    with pytest.raises(IndexError):
        t.select(0, 5)
    with pytest.raises(IndexError):
        t[torch.tensor([True, False])]
    with pytest.raises(ValueError, match="step"):
        t[::-1]
    with pytest.raises(IndexError):
        t[5] = 1


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_wrong_index_tensor_raises_at_the_await(placement: Any) -> None:
    t = distribute(M, mesh_of(3), [placement])
    for fn in (lambda t: t[torch.tensor([0, 9])], lambda t: t.index_select(0, torch.tensor([9]))):
        bad = fn(t)
        with pytest.raises(IndexError):
            bad.to_torch()
    assert torch.equal(t.to_torch(), M)


def test_an_int_index_makes_one_signature() -> None:
    t = distribute(torch.arange(40.0).reshape(10, 4), mesh_of(3), [Shard(0)])
    t[0]
    before = dtorch.ops.table.cache_size()
    for i in range(-9, 10):
        t[i]
    assert dtorch.ops.table.cache_size() == before


def test_wait_shape() -> None:
    async def main() -> None:
        t = distribute(M, mesh_of(3), [Shard(0)])
        found = await dtorch.wait_shape(dtorch.nonzero, t)
        assert torch.equal(await found, M.nonzero())
        with pytest.raises(TypeError):
            await dtorch.wait_shape(dtorch.exp, t)

    asyncio.run(main())


# ---- in place, metadata only


@pytest.mark.parametrize("name", ["squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_"])
def test_views_in_place(name: str) -> None:
    args = {"squeeze_": (), "unsqueeze_": (1,), "transpose_": (0, 1), "t_": (), "swapaxes_": (-1, 0)}[name]
    x = torch.arange(4.0).view(1, 4)
    with dtorch.auto_redistribute():
        check(lambda x: (getattr(y := x * 1, name)(*args), y.mul_(2))[1], x)


# ---- dtype and device


def test_to() -> None:
    mesh = mesh_of(3)
    t = distribute(M, mesh, [Shard(0)])
    assert t.to("cpu") is t
    assert t.cpu() is t
    assert t.to(torch.float32) is t
    assert t.to(t) is t
    assert t.to("cpu", torch.int64, non_blocking=True).dtype == torch.int64
    assert t.to(dtype=torch.int64).placements == (Shard(0),)
    assert torch.equal(t.to(DeviceMesh("cpu", [0])).to_torch(), M)
    assert t.type() == "torch.FloatTensor"
    assert t.type(torch.int32).dtype == torch.int32
    with pytest.raises(RuntimeError, match="redistribute"):
        t.to("cuda")


# ---- random


RANDOM: dict[str, Any] = {
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 3, 10),
    "normal_": lambda x: x.normal_(1, 2),
    "normal_transposed": lambda x: x.t().normal_(),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "random_": lambda x: x.random_(0, 10),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "exponential_": lambda x: x.exponential_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "normal": lambda x: torch.normal(x, 1.0),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2),
    "poisson": lambda x: torch.poisson(x.abs()),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x, 0.3, inplace=True),
    "dropout_eval": lambda x: F.dropout(x, 0.3, training=False),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_torchs_for_any_placement(name: str) -> None:
    fn = RANDOM[name]
    session = dtorch.current_session()

    def twice(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            torch.manual_seed(5)
        else:
            session.seed(5)
        return fn(x), fn(x)

    check(twice, M, limit=12)


@pytest.mark.parametrize("shape", [(1,), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", [name for name in RANDOM if not name.endswith("_")])
def test_an_axis_of_one_device_changes_no_random_number(name: str, shape: tuple[int, ...]) -> None:
    fn, session = RANDOM[name], dtorch.current_session()
    torch.manual_seed(5)
    want = fn(M.clone())
    alone = shape.index(1)
    for own in (Shard(0), Shard(1), Partial()):
        for other in (Replicate(), Shard(0)):
            placed = [other] * len(shape)
            placed[alone] = own
            session.seed(5)
            with dtorch.auto_redistribute():
                ours = fn(dtorch.tensor(M, device_mesh=mesh_of(*shape)).redistribute(placed))
            torch.testing.assert_close(ours.to_torch(), want)


def test_attention_of_weights_cut_for_one_device_is_torchs() -> None:
    x, w, b = torch.randn(5, 2, 8), torch.randn(24, 8), torch.randn(24)
    want = F.multi_head_attention_forward(x, x, x, 8, 2, w, b, None, None, False, 0.0, w[:8], b[:8], False)
    ours = dtorch.tensor(w, device_mesh=mesh_of(1), placements=[Shard(0)])
    made = F.multi_head_attention_forward(x, x, x, 8, 2, ours, b, None, None, False, 0.0, w[:8], b[:8], False)
    for a, c in zip(made, want, strict=True):
        assert torch.equal(a.to_torch(), c)


def test_dropout_of_a_pending_sum() -> None:
    session = dtorch.current_session()
    t = distribute(M, mesh_of(3), [Partial()])
    session.seed(1)
    dropped = F.dropout(t, 0.5)
    assert dropped.placements == (Partial(),)
    torch.manual_seed(1)
    torch.testing.assert_close(dropped.to_torch(), F.dropout(M, 0.5))


# ---- functions without a row


def test_functions_without_a_row_run_on_replicated_inputs() -> None:
    without = dtorch.ops._fallback.generic_names()
    name = next(n for n in ("torch.cov", "torch.corrcoef", "torch.vander", "torch.cdist") if n in without)
    short = name.rsplit(".", 1)[-1]
    t = distribute(M, mesh_of(3), [Replicate()])
    assert torch.equal(getattr(torch, short)(t).to_torch(), getattr(torch, short)(M))
    with pytest.raises(PlacementError):
        getattr(torch, short)(distribute(M, mesh_of(3), [Shard(0)]))
    assert name not in dtorch.ops._fallback.missing_ops() or len(dtorch.ops._fallback.missing_ops()) > 10


def test_what_is_no_op_says_so() -> None:
    t = distribute(M, mesh_of(3), [Replicate()])
    with pytest.raises(NotImplementedError, match="dtorch has no"):
        torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)
    with pytest.raises(AttributeError):
        t.no_such_method()


# ---- memory


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", ["plain", "turned", "turned and copied", "three dims"])
def test_as_strided_sees_the_elements_as_torch_lays_them(name: str, placement: Any) -> None:
    make: dict[str, Any] = {
        "plain": lambda x: x,
        "turned": lambda x: x.t(),
        "turned and copied": lambda x: x.t().clone(),
        "three dims": lambda x: x.reshape(5, 2, 2).permute(2, 0, 1) * 2,
    }
    with dtorch.auto_redistribute():
        ours = make[name](dtorch.tensor(M, device_mesh=mesh_of(3), placements=[placement]))
        want = make[name](M)
        assert ours.stride() == want.stride()
        assert torch.equal(ours.as_strided((3, 4), (4, 1)).to_torch(), want.as_strided((3, 4), (4, 1)))
        made = torch.as_strided_scatter(ours, torch.zeros(2, 3), (2, 3), (4, 1))
        assert torch.equal(made.to_torch(), torch.as_strided_scatter(want, torch.zeros(2, 3), (2, 3), (4, 1)))
        if placement == Shard(0):
            with pytest.raises(RuntimeError, match="not one piece of memory; clone"):
                ours.expand(2, *ours.shape).as_strided((2,), (1,))
