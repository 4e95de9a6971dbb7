"""Which workers the head has given up while their engine still takes them for alive. Pure.

An engine sees that a process has ended, and starts another. It does not see one that is frozen, or cut off for good: there
the head's heartbeats decide.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtorch.cluster.launchers.base import Incarnation

PATIENCE_S = 10.0
"""For a worker that the head does not list. A worker tries to join again every 5 s at least."""


class Watch:
    """What was seen of a launch's workers."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._seen: dict[int, Incarnation] = {}  # slot -> what the head listed last, until it is killed
        self._missing: dict[int, float] = {}  # slot -> since when it is not listed

    def look(self, now: float, listed: Iterable[Incarnation]) -> list[Incarnation]:
        """The head has answered at the time ``now`` (seconds of any clock); the answer is what is to be killed.

        A worker that was never listed is not: its engine may be waiting for a machine.
        """
        there = {each.slot: each for each in listed}
        self._seen.update(there)
        self._missing = {slot: self._missing.get(slot, now) for slot in self._seen if slot not in there}
        late = [slot for slot, since in self._missing.items() if now - since > self._patience_s]
        for slot in late:
            del self._missing[slot]
        return [self._seen.pop(slot) for slot in sorted(late)]

    def blind(self) -> None:
        """The head did not answer, so nothing is known of its workers: patience begins anew."""
        self._missing.clear()

    def forget(self, slot: int) -> None:
        """That worker has ended for good."""
        self._seen.pop(slot, None)
        self._missing.pop(slot, None)
