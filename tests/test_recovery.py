"""The controller after a loss and in a move: events in, instructions out."""

from __future__ import annotations

from typing import Any

import msgspec

from dtorch.runtime.controller import (
    Asked,
    Controller,
    Counted,
    Exited,
    Finished,
    Forfeited,
    Halting,
    Instruction,
    Interrupt,
    Joined,
    Kill,
    Lost,
    Migrating,
    Received,
    Regained,
    Send,
    Settled,
    Start,
    Submitted,
    Suspect,
)
from dtorch.runtime.lineage import Bounds, mask_of
from dtorch.runtime.outgoing import Outgoing
from dtorch.runtime.poison import LOST
from dtorch.transport.codec import decode_to_worker
from dtorch.transport.messages import (
    AskHeld,
    Batch,
    Blob,
    Define,
    Definition,
    Done,
    Failure,
    Fetch,
    Generators,
    Held,
    Layout,
    MeshInfo,
    PlaceHeld,
    Redo,
    Regroup,
    Resume,
    Resumed,
    Stop,
    ToWorker,
)

PIECE = Layout(1, (4,), "float32", (0,))
UPLOAD, NEG = 1, 2
TABLE = (
    Definition(UPLOAD, "dtorch.upload", "upload", [], {}, (), (PIECE,)),
    Definition(NEG, "torch.neg", "local", [], {}, (PIECE,), (PIECE,)),
)


def outgoing(seq: int, *calls: list[Any], **more: Any) -> Submitted:
    facts: dict[str, Any] = dict.fromkeys(Outgoing.__struct_fields__, ())
    body = msgspec.msgpack.encode((calls, []))
    return Submitted(Outgoing(**(facts | {"seq": seq, "body": body, "calls": list(calls)} | more)))


def sent(instructions: list[Instruction], worker: int) -> list[ToWorker]:
    return [decode_to_worker(i.frame) for i in instructions if isinstance(i, Send) and i.worker == worker]


def kinds(messages: list[ToWorker]) -> list[type]:
    return [type(message) for message in messages]


def of(instructions: list[Instruction], kind: type) -> list[Any]:
    return [i for i in instructions if isinstance(i, kind)]


def session(bounds: Bounds | None = None) -> Controller:
    """Workers 1 and 2 hold slots 0 and 1 of a mesh over devices 0 and 1."""
    made = Controller(1, frozenset(), recover=bounds or Bounds())
    made.handle(
        outgoing(1, [UPLOAD, 0, 0], [NEG, 1, 0], meshes=(MeshInfo(1, "cpu", (2,), (0, 1)),), definitions=TABLE,
                 uploads=(Blob(b"0123"),))
    )  # fmt: skip
    for worker in (1, 2):
        made.handle(Joined(worker))
        made.handle(Received(worker, Done(1, 1, 0)))
    return made


def held(worker: int, device: int, epoch: int = 1, *slots: int, seq: int = 2) -> Received:
    mask = mask_of(slots).to_bytes(4, "little")
    stands = Generators(0, {0: {"cpu": b"s"}})
    return Received(worker, Held(1, epoch, worker, seq, b"", 0, (PlaceHeld("cpu", device, mask),), (), stands))


def resumed(worker: int, epoch: int = 1, size: int = 0) -> Received:
    return Received(worker, Resumed(1, epoch, worker, size))


def test_a_loss_halts_everybody_and_starts_a_spare() -> None:
    machine = session()
    out = machine.handle(Exited(2, "killed by SIGKILL"))
    assert of(out, Kill) == [Kill(2)]
    assert of(out, Halting) == [Halting()]
    assert of(out, Interrupt) == [Interrupt(1, 1)]
    assert of(out, Start) == [Start(3, "cpu", 1, False)]
    assert sent(out, 1) == [AskHeld(1, 1)]
    assert machine.handle(Exited(2, "its connection closed")) == []


