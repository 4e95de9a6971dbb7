"""How much the sessions of one key may use together. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dtorch.transport.errors import QuotaError


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one key, over all of its sessions; 0 means no limit."""

    max_devices: int = 0
    max_bytes: int = 0  # held by tensors, on all workers
    max_ops: int = 0  # recorded and not yet executed
    max_sessions: int = 0


@dataclass
class _Use:
    devices: set[tuple[str, int]] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)  # worker -> bytes
    running: dict[int, int] = field(default_factory=dict)  # batch -> calls

    @property
    def num_ops(self) -> int:
        return sum(self.running.values())


class Account:
    """What the sessions of one key use. Methods that check raise or tell why, and then change nothing.

    Attributes:
        limits: may be replaced at any time; what is used already stays.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self._uses: dict[int, _Use] = {}

    @property
    def num_devices(self) -> int:
        return sum(len(use.devices) for use in self._uses.values())

    @property
    def held_bytes(self) -> int:
        return sum(sum(use.held.values()) for use in self._uses.values())

    @property
    def num_ops(self) -> int:
        return sum(use.num_ops for use in self._uses.values())

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(self._uses)

    def open(self, session: int) -> None:
        """Raises QuotaError: too many sessions."""
        limit = self.limits.max_sessions
        if limit and len(self._uses) >= limit:
            raise QuotaError(f"key {self.name!r} may have {limit} sessions at a time, and has them; close one first")
        self._uses[session] = _Use()

    def close(self, session: int) -> None:
        self._uses.pop(session, None)

    def reserve(self, session: int, kind: str, devices: tuple[int, ...]) -> None:
        """Raises QuotaError: too many devices."""
        mine = self._uses[session].devices
        more = {(kind, device) for device in devices} - mine
        limit = self.limits.max_devices
        if limit and self.num_devices + len(more) > limit:
            raise QuotaError(
                f"{len(more)} more {kind} devices are above the quota of key {self.name!r}: "
                f"{limit} devices, {self.num_devices} of which are in use"
            )
        mine |= more

    def unreserve(self, session: int, kind: str, devices: tuple[int, ...]) -> None:
        """Devices that were reserved here and could not be had."""
        self._uses[session].devices -= {(kind, device) for device in devices}

    def submit(self, session: int, seq: int, num_calls: int) -> str:
        """A batch is about to run. The answer is why its calls must not, "" when they may."""
        use = self._uses[session]
        ops, held = self.num_ops, self.held_bytes
        use.running[seq] = num_calls
        if not num_calls:
            return ""
        limits = self.limits
        if limits.max_ops and ops + num_calls > limits.max_ops:
            return (
                f"{num_calls} more ops are above the quota of key {self.name!r}: {limits.max_ops} ops in flight, "
                f"{ops} of which are on their way; wait for some values first"
            )
        if limits.max_bytes and held > limits.max_bytes:
            return (
                f"key {self.name!r} holds {held} bytes, above its quota of {limits.max_bytes} bytes; "
                "free some tensors first"
            )
        return ""

    def finished(self, session: int, seq: int) -> None:
        use = self._uses.get(session)
        if use is not None:
            use.running.pop(seq, None)

    def held(self, session: int, worker: int, size_bytes: int) -> None:
        """A worker tells what the session holds there."""
        use = self._uses.get(session)
        if use is not None:
            use.held[worker] = size_bytes

    def use_of(self, session: int) -> tuple[int, int, int]:
        """(devices, bytes held, ops in flight) of a session."""
        use = self._uses[session]
        return len(use.devices), sum(use.held.values()), use.num_ops
