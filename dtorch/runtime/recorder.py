"""The client's side of the program order: calls go into a buffer, buffers become batches.

The hot path (a method of ``dtorch.Tensor``) does three things: look a signature up, ``take`` a slot, ``put`` the call. The
two list methods belong to this recorder's own lists, so recording knows no globals and no session. Everything else hangs
on the moment when ``take`` finds nothing left: the first op of a batch and the op that fills it both end up in ``grant``.

Buffer layout: three entries a call (``put`` extends the list, which is atomic under the GIL): the call, the code object and
the instruction offset of the line that issued it. A failed op is traced to its source line from these.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from types import CodeType
from typing import Any

import msgspec

from dtorch.runtime.lineage import blob_bytes
from dtorch.runtime.outgoing import Outgoing, Outlet
from dtorch.runtime.positions import locate
from dtorch.runtime.room import MAX_BATCHES
from dtorch.runtime.shield import Shield
from dtorch.runtime.slots import SlotPool
from dtorch.runtime.spin import quick_switches
from dtorch.runtime.tracing import Spans
from dtorch.transport.errors import DTorchError, SessionClosedError
from dtorch.transport.messages import Blob, Definition, Fetch, MeshInfo, Program, SharedBlob, StreamBlob

FIRST_BATCH = 64
"""Calls in the first batch after a pause: small, so that devices start early."""
LARGEST_BATCH = 1024
TIMER_S = 0.0005
"""How long a plain script may pause before what it recorded is sent."""
LONGEST_TIMER_S = 0.008
"""The timer's period when the client records on and on: each look takes the interpreter from it."""
MAX_IN_FLIGHT = MAX_BATCHES
"""Batches that may be unfinished before the client's thread waits (back-pressure)."""
UPLOADS_BYTES = 32 * 1024 * 1024
"""A batch that uploads this much leaves without waiting for more."""


class CaptureError(DTorchError, RuntimeError):
    """What is being compiled does something that cannot be replayed."""


@dataclass(frozen=True)
class Captured:
    """What a capture recorded.

    Attributes:
        chunk: three entries a call, as in the buffer.
        dead: slots whose tensors were gone at its end.
    """

    chunk: list[Any]
    dead: set[int]


_encode = msgspec.msgpack.Encoder().encode


