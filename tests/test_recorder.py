"""The client's side of the program order, with a list in place of the controller."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dtorch.runtime.outgoing import Outgoing
from dtorch.runtime.plan import decode_body
from dtorch.runtime.positions import locate
from dtorch.runtime.recorder import FIRST_BATCH, LARGEST_BATCH, Recorder
from dtorch.runtime.signature import ONE, Signature
from dtorch.runtime.slots import SlotPool
from dtorch.transport.errors import SessionClosedError, WorkerLostError
from dtorch.transport.messages import Blob, Definition, Fetch, Layout, MeshInfo

WAIT_S = 60.0


class Outlet:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.batches: list[Outgoing] = []
        self.num_asked = 0
        self.num_waits = 0

    def submit(self, batch: Outgoing) -> None:
        self.batches.append(batch)

    def request_flush(self, delay_s: float) -> None:
        self.num_asked += 1

    def wait_for_room(self) -> None:
        self.num_waits += 1

    @property
    def calls(self) -> list[list[Any]]:
        return [call for batch in self.batches for call in decode_body(batch.body)[0]]


class Client:
    """A recorder, one mesh, and tensors that are their slots."""

    def __init__(self) -> None:
        self.outlet = Outlet()
        self.recorder = Recorder(self.outlet)
        self.dead = self.recorder.add_mesh(MeshInfo(1, "cpu", (1,), (0,)))
        self.sig = self.define()

    def define(self) -> Signature:
        layout = Layout(1, (2,), "float32", (-1,))
        sig = Signature()
        recorder = self.recorder
        sig.id = recorder.define(
            lambda number: Definition(number, "torch.neg", "local", [["t", 0]], {}, (layout,), (layout,))
        )
        sig.take, sig.put, sig.recorder, sig.shape = recorder.take, recorder.put, recorder, ONE
        return sig

    def call(self, *ins: int, sig: Signature | None = None) -> int:
        sig = sig or self.sig
        slot = self.recorder.slot()
        sig.put(((sig.id, slot, *ins), None, 0))
        return slot

    def die(self, slot: int) -> None:
        if not self.dead:
            self.recorder.wake()
        self.dead.append(slot)


@pytest.fixture
def client() -> Client:
    return Client()


def test_calls_arrive_in_order_with_their_slots(client: Client) -> None:
    a = client.call()
    b = client.call(a)
    client.recorder.flush()
    assert client.outlet.calls == [[1, a], [1, b, a]]
    assert (a, b) == (0, 1)
    (batch,) = client.outlet.batches
    assert (batch.seq, batch.signatures) == (1, {1})
    client.recorder.flush()
    assert len(client.outlet.batches) == 1  # nothing to say, nothing sent


def test_definitions_and_meshes_travel_before_their_first_use(client: Client) -> None:
    client.call()
    client.recorder.flush()
    other = client.define()
    client.recorder.add_mesh(MeshInfo(2, "cpu", (1,), (1,)))
    client.call(sig=other)
    client.recorder.flush()
    first, second = client.outlet.batches
    assert ([d.sig for d in first.definitions], [m.mesh for m in first.meshes]) == ([1], [1])
    assert ([d.sig for d in second.definitions], [m.mesh for m in second.meshes]) == ([2], [2])


def test_a_definition_is_known_whichever_batch_is_cut_first(client: Client) -> None:
    known: set[int] = set()
    for _ in range(FIRST_BATCH + 5):
        client.call(sig=client.define())
    client.recorder.flush()
    for batch in client.outlet.batches:
        known |= {d.sig for d in batch.definitions}
        assert batch.signatures <= known


def test_dead_slots_are_announced_in_order_and_used_again(client: Client) -> None:
    a, b, c = (client.call() for _ in range(3))
    client.recorder.flush()
    client.die(c)
    client.die(a)
    assert client.recorder.slot() not in (a, c)  # the workers have not heard of it
    client.recorder.flush()
    batch = client.outlet.batches[-1]
    assert decode_body(batch.body)[1] == [(1, [a, c])]
    assert batch.freed_meshes == (1,)
    assert client.call() == a
    assert client.call() == c
    assert client.call() != b


def test_a_death_asks_for_a_flush_without_an_op(client: Client) -> None:
    slot = client.call()
    client.recorder.flush()
    client.recorder.tick()
    before = client.outlet.num_asked
    client.die(slot)
    assert client.outlet.num_asked == before + 1
    client.recorder.tick()
    assert decode_body(client.outlet.batches[-1].body) == ([], [(1, [slot])])
    assert client.recorder.num_slots == 0


def test_a_loop_gives_the_same_bytes_every_step(client: Client) -> None:
    x = client.call()
    bodies = []
    for _ in range(6):
        for _ in range(3):
            y = client.call(x)
            client.die(x)
            x = y
        client.recorder.flush()
        bodies.append(client.outlet.batches[-1].body)
    assert len(set(bodies[2:])) <= 2  # a loop that carries its state may alternate
    assert client.recorder.num_slots <= 4


def test_a_step_whose_tensors_all_die_gives_one_body(client: Client) -> None:
    x = client.call()
    client.recorder.flush()
    bodies = set()
    for _ in range(5):
        y = client.call(x)
        z = client.call(y)
        client.die(y)
        client.die(z)
        client.recorder.flush()
        bodies.add(client.outlet.batches[-1].body)
    assert len(bodies) == 1


def test_slots_of_a_long_run_stay_few(client: Client) -> None:
    x = client.call()
    for _ in range(10 * LARGEST_BATCH):
        y = client.call(x)
        client.die(x)
        x = y
    client.recorder.flush()
    assert max(slot for call in client.outlet.calls for slot in call[1:]) <= 4 * LARGEST_BATCH


def test_batches_grow_from_small_to_large_and_wait_for_room(client: Client) -> None:
    for _ in range(4 * LARGEST_BATCH):
        client.call()
    sizes = [len(decode_body(batch.body)[0]) for batch in client.outlet.batches]
    assert sizes[0] == FIRST_BATCH
    assert sizes == sorted(sizes)
    assert max(sizes) == LARGEST_BATCH
    assert client.outlet.num_waits == len(sizes)


def test_a_tick_sends_at_once_where_workers_have_nothing_to_do(client: Client) -> None:
    client.call()
    client.recorder.tick()
    assert len(client.outlet.calls) == 1
    client.recorder.finished(1)
    client.call()
    client.recorder.tick()
    assert len(client.outlet.calls) == 2


def test_slots_that_died_wait_for_the_next_batch_or_for_a_pause(client: Client) -> None:
    first, second = client.call(), client.call()
    client.recorder.flush()
    client.recorder.finished(1)
    client.recorder.tick()
    client.die(first)
    client.call()
    client.recorder.flush()
    client.recorder.finished(2)
    client.die(second)
    client.recorder.tick()  # a batch has left since the last one
    assert len(client.outlet.batches) == 2
    client.recorder.tick()
    assert [decode_body(batch.body)[1] for batch in client.outlet.batches] == [[], [(1, [first])], [(1, [second])]]


def test_a_tick_in_the_middle_of_recording_waits_for_a_pause_while_workers_are_busy(client: Client) -> None:
    client.call()
    client.recorder.flush()
    client.call()
    client.recorder.tick()
    assert len(client.outlet.batches) == 1
    client.call()
    client.recorder.tick()
    assert len(client.outlet.batches) == 1
    client.recorder.tick()  # nothing came in between
    assert len(client.outlet.calls) == 3


def first_after_a_pause(client: Client) -> int:
    """As the paths that put a call have it when no slot was at hand."""
    slot = client.call()
    if client.recorder.expects_after_put:
        client.recorder.after_put()
    return slot


def test_the_first_call_after_a_pause_leaves_at_once_and_the_rest_ends_where_it_would_have(client: Client) -> None:
    first_after_a_pause(client)
    assert len(client.outlet.calls) == 1
    assert client.outlet.num_asked == 0  # no timer is needed for it
    for _ in range(FIRST_BATCH):
        client.call()
    assert [len(decode_body(batch.body)[0]) for batch in client.outlet.batches] == [1, FIRST_BATCH - 1]


def test_the_first_call_waits_for_more_while_workers_are_busy(client: Client) -> None:
    first_after_a_pause(client)
    client.recorder.flush()
    first_after_a_pause(client)
    assert len(client.outlet.calls) == 1
    client.recorder.finished(1)
    client.recorder.flush()
    client.recorder.finished(2)
    first_after_a_pause(client)
    assert len(client.outlet.calls) == 3


def test_a_loop_whose_first_calls_leave_at_once_meets_few_bodies(client: Client) -> None:
    for _ in range(20):
        slots = [first_after_a_pause(client), *(client.call() for _ in range(5))]
        client.recorder.flush()
        for slot in slots:
            client.die(slot)
        for batch in client.outlet.batches[-2:]:
            client.recorder.finished(batch.seq)
    bodies = [batch.body for batch in client.outlet.batches]
    assert len(bodies) == 40
    assert bodies[4:] == bodies[4:8] * 9  # what died in a step is announced with the next one's first call


def ask(client: Client, slot: int) -> None:
    client.recorder.fetch(Fetch(7, slot, 1, (0,)), now=True)


def finish_all(client: Client) -> None:
    for batch in client.outlet.batches:
        client.recorder.finished(batch.seq)


def sizes(client: Client) -> list[tuple[int, int]]:
    return [(len(decode_body(batch.body)[0]), len(batch.fetches)) for batch in client.outlet.batches]


def test_a_call_whose_value_is_asked_for_at_once_is_one_batch_from_the_second_time_on(client: Client) -> None:
    for _ in range(4):
        ask(client, first_after_a_pause(client))
        finish_all(client)
    assert sizes(client) == [(1, 0), (0, 1), (1, 1), (1, 1), (1, 1)]


def test_a_first_call_that_waits_for_the_question_in_vain_is_sent_by_the_timer_and_the_next_one_leaves_at_once(
    client: Client,
) -> None:
    ask(client, first_after_a_pause(client))
    finish_all(client)
    asked = client.outlet.num_asked
    first_after_a_pause(client)
    assert sizes(client) == [(1, 0), (0, 1)]
    assert client.outlet.num_asked == asked + 1
    client.recorder.tick()
    client.recorder.flush()
    finish_all(client)
    assert sizes(client)[2:] == [(1, 0)]
    first_after_a_pause(client)
    assert sizes(client)[3:] == [(1, 0)]


def test_where_more_is_recorded_before_the_value_is_asked_for_the_first_call_leaves_at_once(client: Client) -> None:
    for _ in range(2):
        first_after_a_pause(client)
        ask(client, client.call())
        finish_all(client)
    assert sizes(client) == [(1, 0), (1, 1)] * 2
    ask(client, first_after_a_pause(client))
    finish_all(client)
    first_after_a_pause(client)
    ask(client, client.call())  # expected to be asked for at once, and was not
    finish_all(client)
    assert sizes(client)[4:] == [(1, 0), (0, 1), (2, 1)]
    first_after_a_pause(client)
    assert sizes(client)[7:] == [(1, 0)]


async def test_a_running_loop_flushes_at_its_next_tick(client: Client) -> None:
    client.call()
    client.call()
    assert client.outlet.batches == []
    ticked = asyncio.Event()
    asyncio.get_running_loop().call_soon(ticked.set)
    await ticked.wait()
    assert len(client.outlet.calls) == 2


def test_a_fetch_follows_everything_recorded_before_it(client: Client) -> None:
    slot = client.call()
    client.recorder.fetch(Fetch(7, slot, 1, (0,)), now=True)
    (batch,) = client.outlet.batches
    assert batch.fetches == (Fetch(7, slot, 1, (0,)),)
    assert client.outlet.calls == [[1, slot]]


def test_uploads_lie_in_the_batch_of_their_call(client: Client) -> None:
    client.recorder.upload(1, [Blob(b"a")], (None, 0))
    client.recorder.upload(1, [Blob(b"b")], (None, 0))
    client.recorder.flush()
    client.recorder.upload(1, [Blob(b"c")], (None, 0))
    client.recorder.flush()
    first, second = client.outlet.batches
    assert (first.uploads, second.uploads) == ((Blob(b"a"), Blob(b"b")), (Blob(b"c"),))
    assert [call[-1] for call in client.outlet.calls] == [0, 1, 0]


def test_the_source_of_a_call_is_kept_until_its_batch_is_finished(client: Client) -> None:
    def here() -> None: ...

    client.recorder.slot()
    client.recorder.put(((1, 0), here.__code__, 0))
    client.recorder.flush()
    assert client.recorder.num_in_flight == 1
    assert client.recorder.source(1, 0) == (__file__, here.__code__.co_firstlineno)
    assert client.recorder.signature_of(1, 0) == 1
    assert client.recorder.source(1, 1) is None
    assert client.recorder.source(1, -1) is None
    client.recorder.finished(1)
    assert client.recorder.source(1, 0) is None
    assert client.recorder.num_in_flight == 0
    assert locate(None, 0) is None


def test_after_its_end_everything_raises_what_ended_it(client: Client) -> None:
    client.call()
    client.recorder.close(WorkerLostError("worker 1", "killed by SIGKILL"))
    for action in (
        client.recorder.slot,
        client.define,
        lambda: client.recorder.fetch(Fetch(1, 0, 1, (0,)), now=True),
    ):
        with pytest.raises(WorkerLostError, match="worker 1 was lost: killed by SIGKILL"):
            action()
    client.recorder.wake()
    client.recorder.flush()
    assert client.outlet.calls == []


def test_a_forked_child_is_told(client: Client) -> None:
    client.call()
    client.recorder.abandon("the parent's")
    with pytest.raises(SessionClosedError, match="the parent's"):
        client.recorder.grant()


def test_threads_lose_no_call_and_share_no_slot(client: Client) -> None:
    threads, each = 4, 3000
    start = threading.Barrier(threads)
    stop = threading.Event()

    def work(_: int) -> list[int]:
        start.wait(WAIT_S)
        return [client.call() for _ in range(each)]

    def flush() -> None:
        while not stop.is_set():
            client.recorder.flush()

    flusher = threading.Thread(target=flush)
    flusher.start()
    try:
        with ThreadPoolExecutor(threads) as pool:
            slots = [slot for part in pool.map(work, range(threads)) for slot in part]
    finally:
        stop.set()
        flusher.join(WAIT_S)
    client.recorder.flush()
    assert len(set(slots)) == threads * each
    assert sorted(call[1] for call in client.outlet.calls) == sorted(slots)
    assert [batch.seq for batch in client.outlet.batches] == list(range(1, len(client.outlet.batches) + 1))


def test_lowest_slots_first() -> None:
    pool = SlotPool()
    first = pool.lend(3)
    assert [first.pop() for _ in range(3)] == [0, 1, 2]
    pool.restore([2, 0])
    again = pool.lend(3)
    assert [again.pop() for _ in range(3)] == [0, 2, 3]
    assert (pool.size, pool.num_idle) == (4, 0)


def test_what_must_be_said_before_a_draw_comes_between_two_batches_and_waits_for_room() -> None:
    client = Client()
    said: list[int] = []
    client.sig.put = client.recorder.draw
    turns = iter([None, lambda: said.append(len(client.outlet.batches)), None])
    client.recorder.turn = lambda: next(turns)
    for _ in range(3):
        client.call()
    assert (said, client.outlet.num_waits) == ([1], 1)
    client.recorder.interject(lambda: said.append(len(client.outlet.batches)))
    assert (said, client.outlet.num_waits) == ([1, 2], 2)
    assert [len(batch.calls) for batch in client.outlet.batches] == [1, 2]


def test_what_a_call_raises_that_finds_no_slot_has_no_story_of_ours_before_it() -> None:
    made = Client().recorder
    made.close(SessionClosedError("it was shut down"))
    with pytest.raises(SessionClosedError) as caught:
        made.slot()
    assert caught.value.__suppress_context__
