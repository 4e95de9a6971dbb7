"""The first op that gives NaN or Inf is named."""

from __future__ import annotations

import asyncio
import inspect
import pickle

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


def test_the_first_such_op_is_named(mesh: DeviceMesh) -> None:
    x = dtorch.Tensor([[1.0, 0.0], [-1.0, 4.0]], device_mesh=mesh, placements=[Shard(0)])

    def step() -> dtorch.Tensor:
        y = x + 1.0
        z = x.log()
        return z * y  # type: ignore[no-any-return]

    with dtorch.check_finite(), pytest.raises(dtorch.NonFiniteError) as caught:
        step()
    error = caught.value
    assert (error.op.rpartition(".")[2], error.num_nan, error.num_inf) == ("log", 1, 1)
    assert error.location == f"{__file__}:{inspect.getsourcelines(step)[1] + 2}"
    assert str(error).splitlines()[0].endswith("gave 1 NaN and 1 infinite elements")
    assert "z = x.log()" in str(error)
    assert "input 0: float32[2, 2] on [Shard(dim=0)]" in str(error)
    assert isinstance(error, FloatingPointError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert step().isnan().any().item()  # and outside nothing is checked


def test_infinite_values_may_pass(mesh: DeviceMesh) -> None:
    x = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)])
    with dtorch.check_finite(inf=False):
        y = x.masked_fill(x > 0, float("-inf"))
        with pytest.raises(dtorch.NonFiniteError, match="4 NaN"):
            y - y
    with dtorch.check_finite(), pytest.raises(dtorch.NonFiniteError, match="4 infinite"):
        x.masked_fill(x > 0, float("-inf"))


def test_writes_factories_and_uploads_are_looked_at(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(4, device_mesh=mesh, placements=[Shard(0)])
    y = dtorch.full((4,), 2.0, device_mesh=mesh, placements=[Shard(0)])
    with dtorch.check_finite():
        y.add_(1)
        with pytest.raises(dtorch.NonFiniteError, match="4 infinite"):
            y.div_(x)
        with pytest.raises(dtorch.NonFiniteError, match="full gave 2 NaN"):
            dtorch.full((2,), float("nan"), device_mesh=mesh)
        with pytest.raises(dtorch.NonFiniteError, match="upload gave 1 NaN"):
            dtorch.Tensor([1.0, float("nan")], device_mesh=mesh)
        dtorch.empty(100, device_mesh=mesh)
        dtorch.arange(4, device_mesh=mesh)


def test_results_are_those_of_a_run_without(mesh: DeviceMesh) -> None:
    x = torch.randn(6, 4)

    def run() -> torch.Tensor:
        a = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(0)])
        b = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(0)])
        total = a.sum(dim=0)
        assert total.placements == (Partial(),)
        values, _ = (a @ b.redistribute([Replicate()]).T).max(dim=-1)
        b[0] = 3.0
        return torch.cat([total.to_torch(), values.to_torch(), b.to_torch().flatten()])

    expected = run()
    with dtorch.check_finite():
        assert torch.equal(run(), expected)
    assert torch.equal(run(), expected)


def test_compiled_functions_run_op_by_op(mesh: DeviceMesh) -> None:
    @dtorch.compile
    def root(x: dtorch.Tensor) -> dtorch.Tensor:
        return (x - 2).sqrt() + 1  # type: ignore[no-any-return]

    x = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)])
    assert root(x).isnan().all().item()
    with dtorch.check_finite(), pytest.raises(dtorch.NonFiniteError, match="sqrt gave 4 NaN"):
        root(x)


def test_it_cannot_start_inside_a_compiled_function(mesh: DeviceMesh) -> None:
    @dtorch.compile
    def inner(x: dtorch.Tensor) -> dtorch.Tensor:
        with dtorch.check_finite():
            return x + 1

    with pytest.raises(RuntimeError, match="put it around"):
        inner(dtorch.ones(2, device_mesh=mesh))
    assert (dtorch.ones(2, device_mesh=mesh) + 1).tolist() == [2.0, 2.0]


async def test_other_tasks_are_not_checked(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(3, device_mesh=mesh)
    inside, done = asyncio.Event(), asyncio.Event()

    async def checks() -> None:
        with dtorch.check_finite():
            inside.set()
            await done.wait()
            with dtorch.check_finite(inf=False):
                (x + 1) / 0
            with pytest.raises(dtorch.NonFiniteError):
                (x + 1) / 0

    task = asyncio.create_task(checks())
    await inside.wait()
    y = (x + 1) / 0
    assert (await y).isinf().all()
    done.set()
    await task
    assert (await ((x + 1) / 0)).isinf().all()


def test_failed_ops_raise_at_their_line(mesh: DeviceMesh) -> None:
    x = dtorch.arange(3, device_mesh=mesh)
    index = dtorch.tensor([7], device_mesh=mesh)
    with dtorch.check_finite(), pytest.raises(IndexError):
        (x * 1.5)[index]
