"""The controller's decisions: events in, instructions out. No sockets, no clock, no processes."""

from __future__ import annotations

from typing import Any

import pytest

from dtorch.runtime.controller import (
    Asked,
    Closing,
    Controller,
    Counted,
    Exited,
    Failed,
    Finished,
    Instruction,
    Joined,
    Lost,
    Received,
    Send,
    Sent,
    Settled,
    Start,
    Submitted,
    Suspect,
)
from dtorch.runtime.outgoing import Outgoing
from dtorch.transport.codec import decode_to_worker
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import (
    AskRandomState,
    AskStatistics,
    Batch,
    Define,
    Definition,
    Done,
    Failure,
    Fetch,
    Forget,
    Generators,
    Layout,
    MeshInfo,
    RandomState,
    Seed,
    Statistics,
    Stop,
    ToWorker,
    Value,
)


def mesh(number: int, *devices: int, kind: str = "cpu") -> MeshInfo:
    return MeshInfo(number, kind, (len(devices),), devices)


def definition(sig: int, *meshes: int, random: bool = False) -> Definition:
    layouts = tuple(Layout(m, (2,), "float32", (-1,)) for m in meshes)
    params = {"random": True} if random else {}
    return Definition(sig, "torch.neg", "local", [], {}, layouts[:1], layouts[-1:], (), params)


def batch(seq: int, *sigs: int, **more: Any) -> Submitted:
    facts: dict[str, Any] = dict.fromkeys(Outgoing.__struct_fields__, ())  # whatever a batch has besides: none of it
    facts |= {"seq": seq, "body": b"body %d" % seq, "calls": [(sig,) for sig in sigs], **more}
    return Submitted(Outgoing(**facts))


def fetch(ticket: int, on: int, slot: int = 0) -> Fetch:
    return Fetch(ticket, slot, on, (0,))


def sent(instructions: list[Instruction], worker: int | None = None) -> list[ToWorker]:
    return [
        decode_to_worker(i.frame) for i in instructions if isinstance(i, Send) and worker in (None, i.worker)
    ]


def started(instructions: list[Instruction]) -> list[Start]:
    return [i for i in instructions if isinstance(i, Start)]


def failure(seq: int = 1, index: int = 0, error: int = 0, kind: str = "RuntimeError", text: str = "no") -> Failure:
    return Failure(1, seq, index, error, 0, "cpu:0", kind, text, "")


def shared() -> Controller:
    """Worker 0 hosts all CPU devices and has joined; mesh 1 and signature 1 are known."""
    made = Controller(1, frozenset({"cpu"}))
    made.handle(batch(1, meshes=(mesh(1, 0, 1),), definitions=(definition(1, 1),)))
    made.handle(Joined(0))
    made.handle(Received(0, Done(1, 1, 0)))
    return made


def apart() -> Controller:
    """Workers 1 and 2 host devices 0 and 1; mesh 1 is both, 2 and 3 are one each, with signatures 1, 2 and 3."""
    made = Controller(1, frozenset())
    meshes = (mesh(1, 0, 1), mesh(2, 0), mesh(3, 1))
    made.handle(batch(1, meshes=meshes, definitions=tuple(definition(i, i) for i in (1, 2, 3))))
    for worker in (1, 2):
        made.handle(Joined(worker))
        made.handle(Received(worker, Done(1, 1, 0)))
    return made


def test_a_mesh_starts_its_worker_once_and_what_follows_waits_for_it() -> None:
    machine = Controller(1, frozenset({"cpu"}))
    first = machine.handle(batch(1, meshes=(mesh(1, 0, 1),), definitions=(definition(1, 1),)))
    assert started(first) == [Start(0, "cpu", 0, True)]
    assert sent(first) == []
    assert machine.is_starting(0)
    assert started(machine.handle(batch(2, 1, meshes=(mesh(2, 2, 3),)))) == []
    joined = sent(machine.handle(Joined(0)))
    assert [type(message) for message in joined] == [Define, Batch, Define, Batch]
    assert [message.seq for message in joined if isinstance(message, Batch)] == [1, 2]
    define = joined[0]
    assert isinstance(define, Define)
    assert define.meshes[0].workers == (0, 0)
    assert not machine.is_starting(0)
    assert machine.handle(Joined(0)) == []
    assert machine.handle(Joined(7)) == []


