"""A session on a worker: a thread of its own that runs the session's batches whenever it has the turn."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from dtorch.cluster.streams import SessionStreams
from dtorch.runtime.fair import FairExecutor
from dtorch.runtime.spending import Spending
from dtorch.runtime.turns import Dropped, Turns
from dtorch.runtime.worker import Worker
from dtorch.transport.cluster import Open, Part
from dtorch.transport.messages import (
    Allow,
    AskRandomState,
    AskStatistics,
    AskTrace,
    Batch,
    Define,
    Failure,
    Forget,
    FromWorker,
    RandomState,
    Resume,
    Seed,
    StartTrace,
    ToWorker,
)

if TYPE_CHECKING:
    from dtorch.transport.groups import Group, Spec, UnderWay

logger = logging.getLogger(__name__)

BILLED = (
    Batch, Define, Forget, Seed, Allow, AskStatistics, AskRandomState, RandomState, StartTrace, AskTrace
)  # fmt: skip
"""What a client's own program makes a worker do. Everything else is done because a worker was lost, or moves."""

MakeGroup = Callable[[int, tuple[int, ...], str, int, Callable[[], bool]], "Group"]
"""Of session, members, kind, epoch, and what tells that the session is to wait for nobody any more."""


class Look:
    """Asks the session's thread to count what the session holds."""


class Lodger:
    """One session on this worker. Its methods are called in the thread of the link.

    Args:
        worker: this worker's number.
        resolve: op name -> function.
        make_group: a process group of one session.
        send: passes a message to the head, from any thread.
        folders: where the session may read and write files.
        ended: called, in the session's thread, once the session holds nothing here any more.

    Attributes:
        spending: what the session has used since the last report.
    """

    def __init__(
        self,
        opened: Open,
        worker: int,
        turns: Turns,
        resolve: Callable[[str], Callable[..., Any]],
        make_group: MakeGroup,
        send: Callable[[FromWorker | Part], None],
        folders: Sequence[str],
        ended: Callable[[Spending], None] = lambda _: None,
    ) -> None:
        self.session = opened.session
        self.spending = Spending(opened.session)
        self._ended = ended
        self._counted_ns = 0
        self._is_billed = True
        self._dropped = False
        self._turns = turns
        self._send = send
        self._groups: list[Group] = []
        self._epoch = 0  # of these
        self._inbox: SimpleQueue[ToWorker | Look | None] = SimpleQueue()
        self._executor: FairExecutor | None = None
        self._make = make_group
        self.streams = SessionStreams(opened.session, turns, send, opened.max_bytes)
        make = partial(
            FairExecutor, turns=turns, limit_bytes=opened.max_bytes, folders=folders, spending=self.spending
        )

        def executor(*facts: Any) -> FairExecutor:
            self._executor = make(*facts)
            return self._executor

        self._worker = Worker(worker, {}, resolve, self._group, send, streams=self.streams, executor=executor)
        turns.add(opened.session, opened.tenant, opened.weight, opened.priority)
        self._thread = threading.Thread(target=self._run, name=f"dtorch-session-{opened.session}", daemon=True)
        self._thread.start()

    def put(self, message: ToWorker) -> None:
        """Something for the session, in order."""
        self._inbox.put(message)

    def look(self) -> None:
        """Let the bytes that the session holds be counted, if anything has run since they were."""
        if self._executor is not None and self._executor.is_stale:
            self._inbox.put(Look())

    def halt(self, epoch: int) -> None:
        """Another worker of the session is gone: stop at the next call, and wait for no other worker."""
        if self._executor is not None:
            self._worker.halt(self.session, epoch)

    def drop(self) -> None:
        """End the session here, whatever it is doing. Returns at once."""
        self._dropped = True
        self._turns.drop(self.session)
        self.streams.close()
        self._inbox.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def fault(self, error: Exception) -> None:
        """The session cannot go on."""
        logger.debug("session %d cannot go on", self.session, exc_info=error)
        trace = "".join(traceback.format_exception(error))
        self._send(Failure(self.session, 0, -1, -1, 0, "", type(error).__name__, str(error), trace))

    # ---- the session's thread

    def _run(self) -> None:
        try:
            # Below autograd: ops run as under no_grad, without its book-keeping, and make ordinary tensors.
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                self._serve()
        except Dropped:
            logger.debug("session %d was dropped", self.session)
        except Exception as error:
            self.fault(error)
        finally:
            self._turns.give(self.session)
            self._bill()
            for group in self._groups:
                group.close()
            self._groups.clear()
            self._executor = None
            del self._worker  # and with it the session's tensors
            self._turns.remove(self.session)
            self._ended(self.spending)

    def _serve(self) -> None:
        turns, session, inbox = self._turns, self.session, self._inbox
        has_turn = False
        while True:
            if has_turn and inbox.empty():
                turns.give(session)
                self._bill()
                has_turn = False
            message = inbox.get()
            if message is None:
                return
            if has_turn:
                turns.step(session)
            else:
                turns.take(session)
                has_turn = True
            if isinstance(message, Look):
                if self._executor is not None:
                    self._executor.ledger.look()
                continue
            self._is_billed = isinstance(message, BILLED)
            self._worker.handle(message)
            if isinstance(message, Resume) and self._executor is not None:
                self._executor.ledger.look()  # what the calls that ran again made was added to what there was
            self._bill()

    def _bill(self) -> None:
        """Note the time that passed with the turn since the last call."""
        now = self._turns.spent_ns(self.session)
        self.spending.spend(now - self._counted_ns, not self._is_billed)
        self._counted_ns = now

    def _group(self, members: tuple[int, ...], kind: str, epoch: int = 0) -> Group:
        if epoch != self._epoch:  # those of before are closed
            self._groups.clear()
            self._epoch = epoch
        with self._turns.released(self.session):
            group = self._make(self.session, members, kind, epoch, self._is_halting)
        self._groups.append(group)
        return _PatientGroup(group, self._turns, self.session)

    def _is_halting(self) -> bool:
        return self._dropped or self._worker.is_halting(self.session)


class _PatientGroup:
    """A group whose exchanges wait for the others without having the turn."""

    def __init__(self, group: Group, turns: Turns, session: int) -> None:
        self._group = group
        self._turns = turns
        self._session = session
        self.members = group.members
        self.takes_cuda = group.takes_cuda

    def exchange(
        self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool
    ) -> tuple[dict[int, list[torch.Tensor]], bool]:
        with self._turns.released(self._session):
            return self._group.exchange(sends, receives, ok)

    def start(self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool) -> UnderWay:
        return _Patience(self._group.start(sends, receives, ok), self._turns, self._session)

    def close(self) -> None:
        self._group.close()

    def abort(self) -> None:
        self._group.abort()


class _Patience:
    """An exchange that is waited for without having the turn."""

    def __init__(self, under_way: UnderWay, turns: Turns, session: int) -> None:
        self._under_way, self._turns, self._session = under_way, turns, session

    def wait(self) -> tuple[dict[int, list[torch.Tensor]], bool]:
        with self._turns.released(self._session):
            return self._under_way.wait()
