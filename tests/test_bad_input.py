"""Bad input gets a clear error at the line that caused it, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard

HUGE = 1 << 24


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh, and a tensor on it that must still be there after the test."""
    made = DeviceMesh("cpu", [0, 1])
    witness = dtorch.ones((4, 3), device_mesh=made, placements=[Shard(0)])
    yield made
    assert torch.equal(witness.to_torch(), torch.ones(4, 3))
    dtorch.synchronize()


def _out_of_memory(mesh: DeviceMesh) -> dtorch.Tensor:
    return dtorch.ones((HUGE, 1), device_mesh=mesh, placements=[Shard(0)]) + dtorch.ones((1, HUGE), device_mesh=mesh)


def _out_of_range(mesh: DeviceMesh) -> dtorch.Tensor:
    """Fails on values, so that it counts as run even if nobody takes the result."""
    return torch.index_select(dtorch.ones(3, device_mesh=mesh), 0, dtorch.tensor([7], device_mesh=mesh))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 0], r"each device id once, got \[0\] more than once"),
        ([[0, 1], [2]], "nested lists of equal lengths"),
        ([], "at least one device"),
        ([0, -1], "ids of at least 0, got -1"),
        ([0, "1"], "device ids as ints, got '1'"),
        ([0.5], "device ids as ints, got 0.5"),
    ],
)
def test_mesh_ids(ids: list[object], words: str) -> None:
    with pytest.raises(dtorch.MeshError, match=words) as caught:
        DeviceMesh("cpu", ids)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_device_kind() -> None:
    with pytest.raises(dtorch.MeshError, match="device type out of 'cpu', 'cuda', got 'tpu'"):
        DeviceMesh("tpu", [0])


