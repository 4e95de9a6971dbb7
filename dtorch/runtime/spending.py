"""What one session uses on one worker, noted by the session's thread and reported by another."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dtorch.runtime.layout import is_partial, is_shard
from dtorch.transport.cluster import SentBytes, Use
from dtorch.transport.messages import Definition

Source = tuple[str, str, str]
"""Of communication: the op, a verb that says what it does, and the user's line."""


class Spending:
    """Sums since the last report. Any thread may call its methods."""

    def __init__(self, session: int) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._busy_ns = self._repeated_ns = 0
        self._ops: dict[str, int] = {}
        self._sent: dict[Source, list[int]] = {}  # -> [calls, bytes]
        self._held: dict[tuple[str, int], int] = {}
        self._told = self._held  # in the last report

    def spend(self, busy_ns: int, repeated: bool = False) -> None:
        """The session had the devices; ``repeated``: for what was done before and got lost."""
        with self._lock:
            if repeated:
                self._repeated_ns += busy_ns
            else:
                self._busy_ns += busy_ns

    def ran(self, ops: Mapping[str, int], calls: Mapping[Source, int], sent: Mapping[Source, int]) -> None:
        """A batch was executed: calls of ops, those of them that communicate, and bytes that went to other devices."""
        with self._lock:
            for op, count in ops.items():
                self._ops[op] = self._ops.get(op, 0) + count
            for position, counts in enumerate((calls, sent)):
                for source, count in counts.items():
                    self._sent.setdefault(source, [0, 0])[position] += count

    def hold(self, held: dict[tuple[str, int], int]) -> None:
        """Bytes that the session's tensors hold now, for each of this worker's devices."""
        with self._lock:
            self._held = held

    @property
    def is_news(self) -> bool:
        """Whether there is anything that the last report did not tell."""
        return bool(self._busy_ns or self._repeated_ns or self._ops or self._sent or self._held != self._told)

    @property
    def held(self) -> dict[tuple[str, int], int]:
        return self._held

    def report(self, over: bool = False) -> Use:
        """What was used since the last report."""
        with self._lock:
            sent = tuple(SentBytes(*source, *counts) for source, counts in self._sent.items())
            held = 0 if over else sum(self._held.values())
            made = Use(self.session, self._busy_ns, self._repeated_ns, held, self._ops, sent, over)
            self._busy_ns = self._repeated_ns = 0
            self._ops, self._sent, self._told = {}, {}, self._held
        return made


def kind(definition: Definition) -> str:
    """The op's name for people: a method and its function are one, as are calls that differ in how results are listed."""
    return definition.op.removeprefix("flat:").replace("torch.Tensor.", "torch.", 1)


def verb(definition: Definition) -> str:
    """What a communicating op does, for people: "gathers", "reduces", "exchanges" or "sends"."""
    if definition.kernel != "redistribute":
        return "sends"
    before, after = definition.inputs[0], definition.outputs[0]
    if before.mesh != after.mesh:
        return "moves"
    changed = [(b, a) for b, a in zip(before.codes, after.codes, strict=True) if b != a]
    if any(is_partial(b) for b, _ in changed):
        return "reduces"
    return "exchanges" if any(is_shard(b) and is_shard(a) for b, a in changed) else "gathers"
