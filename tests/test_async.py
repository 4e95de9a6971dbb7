"""Values under asyncio: any task, loop and thread; waiters that give up; a loop that never stands still."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
import uvloop

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.runtime.promise import Promise

WAIT_S = 60.0


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


def _busy(mesh: DeviceMesh, rounds: int = 6, size: int = 700) -> dtorch.Tensor:
    """A value that takes the workers a while."""
    x = dtorch.full((size, size), 1.0 / size, device_mesh=mesh, placements=[Shard(0)])
    w = dtorch.full((size, size), 1.0 / size, device_mesh=mesh, placements=[Replicate()])
    for _ in range(rounds):
        x = x @ w
    return x


async def test_every_way_to_await(mesh: DeviceMesh) -> None:
    x = dtorch.ones(3, device_mesh=mesh, placements=[Shard(0)])
    task = asyncio.create_task(x.value())  # the pieces that need a coroutine
    values = [await x.value(), await x, await x.to_torch_async(), await task]
    values += await asyncio.gather(x.value(), x.value(), (x + 0).value())
    values.append(await asyncio.wait_for(x.value(), WAIT_S))
    for value in values:
        assert torch.equal(value, torch.ones(3))
    assert await x[0:1].item_async() == 1.0 if hasattr(x, "__getitem__") else True
    assert await x.tolist_async() == [1.0, 1.0, 1.0]
    assert [piece.tolist() for piece in await x.to_shards_async()] == [[1.0, 1.0], [1.0]]


async def test_many_tasks_many_values(mesh: DeviceMesh) -> None:
    async def one(i: int) -> float:
        x = dtorch.full((2,), float(i), device_mesh=mesh)
        for _ in range(3):
            x = x + 1
            await asyncio.sleep(0)
        return float((await x)[0])

    assert await asyncio.gather(*(one(i) for i in range(50))) == [i + 3.0 for i in range(50)]


async def test_a_value_asked_for_twice_is_computed_once(mesh: DeviceMesh) -> None:
    x = _busy(mesh)
    await dtorch.synchronize_async()
    before = dtorch.statistics()
    y = x + 1
    first = y.to_torch_async()
    second = y.to_torch_async()
    assert first._promise() is second._promise() or first.is_ready()  # it came before the second was asked for
    one, two = await asyncio.gather(y.value(), y.value())
    assert torch.equal(one, two)
    after = dtorch.statistics()
    assert after.ops - before.ops == 1
    counted = {w: c["calls"] - before.workers[w]["calls"] for w, c in after.workers.items() if w in before.workers}
    assert max(counted.values()) == 1


async def test_a_value_is_that_of_the_moment_it_is_asked_for(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(3, device_mesh=mesh)
    before = x.to_torch_async()
    x.add_(1)
    after = x.to_torch_async()
    assert (await before).tolist() == [0.0, 0.0, 0.0]
    assert (await after).tolist() == [1.0, 1.0, 1.0]


def test_from_several_threads_and_loops(mesh: DeviceMesh) -> None:
    x = _busy(mesh, 2)
    expected = x.to_torch()
    y = x + 0

    def with_loop(new_loop: Any) -> torch.Tensor:
        async def wait() -> torch.Tensor:
            return await asyncio.wait_for(y.value(), WAIT_S)

        loop = new_loop()
        try:
            value: torch.Tensor = loop.run_until_complete(wait())
            return value
        finally:
            loop.close()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        waits = [pool.submit(with_loop, make) for make in (asyncio.new_event_loop, uvloop.new_event_loop) * 2]
        waits += [pool.submit(y.to_torch), pool.submit(y.get, WAIT_S)]
        for waiting in waits:
            assert torch.equal(waiting.result(WAIT_S), expected)


def test_threads_that_record_at_once(mesh: DeviceMesh) -> None:
    start = threading.Barrier(4)

    def work(i: int) -> list[float]:
        start.wait(WAIT_S)
        x = dtorch.full((2,), float(i), device_mesh=mesh, placements=[Shard(0)])
        for _ in range(500):
            x = x + 1
        result: list[float] = x.tolist()
        return result

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[i + 500.0] * 2 for i in range(4)]


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_loops_that_come_and_go(mesh: DeviceMesh, runner: Any) -> None:
    x = dtorch.ones(3, device_mesh=mesh)

    async def main() -> torch.Tensor:
        return await (x + x)

    for _ in range(3):
        assert torch.equal(runner(main()), torch.full((3,), 2.0))

    left: list[asyncio.Future[torch.Tensor]] = []

    async def leaves() -> None:
        left.append(asyncio.ensure_future(_busy(mesh).value()))  # cancelled with the loop
        await asyncio.sleep(0)

    runner(leaves())
    assert torch.equal((x + x).to_torch(), torch.full((3,), 2.0))


async def test_giving_up_drops_the_waiter_and_nothing_else(mesh: DeviceMesh) -> None:
    x = _busy(mesh)
    patient = asyncio.create_task(x.value())
    impatient = asyncio.create_task(x.value())
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(_busy(mesh).value(), 0)
    value = await patient
    assert torch.equal(value, await x)
    assert torch.allclose(value.sum(), torch.tensor(700.0), rtol=1e-3)


async def test_the_loop_goes_on_while_the_workers_do_not(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are stopped until the loop has turned a thousand times: did it stand still, they would be stopped for ever."""
    x = _busy(mesh)
    await x
    thread = dtorch.current_session().thread
    monkeypatch.setattr(thread._pulse, "_states", lambda: dict.fromkeys(thread.pids, "S"))  # stopped, and yet not lost
    for pid in thread.pids.values():
        os.kill(pid, signal.SIGSTOP)

    async def beat() -> None:
        try:
            for _ in range(1000):
                await asyncio.sleep(0)
        finally:
            for pid in thread.pids.values():
                os.kill(pid, signal.SIGCONT)

    y = x + 1
    waiting = asyncio.ensure_future(y.value())
    await asyncio.sleep(0)  # it waits
    await beat()
    assert (await waiting).shape == (700, 700)


