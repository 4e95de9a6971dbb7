"""Counters of a running session, for whoever looks at it from outside. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LiveWorker:
    """What the controller sees of a worker.

    Attributes:
        busy_ns: spent on batches.
        sent_bytes, received_bytes: of frames to it and from it.
        counters: its own, as of its last answer.
    """

    batches: int = 0
    busy_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class Live:
    """Counters of all workers of a session."""

    def __init__(self) -> None:
        self.workers: dict[int, LiveWorker] = {}

    def of(self, worker: int) -> LiveWorker:
        found = self.workers.get(worker)
        if found is None:
            found = self.workers[worker] = LiveWorker()
        return found

    def done(self, worker: int, busy_ns: int) -> None:
        found = self.of(worker)
        found.batches += 1
        found.busy_ns += busy_ns

    def snapshot(self, pids: dict[int, int], **session: Any) -> dict[str, Any]:
        """Plain data: facts of the session, and those of every worker with its process id."""
        workers = {
            str(number): {
                "pid": pids.get(number, 0),
                "batches": w.batches,
                "busy_ns": w.busy_ns,
                "sent_bytes": w.sent_bytes,
                "received_bytes": w.received_bytes,
                **w.counters,
            }
            for number, w in sorted(self.workers.items())
        }
        return {**session, "workers": workers}