@pytest.mark.parametrize("num", [0, 2, 3])
def test_the_wrong_number_of_placements(mesh: DeviceMesh, num: int) -> None:
    with pytest.raises(dtorch.PlacementError) as caught:
        dtorch.ones((4, 3), device_mesh=mesh, placements=[Shard(0)] * num)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"Expected one placement a mesh axis, 1 in all, got {num};")
    assert second.startswith("Given to placements: ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_shard_dim_out_of_range(mesh: DeviceMesh, dim: int) -> None:
    x = dtorch.ones((4, 3), device_mesh=mesh)
    for make in (
        lambda: dtorch.ones((4, 3), device_mesh=mesh, placements=[Shard(dim)]),
        lambda: dtorch.Tensor(torch.ones(4, 3), device_mesh=mesh, placements=[Shard(dim)]),
        lambda: x.redistribute([Shard(dim)]),
    ):
        with pytest.raises(dtorch.PlacementError) as caught:
            make()
        words = f"Expected a dim from -2 to 1 (the tensor has 2 dims), got Shard(dim={dim});"
        assert str(caught.value).startswith(words)


def test_negative_dims_count_from_the_end(mesh: DeviceMesh) -> None:
    x = dtorch.ones((4, 3), device_mesh=mesh, placements=[Shard(-1)])
    assert list(x.placements) == [Shard(1)]
    assert list(x.redistribute([Shard(-2)]).placements) == [Shard(0)]


def test_different_meshes(mesh: DeviceMesh) -> None:
    x = dtorch.ones((4, 3), device_mesh=mesh)
    y = dtorch.ones((4, 3), device_mesh=DeviceMesh("cpu", [1, 2]))
    with pytest.raises(dtorch.MeshError) as caught:
        x + y
    for words in ('DeviceMesh("cpu", [0, 1])', 'DeviceMesh("cpu", [1, 2])', "redistribute", "torch.add"):
        assert words in str(caught.value)
    assert torch.equal((x + y.redistribute(device_mesh=mesh)).to_torch(), torch.full((4, 3), 2.0))


def test_device_with_device_mesh(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"torch\.ones: give device or device_mesh, not both"):
        dtorch.ones(3, device="cpu", device_mesh=mesh)
    with pytest.raises(ValueError, match="give device or device_mesh, not both"):
        dtorch.tensor([1.0], device="cpu", device_mesh=mesh)


def test_more_cuda_ids_than_exist(mesh: DeviceMesh) -> None:
    have = torch.cuda.device_count()
    for make in (
        lambda: dtorch.ones(3, device_mesh=DeviceMesh("cuda", [0, have + 7])),
        lambda: dtorch.ones(3, device=f"cuda:{have + 7}"),
        lambda: dtorch.Tensor(torch.ones(3), device_mesh=DeviceMesh("cuda", [have + 7])),
        lambda: dtorch.ones(3, device_mesh=mesh).redistribute(device_mesh=DeviceMesh("cuda", [have + 7])),
    ):
        with pytest.raises(dtorch.MeshError) as caught:
            make()
        text = str(caught.value)
        assert f"needs CUDA device {have + 7}, this machine has {have} CUDA device" in text
        assert "dtorch.init(virtual={'cuda': 'cpu'}) or DTORCH_VIRTUAL=cuda=cpu" in text


@pytest.mark.parametrize(
    ("pieces", "placement", "words"),
    [
        ([(2, 3)], Shard(0), r"has 2 devices, 1 pieces were given"),
        ([(2, 3), (3, 3)], Shard(0), r"piece 0 has \[2, 3\]. Pieces are cut as torch.chunk cuts"),
        ([(2, 3), (2, 4)], Shard(0), r"piece 1 has \[2, 4\]"),
        ([(2, 3), (2, 4)], Replicate(), r"piece 1 has \[2, 4\]"),
        ([(2, 3), (2,)], Shard(0), "piece 0 is torch.float32 with 2 dims, piece 1 is torch.float32 with 1 dims"),
        ([(2, 3), (1, 3)], Partial(), r"piece 1 has \[1, 3\]"),
    ],
)
def test_pieces_that_do_not_fit(
    mesh: DeviceMesh, pieces: list[tuple[int, ...]], placement: dtorch.Placement, words: str
) -> None:
    with pytest.raises(ValueError, match="from_shards: .*" + words):
        dtorch.from_shards([torch.ones(shape) for shape in pieces], device_mesh=mesh, placements=[placement])


def test_pieces_of_different_dtypes(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"piece 1 is torch\.int64"):
        dtorch.from_shards([torch.ones(2), torch.ones(2).long()], device_mesh=mesh, placements=[Shard(0)])


def test_illegal_placements_name_the_op_what_is_legal_and_the_fix(mesh: DeviceMesh) -> None:
    x = dtorch.ones((4, 4), device_mesh=mesh, placements=[Shard(0)])
    y = dtorch.ones((4, 4), device_mesh=mesh, placements=[Shard(1)])
    with pytest.raises(dtorch.PlacementError) as caught:
        x + y
    error = caught.value
    text = str(error)
    assert text.startswith(
        "torch.add has no rule for inputs placed as float32[4, 4] on [Shard(dim=0)], float32[4, 4] on [Shard(dim=1)]."
    )
    assert "The nearest legal signature: (Shard(dim=0), Shard(dim=0)) -> Shard(dim=0)\n" in text
    assert "with dtorch.auto_redistribute()" in text
    if sys.version_info >= (3, 11):
        assert re.fullmatch(r"x \+ y\.redistribute\(placements=\[Shard\(dim=0\)\]\)", error.fix)
    else:
        assert re.fullmatch(r"input1\.redistribute\(placements=\[Shard\(dim=0\)\]\)", error.fix)
    repaired = eval(error.fix, {"x": x, "y": y, "input1": y, "Shard": Shard})
    assert torch.equal((repaired if sys.version_info >= (3, 11) else x + repaired).to_torch(), torch.full((4, 4), 2.0))
    with dtorch.auto_redistribute():
        assert torch.equal((x + y).to_torch(), torch.full((4, 4), 2.0))
    assert str(pickle.loads(pickle.dumps(error))) == text


def test_a_shape_error_has_torchs_own_words_at_once(mesh: DeviceMesh) -> None:
    x, y = dtorch.ones((4, 3), device_mesh=mesh), dtorch.ones((5, 3), device_mesh=mesh)
    with pytest.raises(RuntimeError) as theirs:
        torch.ones(4, 3) + torch.ones(5, 3)
    with pytest.raises(RuntimeError) as ours:
        x + y
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.matmul(x, y)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
async def test_an_index_out_of_range_on_the_device(mesh: DeviceMesh, placement: dtorch.Placement) -> None:
    table = dtorch.ones((4, 3), device_mesh=mesh)
    wrong = dtorch.tensor([0, 7], device_mesh=mesh, placements=[placement])
    rows = torch.nn.functional.embedding(wrong, table)  # the line to be named
    after = rows + 1
    with pytest.raises(IndexError, match="index out of range") as caught:
        await rows
    error = caught.value
    assert isinstance(error, dtorch.OpError)
    assert "# the line to be named" in str(error)
    assert f"{__file__}:" in error.location
    assert "embedding" in error.op
    assert error.worker.startswith("worker ")
    assert "int64[2]" in "".join(error.inputs)
    assert any("Traceback on worker" in note for note in getattr(error, "__notes__", [str(error)]))
    with pytest.raises(IndexError, match="the line to be named"):
        await after.value()
    assert torch.equal(await (table + 1), torch.full((4, 3), 2.0))
    assert isinstance(pickle.loads(pickle.dumps(error)), IndexError)


async def test_out_of_memory_leaves_the_other_tensors_alone(mesh: DeviceMesh) -> None:
    x = dtorch.ones((4, 3), device_mesh=mesh)
    huge = _out_of_memory(mesh)
    after = huge + 1
    for victim in (huge, after):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            await victim
        assert isinstance(caught.value, dtorch.OpError)
        assert "in torch.add on worker" in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), torch.OutOfMemoryError)
    assert torch.equal(await (x + x), torch.full((4, 3), 2.0))


