"""What a profile means: rows of numbers become events, events become tables and a trace file. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtorch.runtime.tracing import (
    BATCH,
    COMMUNICATION,
    COMPUTE,
    COPY,
    FIELDS,
    KINDS,
    PLAN,
    Span,
)
from dtorch.transport.messages import Trace


@dataclass(frozen=True)
class Call:
    """What is known of a recorded call.

    Attributes:
        op: name of the op.
        shapes: of its inputs and, after "->", outputs: dtype, global shape and placements.
        line: "file:line" of the user's code.
    """

    op: str
    shapes: str = ""
    line: str = ""


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        lane: "client", "controller" or "worker 0".
        row: a thread, "batches", or a device and what it does: "cpu:0 compute", "cpu:0 communication", "cpu:0 copy".
        kind: "compute", "communication", "copy", "free", "plan", "batch" in workers; in the client "record", "send", "wait",
            "await", "wait for room"; in the controller the message it worked on.
        name: of the op where there is one, else the kind.
        start_us: since the profile began.
        bytes: moved to or from other devices, or in a message.
        batch: number of the batch; 0 where there is none.
    """

    lane: str
    row: str
    kind: str
    name: str
    start_us: float
    duration_us: float
    shapes: str = ""
    line: str = ""
    bytes: int = 0
    batch: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def device(self) -> str:
        """Such as "cpu:0"; "" for what no device does."""
        first = self.row.partition(" ")[0]
        return first if self.lane.startswith("worker") and ":" in first else ""


def clock_offset_ns(samples: Iterable[tuple[int, int, int]]) -> int:
    """How far another process's clock is ahead of ours, by Cristian's algorithm.

    Args:
        samples: (sent, other's time, received) of questions and answers, in ns. The quickest answer is believed. Where it
            allows for one and the same clock, as on one host, the offset is 0.
    """
    sent, other, received = min(samples, key=lambda s: s[2] - s[0])
    return 0 if sent <= other <= received else other - (sent + received) // 2


def worker_events(
    trace: Trace, offset_ns: int, origin_ns: int, call_of: Callable[[int, int, int, int], Call]
) -> Iterator[Event]:
    """Events of one worker.

    Args:
        offset_ns: how far its clock is ahead of the client's.
        origin_ns: when the profile began, by the client's clock.
        call_of: what is known of (batch, call in it, call in the program that it replays or -1, signature).
    """
    numbers = array("q")
    numbers.frombytes(trace.events)
    lane = f"worker {trace.worker}"
    for at in range(0, len(numbers), FIELDS):
        kind, place, seq, call, inner, sig, start, duration, size = numbers[at : at + FIELDS]
        where = "batches" if place < 0 else "{}:{} ".format(*trace.places[place]) + _ROWS[kind]
        known = call_of(seq, call, inner, sig) if kind in (COMPUTE, COMMUNICATION, COPY) else Call(KINDS[kind])
        if kind == COPY:
            known = Call("fetch" if call < 0 else "upload", known.shapes, known.line)
        name = f"batch {seq}" if kind == BATCH else "free" if kind not in (COMPUTE, COMMUNICATION, COPY, PLAN) else known.op
        begun = (start - offset_ns - origin_ns) / 1e3
        yield Event(lane, where, KINDS[kind], name, begun, duration / 1e3, known.shapes, known.line, size, seq)


_ROWS = ("compute", "communication", "copy", "", "", "compute")


def span_events(spans: Iterable[Span], origin_ns: int) -> Iterator[Event]:
    """Events of the client and the controller."""
    for lane, row, name, start, end, args in spans:
        rest = {k: v for k, v in args.items() if k not in ("seq", "bytes")}
        begun, took = (start - origin_ns) / 1e3, (end - start) / 1e3
        yield Event(lane, row, name, name, begun, took, "", "", args.get("bytes", 0), args.get("seq", 0), rest)


@dataclass(frozen=True)
class OpTime:
    """All calls of one op, over all devices.

    Attributes:
        share: of the time of all ops.
    """

    op: str
    kind: str
    calls: int
    total_us: float
    share: float
    bytes: int

    @property
    def mean_us(self) -> float:
        return self.total_us / self.calls


@dataclass(frozen=True)
class DeviceTime:
    """What a device did, as shares of the profile's duration.

    Attributes:
        busy: at anything at all.
        bytes: given to other devices.
    """

    device: str
    worker: str
    busy: float
    compute: float
    communication: float
    copy: float
    bytes: int


def op_times(events: Sequence[Event]) -> list[OpTime]:
    """Ops by total time, the longest first."""
    found: dict[tuple[str, str], list[float]] = {}
    for e in events:
        if e.device:
            entry = found.setdefault((e.name, e.kind), [0, 0.0, 0])
            entry[0] += 1
            entry[1] += e.duration_us
            entry[2] += e.bytes
    total = sum(entry[1] for entry in found.values()) or 1.0
    rows = [OpTime(op, kind, int(n), us, us / total, int(size)) for (op, kind), (n, us, size) in found.items()]
    return sorted(rows, key=lambda row: (-row.total_us, row.op))


def device_times(events: Sequence[Event], duration_us: float) -> list[DeviceTime]:
    """One entry a device, in the order of their names."""
    by_device: dict[tuple[str, str], list[Event]] = {}
    for e in events:
        if e.device:
            by_device.setdefault((e.device, e.lane), []).append(e)
    found = []
    for (device, worker), mine in sorted(by_device.items(), key=lambda item: (_natural(item[0][0]), item[0][1])):
        def share(*kinds: str, mine: list[Event] = mine) -> float:
            return covered_us(e for e in mine if not kinds or e.kind in kinds) / max(duration_us, 1e-9)

        sent = sum(e.bytes for e in mine if e.kind == "communication")
        shares = (share(), share("compute", "free"), share("communication"), share("copy"))
        found.append(DeviceTime(device, worker, *shares, sent))
    return found


