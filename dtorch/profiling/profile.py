"""``with dtorch.profile("trace.json"):`` notes who does what and when: the client, its controller, each device."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from dtorch.failures import SignatureFacts, describe
from dtorch.lines import place as line_place
from dtorch.profiling import timeline
from dtorch.profiling.lanes import lanes_svg
from dtorch.profiling.timeline import Call, DeviceTime, Event, OpTime
from dtorch.runtime import promise
from dtorch.runtime.positions import locate
from dtorch.runtime.tracing import Spans
from dtorch.session import Session, current_session
from dtorch.transport.errors import DTorchError
from dtorch.transport.messages import Trace

MAX_EVENTS = 200_000
"""Events kept of each process by default, about 100 bytes each while they are noted."""
NUM_CLOCK_SAMPLES = 5
GIVE_UP_S = 10.0
"""How long the end of a block that raised waits for the workers."""

_active = threading.Lock()  # held while a profile runs


class profile:
    """Notes what the client, its controller and the workers do inside a ``with`` or ``async with`` block.

    The end of the block waits until the work recorded in it is done. Then the profile can be printed (a summary), read
    (``events``) and opened in https://ui.perfetto.dev or chrome://tracing (the file). Outside such a block nothing is noted.

        with dtorch.profile("trace.json") as prof:
            step()
        print(prof)

    Args:
        path: file to write, compressed when its name ends in ".gz"; None writes none.
        max_events: events kept of each process; what comes later is only counted (``dropped``).

    Attributes:
        events: everything noted, by start. Times are in microseconds since the block began; workers' clocks are put on the
            client's. On CUDA devices they are the device's own, of its stream.
        duration_us: of the block, until all its work was done.
        dropped: events beyond the bound.

    Raises:
        RuntimeError: a profile is under way already.
        FileNotFoundError: the folder of ``path`` does not exist.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, max_events: int = MAX_EVENTS) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None and not self._path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{self._path}: there is no folder {self._path.absolute().parent} to write the trace into")
        if max_events < 1:
            raise ValueError(f"max_events={max_events!r} must be at least 1")
        self._max_events = max_events
        self._session: Session | None = None
        self._spans = Spans(max_events)
        self._origin_ns = 0
        self._facts: dict[int, SignatureFacts] = {}
        self.events: list[Event] = []
        self.duration_us = 0.0
        self.dropped = 0

    # ---- the block

    def __enter__(self) -> profile:
        session = current_session()
        if not _active.acquire(blocking=False):
            raise RuntimeError("a profile is under way already: end it before you begin another")
        try:
            self._spans = Spans(self._max_events)
            self._facts = session.known_signatures
            session.start_trace(self._spans, self._max_events)
        except BaseException:
            _active.release()
            raise
        self._session = session
        self._origin_ns = perf_counter_ns()
        spans = self._spans
        promise.watcher = lambda kind, began: spans.add("client", kind, began)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        session, timeout_s = self._leave(), None if error is None else GIVE_UP_S
        traces: tuple[Trace, ...] = ()
        samples = []
        try:
            traces = session.ask_trace(stop=True).result(timeout_s)
            self._over()
            for _ in range(NUM_CLOCK_SAMPLES):
                asked = perf_counter_ns()
                samples.append((asked, session.ask_trace(stop=False).result(timeout_s), perf_counter_ns()))
        except (DTorchError, TimeoutError):
            if error is None and session.is_open:
                raise
        finally:
            self._finish(session, traces, samples)

    async def __aenter__(self) -> profile:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        session = self._leave()
        traces: tuple[Trace, ...] = ()
        samples = []
        try:
            traces = await session.ask_trace(stop=True)
            self._over()
            for _ in range(NUM_CLOCK_SAMPLES):
                asked = perf_counter_ns()
                samples.append((asked, await session.ask_trace(stop=False), perf_counter_ns()))
        except DTorchError:
            if error is None and session.is_open:
                raise
        finally:
            self._finish(session, traces, samples)

    def _leave(self) -> Session:
        session = self._session
        if session is None:
            raise RuntimeError("this profile was not begun")
        self._session = None
        promise.watcher = None
        _active.release()
        return session

    def _over(self) -> None:
        self.duration_us = (perf_counter_ns() - self._origin_ns) / 1e3

    def _finish(
        self, session: Session, traces: Sequence[Trace], samples: Sequence[tuple[int, tuple[Trace, ...], int]]
    ) -> None:
        session.recorder.spans = session.thread.spans = None
        if not self.duration_us:
            self._over()
        reader = _Calls(self._spans, {**session.known_signatures, **self._facts}, session.program_lines)
        events = list(timeline.span_events(self._spans.spans, self._origin_ns))
        for trace in traces:
            times = [(a, t.clock_ns, b) for a, answers, b in samples for t in answers if t.worker == trace.worker]
            offset = timeline.clock_offset_ns(times) if times else 0
            events += timeline.worker_events(trace, offset, self._origin_ns, reader.call)
        self.events = sorted(events, key=lambda e: e.start_us)
        self.dropped = self._spans.dropped + sum(trace.dropped for trace in traces)
        if self._path is not None:
            self.save(self._path)

    # ---- what came of it

    @property
    def ops(self) -> list[OpTime]:
        """Ops by total time over all devices, the longest first."""
        return timeline.op_times(self.events)

    @property
    def devices(self) -> list[DeviceTime]:
        """How busy each device was, and with what."""
        return timeline.device_times(self.events, self.duration_us)

    def summary(self, num_ops: int = 10) -> str:
        """Top ops, busy shares of the devices, the client and the controller, as text."""
        if not self.duration_us:
            return "a profile that has not ended yet"
        return timeline.summary(self.events, self.duration_us, num_ops, self.dropped)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<profile of {self.duration_us / 1e3:.1f} ms, {len(self.events)} events>"

    def _repr_html_(self) -> str:
        return lanes_svg(self.events, self.duration_us)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace file; an existing file is replaced when the new one is complete."""
        notes = {"tool": "dtorch", "duration_us": self.duration_us, "dropped": self.dropped}
        data = json.dumps(timeline.chrome_trace(self.events, notes)).encode()
        target = Path(path)
        draft = target.with_name(target.name + ".new")
        draft.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
        draft.replace(target)


class _Calls:
    """What is known of calls, by batch and position."""

    def __init__(self, spans: Spans, facts: dict[int, SignatureFacts], programs: dict[int, list[Any]]) -> None:
        self._chunks, self._facts, self._programs = spans.chunks, facts, programs
        self._described: dict[int, tuple[str, str]] = {}
        self._lines: dict[tuple[Any, int], str] = {}

    def call(self, seq: int, call: int, inner: int, sig: int) -> Call:
        chunk, at = self._chunks.get(seq, []), call
        if inner >= 0 and 0 <= 3 * call < len(chunk):
            inside = self._programs.get(chunk[3 * call][0])
            if inside is not None:
                chunk, at = inside, inner
        line = self._line(chunk[3 * at + 1], chunk[3 * at + 2]) if 0 <= 3 * at < len(chunk) else ""
        op, shapes = self._describe(sig)
        return Call(op, shapes, line)

    def _describe(self, sig: int) -> tuple[str, str]:
        found = self._described.get(sig)
        if found is None:
            facts = self._facts.get(sig)
            if facts is None:
                found = (f"signature {sig}", "")
            else:
                sides = [", ".join(map(describe, side)) for side in (facts.inputs, facts.outputs)]
                found = (facts.op, " -> ".join(sides))
            self._described[sig] = found
        return found

    def _line(self, code: Any, offset: int) -> str:
        key = (code, offset)
        found = self._lines.get(key)
        if found is None:
            place = locate(code, offset)
            found = self._lines[key] = "" if place is None else line_place(*place)
        return found
