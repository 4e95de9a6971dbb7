"""Workers that go and come: what a session does when it has lost one, and how devices are moved on purpose."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtorch.failures import Failures
from dtorch.mesh import DeviceMesh
from dtorch.runtime.controller import Forfeited, Migrating, Regained
from dtorch.runtime.promise import Promise
from dtorch.runtime.shell import ControllerThread
from dtorch.transport.errors import ConnectionLostError, DTorchError, MeshError, WorkerLostError

if TYPE_CHECKING:
    from dtorch.cluster.remote import RemoteController
    from dtorch.session import Session

logger = logging.getLogger("dtorch")

MAX_LOSSES = 1024
"""Losses remembered; the oldest are forgotten first."""


@dataclass(frozen=True)
class Loss:
    """A loss that the session got over.

    Attributes:
        workers: number -> how it ended.
        silent_s: how long a worker that was found out by its silence had been silent; None: its end was reported at once. On
            a head, of any worker.
        noticed_at: when the loss was known, on the clock of ``time.monotonic``.
        halted_s: from then until all workers went on. What was under way is done by then.
        recomputed_ops: calls that ran a second time.
        copied_bytes: between workers, of pieces that others still held.
    """

    workers: dict[int, str]
    silent_s: float | None
    noticed_at: float
    halted_s: float
    recomputed_ops: int
    copied_bytes: int


@dataclass(frozen=True)
class Move:
    """Devices that were moved.

    Attributes:
        devices: such as "cpu:1".
        pause_s: for which all workers stood still.
        moved_bytes: sent between workers.
    """

    devices: tuple[str, ...]
    pause_s: float
    moved_bytes: int


class Elastic:
    """Losses and moves of one session. The ``on_`` methods are called in the controller's thread."""

    def __init__(self, session: Session, failures: Failures) -> None:
        self._session = session
        self._failures = failures
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Promise[Move]] = {}
        self._silent_s: float | None = None
        self.losses: list[Loss] = []
        self.lost_workers = 0
        self.recomputed_ops = 0
        self.copied_bytes = 0

    # ---- what the controller says

    def on_silent(self, worker: int, silent_s: float) -> None:
        self._silent_s = silent_s

    def on_forfeited(self, forfeited: Forfeited) -> None:
        error = WorkerLostError(f"worker {forfeited.worker}", forfeited.reason, forfeited.tensors)
        logger.warning("%s", error)
        self._failures.lose(error)

    def on_regained(self, regained: Regained, halted_s: float) -> None:
        self.recomputed_ops += regained.recomputed_ops
        self.copied_bytes += regained.copied_bytes
        silent_s, self._silent_s = self._silent_s, None
        if regained.lost:
            workers = dict(regained.lost)
            self.lost_workers += len(workers)
            took_s = time.monotonic() - halted_s
            loss = Loss(workers, silent_s, took_s, halted_s, regained.recomputed_ops, regained.copied_bytes)
            self.losses.append(loss)
            del self.losses[:-MAX_LOSSES]
            logger.warning(
                "%s; the session goes on after %.3f s: %d calls again, %d bytes copied",
                ", ".join(f"worker {worker} was lost ({reason})" for worker, reason in workers.items()),
                halted_s, loss.recomputed_ops, loss.copied_bytes,
            )  # fmt: skip
        moved = tuple(f"{kind}:{number}" for kind, number in regained.moved)
        for ticket in regained.tickets:
            promise = self._waiting.pop(ticket, None)
            if promise is not None:
                promise.set_result(Move(moved, halted_s, regained.copied_bytes))

    def end(self, error: DTorchError) -> None:
        """The session is over."""
        while self._waiting:
            _, promise = self._waiting.popitem()
            promise.set_exception(type(error)(*error.args))

    # ---- what the user asks for

    def migrate(self, source: Any, target: Any = None) -> Promise[Move]:
        """Move devices, with all that lives on them, to the worker and the hardware of another one.

        Meshes and tensors keep their devices' names. All workers stand still while it happens, behind what was recorded
        before and in front of what comes later; the client does not.

        Args:
            source: "cpu:1", a ``torch.device``, a mesh, or a list of them.
            target: a device such as "cpu:3" or "cuda:0"; None: a new worker of their own, on a head devices of other workers.

        Raises:
            MeshError: there is no such device, or the head has none to move to.
            RuntimeError: the session does not recover.
        """
        places = _places(source)
        onto = None if target is None else _places(target)
        if onto is not None and len(onto) != 1:
            raise MeshError(f"migrate: the target is one device, such as 'cpu:3', not {target!r}")
        session = self._session
        session.check_open()
        thread = session.thread
        session.recorder.flush()
        if not isinstance(thread, ControllerThread):
            return self._ask_head(thread, places, None if onto is None else onto[0])
        thread = self._recovering()
        if any(thread.worker_of(*place) is None for place in places):
            session.ask_statistics().result()  # behind it, all that was recorded is known
        for kind, number in places:
            if thread.worker_of(kind, number) is None:
                raise MeshError(f"migrate: nothing lives on {kind}:{number} yet; devices come up with the first mesh of them")
        return self._ask(places, None if onto is None else onto[0], None)

    def drain(self, worker: int) -> Promise[Move]:
        """Move all that lives on a worker to the others (to a new one, if it is the last), and end it.

        Raises:
            ValueError: there is no such worker.
            RuntimeError: the session does not recover.
        """
        alive = self._recovering().workers
        if worker not in alive:
            known = ", ".join(map(str, alive)) or "none"
            raise ValueError(f"drain: there is no worker {worker!r}; running: {known}")
        return self._ask((), None, worker)

    def _recovering(self) -> ControllerThread:
        session = self._session
        session.check_open()
        thread = session.thread
        if not isinstance(thread, ControllerThread):
            raise RuntimeError("the workers of this session belong to a head: its admin empties one by `dtorch drain WORKER`")
        if session.options.lineage is None:
            raise RuntimeError(
                "devices move only in a session that recovers: dtorch.init(workers='per-device') or dtorch.init(recover=True)"
            )
        return thread

    def _ask(self, places: tuple[tuple[str, int], ...], target: tuple[str, int] | None, leaving: int | None) -> Promise[Move]:
        thread = self._recovering()
        self._session.recorder.flush()
        ticket = next(self._tickets)
        promise = self._expect(ticket)
        try:
            thread.post(Migrating(ticket, places, target, leaving))
        except ConnectionLostError as error:
            promise.set_exception(error)
        return promise

    def _ask_head(
        self, thread: RemoteController, places: tuple[tuple[str, int], ...], target: tuple[str, int] | None
    ) -> Promise[Move]:
        ticket = thread.ticket()
        promise = self._expect(ticket)
        try:
            thread.migrate(ticket, places, target)
        except DTorchError:
            self._waiting.pop(ticket, None)
            raise
        return promise

    def _expect(self, ticket: int) -> Promise[Move]:
        promise: Promise[Move] = Promise()
        with self._lock:
            self._waiting[ticket] = promise
        return promise


def _places(devices: Any) -> tuple[tuple[str, int], ...]:
    """``"cpu:1"``, a torch.device, a mesh, or several of them, as (kind, number)."""
    if isinstance(devices, DeviceMesh):
        return tuple((devices.device_type, number) for number in devices.devices)
    if isinstance(devices, (list, tuple)):
        return tuple(place for device in devices for place in _places(device))
    kind, _, number = str(devices).partition(":")
    if not kind.isidentifier() or not (number or "0").isdecimal():
        raise MeshError(f"a device is written 'cpu:1' or 'cuda:0', not {devices!r}")
    return ((kind, int(number or 0)),)
