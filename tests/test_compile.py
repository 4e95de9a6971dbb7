"""dtorch.compile: what is recorded once and replayed gives what the function gives."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.face import faced

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


def test_state_that_is_made_at_the_first_call_is_made_once() -> None:
    cache: dict[str, dtorch.Tensor] = {}

    def step(x: dtorch.Tensor) -> dtorch.Tensor:
        if "sum" not in cache:
            cache["sum"] = dtorch.zeros_like(x)
        cache["sum"].add_(x)
        return cache["sum"] * 1.0

    compiled = dtorch.compile(step)
    x = on_mesh(torch.ones(2))
    assert [compiled(x).tolist() for _ in range(4)] == [[float(n)] * 2 for n in range(1, 5)]
    assert (compiled.num_recordings, compiled.num_replays) == (2, 4)


def test_state_that_is_replaced_in_each_call_is_not_replayed() -> None:
    state = [on_mesh(torch.zeros(2))]

    def step(x: dtorch.Tensor) -> dtorch.Tensor:
        state[0] = state[0] + x
        return state[0] * 1.0

    compiled = dtorch.compile(step)
    x = on_mesh(torch.ones(2))
    with pytest.warns(RuntimeWarning, match="step reads tensors that the call before has put in place of others"):
        found = [compiled(x).tolist() for _ in range(6)]
    assert found == [[float(n)] * 2 for n in range(1, 7)]


class Accumulator:
    def __init__(self) -> None:
        self.sum = on_mesh(torch.zeros(2))
        self.scale = 1.0

    def step(self, x: dtorch.Tensor) -> dtorch.Tensor:
        return self.add(x) * self.scale

    def add(self, x: dtorch.Tensor) -> dtorch.Tensor:
        return self.sum + x


SHIFT = 1.0


def shifted(x: dtorch.Tensor) -> dtorch.Tensor:
    return x + SHIFT


def test_variables_that_hold_something_else_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = on_mesh(torch.ones(2))
    weight, scale = on_mesh(torch.full((2,), 2.0)), 1.0
    closed = dtorch.compile(lambda x: shifted(x) * weight * scale)
    assert closed(x).tolist() == [4.0, 4.0]
    weight = on_mesh(torch.full((2,), 3.0))
    assert closed(x).tolist() == [6.0, 6.0]
    scale = 2.0
    assert closed(x).tolist() == [12.0, 12.0]
    monkeypatch.setitem(globals(), "SHIFT", 2.0)
    assert closed(x).tolist() == [18.0, 18.0]
    assert closed(x).tolist() == [18.0, 18.0]
    assert closed.num_recordings == 4

    own = Accumulator()
    step = dtorch.compile(own.step)
    assert step(x).tolist() == [1.0, 1.0]
    own.sum = on_mesh(torch.full((2,), 4.0))
    assert step(x).tolist() == [5.0, 5.0]
    own.scale = 0.5
    assert step(x).tolist() == [2.5, 2.5]
    assert (step(x).tolist(), step.num_recordings) == ([2.5, 2.5], 3)


def test_a_variable_that_keeps_changing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = dtorch.compile(shifted)
    x = on_mesh(torch.ones(2))
    for number in range(1, 8):
        monkeypatch.setitem(globals(), "SHIFT", float(number))
        assert compiled(x).tolist() == [1.0 + number] * 2
    monkeypatch.setitem(globals(), "SHIFT", 8.0)
    with pytest.warns(RuntimeWarning, match=r"variable SHIFT: 7\.0 -> 8\.0"):
        compiled(x)


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
    with pytest.warns(RuntimeWarning, match="keep changing, lately argument n: 6 -> 7. Numbers"):
        compiled(x, 7)
    compiled(x, 8)  # not said again at once


def test_dicts_faces_and_structures_go_in_and_come_out_as_they_are() -> None:
    def fn(batch: dict[str, Any], scale: float = 2.0) -> dict[str, Any]:
        return {"sum": batch["a"] + batch["b"][0], "same": batch["a"], "facts": (scale, [batch["b"][0] * scale])}

    compiled = dtorch.compile(fn)
    for seed in (1.0, 2.0):
        a, b = on_mesh(torch.full((2,), seed)), faced(on_mesh(torch.ones(2)))
        found = compiled({"a": a, "b": [b]}, scale=3.0)
        assert found["same"] is a
        assert type(found["sum"]) is dtorch.TorchTensor
        assert found["sum"].tolist() == [seed + 1.0] * 2
        assert found["facts"][0] == 3.0
        assert found["facts"][1][0].tolist() == [3.0] * 2
    assert (compiled.num_recordings, compiled.num_replays) == (1, 2)


def test_what_a_program_cannot_take_is_named() -> None:
    compiled = dtorch.compile(lambda x, extras: x)
    x = on_mesh(torch.ones(2))
    with pytest.raises(TypeError, match=r"argument extras\[1\] is a plain torch.Tensor"):
        compiled(x, [1, torch.ones(2)])
    with pytest.raises(TypeError, match=r"argument extras\['k'\] is a object"):
        compiled(x, {"k": object()})
    with pytest.raises(TypeError, match="a function or a module, not a int"):
        dtorch.compile(3)

    class Holder:
        def __init__(self, inside: dtorch.Tensor) -> None:
            self.inside = inside

    with pytest.raises(dtorch.CaptureError, match="returns a Holder with tensors inside"):
        dtorch.compile(lambda x: Holder(x + 1.0))(x)
    assert (x + x).tolist() == [2.0, 2.0]


def test_modules_that_a_function_closes_over_record_again_after_eval() -> None:
    with MESH:
        dropout = dtorch.nn.Dropout(1.0)

    @dtorch.compile
    def fn(x: dtorch.Tensor) -> dtorch.Tensor:
        return dropout(x)

    x = on_mesh(torch.ones(3))
    assert fn(x).tolist() == [0.0] * 3
    dropout.eval()
    assert fn(x).tolist() == [1.0] * 3
    assert dtorch.compile(dropout.forward)(x).tolist() == [1.0] * 3


def test_a_distributed_module_takes_plain_tensors_and_uses_their_values() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    inputs = [torch.randn(3, 4) for _ in range(2)]
    expected = [plain(x).detach() for x in inputs]
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    compiled = dtorch.compile(dtorch.distribute(plain, mesh, {"0": "colwise", "2": "rowwise"}))
    for x, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(compiled(x).to_torch(), wanted)
    assert (compiled.num_recordings, compiled.num_replays) == (1, 2)


def test_coroutine_functions_replay_unless_they_wait() -> None:
    async def fn(x: dtorch.Tensor) -> dtorch.Tensor:
        return x + 1.0

    async def waits(x: dtorch.Tensor) -> dtorch.Tensor:
        return x + float(await x.sum().item_async())

    async def run() -> None:
        x = on_mesh(torch.ones(2))
        compiled = dtorch.compile(fn)
        for _ in range(2):
            out = await compiled(x)
            assert (await out.value()).tolist() == [2.0] * 2
        with pytest.raises(dtorch.CaptureError, match=r"waits cannot be compiled: .* value"):
            await dtorch.compile(waits)(x)

    asyncio.run(run())


def test_a_replay_that_writes_makes_copies_of_views_stale() -> None:
    base = on_mesh(torch.zeros(4), Shard(0))
    compiled = dtorch.compile(lambda x: base.add_(x))
    x = on_mesh(torch.ones(4), Shard(0))
    compiled(x)
    part = base[1:3]
    assert part.tolist() == [1.0, 1.0]
    compiled(x)
    assert part.tolist() == [2.0, 2.0]


def test_a_view_that_a_replay_returns_is_a_tensor_of_its_own() -> None:
    compiled = dtorch.compile(lambda x: x[1:3])
    x = on_mesh(torch.arange(4.0), Shard(0))
    outs = [compiled(x) for _ in range(2)]
    x.zero_()
    for out in outs:
        assert out.tolist() == [1.0, 2.0]
        assert (out + 1.0).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_view_shows_what_was_written_after_it_was_made(placement: dtorch.Placement) -> None:
    def fn(x: dtorch.Tensor) -> dtorch.Tensor:
        view = x[1:3]
        x.add_(1.0)
        return view

    compiled = dtorch.compile(fn)
    x = on_mesh(torch.zeros(4), placement)
    assert [compiled(x).tolist() for _ in range(3)] == [[float(n)] * 2 for n in range(1, 4)]


def test_recordings_are_counted_and_bounded() -> None:
    before = dtorch.statistics().recordings
    compiled = dtorch.compile(lambda x, n: x * n)
    x = on_mesh(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for n in range(70):
            compiled(x, n)
    assert dtorch.statistics().recordings == before + 70
    assert "64 programs" in repr(compiled)


def test_running_statistics_that_a_replay_updates_are_fetched_anew() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    own_mean, own_var = on_mesh(mean), on_mesh(var)

    @dtorch.compile
    def step(x: Any) -> Any:
        return torch.nn.functional.batch_norm(x, own_mean, own_var, training=True)

    for number in range(3):
        x = torch.arange(12.0).view(4, 3) * (number + 1)
        torch.nn.functional.batch_norm(x, mean, var, training=True)
        step(on_mesh(x))
        torch.testing.assert_close(own_mean.to_torch(), mean)
    assert step.num_recordings == 1
