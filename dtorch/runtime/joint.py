"""Calls that the hosted places run together: they communicate, draw random numbers or read an upload."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtorch.runtime.comm import Place, Received, Wire, merged, split
from dtorch.runtime.layout import coords, local_shape
from dtorch.runtime.plan import Joint, Step
from dtorch.runtime.poison import Halted, Poison
from dtorch.runtime.template import dtype_of
from dtorch.runtime.tracing import COMMUNICATION, COMPUTE, COPY, sent_bytes
from dtorch.transport.errors import ConnectionLostError

if TYPE_CHECKING:
    from dtorch.runtime.arrivals import Arrival
    from dtorch.runtime.binding import Bound
    from dtorch.runtime.executor import Executor
    from dtorch.transport.groups import UnderWay

Lockstep = Generator[Wire, Received, None]


def run(executor: Executor, joint: Joint, uploads: Sequence[Arrival]) -> None:
    """Run one joint call to its end. A failure is reported and poisons its outputs."""
    bound: Bound = joint.bound
    try:
        if bound.communicates:
            _to_end(lockstep(executor, joint.step, bound), bound)
        elif bound.draws is not None:
            _draw(executor, joint.step, bound)
        else:
            _feed(executor, joint.step, bound, uploads)
    except ConnectionLostError as error:
        executor.lost_touch(joint.step.index, error)
        raise Halted from None
    except Exception as error:
        fail(executor, joint, error)


def fail(executor: Executor, joint: Joint, error: Exception) -> None:
    bound: Bound = joint.bound
    place = executor.places[next(iter(bound.functions))] if bound.functions else ("cpu", 0)
    poison = executor.fail(joint.step.index, place, error)
    for index in bound.functions:
        _put_all(executor, index, joint.step, poison)


class Flight:
    """Communicating calls that have begun together; what they have for other workers goes as one exchange.

    Between ``__init__`` and ``finish`` the worker does other things; their inputs must stay as they are.
    """

    def __init__(self, executor: Executor, joints: Sequence[Joint]) -> None:
        self._executor, self._joints = executor, joints
        self._running: dict[int, Lockstep] = {}  # position in joints
        self._wires: dict[int, Wire] = {}
        self._exchange: UnderWay | None = None
        for number, joint in enumerate(joints):
            self._running[number] = lockstep(executor, joint.step, joint.bound)
        self._advance({})

    def _advance(self, received: dict[int, Received]) -> None:
        """Resume every call up to what it has for other workers next, and begin that exchange."""
        self._wires = {}
        for number, running in list(self._running.items()):
            try:
                self._wires[number] = running.send(received[number]) if number in received else next(running)
            except StopIteration:
                del self._running[number]
            except Exception as error:
                del self._running[number]
                fail(self._executor, self._joints[number], error)
        self._exchange = None
        if self._wires:
            wires = list(self._wires.values())
            wire = wires[0] if len(wires) == 1 else merged(wires)
            group = self._joints[0].bound.comm.group
            assert group is not None
            try:
                self._exchange = group.start(wire.sends, wire.wanted, wire.ok)
            except Exception as error:
                self._fail_all(error)

    def finish(self) -> None:
        """Wait for the exchange, and run the calls to their end."""
        while self._exchange is not None:
            wires = list(self._wires.values())
            try:
                received = self._exchange.wait()
            except Exception as error:
                self._fail_all(error)
                return
            parts = [received] if len(wires) == 1 else split(received, wires)
            self._advance(dict(zip(self._wires, parts, strict=True)))

    def _fail_all(self, error: Exception) -> None:
        self._exchange = None
        if isinstance(error, ConnectionLostError):
            self._executor.lost_touch(self._joints[0].step.index, error)
            raise Halted from None
        for number in self._running:
            fail(self._executor, self._joints[number], error)
        self._running.clear()


def _to_end(running: Lockstep, bound: Bound) -> None:
    assert bound.comm is not None
    try:
        wire = next(running)
        while True:
            group = bound.comm.group
            assert group is not None
            wire = running.send(group.exchange(wire.sends, wire.wanted, wire.ok))
    except StopIteration:
        return


def lockstep(executor: Executor, step: Step, bound: Bound) -> Lockstep:
    """Run a communicating kernel on all hosted places in lockstep. Yields what must go through the group.

    A poisoned input is replaced by zeros of its shape, so that other workers' exchanges stay matched; what comes out is
    poison again, here and, by the status that travels with each message, at its receivers.
    """
    comm, members = bound.comm, bound.members
    assert comm is not None
    assert members is not None
    definition, stores, tracer = step.definition, executor.stores, executor.tracer
    poison: Poison | None = None
    generators: dict[Place, Any] = {}
    index_of: dict[Place, int] = {}
    for index, fn in bound.functions.items():
        place = executor.places[index]
        s = stores[index]
        values = []
        for slot, layout in zip(step.ins, definition.inputs, strict=True):
            info = executor.meshes[layout.mesh]
            if place[0] != info.kind or place[1] not in info.devices:
                continue
            value = s[slot]
            if type(value) is Poison:
                poison = value
                value = _stand_in(executor, place, layout)
            values.append(value)
        generators[place] = fn(*values, *step.numbers)
        index_of[place] = index
    # One device may write its piece before another has looked at what it was sent of it.
    written = {
        s[slot].untyped_storage().data_ptr()
        for index in bound.functions
        for s in (stores[index],)
        for slot in (step.ins[w] for w in definition.writes)
        if isinstance(s[slot], torch.Tensor)
    }
    good = True
    results: dict[Place, Any] = {}
    answers: dict[Place, Any] = dict.fromkeys(generators)
    while generators:
        requests = {}
        for place in list(generators):
            began = 0 if tracer is None else tracer.mark(index_of[place])
            try:
                requests[place] = generators[place].send(answers[place])
            except StopIteration as stop:
                results[place] = stop.value
                del generators[place]
            if tracer is not None:
                tracer.add(COMPUTE, index_of[place], step.index, began, tracer.mark(index_of[place]))
        if requests:
            executor.counters["exchanges"] += 1
            for request in requests.values() if written else ():
                request.detach_from(written)
            marks = {} if tracer is None else {place: tracer.mark(index_of[place]) for place in requests}
            answers, all_good = yield from comm.perform(members, requests, good and poison is None)
            executor.counters["exchanged_bytes"] += comm.sent_bytes
            if executor.traffic is not None:
                executor.traffic[definition.sig] = executor.traffic.get(definition.sig, 0) + comm.sent_bytes
            comm.sent_bytes = 0
            good = good and all_good
            for place, mark in marks.items():
                assert tracer is not None
                num = members.num_along(getattr(requests[place], "axes", ()))
                at = index_of[place]
                tracer.add(COMMUNICATION, at, step.index, mark, tracer.mark(at), sent_bytes(requests[place], num))
    if poison is None and not good:
        poison = Poison(-1)
    for place, result in results.items():
        index = index_of[place]
        if poison is not None:
            _put_all(executor, index, step, poison, stores)
        elif not definition.writes and result is not None:
            _put(stores[index], step.outs, result)


def _put(s: list[Any], outs: tuple[int, ...], result: Any) -> None:
    if isinstance(result, torch.Tensor):
        s[outs[0]] = result
    else:
        for slot, value in zip(outs, result, strict=True):
            s[slot] = value


def _put_all(executor: Executor, index: int, step: Step, value: Any, stores: list[list[Any]] | None = None) -> None:
    s = (stores or executor.stores)[index]
    for slot in step.outs or [step.ins[w] for w in step.definition.writes]:
        s[slot] = value


def _feed(executor: Executor, step: Step, bound: Bound, uploads: Sequence[Arrival]) -> None:
    tracer, numbers = executor.tracer, step.numbers
    if bound.kernel.name == "read":  # with what devices have read: those with the same piece read it once
        data: Any = {}
    else:
        data = uploads
    for index, fn in bound.functions.items():
        began = 0 if tracer is None else tracer.mark(index)
        made = executor.stores[index][step.outs[0]] = fn(data, *numbers)
        if tracer is not None:
            tracer.add(COPY, index, step.index, began, tracer.mark(index), made.nbytes)


def _draw(executor: Executor, step: Step, bound: Bound) -> None:
    assert bound.draws is not None
    tracer = executor.tracer
    inputs: list[Any] | None = None
    if bound.functions and step.ins:
        s = executor.stores[next(iter(bound.functions))]
        inputs = [s[i] for i in step.ins]
    poison = next((t for t in inputs or [] if type(t) is Poison), None)
    if poison is not None:
        for index in bound.functions:
            _put_all(executor, index, step, poison)
        return
    first = next(iter(bound.functions), -1)
    began = 0 if tracer is None else tracer.mark(first)
    drawn = bound.draws(inputs, step.numbers)
    for index, fn in bound.functions.items():
        s = executor.stores[index]
        if tracer is not None and index != first:
            began = tracer.mark(index)
        result = fn(drawn, *[s[i] for i in step.ins])
        if tracer is not None:
            tracer.add(COMPUTE, index, step.index, began, tracer.mark(index))
        if not step.definition.writes:
            _put(s, step.outs, result)


def _stand_in(executor: Executor, place: Place, layout: Any) -> torch.Tensor:
    info = executor.meshes[layout.mesh]
    coord = coords(tuple(info.shape))[list(info.devices).index(place[1])]
    shape = local_shape(tuple(layout.shape), tuple(layout.codes), tuple(info.shape), coord)
    return torch.zeros(shape, dtype=dtype_of(layout.dtype), device=executor.device_of(place))