def test_the_lost_calls_run_again_and_everybody_goes_on() -> None:
    machine = session()
    machine.handle(Exited(2, "killed"))
    out = machine.handle(held(1, 0, 1, 0, 1))
    assert kinds(sent(out, 1)) == [Define, Regroup, Redo, Resume]
    regroup, redo = sent(out, 1)[1:3]
    assert isinstance(regroup, Regroup)
    assert (regroup.places, regroup.hosts, regroup.copies) == ((("cpu", 0), ("cpu", 1)), (1, 3), ())
    assert isinstance(redo, Redo)
    assert [(call.index, call.places) for call in redo.calls] == [(0, (1,)), (1, (1,))]
    assert redo.uploads == (Blob(b"0123"),)
    new = sent(machine.handle(Joined(3)), 3)
    assert kinds(new) == [Define, Regroup, Redo, Resume]
    assert isinstance(new[0], Define)
    assert new[0].definitions == TABLE
    assert new[0].meshes[0].workers == (1, 3)
    assert machine.handle(resumed(1)) == []
    (regained,) = machine.handle(resumed(3, size=8))
    assert regained == Regained(((2, "killed"),), (("cpu", 1),), 2, 8)
    assert sent(machine.handle(outgoing(2, [NEG, 2, 1])), 3) != []


def test_what_the_client_says_meanwhile_waits_and_follows_in_order() -> None:
    machine = session()
    machine.handle(Exited(2, "killed"))
    assert machine.handle(outgoing(2, [NEG, 2, 1])) == []
    assert machine.handle(Asked(5, False, False)) == []
    out = sent(machine.handle(held(1, 0, 1, 0, 1)), 1)
    assert kinds(out)[-3:-1] == [Resume, Batch]


def test_unfinished_batches_and_values_under_way_are_finished_by_the_redo() -> None:
    machine = session()
    machine.handle(outgoing(2, [NEG, 2, 1], fetches=(Fetch(9, 2, 1, (0, 1)),)))
    machine.handle(Exited(2, "killed"))
    out = machine.handle(held(1, 0, 1, 0, 1))
    redo = [message for message in sent(out, 1) if isinstance(message, Redo)][-1]
    assert (redo.seq, [reread.fetch.ticket for reread in redo.rereads]) == (2, [9])
    machine.handle(Joined(3))
    assert of(out, Finished) == []
    machine.handle(resumed(1))
    last = machine.handle(resumed(3))
    assert of(last, Finished) == [Finished(2)]
    assert of(last, Regained)[0].recomputed_ops == 2  # the third call had been executed by nobody


def test_another_loss_in_the_middle_begins_anew_and_old_answers_do_not_count() -> None:
    machine = session()
    machine.handle(Exited(2, "killed"))
    machine.handle(held(1, 0, 1, 0, 1))
    machine.handle(Joined(3))
    out = machine.handle(Exited(3, "killed too"))
    assert of(out, Interrupt) == [Interrupt(1, 2)]
    assert of(out, Start)[0].worker == 4
    assert machine.handle(resumed(1)) == []
    out = machine.handle(held(1, 0, 2, 0, 1))
    assert kinds(sent(out, 1)) == [Define, Regroup, Redo, Resume]
    machine.handle(Joined(4))
    machine.handle(resumed(1, 2))
    (regained,) = machine.handle(resumed(4, 2))
    assert dict(regained.lost) == {2: "killed", 3: "killed too"}


def test_a_spare_that_never_comes_up_is_replaced_by_those_that_remain() -> None:
    machine = session()
    machine.handle(Exited(2, "killed"))
    out = machine.handle(Exited(3, "could not be started: fork failed"))
    assert of(out, Start) == []
    out = machine.handle(held(1, 0, 2, 0, 1))
    regroup = sent(out, 1)[1]
    assert isinstance(regroup, Regroup)
    assert regroup.hosts == (1, 1)


def test_calls_that_end_worker_after_worker_are_given_up() -> None:
    machine = session()
    machine.handle(outgoing(2, [NEG, 2, 1]))
    victim, reason, epoch = 2, "", 0
    while not reason:
        epoch += 1
        machine.handle(Exited(victim, "exited with code 7"))
        victim += 1
        machine.handle(Joined(victim))
        out = machine.handle(held(1, 0, epoch, 0, 1))
        reason = "".join(forfeited.reason for forfeited in of(out, Forfeited))
        assert epoch < 10
    assert reason == "exited with code 7"
    assert epoch == 4
    assert of(out, Lost) == []
    (redo,) = [message for message in sent(out, 1) if isinstance(message, Redo)]
    assert redo.seq == 1  # what has run before without harm
    machine.handle(resumed(1, epoch))
    assert of(machine.handle(resumed(victim, epoch)), Regained) != []


