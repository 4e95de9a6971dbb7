"""Sockets are read by the loop, and by a thread for as long as it waits for what comes on them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import dtorch
from dtorch.runtime.ear import HAS_EAR, Ear
from dtorch.runtime.promise import Promise
from dtorch.runtime.shell import ControllerThread, new_loop
from dtorch.session import current_session
from dtorch.transport.wire import WireLink

pytestmark = pytest.mark.skipif(not HAS_EAR, reason="there is no epoll here")


class Loop:
    """An event loop in a thread, with an ear."""

    def __init__(self) -> None:
        self.loop = new_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.ear = self.call(lambda: Ear(self.loop))

    def call(self, what: Callable[[], Any]) -> Any:
        """Do something in the loop's thread."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(what())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.ear.close()


@pytest.fixture
def home() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


class Heard:
    """A source whose bytes are noted with the thread that read them."""

    def __init__(self, home: Loop, all_here: bool = True) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.bytes = b""
        self.threads: list[int] = []
        self.came: Promise[None] = Promise(home.ear)
        self.all_here = all_here
        home.call(lambda: home.ear.add(self, self.near.fileno()))

    def pump(self, fd: int, in_loop: bool) -> bool:
        if not in_loop and not self.all_here:
            return False
        self.bytes += os.read(fd, 100)
        self.threads.append(threading.get_ident())
        self.came.set_result(None)
        return True

    def close(self, home: Loop) -> None:
        home.call(lambda: home.ear.remove(self))
        self.near.close()
        self.far.close()


@pytest.fixture
def source(home: Loop) -> Iterator[Heard]:
    made = Heard(home)
    yield made
    made.close(home)


def test_the_loop_reads_where_nobody_waits(home: Loop, source: Heard) -> None:
    done = threading.Event()
    source.came.add_callback(done.set)
    source.far.send(b"x")
    assert done.wait(30)
    assert source.threads == [home.thread.ident]


def test_a_thread_that_waits_reads_itself(home: Loop, source: Heard) -> None:
    def send_once_it_waits() -> None:
        while home.ear._waits is None:
            pass
        source.far.send(b"x")

    sender = threading.Thread(target=send_once_it_waits)
    sender.start()
    source.came.result(30)
    sender.join()
    assert source.threads == [threading.get_ident()]
    assert home.ear._waits is None


def test_what_the_loop_must_go_on_with_goes_to_the_loop(home: Loop) -> None:
    source = Heard(home, all_here=False)
    source.far.send(b"x")
    source.came.result(30)
    assert source.threads == [home.thread.ident]
    source.close(home)


def test_another_thread_may_settle_what_is_waited_for(home: Loop, source: Heard) -> None:
    other: Promise[int] = Promise(home.ear)

    def settle_once_it_waits() -> None:
        while home.ear._waits is None:
            pass
        other.set_result(7)

    thread = threading.Thread(target=settle_once_it_waits)
    thread.start()
    assert other.result(30) == 7
    thread.join()


def test_two_threads_wait_and_both_are_told(home: Loop) -> None:
    sources = [Heard(home), Heard(home)]
    waiting = [threading.Thread(target=source.came.result, args=(30,)) for source in sources]
    for thread in waiting:
        thread.start()
    for source in sources:
        source.far.send(b"x")
    for thread in waiting:
        thread.join(30)
        assert not thread.is_alive()
    assert [source.bytes for source in sources] == [b"x", b"x"]
    for source in sources:
        source.close(home)


def test_a_wait_ends_in_time(home: Loop, source: Heard) -> None:
    with pytest.raises(TimeoutError):
        source.came.result(0.01)
    home.ear.wait(lambda: False, perf_counter())
    source.far.send(b"x")
    source.came.result(30)


def test_the_loop_reads_on_after_a_wait(home: Loop, source: Heard) -> None:
    with pytest.raises(TimeoutError):
        source.came.result(0.001)
    done = threading.Event()
    source.came.add_callback(done.set)
    source.far.send(b"x")
    assert done.wait(30)
    assert source.threads == [home.thread.ident]