def test_devices_that_are_not_shared_get_a_worker_each() -> None:
    machine = Controller(1, frozenset({"cpu"}))
    out = machine.handle(batch(1, meshes=(mesh(1, 0, 1, kind="cuda"), mesh(2, 5))))
    assert started(out) == [Start(1, "cuda", 0, False), Start(2, "cuda", 1, False), Start(0, "cpu", 5, True)]
    assert machine.worker_of("cuda", 1) == 2
    assert machine.worker_of("cpu", 6) is None
    assert machine.workers == (1, 2, 0)


def test_a_batch_goes_to_the_workers_of_its_meshes_as_the_same_bytes() -> None:
    machine = apart()
    both = machine.handle(batch(2, 1))
    assert [i.worker for i in both if isinstance(i, Send)] == [1, 2]
    assert len({i.frame for i in both if isinstance(i, Send)}) == 1
    only = machine.handle(batch(3, 3))
    assert [i.worker for i in only if isinstance(i, Send)] == [2]
    frees = machine.handle(batch(4, freed_meshes=(2,)))
    assert [i.worker for i in frees if isinstance(i, Send)] == [1]
    message = sent(only)[0]
    assert isinstance(message, Batch)
    assert (message.seq, message.meshes, message.body) == (3, (3,), b"body 3")


def test_a_batch_is_finished_when_all_its_workers_are_done() -> None:
    machine = apart()
    machine.handle(batch(2, 1))
    machine.handle(batch(3, 2))
    assert machine.handle(Received(1, Done(1, 2, 0))) == []
    assert machine.handle(Received(1, Done(1, 3, 0))) == [Finished(3)]
    assert machine.handle(Received(2, Done(1, 2, 0))) == [Finished(2)]
    assert machine.handle(Received(2, Done(1, 2, 0))) == []


def test_a_batch_that_concerns_nobody_is_finished_at_once() -> None:
    machine = Controller(1, frozenset({"cpu"}))
    assert machine.handle(batch(1)) == [Finished(1)]


def test_a_value_is_settled_when_all_parts_are_here() -> None:
    machine = apart()
    machine.handle(batch(2, 1, fetches=(fetch(9, 1),)))
    one, two = Value(1, 9, 1, ()), Value(1, 9, 2, ())
    assert machine.handle(Received(1, Done(1, 2, 0, (one,)))) == []
    assert machine.handle(Received(2, Done(1, 2, 0, (two,)))) == [Settled(9, (one, two), None), Finished(2)]
    assert machine.handle(Received(2, Done(1, 2, 0, (two,)))) == []


