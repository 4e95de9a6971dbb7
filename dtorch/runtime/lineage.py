"""What made each live tensor: the batches of a session, kept within bounds. Pure.

The controller adds every batch as it goes by: its bytes, which it has anyway, and where they came before only a reference.
Nothing is decoded until a worker is lost or the bounds are reached. Then batches that contributed to nothing alive are
dropped (``Lineage.prune``), by what a body *sums up* to: slots that it leaves defined, reads from before, writes into and
frees. A summary belongs to a body, so a loop pays for it once.

The walk over single calls, which a loss needs, is in ``slices.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from dtorch.runtime import kernels
from dtorch.runtime.plan import decode_body
from dtorch.runtime.seeds import Seeds
from dtorch.transport.codec import Frame
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Blob, Definition, Layout, Program, Seed, SharedBlob, StreamBlob

MAX_SLOTS = 1 << 24

AnyBlob = Blob | SharedBlob | StreamBlob

FIRST_PRUNE_CALLS = 16 * 1024
"""Calls kept before the first look for what can be dropped; later looks come when what was left has doubled."""


class Bounds(msgspec.Struct, frozen=True):
    """How much is remembered. What is older than that cannot be computed anew.

    Attributes:
        calls: of all batches kept. Computing 100 000 small calls anew takes about a second.
        size_bytes: of their bodies; equal bodies count once.
        upload_bytes: of the data that clients sent.
    """

    calls: int = 256 * 1024
    size_bytes: int = 32 << 20
    upload_bytes: int = 256 << 20


# ---- definitions


@dataclass(frozen=True)
class Facts:
    """What the lineage needs to know of a signature.

    ``ins`` and ``outs`` of a program's call include the slots that the program captured and keeps.

    Attributes:
        writes: which inputs are written.
        aliases: for each output, the input that it may share memory with, or -1.
        is_joint: its places take part together; otherwise each works on its own pieces.
        repeatable: running it again gives the same and does nothing else.
        upload: it takes bytes of its batch: the number of the blob is its first dynamic number.
    """

    op: str
    num_outs: int
    num_ins: int
    outs: tuple[Layout, ...]
    ins: tuple[Layout, ...]
    writes: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    is_joint: bool = False
    random: bool = False
    repeatable: bool = True
    upload: bool = False
    captured: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    def split(self, call: Sequence[Any]) -> tuple[Sequence[int], Sequence[int]]:
        """(outputs, inputs) of a call, as slots."""
        middle = 1 + self.num_outs
        outs, ins = call[1:middle], call[middle : middle + self.num_ins]
        return (*outs, *self.kept) if self.kept else outs, (*ins, *self.captured) if self.captured else ins


def facts_of(definition: Definition, program: Program | None, facts: Callable[[int], Facts]) -> Facts:
    """Facts of a definition; ``facts`` answers for the calls of a program."""
    params = definition.params
    if program is None:
        num_outs = 0 if definition.writes else len(definition.outputs)
        aliases = tuple(params.get("aliases", ())) if num_outs else ()
        return Facts(
            definition.op,
            num_outs,
            len(definition.inputs),
            definition.outputs,
            definition.inputs,
            tuple(sorted({*definition.writes, *params.get("mutates", ())})),
            aliases or (-1,) * num_outs,
            kernels.find(definition.kernel).communicates,
            bool(params.get("random")),
            bool(params.get("repeatable", True)),
            definition.kernel.startswith("upload"),
        )
    calls, _ = decode_body(program.body)
    origin: dict[int, int] = {}  # register -> outer input whose memory it may share
    layouts: dict[int, Layout] = {}
    for index, register in enumerate(program.inputs):
        origin.setdefault(register, index)
    for index, (register, _) in enumerate(program.captured, len(program.inputs)):
        origin.setdefault(register, index)
    written: set[int] = set()
    random = False
    repeatable = True
    for call in calls:
        inner = facts(call[0])
        outs, ins = inner.split(call)
        random, repeatable = random or inner.random, repeatable and inner.repeatable
        for register, layout in zip(ins, inner.ins, strict=False):
            layouts.setdefault(register, layout)
        for w in inner.writes:
            if ins[w] in origin:
                written.add(origin[ins[w]])
        for k, register in enumerate(outs):
            layouts[register] = inner.outs[k]
            source = ins[inner.aliases[k]] if inner.aliases[k] >= 0 else -1
            origin.pop(register, None)
            if source in origin:
                origin[register] = origin[source]
    made = [*program.outputs, *(register for register, _ in program.kept)]
    return Facts(
        definition.op,
        len(definition.outputs),
        len(definition.inputs),
        (*definition.outputs, *(layouts[r] for r, _ in program.kept)),
        (*definition.inputs, *(layouts[r] for r, _ in program.captured)),
        tuple(sorted(written)),
        tuple(origin.get(r, -1) for r in made),
        True,
        random,
        repeatable,
        captured=tuple(slot for _, slot in program.captured),
        kept=tuple(slot for _, slot in program.kept),
    )


# ---- batches


def count_calls(body: bytes) -> int:
    """Calls in a batch's body, from the head of the array that holds them."""
    kind = body[1] if len(body) > 1 else 0x90
    if kind == 0xDC:
        return int.from_bytes(body[2:4], "big")
    if kind == 0xDD:
        return int.from_bytes(body[2:6], "big")
    return kind & 0x0F


