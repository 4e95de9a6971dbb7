"""What runs again after a loss, decided from positions and from what is held. No tensors, no workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dtorch.runtime.lineage import Bounds, Lineage, mask_of
from dtorch.runtime.slices import Redo, Rescue, Standing, rescue
from dtorch.transport.messages import Blob, Definition, Fetch, Layout, MeshInfo, Program, Seed

WHOLE, CUT, PENDING = ((code,) for code in (-1, 0, -2))
MESH = MeshInfo(1, "cpu", (2,), (0, 1))
PLACES = [("cpu", 0), ("cpu", 1)]
END = (99, 0)


def layout(codes: tuple[int, ...]) -> Layout:
    return Layout(1, (4,), "float32", codes)


def define(sig: int, op: str, num_inputs: int, codes: tuple[int, ...], *, to: Any = None, **more: Any) -> Definition:
    kernel = more.pop("kernel", "local")
    writes = more.pop("writes", ())
    ins = (layout(codes),) * num_inputs
    return Definition(sig, op, kernel, [], {}, ins, (layout(to or codes),), writes, more)


UPLOAD, NEG, ADD, ADD_, VIEW, GATHER, RAND, NEG_WHOLE, UPLOAD_WHOLE, ONCE, SUM = range(1, 12)
TABLE = (
    define(UPLOAD, "dtorch.upload", 0, CUT, kernel="upload"),
    define(UPLOAD_WHOLE, "dtorch.upload", 0, WHOLE, kernel="upload"),
    define(NEG, "torch.neg", 1, CUT),
    define(NEG_WHOLE, "torch.neg", 1, WHOLE),
    define(ADD, "torch.add", 2, CUT),
    define(ADD_, "torch.Tensor.add_", 2, CUT, writes=(0,)),
    define(VIEW, "torch.Tensor.view", 1, CUT, aliases=[0]),
    define(GATHER, "dtorch.redistribute", 1, CUT, to=WHOLE, kernel="redistribute"),
    define(RAND, "torch.rand", 0, CUT, kernel="random", random=True),
    define(ONCE, "custom:once", 1, CUT, repeatable=False),
    define(SUM, "torch.sum", 1, CUT, to=PENDING),
)


class History:
    """A program, batch by batch, and where two devices stand in it; device 1 is lost unless ``standing`` says otherwise."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.lineage = Lineage(bounds or Bounds())
        self.lineage.define(TABLE, ())
        self.seq = 0
        self.standings = [Standing(END, -1), Standing((0, 0), 0)]
        self.executed = [END, END]

    def batch(self, *calls: list[Any], frees: list[int] | None = None, uploads: int = 0) -> int:
        self.seq += 1
        body = msgspec.msgpack.encode((calls, [(1, frees)] if frees else []))
        self.lineage.add(self.seq, body, tuple(Blob(b"0123") for _ in range(uploads)))
        return self.seq

    def holds(self, *slots: int, at: tuple[int, int] = END, device: int = 0) -> None:
        self.standings[device] = Standing(at, mask_of(slots))

    def rescue(self, taps: list[tuple[int, Fetch]] | None = None, **more: Any) -> Rescue:
        return rescue(
            self.lineage, PLACES, {1: MESH}, self.standings, taps or [], executed=self.executed, **more
        )


def again(found: Rescue) -> list[tuple[int, int, tuple[int, ...]]]:
    """(batch, call, devices) of everything that runs again."""
    return [
        (part.record.seq, step.index, tuple(p for p in (0, 1) if step.places >> p & 1))
        for part in found.parts
        for step in part.steps
        if not step.draw
    ]


def copies(found: Rescue) -> set[tuple[int, int, int]]:
    """(slot, from, to)."""
    return {(leaf.slot, source, p) for leaf in found.leaves for p, source in leaf.sources.items() if p != source}


