"""``x[index]`` and ``x[index] = value`` for every kind of index, on replicated and sharded targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import PlacementError, Replicate, Shard
from tests._sharding import distribute, mesh_of

SHAPE = (5, 4, 3)
MASK = torch.tensor([True, False, True, True, False])
PLANE = (torch.arange(20) % 3 == 0).reshape(5, 4)
WHOLE = (torch.arange(60) % 4 == 1).reshape(SHAPE)
ROWS, COLUMNS = torch.tensor([4, 0, 2]), torch.tensor([1, 3, -1])

KINDS: dict[str, Any] = {
    "int": 2,
    "negative int": -1,
    "ints": (1, -2, 0),
    "slice": slice(1, 4),
    "slice to the end": (slice(None), slice(2, None)),
    "negative slice": slice(-3, -1),
    "step": slice(0, 5, 2),
    "steps": (slice(1, None, 2), slice(None, None, 3)),
    "empty slice": slice(3, 3),
    "slice past the end": slice(2, 99),
    "all": slice(None),
    "None": None,
    "None inside": (slice(None), None, 1),
    "Ellipsis": Ellipsis,
    "Ellipsis and int": (Ellipsis, 1),
    "int and Ellipsis": (0, Ellipsis, slice(0, 2)),
    "empty tuple": (),
    "True": True,
    "False": False,
    "mask of the first dim": MASK,
    "mask of two dims": PLANE,
    "mask of all": WHOLE,
    "mask of the last dim": (Ellipsis, torch.tensor([True, False, True])),
    "mask and int": (MASK, 1),
    "mask and slice": (MASK, slice(1, 3)),
    "mask that selects nothing": torch.zeros(5, dtype=torch.bool),
    "list of bools": [True, False, False, True, True],
    "list": [3, 0, -1],
    "lists": ([0, 1], [2, 3]),
    "list and slice": ([0, 4], slice(1, 3)),
    "tensor": ROWS,
    "tensor of the second dim": (slice(None), COLUMNS),
    "tensors": (ROWS, COLUMNS),
    "tensors that broadcast": (ROWS[:, None], COLUMNS[None, :]),
    "tensors apart": (ROWS, slice(None), torch.tensor([0, 2, 1])),
    "tensor and int": (ROWS, 1),
    "int and tensor": (1, COLUMNS),
    "tensor and None": (ROWS, None),
    "tensor, slice and int": (ROWS, slice(0, 4, 2), -1),
    "Ellipsis and tensor": (Ellipsis, torch.tensor([2, 0])),
    "tensor of no dims": torch.tensor(3),
    "tensor of two dims": torch.tensor([[0, 1], [4, 3]]),
    "empty tensor": torch.tensor([], dtype=torch.int64),
    "int32 tensor": ROWS.to(torch.int32),
    "range": range(1, 4),
    "mask and tensor": (torch.tensor([True, False, True, False, True]), torch.tensor([0, 1, 2])),
}

PLACEMENTS = [((3,), (p,)) for p in (Replicate(), Shard(0), Shard(1), Shard(2))] + [
    ((2, 2), (Shard(0), Shard(1))), ((2, 2), (Shard(0), Shard(0))),
]


def cases() -> list[tuple[torch.Tensor, Any, str]]:
    """(values for each kind of index: a number, what broadcasts, and one of the result's shape)."""
    x = torch.arange(60.0).reshape(SHAPE)
    made = []
    for name, index in KINDS.items():
        selected = x[index]
        values: list[Any] = [7.5, torch.tensor(-2.0)]
        if selected.ndim:
            values.append(torch.arange(selected.shape[-1]) + 100.0)
            values.append(torch.arange(float(selected.numel())).reshape(selected.shape) - 500)
        made += [(x, value, name) for value in values]
    return made


def under_both(call: Callable[[], None]) -> None:
    """As it is, or refused and then under the policy."""
    try:
        call()
    except PlacementError:
        with dtorch.auto_redistribute():
            call()


@pytest.mark.parametrize(("mesh", "placed"), PLACEMENTS, ids=str)
def test_reading(mesh: tuple[int, ...], placed: tuple[Any, ...]) -> None:
    x = torch.arange(60.0).reshape(SHAPE)
    t = distribute(x, mesh_of(*mesh), placed)
    for name, index in KINDS.items():
        expected = x[index]

        def read(index: Any = index, expected: torch.Tensor = expected, name: str = name) -> None:
            got = t[index]
            assert tuple(got.shape) == tuple(expected.shape), name
            assert torch.equal(got.to_torch(), expected), name

        under_both(read)


@pytest.mark.parametrize(("mesh", "placed"), PLACEMENTS, ids=str)
def test_writing(mesh: tuple[int, ...], placed: tuple[Any, ...]) -> None:
    on = mesh_of(*mesh)
    cut = [p if p.is_replicate() else Shard(0) for p in placed]
    for x, value, name in cases():
        expected = x.clone()
        expected[KINDS[name]] = value
        sources: list[Any] = [value]
        if isinstance(value, torch.Tensor):
            sources.append(distribute(value, on, [Replicate()] * len(mesh)))
            if value.ndim:
                sources.append(distribute(value, on, cut))
        for source in sources:
            t = distribute(x, on, placed)
            alias = t.view(SHAPE)

            def write(t: Any = t, source: Any = source, name: str = name) -> None:
                t[KINDS[name]] = source

            under_both(write)
            assert t.placements == placed
            assert torch.equal(t.to_torch(), expected), f"{name} = {source!r}"
            assert torch.equal(alias.to_torch(), expected), name


@pytest.mark.parametrize("placed", [Replicate(), Shard(0), Shard(1)])
def test_the_index_is_distributed_too(placed: Any) -> None:
    mesh = mesh_of(3)
    x = torch.arange(60.0).reshape(SHAPE)
    for name, index in KINDS.items():
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(p, torch.Tensor) and p.ndim for p in parts):
            continue
        for where in (Replicate(), Shard(0)):
            own = tuple(distribute(p, mesh, [where]) if isinstance(p, torch.Tensor) and p.ndim else p for p in parts)
            mine = own if isinstance(index, tuple) else own[0]
            t = distribute(x, mesh, [placed])
            expected = x.clone()

            def both(t: Any = t, mine: Any = mine, name: str = name, index: Any = index) -> None:
                assert torch.equal(t[mine].to_torch(), x[index]), name
                t[mine] = -1.0

            under_both(both)
            expected[index] = -1.0
            assert torch.equal(t.to_torch(), expected), name