def test_closing_ends_a_wait() -> None:
    home = Loop()
    promise: Promise[None] = Promise(home.ear)
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(promise.wait(30)))
    waiting.start()
    while home.ear._waits is None:
        pass
    home.close()
    promise.set_result(None)
    waiting.join(30)
    assert ended == [True]


def test_an_interrupt_ends_a_wait_and_nothing_else(home: Loop, source: Heard) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt_once_it_waits() -> None:
        while home.ear._waits is None:
            pass
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt_once_it_waits)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            source.came.result()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    source.far.send(b"x")
    source.came.result(30)
    assert source.bytes == b"x"


@pytest.mark.parametrize("reads", [False, True])
def test_an_interrupt_that_another_thread_got_ends_a_wait(home: Loop, reads: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    promise: Promise[None] = Promise(home.ear if reads else None)
    waits = threading.Event()
    promise.add_callback(lambda: None)

    def interrupt() -> None:
        waits.wait(30)
        if reads:
            while home.ear._waits is None:
                pass
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # wakes nobody

    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        waits.set()
        with pytest.raises(KeyboardInterrupt):
            promise.result()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_a_signal_handler_may_wait_while_its_thread_does(home: Loop) -> None:
    sources = [Heard(home), Heard(home)]
    main = threading.main_thread().ident
    assert main is not None
    found: list[int] = []

    def handler(number: int, frame: Any) -> None:
        sources[1].far.send(b"inner")
        sources[1].came.result(30)
        found.extend(sources[1].threads)
        sources[0].far.send(b"outer")

    def signal_once_it_waits() -> None:
        while home.ear._waits is None:
            pass
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=signal_once_it_waits)
    try:
        thread.start()
        sources[0].came.result(60)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert found == [home.thread.ident]
    for source in sources:
        source.close(home)


# ---- sessions


def replicated(value: torch.Tensor, num_devices: int = 1) -> Any:
    mesh = dtorch.init_device_mesh("cpu", (num_devices,))
    return dtorch.Tensor(value, device_mesh=mesh, placements=[dtorch.Replicate()])


def test_a_value_is_read_by_the_thread_that_blocks_for_it() -> None:
    dtorch.init()
    x = replicated(torch.arange(4.0))
    x.to_torch()
    thread = current_session().thread
    assert isinstance(thread, ControllerThread)
    [link] = thread._links.values()
    assert isinstance(link, WireLink)
    hears, readers = link._handle, []
    assert hears is not None

    def noting(frame: Any) -> bool:
        readers.append(threading.get_ident())
        return hears(frame)

    link._handle = noting
    for _ in range(20):
        assert torch.equal((x + 1).to_torch(), torch.arange(4.0) + 1)
    assert threading.get_ident() in readers


@pytest.mark.parametrize("size", [1, 4000, 16_000, 200_000])
def test_values_of_all_sizes(size: int) -> None:
    dtorch.init()
    x = replicated(torch.arange(float(size)))
    for _ in range(5):
        assert torch.equal((x + 1).to_torch(), torch.arange(float(size)) + 1)


