"""What is remembered, and what may be forgotten. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dtorch.runtime.lineage import Bounds, Lineage, bits, count_calls, mask_of
from dtorch.transport.messages import Blob, Definition, Layout, Seed, SharedBlob

PIECE = Layout(1, (4,), "float32", (0,))


def define(sig: int, op: str, num_inputs: int, **more: Any) -> Definition:
    kernel, writes = more.pop("kernel", "local"), more.pop("writes", ())
    return Definition(sig, op, kernel, [], {}, (PIECE,) * num_inputs, (PIECE,), writes, more)


UPLOAD, NEG, ADD_, VIEW, RAND = range(1, 6)
TABLE = (
    define(UPLOAD, "dtorch.upload", 0, kernel="upload"),
    define(NEG, "torch.neg", 1),
    define(ADD_, "torch.Tensor.add_", 1, writes=(0,)),
    define(VIEW, "torch.Tensor.view", 1, aliases=[0]),
    define(RAND, "torch.rand", 0, kernel="random", random=True),
)


class Past:
    def __init__(self, bounds: Bounds | None = None) -> None:
        self.lineage = Lineage(bounds or Bounds())
        self.lineage.define(TABLE, ())
        self.seq = 0

    def batch(self, *calls: list[int], frees: list[int] | None = None, uploads: tuple[Any, ...] = ()) -> None:
        self.seq += 1
        self.lineage.add(self.seq, msgspec.msgpack.encode((calls, [(1, frees)] if frees else [])), uploads)

    def kept(self) -> list[int]:
        return [record.seq for record in self.lineage.records if record.entry is not None]


def test_masks() -> None:
    assert list(bits(mask_of([3, 0, 77]))) == [0, 3, 77]
    assert mask_of([]) == 0


@pytest.mark.parametrize("num", [0, 1, 15, 16, 70000])
def test_calls_are_counted_without_decoding(num: int) -> None:
    assert count_calls(msgspec.msgpack.encode(([[1]] * num, []))) == num


def test_equal_bodies_are_kept_once() -> None:
    past = Past()
    for _ in range(100):
        past.batch([NEG, 1, 0], [NEG, 0, 1])
    assert past.lineage.size_bytes == len(msgspec.msgpack.encode(([[NEG, 1, 0], [NEG, 0, 1]], [])))
    assert past.lineage.num_calls == 200


def test_batches_that_came_to_nothing_are_dropped() -> None:
    past = Past()
    past.batch([UPLOAD, 0, 0], uploads=(Blob(b"1234"),))
    past.batch([UPLOAD, 1, 0], uploads=(Blob(b"1234"),))
    past.batch([NEG, 2, 1], frees=[1])
    past.batch([NEG, 3, 0], frees=[2])
    past.lineage.prune(past.seq)
    assert past.kept() == [1, 4]
    assert past.lineage.upload_bytes == 4


def test_what_is_not_finished_stays_with_all_that_it_reads() -> None:
    past = Past()
    past.batch([UPLOAD, 0, 0], uploads=(Blob(b"1234"),))
    past.batch([NEG, 1, 0], frees=[0])
    past.batch([NEG, 2, 1], frees=[1, 2])
    past.lineage.prune(2)
    assert past.kept() == [1, 2, 3]
    past.lineage.prune(3)
    assert past.kept() == []


def test_a_write_through_a_view_keeps_its_batch() -> None:
    past = Past()
    past.batch([UPLOAD, 0, 0], uploads=(Blob(b"1234"),))
    past.batch([VIEW, 1, 0])
    past.batch([ADD_, 1], frees=[1])
    past.batch([UPLOAD, 2, 0], uploads=(Blob(b"1234"),))
    past.batch([ADD_, 2], frees=[2])
    past.lineage.prune(past.seq)
    assert past.kept() == [1, 2, 3]


def test_frees_of_dropped_batches_are_remembered() -> None:
    past = Past()
    past.batch([UPLOAD, 0, 0], [UPLOAD, 1, 0], uploads=(Blob(b"1234"),))
    past.batch([NEG, 2, 1])
    past.batch([NEG, 3, 0], frees=[0, 2, 3])
    past.lineage.prune(past.seq)
    past.lineage.prune(past.seq)
    alive = past.lineage.front.copy()
    for record in past.lineage.records:
        if record.entry is None:
            alive.free(record.frees)
        else:
            alive.apply(past.lineage.summary(record.entry))
    assert sorted(alive.layouts) == [1]


def test_beyond_the_bounds_the_oldest_is_forgotten_but_not_that_it_is_there() -> None:
    past = Past(Bounds(calls=64))
    past.batch([UPLOAD, 0, 0], uploads=(Blob(b"1234"),))
    past.batch([UPLOAD, 9, 0], uploads=(Blob(b"1234"),))
    for _ in range(100):
        past.batch([NEG, 1, 0], frees=[0])
        past.batch([NEG, 0, 1], frees=[1])
        if past.lineage.is_full:
            past.lineage.prune(past.seq)
    assert past.lineage.num_calls <= 64
    assert past.lineage.front.layouts.keys() == {0, 9}
    assert past.lineage.front.ops[9] == "dtorch.upload"


def test_uploads_beyond_the_bound_are_not_kept() -> None:
    past = Past(Bounds(upload_bytes=10))
    past.batch([UPLOAD, 0, 0], uploads=(SharedBlob(1, 2, 0, 8),))
    past.batch([UPLOAD, 1, 0], uploads=(SharedBlob(1, 2, 0, 8),))
    assert [record.uploads is None for record in past.lineage.records] == [False, True]
    assert past.lineage.upload_bytes == 8


def test_a_million_calls_keep_the_memory_flat() -> None:
    """Bodies all differ; every value but one comes to nothing, or all of them hang together: both stay within bounds."""
    for chained in (False, True):
        past = Past(Bounds(calls=4096, size_bytes=1 << 20))
        past.batch([UPLOAD, 0, 0], uploads=(Blob(b"1234"),))
        most = 0
        for i in range(1000):
            slot = 10 + i % 7
            calls = [[NEG, slot, 0, i * 1000 + k] for k in range(1000)]
            if chained:
                calls.append([ADD_, 0, i])
            past.batch(*calls, frees=[slot])
            if past.lineage.is_full:
                past.lineage.prune(past.seq - 1)
            most = max(most, past.lineage.num_calls)
        assert most <= 4096 + 2 * 1001
        assert past.lineage.size_bytes <= 1 << 20
        assert len(past.lineage.records) < 600


def test_a_seed_outlives_its_batch() -> None:
    past = Past()
    past.batch([UPLOAD, 0, 0], uploads=(Blob(b"1234"),))
    past.lineage.seeded(Seed(1, 7))
    past.batch([NEG, 1, 0], frees=[1])
    past.batch([NEG, 1, 0])
    past.lineage.prune(past.seq)
    assert past.kept() == [1, 3]
    assert [record.seq for record in past.lineage.records if record.seeds is not None] == [2]
    assert past.lineage.draws_are_known({0})


def test_whether_numbers_follow_from_seeds_is_told_stream_by_stream() -> None:
    past = Past()
    lineage = past.lineage
    for stream in (0, 1, 2):
        lineage.seeded(Seed(1, 7 + stream, stream))
        past.batch([RAND, stream], frees=[stream] if stream else None)
    assert lineage.draws_are_known({0, 1, 2})
    lineage.prune(past.seq)  # the draws from streams 1 and 2 came to nothing
    assert past.kept() == [1]
    assert lineage.draws_are_known({0})
    assert not lineage.draws_are_known({0, 1})
    lineage.seeded(Seed(1, 9, 1))
    assert lineage.draws_are_known({0, 1})
    lineage.seeded(Seed(1, None, 2))
    past.batch([RAND, 3])
    assert not lineage.draws_are_known({0, 1})  # what is in slot 3 cannot be drawn again


def test_seeds_beyond_the_bounds_are_summed_up() -> None:
    past = Past(Bounds(calls=64))
    for number in range(100):
        past.lineage.seeded(Seed(1, number, number, (number - 1,) if number else ()))
        past.batch([RAND, number])
    past.lineage.prune(past.seq)
    front = past.lineage.seeds
    assert (front.seeds, len(front.drawn), front.ended) == ({}, 1, set())
    assert past.lineage.draws_are_known({99})


def test_definitions_that_batches_call_survive_a_forget() -> None:
    past = Past()
    past.batch([UPLOAD, 0, 0], uploads=(Blob(b"1234"),))
    past.lineage.forget(100)
    assert past.lineage.definitions.keys() == {UPLOAD}
