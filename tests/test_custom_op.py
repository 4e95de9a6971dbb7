"""Ops that users register: by name, on shards, in both kinds of worker processes; and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard
from dtorch.ops import custom, table
from tests import custom_kernels
from tests._scripts import ROOT, WAIT_S, environment
from tests._sharding import distribute, mesh_of

HERE = "tests.custom_kernels"


def test_pointwise_with_a_number_that_varies() -> None:
    op = dtorch.register_op(f"{HERE}:scaled_tanh", "pointwise", numbers=[1])
    x = torch.randn(5, 4)
    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        sharded = distribute(x, mesh_of(3), placements)
        before = dtorch.statistics().signatures
        results = [op(sharded, scale) for scale in (0.5, 2.0, 3.0)]
        assert dtorch.statistics().signatures == before + 1
        for result, scale in zip(results, (0.5, 2.0, 3.0), strict=True):
            assert result.placements == tuple(placements)
            torch.testing.assert_close(result.to_torch(), custom_kernels.scaled_tanh(x, scale))


def test_rules_are_pairs_of_placements() -> None:
    op = dtorch.register_op(f"{HERE}:row_norms", [((Shard(0),), Shard(0))])
    x = torch.randn(7, 4)
    norms, unit = op(distribute(x, mesh_of(3), [Shard(0)]))
    assert norms.placements == unit.placements == (Shard(0),)
    expected = custom_kernels.row_norms(x)
    torch.testing.assert_close((norms.to_torch(), unit.to_torch()), expected)
    with pytest.raises(PlacementError, match=r"custom:tests\.custom_kernels:row_norms"):
        op(distribute(x, mesh_of(3), [Shard(1)]))
    with dtorch.auto_redistribute():
        norms, unit = op(distribute(x, mesh_of(3), [Shard(1)]))
    torch.testing.assert_close((norms.to_torch(), unit.to_torch()), expected)


def test_a_result_may_be_pending() -> None:
    op = dtorch.register_op(f"{HERE}:summed_squares", [((Shard(0), Shard(0)), Partial())])
    x = torch.randn(7, 4)
    sharded = distribute(x, mesh_of(2, 2), [Shard(0), Shard(0)])
    result = op(sharded, sharded)
    assert result.placements == (Partial(), Partial())
    torch.testing.assert_close(result.to_torch(), (x * x).sum())


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_pieces_are_uneven_and_the_result_has_the_size_of_the_whole(shape: tuple[int, ...]) -> None:  # A11
    op = dtorch.register_op(f"{HERE}:scaled_tanh", [((Shard(0),), Shard(0)), ((Partial("max"),), Partial("max"))])
    for size in (5, 3, 1, 0):
        x = torch.arange(float(size))
        y = op(distribute(x, mesh_of(*shape), [Shard(0)] * len(shape)), 2.0)
        assert y.shape == (size,)
        assert [p.shape for p in y.to_shards()] == [p.shape for p in distribute(x, mesh_of(*shape), y.placements).to_shards()]
        torch.testing.assert_close(y.to_torch(), custom_kernels.scaled_tanh(x, 2.0))
    pieces = [torch.tensor([0.5, -1.0]), torch.tensor([-0.5, 2.0])]
    most = dtorch.from_shards(pieces, device_mesh=mesh_of(2), placements=[Partial("max")])
    torch.testing.assert_close(op(most, 3.0).to_torch(), torch.tensor([1.5, 6.0]).tanh())


def test_random_ones_draw_for_the_whole() -> None:
    op = dtorch.register_op(f"{HERE}:add_noise", random=True)
    x = torch.zeros(6)
    torch.manual_seed(3)
    expected = custom_kernels.add_noise(x)
    dtorch.manual_seed(3)
    assert torch.equal(op(distribute(x, mesh_of(3), [Replicate()])).to_torch(), expected)


def test_in_place() -> None:
    op = dtorch.register_op(f"{HERE}:halve_", "pointwise", writes=0)
    x = distribute(torch.ones(5), mesh_of(3), [Shard(0)])
    assert op(x) is x
    assert x.tolist() == [0.5] * 5


def test_only_announced_names_are_imported() -> None:
    with pytest.raises(KeyError):
        table.resolve("custom:os:getpid")
    custom.allow(["custom:no.such.module:function"])
    with pytest.raises(ImportError, match=r"could not import no\.such\.module:function"):
        table.resolve("custom:no.such.module:function")()


@pytest.mark.parametrize(
    ("path", "rule", "error"),
    [
        ("no colon", None, ValueError),
        ("__main__:f", None, ValueError),
        ("tests.no_such_module:f", None, ImportError),
        (f"{HERE}:nothing", None, AttributeError),
        (f"{HERE}:NUMBER", None, TypeError),
        (f"{HERE}:halve_", "linear", ValueError),
        (f"{HERE}:halve_", [((0,), Shard(0))], ValueError),
    ],
)
def test_wrong_registrations(path: str, rule: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        dtorch.register_op(path, rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", ["shared", "per-device"])
def test_the_example(workers: str) -> None:
    done = subprocess.run(
        [sys.executable, "examples/custom_op.py"], cwd=ROOT, env=environment(DTORCH_WORKERS=workers), text=True,
        capture_output=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    assert "the result is Shard(dim=1), as plain torch's" in done.stdout
    assert done.stderr == ""
