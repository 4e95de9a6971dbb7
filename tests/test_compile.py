"""dtorch.compile: what is recorded once and replayed gives what the function gives."""

from __future__ import annotations

import gc

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

MESH = DeviceMesh("cpu", [0, 1])


def on_mesh(value: torch.Tensor, *placements: dtorch.Placement) -> dtorch.Tensor:
    return dtorch.Tensor(value, device_mesh=MESH, placements=placements or [Replicate()])


def test_replays_are_fresh_tensors_with_the_functions_values() -> None:
    def fn(x: dtorch.Tensor, y: dtorch.Tensor) -> dtorch.Tensor:
        return (x + y) * 2.0 - x

    compiled = dtorch.compile(fn)
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    x, y = on_mesh(a, Shard(0)), on_mesh(b, Shard(0))
    first, second = compiled(x, y), compiled(y, x)
    assert first is not second
    assert torch.equal(first.to_torch(), (a + b) * 2.0 - a)
    assert torch.equal(second.to_torch(), (b + a) * 2.0 - b)
    assert first.placements == (Shard(0),)
    assert (compiled.num_recordings, compiled.num_replays) == (1, 2)


def test_a_replay_is_one_call_on_the_wire() -> None:
    def chain(x: dtorch.Tensor) -> dtorch.Tensor:
        for _ in range(50):
            x = x + x
        return x

    compiled = dtorch.compile(chain)
    x = on_mesh(torch.ones(2, dtype=torch.float64))
    compiled(x)
    before = dtorch.statistics().ops
    out = compiled(x)
    assert torch.equal(out.to_torch(), torch.full((2,), 2.0**50, dtype=torch.float64))
    assert dtorch.statistics().ops == before + 1


def test_captured_tensors_are_used_by_reference_and_written_in_place() -> None:
    weight, total = on_mesh(torch.full((3,), 2.0)), on_mesh(torch.zeros(3))

    def step(x: dtorch.Tensor) -> dtorch.Tensor:
        total.add_(x)
        return x * weight

    compiled = dtorch.compile(step)
    x = on_mesh(torch.ones(3))
    assert compiled(x).tolist() == [2.0] * 3
    weight.mul_(5.0)
    assert compiled(x).tolist() == [10.0] * 3
    assert total.tolist() == [2.0] * 3


def test_what_the_function_leaves_behind_is_kept_up_to_date() -> None:
    kept: dict[str, dtorch.Tensor] = {}

    def fn(x: dtorch.Tensor) -> dtorch.Tensor:
        kept["last"] = x * 3.0
        return x + 1.0

    compiled = dtorch.compile(fn)
    compiled(on_mesh(torch.ones(2)))
    compiled(on_mesh(torch.full((2,), 4.0)))
    assert kept["last"].tolist() == [12.0, 12.0]


def test_captured_tensors_outlive_the_clients_own() -> None:
    def make() -> dtorch.capture.Compiled:
        weight = on_mesh(torch.full((3,), 7.0))
        compiled = dtorch.compile(lambda x: x + weight)
        compiled(on_mesh(torch.zeros(3)))
        return compiled

    compiled = make()
    gc.collect()
    others = [on_mesh(torch.full((3,), float(i))) for i in range(20)]
    assert compiled(on_mesh(torch.zeros(3))).tolist() == [7.0] * 3
    assert others[3].tolist() == [3.0] * 3
    slots = dtorch.statistics().slots
    del compiled, others
    gc.collect()
    dtorch.synchronize()
    assert dtorch.statistics().slots < slots


def test_other_specs_and_other_static_arguments_record_again() -> None:
    compiled = dtorch.compile(lambda x, n: x * n)
    x = on_mesh(torch.ones(2))
    assert compiled(x, 2).tolist() == [2.0, 2.0]
    assert compiled(x, 3).tolist() == [3.0, 3.0]
    assert compiled(on_mesh(torch.ones(5), Shard(0)), 3).placements == (Shard(0),)
    assert compiled.num_recordings == 3


