"""What the head knows of use and of failures: the shell around ``ledger.py``.

Everything is told to it by the head as it happens; it adds the time. It never holds up anybody, and keeps a bounded amount.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dtorch.cluster.ledger import OTHERS, Ledger, Line, Totals
from dtorch.transport.cluster import DeviceLoad, Load, SentBytes

RATE_SECONDS = 300
"""How far back the plot of rates goes."""
MAX_FAILURES = 200
MAX_SOURCES = 1000
"""Lines of all users' programs that are told apart in what they send."""
MAX_LOST = 50
"""Workers that are gone and still shown."""
WRITE_S = 60.0
SHARE_NS = 500_000_000
"""Over less, how busy a worker was is not worth saying."""
TEXT = 200
DETECTION_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Rate(msgspec.Struct, frozen=True):
    """One second."""

    at: float
    ops: float  # calls in it
    busy: float  # part of it that workers were busy, averaged over them
    sent_bytes: float  # between devices


class Trouble(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that failed."""

    at: float
    kind: str  # "worker", "op" or "session"
    text: str
    worker: str = ""
    tenant: str = ""
    session: int = 0
    silent_s: float | None = None  # of a worker: since it was last heard


@dataclass
class Traffic:
    """What one line of a session's program sends."""

    session: int
    tenant: str
    op: str
    what: str
    where: str
    first_step: int
    num_calls: int = 0
    size_bytes: int = 0
    last_step: int = 0

    @property
    def step_bytes(self) -> float:
        """Bytes in one step: between two times that the client waits for values."""
        return self.size_bytes / max(1, self.last_step - self.first_step)

    @property
    def hint(self) -> str:
        """Such as "gathers 40 MB per step here"."""
        return f"{self.what} {size(self.step_bytes)} per step here"


@dataclass
class WorkerLoad:
    """The last that was heard of a worker."""

    heard: float
    busy_ns: int = 0
    mark: tuple[int, int] | None = None  # its clock and ``busy_ns`` when ``share`` was found
    share: float = 0.0  # part of the last interval that it was busy
    process_bytes: int = 0
    devices: dict[tuple[str, int], DeviceLoad] = field(default_factory=dict)


class Meter:
    """Use, rates and failures of one head.

    Args:
        path: of a file to which use is appended, a JSON object a line, and from which the tenants' totals are read at
            the start; None for none.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.ledger = Ledger()
        self.loads: dict[int, WorkerLoad] = {}
        self.rates: deque[Rate] = deque(maxlen=RATE_SECONDS)
        self.troubles: deque[Trouble] = deque(maxlen=MAX_FAILURES)
        self.traffic: dict[tuple[int, str, str], Traffic] = {}  # (session, op, where); the oldest first
        self.lost: deque[str] = deque(maxlen=MAX_LOST)  # names of workers that are gone unasked
        self.num_lost = 0
        self.detection_counts = [0] * (len(DETECTION_BUCKETS_S) + 1)
        self.detection_s = 0.0  # sum
        self.busy_s = 0.0  # of all workers, as they measure it
        self._origin = time.time() - time.monotonic()
        self._ticks: deque[tuple[float, int, int, float]] = deque(maxlen=3)  # time, ops, bytes, busy seconds
        self._written = self.now()
        self._file = None
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists():
                self.ledger.restore(_read(path))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "ab", buffering=0)

    def now(self) -> float:
        """Seconds since 1970, as they were at the start, and never back."""
        return self._origin + time.monotonic()

    # ---- sessions

    def opened(self, session: int, tenant: str, name: str) -> None:
        self.ledger.open(self.now(), session, tenant, name)

    def entered(self, session: int, worker: int) -> None:
        """The session begins to use a worker."""
        self.ledger.enter(session, worker)

    def uploaded(self, session: int, size_bytes: int) -> None:
        if size_bytes:
            self.ledger.use(session, Totals(uploaded_bytes=size_bytes))

    def fetched(self, session: int, size_bytes: int) -> None:
        if size_bytes:
            self.ledger.use(session, Totals(fetched_bytes=size_bytes))

    def stepped(self, session: int) -> None:
        """The client asked for values."""
        self.ledger.use(session, Totals(num_steps=1))

    def repeated(self, session: int, num_ops: int) -> None:
        """Calls were executed again after a loss."""
        self.ledger.use(session, Totals(repeated_ops=num_ops))

    def held(self, session: int, worker: int, size_bytes: int) -> None:
        self.ledger.hold(self.now(), session, worker, size_bytes)

    def ended(self, session: int, error: str, text: str) -> None:
        entry = self.ledger.sessions.get(session)
        self.ledger.close(self.now(), session)
        for key in [key for key in self.traffic if key[0] == session]:
            del self.traffic[key]
        if entry is not None and error not in ("", "SessionClosedError"):
            self._trouble("session", f"{error}: {text}", tenant=entry.tenant, session=session)

    def failed(self, session: int, worker: str, kind: str, text: str) -> None:
        """An op failed."""
        entry = self.ledger.sessions.get(session)
        tenant = "" if entry is None else entry.tenant
        self._trouble("op", f"{kind}: {text}", worker=worker, tenant=tenant, session=session)

    def _trouble(self, kind: str, text: str, **facts: object) -> None:
        self.troubles.append(Trouble(self.now(), kind, text[:TEXT], **facts))  # type: ignore[arg-type]

    # ---- workers

    def joined(self, worker: int) -> None:
        self.loads[worker] = WorkerLoad(self.now())

    def heard(self, worker: int) -> None:
        """A worker said something."""
        load = self.loads.get(worker)
        if load is not None:
            load.heard = self.now()

    def loaded(self, worker: int, said: Load) -> None:
        """A worker reports."""
        load = self.loads.get(worker)
        if load is None:
            return
        self.busy_s += max(0, said.busy_ns - load.busy_ns) * 1e-9
        load.busy_ns = max(load.busy_ns, said.busy_ns)
        clock, busy = load.mark or (said.clock_ns, said.busy_ns)
        passed = said.clock_ns - clock
        if load.mark is None or passed >= SHARE_NS:
            load.share = min(1.0, max(0.0, (said.busy_ns - busy) / passed)) if passed else 0.0
            load.mark = (said.clock_ns, said.busy_ns)
        load.process_bytes = said.process_bytes
        load.devices = {(device.kind, device.number): device for device in said.devices}
        for use in said.uses:
            sent = sum(each.size_bytes for each in use.sent)
            self.ledger.use(
                use.session,
                Totals(use.busy_ns * 1e-9, use.repeated_ns * 1e-9, exchanged_bytes=sent, ops=_clipped(use.ops)),
            )
            self.held(use.session, worker, use.held_bytes)
            for each in use.sent:
                self._sent(use.session, each)
            if use.over:
                self.ledger.settle(use.session, worker)

    def _sent(self, session: int, sent: SentBytes) -> None:
        entry = self.ledger.sessions.get(session)
        if entry is None or entry.closed is not None or not sent.size_bytes:
            return
        key = (session, sent.op[:TEXT], sent.where[:TEXT])
        known = self.traffic.get(key)
        if known is None:
            while len(self.traffic) >= MAX_SOURCES:
                del self.traffic[next(iter(self.traffic))]
            first = max((line.last_step for line in self.traffic.values() if line.session == session), default=0)
            known = self.traffic[key] = Traffic(session, entry.tenant, key[1], sent.what[:20], key[2], first)
        known.num_calls += sent.num_calls
        known.size_bytes += sent.size_bytes
        known.last_step = entry.totals.num_steps

    def gone(self, worker: int, name: str, reason: str, asked: bool) -> float | None:
        """A worker is gone; ``asked``: it left, or was told to. Otherwise the answer is for how many seconds it was silent."""
        now = self.now()
        load = self.loads.pop(worker, None)
        self.ledger.lose(now, worker)
        if asked:
            return None
        silent = now - load.heard if load is not None else 0.0
        self.num_lost += 1
        self.lost.append(name)
        self.detection_s += silent
        self.detection_counts[sum(silent > bound for bound in DETECTION_BUCKETS_S)] += 1
        self._trouble("worker", reason, worker=name, silent_s=round(silent, 3))
        return silent

    # ---- time

    def tick(self) -> None:
        """Called once a second."""
        now = self.now()
        self.ledger.advance(now)
        whole = self.ledger.sum()
        self._ticks.append((now, whole.num_ops, whole.exchanged_bytes, self.busy_s))
        passed, ops, sent, busy = (b - a for a, b in zip(self._ticks[0], self._ticks[-1], strict=True))
        if passed > 0:  # over two seconds, as workers report once a second
            busy = min(1.0, busy / passed / max(1, len(self.loads)))
            self.rates.append(Rate(round(now, 3), round(ops / passed, 3), round(busy, 4), round(sent / passed, 3)))
        if now - self._written >= WRITE_S:
            self.write()

    def write(self) -> None:
        """Append what was used since the last time to the file."""
        self._written = self.now()
        if self._file is not None:
            for line in self.ledger.lines(self._written):
                self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self.write()
            self._file.close()
            self._file = None


def _read(path: Path) -> list[Line]:
    decoder = msgspec.json.Decoder(Line)
    lines = path.read_bytes().splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                os.truncate(path, path.stat().st_size - len(line))  # the head was killed in the middle of it
                break
            if line.strip():
                raise ValueError(f"{path}, line {number}, does not tell what was used: {error}") from error
    return found


def _clipped(ops: dict[str, int]) -> dict[str, int]:
    """Ops that come from a worker, with names of bounded length."""
    return {(name if len(name) <= TEXT else OTHERS): count for name, count in ops.items()}


def size(number: float) -> str:
    """Bytes for people, in powers of ten: "40 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"
