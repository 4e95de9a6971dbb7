"""The kinds behind the faults of test_cases_math.py and test_cases_shape.py: each over many ops, dims and placements.

One row a kind, of cases that stand there with their own values or in the file that is named: A uneven and empty pieces
(A01 A06 A08 A13), C dims counted from the end (C07), D what a pending sum goes through (D02 D04), E joins and orders with one
element a device (E05), F products of several placements. A02 A03 A06 A07 A10 A12 B02 B04 C01 C05 C06 C09 C10 D06 E03 E06 E07
F01 F02 F03 F05 F06 F08 F11 are in the two files; A07 also in test_saving.py, A11 in test_custom_op.py, F09 in
test_ops_math.py, G01 and G02 in test_context_parallel.py, G03 and G05 in test_llama_stages.py, G06 in test_moe.py, H14 in
test_mesh.py. C03 D07 D08 and the gradients of others belong to training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard
from tests._sharding import distribute, grid, mesh_of

R = Replicate()

ALONG: dict[str, Callable[[Any, int], Any]] = {
    **{
        name: lambda x, d, name=name: getattr(x, name)(d)
        for name in (
            "sum", "mean", "prod", "var", "std", "amax", "amin", "max", "min", "argmax", "argmin", "median", "nanmedian",
            "nansum", "nanmean", "logsumexp", "all", "any", "count_nonzero", "cumsum", "cumprod", "cummax", "cummin",
            "logcumsumexp", "softmax", "log_softmax", "sort", "argsort", "mode", "norm", "unbind", "squeeze", "unsqueeze",
        )
    },
    "aminmax": lambda x, d: torch.aminmax(x, dim=d),
    "std_mean": lambda x, d: torch.std_mean(x, d),
    "var_mean": lambda x, d: torch.var_mean(x, d, correction=0),
    "vector_norm inf": lambda x, d: torch.linalg.vector_norm(x, float("inf"), d),
    "vector_norm -inf": lambda x, d: torch.linalg.vector_norm(x, float("-inf"), d),
    "vector_norm 0": lambda x, d: torch.linalg.vector_norm(x, 0, d),
    "vector_norm 3": lambda x, d: torch.linalg.vector_norm(x, 3, d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "softmin": lambda x, d: F.softmin(x, d),
    "glu": lambda x, d: F.glu(torch.cat([x, x], d), d),
    "topk": lambda x, d: x.topk(1, d),
    "kthvalue": lambda x, d: x.kthvalue(1, d),
    "quantile": lambda x, d: x.quantile(0.3, d),
    "diff": lambda x, d: x.diff(dim=d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(2, d),
    "narrow": lambda x, d: x.narrow(d, 0, 1),
    "select": lambda x, d: x.select(d, -1),
    "split": lambda x, d: x.split(2, d),
    "tensor_split": lambda x, d: x.tensor_split(3, d),
    "chunk": lambda x, d: x.chunk(2, d),
    "unfold": lambda x, d: x.unfold(d, 1, 1),
    "cat": lambda x, d: torch.cat([x, x], d),
    "stack": lambda x, d: torch.stack([x, x], d),
    "repeat_interleave": lambda x, d: x.repeat_interleave(2, d),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([0, 0])),
    "index_fill": lambda x, d: x.index_fill(d, torch.tensor([0]), 2.0),
    "renorm": lambda x, d: x.renorm(2, d, 0.5),
    "cosine_similarity": lambda x, d: F.cosine_similarity(x, x + 1, d),
    "trapezoid": lambda x, d: torch.trapezoid(x, dim=d),
    "movedim": lambda x, d: x.movedim(d, 0),
    "fft": lambda x, d: torch.fft.fft(x, dim=d).abs(),
    "take_along_dim": lambda x, d: x.take_along_dim(x.argsort(d), d),
    "unique": lambda x, d: x.unique(dim=d),
}
"""Functions of a tensor and a dim."""


def same(got: Any, want: Any, what: str) -> None:
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), what
        for a, b in zip(got, want, strict=True):
            same(a, b, what)
        return
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m: f"{what}: {m}")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # torch's own, of one element
@pytest.mark.parametrize("name", ALONG)
def test_along_any_dim_with_uneven_and_empty_pieces(name: str) -> None:
    """On four devices pieces are of 2, 1 and 0 elements; dims are counted from either end. Kinds A and C."""
    fn = ALONG[name]
    made = []
    for shape in ((3, 4), (1, 5), (6, 1), (2, 3, 2)):
        x = grid(*shape)
        for placed in (*map(Shard, range(x.ndim)), R):
            sharded = distribute(x, mesh_of(4), [placed])
            for dim in range(-x.ndim, x.ndim):
                try:
                    want = fn(x, dim)
                except RuntimeError:  # as unfold of one element
                    continue
                with dtorch.auto_redistribute():
                    made.append((fn(sharded, dim), want, f"{shape} {placed} dim {dim}"))
    assert len(made) > 20
    for got, want, what in made:
        same(got, want, what)


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_ 1": lambda t: t.add_(1.0),
    "sub_ 1": lambda t: t.sub_(1.0),
    "mul_ -3": lambda t: t.mul_(-3.0),
    "div_ 2": lambda t: t.div_(2.0),
    "mul_ itself": lambda t: t.mul_(t),
    "add_ itself": lambda t: t.add_(t),
    "addcmul_": lambda t: t.addcmul_(t, t),
    "lerp_": lambda t: t.lerp_(t, 0.5),
    "fill_": lambda t: t.fill_(2.0),
    "zero_": lambda t: t.zero_(),
    "[0] =": lambda t: t.__setitem__(0, 5.0),
    "[mask] =": lambda t: t.__setitem__(t > 0, 5.0),
    "masked_fill_": lambda t: t.masked_fill_(torch.tensor([True, False, True]), 1.0),
    "cumsum_": lambda t: t.cumsum_(0),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([1]), torch.ones(1)),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([1]), 4.0),
    "copy_": lambda t: t.copy_(torch.tensor([1.0, 2.0, 3.0])),
    "clamp_": lambda t: t.clamp_(-1, 2),
    "pow_": lambda t: t.pow_(2),
    **{
        f"{name}_": lambda t, name=name: getattr(t, f"{name}_")()
        for name in ("abs", "neg", "exp", "relu", "sign", "sqrt", "sigmoid", "round", "square", "reciprocal", "floor", "tanh")
    },
}
"""Writes into a tensor of three elements."""

PIECES = {
    "sum": [[3.0, -1.0, 2.0], [-5.0, 4.0, 2.5]],
    "avg": [[3.0, -1.0, 2.0], [-5.0, 4.0, 2.5]],
    "max": [[3.0, -1.0, 2.0], [-5.0, 4.0, 2.5]],
    "min": [[3.0, -1.0, 2.0], [-5.0, 4.0, 2.5]],
    "product": [[3.0, -1.0, 2.0], [-5.0, 4.0, 2.5]],
}


@pytest.mark.parametrize("reduce_op", PIECES)
def test_writes_into_what_is_pending_are_right_or_refused(reduce_op: str) -> None:
    """Every name and every view of the tensor sees the same: the right value, or after an error the old one. Kind D."""
    pieces = [torch.tensor(p) for p in PIECES[reduce_op]]
    table = torch.stack(pieces)
    before = {
        "sum": table.sum(0), "avg": table.mean(0), "max": table.amax(0), "min": table.amin(0), "product": table.prod(0)
    }[reduce_op]
    refused = []
    for name, write in WRITES.items():
        t = dtorch.from_shards(pieces, device_mesh=mesh_of(2), placements=[Partial(reduce_op)])
        alias, view = t, t[1:]
        want = before.clone()
        write(want)
        try:
            write(t)
        except PlacementError:
            refused.append(name)
            want = before
        what = f"{reduce_op} {name}"
        same(t, want, what)
        same(alias, want, what)
        same(view, want[1:], what)
    assert "exp_" in refused
    assert "zero_" not in refused


READS: dict[str, Callable[[Any], Any]] = {
    "+ 1": lambda t: t + 1,
    "1 - ": lambda t: 1 - t,
    "* -5": lambda t: t * -5,
    "/ 4": lambda t: t / 4,
    "// 2": lambda t: t // 2,
    "4 /": lambda t: 4 / t,
    "** 2": lambda t: t**2,
    "t * t": lambda t: t * t,
    "t + t": lambda t: t + t,
    "t - 2 t": lambda t: t - 2 * t,
    "==": lambda t: t == t.clone(),
    "<": lambda t: t < 0,
    "where": lambda t: torch.where(t > 0, t, -t),
    "maximum": lambda t: torch.maximum(t, -t),
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(0),
    "max": lambda t: t.max(),
    "amin": lambda t: t.amin(0),
    "prod": lambda t: t.prod(),
    "norm": lambda t: t.norm(),
    "cumsum": lambda t: t.cumsum(0),
    "dot": lambda t: t.dot(t),
    "outer": lambda t: torch.outer(t, t),
    "cat": lambda t: torch.cat([t, -t]),
    "stack": lambda t: torch.stack([t, t.neg()]),
    "flip": lambda t: t.flip(0),
    "pad": lambda t: F.pad(t, (1, 1)),
    "pad with 2": lambda t: F.pad(t, (1, 1), value=2.0),
    "to int": lambda t: t.to(torch.int64),
    "to half": lambda t: t.to(torch.float16).to(torch.float32),
    "expand": lambda t: t.expand(2, 3),
    "addcmul": lambda t: torch.addcmul(t, t, t),
    "linear": lambda t: F.linear(t[None], torch.ones(2, 3), torch.ones(2)),
    "softmax": lambda t: t.softmax(0),
    "dropout": lambda t: F.dropout(t, 0.5, training=False),
    "clamp": lambda t: t.clamp(min=0),
    "sort": lambda t: t.sort(),
    "any": lambda t: t.any(),
}


@pytest.mark.parametrize("reduce_op", PIECES)
def test_what_reads_something_pending_is_right_or_refused(reduce_op: str) -> None:
    """Twice, so that the second call finds its signature. Kind D."""
    pieces = [torch.tensor(p) for p in PIECES[reduce_op]]
    t = dtorch.from_shards(pieces, device_mesh=mesh_of(2), placements=[Partial(reduce_op)])
    x = t.to_torch()
    for _ in range(2):
        for name, read in READS.items():
            want, what = read(x), f"{reduce_op} {name}"
            try:
                same(read(t), want, what)
            except PlacementError:
                with dtorch.auto_redistribute():
                    same(read(t), want, what)
    same(t, x, "the tensor itself")


@pytest.mark.parametrize("num", [2, 4])
def test_joins_and_orders_with_one_element_a_device(num: int) -> None:
    """Kind E."""
    x = grid(4)
    moves: list[Callable[[Any], Any]] = [
        *(lambda t, n=n: t.roll(n) for n in range(-5, 6)),
        *(lambda t, n=n: torch.cat([t[n:], t[:n]]) for n in range(5)),
        *(lambda t, n=n: torch.stack([t.roll(n), t]) for n in range(2)),
        lambda t: torch.cat([t[1:], t[:1], t, t[2:]]),
        lambda t: t.sort(descending=True).values.cumsum(0),
        lambda t: t.flip(0).argsort(),
        lambda t: torch.cat([t[3:], t[3:], t[3:]]).unique(),
        lambda t: t[torch.tensor([3, -4, 3])],
    ]
    for number, move in enumerate(moves):
        with dtorch.auto_redistribute():
            same(move(distribute(x, mesh_of(num), [Shard(0)])), move(x), f"move {number}")


def test_both_names_of_a_dim_share_no_signature() -> None:
    """A cached signature knows every argument: all of them changed one at a time, there and back (F06)."""
    x = grid(4, 6)
    t = distribute(x, mesh_of(3), [Shard(0)])
    forms: list[Callable[[Any], Any]] = [
        *(lambda a, k=k: a.sum(1, keepdim=k) for k in (False, True)),
        *(lambda a, c=c: a.var(1, correction=c) for c in (0, 1, 2)),
        *(lambda a, d=d: a.sum(1, dtype=d) for d in (torch.float32, torch.float64)),
        *(lambda a, lo=lo, hi=hi: a.clamp(lo, hi) for lo in (None, -0.5) for hi in (None, 0.5) if (lo, hi) != (None, None)),
        *(lambda a, m=m: torch.div(a, 0.3, rounding_mode=m) for m in (None, "floor", "trunc")),
        *(lambda a, e=e: F.layer_norm(a, [6], eps=e) for e in (1e-5, 1.0)),
        *(lambda a, w=w: F.layer_norm(a, [6], w, None) for w in (None, torch.full((6,), 2.0))),
        *(lambda a, b=b: F.layer_norm(a, [6], None, b) for b in (None, torch.full((6,), 2.0))),
        *(lambda a, u=u: F.gelu(a, approximate=u) for u in ("none", "tanh")),
        *(lambda a, s=s: a.sort(1, descending=s).values for s in (False, True)),
        *(lambda a, i=i: a.add(1, alpha=i) for i in (1, 1.0, 2)),
        *(lambda a, n=n: F.pad(a, (0, 1), value=n) for n in (0.0, 1.0)),
        *(lambda a, n=n: a[:, n] for n in (0, 1, True, slice(0, 1), slice(1, 2), None)),
    ]
    for order in (forms, forms[::-1]):
        for number, form in enumerate(order):
            with dtorch.auto_redistribute():
                same(form(t), form(x), f"form {number}")
