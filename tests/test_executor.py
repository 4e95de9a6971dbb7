"""A worker fed by hand: messages in, messages out, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from dtorch.runtime.poison import Poison
from dtorch.runtime.rewrite.free_early import FREE_BYTES
from dtorch.runtime.worker import Worker
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import (
    AskRandomState,
    AskStatistics,
    Batch,
    Blob,
    Define,
    Definition,
    Done,
    Failure,
    Fetch,
    FromWorker,
    Layout,
    MeshInfo,
    RandomState,
    Seed,
    Statistics,
    Stop,
    Value,
)

NO_MEMORY = "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


def _no_memory(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(NO_MEMORY)


def _pick(x: torch.Tensor, number: int) -> torch.Tensor:
    return x[number]


TABLE: dict[str, Callable[..., Any]] = {
    "neg": torch.neg,
    "add": torch.add,
    "mul": torch.mul,
    "add_": torch.Tensor.add_,
    "pick": _pick,
    "no_memory": _no_memory,
}
UPLOAD, NEG, ADD, SCALE, ADD_IN_PLACE, PICK, NO_MEMORY_OP, MOVE, SUM = range(1, 10)
REPLICATED, SHARDED, PARTIAL = -1, 0, -2


class Bench:
    """A worker that hosts devices 0 and 1 of mesh 1, with a few signatures of tensors of ``shape``."""

    def __init__(self, shape: tuple[int, ...] = (4,)) -> None:
        self.said: list[FromWorker] = []
        self.worker = Worker(0, {}, TABLE.__getitem__, self._no_group, self.said.append)
        self.shape = shape
        self.seq = 0
        whole = Layout(1, shape, "float32", (REPLICATED,))
        cut = Layout(1, shape, "float32", (SHARDED,))
        pending = Layout(1, shape, "float32", (PARTIAL,))
        scalar = Layout(1, shape[1:], "float32", (REPLICATED,))
        one, two, number = [["t", 0]], [["t", 0], ["t", 1]], [["t", 0], ["n", 0]]
        self.tell(
            Define(
                1,
                (MeshInfo(1, "cpu", (2,), (0, 1), (0, 0)),),
                (
                    Definition(UPLOAD, "dtorch.upload", "upload", [["n", 0]], {}, (), (whole,)),
                    Definition(NEG, "neg", "local", one, {}, (whole,), (whole,)),
                    Definition(ADD, "add", "local", two, {}, (whole, whole), (whole,)),
                    Definition(SCALE, "mul", "local", number, {}, (whole,), (whole,)),
                    Definition(ADD_IN_PLACE, "add_", "local", two, {}, (whole, whole), (whole,), (0,)),
                    Definition(PICK, "pick", "local", number, {}, (whole,), (scalar,)),
                    Definition(NO_MEMORY_OP, "no_memory", "local", one, {}, (whole,), (whole,)),
                    Definition(MOVE, "dtorch.redistribute", "redistribute", [], {}, (whole,), (cut,)),
                    Definition(SUM, "dtorch.redistribute", "redistribute", [], {}, (pending,), (whole,)),
                ),
            )
        )

    @staticmethod
    def _no_group(*_: Any) -> Any:
        raise AssertionError("one worker alone needs no group")

    def tell(self, message: Any) -> list[FromWorker]:
        """What the worker says to it."""
        self.said.clear()
        self.worker.handle(message)
        return list(self.said)

    def run(
        self, *calls: list[Any], frees: list[int] | None = None, data: list[list[float]] | None = None,
        fetch: list[int] | None = None, body: bytes | None = None,
    ) -> list[FromWorker]:
        self.seq += 1
        encoded = body or msgspec.msgpack.encode([list(calls), [[1, frees]] if frees else []])
        uploads = tuple(Blob(torch.tensor(values).numpy().tobytes()) for values in data or [])
        fetches = tuple(Fetch(slot, slot, 1, (0, 1)) for slot in fetch or [])
        said = self.tell(Batch(1, self.seq, (1,), encoded, uploads, fetches))
        done = said[-1]
        assert isinstance(done, Done)
        assert done.seq == self.seq
        return [*said[:-1], *done.values]

    def value(self, slot: int) -> list[list[float]]:
        """What both devices hold."""
        (value,) = self.run(fetch=[slot])
        assert isinstance(value, Value)
        assert value.error is None
        return [torch.frombuffer(bytearray(piece.data or b""), dtype=torch.float32).tolist() for piece in value.pieces]

    def held(self, slot: int) -> Any:
        return self.worker._sessions[1].held(slot, ("cpu", 0))


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.run([UPLOAD, 0, 0], data=[[1.0, 2.0, 3.0, 4.0]])
    return made


def failures(said: list[FromWorker]) -> list[Failure]:
    return [message for message in said if isinstance(message, Failure)]


def test_calls_run_in_order(bench: Bench) -> None:
    bench.run([NEG, 1, 0], [ADD, 2, 0, 1], [SCALE, 3, 0, 10], [ADD, 4, 3, 2])
    assert bench.value(2) == [[0.0] * 4] * 2
    assert bench.value(4) == [[10.0, 20.0, 30.0, 40.0]] * 2


def test_redistribution_between_hosted_devices(bench: Bench) -> None:
    bench.run([MOVE, 1, 0])
    assert bench.value(1) == [[1.0, 2.0], [3.0, 4.0]]


def test_in_place_writes_are_seen(bench: Bench) -> None:
    bench.run([NEG, 1, 0], [ADD_IN_PLACE, 0, 0], [ADD, 2, 0, 1])
    assert bench.value(0) == [[2.0, 4.0, 6.0, 8.0]] * 2
    assert bench.value(2) == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_a_failed_call_poisons_what_depends_on_it_and_nothing_else(bench: Bench) -> None:
    said = bench.run([NO_MEMORY_OP, 1, 0], [NEG, 2, 1], [ADD, 3, 0, 2], [NEG, 4, 0])
    found = failures(said)
    assert {(f.seq, f.index, f.kind, f.text) for f in found} == {(bench.seq, 0, "RuntimeError", NO_MEMORY)}
    assert all(f.trace.startswith("Traceback") for f in found)
    assert bench.value(4) == [[-1.0, -2.0, -3.0, -4.0]] * 2
    for slot in (1, 2, 3):
        (value,) = bench.run(fetch=[slot])
        assert isinstance(value, Value)
        assert value.error in {f.error for f in found}
        assert value.pieces == ()


def test_poison_goes_through_communication_and_in_place_writes(bench: Bench) -> None:
    said = bench.run([NO_MEMORY_OP, 1, 0], [MOVE, 2, 1], [ADD_IN_PLACE, 0, 1])
    assert {f.index for f in failures(said)} == {0}
    assert isinstance(bench.held(2), Poison)
    assert isinstance(bench.held(0), Poison)


def test_a_poisoned_slot_is_used_again(bench: Bench) -> None:
    bench.run([NO_MEMORY_OP, 1, 0], frees=[1])
    bench.run([NEG, 1, 0])
    assert bench.value(1) == [[-1.0, -2.0, -3.0, -4.0]] * 2


def test_an_index_out_of_range(bench: Bench) -> None:
    said = bench.run([PICK, 1, 0, 7], [NEG, 2, 0], [PICK, 3, 0, 2])
    found = failures(said)
    assert {(f.index, f.kind) for f in found} == {(0, "IndexError")}
    assert "out of bounds" in found[0].text
    assert bench.value(3) == [[3.0]] * 2


def test_the_same_bytes_find_their_plan_from_the_third_time_on(bench: Bench) -> None:
    for _ in range(4):
        bench.run([NEG, 1, 0], frees=[1])
    (answer,) = bench.tell(AskStatistics(1, 5, False, False))
    assert isinstance(answer, Statistics)
    assert answer.counters["plan_hits"] == 2
    assert answer.counters["batches"] == 5
    assert answer.memory == ()


def test_freed_slots_are_empty_at_the_end_of_the_batch(bench: Bench) -> None:
    bench.run([NEG, 1, 0], [ADD, 2, 1, 1], frees=[1])
    assert bench.held(1) is None
    assert bench.value(2) == [[-2.0, -4.0, -6.0, -8.0]] * 2


def test_large_tensors_are_forgotten_after_their_last_use() -> None:
    """While the last call runs, the large tensor that only the first one needed is gone already."""
    bench = Bench((FREE_BYTES,))
    alive: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(bench.held(1) is not None)
        return torch.neg(x)

    bench.run([UPLOAD, 0, 0], data=[[1.0] * FREE_BYTES])
    definition = Definition(50, "look", "local", [["t", 0]], {}, *[(Layout(1, bench.shape, "float32", (-1,)),)] * 2)
    TABLE["look"] = look
    try:
        bench.tell(Define(1, (), (definition,)))
        bench.run([NEG, 1, 0], [50, 2, 1], [50, 3, 2], frees=[1])
    finally:
        del TABLE["look"]
    assert alive[0]
    assert not any(alive[-1:])


def test_devices_end_their_work_before_an_answer_that_is_to_wait_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        assert not bench.said
        waited.append(device)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(bench.worker._sessions[1], "device_of", lambda place: torch.device("cuda", place[1]))
    bench.tell(AskStatistics(1, 5, False, False))
    assert waited == []
    bench.tell(AskStatistics(1, 6, False, False, idle=True))
    assert sorted(device.index for device in waited) == [0, 1]


def test_memory_is_told_when_it_is_asked_for(bench: Bench) -> None:
    (answer,) = bench.tell(AskStatistics(1, 5, True, False))
    assert isinstance(answer, Statistics)
    assert [(m.kind, m.device, m.allocated) for m in answer.memory] == [("cpu", 0, 16), ("cpu", 1, 16)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xc1", "not what it should be"),
        (msgspec.msgpack.encode([[[99, 1, 0]], []]), "unknown signature"),
        (msgspec.msgpack.encode([[[NEG, 1]], []]), "does not fit its definition"),
        (msgspec.msgpack.encode([[[NEG, 1, -5]], []]), "does not fit its definition"),
        (msgspec.msgpack.encode([[[NEG, 1, 1 << 30]], []]), "does not fit its definition"),
        (msgspec.msgpack.encode([[], [[7, [0]]]]), "unknown mesh"),
    ],
)
def test_a_batch_that_cannot_be_right_is_refused(bench: Bench, body: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        bench.run(body=body)
    assert bench.value(0) == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_a_definition_of_an_unknown_op_is_refused(bench: Bench) -> None:
    layout = Layout(1, (4,), "float32", (-1,))
    bench.tell(Define(1, (), (Definition(60, "os.system", "local", [["t", 0]], {}, (layout,), (layout,)),)))
    with pytest.raises(ProtocolError, match=r"no op 'os\.system' in the table"):
        bench.run([60, 1, 0])


def test_generators_are_seeded_and_handed_over(bench: Bench) -> None:
    state = torch.get_rng_state()
    try:
        bench.tell(Seed(1, 3))
        (answer,) = bench.tell(AskRandomState(1, 8))
        assert isinstance(answer, RandomState)
        expected = torch.rand(3)
        assert bench.tell(answer) == []
        assert torch.equal(torch.rand(3), expected)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(3), expected)
    finally:
        torch.set_rng_state(state)


def test_stop(bench: Bench) -> None:
    assert bench.tell(Stop()) == []
    assert bench.worker.stopped