def test_a_value_too_large_for_this_process(mesh: DeviceMesh) -> None:
    x = dtorch.ones((1, 1), device_mesh=mesh)
    with pytest.raises(torch.OutOfMemoryError, match="no memory in this process for the value"):
        x.expand(1 << 30, 1 << 30).to_torch()


def test_an_error_that_nobody_awaited_is_reported_once_at_the_next_sync(mesh: DeviceMesh) -> None:
    _out_of_range(mesh)
    with pytest.raises(IndexError):
        dtorch.synchronize()
    dtorch.synchronize()


def test_an_error_that_was_awaited_is_not_reported_again(mesh: DeviceMesh) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        _out_of_memory(mesh).to_torch()
    dtorch.synchronize()


def test_an_error_asked_for_and_never_looked_at_is_reported(mesh: DeviceMesh) -> None:
    asked = _out_of_memory(mesh).to_torch_async()
    assert asked.wait(60)
    with pytest.raises(torch.OutOfMemoryError):
        dtorch.synchronize()
    dtorch.synchronize()
    assert isinstance(asked.exception(), torch.OutOfMemoryError)


async def test_synchronize_async_raises_too(mesh: DeviceMesh) -> None:
    _out_of_range(mesh)
    with pytest.raises(IndexError):
        await dtorch.synchronize_async()
    await dtorch.synchronize_async()


def test_several_unseen_errors_are_counted(mesh: DeviceMesh) -> None:
    for _ in range(3):
        _out_of_range(mesh)
    with pytest.raises(IndexError) as caught:
        dtorch.synchronize()
    notes = getattr(caught.value, "__notes__", [str(caught.value)])
    assert any("2 more calls have failed" in note for note in notes)


def test_at_shutdown_an_unseen_error_is_a_warning_with_its_line() -> None:
    _out_of_range(DeviceMesh("cpu", [0, 1]))
    with pytest.warns(RuntimeWarning, match="an op failed and nobody awaited it: OpError") as caught:
        dtorch.shutdown()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dtorch.shutdown()


def test_sync_mode_raises_at_the_line() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    dtorch.init(sync=True)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            _out_of_memory(mesh)
        assert torch.equal((dtorch.ones(3, device_mesh=mesh) + 1).to_torch(), torch.full((3,), 2.0))
    finally:
        dtorch.shutdown()


def test_a_failed_value_keeps_nobodys_variables_alive(mesh: DeviceMesh) -> None:
    """Raising notes a traceback, which refers to frames; they must not end in a cycle that only gc can free."""
    dtorch.synchronize()
    before = dtorch.statistics().slots
    gc.disable()
    try:

        def fail() -> None:
            local = _out_of_memory(mesh)
            with pytest.raises(torch.OutOfMemoryError):
                local.to_torch()

        def caught() -> None:
            try:
                fail()
            finally:
                pass

        caught()
        local = _out_of_memory(mesh)
        with contextlib.suppress(torch.OutOfMemoryError):
            local.to_torch()
        del local
        after = dtorch.statistics().slots
    finally:
        gc.enable()
    assert after <= before + 3  # pytest.raises itself keeps a cycle with the one tensor and its two inputs


