"""Reductions, products, normalisations, orders, losses, attention and convolutions under every placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard
from tests._sharding import check, distribute, mesh_of

R = Replicate()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, which wait long for each other on a busy machine."""
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of mixed signs that are the same in every run."""
    count = math.prod(shape)
    flat = torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * 12.9898) * 3
    return flat.reshape(shape).to(dtype)


def ties(*shape: int) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) * 7 % 4 - 1).reshape(shape)


def call(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """torch's function of that name, of the tensors and then these arguments."""
    fn: Any = torch
    for part in name.split("."):
        fn = getattr(fn, part)
    return lambda *tensors: fn(*tensors, *args, **kwargs)


# ---- reductions

REDUCTIONS = [
    ("sum", {}), ("sum", {"dim": (0, -1), "keepdim": True}), ("sum", {"dim": -2, "dtype": torch.float64}),
    ("mean", {}), ("mean", {"dim": -1}), ("mean", {"dim": (0, 1), "keepdim": True}),
    ("prod", {}), ("prod", {"dim": -1, "keepdim": True}),
    ("amax", {"dim": ()}), ("amax", {"dim": -1}), ("amin", {"dim": (0, 1)}), ("max", {}), ("min", {}),
    ("max", {"dim": -1}), ("min", {"dim": 0, "keepdim": True}), ("aminmax", {"dim": 0}), ("aminmax", {}),
    ("std", {}), ("std", {"dim": -1, "keepdim": True}), ("var", {"dim": (0, 1)}), ("var", {"dim": 0, "correction": 0}),
    ("var", {"unbiased": False}), ("var_mean", {"dim": 1}), ("std_mean", {"dim": 0, "keepdim": True}),
    ("norm", {}), ("norm", {"p": 1, "dim": -1}), ("norm", {"p": math.inf, "dim": 0}), ("norm", {"p": -math.inf}),
    ("norm", {"p": 0, "dim": 0}), ("norm", {"p": 3.0, "dim": (0, 1), "keepdim": True}),
    ("linalg.vector_norm", {"ord": 0.5, "dim": -1}), ("linalg.norm", {}), ("linalg.norm", {"ord": "fro"}),
    ("linalg.norm", {"ord": 1}), ("linalg.matrix_norm", {"ord": "nuc"}),
    ("logsumexp", {"dim": -1}), ("logsumexp", {"dim": (0, 1), "keepdim": True}),
    ("nansum", {"dim": 0}), ("nanmean", {"dim": -1}), ("count_nonzero", {"dim": 0}), ("count_nonzero", {}),
    ("argmax", {}), ("argmin", {"dim": -1, "keepdim": True}), ("median", {}), ("median", {"dim": 0}), ("trace", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kwargs"), REDUCTIONS, ids=lambda v: v if isinstance(v, str) else str(list(v.values()))
)
def test_reductions(name: str, kwargs: dict[str, Any]) -> None:
    check(call(name, **kwargs), values(5, 4), legal=True)


@pytest.mark.parametrize("name", ["sum", "mean", "trace"])
def test_linear_reductions_keep_a_pending_sum(name: str) -> None:
    check(call(name), values(5, 4), partial=True, legal=True)


@pytest.mark.parametrize("shape", [(1, 4), (5, 0), (2, 3, 1)])
def test_reductions_of_small_and_empty(shape: tuple[int, ...]) -> None:
    names = ["sum", "mean", "prod", "any", "all", "norm", "count_nonzero", "nansum"]
    if math.prod(shape):
        names += ["amax", "amin", "max", "argmin", "std_mean", "var"]
    for name in names:
        fn = call(name, correction=0) if name in ("std_mean", "var") else call(name)
        check(fn, values(*shape), legal=True)
        check(call(name, 0, **({"correction": 0} if name in ("std_mean", "var") else {})), values(*shape), legal=True)


def test_three_axes_reduce_one_dim() -> None:
    for name in ("sum", "mean", "amax", "argmax", "std", "norm"):
        check(call(name), values(7, 3), mesh=[(2, 2, 2)], legal=True, limit=30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", ["sum", "mean", "var", "norm"])
def test_reductions_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(call(name, 0) if name != "norm" else call(name, 2, 0), values(5, 3, dtype=dtype), legal=True, tolerance=4e-2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_reductions_of_whole_numbers(dtype: torch.dtype) -> None:
    x = ties(5, 3).clamp_min(0).to(dtype)
    for name in ("sum", "prod", "any", "all", "amax", "max", "count_nonzero"):
        check(call(name), x, legal=True)
        check(call(name, 0), x, legal=True)


def test_extremes_with_ties_and_nan_have_the_first_index() -> None:
    x = ties(5, 4).float()
    for name in ("argmax", "argmin"):
        check(call(name), x, legal=True)
        check(call(name, 0), x, legal=True)
    x[3, 1] = math.nan
    x[4, 1] = math.nan
    for name in ("max", "min", "argmax"):
        check(call(name, 0), x, legal=True)
    check(call("argmax"), x, legal=True)
    check(call("max"), x, legal=True)
    check(call("nanmean", 0), x, legal=True)


def test_values_of_a_maximum_are_a_named_tuple() -> None:
    x = distribute(values(5, 4), mesh_of(3), [Shard(0)])
    found = x.max(dim=0)
    assert isinstance(found, torch.return_types.max)
    assert found.indices.to_torch().equal(values(5, 4).max(0).indices)


def test_where_results_are_placed() -> None:
    x = distribute(values(6, 4), mesh_of(3), [Shard(0)])
    assert x.sum().placements == (Partial(),)
    assert x.mean(0).placements == (Partial(),)
    assert x.amax(0).placements == (Partial("max"),)
    assert x.prod(0).placements == (Partial("product"),)
    assert x.sum(1).placements == (Shard(0),)
    assert x.std(0).placements == (R,)
    assert x.transpose(0, 1).sum(0).placements == (Shard(0),)


@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_quantiles_along_a_dim_leave_other_dims_sharded(name: str) -> None:
    x = distribute(values(5, 4, 3), mesh_of(4), [Shard(0)])
    several = torch.tensor([0.2, 0.7])
    for q, kept, placed in (
        (0.5, False, Shard(0)), (0.5, True, Shard(0)), (several, False, Shard(1)), (several, True, Shard(1))
    ):  # fmt: skip
        found = getattr(x, name)(q, 1, keepdim=kept)
        assert found.placements == (placed,)
        torch.testing.assert_close(found.to_torch(), getattr(values(5, 4, 3), name)(q, 1, keepdim=kept))


def test_half_means_do_not_overflow() -> None:
    check(call("mean"), torch.full((300, 300), 3.0, dtype=torch.float16), mesh=[(3,)])


# ---- products

MATMULS = [
    ((5, 4), (4, 3)), ((5,), (5,)), ((5, 4), (4,)), ((4,), (4, 3)), ((2, 5, 4), (4, 3)), ((5, 4), (2, 4, 3)),
    ((2, 1, 5, 4), (3, 4, 2)), ((3,), (2, 3, 4)), ((2, 5, 3), (3,)), ((4, 0), (0, 3)), ((0, 4), (4, 3)), ((1, 1),
    (1, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), MATMULS)
def test_matmul(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check(lambda a, b: a @ b, values(*left), values(*right), partial=True, limit=24)


PRODUCTS = [
    ("mm", {}, [(5, 4), (4, 1)]), ("bmm", {}, [(3, 2, 4), (3, 4, 5)]), ("mv", {}, [(5, 4), (4,)]), ("dot", {}, [(5,),
    (5,)]),
    ("inner", {}, [(2, 5), (3, 5)]), ("inner", {}, [(2, 5), ()]), ("outer", {}, [(5,), (4,)]),
    ("linalg.vecdot", {"dim": 0}, [(5, 3), (5, 3)]), ("addmm", {"beta": 2, "alpha": 0.5}, [(5, 3), (5, 4), (4, 3)]),
    ("addmm", {}, [(3,), (5, 4), (4, 3)]), ("addmm", {}, [(1, 3), (5, 4), (4, 3)]),
    ("addmv", {}, [(5,), (5, 4), (4,)]), ("addr", {}, [(5, 4), (5,), (4,)]), ("addbmm", {}, [(2, 3), (5, 2, 4),
    (5, 4, 3)]),
    ("baddbmm", {"beta": 0}, [(5, 2, 3), (5, 2, 4), (5, 4, 3)]),
    ("nn.functional.linear", {}, [(2, 5, 4), (3, 4), (3,)]), ("nn.functional.linear", {}, [(4,), (3, 4)]),
    ("nn.functional.linear", {}, [(5, 4), (4,)]), ("nn.functional.bilinear", {}, [(5, 4), (5, 3), (2, 4, 3), (2,)]),
    ("tensordot", {"dims": 2}, [(5, 2, 3), (2, 3, 4)]), ("tensordot", {"dims": ([0, -1], [1, 0])}, [(5, 2, 3),
    (3, 5, 4)]),
    ("kron", {}, [(5, 2), (3, 4)]), ("kron", {}, [(5,), (3, 4)]), ("kron", {}, [(2, 5, 2), (3, 4)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kwargs", "shapes"), PRODUCTS, ids=lambda v: str(v) if not isinstance(v, list) else ""
)
def test_products(name: str, kwargs: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    check(call(name, **kwargs), *[values(*s) for s in shapes], partial=True, limit=24)


EQUATIONS = [
    ("ij,jk->ik", [(5, 4), (4, 3)]), ("bij,bjk", [(2, 3, 4), (2, 4, 5)]), ("...ij,...jk->...ik", [(2, 3, 4), (4, 5)]),
    ("ii->i", [(4, 4)]), ("ii", [(4, 4)]), ("i,j,k->kji", [(5,), (4,), (3,)]), ("bhld,bhsd->bhls", [(2, 3, 4, 5)] * 2),
    ("ij->", [(5, 4)]), ("ij,ij->j", [(5, 4), (5, 4)]), ("...a,a...", [(2, 3), (3, 2)]), ("ab,b->ab", [(5, 1), (4,)]),
    ("ijj,j->i", [(3, 4, 4), (4,)]), (" i J , J k -> k i ", [(5, 4), (4, 3)]),
]  # fmt: skip


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS, ids=[e for e, _ in EQUATIONS])
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    check(lambda *t: torch.einsum(equation, *t), *[values(*s) for s in shapes], partial=True, limit=24)


def test_other_forms_of_products() -> None:
    a, b = values(5, 4), values(4, 3)
    check(lambda x, y: torch.einsum("ij,jk", [x, y]), a, b, limit=8)
    check(lambda x, y: torch.einsum(x, [..., 1], y, [1, 2], [..., 2]), a, b, limit=8)
    check(lambda *t: torch.linalg.multi_dot(t), values(5), a, b, limit=24)
    check(torch.mm, ties(5, 4), ties(4, 3), limit=16)
    check(torch.vdot, values(5, dtype=torch.complex64) * (1 + 2j), values(5, dtype=torch.complex64) * 1j)
    check(lambda c, x, y: c.addmm_(x, y), values(5, 3), a, b, limit=24)


def test_products_place_their_results() -> None:
    mesh = mesh_of(3)
    x, w, b = values(5, 6), values(4, 6), values(4)
    column = F.linear(distribute(x, mesh, [R]), distribute(w, mesh, [Shard(0)]), distribute(b, mesh, [Shard(0)]))
    assert column.placements == (Shard(1),)
    row = F.linear(distribute(x, mesh, [Shard(1)]), distribute(w, mesh, [Shard(1)]), distribute(b, mesh, [Partial()]))
    assert row.placements == (Partial(),)
    torch.testing.assert_close(row.to_torch(), F.linear(x, w, b))
    with pytest.raises(PlacementError, match="linear"):
        F.linear(distribute(x, mesh, [Shard(1)]), distribute(w, mesh, [Shard(1)]), distribute(b, mesh, [R]))


# ---- normalisations


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "nn.functional.softmin"])
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax(name: str, dim: int) -> None:
    check(call(name, dim), values(5, 4) * 40, legal=True, block=2)
    check(call(name, dim), values(1, 5), legal=True)
    check(call(name, dim), values(5, 3, dtype=torch.bfloat16), legal=True)
    x = values(5, 4)
    x[0] = -math.inf
    x[2, 1] = math.inf
    check(call(name, dim), x, legal=True)


def test_norms_over_last_dims() -> None:
    x = values(5, 4) + 100
    check(
        lambda a, w, b: F.layer_norm(a, (4,), w, b),
        x,
        values(4),
        values(4),
        tolerance=1e-3,
        legal=[(Shard(1), R, R), (Shard(0), R, R)],
        limit=24,
    )
    check(lambda a: F.layer_norm(a, (5, 4), eps=1e-3), x, legal=True, tolerance=1e-3)
    check(lambda a, w: F.rms_norm(a, (4,), w), x, values(4), legal=[(Shard(1), Shard(0)), (Shard(1), R)])
    check(lambda a: F.rms_norm(a, (2, 4), eps=1e-6), values(5, 2, 4), legal=True)
    check(lambda a: F.layer_norm(a, (4,)), values(5, 4, dtype=torch.bfloat16), legal=True)
    check(lambda a: F.layer_norm(a, [1]), values(5, 1), legal=True)


def test_norms_over_channels() -> None:
    y, w, b = values(3, 6, 5), values(6), values(6)
    check(lambda a, w, b: F.group_norm(a, 3, w, b), y, w, b, legal=[(Shard(d), R, R) for d in range(3)], limit=14)
    check(
        lambda a, w, b: F.instance_norm(a, weight=w, bias=b),
        y,
        w,
        b,
        legal=[(Shard(d), R, R) for d in range(3)],
        limit=14,
    )
    check(lambda a, m, v, w, b: F.batch_norm(a, m, v, w, b), y, w, b.abs(), w, b, limit=10)
    check(lambda a: F.batch_norm(a, None, None, training=True), y, legal=True)
    check(lambda a: F.group_norm(a, 2), values(2, 4), legal=True)


def test_batch_norm_updates_its_running_statistics() -> None:
    def train(x: Any, mean: Any, var: Any) -> Any:
        return F.batch_norm(x, mean, var, training=True, momentum=0.3), mean, var

    check(train, values(5, 4, 2), values(4), values(4).abs(), replicated=(1, 2), legal=[(Shard(0), R, R)])
    check(
        train, values(5, 4, 2), values(4), values(4).abs(), mesh=[(3,)], limit=1, legal=[(Shard(1), Shard(0), Shard(0))]
    )


@pytest.mark.parametrize("p", [1, 2.0, math.inf])
def test_normalize(p: float) -> None:
    check(lambda a: F.normalize(a, p, dim=-1), values(5, 4), legal=True)


# ---- along a dim

ALONG = [
    ("cumsum", (0,)), ("cumsum", (-1,)), ("cumprod", (0,)), ("logcumsumexp", (0,)), ("cummax", (0,)), ("cummin", (1,)),
    ("sort", (0,)), ("sort", (-1, True)), ("argsort", (0,)), ("msort", ()), ("kthvalue", (2, 0)), ("mode", (0,)),
    ("topk", (3, 0)), ("topk", (2, -1, False)), ("topk", (0, 0)), ("diff", (1, 0)), ("diff", (2, -1)),
    ("renorm", (2, 0, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args"), ALONG)
def test_along_a_dim(name: str, args: tuple[Any, ...]) -> None:
    check(call(name, *args), values(5, 4), legal=True, block=2)


def test_along_a_small_dim() -> None:
    for name, args in (
        ("cumsum", (0,)),
        ("cumprod", (0,)),
        ("sort", (0,)),
        ("topk", (1, 0)),
        ("cummax", (0,)),
        ("diff", (1, 0)),
    ):
        check(call(name, *args), values(1, 3), legal=True)
        if name != "topk":
            check(call(name, *args), values(0, 3), legal=True)


def test_scans_of_other_dtypes() -> None:
    check(call("cumsum", 0), torch.ones(8, dtype=torch.int32), mesh=[(4,), (2, 2)], legal=True)
    check(call("cumsum", 1), ties(2, 10), mesh=[(4,)], legal=True)
    check(call("cumsum", 0), values(5, dtype=torch.float16), legal=True)
    check(call("cumsum", 0, dtype=torch.float64), values(5, 2), legal=True)
    check(call("cumsum", 0), values(5, 2), partial=True, legal=True)
    check(lambda x: x.cumsum_(0), values(5, 2), legal=True)
    check(call("cummax", 0), ties(5, 3), legal=True)


def test_sort_keeps_equal_elements_in_order() -> None:
    check(call("sort", dim=0, stable=True), ties(7, 2), legal=True)
    check(call("sort", dim=0, stable=True, descending=True), ties(7, 2), legal=True)
    check(lambda x: x.topk(3, 0).values, ties(7, 2), legal=True)


def test_buckets() -> None:
    check(torch.bucketize, values(5, 3), torch.tensor([-1.0, 0.0, 1.0]), legal=[(Shard(0), R)])
    check(torch.searchsorted, torch.tensor([-1.0, 0.0, 1.0]), values(5, 3), legal=[(R, Shard(0))])
    check(call("quantile", 0.3, 0), values(5, 3))


# ---- embeddings and losses


def test_embedding() -> None:
    ids = torch.tensor([[0, 4], [9, 3], [9, 9], [5, 1], [2, 0]])
    check(F.embedding, ids, values(10, 3), partial=(1,), legal=[(R, Shard(0)), (R, Shard(1)), (Shard(0), R)])
    check(F.embedding, ids, values(10, 3), mesh=[(4,)], limit=12)
    check(lambda i, w: F.embedding(i, w, padding_idx=0), ids, values(10, 1), limit=16)
    check(lambda i: F.one_hot(i, 10), ids, legal=True)
    check(F.one_hot, ids, legal=True, limit=8)
    w = distribute(values(10, 3), mesh_of(4), [Shard(0)])
    assert F.embedding(distribute(ids, mesh_of(4), [R]), w).placements == (Partial(),)


def test_an_index_outside_of_a_sharded_vocabulary() -> None:
    w = distribute(values(10, 3), mesh_of(3), [Shard(0)])
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(distribute(torch.tensor([10]), mesh_of(3), [R]), w).to_torch()
    lost = F.cross_entropy(
        distribute(values(4, 3), mesh_of(3), [Shard(1)]), distribute(torch.tensor([0, 1, 2, 3]), mesh_of(3), [R])
    )
    with pytest.raises(IndexError, match="Target 3 is out of bounds"):
        lost.to_torch()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: str, smoothing: float) -> None:
    more: Any = {"reduction": reduction, "label_smoothing": smoothing}
    x, target, weight = values(5, 7), torch.tensor([0, 6, -100, 3, 3]), values(7).abs()
    check(
        lambda a, t: F.cross_entropy(a, t, **more),
        x,
        target,
        legal=[(Shard(1), R), (Shard(0), Shard(0)), (Shard(0), R)],
        limit=16,
    )
    check(lambda a, t, w: F.cross_entropy(a, t, w, **more), x, target, weight, legal=[(Shard(1), R, R)], limit=8)
    soft = torch.softmax(values(5, 7) * 2, 1)
    check(lambda a, t, w: F.cross_entropy(a, t, w, **more), x, soft, weight, legal=[(Shard(1), R, R)], limit=8)
    spots = torch.tensor([[0, 1, 6], [2, 1, 3]])
    check(lambda a, t: F.cross_entropy(a, t, ignore_index=1, **more), values(2, 7, 3), spots, limit=8)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nll_loss(reduction: str) -> None:
    x, target, weight = torch.log_softmax(values(5, 7), 1), torch.tensor([0, 6, -100, 3, 3]), values(7).abs()
    check(
        lambda a, t, w: F.nll_loss(a, t, w, reduction=reduction), x, target, weight, legal=[(Shard(1), R, R)], limit=8
    )
    check(lambda a, t: F.nll_loss(a, t, reduction=reduction), values(7), torch.tensor(3), legal=True)
    ignored = torch.full((5,), -100)
    check(lambda a, t: F.cross_entropy(a, t, reduction=reduction), x, ignored, limit=12)


LOSSES = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "hinge_embedding_loss",
          "binary_cross_entropy_with_logits", "poisson_nll_loss"]  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_elementwise_losses(name: str) -> None:
    for reduction in ("mean", "sum", "none"):
        check(call(f"nn.functional.{name}", reduction=reduction), values(5, 4), values(5, 4).abs(), limit=12)


def test_losses_of_half_precision_overflow_as_in_torch() -> None:
    x = values(5, 4, dtype=torch.float16) * 8
    check(F.soft_margin_loss, x, values(5, 4, dtype=torch.float16).sign(), limit=8)
    check(F.mse_loss, x, values(5, 4, dtype=torch.float16), limit=8)


def test_losses_of_several_tensors() -> None:
    for reduction in ("mean", "sum", "none"):
        check(
            call("nn.functional.margin_ranking_loss", reduction=reduction),
            values(5),
            values(5) + 1,
            values(5).sign(),
            limit=12,
        )
        check(
            call("nn.functional.cosine_embedding_loss", reduction=reduction),
            values(5, 3),
            values(5, 3) + 1,
            values(5).sign(),
            limit=12,
        )
        probabilities = torch.sigmoid(values(5, 4))
        check(
            call("nn.functional.binary_cross_entropy", reduction=reduction),
            probabilities,
            probabilities.flip(0),
            values(4).abs(),
            limit=12,
        )
    check(call("nn.functional.kl_div", reduction="batchmean"), values(5, 4), values(5, 4).abs(), limit=12)


# ---- attention

HEADS = [
    ((2, 3, 4, 5), (2, 3, 4, 5), {}), ((2, 3, 4, 5), (2, 3, 4, 5), {"is_causal": True}),
    ((1, 9, 4, 2), (1, 3, 4, 2), {"enable_gqa": True}), ((2, 4, 3, 2),
    (2, 2, 5, 2), {"enable_gqa": True, "scale": 0.3}),
    ((3, 4, 2), (3, 5, 2), {}), ((4, 2), (5, 2), {}),
]  # fmt: skip


@pytest.mark.parametrize(("of_q", "of_k", "kwargs"), HEADS)
def test_attention(of_q: tuple[int, ...], of_k: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    legal = [(Shard(d),) * 3 for d in range(len(of_q) - 2)]
    fn = call("nn.functional.scaled_dot_product_attention", **kwargs)
    check(fn, values(*of_q), values(*of_k), values(*of_k).flip(-1), legal=legal, limit=12)


@pytest.mark.parametrize("shape", [(4, 5), (2, 1, 4, 5), (2, 3, 4, 5), (2, 1, 1, 5)])
def test_attention_with_a_mask(shape: tuple[int, ...]) -> None:
    q, k, v = values(2, 3, 4, 2), values(2, 3, 5, 2), values(2, 3, 5, 2) + 1
    fn = F.scaled_dot_product_attention
    legal = [(Shard(d), Shard(d), Shard(d), R) for d in (0, 1)]
    check(lambda q, k, v, m: fn(q, k, v, attn_mask=m), q, k, v, values(*shape), legal=legal, limit=10)
    mask = values(*shape) > -2
    check(lambda q, k, v, m: fn(query=q, key=k, value=v, attn_mask=m), q, k, v, mask, legal=legal, limit=4)


def test_attention_drops_what_torch_drops() -> None:
    q, k = values(2, 3, 4, 2), values(2, 3, 5, 2)

    def dropping(*heads: Any) -> Any:
        torch.manual_seed(3)
        dtorch.manual_seed(3)
        return F.scaled_dot_product_attention(*heads, dropout_p=0.5)

    check(dropping, q, k, k, limit=8)


def test_grouped_heads_that_do_not_fit_the_mesh_are_refused() -> None:
    mesh = mesh_of(4)
    q, k = values(1, 8, 3, 2), values(1, 2, 3, 2)
    heads = [distribute(t, mesh, [Shard(1)]) for t in (q, k, k)]
    with pytest.raises(PlacementError, match="scaled_dot_product_attention"):
        F.scaled_dot_product_attention(*heads, enable_gqa=True)
    fits = [distribute(q, mesh, [Shard(1, 4)]), *heads[1:]]
    expected = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    torch.testing.assert_close(F.scaled_dot_product_attention(*fits, enable_gqa=True).to_torch(), expected)
    with dtorch.auto_redistribute():
        torch.testing.assert_close(F.scaled_dot_product_attention(*heads, enable_gqa=True).to_torch(), expected)


# ---- convolution and pooling

CONVOLUTIONS = [
    ("conv1d", {}, [(5, 4, 6), (3, 4, 3), (3,)], [(Shard(0), R, R), (R, Shard(0), R), (R, Shard(0), Shard(0))]),
    ("conv1d", {"groups": 8}, [(1, 8, 5), (8, 1, 3)], [(Shard(1), Shard(0)), (Shard(1), R)]),
    ("conv1d", {"groups": 3}, [(2, 6, 5), (9, 2, 3), (9,)], [(Shard(1), Shard(0), R)]),
    ("conv1d", {}, [(4, 6), (3, 4, 3), (3,)], [(R, Shard(0), R)]),
    ("conv2d", {"padding": "same"}, [(2, 3, 5, 5), (5, 3, 3, 3), (5,)], [(Shard(0), R, R)]),
    ("conv3d", {"stride": 2}, [(2, 2, 3, 3, 3), (3, 2, 2, 2, 2)], [(Shard(1), Shard(1))]),
    ("conv_transpose2d", {"stride": 2}, [(2, 3, 4, 4), (3, 5, 2, 2), (5,)],
     [(Shard(0), R, R), (R, Shard(1), Shard(0))]),
    ("conv_transpose1d", {"groups": 3}, [(2, 6, 4), (6, 2, 2), (6,)], [(Shard(1), Shard(0), R)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kwargs", "shapes", "legal"), CONVOLUTIONS)
def test_convolution(name: str, kwargs: dict[str, Any], shapes: list[tuple[int, ...]], legal: list[Any]) -> None:
    tensors = [values(*s) for s in shapes]
    check(call(f"nn.functional.{name}", **kwargs), *tensors, partial=True, legal=legal, limit=10, tolerance=1e-4)


POOLS = [
    ("max_pool2d", (2,), {}), ("max_pool2d", (2,), {"return_indices": True}), ("avg_pool2d", (2,), {}),
    ("adaptive_avg_pool2d", (1,), {}), ("adaptive_max_pool2d", (2,), {}), ("lp_pool2d", (2, 2), {}),
    ("interpolate", (), {"scale_factor": 2}),
    ("interpolate", (), {"size": (4, 5), "mode": "bilinear", "align_corners": False}), ("unfold", (2,), {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "kwargs"), POOLS)
def test_pooling(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    legal = [(Shard(0),)] if name == "unfold" else [(Shard(0),), (Shard(1),)]
    check(call(f"nn.functional.{name}", *args, **kwargs), values(5, 3, 6, 6), legal=legal, limit=8)


def test_layers_of_torch_reach_the_same_pools() -> None:
    check(torch.nn.MaxPool1d(2), values(3, 4, 6), limit=8)
    check(lambda x: torch.max_pool2d(x, 2), values(3, 2, 4, 4), limit=6)
    check(lambda x: F.pixel_shuffle(x, 2), values(2, 4, 3, 3), limit=6)
    check(lambda x, g: F.grid_sample(x, g, align_corners=False), values(5, 3, 4, 4), values(5, 2, 2, 2) / 4, limit=6)
