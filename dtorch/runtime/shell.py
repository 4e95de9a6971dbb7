"""The controller's shell: a thread with its own event loop that performs what ``Controller`` decides."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

from typing_extensions import assert_never

from dtorch.runtime.controller import (
    Asked,
    Closing,
    Controller,
    Counted,
    Event,
    Exited,
    Failed,
    Finished,
    Forfeited,
    Halting,
    Instruction,
    Interrupt,
    Joined,
    Kill,
    Lost,
    Received,
    Regained,
    Send,
    Settled,
    Start,
    Submitted,
    Suspect,
    Vacated,
)
from dtorch.runtime.ear import HAS_EAR, Ear
from dtorch.runtime.launcher import LocalLauncher, private_folder
from dtorch.runtime.live import Live
from dtorch.runtime.liveness import Dead
from dtorch.runtime.outgoing import Outgoing
from dtorch.runtime.pulse import Pulse
from dtorch.runtime.room import Room
from dtorch.runtime.shield import LOOK_S, Shield
from dtorch.runtime.spin import Spinner
from dtorch.runtime.tracing import Spans
from dtorch.transport import codec
from dtorch.transport.codec import Frame
from dtorch.transport.errors import ConnectionLostError, DTorchError, ProtocolError
from dtorch.transport.link import Link
from dtorch.transport.messages import Done, Hello, Statistics
from dtorch.transport.server import Server
from dtorch.transport.store import StoreService

logger = logging.getLogger(__name__)

LOOK_NAME = "top"
"""A socket in the session's private folder that tells its counters, as one line of JSON, to whoever connects."""
LOOK_TICKET = -1
"""Names the question to the workers that a look asks; those of the client are positive."""
SUSPECT_S = 2.0
"""How long after a worker lost touch with another one that other's end may be reported."""


class Keeper(Protocol):
    """Who keeps the account of losses and moves. Called in the controller's thread; must not block."""

    def on_forfeited(self, forfeited: Forfeited) -> None: ...
    def on_regained(self, regained: Regained, halted_s: float) -> None:
        """All workers go on, after ``halted_s``."""
        ...

    def on_silent(self, worker: int, silent_s: float) -> None:
        """A worker counts as lost because it was silent for so long."""
        ...


class Listener(Protocol):
    """The client's side of what comes back. Called in the controller's thread; must not block."""

    @property
    def elastic(self) -> Keeper: ...

    def finished(self, seq: int) -> None: ...
    def settled(self, settled: Settled) -> None: ...
    def counted(self, counted: Counted) -> None: ...
    def failed(self, failed: Failed) -> None: ...
    def lost(self, worker: int, reason: str) -> None: ...
    def broken(self, error: BaseException) -> None:
        """The controller itself failed; nothing will come back any more."""
        ...

    def gone(self, error: DTorchError) -> None:
        """A head has ended the session, or is out of reach."""
        ...

    def tick(self) -> None: ...