@dataclass
class Summary:
    """What a body does, seen from outside.

    A *root* says whose memory a slot has at the end: a slot number as of the beginning, or a negative number for memory
    that the body made.
    """

    num_calls: int
    final: dict[int, tuple[int, Layout, str]]  # slot left defined -> root, layout, op that made it
    defines: int  # mask of these slots, and of those that were defined and freed
    reads: int  # mask of slots whose content from before is used
    writes: tuple[int, ...]  # slots of before whose memory is written
    frees: int  # mask
    random: bool


class Entry:
    """A body, once however often it is sent."""

    __slots__ = ("body", "num_calls", "num_uses", "summary")

    def __init__(self, body: bytes, num_calls: int) -> None:
        self.body = body
        self.num_calls = num_calls
        self.num_uses = 0
        self.summary: Summary | None = None


class Stream(NamedTuple):
    """An upload that came in parts.

    Attributes:
        number: that its ``StreamBlob`` names.
        mesh, devices: whose workers need it; no devices stand for all of the mesh.
        frames: the parts as they came, encoded.
    """

    number: int
    mesh: int
    devices: tuple[int, ...]
    frames: tuple[Frame, ...]


class Record:
    """A batch in program order, or what is left of batches that were dropped: ``frees`` and ``seeds``.

    Attributes:
        uploads: what its upload calls take; None where it was not kept.
        keep: objects that hold the memory of the uploads.
        streams: the bytes of uploads that came in parts.
        draws_from: the random stream whose numbers it draws.
        seeds: what happened to the random streams just before it or, where batches were dropped, in them; None: nothing.
        refused: none of its calls was allowed to run.
    """

    __slots__ = ("draws_from", "entry", "frees", "keep", "refused", "seeds", "seq", "streams", "uploads", "written")

    def __init__(
        self, seq: int, entry: Entry | None, uploads: tuple[AnyBlob, ...] | None, keep: Any, streams: tuple[Stream, ...] = ()
    ) -> None:
        self.seq = seq
        self.streams = streams
        self.entry = entry
        self.uploads = uploads
        self.keep = keep
        self.draws_from = 0
        self.seeds: Seeds | None = None
        self.frees = 0
        self.refused = False
        self.written = 0  # scratch of ``prune``

    @property
    def upload_bytes(self) -> int:
        return sum(map(blob_bytes, self.uploads or ()))


def blob_bytes(blob: AnyBlob) -> int:
    return len(blob.data) if isinstance(blob, Blob) else blob.size_bytes


@dataclass
class Alive:
    """Slots that hold tensors at some point of the program, and which of them may share memory.

    Attributes:
        layouts: slot -> layout.
        ops: slot -> name of the op that made it.
        memory: slot -> its class; slots of one class may share memory.
        members: class -> mask of its slots.
    """

    layouts: dict[int, Layout] = field(default_factory=dict)
    ops: dict[int, str] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    members: dict[int, int] = field(default_factory=dict)
    next_class: int = 0

    def copy(self) -> Alive:
        return Alive(dict(self.layouts), dict(self.ops), dict(self.memory), dict(self.members), self.next_class)

    def apply(self, summary: Summary) -> int:
        """Go past a batch; the answer is the mask of slots whose memory it wrote."""
        written = 0
        for slot in summary.writes:
            group = self.memory.get(slot)
            if group is not None:
                written |= self.members[group]
        made: dict[int, int] = {}
        for root, _, _ in summary.final.values():
            if root not in made:
                known = self.memory.get(root) if root >= 0 else None
                if known is None:
                    known = self.next_class
                    self.next_class += 1
                made[root] = known
        self.free(summary.defines | summary.frees)
        for slot, (root, layout, op) in summary.final.items():
            group = made[root]
            self.memory[slot] = group
            self.members[group] = self.members.get(group, 0) | 1 << slot
            self.layouts[slot], self.ops[slot] = layout, op
        return written

    def free(self, mask: int) -> None:
        for slot in bits(mask):
            group = self.memory.pop(slot, None)
            if group is not None:
                del self.layouts[slot], self.ops[slot]
                left = self.members[group] & ~(1 << slot)
                if left:
                    self.members[group] = left
                else:
                    del self.members[group]

    @property
    def mask(self) -> int:
        return mask_of(self.layouts)


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(numbers: Iterable[int]) -> int:
    """The mask of slots. Raises ProtocolError: one is beyond the last that there is."""
    found = bytearray()
    for number in numbers:
        at = number >> 3
        if at >= len(found):
            if number >= MAX_SLOTS:
                raise ProtocolError(f"slot {number} is beyond the last one, {MAX_SLOTS - 1}")
            found.extend(bytes(at + 1 - len(found)))
        found[at] |= 1 << (number & 7)
    return int.from_bytes(found, "little")


