"""Seeds belong to the task: two that interleave draw what each would draw alone, and alone that is what torch draws."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.runtime.recorder import CaptureError

MESH = DeviceMesh("cpu", [0, 1])


def drawn() -> dtorch.Tensor:
    return dtorch.rand(4, device_mesh=MESH, placements=[Shard(0)])


def torchs(seed: int, num: int) -> list[list[float]]:
    """What plain torch draws."""
    torch.manual_seed(seed)
    return [torch.rand(4).tolist() for _ in range(num)]


class Turns:
    """Lets tasks go on one after the other, round and round."""

    def __init__(self, num: int) -> None:
        self._events = [asyncio.Event() for _ in range(num)]
        self._events[0].set()

    async def __call__(self, me: int) -> None:
        await self._events[me].wait()
        self._events[me].clear()

    def next(self, me: int) -> None:
        self._events[(me + 1) % len(self._events)].set()


async def in_turn(me: int, turns: Turns, seed: int | None, num: int) -> list[list[float]]:
    """Seed, then draw ``num`` times, with everybody else's draws in between."""
    made = []
    for k in range(num):
        await turns(me)
        if k == 0 and seed is not None:
            dtorch.manual_seed(seed)
        made.append(drawn())
        turns.next(me)
    return [await x.tolist_async() for x in made]


async def test_tasks_that_interleave_draw_what_each_would_draw_alone() -> None:
    turns = Turns(3)
    found = await asyncio.gather(*(in_turn(me, turns, 10 + me, 4) for me in range(3)))
    assert found == [torchs(10 + me, 4) for me in range(3)]


async def test_a_task_that_does_not_seed_goes_on_with_its_parents_numbers() -> None:
    async def child() -> list[float]:
        return await drawn().tolist_async()

    async def seeds_itself() -> list[float]:
        dtorch.manual_seed(99)
        return await child()

    dtorch.manual_seed(3)
    first = await drawn().tolist_async()
    second = await asyncio.create_task(child())
    other = await asyncio.create_task(seeds_itself())
    third = await asyncio.to_thread(lambda: drawn().tolist())
    fourth = await drawn().tolist_async()
    assert [first, second, third, fourth] == torchs(3, 4)
    assert [other] == torchs(99, 1)
    dtorch.manual_seed(3)
    assert [await drawn().tolist_async()] == torchs(3, 1)


def test_outside_of_tasks_a_seed_is_for_everybody() -> None:
    dtorch.manual_seed(5)
    found = [drawn().tolist()]
    thread = threading.Thread(target=lambda: found.append(drawn().tolist()))
    thread.start()
    thread.join()

    async def main(seed: int | None) -> list[float]:
        if seed is not None:
            dtorch.manual_seed(seed)
        return await drawn().tolist_async()

    found.append(asyncio.run(main(None)))
    own = asyncio.run(main(8))
    found.append(drawn().tolist())
    assert found == torchs(5, 4)
    assert [own] == torchs(8, 1)


async def test_replays_draw_on_from_the_numbers_of_whoever_calls() -> None:
    compiled = dtorch.compile(lambda x: torch.nn.functional.dropout(x, 0.5, True))
    x = dtorch.ones(8, device_mesh=MESH, placements=[Replicate()])

    async def task(me: int, turns: Turns) -> list[list[float]]:
        made = []
        for k in range(3):
            await turns(me)
            if k == 0:
                dtorch.manual_seed(me)
            made.append(compiled(x))
            turns.next(me)
        return [await y.tolist_async() for y in made]

    turns = Turns(2)
    found = await asyncio.gather(*(task(me, turns) for me in range(2)))
    for me in range(2):
        torch.manual_seed(me)
        assert found[me] == [torch.nn.functional.dropout(torch.ones(8), 0.5, True).tolist() for _ in range(3)]


def test_a_seed_inside_a_compiled_function_is_refused_by_its_line() -> None:
    def seeds() -> dtorch.Tensor:
        dtorch.manual_seed(1)
        return drawn()

    with pytest.raises(CaptureError, match=r"it seeds the generators.*test_seeding\.py:\d+"):
        dtorch.compile(seeds)()
    dtorch.manual_seed(2)
    assert [drawn().tolist()] == torchs(2, 1)


async def test_each_session_has_its_own_and_a_task_may_seed_in_several() -> None:
    dtorch.manual_seed(1)
    async with dtorch.session(num_threads=1):
        dtorch.manual_seed(2)
        inner = [await drawn().tolist_async()]
    assert [await drawn().tolist_async()] == torchs(1, 1)
    assert inner == torchs(2, 1)


async def test_the_numbers_of_a_task_that_is_gone_are_forgotten() -> None:
    async def task(seed: int) -> None:
        dtorch.manual_seed(seed)
        await drawn()

    for seed in range(20):
        await asyncio.create_task(task(seed))
    gc.collect()
    dtorch.manual_seed(0)
    await drawn()
    controller = dtorch.current_session().thread._controller  # type: ignore[union-attr]
    assert len(controller.seeds.alive) <= 4


@pytest.fixture
def apart() -> Iterator[dtorch.session]:
    yield dtorch.init(workers="per-device")
    dtorch.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc")
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_killed_worker_changes_no_tasks_numbers(apart: dtorch.session, all_of_them: bool) -> None:
    session = dtorch.current_session()
    dtorch.manual_seed(50)
    shared = [drawn()]

    def kill() -> None:
        pids = session.thread.pids  # type: ignore[union-attr]
        for pid in list(pids.values())[: None if all_of_them else 1]:
            os.kill(pid, signal.SIGKILL)

    async def task(me: int, turns: Turns) -> list[list[float]]:
        kept = []
        for k in range(6):
            await turns(me)
            if k == 0:
                dtorch.manual_seed(me)
            if (me, k) in ((1, 2), (0, 4)):
                await dtorch.synchronize_async()
                kill()
            kept.append(drawn())
            if me == 0 and k % 2:
                await kept[-1]  # some have run when the worker goes, some have not
            turns.next(me)
        return [await x.tolist_async() for x in kept]

    async def main() -> list[list[list[float]]]:
        turns = Turns(2)
        return await asyncio.gather(*(task(me, turns) for me in range(2)))

    found = asyncio.run(main())
    shared.append(drawn())
    assert found == [torchs(me, 6) for me in range(2)]
    assert [x.tolist() for x in shared] == torchs(50, 2)
    assert dtorch.statistics().lost_workers >= 2