def test_structures_and_inputs_come_back_as_they_are() -> None:
    compiled = dtorch.compile(lambda x: {"same": x, "pair": (x + 1.0, [x + 2.0]), "label": "text"})
    x = on_mesh(torch.zeros(2))
    for _ in range(2):
        out = compiled(x)
        assert out["same"] is x
        assert out["label"] == "text"
        assert out["pair"][0].tolist() == [1.0, 1.0]
        assert out["pair"][1][0].tolist() == [2.0, 2.0]


def test_random_ops_draw_on() -> None:
    compiled = dtorch.compile(lambda: dtorch.rand(3, device_mesh=MESH))
    dtorch.manual_seed(5)
    drawn = [compiled().to_torch() for _ in range(3)]
    torch.manual_seed(5)
    assert all(torch.equal(d, torch.rand(3)) for d in drawn)


def test_constants_made_inside_are_there_at_every_replay() -> None:
    compiled = dtorch.compile(lambda x: x + dtorch.tensor([1.0, 2.0], device_mesh=MESH))
    x = on_mesh(torch.zeros(2))
    assert [compiled(x).tolist() for _ in range(3)] == [[1.0, 2.0]] * 3


def test_a_read_inside_names_its_line_and_leaves_the_session_usable() -> None:
    def fn(x: dtorch.Tensor) -> dtorch.Tensor:
        return x if x.sum().item() > 0 else -x

    x = on_mesh(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"fn cannot be compiled: a value is read .* at .*test_compile\.py:\d+"):
        dtorch.compile(fn)(x)
    assert (x + x).tolist() == [2.0, 2.0]


def test_a_failing_op_inside_poisons_what_depends_on_it() -> None:
    index = on_mesh(torch.tensor([7]))
    compiled = dtorch.compile(lambda x: (x.index_select(0, index), x + 1.0))
    x = on_mesh(torch.ones(3))
    for _ in range(2):
        bad, good = compiled(x)
        assert good.tolist() == [2.0] * 3
        with pytest.raises(IndexError):
            bad.to_torch()


def test_a_module_records_again_after_eval() -> None:
    with MESH:
        layer = dtorch.nn.Sequential(dtorch.nn.Linear(3, 3), dtorch.nn.Dropout(1.0))
    compiled = dtorch.compile(layer)
    x = on_mesh(torch.randn(2, 3))
    assert compiled(x).to_torch().count_nonzero() == 0
    layer.eval()
    assert torch.equal(compiled(x).to_torch(), layer(x).to_torch())
    assert compiled.num_recordings == 2


def test_compiled_functions_nest() -> None:
    inner = dtorch.compile(lambda x: x * 2.0 + 1.0)
    x = on_mesh(torch.ones(2))
    inner(x)
    outer = dtorch.compile(lambda x: inner(inner(x)))
    assert [outer(x).tolist() for _ in range(2)] == [[7.0, 7.0]] * 2


def test_programs_span_meshes() -> None:
    other = DeviceMesh("cpu", [2, 3])

    def fn(x: dtorch.Tensor) -> dtorch.Tensor:
        return (x + 1.0).redistribute(device_mesh=other, placements=[Shard(0)]) * 3.0

    compiled = dtorch.compile(fn)
    x = on_mesh(torch.arange(5.0), Shard(0))
    for _ in range(2):
        out = compiled(x)
        assert out.device_mesh == other
        assert torch.equal(out.to_torch(), (torch.arange(5.0) + 1.0) * 3.0)


def test_warns_of_inputs_that_keep_changing() -> None:
    compiled = dtorch.compile(lambda x, n: x * n)
    x = on_mesh(torch.ones(2))
    for n in range(7):
        compiled(x, n)
    with pytest.warns(RuntimeWarning, match="keep changing"):
        compiled(x, 7)