def test_many_threads_block_for_values() -> None:
    dtorch.init()
    x = replicated(torch.arange(4.0))
    wrong: list[Any] = []

    def ask(add: int) -> None:
        for i in range(50):
            found = (x + add * i).to_torch()
            if not torch.equal(found, torch.arange(4.0) + add * i):
                wrong.append((add, i, found))

    threads = [threading.Thread(target=ask, args=(add,)) for add in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_blocking_beside_awaiting() -> None:
    dtorch.init()
    x = replicated(torch.arange(4.0))

    async def awaited() -> list[torch.Tensor]:
        return [await (x + i).value() for i in range(50)]

    found: list[list[torch.Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(awaited())))
    thread.start()
    for i in range(50):
        assert torch.equal((x * i).to_torch(), torch.arange(4.0) * i)
    thread.join(60)
    assert all(torch.equal(value, torch.arange(4.0) + i) for i, value in enumerate(found[0]))


class Counting(TorchFunctionMode):
    """A mode of somebody else's that sees each call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[dtorch.DeviceMesh], AbstractContextManager[Any]]] = {
    "mesh": lambda mesh: mesh,
    "function mode": lambda mesh: Counting(),
    "default device": lambda mesh: torch.device("meta"),
    "dispatch mode": lambda mesh: FakeTensorMode(),
    "inference": lambda mesh: torch.inference_mode(),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_of_the_thread_that_blocks_do_not_see_how_a_value_is_put_together(name: str) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).view(4, 2)
    x = dtorch.Tensor(whole, device_mesh=mesh, placements=[dtorch.Shard(1)])  # not one piece behind the other
    x.to_torch()
    for _ in range(5):  # the loop may have read the value before the thread waited
        y = x + 1
        with MODES[name](mesh) as mode:
            value = y.to_torch()
            if isinstance(mode, Counting):
                assert torch.empty not in mode.calls
        assert type(value) is torch.Tensor
        assert not value.is_inference()
        assert torch.equal(value, whole + 1)


def test_errors_come_to_the_thread_that_blocks() -> None:
    dtorch.init()
    x = replicated(torch.tensor([1, 5]))
    table = replicated(torch.arange(3.0))
    for _ in range(5):
        with pytest.raises(IndexError):
            table[x].to_torch()
        assert (x + 1).to_torch().tolist() == [2, 6]


def test_a_worker_killed_while_a_thread_blocks_for_its_value() -> None:
    dtorch.init()
    x = replicated(torch.ones(1400, 1400))
    (x @ x).to_torch()
    session = current_session()
    assert isinstance(session.thread, ControllerThread)
    ear, pids = session.thread.ear, session.thread.pids
    assert ear is not None

    def kill_once_it_waits() -> None:
        while ear._waits is None:
            pass
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_it_waits)
    killer.start()
    y = x
    for _ in range(60):
        y = y @ x
    with pytest.raises(dtorch.WorkerLostError):
        y.to_torch()
    killer.join()


def test_interrupts_at_any_moment_leave_the_session_whole() -> None:
    dtorch.init()
    x = replicated(torch.arange(4.0))
    (x + 1).to_torch()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    go, over = threading.Semaphore(0), threading.Event()

    def interrupt() -> None:
        at = 0
        while True:
            go.acquire()
            if over.is_set():
                return
            at = (at + 7919) % 20_011
            for _ in range(at):  # until some moment of an op and its value
                pass
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    num_interrupts = 0
    try:
        for i in range(150):
            try:
                found = (x + i).to_torch()
                go.release()
                while True:
                    found = (x + i).to_torch()
                    assert torch.equal(found, torch.arange(4.0) + i)
            except KeyboardInterrupt:
                num_interrupts += 1
    finally:
        over.set()
        go.release()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert num_interrupts == 150
    assert torch.equal((x + 500).to_torch(), torch.arange(4.0) + 500)
    dtorch.synchronize()


def test_links_are_read_so_where_they_are_ours() -> None:
    dtorch.init()
    x = replicated(torch.arange(4.0))
    (x + 1).to_torch()
    thread = current_session().thread
    assert isinstance(thread, ControllerThread)
    assert [link._reader for link in thread._links.values() if isinstance(link, WireLink)] == [thread.ear] * len(thread._links)


async def test_a_loop_that_is_woken_late_ends_polling() -> None:
    class Late:
        def wait(self, is_done: Callable[[], bool], until_s: float | None) -> None:
            raise AssertionError("nobody blocks")

        def nudge(self) -> None:
            raise AssertionError("nobody blocks")

        def woken(self, asked_s: float, ran_s: float) -> None:
            told.append((asked_s, ran_s))

    told: list[tuple[float, float]] = []
    promise: Promise[int] = Promise(Late())
    before = perf_counter()
    thread = threading.Thread(target=promise.set_result, args=(3,))
    asyncio.get_running_loop().call_soon(thread.start)
    assert await promise == 3
    thread.join()
    [(asked, ran)] = told
    assert before <= asked <= ran <= perf_counter()
