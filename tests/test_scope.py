"""A session for a block: its own workers, for the task that is in it, and for nobody else."""

from __future__ import annotations

import asyncio

import pytest
import torch

import dtorch

MESH = dtorch.DeviceMesh("cpu", [0, 1])


async def test_two_tasks_have_a_session_each_and_the_default_one_stays() -> None:
    outside = dtorch.current_session()
    both_inside = [asyncio.Event(), asyncio.Event()]
    seen = []

    async def task(number: int) -> float:
        async with dtorch.session(num_threads=1) as session:
            assert dtorch.current_session() is session
            x = dtorch.full((3,), float(number), device_mesh=MESH)
            both_inside[number].set()
            await both_inside[1 - number].wait()
            assert dtorch.current_session() is session
            seen.append(session)
            with pytest.raises(dtorch.MeshError, match="another one"):
                x + theirs
            return float(await (x.sum() + 1).item_async())

    theirs = dtorch.ones(3, device_mesh=MESH)
    assert await asyncio.gather(task(0), task(1)) == [1.0, 4.0]
    assert len({*seen, outside}) == 3
    assert not any(session.is_open for session in seen)
    assert dtorch.current_session() is outside
    assert torch.equal(await (theirs * 2), torch.full((3,), 2.0))


def test_the_end_raises_what_nobody_awaited_and_waits_for_the_rest() -> None:
    with pytest.raises(IndexError, match="out of bounds"), dtorch.session(num_threads=1):
        dtorch.ones(3, device_mesh=MESH)[dtorch.tensor([7], device_mesh=MESH)]
    with pytest.raises(KeyError), dtorch.session(num_threads=1) as session:
        raise KeyError
    assert not session.is_open


async def test_cancelling_the_start_leaves_no_worker() -> None:
    async def enter() -> None:
        async with dtorch.session(num_threads=1):
            raise AssertionError

    task = asyncio.ensure_future(enter())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_options_are_checked_and_a_block_is_entered_once() -> None:
    with pytest.raises(ValueError, match="num_threads=0"):
        dtorch.session(num_threads=0)
    block = dtorch.session(num_threads=1)
    async with block:
        with pytest.raises(RuntimeError, match="entered already"):
            await block.__aenter__()


async def test_counters_and_memory_can_be_awaited() -> None:
    held = dtorch.ones(1000, device_mesh=MESH)
    assert (await dtorch.statistics_async()).ops > 0
    assert [stats.device for stats in await dtorch.memory_stats_async(MESH)] == ["cpu:0", "cpu:1"]
    assert all(stats.allocated >= held.nbytes for stats in await dtorch.memory_stats_async(MESH))
    empty = dtorch.DeviceMesh("cpu", [1, 9])  # no tensor was ever on the second
    found = [(stats.device, stats.allocated > 0) for stats in await dtorch.memory_stats_async(empty)]
    assert found == [("cpu:1", True), ("cpu:9", False)]
