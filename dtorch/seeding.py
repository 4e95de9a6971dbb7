"""Whose random numbers: every task that seeds has a stream of its own, everybody else shares the session's."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from dtorch.runtime.recorder import Recorder

SHARED = 0
"""The stream of a session that is drawn from where no task has seeded."""

_HOSTS = ("IPython", "ipykernel")
"""Packages whose tasks run a notebook's cells: a seed in one cell is for the next ones too."""


class RandomStream:
    """Random numbers of one task and of those that it starts. With the last of them ends the stream.

    Args:
        number: in its session.
        owner: the task that seeds it.
        ended: where to say that nobody can draw from it any more.
    """

    __slots__ = ("_ended", "number", "owner")

    def __init__(self, number: int, owner: asyncio.Task[Any], ended: list[int]) -> None:
        self.number = number
        self.owner = weakref.ref(owner)
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self.number)  # inside any allocation: no lock, no message


class RandomStreams:
    """The streams of one session.

    Args:
        recorder: of the session.
        say: tells the workers, in program order: (seed or None, stream, streams that have ended).
    """

    def __init__(self, recorder: Recorder, say: Callable[[int | None, int, tuple[int, ...]], None]) -> None:
        self._recorder = recorder
        self._say = say
        self._current = SHARED  # what the workers draw from; written under the recorder's lock
        self._numbers = itertools.count(SHARED + 1)
        self._ended: list[int] = []
        self._key = object()  # a context variable may outlive the session
        recorder.turn = self._turn

    def seed(self, seed: int) -> None:
        """Seed what the running task draws from: its own stream, which begins with its first seed. Outside of tasks it is the
        one in force.

        Raises:
            CaptureError: inside a function that is being compiled.
        """
        self._recorder.interject(lambda: self._draw_from(self._own(), seed))

    def _turn(self) -> Callable[[], None] | None:
        known = _streams.get().get(self._key)
        number = SHARED if known is None else known.number
        return None if number == self._current else lambda: self._draw_from(number, None)

    def _draw_from(self, number: int, seed: int | None) -> None:
        num = len(self._ended)
        ended = tuple(self._ended[:num])
        del self._ended[:num]
        self._say(seed, number, ended)
        self._current = number

    def _own(self) -> int:
        task = _task()
        known = _streams.get()
        stream = known.get(self._key)
        if task is None or (stream is not None and stream.owner() is task):
            return SHARED if stream is None else stream.number
        stream = RandomStream(next(self._numbers), task, self._ended)
        _streams.set({**known, self._key: stream})
        return stream.number


_streams: ContextVar[dict[object, RandomStream]] = ContextVar("dtorch_streams", default={})  # noqa: B039  (never changed in place)


def _task() -> asyncio.Task[Any] | None:
    """The running task, unless it is one that runs the cells of a notebook."""
    if asyncio._get_running_loop() is None:
        return None
    task = asyncio.current_task()
    frame = getattr(task.get_coro(), "cr_frame", None) if task is not None else None
    hosted = frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _HOSTS
    return None if hosted else task
