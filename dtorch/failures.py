"""What became of calls that failed: remembered for whoever asks for their values, reported once to the others."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

from dtorch.lines import line_at
from dtorch.placement import from_code
from dtorch.runtime.controller import Failed
from dtorch.runtime.poison import LOST
from dtorch.transport.errors import DTorchError, OpError, WorkerLostError, op_error
from dtorch.transport.messages import Layout

MAX_FAILURES = 4096
"""Failed calls remembered; the oldest are forgotten first."""

Call = tuple[int, int]  # (batch, index in it)


@dataclass(frozen=True)
class SignatureFacts:
    """What a signature stands for.

    Attributes:
        writes: writes an input in place and makes nothing else.
        random: draws from the session's generator.
        mutates: writes inputs beside making results.
    """

    op: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...] = ()
    writes: bool = False
    random: bool = False
    mutates: bool = False


UNKNOWN = SignatureFacts("dtorch", ())


class Failures:
    """Failed calls of one session. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: dict[tuple[int, int], tuple[OpError, Call]] = {}  # (worker, number): error, call
        self._unseen: dict[Call, OpError] = {}  # failed calls that nobody was told of
        self._lost: WorkerLostError | None = None  # the last loss that took tensors with it
        self._unseen_loss = False
        self._seen: dict[Call, None] = {}  # those that somebody was told of; more workers may report them

    def add(
        self, failed: Failed, op: str, inputs: tuple[Layout, ...], at: tuple[str, int] | None, mesh: str = ""
    ) -> None:
        """A worker reports a failure.

        Args:
            op: name of the op that failed.
            inputs: layouts of its inputs.
            at: file and line of the user's call.
            mesh: that of its inputs and results, as text.
        """
        failure = failed.failure
        call = (failure.seq, failure.index)
        location, line = line_at(at)
        described = [describe(layout) for layout in inputs]
        worker = f"worker {failed.worker}"
        error = op_error(
            (op, failure.text, failure.kind, location, line, described, worker, failure.device, failure.trace, mesh)
        )
        with self._lock:
            if len(self._known) >= MAX_FAILURES:
                del self._known[next(iter(self._known))]
            self._known[failed.worker, failure.error] = (error, call)
            if call not in self._seen and len(self._unseen) < MAX_FAILURES:
                self._unseen.setdefault(call, error)

    def lose(self, error: WorkerLostError) -> None:
        """Tensors are gone for good."""
        with self._lock:
            if self._lost is not None and self._unseen_loss:
                error = WorkerLostError(error.worker, error.reason, (*self._lost.tensors, *error.tensors))
            self._lost, self._unseen_loss = error, True

    def take_loss(self) -> WorkerLostError | None:
        """The loss of tensors that nobody was told of; from now on it counts as told."""
        with self._lock:
            unseen, self._unseen_loss = self._unseen_loss, False
            return self._lost if unseen else None

    def error_of(self, which: tuple[int, int]) -> tuple[DTorchError, Call]:
        """A new exception for failure (worker, number), and the call that failed."""
        with self._lock:
            if which[1] == LOST and self._lost is not None:
                self._unseen_loss = False
                return WorkerLostError(*self._lost.args), (0, -1)
            if which[1] < 0 and self._known:
                which = next(reversed(self._known))
            error, call = self._known.get(which, (None, (0, -1)))
        if error is None:
            return OpError("dtorch", "the value depends on an op that failed"), call
        return with_notes(error), call

    def see(self, call: Call) -> None:
        """Somebody is told of this failed call, so it need not be reported any more."""
        with self._lock:
            self._unseen.pop(call, None)
            while len(self._seen) >= MAX_FAILURES:
                del self._seen[next(iter(self._seen))]
            self._seen[call] = None

    def take_unseen(self) -> list[OpError]:
        """Errors of calls that nobody was told of; from now on they count as told."""
        with self._lock:
            calls, errors = list(self._unseen), list(self._unseen.values())
            for call in calls:
                self.see(call)
            return errors


def describe(layout: Layout) -> str:
    """``float32[4, 3] on [Shard(dim=0)]``"""
    placed = ", ".join(str(from_code(c)) for c in layout.codes)
    return f"{layout.dtype}{list(layout.shape)} on [{placed}]"


def with_notes(error: OpError) -> OpError:
    """A new exception of the same facts, with the worker's traceback below."""
    made = op_error(error.args)
    if made.trace:
        note(made, f"Traceback on {made.worker}:\n{made.trace.rstrip()}")
    return made


def note(error: BaseException, text: str) -> None:
    """Add ``text`` below the traceback of ``error``."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:  # tracebacks of older Pythons show no notes, so the text itself grows
        error.__dict__.setdefault("__notes__", []).append(text)
