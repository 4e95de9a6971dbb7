"""Values in the order in which they arrive, and the warning to whoever blocks a running loop."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch.future import FetchFuture
from dtorch.runtime.promise import Promise

WAIT_S = 60.0


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


def pending(count: int) -> tuple[list[Promise[torch.Tensor]], list[FetchFuture]]:
    promises: list[Promise[torch.Tensor]] = [Promise() for _ in range(count)]
    return promises, [FetchFuture(promise) for promise in promises]


async def test_futures_come_in_the_order_in_which_they_settle() -> None:
    promises, futures = pending(4)
    promises[2].set_result(torch.tensor(2))
    completed = dtorch.as_completed(futures)
    assert await anext(completed) is futures[2]
    promises[3].set_exception(ValueError("no"))
    promises[0].set_result(torch.tensor(0))
    assert await anext(completed) is futures[3]
    assert await anext(completed) is futures[0]
    with pytest.raises(ValueError, match="no"):
        await futures[3]
    last = asyncio.ensure_future(anext(completed))
    await asyncio.sleep(0)
    assert not last.done()
    promises[1].set_result(torch.tensor(1))
    assert await last is futures[1]
    assert [future async for future in completed] == []


def test_a_plain_loop_waits() -> None:
    promises, futures = pending(3)
    completed = dtorch.as_completed(futures)

    def settle() -> None:
        for i in (1, 2, 0):
            promises[i].set_result(torch.tensor(i))

    settler = threading.Thread(target=settle)
    settler.start()
    assert [future.to_torch().item() for future in completed] == [1, 2, 0]
    settler.join(WAIT_S)
    assert list(dtorch.as_completed([])) == []


async def test_tensors_are_asked_for_once(mesh: DeviceMesh) -> None:
    xs = [dtorch.full((3,), float(i), device_mesh=mesh, placements=[Shard(0)]) for i in range(20)]
    names = {x: i for i, x in enumerate(xs)}
    found: dict[int, float] = {}
    async for done in dtorch.as_completed([*xs, xs[0]]):
        assert done.is_ready()
        found[names[done.tensor]] = (await done)[0].item()
    assert found == {i: float(i) for i in range(20)}


def test_tensors_in_a_plain_loop(mesh: DeviceMesh) -> None:
    xs = [dtorch.full((2,), float(i), device_mesh=mesh) for i in range(5)]
    assert sorted(done.to_torch()[0].item() for done in dtorch.as_completed(x + 1 for x in xs)) == [1, 2, 3, 4, 5]


async def test_a_failed_op_is_ready_and_raises_when_awaited(mesh: DeviceMesh) -> None:
    x = dtorch.arange(3, device_mesh=mesh)
    bad = x[dtorch.tensor([7], device_mesh=mesh)]
    outcomes: list[Any] = []
    async for done in dtorch.as_completed([x, bad]):
        try:
            outcomes.append((await done).tolist())
        except IndexError as error:
            outcomes.append(type(error))
    assert [0, 1, 2] in outcomes
    assert any(isinstance(o, type) for o in outcomes)


async def test_leaving_early_drops_the_waiter() -> None:
    promises, futures = pending(2)
    completed = dtorch.as_completed(futures)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(completed), 0.001)
    promises[1].set_result(torch.tensor(1))
    async for done in completed:
        assert done is futures[1]
        break
    promises[0].set_result(torch.tensor(0))
    assert [done async for done in completed] == [futures[0]]


def test_only_futures_are_taken(mesh: DeviceMesh) -> None:
    coroutine = dtorch.ones(2, device_mesh=mesh).value()
    with pytest.raises(TypeError, match="give the tensor x"):
        dtorch.as_completed([coroutine])
    coroutine.close()


# ---- blocking a running loop

READS: list[tuple[Callable[[dtorch.Tensor], Any], str]] = [
    (lambda x: x.item(), "await x.item_async()"),
    (lambda x: x.to_torch(), "await x.value()"),
    (lambda x: x.tolist(), "await x.tolist_async()"),
    (lambda x: x.numpy(), "(await x).numpy()"),
    (lambda x: np.asarray(x), "(await x).numpy()"),
    (lambda x: repr(x), "print(await x)"),
    (lambda x: f"{x}", "f'{await x}'"),
    (lambda x: bool(x), "if await x.item_async()"),
    (lambda x: float(x), "float(await x.item_async())"),
    (lambda x: int(x), "int(await x.item_async())"),
    (lambda x: x.get(WAIT_S), "asyncio.wait_for"),
    (lambda x: x.wait(WAIT_S), "asyncio.wait_for"),
    (lambda x: x.to_shards(), "await x.to_shards_async()"),
    (lambda x: torch.equal(x, x), "torch.equal(await x, await y)"),  # type: ignore[arg-type]
    (lambda x: x.nonzero(), "await the value before"),
    (lambda x: dtorch.synchronize(), "await dtorch.synchronize_async()"),
    (lambda x: dtorch.TorchTensor(x).item(), "await x.item_async()"),
]


@pytest.mark.parametrize(("read", "form"), READS)
async def test_a_blocking_read_is_named_with_its_line(
    read: Callable[[dtorch.Tensor], Any], form: str, mesh: DeviceMesh
) -> None:
    x = dtorch.ones(1, device_mesh=mesh)
    with pytest.warns(dtorch.BlockingWarning) as caught:
        read(x)
    assert len(caught) == 1
    text, line = str(caught[0].message), inspect.getsourcelines(read)[1]
    assert form in text
    assert f"{__file__}:{line}" in text
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


async def test_a_line_is_named_once(mesh: DeviceMesh) -> None:
    x = dtorch.ones(1, device_mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x.item()
    assert len(caught) == 1
    assert "x.item()" in str(caught[0].message).partition(__file__)[2]


async def test_what_does_not_block_does_not_warn(mesh: DeviceMesh) -> None:
    x = dtorch.ones(1, device_mesh=mesh)
    future = x.to_torch_async()
    await future
    assert future.to_torch().item() == future.get().item() == await x.item_async() == 1.0
    assert await asyncio.to_thread(x.item) == 1.0
    await dtorch.synchronize_async()


async def test_showing_a_tensor_in_a_notebook_is_no_offence(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = dtorch.ones(1, device_mesh=mesh)
    kernel = types.ModuleType("ipykernel.kernelapp")
    kernel.IPKernelApp = types.SimpleNamespace(initialized=lambda: True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", kernel)
    assert "shape=(1,)" in repr(x)
    assert "shape=(1,)" in f"{x}"
    with pytest.warns(dtorch.BlockingWarning):
        x.item()


def test_without_a_loop_nothing_is_said(mesh: DeviceMesh) -> None:
    assert dtorch.ones(1, device_mesh=mesh).item() == 1.0
