"""The controller's shell: who decides, in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dtorch.runtime.controller import Asked, Event
from dtorch.runtime.shell import ControllerThread


class _Lock:
    """A lock that lets something happen in the first moment in which it is free."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._then: Callable[[], None] | None = then

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        then, self._then = self._then, None
        if then is not None:
            then()


def test_an_event_that_waited_for_the_loop_is_not_overtaken() -> None:
    shell: Any = object.__new__(ControllerThread)
    handled: list[Event] = []
    waited, later = Asked(1, False, False), Asked(2, False, False)

    class Controller:
        def handle(self, event: Event) -> list[Any]:
            handled.append(event)
            return []

    shell._controller, shell._links, shell._over, shell._num_waiting = Controller(), {}, False, 1
    shell._turn, shell._hearing = _Lock(lambda: shell.post(later)), threading.RLock()
    shell._handle_waiting(waited)
    assert handled == [waited, later]
    assert shell._num_waiting == 0
