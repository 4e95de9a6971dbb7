"""Values that the client waits for, until all their pieces are here. Pure; part of the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dtorch.runtime.events import Settled
from dtorch.transport.messages import Fetch, Value


@dataclass
class _Awaited:
    seq: int  # of the batch behind which the value is read
    fetch: Fetch
    waiting: set[int]  # workers
    values: list[Value] = field(default_factory=list)


class Awaited:
    """Fetches under way, by ticket."""

    def __init__(self) -> None:
        self._fetches: dict[int, _Awaited] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def add(self, seq: int, fetch: Fetch, workers: Iterable[int]) -> None:
        """A value is to be read behind batch ``seq``; each of ``workers`` has a part of it."""
        self._fetches[fetch.ticket] = _Awaited(seq, fetch, set(workers))

    def came(self, worker: int, value: Value, torn: bool) -> list[Settled]:
        """A worker's part is here.

        Args:
            torn: workers have lost touch with each other, and errors may be echoes of that.
        """
        awaited = self._fetches.get(value.ticket)
        if awaited is None:
            return []
        awaited.waiting.discard(worker)
        awaited.values.append(value)
        if awaited.waiting:
            return []
        if torn and any(v.error is not None for v in awaited.values):
            return []  # whoever waits will be told of the worker that is gone, not of what that did to others
        del self._fetches[value.ticket]
        errors = [(v.worker, v.error) for v in awaited.values if v.error is not None]
        known = [(w, e) for w, e in errors if e >= 0] or errors
        return [Settled(value.ticket, tuple(awaited.values), known[0] if known else None)]

    def pending(self) -> list[tuple[int, Fetch]]:
        """(batch, fetch) of all that is under way."""
        return [(awaited.seq, awaited.fetch) for awaited in self._fetches.values()]

    def again(self, lost: set[int], workers_of: Callable[[int], Iterable[int]]) -> None:
        """All that is under way is answered anew, but what these tickets ask for, which is lost.

        Args:
            workers_of: mesh -> its workers, as they are now.
        """
        for ticket in lost:
            del self._fetches[ticket]
        for awaited in self._fetches.values():
            awaited.waiting = set(workers_of(awaited.fetch.mesh))
            awaited.values.clear()
