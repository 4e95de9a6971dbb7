"""dtorch/runtime/layout.py"""

from __future__ import annotations

import ast
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtorch.runtime import layout
from dtorch.runtime.layout import box, coords, local_shape, rank_of, shard_code, split


def lengths(pieces: tuple[tuple[int, int], ...]) -> list[int]:
    return [stop - start for start, stop in pieces]


def test_codes_round_trip() -> None:
    for dim in (0, 1, 63):
        for block in (1, 2, 64, 128):
            code = shard_code(dim, block)
            assert layout.is_shard(code)
            assert not layout.is_partial(code)
            assert (layout.shard_dim(code), layout.shard_block(code)) == (dim, block)
    for op, code in {"sum": -2, "avg": -3, "max": -4, "min": -5, "product": -6}.items():
        assert layout.is_partial(code)
        assert not layout.is_shard(code)
        assert layout.partial_op(code) == op
        assert layout.partial_code(op) == code
    assert not layout.is_partial(layout.REPLICATE)
    assert not layout.is_shard(layout.REPLICATE)
    assert shard_code(3) == 3


@pytest.mark.parametrize(
    ("size", "num", "expected"),
    [
        (5, 4, [2, 2, 1, 0]),
        (2, 4, [1, 1, 0, 0]),
        (0, 3, [0, 0, 0]),
        (1, 1, [1]),
        (10, 4, [3, 3, 3, 1]),
        (9, 3, [3, 3, 3]),
    ],
)
def test_split_is_chunk_padded_with_empty_pieces(size: int, num: int, expected: list[int]) -> None:
    assert lengths(split(0, size, num)) == expected


def test_empty_pieces_sit_at_the_end() -> None:
    assert split(0, 2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))
    assert split(3, 3, 2, 4) == ((3, 3), (3, 3))


def test_split_cuts_at_multiples_of_the_block() -> None:
    assert lengths(split(0, 12, 2, 4)) == [8, 4]
    assert lengths(split(0, 10, 4, 4)) == [4, 4, 2, 0]
    assert split(5, 10, 2, 4) == ((5, 8), (8, 10))  # multiples in global coordinates


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.integers(1, 7))
def test_split_tiles_the_interval(start: int, size: int, num: int, block: int) -> None:
    stop = start + size
    pieces = split(start, stop, num, block)
    assert len(pieces) == num
    assert pieces[0][0] == (start if size else stop)
    at = start
    for a, b in pieces:
        if a == b:
            assert a == stop
            continue
        assert a == at
        assert b == stop or b % block == 0
        at = b
    assert at == stop
    if block == 1 and size:
        step = -(-size // num)
        assert lengths(pieces) == [max(0, min(step, size - i * step)) for i in range(num)]


def test_axes_subdivide_from_left_to_right() -> None:
    shape, codes, mesh = (8, 3), (0, 0), (2, 2)
    assert [box(shape, codes, mesh, at)[0] for at in coords(mesh)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    # (2,) over 2 x 4: the inner axis splits one element in four
    found = [box((2,), (0, 0), (2, 4), at)[0] for at in coords((2, 4))]
    assert found == [(0, 1), (1, 1), (1, 1), (1, 1), (1, 2), (2, 2), (2, 2), (2, 2)]


def test_replicated_and_partial_axes_hold_the_whole() -> None:
    assert box((4, 5), (-1, -2), (2, 3), (1, 2)) == ((0, 4), (0, 5))
    assert box((), (-1,), (2,), (1,)) == ()
    assert local_shape((5, 4), (0, -1), (4, 2), (2, 1)) == (1, 4)
    assert local_shape((5, 4), (0, 1), (4, 2), (3, 1)) == (0, 2)


def test_a_size_one_axis_holds_the_whole() -> None:
    assert box((5,), (0,), (1,), (0,)) == ((0, 5),)


@given(st.data())
def test_boxes_of_sharded_axes_partition_the_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    codes = tuple(
        shard_code(data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 3))) for _ in mesh
    )
    boxes = [box(shape, codes, mesh, at) for at in coords(mesh)]
    assert sum(map(layout.numel, boxes)) == prod(shape)
    for i, a in enumerate(boxes):
        assert all(0 <= start <= stop <= size for (start, stop), size in zip(a, shape, strict=True))
        assert all(layout.intersect(a, b) is None for b in boxes[:i])


def test_coords_are_row_major() -> None:
    assert coords((2, 3)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert coords(()) == [()]
    for mesh in ((2, 3), (1,), (3, 1, 2)):
        assert [rank_of(at, mesh) for at in coords(mesh)] == list(range(prod(mesh)))
    coords((2,)).clear()
    assert coords((2,)) == [(0,), (1,)]


def test_boxes_intersect_and_index() -> None:
    assert layout.intersect(((0, 3), (1, 5)), ((2, 6), (0, 2))) == ((2, 3), (1, 2))
    assert layout.intersect(((0, 3),), ((3, 6),)) is None
    assert layout.intersect((), ()) == ()
    assert layout.numel(()) == 1
    assert layout.slices(((4, 6), (1, 2)), ((3, 8), (0, 2))) == (slice(1, 3), slice(1, 2))


@pytest.mark.parametrize("name", ["layout", "moves"])
def test_the_arithmetic_imports_nothing_that_does_things(name: str) -> None:
    source = Path(layout.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            imported.add("." * node.level + (module if module.startswith("dtorch.") else module.split(".")[0]))
    allowed = {"__future__", "collections", "dataclasses", "functools", "itertools", "math", ".layout"}
    allowed.add("dtorch.transport.messages")  # plain data
    assert imported <= allowed
