"""Results whose shapes depend on values: right, on the devices, and fit for what follows; in sync code and awaited."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import PlacementError, Replicate, Shard
from dtorch.blocking import BlockingWarning
from tests._sharding import distribute, mesh_of

X = torch.tensor([[3.0, 0.0, 1.0], [0.0, 0.0, 2.0], [3.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 2.0]])
INTS = torch.tensor([4, 1, 1, 0, 4, 2, 2, 2])

CALLS: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": torch.nonzero,
    "nonzero as tuple": lambda x: torch.nonzero(x, as_tuple=True),
    "method, as tuple": lambda x: x.nonzero(as_tuple=True),
    "argwhere": torch.argwhere,
    "where": lambda x: torch.where(x > 1),
    "masked_select": lambda x: x.masked_select(x > 0),
    "masked_select, broadcast": lambda x: torch.masked_select(x, x[0] > 0),
    "boolean index": lambda x: x[x > 0],
    "boolean index of rows": lambda x: x[x[:, 0] > 0],
    "boolean index and slice": lambda x: x[x[:, 0] > 0, 1:],
    "unique": torch.unique,
    "unique method": lambda x: x.unique(),
    "unique unsorted": lambda x: torch.unique(x, sorted=False).sort().values,
    "unique inverse": lambda x: torch.unique(x, return_inverse=True),
    "unique counts": lambda x: torch.unique(x, return_counts=True),
    "unique both": lambda x: x.unique(True, True, True),
    "unique rows": lambda x: torch.unique(x, dim=0),
    "unique columns, all": lambda x: torch.unique(x, True, True, True, 1),
    "unique negative dim": lambda x: torch.unique(x, return_inverse=True, dim=-1),
    "unique_consecutive": torch.unique_consecutive,
    "unique_consecutive, all": lambda x: x.unique_consecutive(True, True),
    "unique_consecutive rows": lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True, dim=0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 2]).long(), dim=0),
    "bincount": lambda x: x[:, 0].long().bincount(),
    "bincount with weights": lambda x: torch.bincount(x[:, 0].long(), weights=x[:, 2], minlength=6),
    "nothing": lambda x: x[x > 99],
}


def pieces(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want) or isinstance(got, dtorch.Tensor)
    for g, w in zip(pieces(got), pieces(want), strict=True):
        assert isinstance(g, dtorch.Tensor)
        assert tuple(g.shape) == tuple(w.shape)
        assert g.dtype == w.dtype
        assert torch.equal(g.to_torch(), w)
        # it stays on the devices, and later ops take it
        assert torch.equal((g + 1).to_torch(), w + 1)
        if w.ndim and w.numel():
            assert torch.equal(g.redistribute([Shard(0)] * g.device_mesh.ndim).sum(0).to_torch(), w.sum(0))


@pytest.mark.parametrize("name", CALLS)
def test_in_sync_code(name: str) -> None:
    for mesh, placed in (((3,), (Replicate(),)), ((3,), (Shard(0),)), ((3,), (Shard(1),)), ((2, 2), (Shard(0), Shard(1)))):
        x = distribute(X, mesh_of(*mesh), placed)
        try:
            got = CALLS[name](x)
        except PlacementError:
            with dtorch.auto_redistribute():
                got = CALLS[name](x)
        same(got, CALLS[name](X))


@pytest.mark.parametrize("name", CALLS)
async def test_awaited_nothing_blocks(name: str) -> None:
    with warnings.catch_warnings(), dtorch.auto_redistribute():
        warnings.simplefilter("error", BlockingWarning)
        x = distribute(X, mesh_of(3), (Shard(0),))
        got = await dtorch.wait_shape(CALLS[name], x)
        for g, w in zip(pieces(got), pieces(CALLS[name](X)), strict=True):
            assert tuple(g.shape) == tuple(w.shape)
            assert torch.equal(await g, w)


async def test_several_shapes_in_one_function_and_several_tasks() -> None:
    x = distribute(X, mesh_of(2), (Replicate(),))

    def chain() -> Any:
        big = x[x > 0]
        return big.unique()[torch.nonzero(big.unique() > 1).flatten()]

    with warnings.catch_warnings():
        warnings.simplefilter("error", BlockingWarning)
        for got in await asyncio.gather(*(dtorch.wait_shape(chain) for _ in range(3))):
            assert torch.equal(await got, torch.tensor([2.0, 3.0]))


async def test_methods_and_functions_of_dtorch_can_be_named() -> None:
    x = distribute(INTS, mesh_of(2), (Shard(0),))
    assert torch.equal(await (await dtorch.wait_shape(x.unique)), INTS.unique())
    values, inverse, counts = await dtorch.wait_shape(dtorch.unique, x, return_inverse=True, return_counts=True)
    for got, want in zip((values, inverse, counts), torch.unique(INTS, return_inverse=True, return_counts=True), strict=True):
        assert torch.equal(await got, want)
    with pytest.raises(TypeError, match="known at once"):
        await dtorch.wait_shape(torch.exp, distribute(X, mesh_of(2), (Replicate(),)))
    with pytest.raises(IndexError):
        await dtorch.wait_shape(lambda: x[99])


BLOCKING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nonzero": (lambda x: x.nonzero(), "wait_shape"),
    "masked_select": (lambda x: x.masked_select(x > 0), "wait_shape"),
    "boolean index": (lambda x: x[x > 0], "wait_shape"),
    "unique": (lambda x: torch.unique(x), "wait_shape"),
    "unique_consecutive": (lambda x: x.unique_consecutive(), "wait_shape"),
    "bincount": (lambda x: x.long().flatten().bincount(), "wait_shape"),
    "item": (lambda x: x.sum().item(), "item_async"),
    "tolist": (lambda x: x.tolist(), "tolist_async"),
}


@pytest.mark.parametrize("name", BLOCKING)
async def test_blocking_a_running_loop_warns_once_with_the_line(name: str) -> None:
    fn, form = BLOCKING[name]
    x = distribute(X, mesh_of(2), (Replicate(),))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            fn(x)
    assert len(said) == 1
    assert said[0].category is BlockingWarning
    assert said[0].filename == __file__
    assert form in str(said[0].message).partition(" (/")[0]


def test_numbers_of_a_tensor() -> None:
    for placed in (Replicate(), Shard(0)):
        x = distribute(X, mesh_of(3), [placed])
        assert x.tolist() == X.tolist()
        assert x[0, 0].item() == 3.0
        assert [bool(v) for v in x[:, 0] > 0] == [True, False, True, True, False]
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            x.item()


# ---- a tensor of no dims where torch takes an int

GRID = torch.arange(24.0).reshape(4, 6)
READS: dict[str, Callable[[Any, Callable[[int], Any]], Any]] = {
    "view": lambda x, n: x.view(n(2), 12),
    "reshape": lambda x, n: torch.reshape(x, (n(2), -1)),
    "expand": lambda x, n: x[:1].expand(n(3), 6),
    "narrow": lambda x, n: x.narrow(n(1), n(1), n(2)),
    "repeat": lambda x, n: x.repeat(n(2), 1),
    "sum": lambda x, n: x.sum(n(1)),
    "mean of dims": lambda x, n: x.mean((n(0), n(1))),
    "topk": lambda x, n: x.topk(n(2)).values,
    "roll": lambda x, n: x.roll(n(1), n(0)),
    "split": lambda x, n: x.split(n(3))[1],
    "chunk": lambda x, n: x.chunk(n(2), dim=n(1))[1],
    "unflatten": lambda x, n: x.unflatten(1, (n(2), 3)),
    "transpose": lambda x, n: x.transpose(n(0), n(1)),
    "cat": lambda x, n: torch.cat([x, x], n(1)),
    "flip": lambda x, n: x.flip(n(0)),
    "rot90": lambda x, n: x.rot90(n(1)),
    "pad": lambda x, n: torch.nn.functional.pad(x, (n(1), n(2))),
    "one_hot": lambda x, n: torch.nn.functional.one_hot(x.long() % 5, n(5)),
    "layer_norm": lambda x, n: torch.nn.functional.layer_norm(x, (n(6),)),
    "interpolate": lambda x, n: torch.nn.functional.interpolate(x[None], size=n(3)),
    "new_zeros": lambda x, n: x.new_zeros(n(2), 3),
    "a number": lambda x, n: (x + n(2)).clamp(n(3), n(9)) ** n(2),
    "an index": lambda x, n: x[n(2)],
}


@pytest.mark.parametrize("kind", ["plain", "native", "faced"])
@pytest.mark.parametrize("name", READS)
def test_a_tensor_of_no_dims_stands_for_an_int(name: str, kind: str) -> None:
    mesh = mesh_of(3)
    made = {
        "plain": torch.tensor,
        "native": lambda v: dtorch.tensor(v, device_mesh=mesh),
        "faced": lambda v: dtorch.TorchTensor(dtorch.tensor(v, device_mesh=mesh)),
    }[kind]
    want = READS[name](GRID, torch.tensor)
    for placement in (Replicate(), Shard(0), Shard(1)):
        for again in range(2):
            with dtorch.auto_redistribute():
                ours = READS[name](dtorch.tensor(GRID + again, device_mesh=mesh, placements=[placement]), made)
            assert torch.equal(ours.to_torch(), READS[name](GRID + again, torch.tensor) if again else want)


def test_factories_take_numbers_of_any_kind() -> None:
    numpy = pytest.importorskip("numpy")
    for number in (numpy.int64, torch.tensor, lambda v: dtorch.tensor(v, device_mesh=mesh_of(2))):
        with mesh_of(2):
            assert torch.arange(number(3)).tolist() == [0, 1, 2]
            assert torch.full((number(2),), number(3)).tolist() == [3, 3]
            assert torch.zeros((number(2), number(1))).shape == (2, 1)
            assert torch.linspace(0, number(2), number(3)).tolist() == [0, 1, 2]
