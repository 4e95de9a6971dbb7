"""What must run again, call by call, so that a session goes on after devices have lost what they held. Pure.

Every surviving worker has stopped at some call of the program (its *position*) and tells what it holds. From that and the
lineage, ``rescue`` works backwards from the end of what was submitted, as a program slice does: a piece of a tensor
that is alive there, or that a value under way needs, is

* left where it is, when its device holds this version of it;
* copied from a device that holds the same piece of the same version;
* otherwise made by its call, which asks for the pieces of its inputs in turn.

A call of plain local work runs on the devices that need it; one that communicates runs on all of its devices. Calls keep
their order and their slot numbers and work on stores of their own (``rework.py``), so what is intact is not touched.

A *version* of a slot is the last call before some point that defined it or wrote into its memory. Slots that may share
memory are treated together: their pieces come from one device, or are all made again.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtorch.runtime.layout import REPLICATE, coords
from dtorch.runtime.lineage import Facts, Lineage, Record, bits
from dtorch.runtime.plan import decode_body
from dtorch.transport.messages import Fetch, Layout, MeshInfo

Place = tuple[str, int]
Position = tuple[int, int]  # (batch, mask of its calls that were executed); all batches before it were

_WRITTEN = 63  # in a memory version, stands for "written in place by the call"


class Redo(enum.Enum):
    """Which calls may run again."""

    ALL = "all"
    PROVEN = "proven"  # those that have run once without harm
    NONE = "none"


@dataclass(frozen=True)
class Standing:
    """Where a device stands.

    Attributes:
        position: how far it has executed.
        held: mask of the slots that it still holds; 0 on a lost one.
    """

    position: Position
    held: int


@dataclass
class Step:
    """A call that runs again.

    Attributes:
        places: mask of the devices on which it runs.
        recalls: (slot, leaf): before it runs, the slot gets the tensor that the leaf stands for.
        kills: slots that nobody needs after it.
        draw: it only moves the generators on.
        wants: (slot, places that need it, of these from leaves) of each input.
        everywhere: mask of all devices of the call.
        dead: it cannot run; what it would give is lost.
        draws_anyway: the generators must move on even if nothing of it can run.
    """

    number: int
    index: int
    call: Sequence[Any]
    facts: Facts
    places: int
    recalls: list[tuple[int, int]] = field(default_factory=list)
    kills: list[int] = field(default_factory=list)
    draw: bool = False
    wants: list[tuple[int, int, int]] = field(default_factory=list)
    everywhere: int = 0
    dead: bool = False
    draws_anyway: bool = False


@dataclass
class Tap:
    """A value under way that is read again after the calls of its batch."""

    fetch: Fetch
    recalls: list[tuple[int, int]] = field(default_factory=list)
    wants: list[tuple[int, int, int]] = field(default_factory=list)
    lost: bool = False


@dataclass
class Part:
    """What runs again of one batch."""

    record: Record
    steps: list[Step]
    taps: list[Tap]


@dataclass(frozen=True)
class Leaf:
    """A version of a slot that is there already.

    Attributes:
        sources: device -> the device that has it: itself, or one from which it is copied.
    """

    number: int
    slot: int
    sources: dict[int, int]


@dataclass
class Final:
    """What a device holds at the end, as masks of slots.

    Attributes:
        live: all that is alive there.
        redone: made again.
        leaves: slot -> (leaf, device that has it): what is there already, here or elsewhere.
        lost: cannot be made again.
    """

    live: int = 0
    redone: int = 0
    leaves: dict[int, tuple[int, int]] = field(default_factory=dict)
    lost: int = 0


@dataclass
class Rescue:
    """All that ``rescue`` found.

    Attributes:
        lost: (layout, op that made it) of tensors of which some device has no piece any more.
        recomputed: calls that run a second time.
        stretch: number of the batch from which on every draw of random numbers happens again; None: no draw does.
    """

    parts: list[Part]
    leaves: list[Leaf]
    finals: list[Final]
    lost: list[tuple[Layout, str]]
    recomputed: int
    stretch: int | None


@dataclass(frozen=True)
class _Point:
    """How far a device has executed: all calls below ``base``, and of those from there on the ones in the mask."""

    base: int
    done: int

    def has(self, number: int) -> bool:
        return number < self.base or bool(self.done >> (number - self.base) & 1)


class _Conflict(Exception):
    """Pieces of one memory would come from two places."""

    def __init__(self, banned: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.banned = set(banned)


def rescue(
    lineage: Lineage,
    places: Sequence[Place],
    meshes: dict[int, MeshInfo],
    standings: Sequence[Standing],
    taps: Sequence[tuple[int, Fetch]] = (),
    *,
    executed: Sequence[Position] | None = None,
    snapshots: frozenset[int] = frozenset(),
    redo: Redo = Redo.ALL,
) -> Rescue:
    """What is to be done so that every device holds what is alive at the end of the lineage.

    Args:
        places: the session's devices; masks of places refer to this order.
        standings: of each of them.
        taps: (batch, fetch) of values under way.
        executed: how far each had executed when last heard of; tells what counts as recomputed.
        snapshots: batches for which the generators' state at their beginning is known.
        redo: which calls may run again; what would need others is lost.
    """
    walk = _Walk(lineage, places, meshes, standings, taps, executed, snapshots, redo)
    banned: set[tuple[int, int]] = set()
    while True:
        try:
            return walk.back(banned)
        except _Conflict as conflict:
            banned |= conflict.banned


class _Walk:
    """Forward once, to learn every version; then backward, perhaps more than once."""

    def __init__(
        self,
        lineage: Lineage,
        places: Sequence[Place],
        meshes: dict[int, MeshInfo],
        standings: Sequence[Standing],
        taps: Sequence[tuple[int, Fetch]],
        executed: Sequence[Position] | None,
        snapshots: frozenset[int],
        redo: Redo,
    ) -> None:
        self._lineage = lineage
        self._snapshots = snapshots
        self._redo = redo
        index = {place: i for i, place in enumerate(places)}
        self._mesh_places = {m: [index[info.kind, d] for d in info.devices] for m, info in meshes.items()}
        self._mesh_masks = {m: sum(1 << p for p in set(found)) for m, found in self._mesh_places.items()}
        self._mesh_shapes = {m: tuple(info.shape) for m, info in meshes.items()}
        self._num_places = len(places)
        # Slot -> its versions, ascending: (call, memory version, layout). Call -1: from before the lineage.
        self._versions: dict[int, list[tuple[int, int, Layout]]] = {}
        self._written: dict[int, tuple[int, ...]] = {}  # call that writes in place -> slots that share the memory
        self._draws: list[int] = []
        self._bases: list[int] = []
        self._bodies: list[list[list[Any]]] = []
        self._group: dict[int, set[int]] = {}
        self._forward()
        self._end = self._bases[-1] + len(self._bodies[-1]) if self._bases else 0
        self._seqs = [record.seq for record in lineage.records]
        self._held = [standing.held for standing in standings]
        self._at = [self._point(*standing.position) for standing in standings]
        self._executed = self._at if executed is None else [self._point(*position) for position in executed]
        self._taps: dict[int, list[Fetch]] = {}
        for seq, fetch in taps:
            self._taps.setdefault(seq, []).append(fetch)
        self._sources: dict[tuple[int, int], dict[int, list[int]]] = {}
        self._nobody = all(standing.position == (0, 0) for standing in standings)  # is left who has executed anything
        self._stretch = self._where_draws_begin()

    # ---- forward

    def _forward(self) -> None:
        front = self._lineage.front
        for slot, layout in front.layouts.items():
            group = front.memory[slot]
            self._versions[slot] = [(-1, -1 - group, layout)]
        for mask in front.members.values():
            members = set(bits(mask))
            for slot in members:
                self._group[slot] = members
        decoded: dict[int, Any] = {}
        number = 0
        for record in self._lineage.records:
            self._bases.append(number)
            entry = record.entry
            if entry is None:
                self._bodies.append([])
                for slot in bits(record.frees):
                    self._leave(slot)
                continue
            known = decoded.get(id(entry))
            if known is None:
                known = decoded[id(entry)] = decode_body(entry.body)
            calls, frees = known
            self._bodies.append(calls)
            for call in calls:
                self._pass(number, call)
                number += 1
            for _, slots in frees:
                for slot in slots:
                    self._leave(slot)

    def _leave(self, slot: int) -> None:
        members = self._group.pop(slot, None)
        if members is not None:
            members.discard(slot)

    def _pass(self, number: int, call: Sequence[Any]) -> None:
        facts = self._lineage.facts(call[0])
        outs, ins = facts.split(call)
        versions, groups = self._versions, self._group
        if facts.random:
            self._draws.append(number)
        if facts.writes:
            members: set[int] = set()
            for w in facts.writes:
                members |= groups.get(ins[w], {ins[w]})
            self._written[number] = tuple(members)
            for slot in members:
                layout = versions[slot][-1][2] if slot in versions else None
                if not facts.num_outs and facts.outs and slot == ins[facts.writes[0]]:
                    layout = facts.outs[0]
                if layout is not None:
                    versions.setdefault(slot, []).append((number, number << 6 | _WRITTEN, layout))
        for k, slot in enumerate(outs):
            alias = facts.aliases[k]
            memory = number << 6 | k
            shared: set[int] | None = None
            if alias >= 0 and ins[alias] in versions:
                memory = versions[ins[alias]][-1][1]
                shared = groups.get(ins[alias])
            self._leave(slot)
            if shared is None:
                shared = set()
            shared.add(slot)
            groups[slot] = shared
            versions.setdefault(slot, []).append((number, memory, facts.outs[k]))

    def _point(self, seq: int, done: int) -> _Point:
        i = bisect_left(self._seqs, seq)
        if i == len(self._seqs):
            return _Point(self._end, 0)
        return _Point(self._bases[i], done if self._seqs[i] == seq else 0)

    def _where_draws_begin(self) -> int | None:
        """Index of the first record whose draws must all happen, so that every generator ends where the program has it."""
        records = self._lineage.records
        reached = max((point.base for point in self._at), default=0)
        undone = next((n for n in self._draws if not any(point.has(n) for point in self._at)), self._end)
        first = bisect_left(self._bases, undone + 1) - 1 if undone < self._end else len(records)
        while 0 <= first < len(records) and not self._bodies[first]:
            first -= 1
        # What was dropped has been executed by whoever is left.
        marked = (r.seeds is not None and (self._nobody or r.entry is not None) for r in records)
        unmarked = next((i for i, m in enumerate(marked) if m and self._bases[i] >= reached), len(records))
        first = min(first, unmarked)
        return first if first < len(records) else None

    # ---- versions

    def _version_at(self, slot: int, point: _Point) -> int:
        """Which of the slot's versions a device has at its point; -1 when it has none."""
        versions = self._versions.get(slot, ())
        i = bisect_left(versions, (point.base + point.done.bit_length(),)) - 1 if versions else -1
        while i >= 0 and not point.has(versions[i][0]):
            i -= 1
        return i

    def _version(self, slot: int, before: int) -> int:
        """Which of the slot's versions it has just before call ``before``; -1 when it has none."""
        versions = self._versions.get(slot)
        return bisect_left(versions, (before,)) - 1 if versions else -1

    def _sources_of(self, slot: int, version: int) -> dict[int, list[int]]:
        """Device -> devices that hold the same piece of this version, itself first."""
        found = self._sources.get((slot, version))
        if found is not None:
            return found
        layout = self._versions[slot][version][2]
        shape = self._mesh_shapes[layout.mesh]
        axes = [a for a, code in enumerate(layout.codes) if code != REPLICATE and shape[a] > 1]
        pieces: dict[tuple[int, ...], list[int]] = {}
        keys = {}
        for place, coord in zip(self._mesh_places[layout.mesh], coords(shape), strict=True):
            key = keys[place] = tuple(coord[a] for a in axes)
            if self._held[place] >> slot & 1 and self._version_at(slot, self._at[place]) == version:
                pieces.setdefault(key, []).append(place)
        found = self._sources[slot, version] = {
            place: sorted(pieces[key], key=lambda p: (p != place, p)) for place, key in keys.items() if key in pieces
        }
        return found

    # ---- backward

    def back(self, banned: set[tuple[int, int]]) -> Rescue:
        self._banned = banned
        self._need: dict[int, int] = {}
        self._leaves: dict[tuple[int, int], int] = {}  # (slot, version) -> places
        self._leaf_numbers: dict[tuple[int, int], int] = {}
        self._leaf_memory: dict[int, int] = {}  # memory version -> places at which some leaf has it
        finals = self._want_all()
        parts: list[Part] = []
        records = self._lineage.records
        for i in range(len(records) - 1, -1, -1):
            taps = self._taps.get(records[i].seq)
            part = Part(records[i], [], [])
            for fetch in taps or ():
                part.taps.append(self._tap(fetch, self._bases[i] + len(self._bodies[i])))
            if self._need or (self._stretch is not None and i >= self._stretch):
                self._back_through(i, part)
            if part.steps or part.taps or (self._stretch is not None and i >= self._stretch and part.record.seeds):
                parts.append(part)
        parts.reverse()
        leaves = self._choose_sources()
        return self._conclude(parts, leaves, finals)

    def _want_all(self) -> dict[int, tuple[int, int, int]]:
        """Ask for everything alive at the end: slot -> (version, places, of these from leaves)."""
        wanted = {}
        for slot in self._group:
            version = self._version(slot, self._end)
            if version < 0:
                continue
            mask = self._mesh_masks[self._versions[slot][version][2].mesh]
            wanted[slot] = version, mask, self._want(slot, self._end, mask)
        return wanted

    def _want(self, slot: int, before: int, mask: int) -> int:
        """Ask for pieces of a slot as it is just before a call; the answer is the places that have them from leaves."""
        version = self._version(slot, before)
        taken = 0
        if version >= 0:
            memory = self._versions[slot][version][1]
            for place in self._sources_of(slot, version):
                if mask >> place & 1 and (memory, place) not in self._banned:
                    taken |= 1 << place
            if taken:
                key = slot, version
                self._leaves[key] = self._leaves.get(key, 0) | taken
                self._leaf_numbers.setdefault(key, len(self._leaf_numbers))
                self._leaf_memory[memory] = self._leaf_memory.get(memory, 0) | taken
        rest = mask & ~taken
        if rest:
            self._need[slot] = self._need.get(slot, 0) | rest
        return taken

    def _tap(self, fetch: Fetch, before: int) -> Tap:
        tap = Tap(fetch)
        mask = self._mesh_masks[fetch.mesh]
        taken = self._want(fetch.slot, before, mask)
        tap.wants.append((fetch.slot, mask, taken))
        if taken:
            tap.recalls.append((fetch.slot, self._leaf_numbers[fetch.slot, self._version(fetch.slot, before)]))
        return tap

    def _back_through(self, i: int, part: Part) -> None:
        base, calls = self._bases[i], self._bodies[i]
        need, written = self._need, self._written
        all_draws = self._stretch is not None and i >= self._stretch
        drawing = all_draws  # whether draws of earlier calls of this batch must happen
        facts_of = self._lineage.facts
        for index in range(len(calls) - 1, -1, -1):
            call = calls[index]
            number = base + index
            facts = facts_of(call[0])
            outs, ins = facts.split(call)
            mask = 0
            unused = []
            for slot in outs:
                wanted = need.pop(slot, 0)
                mask |= wanted
                if not wanted:
                    unused.append(slot)
            members = written.get(number, ()) if facts.writes else ()
            for slot in members:
                mask |= need.get(slot, 0)
            if not mask:
                if drawing and facts.random:
                    part.steps.append(Step(number, index, call, facts, 0, draw=True))
                continue
            self._check(number, len(outs), bool(members), mask)
            step = Step(number, index, call, facts, mask, draws_anyway=drawing and facts.random)
            part.steps.append(step)
            step.everywhere = self._everywhere(facts)
            if facts.is_joint:
                step.places = step.everywhere
            uploads = part.record.uploads
            fresh = not any(point.has(number) for point in self._executed)
            undrawable = facts.random and not all_draws and part.record.seq not in self._snapshots
            refused = part.record.refused
            barred = self._redo is Redo.NONE or (self._redo is Redo.PROVEN and fresh)
            if barred or undrawable or refused or (facts.upload and uploads is None) or not (facts.repeatable or fresh):
                step.dead = True
                continue
            drawing = drawing or facts.random
            step.kills = unused
            later = {slot for slot in members if slot in need}  # what is written is needed as it was before, and kept after
            for slot in later:
                self._ask_for(step, slot, number, need.pop(slot))
            for k, slot in enumerate(ins):
                where = self._mesh_masks[facts.ins[k].mesh]
                if not facts.is_joint:
                    where &= step.places
                if slot not in need and slot not in later and slot not in step.kills:
                    step.kills.append(slot)
                self._ask_for(step, slot, number, where)
        part.steps.reverse()

    def _ask_for(self, step: Step, slot: int, before: int, where: int) -> None:
        taken = self._want(slot, before, where)
        step.wants.append((slot, where, taken))
        if taken:
            step.recalls.append((slot, self._leaf_numbers[slot, self._version(slot, before)]))

    def _everywhere(self, facts: Facts) -> int:
        mask = 0
        for layout in (*facts.outs, *facts.ins):
            mask |= self._mesh_masks[layout.mesh]
        return mask

    def _check(self, number: int, num_outs: int, writes: bool, mask: int) -> None:
        """Memory that this call makes or writes must not also come from a leaf at the same place."""
        kinds = [*range(num_outs)] + ([_WRITTEN] if writes else [])
        found = []
        for k in kinds:
            memory = number << 6 | k
            both = self._leaf_memory.get(memory, 0) & mask
            found += [(memory, place) for place in bits(both)]
        if found:
            raise _Conflict(found)

    # ---- the end

    def _choose_sources(self) -> list[Leaf]:
        """One source for all leaves of one memory at one place."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (slot, version), mask in self._leaves.items():
            memory = self._versions[slot][version][1]
            for place in bits(mask):
                groups.setdefault((memory, place), []).append((slot, version))
        sources: dict[tuple[int, int], dict[int, int]] = {key: {} for key in self._leaves}
        torn = []
        for (memory, place), keys in groups.items():
            common = [set(self._sources_of(*key)[place]) for key in keys]
            shared = set.intersection(*common)
            if not shared:
                torn.append((memory, place))
                continue
            order = sorted(shared)
            source = place if place in shared else order[place % len(order)]
            for key in keys:
                sources[key][place] = source
        if torn:
            raise _Conflict(torn)
        return [Leaf(self._leaf_numbers[key], key[0], found) for key, found in sources.items()]

    def _conclude(
        self, parts: list[Part], leaves: list[Leaf], wanted: dict[int, tuple[int, int, int]]
    ) -> Rescue:
        """Forward over what was chosen: what depends on something lost is lost too."""
        bad = {slot: mask for slot, mask in self._need.items() if mask}
        recomputed = 0
        most = self._executed
        for part in parts:
            steps = []
            for step in part.steps:
                outs, _ = step.facts.split(step.call)
                members = self._written.get(step.number, ()) if step.facts.writes else ()
                if step.draw:
                    steps.append(step)
                    continue
                failed = step.places if step.dead else 0
                for slot, where, taken in step.wants:
                    failed |= bad.get(slot, 0) & where & ~taken
                if failed and step.facts.is_joint:
                    failed = step.places
                for slot in outs:
                    left = bad.get(slot, 0) & ~step.places | failed
                    if left:
                        bad[slot] = left
                    else:
                        bad.pop(slot, None)
                for slot in members if failed else ():
                    bad[slot] = bad.get(slot, 0) | failed
                step.places &= ~failed
                if step.places:
                    steps.append(step)
                    recomputed += any(most[p].has(step.number) for p in bits(step.everywhere))
                elif step.draws_anyway:
                    step.draw, step.recalls, step.kills = True, [], []
                    steps.append(step)
            part.steps = steps
            for tap in part.taps:
                tap.lost = any(bad.get(slot, 0) & where & ~taken for slot, where, taken in tap.wants)
        finals = [Final() for _ in range(self._num_places)]
        lost = []
        copies = {(leaf.slot, leaf.number): leaf for leaf in leaves}
        for slot, (version, mask, taken) in wanted.items():
            gone = mask & ~taken & bad.get(slot, 0)
            leaf = copies.get((slot, self._leaf_numbers.get((slot, version), -1)))
            for place in bits(mask):
                final = finals[place]
                bit = 1 << slot
                final.live |= bit
                if gone >> place & 1:
                    final.lost |= bit
                elif not taken >> place & 1:
                    final.redone |= bit
                elif leaf is not None:
                    final.leaves[slot] = leaf.number, leaf.sources[place]
            if gone:
                lost.append((self._versions[slot][version][2], self._op_of(slot, version)))
        stretch = None if self._stretch is None else self._lineage.records[self._stretch].seq
        return Rescue(parts, leaves, finals, lost, recomputed, stretch)

    def _op_of(self, slot: int, version: int) -> str:
        number = self._versions[slot][version][0]
        if number < 0:
            return self._lineage.front.ops[slot]
        i = bisect_left(self._bases, number + 1) - 1
        while not self._bodies[i]:
            i -= 1
        return self._lineage.facts(self._bodies[i][number - self._bases[i]][0]).op
