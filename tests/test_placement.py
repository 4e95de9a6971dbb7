"""dtorch/placement.py"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any, cast

import pytest

from dtorch.mesh import DeviceMesh
from dtorch.placement import Partial, Placement, Replicate, Shard, from_code, normalize
from dtorch.runtime.layout import PARTIAL_CODES
from dtorch.transport.errors import DTorchError, PlacementError

ONE = DeviceMesh("cpu", [0, 1])
TWO = DeviceMesh("cpu", [[0, 1], [2, 3]])
ALL = [Shard(0), Shard(3), Shard(-1), Shard(1, block=64), Replicate(), Partial(), Partial("max")]


def test_equal_by_value() -> None:
    assert Shard(1) == Shard(dim=1)
    assert Shard(1) != Shard(2)
    assert Shard(1) != Shard(1, block=2)
    assert Replicate() == Replicate()
    assert Partial() == Partial("sum")
    assert Partial("max") != Partial("sum")
    assert cast(Placement, Shard(0)) != Replicate()
    assert len({Shard(0), Shard(0), Replicate(), Replicate(), Partial(), Partial()}) == 3


def test_repr() -> None:
    assert [repr(p) for p in (Shard(0), Shard(-1, 4), Replicate(), Partial(), Partial("avg"))] == [
        "Shard(dim=0)",
        "Shard(dim=-1, block=4)",
        "Replicate()",
        "Partial(sum)",
        "Partial(avg)",
    ]


@pytest.mark.parametrize("placement", ALL, ids=repr)
def test_survives_pickling_and_copying(placement: Placement) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(placement, protocol)) == placement
    assert copy.copy(placement) == placement
    assert copy.deepcopy([placement]) == [placement]


@pytest.mark.parametrize("placement", ALL, ids=repr)
def test_immutable_and_without_a_dict(placement: Placement) -> None:
    assert not hasattr(placement, "__dict__")
    for name in ("dim", "reduce_op", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(placement, name, 1)
    with pytest.raises(AttributeError, match="immutable"):
        del placement.dim  # type: ignore[attr-defined]


def test_questions() -> None:
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert Shard(1).is_shard(dim=1)
    assert not Shard(1).is_shard(0)
    assert not Shard(1).is_replicate()
    assert not Shard(1).is_partial()
    assert Replicate().is_replicate()
    assert not Replicate().is_shard()
    assert Partial("min").is_partial()
    assert Partial("min").is_partial("min")
    assert not Partial("min").is_partial("sum")
    assert not Partial().is_replicate()
    match Shard(2, 8):
        case Shard(dim, block):
            assert (dim, block) == (2, 8)


def test_codes_round_trip() -> None:
    for placement in [Shard(0), Shard(63), Shard(2, 128), Replicate(), *map(Partial, PARTIAL_CODES)]:
        assert from_code(placement.code) == placement
    assert Shard(2, 128).code == 2 + 64 * 127
    with pytest.raises(ValueError, match="resolve its dim first"):
        _ = Shard(-1).code


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Shard(cast(Any, "0")), TypeError, "expects an int as dim, got '0' of type str"),
        (lambda: Shard(True), TypeError, "expects an int as dim, got True"),
        (lambda: Shard(cast(Any, 1.0)), TypeError, "expects an int as dim, got 1.0"),
        (lambda: Shard(64), ValueError, "dim from -64 to 63, got 64"),
        (lambda: Shard(0, 0), ValueError, "block of at least 1 element, got 0"),
        (lambda: Partial("mean"), ValueError, "Partial expects one of 'sum', 'avg', .*, got 'mean'"),
        (lambda: Partial(cast(Any, ["sum"])), ValueError, "got"),
        (lambda: Placement(), TypeError, "base class"),
    ],
)
def test_nonsense_is_refused(make: Any, error: type[Exception], text: str) -> None:
    Shard(1)  # equal by hash to True and 1.0, which must be refused nevertheless
    with pytest.raises(error, match=text):
        make()


def test_normalize_resolves_negative_dims() -> None:
    assert normalize([Shard(-1), Replicate()], 3, TWO) == (Shard(2), Replicate())
    assert normalize((Shard(-3, block=4), Partial()), 3, TWO) == (Shard(0, 4), Partial())
    assert normalize([Replicate()], 0, ONE) == (Replicate(),)


@pytest.mark.parametrize(
    ("placements", "ndim", "mesh", "text"),
    [
        ([Shard(0)], 2, TWO, "Expected one placement a mesh axis, 2 in all, got 1"),
        ([], 2, ONE, "1 in all, got 0"),
        ([Shard(2)], 2, ONE, r"Expected a dim from -2 to 1 .*, got Shard\(dim=2\); choose"),
        ([Shard(-2)], 1, ONE, r"the tensor has 1 dim\), got Shard\(dim=-2\)"),
        ([Shard(0)], 0, ONE, "A tensor without dims can not be split"),
        ([0], 2, ONE, "Expected a placement, got 0 of type int"),
        ([{}], 2, ONE, "of type dict"),
        ([Replicate], 2, ONE, r"use Replicate\(\.\.\.\)"),
        (Shard(0), 2, ONE, r"write placements=\[\.\.\.\]"),
        ("ab", 2, TWO, "write placements"),
        (None, 2, TWO, "write placements"),
    ],
)
def test_normalize_refuses(placements: Any, ndim: int, mesh: DeviceMesh, text: str) -> None:
    for _ in range(2):
        with pytest.raises(PlacementError, match=text) as caught:
            normalize(placements, ndim, mesh)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, DTorchError)


@dataclass(frozen=True)
class Foreign:
    """Shaped like a placement of torch.distributed.tensor."""

    dim: int | None = None
    reduce_op: str | None = None
    split_factor: int = 1

    def is_shard(self) -> bool:
        return self.dim is not None

    def is_partial(self) -> bool:
        return self.reduce_op is not None

    def is_replicate(self) -> bool:
        return self.dim is None and self.reduce_op is None


def test_normalize_takes_placements_of_torch() -> None:
    assert normalize([Foreign(dim=-1), Foreign()], 2, TWO) == (Shard(1), Replicate())
    assert normalize([Foreign(reduce_op="avg"), Shard(0)], 2, TWO) == (Partial("avg"), Shard(0))
    for odd in (Foreign(dim=0, split_factor=2), Foreign(reduce_op="band")):
        with pytest.raises(PlacementError, match="Expected a placement that dtorch has"):
            normalize([odd], 2, ONE)


def test_normalize_takes_the_real_ones() -> None:
    theirs = pytest.importorskip("torch.distributed.tensor")
    assert normalize([theirs.Shard(-1), theirs.Replicate()], 2, TWO) == (Shard(1), Replicate())
    assert normalize([theirs.Partial(), theirs.Partial("max")], 2, TWO) == (Partial(), Partial("max"))