def test_blocking_waits(mesh: DeviceMesh) -> None:
    x = _busy(mesh, rounds=30)
    future = x.to_torch_async()
    with pytest.raises(TimeoutError, match="no value within 0"):
        future.get(0)
    assert future.wait(WAIT_S)
    assert future.is_ready()
    assert future.exception() is None
    assert torch.equal(future.get(), x.to_torch())
    assert x.is_ready()
    assert not (x + 1).is_ready()
    assert "ready" in repr(future)


def test_a_tensor_does_not_keep_the_value_it_gave(mesh: DeviceMesh) -> None:
    import weakref

    x = dtorch.ones(200_000, device_mesh=mesh)
    value = x.to_torch()
    gone = weakref.ref(value)
    del value
    assert gone() is None


async def test_await_after_shutdown(mesh: DeviceMesh) -> None:
    x = dtorch.ones(3, device_mesh=mesh)
    dtorch.shutdown()
    with pytest.raises(dtorch.SessionClosedError):
        await x
    with pytest.raises(dtorch.SessionClosedError):
        await asyncio.create_task(x.value())


# ---- the promise alone


async def test_a_promise_drops_waiters_that_gave_up() -> None:
    promise: Promise[int] = Promise()
    for _ in range(3):
        assert not promise.wait(0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(promise), 0.001)
    assert promise._callbacks == []
    promise.set_result(1)
    promise.set_result(2)
    promise.set_exception(ValueError())
    assert await promise == promise.result() == 1


async def test_a_promise_tells_when_its_failure_is_seen() -> None:
    seen: list[str] = []
    promise: Promise[int] = Promise()
    promise.set_exception(ValueError("no"), lambda: seen.append("seen"))
    assert isinstance(promise.peek(), ValueError)
    assert promise.wait()
    assert not seen
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await promise
    assert isinstance(promise.exception(), ValueError)
    assert seen == ["seen"]


def test_one_of_many_settlers_wins() -> None:
    start = threading.Barrier(4)
    for _ in range(50):
        promise: Promise[int] = Promise()
        ran: list[int] = []
        promise.add_callback(lambda promise=promise, ran=ran: ran.append(promise.result()))  # type: ignore[misc]

        def settle(i: int, promise: Promise[int] = promise) -> None:
            start.wait(WAIT_S)
            promise.set_result(i)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(settle, range(4)))
        assert ran == [promise.result()]


def test_waiters_in_many_threads_are_all_woken() -> None:
    promise: Promise[int] = Promise()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(promise.result, WAIT_S) for _ in range(4)]
        waits += [pool.submit(lambda: asyncio.run(_await(promise))) for _ in range(4)]
        promise.set_result(7)
        assert [waiting.result(WAIT_S) for waiting in waits] == [7] * 8


def test_a_callback_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    promise: Promise[int] = Promise()
    ran: list[int] = []
    promise.add_callback(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    promise.add_callback(lambda: ran.append(1))
    promise.set_result(1)
    assert ran == [1]
    assert "a callback of a promise failed" in caplog.text


def _await(promise: Promise[int]) -> Coroutine[Any, Any, int]:
    async def wait() -> int:
        return await promise

    return wait()
