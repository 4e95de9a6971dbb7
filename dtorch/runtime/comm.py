"""Communication as instructions: a kernel yields what it needs, the executor provides it.

Kernels are written for one device (SPMD). The executor runs the generators of all devices that it hosts in lockstep: what
stays inside the process is passed by reference, the rest goes through one all-to-all among the workers concerned. Kernels
must therefore never write into a tensor that they received or sent.

Reductions add in the order of the mesh axis, on every path, so a result does not depend on which process hosts what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dtorch.runtime.layout import coords
from dtorch.transport.messages import MeshInfo

if TYPE_CHECKING:
    from dtorch.transport.groups import Group

Place = tuple[str, int]


@dataclass(slots=True)
class Exchange:
    """Send tensors to devices, receive tensors from devices. Answer: a list in the order of ``receives``.

    Attributes:
        sends: (place, tensor), never to itself.
        receives: (place, shape); the k-th from a place is the k-th that it sent here.
        dtype: of every tensor.
    """

    sends: list[tuple[Place, torch.Tensor]]
    receives: list[tuple[Place, tuple[int, ...]]]
    dtype: torch.dtype

    def detach_from(self, storages: set[int]) -> None:
        """Copy what lies in ``storages`` (by address), which will be written while others still read."""
        self.sends = [(place, _detached(tensor, storages)) for place, tensor in self.sends]


@dataclass(slots=True)
class Gather:
    """All tensors along mesh ``axes``. Answer: a list in row-major order of these axes.

    Attributes:
        tensor: this device's; None on a device outside the mesh.
        shapes: shapes of all members' tensors, in the answer's order.
    """

    tensor: torch.Tensor | None
    axes: tuple[int, ...]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype

    def detach_from(self, storages: set[int]) -> None:
        self.tensor = None if self.tensor is None else _detached(self.tensor, storages)


@dataclass(slots=True)
class Reduce:
    """The sum (or other reduction) of tensors of one shape along mesh ``axes``. Answer: a tensor, perhaps shared.

    Attributes:
        tensor: this device's; None on a device outside the mesh.
        op: "sum", "avg", "max", "min", "product".
    """

    tensor: torch.Tensor | None
    axes: tuple[int, ...]
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def detach_from(self, storages: set[int]) -> None:
        self.tensor = None if self.tensor is None else _detached(self.tensor, storages)


Request = Exchange | Gather | Reduce

Received = tuple[dict[int, list[torch.Tensor]], bool]
"""Tensors by sending worker, and whether all of them are good."""


@dataclass(slots=True)
class Wire:
    """What the places of this worker have for those of other workers, and want from them: one exchange of the group.

    Attributes:
        sends: tensors by receiving worker.
        wanted: (shape, dtype) by sending worker.
        ok: what is sent is good.
    """

    sends: dict[int, list[torch.Tensor]]
    wanted: dict[int, list[tuple[tuple[int, ...], torch.dtype]]]
    ok: bool


Answers = Generator[Wire, Received, tuple[dict[Place, Any], bool]]
"""Yields what must go through the group; returns an answer a place, and whether all that came was good."""


def within(answers: Answers) -> dict[Place, Any]:
    """The answers of requests that concern no other worker."""
    try:
        next(answers)
    except StopIteration as stop:
        found: dict[Place, Any] = stop.value[0]
        return found
    raise AssertionError("one worker hosts all places here")


def merged(wires: Sequence[Wire]) -> Wire:
    """Several exchanges as one. Each keeps a status of its own: a flag behind its tensors in every message."""
    sends: dict[int, list[torch.Tensor]] = {}
    wanted: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
    for wire in wires:
        for worker, tensors in wire.sends.items():
            sends.setdefault(worker, []).extend([*tensors, torch.tensor([wire.ok], dtype=torch.uint8)])
        for worker, specs in wire.wanted.items():
            wanted.setdefault(worker, []).extend([*specs, ((1,), torch.uint8)])
    return Wire(sends, wanted, True)


def split(received: Received, wires: Sequence[Wire]) -> list[Received]:
    """What came in answer to ``merged(wires)``, for each of them."""
    rest = {worker: iter(tensors) for worker, tensors in received[0].items()}
    found: list[Received] = []
    for wire in wires:
        mine, good = {}, received[1]
        for worker, specs in wire.wanted.items():
            mine[worker] = [next(rest[worker]) for _ in specs]
            good = bool(next(rest[worker])[0]) and good
        found.append((mine, good))
    return found


def _detached(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor

_FOLD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}

CHUNKED_BYTES = 256 * 1024
"""Reductions of more bytes than this are cut among the members first (reduce-scatter, then all-gather)."""


def fold(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in order: t0 op t1 op t2 ..."""
    combine = _FOLD[op]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    if op == "avg":
        total = total / len(tensors) if total.dtype.is_floating_point or total.dtype.is_complex else total // len(tensors)
    return total