class Recorder:
    """Calls, slots and definitions of one session.

    Any thread may record. ``_lock`` guards turning the buffer into a batch; ``put``, ``take`` and ``dead.append`` need no
    lock (``dead`` being the list of one mesh). In a flush the dead slots are taken before the calls: a slot dies after its
    last use was recorded, so a death that is seen has all its uses in this batch or an earlier one.
    """

    def __init__(self, outlet: Outlet, sync: Callable[[], None] | None = None) -> None:
        self._outlet = outlet
        self._lock = threading.RLock()
        self._pool = SlotPool()
        self._buffer: list[Any] = []
        self._lent: list[int] = []
        self._dead: dict[int, list[int]] = {}
        self.take = self._lent.pop
        self.put = self._buffer.extend
        self._seq = 0
        self._next_signature = 1
        self._budget = FIRST_BATCH
        self._whole_budget = 0  # what the budget was before a part of the batch was sent; 0: all of it is here
        self._led = 0  # the last batch that was a first call, alone
        self._holds = self._held = False  # such a call waits for its value to be asked for, as a moment ago; one does now
        self._delay_s = TIMER_S
        self._granted = 0
        self._capture: int | None = None  # the thread that captures
        self._pins: dict[int, int] = {}
        self._pinned_dead: dict[int, int] = {}  # slot whose tensor died while pinned -> mesh
        self.expects_after_put = sync is not None  # of whoever puts the next call, where it looks
        self._ticking = False  # the running loop will flush at its next tick
        self._timed = False  # the timer will look at the buffer
        self._hurries = False  # it should do so soon, though the client's thread may be computing: workers have nothing to do
        self._last_length = 0
        self._meshes: list[MeshInfo] = []
        self._definitions: list[Definition] = []
        self._programs: list[Program] = []
        self._uploads: list[Blob | SharedBlob | StreamBlob] = []
        self._upload_bytes = 0
        self._keep: list[Any] = []  # what must live for the uploads to be readable
        self._hoisted: list[Any] = []  # uploads made during a capture; they run before what follows it
        self._fetches: list[Fetch] = []
        self._noted: list[list[Any]] = []
        self._sources: dict[int, list[Any]] = {}
        self._closed: DTorchError | None = None
        self._sync = sync
        self.turn: Callable[[], Callable[[], None] | None] | None = None  # before a draw: what must be said, if anything
        self.spans: Spans | None = None  # while a profile runs
        self.where: Callable[[], str] | None = None  # names the user's line that is being recorded, where a head wants it
        self._began = (0, "")  # then: when (ns), and in which thread, the first slot of this batch was taken
        self.num_ops = self.num_batches = self.num_bytes = 0

    # ---- the hot path's other half

    def grant(self) -> int:
        """A slot for a call about to be put, when none is lent: starts a batch, or sends the full one and starts the next."""
        try:
            return self._grant()
        except BaseException as error:  # the IndexError of whoever found none lent is no part of the story
            error.__suppress_context__ = True
            raise

    def _grant(self) -> int:
        with self._lock:
            if self._closed is not None:
                raise again(self._closed)
            if self._capture is not None:
                self._lent.extend(self._pool.lend(FIRST_BATCH))
                return self._lent.pop()
            full = False
            while not self._lent:
                if self._sync is not None:
                    break
                if self._granted >= self._budget:
                    self._flush()
                    self._budget = min((self._whole_budget or self._budget) * 2, LARGEST_BATCH)
                    self._whole_budget = 0
                    full = True
                if self.spans is not None and not self._granted:
                    self._began = (perf_counter_ns(), threading.current_thread().name)
                if self._is_first() and self._holds:
                    self._held = True
                elif self._is_first():
                    self.expects_after_put = True
                    self._granted = 1
                    self._lent.extend(self._pool.lend(1))
                    break
                self._lent.extend(self._pool.lend(self._budget - self._granted))
                self._granted = self._budget
                self.arm()
            slot = self._pool.lend(1)[0] if self._sync is not None else self._lent.pop()
        if full:
            self._wait_for_room()
        return slot

    def _is_first(self) -> bool:
        """Whether the call that asks for a slot is the first after a pause, and workers have nothing to do.

        It leaves at once, alone, and the rest of its batch ends where it would have ended. Where the value of the last such
        call was asked for before anything else, it waits for that, a tick or the timer: one batch in place of two.
        """
        return not self._granted and not self._sources and self._budget == FIRST_BATCH and self._whole_budget == 0

    def draw(self, entries: tuple[Any, ...]) -> None:
        """Put a call that draws random numbers: as ``put``, once it is the turn of the stream that they come from."""
        with self._lock:
            say = None if self.turn is None or self._capture is not None else self.turn()
            if say is not None:
                self.flush()
                say()
            self.put(entries)
        if say is not None:
            self._wait_for_room()

    def interject(self, say: Callable[[], None]) -> None:
        """Send what is recorded, then ``say`` something, before anything else is sent.

        Raises:
            CaptureError: this thread captures a function.
        """
        with self._lock:
            if self._capture == threading.get_ident():
                raise CaptureError("it seeds the generators, once and not at each replay")
            self.flush()
            say()
        self._wait_for_room()

    def after_put(self) -> None:
        """Called by slow paths after ``put``, and where ``expects_after_put``: bounds a buffer of calls that take no slots,
        runs op by op if asked, and sends the first call after a pause."""
        if self._sync is not None:
            self._sync()
            return
        if self.expects_after_put:
            self.expects_after_put = False
            self._flush_part()
            self._led = self._seq
            return
        if len(self._buffer) >= 3 * LARGEST_BATCH and self._capture is None:
            with self._lock:
                if len(self._buffer) >= 3 * LARGEST_BATCH:
                    self._flush()
            self._wait_for_room()
        self.arm()

    def follow(self, sync: Callable[[], None] | None) -> Callable[[], None] | None:
        """From now on call ``sync`` after every op, which then runs at once; the answer is what was called before."""
        before, self._sync = self._sync, sync
        self.expects_after_put = sync is not None
        return before

    def _wait_for_room(self) -> None:
        spans = self.spans
        began = 0 if spans is None else perf_counter_ns()
        self._outlet.wait_for_room()
        if spans is not None:
            spans.add("client", "wait for room", began)

    @property
    def is_sync(self) -> bool:
        return self._sync is not None

    def arm(self) -> None:
        """See to it that what is in the buffer leaves soon: at the next tick of the running loop, or by timer."""
        if self._closed is not None:
            return
        loop = asyncio._get_running_loop()
        if loop is None:
            self.wake()
        elif not self._ticking:
            self._ticking = True
            loop.call_soon(self.flush)

    def wake(self) -> None:
        """Start the timer; also called when the first tensor dies after a flush, inside any allocation, so without a lock.

        The timer runs on until it fires, whatever is sent meanwhile: at most one is asked for in a millisecond.
        """
        if not self._timed and self._closed is None:
            self._timed = True
            if self._delay_s == TIMER_S and self._are_idle() and not self._hurries:
                self._hurries = True
                quick_switches.hold()
            self._outlet.request_flush(self._delay_s)

    def _are_idle(self) -> bool:
        """Whether workers have nothing to do, or no more than the first call after a pause."""
        return not self._sources or (len(self._sources) == 1 and self._whole_budget != 0)

    def _no_hurry(self) -> None:
        if self._hurries:
            self._hurries = False
            quick_switches.release()

    def tick(self) -> None:
        """Timer: send what is there, unless workers are busy and the client is in the middle of recording (then look again).

        A batch that ends wherever a clock says would give its bytes a new shape every time round a loop, and no compiled
        plan would be found again; a batch that ends where the client paused or where it is full does not. Workers that have
        nothing to do are given what there is all the same, unless the client records fast and will have filled it soon; the
        rest of that batch ends where it would have ended, and while the client goes on the timer comes ever less often. Dead
        slots alone wait for a pause.
        """
        self._timed = False
        self._no_hurry()
        length = len(self._buffer) + self._seq
        grown = length - self._last_length
        if not grown:
            self.flush()
            return
        self._last_length = length
        self._delay_s = min(2 * self._delay_s, LONGEST_TIMER_S)
        if self._buffer and not self._sources and grown <= 3 * FIRST_BATCH:
            self._flush_part()
        if self._buffer or any(self._dead.values()):
            self.wake()

    # ---- definitions

    def define(self, build: Callable[[int], Definition]) -> int:
        """Give a signature number; the definition travels before the first batch that can contain it."""
        with self._lock:
            if self._closed is not None:
                raise again(self._closed)
            number = self._next_signature
            self._next_signature += 1
            made = build(number)
            if self.where is not None:
                made = msgspec.structs.replace(made, where=self.where())
            self._definitions.append(made)
            return number

    def add_program(self, program: Program) -> None:
        """Announce what the signature of the same number replays."""
        with self._lock:
            self._programs.append(program)

    def add_mesh(self, mesh: MeshInfo) -> list[int]:
        """Announce a mesh; the answer is the list to which its tensors append their slot when they die."""
        with self._lock:
            self._meshes.append(mesh)
            dead: list[int] = []
            self._dead[mesh.mesh] = dead
            return dead

    def upload(
        self,
        signature: int,
        blobs: Sequence[Blob | SharedBlob | StreamBlob],
        source: tuple[CodeType | None, int],
        keep: Sequence[object] = (),
    ) -> int:
        """Put a call of kernel "upload" together with its bytes, a blob a piece; the answer is the slot.

        ``keep`` holds the memory of ``blobs``.

        The call carries the place of its first blob in the batch, so that a batch that uploads looks the same every time.
        """
        slot = self.slot()
        with self._lock:
            call = (signature, slot, len(self._uploads))
            self._uploads += blobs
            self._upload_bytes += sum(map(blob_bytes, blobs))
            self._keep += keep
            if self._capture is None:
                self.put((call, *source))
            else:
                self._hoisted.extend((call, *source))
        return slot

    def bound_uploads(self) -> None:
        """Called after an upload: sends a batch that uploads much, and waits while too much is on its way."""
        if self._capture is None:
            if self._upload_bytes >= UPLOADS_BYTES:
                with self._lock:
                    self._flush()
            self._outlet.wait_for_room()

    def slot(self) -> int:
        """A slot for a call about to be put."""
        try:
            return self.take()
        except IndexError:
            return self.grant()

    @property
    def next_seq(self) -> int:
        """Number of the batch that is being recorded."""
        return self._seq + 1

    @property
    def next_signature(self) -> int:
        return self._next_signature

    # ---- batches

    def flush(self) -> None:
        """Send what is recorded. While a function is being captured its calls stay here."""
        with self._lock:
            if self._capture is None:
                self._flush()
                self._budget = FIRST_BATCH
                self._whole_budget = 0
                self._delay_s = TIMER_S

    def _flush_part(self) -> None:
        """Send what is there of a batch whose end stays where it was to be."""
        with self._lock:
            if self._capture is None:
                left = self._budget - (self._granted - len(self._lent))
                self._flush()
                self._whole_budget = self._whole_budget or self._budget
                self._budget = max(left, 1)

    def fetch(self, fetch: Fetch, now: bool) -> None:
        """Ask for a slot's pieces after everything recorded so far; ``now`` sends at once, else with the loop's next tick."""
        with self._lock:
            if self._closed is not None:
                raise again(self._closed)
            if self._capture is not None:
                raise CaptureError("a value is read while the function is being compiled")
            self._fetches.append(fetch)
            if now:
                self.flush()
            else:
                self.arm()

    def _flush(self) -> None:
        with Shield():  # an interrupt in the midst would lose calls
            self._make_batch()

    def _make_batch(self) -> None:
        frees: list[tuple[int, list[int]]] = []
        for mesh, dead in self._dead.items():
            num_dead = len(dead)
            if num_dead:
                gone = sorted(dead[:num_dead])
                del dead[:num_dead]
                if self._pins:
                    self._pinned_dead.update((slot, mesh) for slot in gone if slot in self._pins)
                    gone = [slot for slot in gone if slot not in self._pins]
                frees.append((mesh, gone))
        buffer = self._buffer
        length = len(buffer)
        chunk = buffer[:length]
        del buffer[:length]
        for noted in self._noted:
            noted += chunk
        calls = chunk[::3]
        spare = self._lent[:]
        self._lent.clear()
        self._ticking = False
        self._granted = 0
        if calls or frees or self._fetches or self._definitions:
            if self._held:
                self._holds, self._held = len(calls) == 1 and bool(self._fetches), False
            elif self._led and self._led == self._seq and self._fetches:
                self._holds = not calls
            self._seq += 1
            spans = self.spans
            flushing = 0 if spans is None else perf_counter_ns()
            batch = Outgoing(
                seq=self._seq,
                body=_encode((calls, frees)),
                calls=calls,
                meshes=tuple(self._meshes),
                definitions=tuple(self._definitions),
                programs=tuple(self._programs),
                uploads=tuple(self._uploads),
                keep=tuple(self._keep),
                fetches=tuple(self._fetches),
                freed_meshes=tuple(mesh for mesh, _ in frees),
            )
            self._meshes.clear()
            self._definitions.clear()
            self._programs.clear()
            self._uploads.clear()
            self._upload_bytes = 0
            self._keep.clear()
            self._fetches.clear()
            self._sources[self._seq] = chunk
            self.num_ops += len(calls)
            self.num_batches += 1
            self.num_bytes += len(batch.body)
            if spans is not None:
                spans.keep(self._seq, chunk)
                began, row = self._began
                spans.add("client", "record", began or flushing, row=row, seq=self._seq, calls=len(calls))
                self._began = (0, "")
            self._outlet.submit(batch)
            if self._hurries:
                self._no_hurry()
            if spans is not None:
                spans.add("client", "send", flushing, seq=self._seq, bytes=len(batch.body))
        for _, slots in frees:
            spare.extend(slots)
        self._pool.restore(spare)

    # ---- looking on

    def mark(self) -> list[Any]:
        """Begin to note what all threads put; what comes back is for ``since``, which ends it."""
        with self._lock:
            noted: list[Any] = [len(self._buffer)]
            self._noted.append(noted)
            return noted

    def since(self, noted: list[Any]) -> list[Any]:
        """What was put since ``mark``, as in the buffer, also where it was sent meanwhile."""
        with self._lock:
            self._noted = [other for other in self._noted if other is not noted]
            return [*noted[1:], *self._buffer][noted[0] :]

    def dead_of(self, mesh: int) -> list[int]:
        """To which tensors of a mesh append their slot when they die, see ``add_mesh``."""
        return self._dead[mesh]

    # ---- capturing

    def begin_capture(self) -> None:
        """From now on calls stay in the buffer until ``end_capture``. Raises CaptureError inside another capture."""
        with self._lock:
            if self._closed is not None:
                raise again(self._closed)
            if self._capture is not None:
                raise CaptureError("a function is being compiled already, perhaps in another thread")
            self._flush()
            self._capture = threading.get_ident()

    def end_capture(self) -> Captured:
        """The calls since ``begin_capture``, taken out of the program order, and the slots that died meanwhile.

        Uploads made meanwhile stay in the program order: a replay finds them where they are.
        """
        with self._lock:
            self._capture = None
            chunk = self._buffer[:]
            self._buffer.clear()
            self._buffer.extend(self._hoisted)
            self._hoisted.clear()
            dead = {slot for slots in self._dead.values() for slot in slots}
            self._lent_back()
            return Captured(chunk, dead)

    def _lent_back(self) -> None:
        spare = self._lent[:]
        self._lent.clear()
        self._granted = 0
        self._ticking = False
        self._pool.restore(spare)
        self._last_length = -1
        self.wake()

    @property
    def is_capturing(self) -> bool:
        """Whether this thread is capturing."""
        return self._capture == threading.get_ident()

    def pin(self, slots: Iterable[int]) -> None:
        """Keep what is in ``slots`` on the workers, whether or not the client still has the tensor."""
        with self._lock:
            for slot in slots:
                self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo ``pin``. May run inside any allocation: the slots are freed with the next flush."""
        for slot in slots:
            left = self._pins.get(slot, 0) - 1
            if left > 0:
                self._pins[slot] = left
                continue
            self._pins.pop(slot, None)
            mesh = self._pinned_dead.pop(slot, None)
            if mesh is not None and mesh in self._dead:
                self._dead[mesh].append(slot)
        self.wake()

    # ---- what comes back

    def finished(self, seq: int) -> None:
        """All workers have executed batch ``seq``."""
        self._sources.pop(seq, None)

    def source(self, seq: int, index: int) -> tuple[str, int] | None:
        """File name and line of call ``index`` of an unfinished batch."""
        chunk = self._sources.get(seq)
        if chunk is None or not 0 <= index < len(chunk) // 3:
            return None
        return locate(chunk[3 * index + 1], chunk[3 * index + 2])

    def signature_of(self, seq: int, index: int) -> int | None:
        """Signature of call ``index`` of an unfinished batch."""
        chunk = self._sources.get(seq)
        return None if chunk is None or not 0 <= index < len(chunk) // 3 else int(chunk[3 * index][0])

    @property
    def num_in_flight(self) -> int:
        return len(self._sources)

    @property
    def num_slots(self) -> int:
        """Slots that hold tensors, or whose end is not yet announced."""
        with self._lock:
            return self._pool.size - self._pool.num_idle - len(self._lent)

    def close(self, error: DTorchError) -> None:
        """Later calls raise ``error``."""
        with self._lock:
            self._closed = error
            self._no_hurry()
            self._lent.clear()
            self._buffer.clear()
            self._fetches.clear()

    def abandon(self, reason: str) -> None:
        """In a forked child: nothing of this can be used, not even its locks."""
        self._lock = threading.RLock()
        self._closed = SessionClosedError(reason)
        self._lent.clear()

    @property
    def closed(self) -> DTorchError | None:
        """What ended this recorder; None while it records."""
        return self._closed


def again(error: DTorchError) -> DTorchError:
    """The same error as a new object: raising notes a traceback, and with it the variables of whoever was told."""
    return type(error)(*error.args)