@pytest.mark.parametrize("placed", [Replicate(), Shard(0), Shard(1)])
def test_increments_by_an_index(placed: Any) -> None:
    x = torch.arange(60.0).reshape(SHAPE)
    for name, index in KINDS.items():
        t, expected = distribute(x, mesh_of(3), [placed]), x.clone()
        expected[index] += 1

        def add(t: Any = t, index: Any = index) -> None:
            t[index] += 1

        under_both(add)
        assert torch.equal(t.to_torch(), expected), name


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (9, 1.0), (-6, 1.0), ((0, 0, 0, 0), 1.0), ("a", 1.0), (1.5, 1.0), (slice(None, None, -1), 1.0),
        (torch.tensor([7]), 1.0), (torch.tensor([0.5]), 1.0), (torch.ones(4, dtype=torch.bool), 1.0),
        (slice(0, 2), torch.ones(3, 4, 3)), ([0, 1], torch.ones(3)[:2].reshape(2)), ((Ellipsis, Ellipsis, 0), 1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("placed", [Replicate(), Shard(0)])
def test_wrong_indices_raise_what_torch_raises(index: Any, value: Any, placed: Any) -> None:
    x = torch.arange(60.0).reshape(SHAPE)
    expected: type[Exception] | None = None
    try:
        x.clone()[index] = value
    except Exception as error:
        expected = type(error)
    t = distribute(x, mesh_of(3), [placed])
    if expected is None:
        t[index] = value
        return

    def write() -> None:
        t[index] = value
        t.to_torch()

    with pytest.raises(expected), dtorch.auto_redistribute():
        write()
