"""Which worker of the pool has which device of which session. Pure.

A session numbers its devices as its user does: ``cpu:0`` and ``cpu:1`` of two sessions are four different things. Each is
placed on a device of a worker: of those that the session does not use yet, on the one that the fewest sessions use, if
possible on a worker that this session uses already, so that its devices talk within a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from dtorch.transport.errors import MeshError

Device = tuple[str, int]  # kind, number


@dataclass
class Member:
    """A worker of the pool."""

    number: int
    devices: tuple[Device, ...]  # as it numbers them itself
    name: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    draining: bool = False  # gets no more devices to host
    used: dict[Device, set[int]] = field(default_factory=dict)  # device -> sessions on it

    @property
    def sessions(self) -> set[int]:
        return set().union(*self.used.values())


class Pool:
    """The workers of a head. Numbers of workers are never given twice."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self._last = 0
        self._placed: dict[int, dict[Device, tuple[int, Device]]] = {}  # session -> its device -> worker, device there

    def enlist(self, devices: Sequence[Device], name: str = "", labels: dict[str, str] | None = None) -> Member:
        """A worker joins. Without a name it gets one, and a name that is in use gets a number behind."""
        self._last += 1
        name = name or f"worker-{self._last}"
        taken = {member.name for member in self.members.values()}
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}-{count}"
        member = Member(self._last, tuple(devices), unique, dict(labels or {}), used={d: set() for d in devices})
        self.members[member.number] = member
        return member

    def remove(self, number: int) -> set[int]:
        """A worker is gone; the answer is the sessions that used it. What they had there is not placed any more."""
        member = self.members.pop(number, None)
        if member is None:
            return set()
        for placed in self._placed.values():
            for device in [d for d, (worker, _) in placed.items() if worker == number]:
                del placed[device]
        return member.sessions

    def find(self, which: str) -> Member | None:
        """The worker of that name or number."""
        for member in self.members.values():
            if which in (member.name, str(member.number)):
                return member
        return None

    def counts(self, session: int | None = None) -> dict[str, int]:
        """Kind -> devices that a session (a new one, when left out) can have in all."""
        found: dict[str, int] = {}
        for member in self.members.values():
            for device, sessions in member.used.items():
                if not member.draining or session in sessions:
                    found[device[0]] = found.get(device[0], 0) + 1
        return found

    def reserve(self, session: int, kind: str, devices: Iterable[int]) -> None:
        """Place those of a session's devices that are not placed yet; all or none.

        Raises:
            MeshError: there are not enough devices.
        """
        placed = self._placed.setdefault(session, {})
        wanted = [(kind, device) for device in dict.fromkeys(devices) if (kind, device) not in placed]
        if not wanted:
            return
        best = self._best(session, kind, {worker for worker, _ in placed.values()})
        made: list[Device] = []
        for device in wanted:
            place = next(best, None)
            if place is None:
                for each in made:
                    self._release(session, *placed.pop(each))
                have = self.counts(session).get(kind, 0)
                raise MeshError(
                    f"{len(placed) + len(wanted)} {kind} devices are wanted, and the cluster has {have} of them now. "
                    f"More workers (dtorch worker --head ... --devices {kind}:N) bring more"
                )
            placed[device] = place
            self.members[place[0]].used[place[1]].add(session)
            made.append(device)

    def _best(self, session: int, kind: str, mine: set[int]) -> Iterator[tuple[int, Device]]:
        """Places for one device after the other, the best first.

        Args:
            mine: workers that the session uses.
        """
        options: list[tuple[int, bool, int, Device]] = []  # a heap; the least is the best
        for number, member in self.members.items():
            if not member.draining:
                options += self._options(session, kind, member, number not in mine)
        heapify(options)
        while options:
            _, is_elsewhere, number, device = heappop(options)
            member = self.members[number]
            if session in member.used[device]:
                continue
            yield number, device
            if is_elsewhere and number not in mine:  # its other devices are better places from now on
                mine.add(number)
                for option in self._options(session, kind, member, False):
                    heappush(options, option)

    @staticmethod
    def _options(session: int, kind: str, member: Member, is_elsewhere: bool) -> list[tuple[int, bool, int, Device]]:
        return [
            (len(sessions), is_elsewhere, member.number, device)
            for device, sessions in member.used.items()
            if device[0] == kind and session not in sessions
        ]

    def where(self, session: int, kind: str, device: int) -> tuple[int, int]:
        """The worker that hosts a session's device, and the device's number there. Raises KeyError: not reserved."""
        worker, (_, number) = self._placed[session][kind, device]
        return worker, number

    def devices_of(self, session: int) -> dict[Device, tuple[int, Device]]:
        return dict(self._placed.get(session, {}))

    def release(self, session: int) -> None:
        """The session is over."""
        for worker, device in self._placed.pop(session, {}).values():
            self._release(session, worker, device)

    def _release(self, session: int, worker: int, device: Device) -> None:
        self.members[worker].used[device].discard(session)