@pytest.mark.parametrize(
    ("errors", "expected"), [((None, 4), (2, 4)), ((3, 4), (1, 3)), ((-1, 4), (2, 4)), ((-1, -1), (1, -1))]
)
def test_a_poisoned_value_names_the_failure_where_it_happened(
    errors: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    machine = apart()
    machine.handle(batch(2, 1, fetches=(fetch(9, 1),)))
    machine.handle(Received(1, Done(1, 2, 0, (Value(1, 9, 1, (), errors[0]),))))
    settled, _ = machine.handle(Received(2, Done(1, 2, 0, (Value(1, 9, 2, (), errors[1]),))))
    assert isinstance(settled, Settled)
    assert settled.error == expected


def test_a_late_worker_knows_every_live_definition() -> None:
    """1. Signatures 1 to 3 are known. 2. Device 2 appears. 3. A batch mixes calls of the old meshes and the new one."""
    machine = apart()
    machine.handle(Sent(Forget(1, 2)))
    out = machine.handle(batch(2, 2, 4, meshes=(mesh(4, 2),), definitions=(definition(4, 4),)))
    assert started(out) == [Start(3, "cpu", 2, False)]
    assert sent(out, 3) == []
    told = sent(machine.handle(Joined(3)))
    assert [type(message) for message in told] == [Define, Define, Batch]
    known, new, mixed = told
    assert isinstance(known, Define)
    assert isinstance(new, Define)
    assert isinstance(mixed, Batch)
    assert [m.mesh for m in known.meshes] == [1, 2, 3]
    assert [d.sig for d in known.definitions] == [2, 3]
    assert [d.sig for d in new.definitions] == [4]
    assert mixed.meshes == (2, 4)


def test_random_batches_go_to_everybody() -> None:
    machine = apart()
    out = machine.handle(batch(2, 9, definitions=(definition(9, 2, random=True),)))
    batches = [message for message in sent(out) if isinstance(message, Batch)]
    assert [message.meshes for message in batches] == [(), ()]


def test_a_late_worker_gets_the_seed_when_nothing_was_drawn_since() -> None:
    machine = apart()
    machine.handle(Sent(Seed(1, 42)))
    machine.handle(batch(2, meshes=(mesh(4, 2),)))
    told = sent(machine.handle(Joined(3)))
    assert Seed(1, 42) in told
    assert [type(message) for message in told] == [Define, Seed, Define]


def test_a_late_worker_takes_over_the_generators_of_another_one() -> None:
    """1. A random op ran. 2. A late worker is asked for; worker 1 is asked for its state. 3. The late worker joins and
    still waits. 4. More work comes for it. 5. The state arrives: it comes first, then all that waited, in order."""
    machine = apart()
    machine.handle(batch(2, 9, definitions=(definition(9, 1, random=True),)))
    out = machine.handle(batch(3, meshes=(mesh(4, 2),)))
    (question,) = [message for message in sent(out, 1) if isinstance(message, AskRandomState)]
    assert not [message for message in sent(out, 2) if isinstance(message, AskRandomState)]
    assert machine.handle(Joined(3)) == []
    assert sent(machine.handle(batch(4, 9)), 3) == []
    state = RandomState(1, question.ticket, Generators(0, {0: {"cpu": b"state"}}))
    told = sent(machine.handle(Received(1, state)), 3)
    assert told[0] == state
    assert [type(message) for message in told] == [RandomState, Define, Define, Batch]
    assert sent(machine.handle(batch(5, 9)), 3) != []
    with pytest.raises(ProtocolError, match="which nobody asked"):
        machine.handle(Received(1, state))


def test_a_known_random_op_counts_as_drawn_after_a_seed() -> None:
    machine = apart()
    machine.handle(batch(2, 9, definitions=(definition(9, 1, random=True),)))
    machine.handle(Sent(Seed(1, 42)))
    machine.handle(batch(3, 9))
    out = machine.handle(batch(4, meshes=(mesh(4, 2),)))
    assert [message for message in sent(out, 1) if isinstance(message, AskRandomState)]


def test_a_late_worker_learns_every_stream_of_random_numbers() -> None:
    machine = apart()
    for mark in (Seed(1, 42), Seed(1, 7, 1), Seed(1, 8, 2), Seed(1, None, 0, (2,))):
        machine.handle(Sent(mark))
    told = sent(machine.handle(batch(2, meshes=(mesh(4, 2),))) + machine.handle(Joined(3)), 3)
    assert [message for message in told if isinstance(message, Seed)] == [Seed(1, 7, 1), Seed(1, 42)]
    with pytest.raises(ProtocolError, match="stream 2 of random numbers was never seeded"):
        machine.handle(Sent(Seed(1, None, 2)))


def test_the_state_may_arrive_before_the_late_worker_joins() -> None:
    machine = apart()
    machine.handle(batch(2, 9, definitions=(definition(9, 1, random=True),)))
    out = machine.handle(batch(3, meshes=(mesh(4, 2),)))
    (question,) = [message for message in sent(out, 1) if isinstance(message, AskRandomState)]
    assert machine.handle(Received(1, RandomState(1, question.ticket, Generators(0, {})))) == []
    told = sent(machine.handle(Joined(3)))
    assert isinstance(told[0], RandomState)


def test_statistics_wait_for_every_worker() -> None:
    machine = apart()
    assert [type(m) for m in sent(machine.handle(Asked(5, False, False)))] == [AskStatistics, AskStatistics]
    one, two = Statistics(1, 5, 1, (), {}), Statistics(1, 5, 2, (), {})
    assert machine.handle(Received(2, two)) == []
    assert machine.handle(Received(1, one)) == [Counted(5, (two, one))]
    with pytest.raises(ProtocolError, match="which nobody asked"):
        machine.handle(Received(1, one))
    assert Controller(1, frozenset()).handle(Asked(6, False, False)) == [Counted(6, ())]


def test_a_failed_call_is_passed_on() -> None:
    assert shared().handle(Received(0, failure())) == [Failed(0, failure())]


def test_a_worker_that_ends_is_lost_once_and_gets_nothing_more() -> None:
    machine = apart()
    assert machine.handle(Exited(2, "killed by SIGKILL")) == [Lost(2, "killed by SIGKILL")]
    assert machine.handle(Exited(2, "its connection closed")) == []
    assert machine.handle(Exited(9, "who?")) == []
    assert machine.workers == (1,)
    assert [i.worker for i in machine.handle(batch(2, 1)) if isinstance(i, Send)] == [1]


def test_last_words_become_part_of_the_reason() -> None:
    machine = shared()
    assert machine.handle(Received(0, Failure(0, 0, -1, -1, 0, "", "ProtocolError", "bad", "Traceback: bad\n"))) == []
    assert machine.handle(Exited(0, "exited with code 1")) == [
        Lost(0, "exited with code 1; its last words: Traceback: bad")
    ]


def test_the_echo_of_a_lost_worker_is_not_taken_for_the_cause() -> None:
    """1. Worker 2 dies. 2. Worker 1 notices first: its exchange fails, so does the value. 3. The end is reported."""
    machine = apart()
    machine.handle(batch(2, 1, fetches=(fetch(9, 1),)))
    echo = failure(kind="ConnectionLostError", text="connection reset")
    assert machine.handle(Received(1, echo)) == [Suspect(1, "connection reset")]
    assert machine.handle(Received(1, Done(1, 2, 0, (Value(1, 9, 1, (), 0),)))) == []
    assert machine.handle(Received(1, failure(error=1))) == []
    assert machine.handle(Exited(2, "killed by SIGKILL")) == [Lost(2, "killed by SIGKILL")]


def test_closing_tells_everybody_and_expects_their_ends() -> None:
    machine = apart()
    assert [type(message) for message in sent(machine.handle(Closing()))] == [Stop, Stop]
    assert machine.handle(Exited(1, "exited with code 0")) == []
    assert machine.workers == (2,)


def test_a_worker_that_is_still_starting_stops_after_what_is_queued() -> None:
    machine = Controller(1, frozenset({"cpu"}))
    machine.handle(batch(1, meshes=(mesh(1, 0),)))
    machine.handle(Closing())
    assert [type(message) for message in sent(machine.handle(Joined(0)))][-1] is Stop


def test_frames_and_bytes_are_counted() -> None:
    machine = apart()
    before = machine.num_sends, machine.bytes_sent
    out = machine.handle(batch(2, 1))
    frames = [i.frame for i in out if isinstance(i, Send)]
    assert (machine.num_sends, machine.bytes_sent) == (before[0] + 2, before[1] + sum(map(len, frames)))
