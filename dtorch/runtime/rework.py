"""A worker's part in bringing a session back: it tells what it holds, copies pieces, runs calls again, and goes on.

Calls that run again work on *scratch* stores, beside the real ones, under the slot numbers that they had. What is intact
is recalled from the real stores by reference, what was copied from the copies; only ``resume`` puts anything into the real
stores. A call in place may write through such a reference: that memory counts as torn until ``resume``, so that another loss
in the middle does not take it for what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtorch.runtime import joint
from dtorch.runtime.arrivals import Arrival
from dtorch.runtime.binding import Bound
from dtorch.runtime.executor import Executor, Position
from dtorch.runtime.plan import Joint, Replay, Run, Step, instruction, steps_of
from dtorch.runtime.poison import LOST, Halted, Poison
from dtorch.runtime.transfer import decode_manifests, encode_manifests, pack, unpack
from dtorch.transport.errors import ConnectionLostError
from dtorch.transport.messages import (
    AskHeld,
    AskSnapshots,
    Copy,
    Fetch,
    Held,
    PlaceFinal,
    PlaceHeld,
    Redo,
    Redone,
    Regroup,
    Resume,
    Resumed,
    Snapshots,
    Value,
)

Scratch = list[list[Any]]


def to_mask(data: bytes) -> int:
    return int.from_bytes(data, "little")


def from_mask(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


class Rework:
    """One session's, for as long as its executor has halted.

    Args:
        read: answers a fetch from the executor's present stores.
    """

    def __init__(self, executor: Executor, read: Callable[[Executor, Fetch], Value | None]) -> None:
        self._executor = executor
        self._stores = executor.stores  # the real ones
        self._read = read
        self._copies: dict[tuple[int, int], Any] = {}  # (leaf, place as Regroup numbers it) -> what was copied
        self._roots: list[frozenset[int]] = []
        self._places: list[int] = []  # place as Regroup numbers it -> hosted index, or -1
        self._scratch: Scratch = []
        self._copied_bytes = 0
        self._broken = False  # something failed: wait for the next epoch

    # ---- halting

    def held(self, asked: AskHeld) -> Held:
        """Halt where the program order is, unless before, and say what the places hold."""
        executor = self._executor
        executor.halted = True
        executor.halt_epoch = max(executor.halt_epoch, asked.epoch)
        self._copies.clear()
        self._scratch = []
        torn = executor.torn
        places = []
        for (kind, device), index in executor.binder.place_index.items():
            mask = 0
            for slot, value in enumerate(executor.stores[index]):
                if value is None or (type(value) is Poison and value.error == LOST):
                    continue
                if torn and isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in torn:
                    continue
                mask |= 1 << slot
            places.append(PlaceHeld(kind, device, from_mask(mask)))
        seq, done, draws = executor.position
        known = executor.snapshots.seqs
        return Held(
            executor.session, asked.epoch, executor.worker, seq, from_mask(done), draws, tuple(places), known,
            executor.generators.read(),
        )

    def snapshots(self, asked: AskSnapshots) -> Snapshots:
        found = {seq: states for seq in asked.seqs if (states := self._executor.snapshots.get(seq)) is not None}
        return Snapshots(asked.session, asked.epoch, found)

    # ---- copying

    def regroup(self, message: Regroup) -> None:
        """Learn where devices are, and exchange pieces."""
        executor = self._executor
        self._broken = message.epoch < executor.halt_epoch
        if self._broken:
            return
        executor.halted = True  # a worker that is new was not asked to
        before = dict(executor.binder.place_index)
        executor.regroup(message.epoch, dict(zip(message.places, message.hosts, strict=True)))
        index = executor.binder.place_index
        self._places = [index.get(place, -1) for place in message.places]
        self._roots = [frozenset(places) for places in message.roots]
        self._scratch = [[] for _ in executor.stores]
        self._copied_bytes = 0
        old = [before.get(place, -1) for place in message.places]
        self._guard(lambda: self._copy(message.copies, old))

    def _guard(self, work: Callable[[], None]) -> None:
        """Do it; when another worker goes away meanwhile, wait for the next epoch, which handles that."""
        try:
            work()
        except ConnectionLostError as error:
            self._executor.lost_touch(0, error)
            self._broken = True
        except Halted:
            self._broken = True

    def _copy(self, copies: Sequence[Copy], old: list[int]) -> None:
        """
        Args:
            old: where each place was hosted here before it may have moved, or -1.
        """
        me = self._executor.worker
        # (source worker, target worker) -> target place -> what goes there
        flows: dict[tuple[int, int], dict[int, list[Copy]]] = {}
        for copy in copies:
            flows.setdefault((copy.source_worker, copy.target_worker), {}).setdefault(copy.target, []).append(copy)
        for target, wanted in flows.pop((me, me), {}).items():
            manifest, buffers = pack(self._values(wanted, old))
            self._arrived(target, wanted, unpack(manifest, buffers, self._device(target)))
        apart = {pair for pair in flows if pair[0] != pair[1]}
        members = tuple(sorted({worker for pair in apart for worker in pair}))
        if me not in members:
            return
        self._exchange(self._executor.binder.group(members, "gloo"), flows, old)

    def _exchange(self, group: Any, flows: dict[tuple[int, int], dict[int, list[Copy]]], old: list[int]) -> None:
        """Three rounds: how long the manifests are, the manifests, the bytes."""
        me = self._executor.worker
        lengths, texts, data = {}, {}, {}
        for (source, target_worker), places in flows.items():
            if source == me:
                packed = [pack(self._values(wanted, old)) for wanted in places.values()]
                text = encode_manifests([manifest for manifest, _ in packed])
                texts[target_worker] = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
                lengths[target_worker] = [torch.tensor([len(text)])]
                data[target_worker] = [buffer.cpu() for _, buffers in packed for buffer in buffers]
                self._copied_bytes += sum(buffer.numel() for buffer in data[target_worker])
        sources = [source for source, target in flows if target == me]
        sizes, _ = group.exchange(lengths, {s: [((1,), torch.int64)] for s in sources}, True)
        found, _ = group.exchange(texts, {s: [((int(sizes[s][0]),), torch.uint8)] for s in sources}, True)
        manifests = {s: decode_manifests(found[s][0].numpy().tobytes()) for s in sources}
        expected = {
            s: [((size,), torch.uint8) for manifest in manifests[s] for size in manifest.buffer_sizes()] for s in sources
        }
        received, _ = group.exchange(data, expected, True)
        for source in sources:
            rest = iter(received[source])
            for (target, wanted), manifest in zip(flows[source, me].items(), manifests[source], strict=True):
                buffers = [next(rest) for _ in manifest.buffer_sizes()]
                self._arrived(target, wanted, unpack(manifest, buffers, self._device(target)))

    def _values(self, wanted: list[Copy], old: list[int]) -> list[Any]:
        stores = self._executor.stores
        return [stores[old[copy.source]][copy.slot] for copy in wanted]

    def _arrived(self, target: int, wanted: list[Copy], values: list[Any]) -> None:
        for copy, value in zip(wanted, values, strict=True):
            self._copies[copy.leaf, target] = Poison(-1) if value is None else value

    def _device(self, place: int) -> torch.device:
        executor = self._executor
        return executor.device_of(executor.places[self._places[place]])

    # ---- running again

    def redo(self, message: Redo, uploads: list[Arrival]) -> tuple[Value, ...]:
        """Run calls of one batch again; the answer is what was read after them."""
        executor = self._executor
        if self._broken or message.epoch != executor.binder.epoch:
            return ()
        values: list[Value] = []

        def work() -> None:
            for redone in message.calls:
                self._again(redone)
            for reread in message.rereads:
                self._recall(reread.recalls)
                value = self._read(executor, reread.fetch)
                if value is not None:
                    values.append(value)

        if message.states is not None:
            executor.generators.write(message.states)
        for mark in message.marks:
            executor.generators.mark(mark)
        definitions = executor.binder.definitions
        if any(definitions[redone.call[0]].params.get("random") for redone in message.calls):
            executor.snapshots.take_again(message.seq)
        with executor.beside(self._scratch, message.seq, uploads):
            self._guard(work)
        return () if self._broken else tuple(values)

    def _again(self, redone: Redone) -> None:
        executor = self._executor
        (step,) = steps_of([redone.call], executor.binder.definitions)
        step = replace(step, index=redone.index)
        definition = step.definition
        captured: tuple[int, ...] = ()
        if definition.kernel == "program":
            program = executor.program(definition.sig)
            captured = tuple(slot for _, slot in (*program.program.captured, *program.program.kept))
        self._make_room((*step.outs, *step.ins, *captured, *(slot for slot, _ in redone.recalls)))
        if redone.draw:
            self._draw(step)
            return
        self._recall(redone.recalls)
        here = {self._places[place] for place in redone.places} - {-1}
        if definition.kernel == "program":
            if program.plan.writes:
                executor.tear(self._scratch, here, (*step.ins, *captured))
            executor.replay(Replay(step, program))
        else:
            writes = {*definition.writes, *definition.params.get("mutates", ())}
            executor.tear(self._scratch, here, [step.ins[w] for w in writes])
            bound = executor.binder.bind(definition)
            if bound is not None:
                self._run(step, bound, here)
        for index in here:
            for slot in redone.kills:
                self._scratch[index][slot] = None

    def _run(self, step: Step, bound: Bound, here: set[int]) -> None:
        executor = self._executor
        if bound.communicates:
            joint.run(executor, Joint(step, bound), executor.uploads)
            return
        functions = {index: fn for index, fn in bound.functions.items() if index in here}
        if bound.is_joint:
            joint.run(executor, Joint(step, replace(bound, functions=functions)), executor.uploads)
            return
        for index, fn in functions.items():
            form, code = instruction(step, fn)
            executor.run_local(index, [Run(form, [code], [step.index])])

    def _draw(self, step: Step) -> None:
        """Let the generators go past a call whose result nobody needs."""
        executor = self._executor
        if step.definition.kernel == "program":
            for part in executor.program(step.definition.sig).plan.parts:
                if isinstance(part, Joint) and part.bound.draws is not None:
                    part.bound.draws(None, part.step.numbers)
            return
        bound = executor.binder.bind(step.definition)
        assert bound is not None
        assert bound.draws is not None
        bound.draws(None, step.numbers)

    def _make_room(self, slots: Sequence[int]) -> None:
        size = max(slots, default=-1) + 1
        for store in self._scratch:
            if len(store) < size:
                store.extend([None] * (size - len(store) + 256))

    def _recall(self, recalls: Sequence[tuple[int, int]]) -> None:
        """Let slots of the scratch stores be what is there already."""
        self._make_room([slot for slot, _ in recalls])
        for slot, leaf in recalls:
            roots = self._roots[leaf]
            for place, index in enumerate(self._places):
                if index < 0:
                    continue
                if place in roots:
                    self._scratch[index][slot] = self._stores[index][slot]
                elif (leaf, place) in self._copies:
                    self._scratch[index][slot] = self._copies[leaf, place]

    # ---- going on

    def resume(self, message: Resume) -> Resumed | None:
        """Take over what was copied and made again. None: something went wrong, and the next epoch will come."""
        executor = self._executor
        if self._broken or message.epoch != executor.binder.epoch or executor.halt_epoch > message.epoch:
            return None
        for final in message.finals:
            index = self._places[final.place]
            if index >= 0:
                self._settle(index, executor.stores[index], final)
        hosted = set(executor.binder.place_index.values())
        for index, store in enumerate(executor.stores):
            if index not in hosted:
                store.clear()
        if message.states is not None:
            executor.generators.write(message.states)
        executor.position = Position(message.seq + 1, 0, 0)
        executor.torn.clear()
        executor.halted = False
        self._scratch = []
        self._copies.clear()
        return Resumed(executor.session, message.epoch, executor.worker, self._copied_bytes)

    def _settle(self, index: int, store: list[Any], final: PlaceFinal) -> None:
        live, redone, lost = to_mask(final.live), to_mask(final.redone), to_mask(final.lost)
        copied = dict(final.copied)
        size = live.bit_length()
        store.extend([None] * (size - len(store)))
        scratch = self._scratch[index]
        for slot in range(len(store)):
            if not live >> slot & 1:
                store[slot] = None
            elif lost >> slot & 1:
                store[slot] = Poison(LOST)
            elif slot in copied:
                store[slot] = self._copies[copied[slot], final.place]
            elif redone >> slot & 1:
                store[slot] = scratch[slot]
