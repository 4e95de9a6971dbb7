"""Profiles: what is noted, on whose clock, how it is summed up, and that a trace file holds it."""

from __future__ import annotations

import asyncio
import gzip
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.profiling import timeline
from dtorch.profiling.timeline import Call, Event, clock_offset_ns, covered_us
from dtorch.runtime import promise, tracing
from dtorch.runtime.tracing import COMPUTE, DeviceClock, Spans, Tracer
from dtorch.session import current_session
from dtorch.transport.messages import Trace

MESH = DeviceMesh("cpu", [0, 1])


def test_a_clock_that_may_be_ours_is_ours_and_the_quickest_answer_is_believed() -> None:
    assert clock_offset_ns([(100, 150, 200), (300, 310, 320)]) == 0
    assert clock_offset_ns([(100, 9_000, 10_000), (300, 5_310, 320)]) == 5_000
    assert clock_offset_ns([(0, -1_000_000, 10)]) == -1_000_005


def test_time_covered_counts_overlaps_once() -> None:
    events = [Event("worker 0", "cpu:0 compute", "compute", "f", at, 10.0) for at in (0.0, 5.0, 30.0)]
    assert covered_us(events) == 25.0
    assert covered_us([]) == 0.0


def test_a_tracer_is_bounded_and_counts_the_rest() -> None:
    tracer = Tracer(2, lambda _: torch.device("cpu"))
    tracer.seq, tracer.sigs = 7, (11, 12)
    for call in range(5):
        tracer.add(COMPUTE, 0, call % 2, 100, 130)
    message = tracer.report(1, 5, 3, [("cpu", 4)])
    assert (message.ticket, message.worker, message.dropped) == (5, 3, 3)
    numbers = array("q")
    numbers.frombytes(message.events)
    assert numbers.tolist() == [COMPUTE, 0, 7, 0, -1, 11, 100, 30, 0, COMPUTE, 0, 7, 1, -1, 12, 100, 30, 0]


def test_an_instruction_that_raises_is_timed_like_the_others() -> None:
    tracer = Tracer(10, lambda _: torch.device("cpu"))
    code = [("a",), ("b",), ("c",)]
    rest = tracer.timed(iter(code), 0, [4, 5, 6], COMPUTE)
    seen = []
    while True:
        try:
            for (name,) in rest:
                seen.append(name)
                if name == "b":
                    raise ValueError
            break
        except ValueError:
            assert len(code) - rest.__length_hint__() - 1 == 1  # how the executor finds what raised
    assert seen == ["a", "b", "c"]
    assert [tracer._events[i + 3] for i in range(0, len(tracer._events), tracing.FIELDS)] == [4, 5, 6]