class Members:
    """Who shares a line of a mesh with whom."""

    def __init__(self, mesh: MeshInfo) -> None:
        self.mesh = mesh
        self.coords = coords(mesh.shape)
        self.places: list[Place] = [(mesh.kind, device) for device in mesh.devices]
        self.index = {place: i for i, place in enumerate(self.places)}

    def num_along(self, axes: tuple[int, ...]) -> int:
        """How many places share a line along ``axes``."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def along(self, place: Place, axes: tuple[int, ...]) -> list[Place]:
        """Places that differ from ``place`` in ``axes`` only, row-major, itself included."""
        mine = self.coords[self.index[place]]
        return [
            other
            for other, coord in zip(self.places, self.coords, strict=True)
            if all(a == b for axis, (a, b) in enumerate(zip(mine, coord, strict=True)) if axis not in axes)
        ]


class Comm:
    """Performs requests among the devices of one definition.

    Args:
        mine: places that this worker hosts.
        host_of: the worker of every place concerned.
        group: the workers concerned, None when this worker hosts all places.
        device_of: the torch device that stands for a place.
    """

    def __init__(
        self,
        mine: Sequence[Place],
        host_of: dict[Place, int],
        group: Group | None,
        me: int,
        device_of: Callable[[Place], torch.device],
    ) -> None:
        self._mine = list(mine)
        self._host_of = host_of
        self._group = group
        self._me = me
        self._device_of = device_of
        self._through_host = group is not None and not group.takes_cuda
        self.sent_bytes = 0  # by hosted devices to other devices, in this process or another

    @property
    def group(self) -> Group | None:
        return self._group

    def perform(self, members: Members, requests: dict[Place, Request], ok: bool) -> Answers:
        """Answer one round of requests, one a hosted place, all of one kind."""
        first = next(iter(requests.values()))
        if isinstance(first, Exchange):
            return self._exchange(requests, ok)  # type: ignore[arg-type]
        if isinstance(first, Gather):
            return self._gather(members, requests, ok)  # type: ignore[arg-type]
        return self._reduce(members, requests, ok)  # type: ignore[arg-type]

    def _exchange(self, requests: dict[Place, Exchange], ok: bool) -> Answers:
        boxes: dict[tuple[Place, Place], list[torch.Tensor]] = {}
        remote: list[tuple[Place, Place, int, torch.Tensor]] = []
        for src in self._mine:
            count: dict[Place, int] = {}
            for dst, tensor in requests[src].sends:
                self.sent_bytes += tensor.nbytes
                if self._host_of[dst] == self._me:
                    boxes.setdefault((src, dst), []).append(tensor)
                else:
                    k = count.get(dst, 0)
                    count[dst] = k + 1
                    remote.append((src, dst, k, tensor))
        good = True
        if self._group is not None:
            good = yield from self._remote(requests, remote, boxes, ok)
        taken: dict[tuple[Place, Place], int] = {}
        answers: dict[Place, list[torch.Tensor]] = {}
        for dst in self._mine:
            got = []
            for src, _ in requests[dst].receives:
                k = taken.get((src, dst), 0)
                taken[src, dst] = k + 1
                got.append(boxes[src, dst][k])
            answers[dst] = got
        return answers, good

    def _remote(
        self,
        requests: dict[Place, Exchange],
        remote: list[tuple[Place, Place, int, torch.Tensor]],
        boxes: dict[tuple[Place, Place], list[torch.Tensor]],
        ok: bool,
    ) -> Generator[Wire, Received, bool]:
        sends: dict[int, list[torch.Tensor]] = {}
        for _, dst, _, tensor in sorted(remote, key=lambda r: r[:3]):
            sends.setdefault(self._host_of[dst], []).append(tensor.cpu() if self._through_host else tensor)
        expected: dict[int, list[tuple[Place, Place, int, tuple[int, ...], torch.dtype]]] = {}
        for dst in self._mine:
            count: dict[Place, int] = {}
            for src, shape in requests[dst].receives:
                if self._host_of[src] != self._me:
                    k = count.get(src, 0)
                    count[src] = k + 1
                    entry = (src, dst, k, shape, requests[dst].dtype)
                    expected.setdefault(self._host_of[src], []).append(entry)
        for entries in expected.values():
            entries.sort(key=lambda e: e[:3])
        wanted = {worker: [(e[3], e[4]) for e in entries] for worker, entries in expected.items()}
        received, good = yield Wire(sends, wanted, ok)
        for worker, entries in expected.items():
            for (src, dst, _, _, _), tensor in zip(entries, received[worker], strict=True):
                boxes.setdefault((src, dst), []).append(tensor.to(self._device_of(dst)))
        return good

    def _gather(self, members: Members, requests: dict[Place, Gather], ok: bool) -> Answers:
        exchanges: dict[Place, Exchange] = {}
        for place in self._mine:
            request = requests[place]
            if place not in members.index or request.tensor is None:
                exchanges[place] = Exchange([], [], request.dtype)
                continue
            line = members.along(place, request.axes)
            exchanges[place] = Exchange(
                [(other, request.tensor) for other in line if other != place],
                [(other, shape) for other, shape in zip(line, request.shapes, strict=True) if other != place],
                request.dtype,
            )
        got, good = yield from self._exchange(exchanges, ok)
        answers: dict[Place, list[torch.Tensor]] = {}
        for place in self._mine:
            request = requests[place]
            if place not in members.index or request.tensor is None:
                answers[place] = []
                continue
            others = iter(got[place])
            line = members.along(place, request.axes)
            answers[place] = [request.tensor if other == place else next(others) for other in line]
        return answers, good

    def _reduce(self, members: Members, requests: dict[Place, Reduce], ok: bool) -> Answers:
        first = next(iter(requests.values()))
        num = members.num_along(first.axes)
        size_bytes = math.prod(first.shape) * first.dtype.itemsize
        if self._group is not None and num > 2 and size_bytes > CHUNKED_BYTES:
            return (yield from self._reduce_in_chunks(members, requests, num, ok))
        gathers: dict[Place, Request] = {
            place: Gather(r.tensor, r.axes, [r.shape] * num, r.dtype) for place, r in requests.items()
        }
        got, good = yield from self._gather(members, gathers, ok)  # type: ignore[arg-type]
        answers: dict[Place, torch.Tensor | None] = {}
        shared: dict[tuple[Place, ...], torch.Tensor] = {}
        for place in self._mine:
            if not got[place]:
                answers[place] = None
                continue
            line = tuple(members.along(place, first.axes))
            total = shared.get(line)
            if total is None:
                total = shared[line] = fold(got[place], first.op)
                answers[place] = total
            else:
                answers[place] = total.clone()
        return answers, good

    def _reduce_in_chunks(
        self, members: Members, requests: dict[Place, Reduce], num: int, ok: bool
    ) -> Answers:
        first = next(iter(requests.values()))
        count = math.prod(first.shape)
        chunk = -(-count // num)
        cuts = [(min(i * chunk, count), min((i + 1) * chunk, count)) for i in range(num)]
        lines = {p: members.along(p, first.axes) for p in self._mine if p in members.index}
        flat = {p: requests[p].tensor.contiguous().reshape(-1) for p in lines}  # type: ignore[union-attr]
        scatter: dict[Place, Exchange] = {}
        for place in self._mine:
            if place not in lines:
                scatter[place] = Exchange([], [], first.dtype)
                continue
            line = lines[place]
            start, stop = cuts[line.index(place)]
            scatter[place] = Exchange(
                [(other, flat[place][slice(*cut)]) for other, cut in zip(line, cuts, strict=True) if other != place],
                [(other, (stop - start,)) for other in line if other != place],
                first.dtype,
            )
        parts, good = yield from self._exchange(scatter, ok)
        gathers: dict[Place, Gather] = {}
        for place in self._mine:
            if place not in lines:
                gathers[place] = Gather(None, first.axes, [], first.dtype)
                continue
            line = lines[place]
            others = iter(parts[place])
            own = flat[place][slice(*cuts[line.index(place)])]
            total = fold([own if other == place else next(others) for other in line], first.op)
            gathers[place] = Gather(total, first.axes, [(stop - start,) for start, stop in cuts], first.dtype)
        got, also_good = yield from self._gather(members, gathers, ok and good)
        answers = {p: torch.cat(got[p]).reshape(first.shape) if p in lines else None for p in self._mine}
        return answers, good and also_good
