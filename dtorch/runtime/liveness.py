"""Who is alive: decided from when a worker was last heard, and from what the system says of its process. Pure.

Silence alone proves nothing: on a machine that is overloaded any thread may wait long for its turn, and a call that holds the
interpreter's lock keeps all others from answering. So

* wherever the state of its process is known, only a process that is *stopped*, and stays so while it is silent, counts as
  frozen. That cannot be mistaken for a busy one, however busy the machine is. The state of a process on this machine the
  system tells; that of a process elsewhere another one beside it, which executes nothing, tells every ``INTERVAL_S``
  (``attested``).
* where nobody tells anything, silence is measured against what is usual: the suspicion ``phi`` of Hayashibara et al., "The
  phi accrual failure detector" (2004), is minus the decimal logarithm of the probability that a sign of life which is still to
  come takes that long, for normally distributed gaps. A floor keeps a quiet network from making it hasty.

A worker that ends is not this file's matter: its launcher, or whoever is beside it, reports that at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

INTERVAL_S = 0.25
"""Between two heartbeats."""
FROZEN_S = 0.8
"""How long a process must be stopped and silent."""
FLOOR_S = 1.5
"""Shorter silence of a worker elsewhere is never suspicious, unless ``join`` says otherwise."""
PHI = 8.0
"""Suspicion from which a worker elsewhere counts as lost: one mistake in 10**8 answers, if gaps are as they were."""

_MEMORY = 0.05  # weight of the newest gap in mean and variance
_LEAST_DEVIATION_S = 0.1
STOPPED = "T"  # by a signal; a debugger's stop, "t", is somebody's intention
_UNSEEN_S = 4 * INTERVAL_S  # a process that nobody has looked at for so long may have run meanwhile


@dataclass
class _Peer:
    floor_s: float
    heard: float  # itself
    sign: float  # itself, or whoever is beside it
    mean: float = INTERVAL_S  # of the gaps between signs
    variance: float = _LEAST_DEVIATION_S**2
    stopped: tuple[float, float] | None = None  # since when, and when that was seen last

    def note(self, now: float, state: str) -> None:
        if state != STOPPED:
            self.stopped = None
        elif self.stopped is None or now - self.stopped[1] > _UNSEEN_S:
            self.stopped = now, now
        else:
            self.stopped = self.stopped[0], now

    @property
    def stopped_s(self) -> float:
        return 0.0 if self.stopped is None else self.stopped[1] - self.stopped[0]


@dataclass(frozen=True)
class Dead:
    """A worker that counts as lost.

    Attributes:
        silent_s: how long it had not been heard.
    """

    worker: int
    reason: str
    silent_s: float


class Watch:
    """Judges workers; all times are seconds of one clock, passed in."""

    def __init__(self) -> None:
        self._peers: dict[int, _Peer] = {}
        self._last_tick: float | None = None

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self._peers)

    def join(self, worker: int, now: float, floor_s: float = FLOOR_S) -> None:
        """A worker to be judged from now on; shorter silence than ``floor_s`` is never suspicious."""
        self._peers[worker] = _Peer(floor_s, now, now)

    def leave(self, worker: int) -> None:
        self._peers.pop(worker, None)

    def heard(self, worker: int, now: float) -> None:
        """A worker has said something."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.heard = now
            self._sign(peer, now)

    def attested(self, worker: int, now: float, state: str, floor_s: float = FLOOR_S) -> None:
        """Somebody beside a worker elsewhere tells the state of its process, as the letter of ``/proc/<pid>/stat``.

        Args:
            floor_s: from now on in the place of that of ``join``.
        """
        peer = self._peers.get(worker)
        if peer is not None:
            if floor_s != peer.floor_s:  # it begins: what was usual before counts no more
                peer = self._peers[worker] = _Peer(floor_s, peer.heard, now)
            peer.note(now, state)
            self._sign(peer, now)

    @staticmethod
    def _sign(peer: _Peer, now: float) -> None:
        gap = now - peer.sign
        peer.sign = now
        off = gap - peer.mean
        peer.mean += _MEMORY * off
        peer.variance = (1 - _MEMORY) * (peer.variance + _MEMORY * off * off)

    def tick(self, now: float, states: Mapping[int, str]) -> list[Dead]:
        """Time goes by; call this every ``INTERVAL_S``.

        Args:
            states: of the processes of workers on this machine, as the letters of ``/proc/<pid>/stat``.
        """
        late = 0.0 if self._last_tick is None else now - self._last_tick - 2 * INTERVAL_S
        self._last_tick = now
        dead = []
        for worker, peer in self._peers.items():
            if late > 0:  # this process itself was held up, and with it whatever it should have heard
                peer.heard += late
                peer.sign += late
            state = states.get(worker)
            if state is not None:
                peer.note(now, state)
            silent, quiet = now - peer.heard, now - peer.sign
            if min(silent, peer.stopped_s) >= FROZEN_S:
                dead.append(Dead(worker, f"frozen: its process is stopped, and silent for {silent:.1f} s", silent))
            elif state is None and quiet >= peer.floor_s and self.phi(worker, quiet) >= PHI:
                dead.append(Dead(worker, f"it does not answer any more, for {quiet:.1f} s", quiet))
        for found in dead:
            self.leave(found.worker)
        return dead

    def phi(self, worker: int, silent_s: float) -> float:
        """How suspicious it is that there was no sign of life of a worker for that long."""
        peer = self._peers[worker]
        deviation = max(math.sqrt(peer.variance), _LEAST_DEVIATION_S)
        later = 0.5 * math.erfc((silent_s - peer.mean) / (deviation * math.sqrt(2)))
        return math.inf if later <= 0 else -math.log10(later)