def test_what_a_replica_holds_is_copied_and_nothing_runs_again() -> None:
    past = History()
    past.batch([UPLOAD_WHOLE, 0, 0], [NEG_WHOLE, 1, 0], uploads=1)
    past.holds(0, 1)
    found = past.rescue()
    assert again(found) == []
    assert copies(found) == {(0, 0, 1), (1, 0, 1)}
    assert found.recomputed == 0
    assert found.finals[1].leaves.keys() == {0, 1}


def test_only_the_lost_closure_runs_again_and_only_where_it_was_lost() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], [UPLOAD, 5, 1], uploads=2)
    past.batch([NEG, 1, 0], [NEG, 6, 5], [NEG, 2, 1], [NEG, 7, 6], frees=[1, 5, 6, 7])  # 6 and 7 come to nothing
    past.holds(0, 2)
    found = past.rescue()
    assert again(found) == [(1, 0, (1,)), (2, 0, (1,)), (2, 2, (1,))]
    assert found.recomputed == 3
    assert (found.finals[1].redone, found.finals[0].redone) == (mask_of([0, 2]), 0)
    assert found.lost == []


def test_slots_are_recycled_and_versions_are_not_confused() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([NEG, 1, 0], frees=[0])
    past.batch([NEG, 0, 1], frees=[1])  # slot 0 again, another tensor
    past.batch([NEG, 1, 0])
    past.holds(0, 1)
    assert again(past.rescue()) == [(1, 0, (1,)), (2, 0, (1,)), (3, 0, (1,)), (4, 0, (1,))]


def test_writes_in_place_are_repeated_on_the_version_that_they_met() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], [UPLOAD, 1, 1], uploads=2)
    past.batch([ADD_, 0, 1], [NEG, 2, 0])
    past.batch([ADD_, 0, 1], frees=[1])
    past.holds(0, 2)
    found = past.rescue()
    assert again(found) == [(1, 0, (1,)), (1, 1, (1,)), (2, 0, (1,)), (2, 1, (1,)), (3, 0, (1,))]


def test_a_write_through_a_view_belongs_to_what_it_looks_at() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], [VIEW, 1, 0], [ADD_, 1, 1], uploads=1, frees=[1])
    past.holds(0)
    assert again(past.rescue()) == [(1, 0, (1,)), (1, 1, (1,)), (1, 2, (1,))]


def test_a_call_that_communicates_runs_on_all_devices_and_asks_for_all_pieces() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([NEG, 1, 0], [GATHER, 2, 1], [SUM, 3, 1], frees=[0, 1])
    past.standings = [Standing((2, 0), mask_of([0])), Standing((0, 0), 0)]  # halted before the second batch
    found = past.rescue()
    assert again(found) == [(1, 0, (1,)), (2, 0, (0, 1)), (2, 1, (0, 1)), (2, 2, (0, 1))]


def test_calls_that_nobody_had_executed_do_not_count_as_recomputed() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([NEG, 1, 0])
    past.standings = [Standing((2, 0), mask_of([0])), Standing((0, 0), 0)]
    past.executed = [(2, 0), (2, 0)]
    found = past.rescue()
    assert again(found) == [(1, 0, (1,)), (2, 0, (0, 1))]
    assert found.recomputed == 1


def test_a_survivor_that_is_behind_runs_what_it_has_not_run_yet() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([NEG, 1, 0], [ADD_, 0, 0], [NEG, 2, 0])
    past.standings = [Standing(END, mask_of([0, 1, 2])), Standing((2, 0b001), mask_of([0, 1]))]  # nobody is lost
    found = past.rescue()
    assert again(found) == [(2, 1, (1,)), (2, 2, (1,))]
    assert copies(found) == set()


def test_calls_done_out_of_order_are_known_one_by_one() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], [UPLOAD, 1, 1], uploads=2)
    past.batch([NEG, 2, 0], [NEG, 3, 1])
    past.standings = [Standing(END, mask_of([0, 1, 2, 3])), Standing((2, 0b10), mask_of([0, 1, 3]))]
    assert again(past.rescue()) == [(2, 0, (1,))]


def test_what_was_torn_is_made_again_also_on_a_survivor() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([NEG, 1, 0])
    past.standings = [Standing(END, mask_of([0])), Standing(END, mask_of([0, 1]))]
    assert again(past.rescue()) == [(2, 0, (0,))]