def _natural(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return kind, int(number or 0)


def covered_us(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of the events was under way."""
    total, until = 0.0, float("-inf")
    for e in sorted(events, key=lambda e: e.start_us):
        total += max(0.0, e.end_us - max(e.start_us, until))
        until = max(until, e.end_us)
    return total


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in (header, *rows)
    ]


def summary(events: Sequence[Event], duration_us: float, num_ops: int = 10, dropped: int = 0) -> str:
    """What ``print(profile)`` shows."""
    devices, ops = device_times(events, duration_us), op_times(events)
    workers = {d.worker for d in devices}
    batches = [e for e in events if e.kind == "record"]
    recorded = sum(e.details.get("calls", 0) for e in batches)
    lines = [
        f"profile of {duration_us / 1e3:.1f} ms: {_count(recorded, 'call')} in {_count(len(batches), 'batch')} "
        f"on {_count(len(devices), 'device')}, {_count(len(workers), 'worker')}"
    ]
    if dropped:
        lines.append(f"{dropped} events beyond the bound are missing: raise max_events, or profile less")
    lines += ["", *table(
        ("op", "kind", "calls", "total ms", "mean us", "share", "MiB"),
        [
            (o.op, o.kind, str(o.calls), f"{o.total_us / 1e3:.2f}", f"{o.mean_us:.1f}", f"{o.share:.1%}", _mib(o.bytes))
            for o in ops[:num_ops]
        ],
    )]
    if len(ops) > num_ops:
        lines.append(f"and {len(ops) - num_ops} more")
    lines += ["", *table(
        ("device", "busy", "compute", "communication", "copies", "MiB sent"),
        [
            (d.device, *(f"{share:.1%}" for share in (d.busy, d.compute, d.communication, d.copy)), _mib(d.bytes))
            for d in devices
        ],
    )]
    for lane, kinds in (("client", ("record", "wait", "await", "wait for room")), ("controller", ())):
        mine = [e for e in events if e.lane == lane]
        shares = [(kind, covered_us(e for e in mine if e.kind == kind)) for kind in kinds] if kinds else []
        shares = shares or [("busy", covered_us(mine))]
        lines.append(f"{lane}: " + ", ".join(f"{kind} {us / max(duration_us, 1e-9):.1%}" for kind, us in shares if us))
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    ending = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{ending}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f}" if size_bytes else ""


def chrome_trace(events: Sequence[Event], notes: dict[str, Any]) -> dict[str, Any]:
    """The events in Chrome's trace format (Trace Event Format), which Perfetto and chrome://tracing open.

    A process a lane, a thread a row; arrows lead from the recording of a batch to its execution.
    """
    lanes = sorted({e.lane for e in events}, key=_lane_order)
    pids = {lane: number for number, lane in enumerate(lanes, 1)}
    rows = sorted({(e.lane, e.row) for e in events}, key=row_key)
    tids = {row: number for number, row in enumerate(rows, 1)}
    out: list[dict[str, Any]] = []
    for lane, pid in pids.items():
        out.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": lane}})
        out.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
    for (lane, row), tid in tids.items():
        out.append({"ph": "M", "pid": pids[lane], "tid": tid, "name": "thread_name", "args": {"name": row}})
        out.append({"ph": "M", "pid": pids[lane], "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    recorded = {e.batch: e for e in events if e.kind == "record"}
    for number, e in enumerate(events):
        at = {"pid": pids[e.lane], "tid": tids[e.lane, e.row]}
        facts = {"shapes": e.shapes, "line": e.line, "bytes": e.bytes, "batch": e.batch, **e.details}
        args = {name: value for name, value in facts.items() if value}
        common = {"name": e.name, "cat": e.kind, **at}
        if e.kind == "await":  # many at a time in one thread
            out.append({"ph": "b", "id": number, "ts": e.start_us, "args": args, **common})
            out.append({"ph": "e", "id": number, "ts": e.end_us, **common})
            continue
        out.append({"ph": "X", "ts": e.start_us, "dur": e.duration_us, "args": args, **common})
        origin = recorded.get(e.batch) if e.kind == "batch" else None
        if origin is not None:
            flow = {"name": "batch", "cat": "batch", "id": e.batch * len(pids) + pids[e.lane]}
            begin = {"pid": pids[origin.lane], "tid": tids[origin.lane, origin.row], "ts": origin.end_us}
            out.append({"ph": "s", **flow, **begin})
            out.append({"ph": "f", "bp": "e", **flow, **at, "ts": max(e.start_us, origin.end_us)})
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": notes}


def row_key(row: tuple[str, str]) -> Any:
    """Sorts (lane, row) pairs as they are shown: the client, the controller, then the workers by device and stream."""
    return _lane_order(row[0]), _row_order(row[1])


def _lane_order(lane: str) -> tuple[int, int, str]:
    name, _, number = lane.partition(" ")
    return ({"client": 0, "controller": 1}.get(name, 2), int(number) if number.isdigit() else 0, lane)


def _row_order(row: str) -> tuple[int, str, int, int, str]:
    first, _, rest = row.partition(" ")
    kind, colon, number = first.partition(":")
    if not colon or not number.isdigit():
        return (0, "", 0, 0, row)
    return (1, kind, int(number), ("compute", "communication", "copy").index(rest), row)
