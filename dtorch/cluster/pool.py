"""Which worker of the pool has which device of which session. Pure.

A session numbers its devices as its user does: ``cpu:0`` and ``cpu:1`` of two sessions are four different things. Each is
placed on a device of a worker: of those that the session does not use yet, on the one that the fewest sessions use, if
possible on a worker that this session uses already, so that its devices talk within a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from dtorch.transport.errors import MeshError

Device = tuple[str, int]  # kind, number
Spot = tuple[int, Device]  # a worker, and a device as that worker numbers it


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
        self._placed: dict[int, dict[Device, Spot]] = {}  # session -> its device -> where that is
        self._homeless: dict[int, dict[Device, str]] = {}  # session -> its device -> kind of what it had
        self._shunned: dict[int, set[int]] = {}  # session -> workers that it does not get on with

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
        """A worker is gone; the answer is the sessions that used it. What they had there is homeless."""
        member = self.members.pop(number, None)
        if member is None:
            return set()
        for session in member.sessions:
            self._unhouse(session, number)
        return member.sessions

    def shun(self, session: int, number: int) -> None:
        """A session has lost touch with a worker: what it has there is homeless, and it gets nothing there any more."""
        self._shunned.setdefault(session, set()).add(number)
        for device in self._unhouse(session, number):
            self._release(session, number, device)

    def _unhouse(self, session: int, number: int) -> list[Device]:
        placed = self._placed.get(session, {})
        homeless = self._homeless.setdefault(session, {})
        left = []
        for device in [d for d, (worker, _) in placed.items() if worker == number]:
            _, spot = placed.pop(device)
            homeless[device] = spot[0]
            left.append(spot)
        return left

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
        wanted = {(kind, device): kind for device in devices if (kind, device) not in placed}
        if not self._settle(session, wanted):
            have = self.counts(session).get(kind, 0)
            raise MeshError(
                f"{len(placed) + len(wanted)} {kind} devices are wanted, and the cluster has {have} of them now. "
                f"More workers (dtorch worker --head ... --devices {kind}:N) bring more"
            )

    def rehome(self, session: int) -> bool:
        """Place what is homeless of a session, if need be beside its other devices. False: there is nowhere to."""
        homeless = self._homeless.get(session, {})
        if not self._settle(session, homeless, shared=True):
            return False
        homeless.clear()
        return True

    def is_homeless(self, session: int) -> bool:
        return bool(self._homeless.get(session))

    def kinds_wanted(self, session: int) -> tuple[str, ...]:
        """Kinds of devices that a session has lost and not got back."""
        return tuple(sorted(set(self._homeless.get(session, {}).values())))

    def vacate(self, session: int, number: int) -> bool:
        """Place elsewhere what a session has on a worker that drains. False: there is nowhere to, and all stays."""
        placed = self._placed.get(session, {})
        before = {device: spot for device, spot in placed.items() if spot[0] == number}
        for device, (_, spot) in before.items():
            del placed[device]
            self._release(session, number, spot)
        if self._settle(session, {device: spot[0] for device, (_, spot) in before.items()}, shared=True):
            return True
        for device, (_, spot) in before.items():
            self._put(session, device, (number, spot))
        return False

    def move(self, session: int, device: Device, onto: Device | None = None) -> None:
        """Place a device of a session where another one of it is, or on another worker's device that the session does not use.

        Raises:
            MeshError: one of them is not placed, or there is nowhere to move to.
        """
        placed = self._placed.get(session, {})
        for each in (device, *(() if onto is None else (onto,))):
            if each not in placed:
                raise MeshError(f"nothing lives on {each[0]}:{each[1]} yet; devices come up with the first mesh of them")
        before = placed[device]
        if onto is not None:
            after = placed[onto]
        else:
            best = next(self._best(session, before[1][0], apart_from=before[0]), None)
            if best is None:
                raise MeshError(
                    f"the cluster has no other {before[1][0]} device for {device[0]}:{device[1]} now; "
                    "name one of the session's own to share its hardware"
                )
            after = best
        del placed[device]
        self._release(session, *before)
        self._put(session, device, after)

    def put_back(self, session: int, before: Mapping[Device, Spot]) -> None:
        """Let a session's devices be where they were, as ``devices_of`` had told, on workers that are all there still."""
        placed = self._placed[session]
        for device, spot in before.items():
            after = placed[device]
            if after != spot:
                del placed[device]
                self._release(session, *after)
                self._put(session, device, spot)

    def _settle(self, session: int, wanted: Mapping[Device, str], shared: bool = False) -> bool:
        """Place devices on hardware of some kind; all or none."""
        placed = self._placed.setdefault(session, {})
        best = {kind: self._best(session, kind, shared=shared) for kind in set(wanted.values())}
        made: list[Device] = []
        for device, kind in wanted.items():
            spot = next(best[kind], None)
            if spot is None:
                for each in made:
                    self._release(session, *placed.pop(each))
                return False
            self._put(session, device, spot)
            made.append(device)
        return True

    def _put(self, session: int, device: Device, spot: Spot) -> None:
        self._placed[session][device] = spot
        self.members[spot[0]].used[spot[1]].add(session)

    def _best(self, session: int, kind: str, *, shared: bool = False, apart_from: int = 0) -> Iterator[Spot]:
        """Places for one device after the other, the best first. What is yielded is taken.

        Args:
            shared: also where the session has other devices.
            apart_from: a worker that will not do.
        """
        placed = self._placed[session]
        mine = {worker for worker, _ in placed.values()}
        own = Counter(placed.values()) if shared else Counter[Spot]()
        shunned = self._shunned.get(session, set()) | {apart_from}
        options: list[tuple[int, int, bool, int, Device]] = []  # a heap; the least is the best
        for number, member in self.members.items():
            if not member.draining and number not in shunned:
                options += _options(kind, member, own, number not in mine)
        heapify(options)
        while options:
            count, _, is_elsewhere, number, device = heappop(options)
            member = self.members[number]
            if count < own[number, device] or (not shared and session in member.used[device]):
                continue
            yield number, device
            if shared:
                own[number, device] += 1
                heappush(options, (own[number, device], len(member.used[device]), False, number, device))
            if is_elsewhere and number not in mine:  # its other devices are better places from now on
                mine.add(number)
                for option in _options(kind, member, own, False):
                    heappush(options, option)

    def where(self, session: int, kind: str, device: int) -> Spot:
        """The worker that hosts a session's device, and what that is there. Raises KeyError: not reserved."""
        return self._placed[session][kind, device]

    def devices_of(self, session: int) -> dict[Device, Spot]:
        return dict(self._placed.get(session, {}))

    def release(self, session: int) -> None:
        """The session is over."""
        self._homeless.pop(session, None)
        self._shunned.pop(session, None)
        for worker, device in self._placed.pop(session, {}).values():
            self._release(session, worker, device)

    def _release(self, session: int, worker: int, device: Device) -> None:
        if (worker, device) not in self._placed.get(session, {}).values():  # another one of the session may be there too
            self.members[worker].used[device].discard(session)


def _options(kind: str, member: Member, own: Counter[Spot], is_elsewhere: bool) -> list[tuple[int, int, bool, int, Device]]:
    return [
        (own[member.number, device], len(sessions), is_elsewhere, member.number, device)
        for device, sessions in member.used.items()
        if device[0] == kind
    ]