class ControllerThread:
    """Runs a controller for one embedded session.

    The client's threads call ``submit``, ``post``, ``request_flush``, ``wait_for_room`` and ``close``; everything else
    happens in this thread.

    Args:
        listen: None for a unix socket in a private folder; "host" or "host:port" for TCP.
        worker_args: further arguments of every worker's entry.
        start_timeout_s: how long a worker may take from its start to its handshake.
    """

    def __init__(
        self,
        controller: Controller,
        listener: Listener,
        *,
        entry: str,
        worker_args: dict[str, Any],
        listen: str | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._controller = controller
        self._listener = listener
        self._listen = listen
        self._worker_args = worker_args
        self._token = secrets.token_urlsafe(32)
        self._links: dict[int, Link] = {}
        self._store = StoreService()
        self.folder: Path = private_folder()
        self._launcher = LocalLauncher(self.folder, entry)
        self._server: Server | None = None
        self._start_timeout_s = start_timeout_s
        self.room = Room()  # entered by submit only, one thread at a time; left by this thread only
        # The controller is entered by one thread at a time, and frames leave in the order of its decisions. Nothing
        # that calls the listener may hold it: the listener's locks are taken before it in the client's threads.
        self._turn = threading.Lock()
        self._num_waiting = 0  # events and instructions on their way to the loop's thread; guarded by _turn
        self._roomy = threading.Condition()
        self._timer: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Event | None = None
        self._ready = threading.Event()
        self._fault: BaseException | None = None
        self._all_gone: asyncio.Event | None = None
        self._lost = False
        self._over = False  # nothing will finish any more
        self.spans: Spans | None = None  # while a profile runs
        self.live = Live()
        self._is_asking = False  # workers have not yet answered the last question for a look
        self.loop: asyncio.AbstractEventLoop = new_loop()
        self.ear = Ear(self.loop) if HAS_EAR else None
        self._spinner = Spinner(self.loop, None if self.ear is None else self.ear.contention)
        # Held by whoever handles what workers say, or performs what came of it: the loop's thread, or one that waits.
        # The listener's locks are taken inside of it, and ``_turn``.
        self._hearing = threading.RLock() if self.ear is None else self.ear.lock
        self._pulse = Pulse(self.loop, self._launcher.states, self._dead)
        self._halted_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="dtorch-controller", daemon=True)
        self._launcher.start()  # before there is a thread, so that this process may be forked
        self._thread.start()
        self._ready.wait()
        if self._fault is not None:
            raise self._fault

    # ---- the client's threads

    def submit(self, batch: Outgoing) -> None:
        self.room.enter(batch.seq, batch.size_bytes)
        spans = self.spans
        began = 0 if spans is None else perf_counter_ns()
        self.post(Submitted(batch))
        if spans is not None:
            spans.add("controller", "batch", began, row="in the client's thread", seq=batch.seq, bytes=len(batch.body))
        # Somebody waits: be awake when the value comes. A thread that blocks reads itself (``ear``).
        if batch.fetches and (self.ear is None or asyncio._get_running_loop() is not None):
            try:
                self.loop.call_soon_threadsafe(self._spinner.touch)
            except RuntimeError:
                logger.debug("no spinning: the controller has ended")

    def post(self, event: Event) -> None:
        """Tell the controller of an event, in order.

        The caller's own thread decides and sends, when nothing waits and the sockets take it: two wake-ups less than
        through the loop. What cannot be done here is handed to the loop's thread.
        """
        with Shield():
            try:
                self._decide_here(event)
            except ConnectionLostError:
                raise
            except Exception as error:
                self.loop.call_soon_threadsafe(self._fail, error)

    def _decide_here(self, event: Event, hears: bool = False) -> list[Instruction]:
        """Decide and send in a thread that is not the loop's; the rest goes to the loop's thread.

        Args:
            hears: the caller holds ``_hearing``, and performs the answer, which is what came for the listener.
        """
        mine: list[Instruction] = []
        with self._turn:
            later: list[Instruction] | None = None
            if not self._num_waiting and not self._over:
                later = self._controller.handle(event)
                while later:
                    first = later[0]
                    if isinstance(first, Send):
                        link = self._links.get(first.worker)
                        if link is not None and not link.send_from_thread(first.frame):
                            break
                        self.live.of(first.worker).sent_bytes += len(first.frame)
                    elif hears and isinstance(first, (Finished, Settled)):
                        mine.append(first)
                    else:
                        break
                    later.pop(0)
                if not later:
                    return mine
            self._num_waiting += 1
            try:
                if later is None:
                    self.loop.call_soon_threadsafe(self._handle_waiting, event)
                else:
                    self.loop.call_soon_threadsafe(self._perform_waiting, later)
            except RuntimeError as error:
                raise ConnectionLostError("the controller has ended") from error
        return mine

    def _handle_waiting(self, event: Event) -> None:
        self._handle(event, num_waited=1)

    def _perform_waiting(self, instructions: list[Instruction]) -> None:
        with self._hearing:
            with self._turn:
                self._num_waiting -= 1
                rest = self._send(instructions)
            self._perform(rest)

    def request_flush(self, delay_s: float) -> None:
        try:
            self.loop.call_soon_threadsafe(self._set_timer, delay_s)
        except RuntimeError:
            logger.debug("no flush: the controller has ended")

    def wait_for_room(self) -> None:
        if not self.room.is_full or threading.current_thread() is self._thread:
            return
        with self._roomy:
            while not self.room.is_roomy and not self._over:
                self._roomy.wait(LOOK_S)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every live worker."""
        return dict(self._launcher.pids)

    @property
    def workers(self) -> tuple[int, ...]:
        """Numbers of the workers that run or start."""
        return self._controller.workers

    def worker_of(self, kind: str, device: int) -> int | None:
        """The worker of a device; None when it has none yet."""
        return self._controller.worker_of(kind, device)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames sent to workers."""
        return self._controller.bytes_sent

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop workers after what is queued, then the thread."""
        if self._thread.is_alive():
            try:
                self.loop.call_soon_threadsafe(self._begin_stop)
            except RuntimeError:
                logger.debug("the controller has ended already")
            if not self.is_own_thread():
                self._thread.join(timeout_s + 8.0)

    # ---- this thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self._fault = error
            if self._ready.is_set():
                self._listener.broken(error)
        finally:
            self._end_waiting()
            self._ready.set()
            try:
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            finally:
                asyncio.set_event_loop(None)
                self.loop.close()
                if self.ear is not None:
                    self.ear.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._launcher.attach(self.loop, self._exited, self._could_not_start)
        try:
            routes = self._store.routes()
            if self._listen is None:
                self._server = await Server.start(
                    path=str(self.folder / "control"), token=self._token, on_link=self._on_link, routes=routes,
                    session=self._controller.session,
                )
            else:
                host, _, port = self._listen.partition(":")
                self._server = await Server.start(
                    host=host, port=int(port or 0), token=self._token, on_link=self._on_link, routes=routes,
                    session=self._controller.session,
                )
            looks = await asyncio.start_unix_server(self._look, str(self.folder / LOOK_NAME))
            self._ready.set()
            await self._stopping.wait()
            looks.close()
            self._handle(Closing())
            if not self._lost and self._controller.workers:
                try:
                    await asyncio.wait_for(self._all_gone.wait(), 1.5)
                except asyncio.TimeoutError:
                    logger.debug("workers did not stop in time")
        finally:
            self._pulse.close()
            self._launcher.close(0.5)
            if self._server is not None:
                await self._server.stop()

    async def _look(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody of this user looks at the session (``python -m dtorch top``): tell the counters, and ask the workers for
        theirs, for the next time: they may be busy."""
        try:
            room = self.room
            found = self.live.snapshot(
                self.pids, session=self._controller.session, pid=os.getpid(), batches_in_flight=room.num_batches,
                bytes_in_flight=room.num_bytes,
            )
            if not self._is_asking:
                self._is_asking = True
                self._handle(Asked(LOOK_TICKET, False, False))
            writer.write(json.dumps(found).encode() + b"\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError as error:
            logger.debug("whoever looked is gone: %s", error)

    def _begin_stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    def _end_waiting(self) -> None:
        with self._roomy:
            self._over = True
            self._roomy.notify_all()

    def _handle(self, event: Event, num_waited: int = 0) -> None:
        """Perform what the controller decides. An error in here is ours: it ends the session, so nobody waits on.

        Args:
            num_waited: 1 for an event that waited. It counts as waiting until its frames are sent: else another thread's
                later event could overtake it.
        """
        try:
            with self._hearing:
                with self._turn:
                    self._num_waiting -= num_waited
                    rest = self._send(self._controller.handle(event))
                self._perform(rest)
        except Exception as error:
            logger.debug("the controller failed", exc_info=True)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._lost = True
        self._listener.broken(error)
        self._end_waiting()
        self._begin_stop()

    def _send(self, instructions: list[Instruction]) -> list[Instruction]:
        """Perform what sends, within the turn so that frames keep the order of decisions; the answer is the rest."""
        rest: list[Instruction] = []
        for instruction in instructions:
            if not isinstance(instruction, Send):
                rest.append(instruction)
                continue
            link = self._links.get(instruction.worker)
            if link is not None:
                try:
                    link.send_nowait(instruction.frame)
                    self.live.of(instruction.worker).sent_bytes += len(instruction.frame)
                except ConnectionLostError as error:
                    logger.debug("worker %d: %s", instruction.worker, error)
        return rest

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    raise AssertionError("sends are performed within the turn")
                case Finished(seq):
                    self._listener.finished(seq)
                    self.room.leave(seq)
                    if self.room.is_roomy:
                        with self._roomy:
                            self._roomy.notify_all()
                case Settled():
                    self._listener.settled(instruction)
                    if not self._controller.awaited:
                        self._spinner.rest()  # whoever was woken needs a core
                case Counted(ticket, answers):
                    if ticket == LOOK_TICKET:
                        self._is_asking = False
                        for answer in answers:
                            if isinstance(answer, Statistics):
                                self.live.of(answer.worker).counters = answer.counters
                    else:
                        self._listener.counted(instruction)
                case Failed():
                    self._listener.failed(instruction)
                case Start():
                    self._start(instruction)
                case Suspect():
                    self.loop.call_later(SUSPECT_S, self._check_suspect, instruction)
                case Interrupt(worker, epoch):
                    self._pulse.halt(worker, self._controller.session, epoch)
                case Kill(worker):
                    self._pulse.forget(worker)
                    self._launcher.kill(worker)
                case Halting():
                    self._halted_at = self._halted_at or self.loop.time()
                case Forfeited():
                    self._listener.elastic.on_forfeited(instruction)
                case Regained():
                    began, self._halted_at = self._halted_at, None
                    self._listener.elastic.on_regained(instruction, self.loop.time() - (began or self.loop.time()))
                case Lost(worker, reason):
                    self._lose(worker, reason)
                case Vacated():
                    raise AssertionError("the workers of an embedded session are its own")
                case _:
                    assert_never(instruction)

    def _start(self, start: Start) -> None:
        assert self._server is not None
        args: dict[str, Any] = {
            "worker": start.worker,
            "address": self._server.address,
            "token": self._token,
            "kind": start.kind,
            "device": start.device,
            "shared": start.shared,
            **self._worker_args,
        }
        try:
            self._launcher.spawn(start.worker, args)
        except (ConnectionLostError, RuntimeError) as error:
            self._exited(start.worker, str(error))
        else:
            self.loop.call_later(self._start_timeout_s, self._check_joined, start.worker)

    def _check_joined(self, worker: int) -> None:
        if self._controller.is_starting(worker):
            self._exited(worker, f"it was started and did not connect within {self._start_timeout_s:g} s")

    def _check_suspect(self, suspect: Suspect) -> None:
        if self._controller.epoch == suspect.epoch:
            self._exited(suspect.worker, suspect.reason)

    def _dead(self, dead: Dead) -> None:
        self._listener.elastic.on_silent(dead.worker, dead.silent_s)
        self._launcher.kill(dead.worker)
        self._exited(dead.worker, dead.reason)

    async def _on_link(self, link: Link, hello: Hello) -> None:
        worker = hello.worker
        if hello.pulse:
            await self._pulse.serve(worker, link)
            return
        if worker in self._links or worker not in self._controller.workers:
            await link.close("no such worker is expected")
            return
        self._links[worker] = link
        logger.debug("worker %d of session %d is up: process %d", worker, self._controller.session, hello.pid)
        self._handle(Joined(worker))
        await link.hear(partial(self._hear, worker), self.ear)
        self._links.pop(worker, None)
        if not (self._stopping and self._stopping.is_set()):
            # The fork server reports how it ended; this only covers a worker that is alive but hung up.
            self.loop.call_later(0.5, self._exited, worker, "its connection closed")

    def _hear(self, worker: int, frame: Frame) -> bool:
        """What a worker says, in the loop's thread or one that waits; the answer is whether it is listened to any longer."""
        in_loop = self.is_own_thread()
        try:
            spans = self.spans
            began = 0 if spans is None else perf_counter_ns()
            message = codec.decode_from_worker(frame)
            with self._hearing:
                if in_loop:
                    with self._turn:
                        rest = self._send(self._controller.handle(Received(worker, message)))
                else:
                    rest = self._decide_here(Received(worker, message), hears=True)
                self._perform(rest)
                self.live.of(worker).received_bytes += len(frame)
                if type(message) is Done:
                    self.live.done(worker, message.busy_ns)
            if spans is not None:
                name, row = type(message).__name__.lower(), "event loop" if in_loop else "in the client's thread"
                spans.add("controller", name, began, row=row, worker=worker, bytes=len(frame))
        except ProtocolError as error:
            self._call_in_loop(self._exited, worker, f"it sent what cannot be right: {error}")
            return False
        except Exception as error:
            logger.debug("the controller failed", exc_info=True)
            self._call_in_loop(self._fail, error)
            return False
        return True

    def _call_in_loop(self, call: Callable[..., None], *args: Any) -> None:
        if self.is_own_thread():
            call(*args)
        else:
            self.loop.call_soon_threadsafe(call, *args)

    def _exited(self, worker: int, reason: str) -> None:
        logger.debug("worker %d of session %d has ended: %s", worker, self._controller.session, reason)
        self._handle(Exited(worker, reason))
        if not self._controller.workers and self._all_gone is not None:
            self._all_gone.set()

    def _could_not_start(self, text: str) -> None:
        logger.debug("the fork server failed: %s", text)  # the ends of its workers, reported next, carry the text

    def _lose(self, worker: int, reason: str) -> None:
        self._lost = True
        self._listener.lost(worker, reason)
        self._end_waiting()
        self._begin_stop()

    def _set_timer(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._listener.tick()


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop where there is one."""
    try:
        import uvloop
    except ImportError:  # not made for this system
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
