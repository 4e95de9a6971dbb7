"""Who is alive: decided from when a worker was last heard, and from what the system says of its process. Pure.

Heartbeats (Ping, Pong) go both ways on a link of their own, which a thread of its own serves in the worker. Silence alone
proves nothing: on a machine that is overloaded any thread may wait long for its turn, and a call that holds the
interpreter's lock keeps all others from answering. So

* of a worker on this machine the system is asked: only a process that is *stopped*, and stays so while it is silent, counts
  as frozen. That cannot be mistaken for a busy one, however busy the machine is.
* of any other worker silence is measured against what is usual for it: the suspicion ``phi`` of Hayashibara et al., "The
  phi accrual failure detector" (2004), is minus the decimal logarithm of the probability that an answer which is still to
  come takes that long, for normally distributed gaps. A floor keeps a quiet network from making it hasty.

A worker that ends is not this file's matter: its launcher reports that at once.
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
"""Shorter silence of a worker elsewhere is never suspicious."""
PHI = 8.0
"""Suspicion from which a worker elsewhere counts as lost: one mistake in 10**8 answers, if gaps are as they were."""

_MEMORY = 0.05  # weight of the newest gap in mean and variance
_LEAST_DEVIATION_S = 0.1
_STOPPED = "T"  # by a signal; a debugger's stop, "t", is somebody's intention


@dataclass
class _Peer:
    heard: float
    mean: float = INTERVAL_S
    variance: float = _LEAST_DEVIATION_S**2
    stopped_since: float | None = None


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

    def join(self, worker: int, now: float) -> None:
        self._peers[worker] = _Peer(now)

    def leave(self, worker: int) -> None:
        self._peers.pop(worker, None)

    def heard(self, worker: int, now: float) -> None:
        """A worker has said something."""
        peer = self._peers.get(worker)
        if peer is not None:
            gap = now - peer.heard
            peer.heard = now
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
            silent = now - peer.heard
            state = states.get(worker)
            if state is not None:
                if state != _STOPPED:
                    peer.stopped_since = None
                elif peer.stopped_since is None:
                    peer.stopped_since = now
                elif min(silent, now - peer.stopped_since) >= FROZEN_S:
                    dead.append(Dead(worker, f"frozen: its process is stopped, and silent for {silent:.1f} s", silent))
            elif silent >= FLOOR_S and self.phi(worker, silent) >= PHI:
                dead.append(Dead(worker, f"it does not answer any more, for {silent:.1f} s", silent))
        for found in dead:
            self.leave(found.worker)
        return dead

    def phi(self, worker: int, silent_s: float) -> float:
        """How suspicious it is that a worker has been silent for that long."""
        peer = self._peers[worker]
        deviation = max(math.sqrt(peer.variance), _LEAST_DEVIATION_S)
        later = 0.5 * math.erfc((silent_s - peer.mean) / (deviation * math.sqrt(2)))
        return math.inf if later <= 0 else -math.log10(later)