def test_tensors_that_share_memory_come_from_one_place() -> None:
    """Device 0 holds the tensor but not its view; device 1 must not get one from there and make the other anew."""
    past = History()
    past.lineage.define((define(VIEW, "torch.Tensor.view", 1, WHOLE, aliases=[0]),), ())
    past.batch([UPLOAD_WHOLE, 0, 0], [VIEW, 1, 0], uploads=1)
    past.holds(0)
    found = past.rescue()
    assert copies(found) == {(0, 0, 1)}
    assert again(found) == [(1, 1, (0, 1))]  # the view of what is there, not of another upload


def test_a_copy_that_an_older_version_of_is_needed_too() -> None:
    """1. Slot 1 is made of slot 0. 2. Slot 0 is written. Both are lost; only the written slot 0 has a replica's version."""
    past = History()
    whole = define(ADD_, "torch.Tensor.add_", 2, WHOLE, writes=(0,))
    summed = define(NEG, "torch.neg", 1, WHOLE, to=CUT)
    past.lineage.define((whole, summed), ())
    past.batch([UPLOAD_WHOLE, 0, 0], uploads=1)
    past.batch([NEG, 1, 0], [ADD_, 0, 0])
    past.holds(0, 1)
    found = past.rescue()
    assert (0, 0, 1) in copies(found)
    assert again(found) == [(1, 0, (1,)), (2, 0, (1,))]  # not the write: its outcome was copied


def test_values_under_way_are_read_again_behind_their_batch() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([ADD_, 0, 0], frees=[0])
    past.holds()
    (part,) = past.rescue([(1, Fetch(7, 0, 1, (0, 1)))]).parts
    assert [step.index for step in part.steps] == [0]
    assert [tap.fetch.ticket for tap in part.taps] == [7]
    assert not part.taps[0].lost


def test_data_that_was_not_kept_is_lost_with_all_that_depends_on_it() -> None:
    past = History(Bounds(upload_bytes=5))
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([UPLOAD, 1, 0], uploads=1)  # beyond the bound
    past.batch([NEG, 2, 0], [NEG, 3, 1], [ADD, 4, 2, 3])
    past.holds(0, 1, 2, 3, 4)
    found = past.rescue()
    assert again(found) == [(1, 0, (1,)), (3, 0, (1,))]
    assert found.finals[1].lost == mask_of([1, 3, 4])
    assert {op for _, op in found.lost} == {"dtorch.upload", "torch.neg", "torch.add"}


def test_an_op_that_must_not_be_repeated_is_not() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], uploads=1)
    past.batch([ONCE, 1, 0], [NEG, 2, 1], frees=[1])
    past.holds(0, 2)
    found = past.rescue()
    assert again(found) == [(1, 0, (1,))]
    assert found.finals[1].lost == mask_of([2])
    past.standings[0] = Standing((2, 0), mask_of([0]))
    past.executed = [(2, 0), (2, 0)]  # nobody has begun it: this is its first time
    assert again(past.rescue()) == [(1, 0, (1,)), (2, 0, (0, 1)), (2, 1, (0, 1))]


def test_nothing_runs_again_when_told_so() -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], [UPLOAD_WHOLE, 1, 1], uploads=2)
    past.holds(0, 1)
    past.batch([NEG, 2, 0])
    past.executed = [(2, 0), (2, 0)]
    assert again(past.rescue(redo=Redo.PROVEN)) == [(1, 0, (1,))]
    found = past.rescue(redo=Redo.NONE)
    assert again(found) == []
    assert (found.finals[1].lost, found.finals[1].leaves.keys()) == (mask_of([0, 2]), {1})


# ---- random numbers


def test_numbers_are_drawn_again_from_where_the_batch_began() -> None:
    past = History()
    past.batch([RAND, 0], [RAND, 1], [RAND, 2], frees=[0, 2])
    past.holds(1)
    found = past.rescue(snapshots=frozenset({1}))
    (part,) = found.parts
    assert [(step.index, step.draw) for step in part.steps] == [(0, True), (1, False)]
    assert found.stretch is None
    lost = past.rescue()  # where they stood is not known any more
    assert lost.finals[1].lost == mask_of([1])


