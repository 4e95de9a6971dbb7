"""dtorch.testing.compare names the first submodule whose output differs from plain torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch import testing


class Twin(torch.nn.Module):
    """Two layers and a norm; what ``branch`` returns is a dict."""

    def __init__(self, nn: Any = torch.nn) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.5))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Any, scale: float = 1.0) -> dict[str, Any]:
        h = self.first(x)
        h = h + self.block(h) + self.block(h)
        return {"out": self.norm(h) * scale, "pair": (h, h.sum())}


@pytest.fixture
def mesh() -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


X = torch.arange(30.0).view(5, 6) / 10


def native_twin(reference: torch.nn.Module, mesh: dtorch.DeviceMesh) -> torch.nn.Module:
    with mesh:
        made = _Native()
    made.load_state_dict(reference.state_dict())
    return made


class _Native(dtorch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dtorch.nn.ColumnParallelLinearWithReplicateOutput(6, 8)
        self.block = dtorch.nn.Sequential(dtorch.nn.GELU(), dtorch.nn.Linear(8, 8), dtorch.nn.Dropout(0.5))
        self.norm = dtorch.nn.LayerNorm(8)

    forward = Twin.forward


def test_a_module_like_its_reference_compares_as_close(mesh: dtorch.DeviceMesh) -> None:
    reference = Twin()
    report = testing.compare(native_twin(reference, mesh), reference, X)  # training: both drop the same elements
    assert report
    assert report.first is None
    report.check()
    names = [(d.name, d.call) for d in report.differences]
    assert names == [
        ("first", 0), ("block.0", 0), ("block.1", 0), ("block.2", 0), ("block", 0),
        ("block.0", 1), ("block.1", 1), ("block.2", 1), ("block", 1), ("norm", 0), ("", 0),
    ]  # fmt: skip
    assert "all close" in str(report)


def test_the_first_submodule_that_differs_is_named_with_the_size(mesh: dtorch.DeviceMesh) -> None:
    reference = Twin().eval()
    module = native_twin(reference, mesh).eval()
    with torch.no_grad():
        module.block[1].bias.add_(0.25)
    report = testing.compare(module, reference, {"x": X, "scale": 2.0})
    assert not report
    assert report.first is not None
    assert (report.first.name, report.first.kind, report.first.call) == ("block.1", "Linear", 0)
    assert report.first.max_abs == pytest.approx(0.25, abs=1e-6)
    assert "block.1 (Linear)" in str(report)
    with pytest.raises(AssertionError, match=r"block\.1 \(Linear\): largest difference 0\.25 absolute"):
        report.check()
    assert testing.compare(module, reference, X, rtol=0, atol=25)


def test_a_distributed_module_is_compared_as_it_is(mesh: dtorch.DeviceMesh) -> None:
    reference = Twin().eval()
    module = dtorch.distribute(copy.deepcopy(reference), mesh, {"first": "colwise"})
    report = testing.compare(module, reference, (X,))
    assert report, str(report)
    with torch.no_grad():
        module.norm.weight.mul_(3)
    found = testing.compare(module, reference, (X,)).first
    assert found is not None
    assert found.name == "norm"


def test_other_shapes_and_other_calls_are_said(mesh: dtorch.DeviceMesh) -> None:
    wide, narrow = torch.nn.Sequential(torch.nn.Linear(6, 8)), torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU())
    report = testing.compare(dtorch.distribute(wide, mesh, None), narrow, X)
    assert report.first is not None
    assert report.first.detail == "torch.float32 [5, 8], not torch.float32 [5, 4]"
    assert report.unmatched == ("1",)
    assert "called in one of the two only: 1" in str(report)


def test_nan_equals_nan_only(mesh: dtorch.DeviceMesh) -> None:
    module = dtorch.distribute(torch.nn.Sequential(torch.nn.ReLU()), mesh, None)
    holes = torch.tensor([1.0, float("nan"), float("inf")])
    assert testing.compare(module, torch.nn.Sequential(torch.nn.ReLU()), holes)
    found = testing.compare(module, torch.nn.Sequential(torch.nn.Hardtanh(0, 2)), holes).first
    assert found is not None
    assert found.name == "0"


async def test_the_awaited_form_gives_the_same_report(mesh: dtorch.DeviceMesh) -> None:
    reference = Twin().eval()
    report = await testing.compare_async(native_twin(reference, mesh).eval(), reference, X)
    assert report
    assert len(report.differences) == 11