class Lineage:
    """The batches of one session, from the oldest that is remembered to the newest.

    Args:
        shared: others wait while this one works, and whoever sends the batches is a stranger: bodies are summed up, and so
            checked, one by one as they come by.

    Attributes:
        front: what was alive before the oldest record; nobody knows any more how that was made.
        seeds: where the random streams stood then.
        pending: what happened to them since the newest record.
        records: in program order.
    """

    def __init__(self, bounds: Bounds, shared: bool = False) -> None:
        self.bounds = bounds
        self._shared = shared
        self.front = Alive()
        self.records: list[Record] = []
        self.definitions: dict[int, Definition] = {}
        self.programs: dict[int, Program] = {}
        self._facts: dict[int, Facts] = {}
        self._entries: dict[bytes, Entry] = {}
        self.seeds = Seeds()
        self.pending: Seeds | None = None
        self._draws_from = 0
        self.num_calls = 0
        self.size_bytes = 0
        self.upload_bytes = 0
        self._least = FIRST_PRUNE_CALLS // 8 if shared else FIRST_PRUNE_CALLS
        self._prune_at = min(self._least, bounds.calls)
        self._prune_records_at = 1024
        self._prune_uploads_at = bounds.upload_bytes // 4

    # ---- what goes by

    def define(self, definitions: Sequence[Definition], programs: Sequence[Program]) -> None:
        for definition in definitions:
            self.definitions[definition.sig] = definition
        for program in programs:
            self.programs[program.sig] = program

    def seeded(self, mark: Seed) -> None:
        if self.pending is None:
            self.pending = Seeds(self._draws_from)
        self.pending.mark(mark)
        self._draws_from = mark.stream

    def add(
        self, seq: int, body: bytes, uploads: tuple[AnyBlob, ...] = (), keep: Any = None, refused: bool = False,
        streams: tuple[Stream, ...] = (),
    ) -> None:
        """A batch goes by.

        Args:
            keep: whatever must be referred to for ``uploads`` to stay readable.
            streams: the bytes of those of ``uploads`` that came in parts, where they were kept.
        """
        entry = self._entries.get(body)
        if entry is None:
            entry = Entry(body, count_calls(body))
            if self._shared:
                self.summary(entry)
            self._entries[body] = entry
            self.size_bytes += len(body)
        entry.num_uses += 1
        record = Record(seq, entry, uploads, keep, streams)
        record.draws_from = self._draws_from
        record.refused = refused
        if uploads:
            size = record.upload_bytes
            streamed = {blob.stream for blob in uploads if isinstance(blob, StreamBlob) and blob.size_bytes}
            if self.upload_bytes + size > self.bounds.upload_bytes or not streamed <= {s.number for s in streams}:
                record.uploads = record.keep = None
                record.streams = ()
            else:
                self.upload_bytes += size
        record.seeds, self.pending = self.pending, None
        self.num_calls += entry.num_calls
        self.records.append(record)

    @property
    def is_full(self) -> bool:
        """Whether it is time to ``prune``."""
        return (
            self.num_calls > self._prune_at
            or len(self.records) > self._prune_records_at
            or self.size_bytes > self.bounds.size_bytes
            or self.upload_bytes > self._prune_uploads_at
        )

    def clear(self) -> None:
        """The session is over: let go of everything."""
        self.records.clear()
        self._entries.clear()

    def forget(self, below: int) -> None:
        """Signatures below ``below`` are called no more: drop those that no batch here calls."""
        used = set(self._used())
        for table in (self.definitions, self.programs, self._facts):
            for sig in [s for s in table if s < below and s not in used]:
                del table[sig]

    def _used(self) -> Iterator[int]:
        for entry in self._entries.values():
            yield from self._used_by(entry.body)

    def _used_by(self, body: bytes) -> Iterator[int]:
        for sig in {call[0] for call in decode_body(body)[0]}:
            yield sig
            program = self.programs.get(sig)
            if program is not None:
                yield from self._used_by(program.body)

    # ---- looking

    def facts(self, sig: int) -> Facts:
        found = self._facts.get(sig)
        if found is None:
            found = self._facts[sig] = facts_of(self.definitions[sig], self.programs.get(sig), self.facts)
        return found

    def summary(self, entry: Entry) -> Summary:
        if entry.summary is None:
            entry.summary = self._sum_up(entry.body)
        return entry.summary

    def _sum_up(self, body: bytes) -> Summary:
        calls, frees = decode_body(body)
        root: dict[int, int] = {}
        made: dict[int, tuple[Layout, str]] = {}
        reads: set[int] = set()
        written: set[int] = set()
        random = False
        fresh = 0
        for call in calls:
            facts = self.facts(call[0])
            outs, ins = facts.split(call)
            random = random or facts.random
            roots = []
            for slot in ins:
                known = root.get(slot)
                if known is None:
                    known = slot
                    reads.add(slot)
                roots.append(known)
            for w in facts.writes:
                if roots[w] >= 0:
                    written.add(roots[w])
            for k, slot in enumerate(outs):
                alias = facts.aliases[k]
                if alias < 0:
                    fresh -= 1
                root[slot] = fresh if alias < 0 else roots[alias]
                made[slot] = facts.outs[k], facts.op
        dead = mask_of(slot for _, slots in frees for slot in slots)
        final = {slot: (root[slot], *made[slot]) for slot in root if not dead >> slot & 1}
        return Summary(len(calls), final, mask_of(root), mask_of(reads), tuple(sorted(written)), dead, random)

    def draws_are_known(self, alive: set[int]) -> bool:
        """Whether seeds tell everything that was drawn in what is remembered, and what the streams in ``alive`` give next."""
        known = set(self.seeds.seeds)
        for record in self.records:
            if record.seeds is not None:
                known = known - record.seeds.drawn | record.seeds.seeds.keys()
            if record.entry is not None and record.draws_from not in known and self.summary(record.entry).random:
                return False
        return alive <= (known if self.pending is None else known | self.pending.seeds.keys())

    # ---- dropping

    def prune(self, finished: int) -> None:
        """Drop batches up to ``finished`` that contributed to nothing alive, then the oldest ones down to the bounds.

        Args:
            finished: number of the last batch up to which every worker has executed all.
        """
        num_finished = sum(record.seq <= finished for record in self.records)
        alive = self.front.copy()
        horizon = alive.mask  # alive once everything finished had been done
        for index, record in enumerate(self.records, 1):
            if record.entry is not None:
                record.written = alive.apply(self.summary(record.entry))
            else:
                alive.free(record.frees)
            if index == num_finished:
                horizon = alive.mask
        need = alive.mask
        kept: list[Record] = []
        for index in range(len(self.records) - 1, -1, -1):
            record = self.records[index]
            if index + 1 == num_finished:
                need |= horizon
            entry = record.entry
            if entry is not None:
                summary = self.summary(entry)
                if record.seq > finished or (summary.defines | record.written) & need:
                    need = need & ~summary.defines | summary.reads
                else:
                    self._drop(record, summary)
            if record.entry is None and kept and kept[-1].entry is None:
                later = kept[-1]
                later.frees |= record.frees
                if record.seeds is not None:
                    if later.seeds is not None:
                        record.seeds.then(later.seeds)
                    later.seeds = record.seeds
                continue
            kept.append(record)
        kept.reverse()
        self.records = kept
        self._shorten(finished)
        self._prune_at = min(max(self._least, 2 * self.num_calls), self.bounds.calls)
        self._prune_records_at = max(1024, 2 * len(self.records))
        self._prune_uploads_at = max(self.bounds.upload_bytes // 4, 2 * self.upload_bytes)

    def _shorten(self, finished: int) -> None:
        """Forget the oldest batches while more than three quarters of a bound is in use."""
        bounds = self.bounds
        gone = 0
        for record in self.records:
            within = (
                self.num_calls <= bounds.calls * 3 // 4
                and self.size_bytes <= bounds.size_bytes * 3 // 4
                and len(self.records) - gone <= bounds.calls // 16
            )
            if within or record.seq > finished:
                break
            gone += 1
            if record.entry is None:
                self.front.free(record.frees)
            else:
                summary = self.summary(record.entry)
                self.front.apply(summary)
                self._drop(record, summary)
            if record.seeds is not None:
                self.seeds.then(record.seeds)
                self.seeds.ended.clear()
        self.records = self.records[gone:]

    def _drop(self, record: Record, summary: Summary) -> None:
        entry = record.entry
        assert entry is not None
        self.num_calls -= entry.num_calls
        self.upload_bytes -= record.upload_bytes
        entry.num_uses -= 1
        if not entry.num_uses:
            self.size_bytes -= len(entry.body)
            del self._entries[entry.body]
        record.entry, record.frees = None, summary.frees
        if summary.random:
            record.seeds = record.seeds or Seeds(record.draws_from)
            record.seeds.draw()
        record.uploads = record.keep = None
        record.streams = ()