def test_draws_that_nobody_has_done_all_happen() -> None:
    past = History()
    past.batch([RAND, 0])
    past.batch([RAND, 1], [RAND, 2], [RAND, 3], frees=[1, 3])
    past.standings = [Standing((2, 0b001), mask_of([0, 1])), Standing((0, 0), 0)]
    past.executed = [(2, 1), (2, 0)]
    found = past.rescue(snapshots=frozenset({1, 2}))
    assert found.stretch == 2
    assert [(step.index, step.draw) for step in found.parts[-1].steps] == [(0, True), (1, False), (2, True)]


def test_a_seed_that_nobody_has_met_begins_the_draws() -> None:
    past = History()
    past.batch([RAND, 0])
    past.lineage.seeded(Seed(1, 5))
    past.batch([RAND, 1])
    past.standings = [Standing((2, 0), mask_of([0])), Standing((0, 0), 0)]
    found = past.rescue(snapshots=frozenset({1}))
    assert found.stretch == 2
    assert found.parts[-1].record.seeds.marks(1) == (Seed(1, 5),)


def test_draws_begin_where_another_stream_has_its_turn() -> None:
    past = History()
    past.lineage.seeded(Seed(1, 5, 1))
    past.batch([RAND, 0])
    past.lineage.seeded(Seed(1, None, 0))
    past.batch()  # only its turn is news
    past.batch([RAND, 1])
    past.standings = [Standing((2, 0), mask_of([0])), Standing((0, 0), 0)]
    found = past.rescue(snapshots=frozenset({1}))
    assert found.stretch == 2
    assert found.parts[1].record.seeds.marks(1) == (Seed(1, None, 0),)


def test_where_nobody_is_left_all_that_was_said_of_the_streams_counts() -> None:
    past = History()
    past.lineage.seeded(Seed(1, 5, 1))
    past.batch([RAND, 0], frees=[0])
    past.lineage.prune(past.seq)
    past.lineage.seeded(Seed(1, 6, 2))
    past.batch([RAND, 1])
    survivor = past.rescue(snapshots=frozenset({2}))
    past.standings = [Standing((0, 0), 0)] * 2
    assert [part.record.seq for part in past.rescue().parts] == [1, 2]
    assert survivor.stretch is None


# ---- programs


def test_a_program_is_one_call_with_all_that_it_captured_and_keeps() -> None:
    past = History()
    inner = msgspec.msgpack.encode(([[ADD_, 0, 1], [NEG, 2, 0]], []))
    past.lineage.define(
        (Definition(20, "dtorch.program", "program", [], {}, (layout(CUT),), (layout(CUT),)),),
        (Program(20, (1,), inner, 3, (1,), (2,), ((0, 8),), ()),),
    )
    past.batch([UPLOAD, 0, 0], [UPLOAD, 8, 1], uploads=2)
    past.batch([20, 1, 0])
    past.holds(0, 1, 8)
    facts = past.lineage.facts(20)
    assert [list(slots) for slots in facts.split([20, 1, 0])] == [[1], [0, 8]]
    assert facts.writes == (1,)
    found = past.rescue()
    assert [(seq, index) for seq, index, _ in again(found)] == [(1, 0), (1, 1), (2, 0)]
    assert found.finals[1].redone == mask_of([0, 1, 8])


@pytest.mark.parametrize("lost", [0, 1])
def test_places_are_told_apart(lost: int) -> None:
    past = History()
    past.batch([UPLOAD, 0, 0], [GATHER, 1, 0], uploads=1)
    past.standings = [Standing((0, 0), 0) if p == lost else Standing(END, -1) for p in (0, 1)]
    found = past.rescue()
    assert again(found) == [(1, 0, (lost,))]
    assert copies(found) == {(1, 1 - lost, lost)}
    assert replace(found.finals[1 - lost], leaves={}).redone == 0
