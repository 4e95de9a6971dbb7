"""dtorch/runtime/moves.py"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.runtime.layout import PARTIAL_CODES, REPLICATE, box, coords, is_partial, rank_of, shard_code, slices
from dtorch.runtime.moves import Moves, Place, Placed, canonical, plan_boxes, steps

Array = Any  # a numpy array of float64
Pieces = dict[Place, Array]
SUM, AVG, MAX, MIN, PRODUCT = (PARTIAL_CODES[op] for op in ("sum", "avg", "max", "min", "product"))
REDUCE: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "avg": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


def placed(
    codes: tuple[int, ...],
    shape: tuple[int, ...] = (4, 4),
    mesh: tuple[int, ...] | None = None,
    devices: tuple[int, ...] | None = None,
    kind: str = "cpu",
) -> Placed:
    mesh = (2,) * len(codes) if mesh is None else mesh
    return Placed(kind, tuple(range(prod(mesh))) if devices is None else devices, mesh, shape, codes)


def cut(whole: Array, layout: Placed) -> Pieces:
    boxes = dict(zip(layout.places(), layout.boxes(), strict=True))
    return {place: whole[slices(held, tuple((0, n) for n in layout.shape))].copy() for place, held in boxes.items()}


def perform(moves: Moves, pieces: Pieces, dst: Placed) -> Pieces:
    """Do the plan device by device over one queue for each pair, and check that nothing is written twice or missed."""
    wires: dict[tuple[Place, Place], deque[tuple[Any, Array]]] = {}
    for place in pieces:
        held = moves.device(place).source
        for other, part in moves.sends(place):
            assert other != place
            assert held is not None
            wires.setdefault((place, other), deque()).append((part, pieces[place][slices(part, held)]))
    made: Pieces = {}
    for place in dst.places():
        todo = moves.device(place)
        assert todo.target is not None
        made[place] = np.full([b - a for a, b in todo.target], np.nan)
        written = np.zeros(made[place].shape, dtype=int)
        if todo.keep is not None:
            assert todo.source is not None
            at = slices(todo.keep, todo.target)
            made[place][at] = pieces[place][slices(todo.keep, todo.source)]
            written[at] += 1
        for other, part in todo.receives:
            sent, data = wires[other, place].popleft()
            assert sent == part
            assert data.size
            at = slices(part, todo.target)
            made[place][at] = data
            written[at] += 1
        assert (written == 1).all()
    assert not any(wires.values()), "something was sent that nobody received"
    return made


def same(a: Pieces, b: Pieces) -> bool:
    return a.keys() == b.keys() and all(
        a[place].shape == b[place].shape and np.allclose(a[place], b[place]) for place in a
    )


def along(layout: Placed, axis: int) -> list[list[Place]]:
    """The groups of devices that differ in ``axis`` alone."""
    places = layout.places()
    return [
        [places[rank_of((*at[:axis], i, *at[axis + 1 :]), layout.mesh_shape)] for i in range(layout.mesh_shape[axis])]
        for at in coords(layout.mesh_shape)
        if at[axis] == 0
    ]


def reduce_axis(pieces: Pieces, layout: Placed, axis: int, op: str) -> Pieces:
    done = dict(pieces)
    for group in along(layout, axis):
        value = REDUCE[op](np.stack([pieces[place] for place in group]), axis=0)
        done.update(dict.fromkeys(group, value))
    return done


def fill_axis(pieces: Pieces, layout: Placed, axis: int, op: str) -> Pieces:
    done = dict(pieces)
    neutral = {"sum": 0.0, "product": 1.0}.get(op)
    if neutral is not None:
        for group in along(layout, axis):
            done.update({place: np.full_like(pieces[place], neutral) for place in group[1:]})
    return done


def meaning(pieces: Pieces, layout: Placed) -> Array:
    """The tensor that pieces stand for."""
    for axis, code in enumerate(layout.codes):
        if is_partial(code):
            op = next(op for op, number in PARTIAL_CODES.items() if number == code)
            pieces = reduce_axis(pieces, layout, axis, op)
    whole = np.full(layout.shape, np.nan)
    for place, held in zip(layout.places(), layout.boxes(), strict=True):
        whole[slices(held, tuple((0, n) for n in layout.shape))] = pieces[place]
    return whole


@st.composite
def meshes(draw: st.DrawFn, ids: int = 12) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    devices = draw(st.permutations(range(ids)))[: prod(shape)]
    return draw(st.sampled_from(["cpu", "cpu", "cpu", "cuda"])), tuple(devices), shape


@st.composite
def codes(draw: st.DrawFn, ndim: int, num: int, partial: bool) -> tuple[int, ...]:
    options = [st.just(REPLICATE)]
    if ndim:
        options += [st.builds(shard_code, st.integers(0, ndim - 1), st.sampled_from([1, 1, 1, 2, 3]))] * 2
    if partial:
        options.append(st.sampled_from([SUM, SUM, AVG, MAX, MIN, PRODUCT]))
    return tuple(draw(st.lists(st.one_of(options), min_size=num, max_size=num)))


@st.composite
def pairs(draw: st.DrawFn, partial: bool = False) -> tuple[Placed, Placed]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    ids = draw(st.sampled_from([8, 12]))
    kind, devices, mesh = draw(meshes(ids))
    src = Placed(kind, devices, mesh, shape, draw(codes(len(shape), len(mesh), partial)))
    if draw(st.booleans()):
        kind, devices, mesh = draw(meshes(ids))
    dst = Placed(kind, devices, mesh, shape, draw(codes(len(shape), len(mesh), partial)))
    return src, dst


@settings(max_examples=400, deadline=None)
@given(pairs())
def test_moves_give_every_device_its_slice_exactly_once(pair: tuple[Placed, Placed]) -> None:
    src, dst = pair
    whole = np.arange(prod(src.shape), dtype=float).reshape(src.shape)
    moves = plan_boxes(src, dst)
    before, after = cut(whole, src), cut(whole, dst)
    assert same(perform(moves, before, dst), after)
    # a device that holds what it needs asks nobody
    for place in dst.places():
        held = moves.device(place).source
        for _, part in moves.receives(place):
            assert held is None or not all(a[0] <= b[0] and b[1] <= a[1] for a, b in zip(held, part, strict=True))
    assert moves.is_local == (not any(moves.receives(place) for place in dst.places()))
    crossing = sum(prod(b - a for a, b in part) for place in dst.places() for _, part in moves.receives(place))
    assert moves.elements_between == crossing
    assert moves.bytes_between(4) == 4 * crossing
    if moves.is_noop:
        assert same(before, after)


@settings(max_examples=400, deadline=None)
@given(pairs(partial=True), st.integers(0, 2**32 - 1))
def test_steps_keep_the_value_whatever_is_pending(pair: tuple[Placed, Placed], seed: int) -> None:
    src, dst = pair
    rng = np.random.default_rng(seed)
    # devices whose coordinates differ in partial axes alone hold different pieces; replicas hold equal ones
    pieces: Pieces = {}
    summands: dict[tuple[int, ...], Array] = {}
    for at, place in zip(coords(src.mesh_shape), src.places(), strict=True):
        key = tuple(i for i, code in zip(at, src.codes, strict=True) if is_partial(code))
        if key not in summands:
            summands[key] = rng.uniform(0.5, 2.0, src.shape)
        held = box(src.shape, src.codes, src.mesh_shape, at)
        pieces[place] = summands[key][slices(held, tuple((0, n) for n in src.shape))].copy()
    expected = meaning(pieces, src)

    plan = steps(src, dst)
    for axis, op in plan.reduce_axes:
        pieces = reduce_axis(pieces, src, axis, op)
    pieces = perform(plan_boxes(plan.middle, plan.target), pieces, dst)
    for axis, op in plan.fill_axes:
        pieces = fill_axis(pieces, dst, axis, op)
    found = meaning(pieces, dst)
    assert found.shape == expected.shape
    assert np.allclose(found, expected)
    if plan.scatter is not None:
        assert src.same_mesh(dst)
        assert plan.reduce_axes[0][0] == plan.scatter[0]
        assert len(plan.reduce_axes) == 1
        assert not plan.fill_axes
    # replicas still agree
    groups: dict[Any, Array] = {}
    for at, (place, piece) in zip(coords(dst.mesh_shape), pieces.items(), strict=True):
        replica = (
            tuple(i for i, code in zip(at, dst.codes, strict=True) if is_partial(code)),
            box(dst.shape, dst.codes, dst.mesh_shape, at),
        )
        assert place in dst.places()
        assert same({place: groups.setdefault(replica, piece)}, {place: piece})


def test_size_one_axes_are_replicated() -> None:
    assert canonical(placed((0, SUM, 1), mesh=(1, 1, 2))).codes == (-1, -1, 1)
    layout = placed((0,))
    assert canonical(layout) == layout
    plan = steps(placed((SUM,), mesh=(1,)), placed((0,), mesh=(1,)))
    assert (plan.reduce_axes, plan.scatter, plan.fill_axes) == ((), None, ())
    assert plan_boxes(plan.middle, plan.target).is_noop


def test_shard_to_replicate_is_an_all_gather_and_back_is_free() -> None:
    gather = plan_boxes(placed((0,)), placed((-1,)))
    assert gather.receives(("cpu", 0)) == [(("cpu", 1), ((2, 4), (0, 4)))]
    assert gather.keep(("cpu", 0)) == ((0, 2), (0, 4))
    assert gather.elements_between == 16
    back = plan_boxes(placed((-1,)), placed((0,)))
    assert back.is_local
    assert not back.is_noop
    assert back.elements_between == 0


def test_a_disjoint_mesh_and_another_kind_receive_everything() -> None:
    moves = plan_boxes(placed((0,)), placed((1,), kind="cuda"))
    assert moves.elements_between == 16
    assert moves.device(("cpu", 0)).target is None
    assert moves.device(("cuda", 0)).source is None
    assert moves.sends(("cuda", 0)) == []
    assert moves.device(("cpu", 99)).is_noop


def test_replicas_share_the_sending() -> None:
    moves = plan_boxes(placed((-1,), mesh=(4,)), placed((0,), mesh=(4,), devices=(4, 5, 6, 7)))
    assert [len(moves.sends(("cpu", i))) for i in range(4)] == [1, 1, 1, 1]


def test_every_device_sees_one_order() -> None:
    moves = plan_boxes(placed((0,), mesh=(4,)), placed((1,), mesh=(4,)))
    for place in moves.devices:
        assert moves.sends(place) == [(t.dst, t.box) for t in moves.transfers if t.src == place]
        assert moves.receives(place) == [(t.src, t.box) for t in moves.transfers if t.dst == place]


def test_a_reduce_scatter_is_recognised() -> None:
    plan = steps(placed((SUM,)), placed((1,)))
    assert plan.scatter == (0, 1)
    assert plan.reduce_axes == ((0, "sum"),)
    assert plan.middle.codes == (-1,)
    assert steps(placed((-1, MAX)), placed((-1, shard_code(0, 2)))).scatter == (1, 0)
    assert steps(placed((SUM, SUM)), placed((SUM, 0))).scatter == (1, 0)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (placed((SUM,)), placed((-1,))),  # not sharded
        (placed((SUM, 0)), placed((0, 0))),  # the dim is sharded elsewhere
        (placed((SUM, -1)), placed((0, 1))),  # two axes differ
        (placed((SUM, SUM)), placed((0, 1))),
        (placed((SUM,)), placed((0,), devices=(1, 0))),  # another mesh
        (placed((SUM, MAX)), placed((SUM, 0))),  # the pending reductions do not commute
    ],
)
def test_other_reductions_are_no_reduce_scatter(src: Placed, dst: Placed) -> None:
    assert steps(src, dst).scatter is None


def test_equal_partial_axes_stay_and_moves_keep_to_their_coordinate() -> None:
    src, dst = placed((SUM, 0)), placed((SUM, -1))
    plan = steps(src, dst)
    assert (plan.reduce_axes, plan.fill_axes) == ((), ())
    assert plan.middle == src
    assert plan.target == dst
    moves = plan_boxes(plan.middle, plan.target)
    assert {(t.src[1], t.dst[1]) for t in moves.transfers} == {(1, 0), (0, 1), (3, 2), (2, 3)}


def test_equal_layouts_with_mixed_reductions_pending_need_nothing() -> None:
    plan = steps(placed((SUM, MAX)), placed((SUM, MAX)))
    assert (plan.reduce_axes, plan.fill_axes) == ((), ())
    assert plan_boxes(plan.middle, plan.target).is_noop


def test_reductions_that_do_not_commute_are_all_done() -> None:
    plan = steps(placed((SUM, MAX)), placed((SUM, -1)))
    assert plan.reduce_axes == ((0, "sum"), (1, "max"))
    assert plan.fill_axes == ((0, "sum"),)
    plan = steps(placed((SUM, AVG)), placed((SUM, -1)))
    assert plan.reduce_axes == ((1, "avg"),)
    assert plan.fill_axes == ()


def test_filling_runs_from_right_to_left() -> None:
    assert steps(placed((-1, -1)), placed((SUM, PRODUCT))).fill_axes == ((1, "product"), (0, "sum"))


def test_pending_reductions_do_not_move() -> None:
    with pytest.raises(AssertionError, match="reduce them first"):
        plan_boxes(placed((SUM,)), placed((SUM,), devices=(1, 0)))
    with pytest.raises(AssertionError, match="reduce before"):
        plan_boxes(placed((SUM,)), placed((-1,)))
