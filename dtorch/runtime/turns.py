"""Taking turns on a worker's devices: the shell around ``shares.py``.

Each session has a thread on the worker, and one of them at a time has the turn. It keeps it for a slice of time when others
wait, hands it over between two ops when its slice is over or one of a higher priority waits, and gives it up while it
cannot go on: with nothing to do, in an exchange with other workers, while a client takes in a value. So sessions that span
several workers cannot wait for each other in a circle, whatever order workers serve them in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtorch.runtime.shares import Shares

SLICE_NS = 2_000_000
"""How long a session goes on while others wait. Less is fairer in the short run, and costs more hand-overs."""


class Dropped(BaseException):
    """The session is over: whatever its thread is doing ends here. Not an Exception, so that no op's handler takes it."""


class Turns:
    """The turn on one worker.

    Args:
        change: called by the thread that gets the turn, when another session had it last: (that one, this one).
        settle: waits until the device has done what it was given, so that time used is time passed.
    """

    def __init__(
        self,
        change: Callable[[int | None, int], None] = lambda _, __: None,
        settle: Callable[[], None] = lambda: None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._shares = Shares()
        self._change = change
        self._settle = settle
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._gates: dict[int, threading.Lock] = {}  # of the sessions that wait; released by who hands the turn over
        self._holder: int | None = None
        self._last: int | None = None  # the one that had the turn last, while it lives
        self._since_ns = 0  # when the holder's time was last counted
        self._urgent = False  # one of a higher priority than the holder's waits
        self._dropped: set[int] = set()
        self.busy_ns: dict[int, int] = {}
        """Device time of each session so far."""
        self._occupied_ns = 0  # somebody had the turn, up to the last time that nobody had it
        self._occupied_since_ns: int | None = None

    def add(self, session: int, tenant: str, weight: float, priority: int) -> None:
        with self._lock:
            self._shares.add(session, tenant, weight, priority)
            self.busy_ns[session] = 0

    def remove(self, session: int) -> None:
        """Forget a session that neither has the turn nor waits."""
        with self._lock:
            self._shares.remove(session)
            self._dropped.discard(session)
            self.busy_ns.pop(session, None)
            if self._last == session:
                self._last = None

    def drop(self, session: int) -> None:
        """Let the session's thread end with ``Dropped`` at its next step, or the next time it wants the turn."""
        with self._lock:
            if session in self.busy_ns:
                self._dropped.add(session)

    def take(self, session: int) -> None:
        """Wait for the turn. Raises Dropped."""
        with self._lock:
            self._check(session)
            if self._holder is None:
                self._hold(session)
                self._occupied_since_ns = self._since_ns
                gate = None
            else:
                gate = self._wait(session)
        self._enter(session, gate)

    def give(self, session: int) -> None:
        """Give the turn up. Nothing happens without it."""
        if self._holder != session:
            return
        self._settle()
        with self._lock:
            self._count(session)
            self._hand_over()

    def step(self, session: int) -> None:
        """Called by the holder between two ops: hands the turn over when it is time to. Raises Dropped."""
        if not self._gates and not self._dropped:
            return
        if self._now_ns() - self._since_ns < SLICE_NS and not self._urgent and not self._dropped:
            return
        self._settle()
        with self._lock:
            self._check(session)
            self._count(session)
            gate = self._wait(session)
            if self._shares.next() == session:
                del self._gates[session]
                self._shares.rest(session)
                self._shares.begin(session)
                return
            self._hand_over()
        self._enter(session, gate)

    def spent_ns(self, session: int) -> int:
        """Device time of the session so far; exact for the holder."""
        running = self._now_ns() - self._since_ns if self._holder == session else 0
        return self.busy_ns.get(session, 0) + running

    def occupied_ns(self) -> int:
        """How long anybody has had the turn so far. Measured apart from what each session is billed."""
        with self._lock:
            since = self._occupied_since_ns
            return self._occupied_ns + (0 if since is None else self._now_ns() - since)

    @contextmanager
    def released(self, session: int) -> Iterator[None]:
        """Without the turn inside the block. A block within another changes nothing."""
        if self._holder != session:
            yield
            return
        self.give(session)
        try:
            yield
        finally:
            self.take(session)

    # ---- with the lock held

    def _check(self, session: int) -> None:
        if session in self._dropped:
            raise Dropped

    def _wait(self, session: int) -> threading.Lock:
        gate = self._gates[session] = threading.Lock()
        gate.acquire()
        holder = self._holder
        if holder is not None and holder != session:
            self._count(holder)
            self._shares.begin(holder)
        self._shares.wait(session)
        if holder is not None and holder != session:
            self._urgent |= self._shares.priority(session) > self._shares.priority(holder)
        return gate

    def _count(self, session: int) -> None:
        now = self._now_ns()
        used = now - self._since_ns
        self._since_ns = now
        self.busy_ns[session] += used
        self._shares.serve(session, used * 1e-9)

    def _hold(self, session: int) -> None:
        self._holder = session
        self._since_ns = self._now_ns()
        self._shares.begin(session)
        mine = self._shares.priority(session)
        self._urgent = any(self._shares.priority(other) > mine for other in self._gates)

    def _hand_over(self) -> None:
        following = self._shares.next()
        if following is None:
            self._holder = None
            assert self._occupied_since_ns is not None
            self._occupied_ns += self._now_ns() - self._occupied_since_ns
            self._occupied_since_ns = None
            self._shares.pause()
            return
        self._shares.rest(following)
        self._hold(following)
        self._gates.pop(following).release()

    # ---- without it

    def _enter(self, session: int, gate: threading.Lock | None) -> None:
        if gate is not None:
            gate.acquire()
        if self._last != session:
            last, self._last = self._last, session
            self._change(last, session)
