"""Who is not even listened to: addresses that keep coming with wrong keys. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque

MAX_REFUSALS = 10
WINDOW_S = 60.0
MAX_ADDRESSES = 4096
"""Addresses remembered; the one that was refused longest ago is forgotten first."""


class Refusals:
    """Refusals by address. Times are seconds of any clock that does not go back."""

    def __init__(self, max_refusals: int = MAX_REFUSALS, window_s: float = WINDOW_S) -> None:
        self._max, self._window_s = max_refusals, window_s
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def listens_to(self, address: str, now: float) -> bool:
        """False once there were too many refusals within the window."""
        times = self._times.get(address)
        if times is None:
            return True
        while times and times[0] <= now - self._window_s:
            times.popleft()
        if not times:
            del self._times[address]
        return len(times) < self._max

    def refused(self, address: str, now: float) -> None:
        times = self._times.setdefault(address, deque(maxlen=self._max))
        times.append(now)
        self._times.move_to_end(address)
        while len(self._times) > MAX_ADDRESSES:
            self._times.popitem(last=False)
