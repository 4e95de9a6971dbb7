"""Ops along sharded dims that used to gather: order, diagonals, masks, rows that are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard
from tests._sharding import check, distribute, grid, like, mesh_of, moved

R, S0, S1 = (Replicate(),), (Shard(0),), (Shard(1),)
X, V, TIES = grid(7, 5), grid(6), grid(9, 4).round()
HOLES = TIES.clone()
HOLES[4, 1] = HOLES[6, 1] = HOLES[2, 3] = float("nan")
MASK = grid(7, 5, seed=3) > 0

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], list[Any]]] = {
    "cummax": (lambda x: tuple(x.cummax(0)), (TIES,), [(S0,), (S1,)]),
    "cummin": (lambda x: tuple(x.cummin(0)), (HOLES,), [(S0,)]),
    "cummax of bools": (lambda x: tuple(x.cummax(0)), (MASK,), [(S0,)]),
    "diff": (lambda x: x.diff(2, 0), (X,), [(S0,), (S1,)]),
    "diff of bools": (lambda x: x.diff(dim=0), (MASK,), [(S0,)]),
    "diag": (lambda x: x.diag(1), (X,), [(S0,), (S1,)]),
    "diag below": (lambda x: torch.diag(x, -2), (V,), [(S0,)]),
    "diag above": (lambda x: x.diagflat(3), (V,), [(S0,)]),
    "diag_embed": (lambda x: x.diag_embed(-1, 2, 0), (X,), [(S0,), (S1,)]),
    "block_diag": (lambda x, y: torch.block_diag(x, y, x), (X, TIES), [(S0, S0), (S1, S1), (R, S0)]),
    "cartesian_prod": (lambda x, y: torch.cartesian_prod(x, y), (V, grid(4)), [(S0, R)]),
    "masked_scatter": (lambda x, m: x.masked_scatter(m, like(x, torch.arange(35.0))), (X, MASK), [(S0, S0), (S1, R)]),
    "masked_scatter wide": (lambda x, m: x.masked_scatter(m, like(x, torch.arange(35.0))), (X, MASK[:, :1]), [(S0, S0)]),
    "glu": (lambda x: F.glu(x, 0), (grid(6, 5),), [(S1,)]),
    "cosine": (lambda x, y: F.cosine_similarity(x, y), (X, grid(7, 5, seed=1)), [(S0, S0), (S0, R)]),
    "distance": (lambda x, y: F.pairwise_distance(x, y, keepdim=True), (X, grid(7, 5, seed=1)), [(S0, S0)]),
    "cross": (lambda x, y: torch.linalg.cross(x, y, dim=-1), (grid(5, 3), grid(1, 3)), [(S0, R)]),
    "isin": (lambda x, y: torch.isin(x, y), (TIES, torch.tensor([1.0, 2.0])), [(S0, R), (S1, R)]),
    "histc": (lambda x: torch.histc(x, 5, -1, 1), (X,), [(S0,), (S1,)]),
    "histc of its own range": (lambda x: torch.histc(x, 5), (X,), []),
    "bag": (lambda i, w: F.embedding_bag(i, w), (torch.arange(8).reshape(4, 2) % 5, grid(5, 3)), [(S0, R), (R, S1)]),
    "bag norm": (lambda i, w: F.embedding_bag(i, w, None, 0.5), (torch.arange(8).reshape(4, 2) % 5, grid(5, 3)), []),
    "new": (lambda x: x.new_full((2, 3), 7) + x.new_zeros(3) + x.new_ones(()), (X,), [(S0,), (S1,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_shards_will_do(name: str) -> None:
    fn, tensors, legal = CASES[name]
    check(fn, *tensors, mesh=((3,), (2, 2)), legal=legal, limit=16)


@pytest.mark.parametrize("ordered", [True, False])
def test_topk_chooses_among_equals_as_torch_does(ordered: bool) -> None:
    """Indices too: of many equal values, NaN, and equal values of which one piece holds more than it may offer."""
    draw = torch.Generator().manual_seed(5)
    few = torch.full((4, 12), 3.0)
    few[:, 5] = 7
    for x in (torch.randint(0, 4, (4, 200), generator=draw).float(), torch.randn(4, 200, generator=draw), few, HOLES.t()):
        for k in (1, 3, 7):
            for largest in (True, False):
                mine = distribute(x, mesh_of(3), [Shard(1)]).topk(k, -1, largest, ordered)
                wanted = x.topk(k, -1, largest, ordered)
                assert torch.equal(mine.indices.to_torch(), wanted.indices)
                assert torch.equal(mine.values.to_torch().nan_to_num(99), wanted.values.nan_to_num(99))


def test_topk_of_different_values_moves_candidates_only() -> None:
    x = torch.randperm(1000).float()
    before = moved()
    dtorch.topk(distribute(x, mesh_of(4), [Shard(0)]), 5)
    assert moved() - before == 12 * 6 * (4 + 8)


def test_masked_scatter_moves_masks_only() -> None:
    """As image features are put among the embeddings of a text: x is sharded over the sequence."""
    x, mask = grid(2, 8, 4), (torch.arange(16) % 3 == 0).reshape(2, 8, 1)
    features = grid(6, 4, seed=1)
    mesh = mesh_of(4)
    mine = distribute(x, mesh, [Shard(1)])
    before = moved()
    made = mine.masked_scatter(distribute(mask, mesh, [Shard(1)]), distribute(features, mesh, [Replicate()]))
    assert moved() - before == 16 * 3
    assert made.placements == (Shard(1),)
    assert torch.equal(made.to_torch(), x.masked_scatter(mask, features))
    mine.masked_scatter_(distribute(mask, mesh, [Replicate()]), distribute(features, mesh, [Replicate()]))
    assert torch.equal(mine.to_torch(), made.to_torch())
    few = mine.masked_scatter(distribute(mask, mesh, [Shard(1)]), distribute(features[:2], mesh, [Replicate()]))
    with pytest.raises(RuntimeError, match="fewer elements"):
        few.to_torch()


def test_counts_stay_pending() -> None:
    made = torch.histc(distribute(X, mesh_of(3), [Shard(0)]), 4, -2, 2)
    assert made.placements == (Partial(),)
    assert torch.equal(made.to_torch(), torch.histc(X, 4, -2, 2))
