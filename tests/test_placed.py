"""The controller of a head's session after a loss and in a move: devices are where the pool says. And its streams."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from test_recovery import NEG, TABLE, UPLOAD, held, kinds, of, outgoing, resumed

from dtorch.cluster.streams import SessionStreams
from dtorch.cluster.submitted import Batch
from dtorch.runtime.controller import (
    Controller,
    Exited,
    Finished,
    Forfeited,
    Halting,
    Instruction,
    Interrupt,
    Joined,
    Kill,
    Migrating,
    Received,
    Regained,
    Send,
    Start,
    Submitted,
    Vacated,
)
from dtorch.runtime.lineage import Bounds, Stream
from dtorch.runtime.turns import Turns
from dtorch.transport.cluster import Part
from dtorch.transport.codec import decode_to_pool_worker, encode
from dtorch.transport.errors import ProtocolError, QuotaError, WorkerLostError
from dtorch.transport.messages import AskHeld, Define, Done, Held, MeshInfo, Redo, Regroup, Resume, StreamBlob

MESH = MeshInfo(1, "cpu", (2,), (0, 1))
Spots = dict[int, tuple[int, tuple[str, int]]]


def sent(instructions: list[Instruction], worker: int) -> list[Any]:
    return [decode_to_pool_worker(i.frame) for i in instructions if isinstance(i, Send) and i.worker == worker]


def session(spots: Spots, bounds: Bounds | None = None) -> Controller:
    """Devices 0 and 1 are where ``spots`` says, and have pieces of an upload that came in parts."""
    made = Controller(1, frozenset(), lambda _, device: spots[device], bounds or Bounds())
    for event in (Submitted(batch(1, [UPLOAD, 0, 0])),):
        made.handle(outgoing(0, meshes=(MESH,), definitions=TABLE))
        for worker in sorted({worker for worker, _ in spots.values()}):
            made.handle(Joined(worker))
        made.handle(event)
    for worker in made.workers:
        made.handle(Received(worker, Done(1, 1, 0)))
    return made


def batch(seq: int, *calls: list[int]) -> Batch:
    parts = tuple(Stream(7 + d, 1, (d,), tuple(encode(part(7 + d, o, device=d)) for o in (0, 4))) for d in (0, 1))
    body = msgspec.msgpack.encode((calls, []))
    return Batch(seq, body, (UPLOAD,), (), (StreamBlob(7, 8), StreamBlob(8, 8)), (), streams=parts)


def part(stream: int, offset: int, data: bytes = b"abcd", total: int = 8, device: int = 0) -> Part:
    return Part(1, stream, offset, mesh=1, total=total, devices=(device,), data=memoryview(data))


def test_a_lost_device_goes_where_the_pool_says_with_the_bytes_that_were_uploaded() -> None:
    spots: Spots = {0: (4, ("cpu", 0)), 1: (5, ("cpu", 0))}
    machine = session(spots)
    spots[1] = (9, ("cpu", 3))
    out = machine.handle(Exited(5, "gone"))
    assert (of(out, Kill), of(out, Halting), of(out, Interrupt)) == ([Kill(5)], [Halting()], [Interrupt(4, 1)])
    assert of(out, Start) == [Start(9, "cpu", 1, False)]
    assert kinds(sent(out, 4)) == [AskHeld]
    assert machine.is_halted
    assert machine.handle(Joined(9)) == []
    out = machine.handle(held(4, 0, 1, 0))
    assert not machine.is_halted
    assert kinds(sent(out, 9)) == [Define, Regroup, Part, Part, Redo, Resume]
    assert kinds(sent(out, 4)) == [Define, Regroup, Redo, Resume]  # it has its piece
    define, regroup, first, second, redo, _ = sent(out, 9)
    assert (define.meshes[0].workers, define.meshes[0].locals) == ((4, 9), (0, 3))
    assert regroup.hosts == (4, 9)
    assert [(each.stream, each.offset, bytes(each.data)) for each in (first, second)] == [(8, 0, b"abcd"), (8, 4, b"abcd")]
    assert [call.places for call in redo.calls] == [(1,)]


def test_it_may_be_a_worker_that_the_session_uses_already() -> None:
    spots: Spots = {0: (4, ("cpu", 0)), 1: (5, ("cpu", 0))}
    machine = session(spots)
    spots[1] = (4, ("cpu", 0))
    out = machine.handle(Exited(5, "gone"))
    assert of(out, Start) == []
    out = machine.handle(held(4, 0, 1, 0))
    assert kinds(sent(out, 4)) == [Define, Regroup, Part, Part, Redo, Resume]
    assert machine.workers == (4,)


def test_uploads_beyond_the_bound_are_lost_by_name() -> None:
    spots: Spots = {0: (4, ("cpu", 0)), 1: (5, ("cpu", 0))}
    machine = session(spots, Bounds(upload_bytes=10))
    spots[1] = (9, ("cpu", 3))
    machine.handle(Exited(5, "gone"))
    machine.handle(Joined(9))
    (forfeited,) = of(machine.handle(held(4, 0, 1, 0)), Forfeited)
    assert forfeited.tensors == ("float32[4] on [Shard(0)], made by dtorch.upload",)


def test_another_loss_on_the_way_sends_a_device_on() -> None:
    spots: Spots = {0: (4, ("cpu", 0)), 1: (5, ("cpu", 0))}
    machine = session(spots)
    spots[1] = (9, ("cpu", 0))
    machine.handle(Exited(5, "gone"))
    machine.handle(Joined(9))
    spots[1] = (10, ("cpu", 1))
    out = machine.handle(Exited(9, "gone too"))
    assert of(out, Start) == [Start(10, "cpu", 1, False)]
    machine.handle(Joined(10))
    out = machine.handle(held(4, 0, 2, 0))
    assert kinds(sent(out, 10)) == [Define, Regroup, Part, Part, Redo, Resume]


def test_a_worker_that_is_left_is_told_nothing_more_and_nobody_waits_for_it() -> None:
    spots: Spots = {0: (4, ("cpu", 0)), 1: (5, ("cpu", 0))}
    machine = session(spots)
    spots[1] = (9, ("cpu", 0))
    out = machine.handle(Migrating(0, (), leaving=5))
    assert (of(out, Start), of(out, Halting)) == ([Start(9, "cpu", 1, False)], [])
    out = machine.handle(Joined(9))
    assert of(out, Halting) == [Halting()]
    machine.handle(held(4, 0, 1, 0))
    machine.handle(held(9, 7, 1))
    out = machine.handle(held(5, 1, 1, 0))
    assert [(c.source_worker, c.target_worker) for c in sent(out, 9)[1].copies] == [(5, 9)]
    machine.handle(outgoing(2, [NEG, 1, 0]))  # before all have gone on
    machine.handle(resumed(4))
    machine.handle(resumed(5))
    out = machine.handle(resumed(9))
    assert of(out, Vacated) == [Vacated(5)]
    assert machine.workers == (4, 9)
    assert sent(out, 5) == []
    machine.handle(Received(4, Done(1, 2, 0)))
    assert machine.handle(Received(9, Done(1, 2, 0))) in ([Finished(2)], [])
    assert machine.handle(Exited(5, "it was drained")) == []


def test_a_device_may_move_to_other_hardware_of_its_worker() -> None:
    spots: Spots = {0: (4, ("cpu", 0)), 1: (4, ("cpu", 1))}
    machine = session(spots)
    spots[1] = (4, ("cuda", 0))
    machine.handle(Migrating(3, ()))
    here, there = held(4, 0, 1, 0).message, held(4, 1, 1, 0).message
    assert isinstance(here, Held)
    assert isinstance(there, Held)
    out = machine.handle(Received(4, msgspec.structs.replace(here, places=(*here.places, *there.places))))
    define, regroup, resume = sent(out, 4)
    assert define.meshes[0].backing == ("", "cuda:0")
    assert [(c.slot, c.source, c.source_worker, c.target, c.target_worker) for c in regroup.copies] == [(0, 1, 4, 1, 4)]
    assert [final.copied for final in resume.finals] == [(), ((0, regroup.copies[0].leaf),)]
    (regained,) = of(machine.handle(resumed(4)), Regained)
    assert (regained.moved, regained.tickets) == ((("cpu", 1),), (3,))


# ---- streams


def streams(limit_bytes: int = 0) -> SessionStreams:
    return SessionStreams(1, Turns(), lambda _: None, limit_bytes)


def test_an_upload_may_begin_again() -> None:
    here = streams()
    here.put(part(1, 0))
    here.put(part(1, 0, b"efgh"))
    here.put(part(1, 4, b"ijkl"))
    assert bytes(here.take(1, 8).numpy()) == b"efghijkl"
    assert isinstance(here.take(1, 8), ProtocolError)
    here.put(part(1, 0))
    with pytest.raises(ProtocolError, match="goes on at byte 3 after 4"):
        here.put(part(1, 3))


def test_an_upload_whose_beginning_went_to_a_lost_worker_fails_where_it_is_used() -> None:
    here = streams()
    here.put(part(1, 4))
    here.put(part(1, 8))
    assert here.waiting_bytes == 0
    assert isinstance(here.take(1, 8), WorkerLostError)
    here.put(part(2, 4))
    here.put(part(2, 0))  # it was kept after all
    here.put(part(2, 4))
    assert torch.equal(here.take(2, 8), torch.tensor(list(b"abcdabcd"), dtype=torch.uint8))


def test_an_upload_above_the_quota_is_not_taken_in() -> None:
    here = streams(limit_bytes=4)
    here.put(part(1, 0))
    here.put(part(1, 4))
    assert isinstance(here.take(1, 8), QuotaError)
