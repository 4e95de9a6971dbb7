"""What tenants and their sessions have used. Pure: events with their times in, totals out.

Billed is what a worker measured: the time that a session had the worker's devices (``device_s``), the bytes that its
tensors held, times how long (``byte_s``), bytes that moved, and ops by their names. Work that is done again because a
worker was lost is counted apart and billed to nobody.

A session's entry outlives it, as the workers' last reports come after its end; tenants are kept for good. Everything is
bounded: sessions that have ended, names of ops, and tenants beyond a number share one entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

MAX_ENDED = 1000
"""Sessions that are over and still listed; the oldest go first."""
MAX_OPS = 256
"""Names of ops told apart in one entry."""
MAX_TENANTS = 4096
OTHERS = "(others)"
"""What is beyond a bound counts under this name."""


class Totals(msgspec.Struct):
    """Sums of what was used."""

    device_s: float = 0.0  # a worker's devices were had
    repeated_s: float = 0.0  # the same, for work that was lost and done again; not billed
    byte_s: float = 0.0  # bytes held by tensors x seconds
    uploaded_bytes: int = 0  # from the client
    fetched_bytes: int = 0  # to the client
    exchanged_bytes: int = 0  # between devices
    repeated_ops: int = 0  # done again after a loss; not among ``ops``
    num_steps: int = 0  # batches at whose end the client asked for values
    ops: dict[str, int] = {}  # name -> calls

    @property
    def num_ops(self) -> int:
        return sum(self.ops.values())

    def add(self, more: Totals, sign: int = 1) -> None:
        """Add, or with ``sign`` -1 subtract, another one's sums."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + sign * getattr(more, name))
        for op, count in more.ops.items():
            if op not in self.ops and len(self.ops) >= MAX_OPS:
                op = OTHERS
            left = self.ops.get(op, 0) + sign * count
            if left:
                self.ops[op] = left
            else:
                self.ops.pop(op, None)

    @property
    def is_nothing(self) -> bool:
        return not self.ops and not any(getattr(self, name) for name in _SUMS)


_SUMS = tuple(name for name in Totals.__struct_fields__ if name != "ops")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a session has used since its last line; a tenant's lines add up to what it has used."""

    at: float
    tenant: str
    session: int
    used: Totals
    name: str = ""
    opened: float = 0.0
    closed: float = 0.0  # 0: it goes on


@dataclass
class Entry:
    """One session's account.

    Attributes:
        held: worker -> bytes that the session's tensors hold there.
        reporting: workers that have not sent their last report of it yet.
        closed: when it ended; None while it goes on.
    """

    session: int
    tenant: str
    name: str
    opened: float
    closed: float | None = None
    totals: Totals = field(default_factory=Totals)
    held: dict[int, int] = field(default_factory=dict)
    reporting: set[int] = field(default_factory=set)
    since: float = 0.0  # when ``held`` was last counted
    _written: Totals = field(default_factory=Totals)

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    def unwritten(self) -> Totals:
        """What was used since the last call of this."""
        more = Totals()
        more.add(self.totals)
        more.add(self._written, -1)
        self._written.add(more)
        return more


class Ledger:
    """Accounts of all sessions and tenants. ``now`` is seconds of one clock that does not go back."""

    def __init__(self) -> None:
        self.sessions: dict[int, Entry] = {}
        self.tenants: dict[str, Totals] = {}
        self._ended: dict[int, None] = {}  # sessions that are over, oldest first
        self._evicted: list[Line] = []

    def open(self, now: float, session: int, tenant: str, name: str = "") -> None:
        if tenant not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            tenant = OTHERS
        self.tenants.setdefault(tenant, Totals())
        self.sessions[session] = Entry(session, tenant, name, now, since=now)

    def enter(self, session: int, worker: int) -> None:
        """A session begins to use a worker, from which a last report will come."""
        entry = self.sessions.get(session)
        if entry is not None:
            entry.reporting.add(worker)

    def use(self, session: int, more: Totals) -> None:
        """Something was used, by a session that may be over already; one that is forgotten uses nothing."""
        entry = self.sessions.get(session)
        if entry is not None:
            entry.totals.add(more)
            self.tenants[entry.tenant].add(more)

    def hold(self, now: float, session: int, worker: int, size_bytes: int) -> None:
        """From now on a session holds so many bytes on a worker."""
        entry = self.sessions.get(session)
        if entry is not None and entry.closed is None:
            self._advance(now, entry)
            entry.held[worker] = size_bytes

    def settle(self, session: int, worker: int) -> None:
        """A worker has told the last of a session."""
        entry = self.sessions.get(session)
        if entry is not None:
            entry.reporting.discard(worker)

    def lose(self, now: float, worker: int) -> None:
        """A worker is gone, with what was held there. What it has not reported is billed to nobody."""
        for entry in self.sessions.values():
            if worker in entry.held:
                self._advance(now, entry)
                del entry.held[worker]
            entry.reporting.discard(worker)

    def close(self, now: float, session: int) -> None:
        """A session is over, and what it held is free."""
        entry = self.sessions.get(session)
        if entry is None or entry.closed is not None:
            return
        self._advance(now, entry)
        entry.held.clear()
        entry.closed = now
        self._ended[session] = None
        while len(self._ended) > MAX_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._evicted += self._line(now, self.sessions.pop(oldest))

    def advance(self, now: float) -> None:
        """Count what is held up to now."""
        for entry in self.sessions.values():
            self._advance(now, entry)

    def _advance(self, now: float, entry: Entry) -> None:
        passed = max(0.0, now - entry.since)
        entry.since = max(now, entry.since)
        held = entry.held_bytes
        if held and passed:
            entry.totals.byte_s += held * passed
            self.tenants[entry.tenant].byte_s += held * passed

    def sum(self) -> Totals:
        """Of all tenants."""
        whole = Totals()
        for totals in self.tenants.values():
            whole.add(totals)
        return whole

    def held_bytes(self) -> Mapping[str, int]:
        """Tenant -> bytes held now."""
        found = dict.fromkeys(self.tenants, 0)
        for entry in self.sessions.values():
            found[entry.tenant] += entry.held_bytes
        return found

    # ---- what is kept elsewhere

    def lines(self, now: float) -> list[Line]:
        """What was used since the last call of this, a line for each session that used anything."""
        self.advance(now)
        found, self._evicted = self._evicted, []
        for entry in self.sessions.values():
            found += self._line(now, entry)
        return found

    def _line(self, now: float, entry: Entry) -> list[Line]:
        used = entry.unwritten()
        if used.is_nothing:
            return []
        return [Line(now, entry.tenant, entry.session, used, entry.name, entry.opened, entry.closed or 0.0)]

    def restore(self, lines: Iterable[Line]) -> None:
        """Add what tenants had used before, as ``lines`` told it then."""
        for line in lines:
            known = line.tenant in self.tenants or len(self.tenants) < MAX_TENANTS
            self.tenants.setdefault(line.tenant if known else OTHERS, Totals()).add(line.used)