async def test_a_value_awaited_after_shutdown() -> None:
    x = dtorch.ones((4, 3), device_mesh=DeviceMesh("cpu", [0, 1]))
    dtorch.shutdown()
    for _ in range(2):
        with pytest.raises(dtorch.SessionClosedError, match="the session of this tensor was shut down"):
            await x.value()
    with pytest.raises(dtorch.SessionClosedError):
        x.to_torch()
    with pytest.raises(dtorch.SessionClosedError):
        x + x
    with pytest.raises(dtorch.SessionClosedError):
        x.add_(1)
    assert str(x.shape) == "torch.Size([4, 3])"
    assert torch.equal(await dtorch.ones(3), torch.ones(3))


async def test_a_value_that_is_awaited_while_the_runtime_shuts_down() -> None:
    x = dtorch.ones((4, 3), device_mesh=DeviceMesh("cpu", [0, 1]))
    waiting = asyncio.ensure_future(x.value())
    await asyncio.sleep(0)  # lets it ask
    dtorch.shutdown()
    with contextlib.suppress(dtorch.SessionClosedError):  # as good: shutdown came first
        assert torch.equal(await waiting, torch.ones(4, 3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.redistribute_like(torch.ones(2)), "expected a tensor on a mesh, got Tensor"),
        (lambda x: x.redistribute_by_dict({"dp": Replicate()}), "placements_dict={axis name: placement}, got dict and dict"),
        (lambda x: x.redistribute_by_dict(None, [Replicate()]), "got NoneType and list"),
        (lambda x: dtorch.memory_stats("cpu"), "memory_stats: expected a DeviceMesh, got str"),
        (lambda x: dtorch.ones(2, device_mesh="cpu"), "device_mesh must be a DeviceMesh, not str"),
    ],
)
def test_something_else_where_a_mesh_or_tensor_belongs(mesh: DeviceMesh, call: Any, words: str) -> None:
    x = dtorch.ones(4, 3, device_mesh=mesh)
    with pytest.raises(TypeError, match=re.escape(words)):
        call(x)


def test_one_placement_where_a_list_belongs(mesh: DeviceMesh) -> None:
    for make in (dtorch.ones, dtorch.rand):
        with pytest.raises(dtorch.PlacementError, match=r"write placements=\[\.\.\.\]"):
            make(2, device_mesh=mesh, placements=Shard(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": "many"}, "workers must be 'shared' or 'per-device', not 'many'"),
        ({"virtual": {"cuda": "tpu"}}, "'cpu', 'cuda' or one GPU such as 'cuda:0' can stand for a device kind"),
        ({"num_threads": 0}, "must be at least 1"),
        ({"start_timeout_s": 0}, "above 0"),
        ({"listen": "localhost:http"}, "listen is 'host' or 'host:port', not 'localhost:http'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dtorch.init(**options)  # type: ignore[arg-type]


def test_two_sessions_do_not_mix() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    old = dtorch.ones(3, device_mesh=mesh)
    dtorch.init()
    new = dtorch.ones(3, device_mesh=mesh)
    with pytest.raises((dtorch.MeshError, dtorch.SessionClosedError)):
        new + old
    assert torch.equal(new.to_torch(), torch.ones(3))


def test_out_is_never_a_plain_tensor(mesh: DeviceMesh) -> None:
    """Nor is it taken to the mesh like other plain tensors: what is written there would be lost."""
    x, plain = dtorch.ones((2, 3), device_mesh=mesh), torch.zeros(2, 3)
    for call in (
        lambda: torch.add(x, x, out=plain),
        lambda: torch.add(x, torch.ones(2, 3), out=plain),
        lambda: torch.add(input=x, other=torch.ones(2, 3), out=plain),
    ):
        with pytest.raises(TypeError, match="argument 'out' must be a dtorch"):
            call()
    assert not plain.any()
