"""The introductory programs, as users know them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _scripts import run

import dtorch
from dtorch.distributed_spec import DeviceMesh, Partial, Replicate, Shard
from dtorch.test.test_util import assert_tensor_allclose

TWO = """
    import dtorch
    from dtorch.distributed_spec import DeviceMesh, Shard

    x = dtorch.rand((4, 3), device_mesh=DeviceMesh("{kind}", [0, 1]), placements=[Shard(0)])
    print(x)
"""


@pytest.fixture(params=["cpu", "cuda"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """"cuda" is virtual: it runs the same on the CPU."""
    if request.param == "cuda":
        dtorch.init(virtual={"cuda": "cpu"})
    yield request.param
    if request.param == "cuda":
        dtorch.shutdown()


def _check_printed(text: str, mesh: str, placements: str) -> None:
    *values, facts = text.rstrip("\n").split("\n")
    assert len(values) == 4
    assert all(len(row.strip(" [],").split(",")) == 3 for row in values)
    assert facts == f"shape=(4, 3), dtype=torch.float32, device_mesh={mesh}, placements=[{placements}]"


def test_two_devices_print_values_and_facts(kind: str) -> None:
    x = dtorch.rand((4, 3), device_mesh=DeviceMesh(kind, [0, 1]), placements=[Shard(0)])
    _check_printed(str(x), f'DeviceMesh("{kind}", [0, 1])', "Shard(dim=0)")
    value = x.to_torch()
    assert value.shape == (4, 3)
    assert ((value >= 0) & (value < 1)).all()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial(), Replicate()])
def test_ones_on_one_axis(kind: str, placement: dtorch.Placement) -> None:
    x = dtorch.ones((4, 3), device_mesh=DeviceMesh(kind, [0, 1]), placements=[placement])
    _check_printed(str(x), f'DeviceMesh("{kind}", [0, 1])', str(placement))
    assert torch.equal(x.to_torch(), torch.ones(4, 3))
    assert "\n".join(str(x).split("\n")[:4]) == str(torch.ones(4, 3))[7:-1].replace("\n       ", "\n")


def test_ones_on_two_axes(kind: str) -> None:
    mesh = DeviceMesh(kind, [[0, 1], [2, 3]])
    x = dtorch.ones((4, 3), device_mesh=mesh, placements=[Shard(0), Shard(1)])
    _check_printed(str(x), f'DeviceMesh("{kind}", [[0, 1], [2, 3]])', "Shard(dim=0), Shard(dim=1)")
    assert torch.equal(x.to_torch(), torch.ones(4, 3))
    assert [tuple(piece.shape) for piece in x.to_shards()] == [(2, 2), (2, 1), (2, 2), (2, 1)]


def test_a_torch_tensor_comes_back_bit_for_bit(kind: str) -> None:
    torch_x = torch.randn(4, 5)
    torch_x[0, 0], torch_x[1, 1] = -0.0, torch.nan
    x = dtorch.Tensor(torch_x, device_mesh=DeviceMesh(kind, [0, 1]), placements=[Shard(1)])
    assert torch.equal(x.to_torch().view(torch.int32), torch_x.view(torch.int32))
    assert isinstance(x, dtorch.TensorFuture)


def test_add_and_redistribute(kind: str) -> None:
    mesh = DeviceMesh(kind, [0, 1])
    torch_x, torch_y = torch.rand(3, 4, 5), torch.rand(4, 1)
    x = dtorch.Tensor(torch_x, device_mesh=mesh, placements=[Shard(1)])
    y = dtorch.Tensor(torch_y, device_mesh=mesh, placements=[Replicate()])
    z = x + y
    assert isinstance(z, dtorch.TensorFuture)
    assert (tuple(z.shape), list(z.placements)) == ((3, 4, 5), [Shard(1)])
    moved = z.redistribute([Shard(0)])
    assert list(moved.placements) == [Shard(0)]
    assert_tensor_allclose(z, torch_x + torch_y)
    assert torch.equal(moved.to_torch(), torch_x + torch_y)
    assert [tuple(piece.shape) for piece in moved.to_shards()] == [(2, 4, 5), (1, 4, 5)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_as_a_program(kind: str, tmp_path: Path) -> None:
    env = {"DTORCH_VIRTUAL": "cuda=cpu"} if kind == "cuda" else {}
    _check_printed(run(tmp_path, TWO.format(kind=kind), **env), f'DeviceMesh("{kind}", [0, 1])', "Shard(dim=0)")


def test_the_longer_programs(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        """
        import asyncio
        import torch
        import dtorch
        from dtorch.distributed_spec import DeviceMesh, Partial, Replicate, Shard
        from dtorch.test.test_util import assert_tensor_allclose

        mesh = DeviceMesh("cpu", [0, 1])
        for placement in (Shard(0), Partial(), Replicate()):
            print(dtorch.ones((2, 2), device_mesh=mesh, placements=[placement]))
        print(dtorch.ones((2, 2), device_mesh=DeviceMesh("cpu", [[0, 1], [2, 3]]), placements=[Shard(0), Shard(1)]))

        torch_x, torch_y = torch.rand(3, 4, 5), torch.rand(4, 1)
        x = dtorch.Tensor(torch_x, device_mesh=mesh, placements=[Shard(1)])
        y = dtorch.Tensor(torch_y, device_mesh=mesh, placements=[Replicate()])
        assert torch.equal(x.to_torch(), torch_x)
        z = x + y
        print(z.placements, z.redistribute([Shard(0)]).placements)
        assert_tensor_allclose(z, torch_x + torch_y)

        async def main():
            assert torch.equal(await z.value(), torch_x + torch_y)

        asyncio.run(main())
        """,
    )
    lines = printed.splitlines()
    assert len(lines) == 13
    assert all(line.strip(" [],") == "1., 1." for i, line in enumerate(lines[:12]) if i % 3 < 2)
    assert lines[12] == "(Shard(dim=1),) (Shard(dim=0),)"


def test_a_helper_that_sees_a_difference() -> None:
    x = dtorch.ones((2, 2), device_mesh=DeviceMesh("cpu", [0, 1]))
    with pytest.raises(AssertionError):
        assert_tensor_allclose(x, torch.zeros(2, 2))
