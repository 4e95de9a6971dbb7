"""Time for which this process is held up counts against nobody. A loop's clock that jumps stands for a process that was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtorch.transport.durable import DurableLink
from dtorch.transport.link import memory_pair
from dtorch.transport.patience import Awake, within


@contextlib.contextmanager
def jumps() -> Iterator[list[float]]:
    """Seconds by which the running loop's clock is ahead."""
    loop = asyncio.get_running_loop()
    true, ahead = loop.time, [0.0]
    loop.time = lambda: true() + ahead[0]  # type: ignore[method-assign]
    try:
        yield ahead
    finally:
        del loop.time  # type: ignore[method-assign]


async def hold_up(ahead: list[float]) -> None:
    """This process is held up for long, again and again, and reads nothing meanwhile."""
    for _ in range(5):
        ahead[0] += 1000.0
        for _ in range(5):
            await asyncio.sleep(0)


@given(st.lists(st.floats(0.0, 100.0), max_size=50))
def test_steps_that_come_late_do_not_count(steps: list[float]) -> None:
    clock, now = Awake(1.0, 5.0), 5.0
    for step in steps:
        before, now = clock.time, now + step
        grown = clock.tick(now) - before
        assert grown == pytest.approx(step if step < 1.99 else 0.0 if step > 2.01 else grown)


async def test_an_answer_that_came_while_this_process_was_held_up_is_in_time() -> None:
    loop = asyncio.get_running_loop()
    with jumps() as ahead:
        answer = loop.create_future()
        waiting = loop.create_task(within(answer, 20.0))
        await asyncio.sleep(0)
        await hold_up(ahead)
        answer.set_result(7)
        assert await waiting == 7


async def test_what_does_not_come_is_given_up_and_cancelled() -> None:
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(asyncio.TimeoutError):
        await within(never, 0.02)
    assert never.cancelled()
    with pytest.raises(ZeroDivisionError):
        await within(_fails(), 20.0)
    waiting = asyncio.ensure_future(within(asyncio.Event().wait(), 20.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def _fails() -> None:
    raise ZeroDivisionError


async def test_a_peer_that_dials_again_while_this_process_is_held_up_is_not_given_up() -> None:
    loop = asyncio.get_running_loop()
    near, far = memory_pair()
    broken = asyncio.Event()
    link = DurableLink(near, 20.0, on_break=lambda _: broken.set())
    with jumps() as ahead:
        receiving = loop.create_task(link.receive())
        await far.close()
        await broken.wait()
        await hold_up(ahead)
        assert not link.closed
        again, peer = memory_pair()
        await link.attach(again, 0)
        assert link.connected
        await link.close()
        await receiving
        await peer.close()