def test_values_that_are_lost_are_settled_as_such() -> None:
    machine = session(Bounds(upload_bytes=1))  # data of the client is not kept
    machine.handle(outgoing(2, [NEG, 2, 1], fetches=(Fetch(9, 2, 1, (0, 1)),)))
    machine.handle(Exited(2, "killed"))
    out = machine.handle(held(1, 0, 1, 0, 1))
    assert of(out, Settled) == [Settled(9, (), (0, LOST))]
    (forfeited,) = of(out, Forfeited)
    assert "float32[4] on [Shard(0)], made by torch.neg" in forfeited.tensors
    assert out.index(forfeited) < out.index(of(out, Settled)[0])


def test_nobody_waits_for_the_statistics_of_a_lost_worker() -> None:
    machine = session()
    machine.handle(Asked(5, False, False))
    machine.handle(Exited(1, "killed"))
    out = machine.handle(Exited(2, "killed"))
    assert of(out, Counted) == [Counted(5, ())]


def test_a_worker_that_never_came_up_ends_the_session() -> None:
    machine = Controller(1, frozenset(), recover=Bounds())
    machine.handle(outgoing(1, meshes=(MeshInfo(1, "cpu", (1,), (0,)),)))
    assert machine.handle(Exited(1, "no")) == [Lost(1, "no")]


def test_an_echo_of_a_loss_makes_nobody_suspect() -> None:
    machine = session()
    echo = Failure(1, 2, 0, -1, 0, "", "ConnectionLostError", "lost", "")
    (suspect,) = machine.handle(Received(1, echo))
    assert suspect == Suspect(1, "lost", 0)
    machine.handle(Exited(2, "killed"))
    assert machine.epoch != suspect.epoch
    assert machine.handle(Received(1, echo)) == []


# ---- moves


def test_a_move_waits_for_the_new_worker_and_copies_everything() -> None:
    machine = session()
    out = machine.handle(Migrating(1, (("cpu", 1),)))
    assert of(out, Start) == [Start(3, "cpu", 1, False)]
    assert of(out, Halting) == []
    out = machine.handle(Joined(3))
    assert of(out, Halting) == [Halting()]
    assert of(out, Interrupt) == []  # the program order is halted, no call is
    machine.handle(held(1, 0, 1, 0, 1))
    machine.handle(Received(3, Held(1, 1, 3, 2, b"", 0, (), (), Generators(0, {0: {"cpu": b"s"}}))))
    out = machine.handle(held(2, 1, 1, 0, 1))
    regroup = sent(out, 2)[1]
    assert isinstance(regroup, Regroup)
    assert regroup.hosts == (1, 3)
    assert [(c.slot, c.source, c.source_worker, c.target_worker) for c in regroup.copies] == [(0, 1, 2, 3), (1, 1, 2, 3)]
    assert not any(isinstance(message, Redo) for message in sent(out, 2))
    for worker in (1, 2):
        machine.handle(resumed(worker))
    (regained,) = machine.handle(resumed(3))
    assert (regained.tickets, regained.recomputed_ops, regained.moved) == ((1,), 0, (("cpu", 1),))


def test_a_device_may_move_to_the_hardware_of_another() -> None:
    machine = session()
    machine.handle(Migrating(1, (("cpu", 1),), ("cpu", 0)))
    machine.handle(held(1, 0, 1, 0, 1))
    out = machine.handle(held(2, 1, 1, 0, 1))
    define = sent(out, 1)[0]
    assert isinstance(define, Define)
    assert (define.meshes[0].workers, define.meshes[0].backing) == ((1, 1), ("", "cpu:0"))


def test_a_drained_worker_ends_when_all_have_gone_on_and_is_not_a_loss() -> None:
    machine = session()
    machine.handle(Migrating(1, (), None, 2))
    machine.handle(held(1, 0, 1, 0, 1))
    machine.handle(held(2, 1, 1, 0, 1))
    assert of(machine.handle(resumed(1)), Send) == []
    out = machine.handle(resumed(2))
    assert sent(out, 2) == [Stop()]
    assert machine.handle(Exited(2, "exited with code 0")) == []
    assert machine.workers == (1,)
