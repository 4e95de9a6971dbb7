"""Who goes next on a device that sessions share. Pure: turns taken and seconds used in, the next session out.

Strict priorities first. Among tenants of one priority: start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair
Queuing", SIGCOMM 1996) on measured seconds. A tenant's virtual time grows by the seconds it used over its weight, and the
waiting tenant with the least goes next. One that comes back from idleness starts at the time of who is being served, less
``BURST_S``: what it did not use was lent to the others, and no more than that little of it is owed, for those who had only
to wait for an answer before they could ask for more. The sessions of a tenant share its part alike in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

BURST_S = 0.05
"""Service, over weight, that a flow may be behind when it comes back."""

K = TypeVar("K")


@dataclass
class _Flow:
    weight: float
    time: float = 0.0  # virtual: seconds of service over weight


@dataclass
class _Queue(Generic[K]):
    """Flows that share something by weight. ``waiting`` is a subset of ``flows``, in the order of arrival."""

    flows: dict[K, _Flow] = field(default_factory=dict)
    waiting: dict[K, None] = field(default_factory=dict)
    time: float = 0.0  # virtual time at which the one being served was last begun with; after an idle time, the latest

    def wait(self, key: K) -> None:
        if key not in self.waiting:
            flow = self.flows[key]
            flow.time = max(flow.time, self.time - BURST_S)
            self.waiting[key] = None

    def first(self) -> K | None:
        return min(self.waiting, key=lambda key: self.flows[key].time, default=None)

    def begin(self, key: K) -> None:
        self.time = max(self.time, self.flows[key].time)

    def serve(self, key: K, seconds: float) -> None:
        flow = self.flows[key]
        flow.time += seconds / flow.weight

    def pause(self) -> None:
        self.time = max([self.time, *(flow.time for flow in self.flows.values())])


@dataclass
class _Tenant:
    sessions: _Queue[int] = field(default_factory=_Queue)


Key = tuple[int, str]  # priority, tenant


class Shares:
    """Sessions that share one device. A session waits (``wait``), goes on or not (``rest``), and is served.

    Serving is ``begin``, then ``serve`` with the seconds used, then ``begin`` again if it goes on.

    Raises KeyError for sessions that were not added.
    """

    def __init__(self) -> None:
        self._priorities: dict[int, _Queue[str]] = {}
        self._tenants: dict[Key, _Tenant] = {}
        self._keys: dict[int, Key] = {}

    def add(self, session: int, tenant: str, weight: float = 1.0, priority: int = 0) -> None:
        """A session that may wait from now on. ``weight`` counts for the tenant as a whole; the last one given holds.

        Raises:
            ValueError: the weight is not above 0.
        """
        if not weight > 0:
            raise ValueError(f"a weight is above 0, not {weight!r}")
        key = (priority, tenant)
        queue = self._priorities.setdefault(priority, _Queue())
        flow = queue.flows.setdefault(tenant, _Flow(weight, queue.time))
        flow.weight = weight
        sessions = self._tenants.setdefault(key, _Tenant()).sessions
        sessions.flows[session] = _Flow(1.0, sessions.time)
        self._keys[session] = key

    def remove(self, session: int) -> None:
        self.rest(session)
        priority, tenant = key = self._keys.pop(session)
        sessions = self._tenants[key].sessions
        del sessions.flows[session]
        if not sessions.flows:
            del self._tenants[key]
            del self._priorities[priority].flows[tenant]
            if not self._priorities[priority].flows:
                del self._priorities[priority]

    def wait(self, session: int) -> None:
        """The session has work."""
        priority, tenant = key = self._keys[session]
        self._tenants[key].sessions.wait(session)
        self._priorities[priority].wait(tenant)

    def rest(self, session: int) -> None:
        """The session has no work, or cannot go on with it now."""
        priority, tenant = key = self._keys[session]
        sessions = self._tenants[key].sessions
        sessions.waiting.pop(session, None)
        if not sessions.waiting:
            self._priorities[priority].waiting.pop(tenant, None)

    def begin(self, session: int) -> None:
        """The session is served from now on."""
        priority, tenant = key = self._keys[session]
        self._tenants[key].sessions.begin(session)
        self._priorities[priority].begin(tenant)

    def pause(self) -> None:
        """Nobody is served or waits."""
        for queue in self._priorities.values():
            queue.pause()
        for tenant in self._tenants.values():
            tenant.sessions.pause()

    def serve(self, session: int, seconds: float) -> None:
        """The session has had the device for so long."""
        priority, tenant = key = self._keys[session]
        self._tenants[key].sessions.serve(session, seconds)
        self._priorities[priority].serve(tenant, seconds)

    def next(self) -> int | None:
        """The session to serve now; None when none waits."""
        for priority in sorted(self._priorities, reverse=True):
            tenant = self._priorities[priority].first()
            if tenant is not None:
                return self._tenants[priority, tenant].sessions.first()
        return None

    def priority(self, session: int) -> int:
        return self._keys[session][0]

    @property
    def num_waiting(self) -> int:
        return sum(len(tenant.sessions.waiting) for tenant in self._tenants.values())
