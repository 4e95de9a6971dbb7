"""What a worker notes of its own work while a profile runs, bounded, and the client's and controller's notes beside it.

An event of a worker is one row of ``FIELDS`` numbers in one flat array, so that noting it allocates nothing but the numbers.
Times are of ``perf_counter_ns``. On a CUDA device, work is timed on its stream, by CUDA events, and put on the host's clock.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from operator import length_hint
from time import perf_counter_ns
from typing import Any

import torch

from dtorch.runtime.comm import Exchange, Gather, Place, Request
from dtorch.transport.messages import Trace

FIELDS = 9
"""Of an event: kind, place (-1: the worker itself), batch, call in it (-1: none), call in the program that the call replays
(-1: none), signature, start in ns, duration in ns, bytes moved."""
KINDS = ("compute", "communication", "copy", "batch", "plan", "free")
COMPUTE, COMMUNICATION, COPY, BATCH, PLAN, FREE = range(6)

Span = tuple[str, str, str, int, int, dict[str, Any]]  # lane, row, name, start in ns, end in ns, arguments


class Spans:
    """What the client and its controller note: few and large things, from any thread.

    Attributes:
        dropped: spans that came after the bound.
    """

    def __init__(self, limit: int) -> None:
        self.spans: list[Span] = []
        self.chunks: dict[int, list[Any]] = {}  # batch -> its calls with their source lines, three entries a call
        self.dropped = 0
        self._limit = limit
        self._num_entries = 0

    def add(self, lane: str, name: str, start_ns: int, *, row: str = "", **args: Any) -> None:
        """Note what began at ``start_ns`` and ends now. ``row`` is this thread by default."""
        if len(self.spans) >= self._limit:
            self.dropped += 1
            return
        row = row or threading.current_thread().name
        self.spans.append((lane, row, name, start_ns, perf_counter_ns(), args))

    def keep(self, seq: int, chunk: list[Any]) -> None:
        """Remember which lines issued the calls of a batch; past three times the bound, no more."""
        self._num_entries += len(chunk)
        if self._num_entries <= 9 * self._limit:
            self.chunks[seq] = chunk


class Tracer:
    """A worker's events of one session.

    Args:
        limit: events kept; later ones are only counted.
        devices: of the hosted places, by index; it may grow.
    """

    def __init__(self, limit: int, devices: Callable[[int], torch.device]) -> None:
        self._limit = limit * FIELDS
        self._devices = devices
        self._events = array("q")
        self._clocks: dict[int, DeviceClock | None] = {}
        self._late: list[tuple[int, DeviceClock, int, int]] = []  # events whose times the device still has to tell
        self.dropped = 0
        self.seq = 0
        self.sigs: tuple[int, ...] = ()
        self.outer = -1  # while a program replays: the batch's call that replays it

    def mark(self, place: int) -> int:
        """Now, as the device at ``place`` sees it (the host where it is -1)."""
        if place < 0:
            return perf_counter_ns()
        if place not in self._clocks:
            device = self._devices(place)
            self._clocks[place] = DeviceClock(torch.cuda.Event, device) if device.type == "cuda" else None
        clock = self._clocks[place]
        return perf_counter_ns() if clock is None else clock.mark()

    def add(self, kind: int, place: int, call: int, start: int, end: int, size_bytes: int = 0) -> None:
        """Note what went on between two marks of ``place`` (of the host where it is -1)."""
        events = self._events
        if len(events) >= self._limit:
            self.dropped += 1
            return
        clock = self._clocks.get(place)
        if clock is not None:
            self._late.append((len(events), clock, start, end))
        sig = self.sigs[call] if 0 <= call < len(self.sigs) else 0
        inner = -1
        if self.outer >= 0:
            call, inner = self.outer, call
        events.extend((kind, place, self.seq, call, inner, sig, start, end - start, size_bytes))

    def timed(self, instructions: Iterator[Any], place: int, calls: list[int], kind: int) -> _Timed:
        """``instructions`` of hosted place ``place``, each timed; ``calls`` has their indices in the batch."""
        return _Timed(self, instructions, place, calls, kind)

    def report(self, session: int, ticket: int, worker: int, places: list[Place]) -> Trace:
        """All events so far, as a message."""
        for at, clock, start, end in self._late:
            begun, ended = clock.host_ns(start), clock.host_ns(end)
            self._events[at + 6], self._events[at + 7] = begun, ended - begun
        self._late.clear()
        return Trace(session, ticket, worker, perf_counter_ns(), tuple(places), self._events.tobytes(), self.dropped)


class DeviceClock:
    """Marks on a CUDA device's current stream, read later in nanoseconds of the host's clock.

    Args:
        make_event: ``torch.cuda.Event``.
    """

    def __init__(self, make_event: Callable[..., Any], device: torch.device) -> None:
        self._make, self._device = make_event, device
        self._marks: list[Any] = []
        self._base = make_event(enable_timing=True)
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()
        self._base_ns = perf_counter_ns()

    def mark(self) -> int:
        event = self._make(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)
        return len(self._marks) - 1

    def host_ns(self, mark: int) -> int:
        """When the device reached a mark; waits until it has."""
        event = self._marks[mark]
        event.synchronize()
        return self._base_ns + int(self._base.elapsed_time(event) * 1e6)


class _Timed:
    """An iterator over instructions: what passes between two steps of it is the execution of one."""

    def __init__(self, tracer: Tracer, instructions: Iterator[Any], place: int, calls: list[int], kind: int) -> None:
        self._tracer, self._place, self._kind = tracer, place, kind
        self._instructions = instructions
        self._calls = iter(calls)
        self._call = -1
        self._since = 0

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        if self._call >= 0:
            now = self._tracer.mark(self._place)
            self._tracer.add(self._kind, self._place, self._call, self._since, now)
            self._call = -1  # it may be the last one
        following = next(self._instructions)
        self._call = next(self._calls)
        self._since = self._tracer.mark(self._place)
        return following

    def __length_hint__(self) -> int:
        return length_hint(self._instructions)


def sent_bytes(request: Request, num_members: int) -> int:
    """Bytes that a place gives to others in a request among ``num_members`` places a line."""
    if isinstance(request, Exchange):
        return sum(tensor.nbytes for _, tensor in request.sends)
    if request.tensor is None:
        return 0
    others = len(request.shapes) - 1 if isinstance(request, Gather) else num_members - 1
    return request.tensor.nbytes * others
