"""Faults that others met in reductions, products, orders and losses, each with its right value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from tests._sharding import distribute, mesh_of

R = Replicate()


def put(tensor: torch.Tensor, shape: int | tuple[int, ...], *placements: Any) -> dtorch.Tensor:
    return distribute(tensor, mesh_of(*((shape,) if isinstance(shape, int) else shape)), placements)


def same(result: dtorch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(result.to_torch(), torch.as_tensor(expected))


def test_a_mean_weighs_uneven_pieces_by_what_they_hold() -> None:  # A01
    x = torch.arange(12.0).view(3, 4)
    same(put(x, 2, Shard(0)).mean(), 5.5)
    same(put(x[:1], 2, Shard(0)).mean(), 1.5)
    same(put(x, 2, Shard(0)).mean(0), [4.0, 5.0, 6.0, 7.0])
    same(put(x, 2, Shard(0)).var(), 13.0)


@pytest.mark.parametrize("num", [1, 3, 5, 8])
def test_pieces_of_a_dim_that_is_shorter_than_the_mesh(num: int) -> None:  # A06
    for size in range(10):
        x = torch.arange(size)
        t = put(x, num, Shard(0))
        pieces = t.to_shards()
        assert sum(len(p) for p in pieces) == size
        assert torch.equal(t.to_torch(), x)
        same(t.sum(), x.sum())
    assert [len(p) for p in put(torch.arange(5), 4, Shard(0)).to_shards()] == [2, 2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_extremes_with_an_empty_piece(dtype: torch.dtype) -> None:  # A08
    t = put(torch.arange(6, dtype=dtype).view(2, 3), 4, Shard(0))
    same(t.max(), torch.tensor(5, dtype=dtype))
    same(t.amax(0), torch.tensor([3, 4, 5], dtype=dtype))
    found = t.min(dim=0)
    same(found.values, torch.tensor([0, 1, 2], dtype=dtype))
    same(found.indices, [0, 0, 0])
    same(put(torch.tensor([[0, 1]], dtype=dtype), 3, Shard(0)).max(), torch.tensor(1, dtype=dtype))


def test_pieces_are_contiguous_after_a_redistribution() -> None:  # A10
    x, w = torch.randn(4, 31, 10), torch.randn(3, 10)
    y = put(x, 4, Shard(1)).redistribute([R])
    assert all(p.is_contiguous() for p in y.to_shards())
    same(F.linear(y, put(w, 4, R)), F.linear(x, w))


def test_column_then_row_parallel_with_an_odd_hidden_size() -> None:  # A12
    x, first, second = torch.randn(4, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    w1, b1, w2, b2 = (p.detach() for p in (*first.parameters(), *second.parameters()))
    hidden = F.linear(put(x, 2, R), put(w1, 2, Shard(0)), put(b1, 2, Shard(0)))
    assert [tuple(p.shape) for p in hidden.to_shards()] == [(4, 3), (4, 2)]
    out = F.linear(hidden, put(w2, 2, Shard(1)), put(b2, 2, Partial()))
    assert out.placements == (Partial(),)
    torch.testing.assert_close(out.to_torch(), second(first(x)).detach())


def test_a_contraction_of_no_elements() -> None:  # A13
    b = torch.arange(4.0)
    for placed in (Shard(0), R):
        same(
            torch.addmm(put(b, 3, R), put(torch.empty(12, 0), 3, placed), put(torch.empty(0, 4), 3, R)), b.expand(12, 4)
        )
    out = torch.addmm(put(b, 3, Partial()), put(torch.empty(12, 0), 3, Shard(1)), put(torch.empty(0, 4), 3, Shard(0)))
    same(out, b.expand(12, 4))
    same(torch.mm(put(torch.empty(4, 0), 3, Shard(1)), put(torch.empty(0, 3), 3, Shard(0))), torch.zeros(4, 3))


def test_shard_dims_are_renumbered_when_a_dim_goes() -> None:  # C06
    u = put(torch.ones(2, 2), 2, Shard(1)).sum(0)
    assert u.shape == (2,)
    assert u.placements == (Shard(0),)
    same(u + u, [4.0, 4.0])


TAKES_A_DIM = [
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "std", "var", "logsumexp", "argmax", "argmin"),
    *("softmax", "log_softmax", "cumsum", "cumprod", "cummax", "sort", "argsort", "median", "nansum", "count_nonzero"),
    "mode",
]


@pytest.mark.parametrize("name", TAKES_A_DIM)
def test_negative_dims_mean_what_positive_ones_do(name: str) -> None:  # C07
    x = torch.tensor([[0.0, 7.0, 2.0], [3.0, 1.0, 5.0], [6.0, 4.0, 8.0]])
    for placed in (Shard(-2), Shard(1)):
        for dim in (0, 1):
            results = []
            for own in (dim, dim - 2):
                got = getattr(put(x, 2, placed), name)(own)
                results.append(got if isinstance(got, tuple) else (got,))
            want = getattr(x, name)(dim)
            for found in results:
                for value, right in zip(found, want if isinstance(want, tuple) else (want,), strict=True):
                    same(value, right)


def test_scaling_and_comparing_a_pending_sum() -> None:  # D02
    mesh = DeviceMesh("cpu", [0, 1])
    t = dtorch.from_shards(
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])], device_mesh=mesh, placements=[Partial()]
    )
    for _ in range(2):
        same(-5 * t, [-20.0, -35.0])
        same(2 * t, [8.0, 14.0])
        with dtorch.auto_redistribute():
            assert not (-5 * t == 2 * t).any().item()


def test_sums_of_truth_values_are_numbers() -> None:  # D06
    t = put(torch.tensor([True, True, False, True]), 4, Shard(0))
    assert not t.all().item()
    assert t.any().item()
    same(put(torch.ones(7, dtype=torch.bool), 3, Shard(0)).sum(), 7)


def test_a_running_sum_along_the_sharded_dim() -> None:  # E03
    result = put(torch.ones(8, dtype=torch.int32), 4, Shard(0)).cumsum(0)
    assert result.dtype == torch.int64
    same(result, torch.arange(1, 9))
    x = torch.randn(2, 10)
    same(put(x, 4, Shard(1)).cumsum(1), x.cumsum(1))


def test_a_sharded_vector_is_not_equal_to_a_scalar() -> None:  # E06
    t = put(torch.arange(4.0), 2, Shard(0))
    zero = put(torch.tensor(0.0), 2, R)
    assert torch.equal(t, zero) is False
    assert torch.equal(t, put(torch.arange(4.0), 2, R)) is True
    assert torch.allclose(t, zero) is False
    same(t == zero, [True, False, False, False])


def test_a_contraction_that_two_axes_cut() -> None:  # E07
    x = torch.arange(16.0).view(4, 4)
    a, b = put(x, (2, 2), Shard(1), Shard(1)), put(x, (2, 2), Shard(0), Shard(0))
    result = (a @ b).to_torch()
    assert result[0].tolist() == [56, 62, 68, 74]
    assert result[3].tolist() == [344, 398, 452, 506]
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]])
    c = distribute(x, turned, [Shard(0), Shard(0)]).redistribute(device_mesh=mesh_of(2, 2))
    assert torch.equal((a @ c).to_torch(), result)


def test_two_sharded_embeddings_side_by_side() -> None:  # F01
    ids = torch.tensor([0, 4, 9, 3, 9])
    first, second = torch.randn(10, 3), torch.randn(10, 5)
    for _ in range(2):
        for table in (first, second, first.flip(0)):
            same(F.embedding(put(ids, 4, R), put(table, 4, Shard(0))), F.embedding(ids, table))


LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 3.0, 0.0, 1.0]])


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("placed", [Shard(0), Shard(1), R])
def test_label_smoothing_with_sharded_classes(num: int, placed: Any) -> None:  # F02
    x, target = put(LOGITS, num, placed), put(torch.tensor([0, 3]), num, R)
    assert math.isclose(F.cross_entropy(x, target, label_smoothing=0.1).item(), 1.40059, abs_tol=1e-5)
    assert math.isclose(F.cross_entropy(x, target).item(), 1.32559, abs_tol=1e-5)


def test_replicated_logits_count_once() -> None:  # F03
    target = torch.tensor([0, 3])
    expected = F.cross_entropy(LOGITS, target)
    for placed in (R, Shard(1)):
        same(F.cross_entropy(put(LOGITS, 4, placed), put(target, 4, R)), expected)


def test_log_softmax_of_sharded_classes_by_itself() -> None:  # F05
    x = torch.tensor([1.0, 2.0, 0.0, 3.0])
    for num in (2, 3):
        logs = put(x, num, Shard(0)).log_softmax(0)
        same(logs, x.log_softmax(0))
        same((logs.exp() * logs).sum().neg(), torch.distributions.Categorical(logits=x).entropy())


def test_cached_signatures_know_every_argument() -> None:  # F06
    x = torch.randn(3, 10)
    lows = torch.zeros(3, 10)
    for _ in range(2):
        for shape in ([10], [3, 10]):
            same(F.layer_norm(put(x, 2, Shard(0)), shape), F.layer_norm(x, shape))
        t, low = put(x, 2, Shard(0)), put(lows, 2, Shard(0))
        same(torch.clamp(t, low, None), torch.clamp(x, lows, None))
        same(torch.clamp(t, None, low), torch.clamp(x, None, lows))
        same(t.sum(0, keepdim=True), x.sum(0, keepdim=True))
        same(t.sum(0), x.sum(0))
        same(t.std(0, correction=0), x.std(0, correction=0))
        same(t.std(0), x.std(0))


def test_depthwise_convolution_with_sharded_channels() -> None:  # F08
    x, w = torch.randn(1, 8, 5), torch.randn(8, 1, 3)
    result = F.conv1d(put(x, 4, Shard(1)), put(w, 4, Shard(0)), groups=8)
    assert result.placements == (Shard(1),)
    same(result, F.conv1d(x, w, groups=8))