class _FakeEvent:
    """A CUDA event on a device that reaches each mark 1.5 ms after the one before."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms = 1.5 * _FakeEvent.made
        _FakeEvent.made += 1

    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, later: _FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_a_devices_marks_are_put_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(tracing, "perf_counter_ns", lambda: 1_000)
    clock = DeviceClock(_FakeEvent, torch.device("cuda", 0))
    first, second = clock.mark(), clock.mark()
    assert (clock.host_ns(first), clock.host_ns(second)) == (1_501_000, 3_001_000)


def test_workers_numbers_become_events_on_the_clients_clock() -> None:
    numbers = array("q", [COMPUTE, 0, 7, 1, -1, 12, 6_000, 2_000, 0, tracing.BATCH, -1, 7, -1, -1, 0, 5_500, 4_000, 0])
    trace = Trace(1, 1, 2, 0, (("cpu", 3),), numbers.tobytes(), 0)
    op, batch = timeline.worker_events(trace, 1_000, 2_000, lambda *call: Call(f"op of {call}", "shapes", "file:1"))
    assert op == Event("worker 2", "cpu:3 compute", "compute", "op of (7, 1, -1, 12)", 3.0, 2.0, "shapes", "file:1", 0, 7)
    assert (op.device, batch.device) == ("cpu:3", "")
    assert (batch.row, batch.name, batch.start_us, batch.duration_us) == ("batches", "batch 7", 2.5, 4.0)


def test_a_trace_has_a_process_a_lane_a_thread_a_row_and_arrows_between() -> None:
    events = [
        Event("client", "MainThread", "record", "record", 0.0, 10.0, batch=1, details={"calls": 2}),
        Event("client", "MainThread", "await", "await", 5.0, 30.0),
        Event("worker 0", "batches", "batch", "batch 1", 20.0, 10.0, batch=1),
        Event("worker 0", "cpu:0 communication", "communication", "torch.add", 21.0, 5.0, bytes=64, batch=1),
        Event("worker 0", "cpu:0 compute", "compute", "torch.add", 26.0, 2.0, shapes="s", line="f:1", batch=1),
    ]
    trace = timeline.chrome_trace(events, {"tool": "dtorch"})
    rows = trace["traceEvents"]
    names = {r["args"]["name"]: r["tid"] for r in rows if r["name"] == "thread_name"}
    assert list(names) == ["MainThread", "batches", "cpu:0 compute", "cpu:0 communication"]
    assert [r["args"]["name"] for r in rows if r["name"] == "process_name"] == ["client", "worker 0"]
    compute = next(r for r in rows if r["ph"] == "X" and r.get("tid") == names["cpu:0 compute"])
    assert (compute["ts"], compute["dur"]) == (26.0, 2.0)
    assert compute["args"] == {"shapes": "s", "line": "f:1", "batch": 1}
    assert [r["ph"] for r in rows if r["ph"] in "sfbe"] == ["b", "e", "s", "f"]
    assert json.loads(json.dumps(trace)) == trace


def test_spans_past_the_bound_are_counted() -> None:
    spans = Spans(1)
    spans.add("client", "send", 0)
    spans.add("client", "send", 0)
    spans.keep(1, [0] * 9)
    spans.keep(2, [0] * 9)
    assert (len(spans.spans), spans.dropped, list(spans.chunks)) == (1, 1, [1])


def _work(x: dtorch.Tensor, w: dtorch.Tensor) -> dtorch.Tensor:
    whole = (x @ w).redistribute(placements=[Replicate()])
    return whole.sum()


def test_a_profile_shows_every_lane_with_ops_shapes_lines_and_bytes(tmp_path: Path) -> None:
    x = dtorch.Tensor(torch.ones(8, 4), device_mesh=MESH, placements=[Shard(0)])
    w = dtorch.Tensor(torch.ones(4, 4), device_mesh=MESH, placements=[Replicate()])
    replayed = dtorch.compile(_work)
    replayed(x, w)
    path = tmp_path / "trace.json"
    with dtorch.profile(path) as prof:
        assert _work(x, w).item() == 128.0
        assert replayed(x, w).item() == 128.0
    assert current_session().recorder.spans is None
    assert promise.watcher is None
    lanes = {e.lane.partition(" ")[0] for e in prof.events}
    assert lanes == {"client", "controller", "worker"}
    ops = [e for e in prof.events if e.kind == "compute" and e.name == "torch.matmul"]
    assert len(ops) == 4  # two devices, once recorded and once replayed
    assert {e.device for e in ops} == {"cpu:0", "cpu:1"}
    line = _work.__code__.co_firstlineno + 1
    for op in ops:
        assert op.line == f"{__file__}:{line}"
        assert op.shapes.startswith("float32[8, 4] on [Shard(dim=0)], float32[4, 4]")
    sent = [e for e in prof.events if e.kind == "communication"]
    assert sum(e.bytes for e in sent) == 4 * (4 * 4 * 4)  # half of 8 x 4 floats from each device, twice
    assert all(e.start_us >= 0 and e.end_us <= prof.duration_us for e in prof.events if e.device)
    waits = [e for e in prof.events if e.kind == "wait"]
    assert {"record", "send"} <= {e.kind for e in prof.events if e.lane == "client"}
    assert len(waits) >= 2
    assert 0 < prof.devices[0].busy <= 1
    text = str(prof)
    for part in ("torch.matmul", "communication", "cpu:1", "client: record", "controller: busy"):
        assert part in text
    written = json.loads(path.read_text())
    assert len([r for r in written["traceEvents"] if r["ph"] == "X"]) == len(prof.events)
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_in_async_code_is_one_at_a_time_and_ends_with_its_block(tmp_path: Path) -> None:
    x = dtorch.Tensor(torch.ones(4), device_mesh=MESH, placements=[Shard(0)])

    async def run() -> dtorch.profile:
        async with dtorch.profile(tmp_path / "t.json.gz", max_events=3) as prof:
            with pytest.raises(RuntimeError, match="under way already"):
                dtorch.profile().__enter__()
            y = x
            for _ in range(10):
                y = y + x
            assert (await y).tolist() == [11.0] * 4
        return prof

    prof = asyncio.run(run())
    assert prof.dropped > 0
    assert "raise max_events" in str(prof)
    json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    with pytest.raises(ZeroDivisionError), dtorch.profile() as after:
        raise ZeroDivisionError
    assert after.duration_us > 0


def test_what_a_profile_cannot_do_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        dtorch.profile(tmp_path / "none" / "t.json")
    with pytest.raises(ValueError, match="at least 1"):
        dtorch.profile(max_events=0)
    assert str(dtorch.profile()) == "a profile that has not ended yet"
    with pytest.raises(RuntimeError, match="not begun"):
        dtorch.profile().__exit__(None, None, None)
