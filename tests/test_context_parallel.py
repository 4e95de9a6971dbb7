"""Attention whose sequence is cut, beside torch's on one device."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from _sharding import distribute, mesh_of
from torch.nn import functional as plain
from torch.testing import assert_close

import dtorch
from dtorch import PlacementError, Replicate, Shard
from dtorch.nn import functional as F
from dtorch.runtime.kernels import Site
from dtorch.runtime.kernels._online import Lanes, Online
from dtorch.runtime.kernels._spans import meet, numbers, size, spans_of, take
from dtorch.runtime.kernels.attention import Line, balanced
from dtorch.transport.messages import Definition, Layout, MeshInfo

ULYSSES, RING = "ulysess_cp", "ring_cp"
SEQ = Shard(2)


@dataclass
class Case:
    """A call: sizes, and the placements on each mesh axis of queries, of keys and values, and of the mask."""

    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    heads: tuple[int, int] = (2, 2)
    length: int = 7
    keys: int | None = None
    batch: int = 2
    causal: bool = False
    mask: torch.Tensor | None = None
    q: tuple[Any, ...] | None = None
    kv: tuple[Any, ...] | None = None
    of_mask: tuple[Any, ...] | None = None
    dtype: torch.dtype = torch.float32
    more: dict[str, Any] = field(default_factory=dict)


def check(case: Case, refusable: bool = False) -> None:
    torch.manual_seed(0)
    (hq, hk), keys = case.heads, case.length if case.keys is None else case.keys
    q = torch.randn(case.batch, hq, case.length, 8, dtype=case.dtype)
    width = 6 if (case.length + hq) % 2 else 8  # torch's fused kernels want values as wide as keys
    k, v = (torch.randn(case.batch, hk, keys, n, dtype=case.dtype) for n in (8, width))
    mesh = dtorch.init_device_mesh("cpu", case.mesh, mesh_dim_names=case.names)
    of_q = case.q or (SEQ,) * len(case.mesh)
    of_kv = case.kv or (SEQ,) * len(case.mesh)
    mask = None
    if case.mask is not None:
        mask = distribute(case.mask, mesh, case.of_mask or (Replicate(),) * len(case.mesh))
    more = {"is_causal": case.causal, "enable_gqa": hq != hk, **case.more}
    want = plain.scaled_dot_product_attention(q, k, v, attn_mask=case.mask, **more)
    placed = [distribute(t, mesh, p) for t, p in ((q, of_q), (k, of_kv), (v, of_kv))]
    try:
        got = F.scaled_dot_product_attention(*placed, attn_mask=mask, **more)
        assert refusable or got.placements == tuple(of_q)
    except PlacementError:
        if not refusable:
            raise
        with dtorch.auto_redistribute():
            got = F.scaled_dot_product_attention(*placed, attn_mask=mask, **more)
    near = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(case.dtype, 2e-5)
    assert_close(got.to_torch(), want, rtol=near, atol=near)


MESHES = [((2,), (ULYSSES,)), ((3,), (RING,)), ((2, 3), (ULYSSES, RING)), ((2, 2), (RING, ULYSSES)), ((2, 2), None)]


@pytest.mark.parametrize(("mesh", "names"), MESHES, ids=str)
def test_both_kinds_and_their_products(mesh: Any, names: Any) -> None:
    """G01: causal and not, with and without grouped heads; lengths and head counts that do not divide, or are too few."""
    for causal, heads, length in product((False, True), ((4, 4), (8, 2), (5, 1)), (1, 2, 13)):
        check(Case(mesh, names, heads, length, causal=causal))


@pytest.mark.parametrize(("mesh", "names"), MESHES, ids=str)
def test_masks(mesh: Any, names: Any) -> None:
    """G02: bool and float masks, replicated or cut along queries or keys; a query, or a whole device, that sees nothing."""
    torch.manual_seed(1)
    axes = len(mesh)
    some = torch.rand(2, 1, 7, 9) < 0.5
    some[0, 0, :4] = False
    bias = torch.randn(7, 9)
    bias[5] = -math.inf
    for mask in (some, bias, torch.rand(4, 1, 9) < 0.5, torch.randn(2, 4, 7, 1), torch.zeros(7, 9, dtype=torch.bool)):
        check(Case(mesh, names, (4, 2), keys=9, mask=mask))
    for dims in product((2, 3, None), repeat=axes):
        placements = tuple(Replicate() if d is None else Shard(d) for d in dims)
        check(Case(mesh, names, (4, 2), keys=9, mask=some, of_mask=placements))


@pytest.mark.parametrize("names", [(ULYSSES,), (RING,), None], ids=str)
def test_queries_and_keys_of_different_lengths(names: Any) -> None:
    for causal, (length, keys) in product((False, True), ((1, 50), (3, 50), (11, 4), (40, 3), (5, 0), (0, 5), (2, 2))):
        check(Case((3,), names, (4, 2), length, keys, causal=causal))


def test_only_queries_or_only_keys_are_cut() -> None:
    whole = (Replicate(),)
    for causal, names in product((False, True), ((ULYSSES,), (RING,), None)):
        check(Case((3,), names, length=8, causal=causal, kv=whole))
        check(Case((3,), names, length=8, causal=causal, q=whole))
    # one axis cuts the queries, another the keys; or both, and one of them both
    check(Case((2, 2), None, length=9, causal=True, q=(SEQ, Replicate()), kv=(Replicate(), SEQ)))
    check(Case((2, 2), (RING, "x"), length=9, causal=True, q=(SEQ, Replicate()), kv=(SEQ, SEQ)))
    check(Case((2, 2), ("x", RING), length=9, causal=True, q=(SEQ, SEQ), kv=(Replicate(), SEQ)))


def test_beside_batches_and_heads() -> None:
    for causal in (False, True):
        by_head = (Shard(1), SEQ)
        check(Case((2, 2), ("tp", RING), (4, 4), causal=causal, q=by_head, kv=by_head))
        check(Case((2, 2), ("tp", ULYSSES), (4, 2), causal=causal, q=by_head, kv=(Replicate(), SEQ)))
        check(Case((2, 2), ("dp", RING), (4, 2), causal=causal, batch=3, q=(Shard(0), SEQ), kv=(Shard(0), SEQ)))


def test_queries_cut_by_head_beside_whole_grouped_keys() -> None:
    """G03: more devices than key/value heads; each uses those of its queries."""
    whole = (Replicate(),)
    for heads, num, causal in product(((8, 4), (9, 3), (6, 1)), (4, 5, 8), (False, True)):
        check(Case((num,), ("tp",), heads, causal=causal, q=(Shard(1),), kv=whole))


def test_heads_cut_elsewhere_than_groups_are_refused_or_moved() -> None:
    """9 heads over 2 devices are 5 and 4, their 3 groups are 2 and 1: the second device lacks a group."""
    torch.manual_seed(0)
    mesh = mesh_of(2)
    q, k = torch.randn(1, 9, 5, 8), torch.randn(1, 3, 5, 8)
    placed = [distribute(t, mesh, [Shard(1)]) for t in (q, k, k)]
    with pytest.raises(PlacementError, match=r"redistribute\("):
        F.scaled_dot_product_attention(*placed, enable_gqa=True)
    with dtorch.auto_redistribute():
        got = F.scaled_dot_product_attention(*placed, enable_gqa=True)
    assert got.placements[0].is_shard()
    assert_close(got.to_torch(), plain.scaled_dot_product_attention(q, k, k, enable_gqa=True), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_scale(dtype: torch.dtype) -> None:
    for causal in (False, True):
        check(Case((3,), (RING,), length=40, causal=causal, dtype=dtype, more={"scale": 0.3}))


def test_large_scores_do_not_overflow() -> None:
    check(Case((3,), (RING,), length=20, more={"scale": 1000.0}))


def test_without_a_batch_or_heads_and_with_a_broadcast_batch() -> None:
    torch.manual_seed(0)
    mesh = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=(RING,))
    for shapes in (((7, 8), (7, 8)), ((2, 7, 8), (2, 7, 8)), ((1, 2, 7, 8), (3, 1, 7, 8)), ((2, 1, 2, 7, 8), (3, 2, 7, 8))):
        q, k, v = torch.randn(shapes[0]), torch.randn(shapes[1]), torch.randn(shapes[1])
        placed = [distribute(t, mesh, [Shard(t.ndim - 2)]) for t in (q, k, v)]
        got = F.scaled_dot_product_attention(*placed, is_causal=True)
        assert_close(got.to_torch(), plain.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=2e-5, atol=2e-5)


def test_a_mix_of_everything() -> None:
    """A fixed sample of sizes, meshes, placements and masks. What is refused must be repaired."""
    draw = random.Random(5)
    torch.manual_seed(5)
    for _ in range(80):
        mesh, names = draw.choice([*MESHES, ((2, 2, 2), (ULYSSES, "tp", RING))])
        hk, length = draw.choice((1, 2, 3)), draw.choice((1, 2, 5, 13, 40))
        hq, keys = hk * draw.choice((1, 2, 3)), draw.choice((length, length, 1, 9, 33))
        causal = draw.random() < 0.4
        kinds = [draw.choice(("both", "both", "query", "keys")) for _ in mesh]
        if draw.random() < 0.5:
            kinds = ["both"] * len(mesh)
        of_q = tuple(Replicate() if kind == "keys" else SEQ for kind in kinds)
        of_kv = tuple(Replicate() if kind == "query" else SEQ for kind in kinds)
        mask, of_mask = None, None
        if not causal and draw.random() < 0.7:
            shape = (draw.choice((1, 2)), draw.choice((1, hq)), draw.choice((1, length)), draw.choice((1, keys)))
            mask = torch.rand(shape) < 0.6 if draw.random() < 0.5 else torch.randn(shape)
            cut = [d for d, (n, whole) in enumerate(zip(shape, (0, 0, length, keys), strict=True)) if d > 1 and n == whole]
            of_mask = tuple(draw.choice([Replicate(), *map(Shard, cut)]) for _ in mesh)
        check(Case(mesh, names, (hq, hk), length, keys, 2, causal, mask, of_q, of_kv, of_mask), refusable=mask is not None)


def test_a_sequence_on_one_device_keeps_the_bits_of_torch() -> None:
    torch.manual_seed(0)
    one = dtorch.init_device_mesh("cpu", (1, 1), mesh_dim_names=(ULYSSES, RING))
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    placed = [distribute(t, one, (SEQ, SEQ)) for t in (q, k, v)]
    got = F.scaled_dot_product_attention(*placed, is_causal=True)
    assert torch.equal(got.to_torch(), plain.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_dropout_draws_what_one_device_draws() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 7, 8) for _ in range(3))
    mesh = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=(RING,))
    placed = [distribute(t, mesh, [SEQ]) for t in (q, k, v)]
    torch.manual_seed(3)
    want = plain.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    dtorch.manual_seed(3)
    got = F.scaled_dot_product_attention(*placed, dropout_p=0.5)
    assert got.placements == (SEQ,)
    assert torch.equal(got.to_torch(), want)


def test_it_can_be_compiled() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 9, 8)
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=(ULYSSES, RING))
    twice = dtorch.compile(lambda t: F.scaled_dot_product_attention(t, t, t, is_causal=True) * 2)
    for _ in range(2):
        got = twice(distribute(x, mesh, [SEQ, SEQ]))
    assert_close(got.to_torch(), 2 * plain.scaled_dot_product_attention(x, x, x, is_causal=True), rtol=1e-5, atol=1e-5)


def test_a_mask_that_no_device_nearby_holds_is_refused() -> None:
    mesh = mesh_of(2, 2)
    q = distribute(torch.randn(1, 2, 8, 8), mesh, (Replicate(), Replicate()))
    k = distribute(torch.randn(1, 2, 8, 8), mesh, (SEQ, SEQ))
    mask = distribute(torch.randn(8, 8), mesh, (Replicate(), Shard(1)))
    with pytest.raises(PlacementError, match="scaled_dot_product_attention"):
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


# ---- the parts


@pytest.mark.parametrize(("length", "keys", "num"), [(24, 24, 3), (24, 8, 3), (8, 24, 2), (25, 25, 4), (3, 3, 4), (96, 96, 8)])
def test_causal_work_is_balanced(length: int, keys: int, num: int) -> None:
    pieces = [balanced(((0, length),), keys, num, at) for at in range(num)]
    assert sorted(n for piece in pieces for n in numbers(piece)) == list(range(length))
    scores = [sum(min(row + 1, keys) for row in numbers(piece)) for piece in pieces]
    assert max(scores) - min(scores) <= 2 * min(length, keys)  # at most two rows
    if length % (2 * num) == 0 and length <= keys:
        assert len(set(scores)) == 1


def line_at(sizes: tuple[int, ...], roles: dict[str, str], coord: tuple[int, ...], rows: int, keys: int, causal: bool) -> Line:
    """The line of a device, of a call with four lanes."""
    mesh = MeshInfo(0, "cpu", sizes, tuple(range(math.prod(sizes))))
    codes = (2,) * len(sizes)
    q, k = (Layout(0, (1, 4, n, 8), "float32", codes) for n in (rows, keys))
    params = {"axes": list(range(len(sizes))), **roles}
    definition = Definition(0, "", "attention", [], {}, (q, k, k), (q,), (), params)
    site = Site(definition, print, {0: mesh}, mesh, coord, ("cpu", 0), torch.device("cpu"))
    return Line(site, q, k, causal)


def work(rows: Any, keys: Any) -> int:
    """Scores under a causal mask."""
    return sum(key <= row for row in numbers(rows) for key in numbers(keys))


def test_a_ring_holds_a_share_of_the_keys_at_a_time_and_each_is_as_much_work_everywhere() -> None:
    """Neither memory nor time of a device depends on where in the sequence it is."""
    line = line_at((4,), {"role0": "ring"}, (1,), 64, 64, causal=True)
    assert len(line.parts) == 4
    assert all(size(keys) <= 16 for part in line.parts for keys in part)
    for part in line.parts:
        each = [work(rows, keys) for rows, keys in zip(line.rows, part, strict=True)]
        assert max(each) <= 1.1 * min(each)  # in lockstep nobody waits for long
    assert [sum(work(line.rows[i], part[i]) for part in line.parts) for i in range(4)] == [64 * 65 // 2 // 4] * 4


def test_ulysses_takes_a_share_of_the_lanes_and_both_together_of_both() -> None:
    line = line_at((2, 2), {"role0": "heads", "role1": "ring"}, (1, 0), 64, 64, causal=False)
    assert [line.lanes(5, i) for i in range(4)] == [(0, 2), (0, 2), (2, 5), (2, 5)]
    assert [size(rows) for rows in line.rows] == [32] * 4
    assert [[size(keys) for keys in part] for part in line.parts] == [[32] * 4] * 2
    assert line.rows[0] == line.rows[2] == ((0, 16), (32, 48))


def test_few_queries_go_to_the_keys() -> None:
    for sizes, roles in (((4,), {"role0": "ring"}), ((2, 2), {"role0": "heads", "role1": "ring"})):
        line = line_at(sizes, roles, (1,) * len(sizes), 1, 64, causal=False)
        assert line.merged == tuple(range(len(sizes)))
        assert [[size(keys) for keys in part] for part in line.parts] == [[16] * 4]
        assert line.rows == [((0, 1),)] * 4


def test_spans() -> None:
    spans = spans_of([(5, 8), (0, 2), (2, 3), (9, 9)])
    assert spans == ((0, 3), (5, 8))
    assert size(spans) == 6
    assert numbers(spans) == [0, 1, 2, 5, 6, 7]
    assert take(spans, 2, 5) == ((2, 3), (5, 7))
    assert meet(spans, ((1, 6),)) == ((1, 3), (5, 6))
    assert meet(spans, ()) == take(spans, 3, 3) == spans_of([]) == ()


@pytest.mark.parametrize("causal", [False, True])
def test_keys_in_any_parts_give_the_same(causal: bool) -> None:
    """Both ways of computing: torch's kernels, and by hand where the widths differ or there is a mask."""
    torch.manual_seed(0)
    lanes = Lanes([0, 0, 1, 1], 2, torch.device("cpu"))
    q, k, v = torch.randn(4, 600, 8), torch.randn(2, 600, 8), torch.randn(2, 600, 8)
    wide = (k.repeat_interleave(2, 0), v.repeat_interleave(2, 0))
    want = plain.scaled_dot_product_attention(q, *wide, is_causal=causal, scale=0.5)
    for width, parts in product((8, 5), (1, 3)):
        state = Online(q, 0.5, width, list(range(600)), causal)
        for part in range(parts):
            at = list(range(part, 600, parts))
            state.add(k[:, at], v[:, at, :width], None, at, lanes, lanes, None)
        assert_close(state.result(torch.float32), want[..., :width], rtol=1e-5, atol=1e-5)
