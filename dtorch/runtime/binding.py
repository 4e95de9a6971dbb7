"""From definitions to functions: what this worker runs of a signature, for the places that it hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dtorch.runtime import kernels
from dtorch.runtime.comm import Comm, Members, Place
from dtorch.runtime.cuts import as_seen, cutting
from dtorch.runtime.files import FileAccess
from dtorch.runtime.kernels import Site
from dtorch.runtime.kernels.into import handing_over, into
from dtorch.runtime.kernels.random import draw
from dtorch.runtime.kernels.threads import in_one_thread, is_small
from dtorch.runtime.layout import coords
from dtorch.runtime.moves import kept_whole
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Definition, MeshInfo

if TYPE_CHECKING:
    from dtorch.transport.groups import Group


FED = ("upload", "upload_shards", "read")
"""Kernels that make a tensor out of bytes that all hosted places share."""


@dataclass
class Bound:
    """A definition made ready for the hosted places.

    Attributes:
        functions: hosted place index -> what runs there; places outside the definition's meshes are absent.
        comm: present when it communicates.
        draws: the drawing part of a random op.
    """

    functions: dict[int, Callable[..., Any]]
    kernel: kernels.Kernel
    comm: Comm | None = None
    members: Members | None = None
    draws: Callable[..., tuple[torch.Tensor, ...]] | None = None
    communicates: bool = False

    @property
    def is_joint(self) -> bool:
        """Whether the hosted places run it together."""
        return self.communicates or self.draws is not None or self.kernel.name in FED


class Binder:
    """Meshes, definitions and process groups of one session on one worker.

    Args:
        worker: this worker's number.
        resolve: op name -> function, from the op table; raises KeyError.
        device_of: the torch device that stands for a place.
        make_group: process group of (workers, kind); also given the epoch once devices have moved.

    Attributes:
        epoch: how often the session's workers were regrouped.
        places: the places that this worker hosts.
        place_index: their positions in ``places``.
        files: which files the session may touch here.
    """

    def __init__(
        self,
        worker: int,
        resolve: Callable[[str], Callable[..., Any]],
        device_of: Callable[[Place], torch.device],
        make_group: Callable[..., Group],
    ) -> None:
        self.worker = worker
        self._resolve = resolve
        self._local_device = device_of
        self._locals: dict[Place, int] = {}  # a device's number on this worker, where it is not the session's
        self._make_group = make_group
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self.files = FileAccess()
        self.meshes: dict[int, MeshInfo] = {}
        self.definitions: dict[int, Definition] = {}
        self._bound: dict[int, Bound | None] = {}
        self._into: dict[tuple[int, int], dict[int, Callable[..., Any]]] = {}
        self.places: list[Place] = []
        self.place_index: dict[Place, int] = {}
        self._backing: dict[Place, torch.device] = {}  # what stands for a place that was moved
        self.epoch = 0

    def device_of(self, place: Place) -> torch.device:
        """The torch device that stands for a hosted place."""
        moved = self._backing.get(place)
        if moved is not None:
            return moved
        return self._local_device((place[0], self._locals.get(place, place[1])))

    def add_mesh(self, mesh: MeshInfo) -> int:
        """Learn of a mesh; the answer is how many places this worker hosts now."""
        self.meshes[mesh.mesh] = mesh
        for device, backing in zip(mesh.devices, mesh.backing, strict=False):
            if backing:
                kind, _, index = backing.partition(":")
                self._backing[mesh.kind, device] = self._local_device((kind, int(index)))
        numbers = mesh.locals or mesh.devices
        for device, host, number in zip(mesh.devices, mesh.workers, numbers, strict=True):
            place = (mesh.kind, device)
            if number != device or place in self._locals:
                self._locals[place] = number
            if host == self.worker and place not in self.place_index:
                self.place_index[place] = len(self.places)
                self.places.append(place)
        return len(self.places)

    def hosted(self, mesh: int) -> tuple[int, ...]:
        """Indices of the hosted places of a mesh. Raises ProtocolError for a mesh that nobody announced."""
        info = self.meshes.get(mesh)
        if info is None:
            raise ProtocolError(f"unknown mesh {mesh}")
        index = self.place_index
        return tuple(index[info.kind, d] for d in info.devices if (info.kind, d) in index)

    def forget(self, below: int) -> None:
        """Drop signatures below a number."""
        for table in (self.definitions, self._bound):
            for sig in [s for s in table if s < below]:
                del table[sig]
        for key in [k for k in self._into if k[0] < below]:
            del self._into[key]

    def bind(self, definition: Definition) -> Bound | None:
        """What this worker runs for a definition; None when it has no part in it."""
        sig = definition.sig
        if sig in self._bound:
            return self._bound[sig]
        bound = self._bound[sig] = self._make_bound(definition)
        return bound

    def _make_bound(self, definition: Definition) -> Bound | None:
        kernel = kernels.find(definition.kernel)
        fn: Callable[..., Any] = _no_function
        if not definition.op.startswith("dtorch."):
            try:
                fn = self._resolve(definition.op)
            except KeyError:
                raise ProtocolError(f"no op {definition.op!r} in the table") from None
            if any(layout.dtype.startswith("complex") for layout in (*definition.inputs, *definition.outputs)):
                fn = kernels.with_all_keys(fn)
            if "memory" in definition.params:
                fn = kernels.with_memory(fn, tuple(definition.params["memory"]))
            if "grads" in definition.params:
                fn = kernels.with_gradients(fn, frozenset(definition.params["grads"]))
            if is_small(definition):
                fn = in_one_thread(fn)
        numbers = {layout.mesh for layout in (*definition.inputs, *definition.outputs)}
        try:
            infos = {number: self.meshes[number] for number in numbers}
        except KeyError as missing:
            raise ProtocolError(f"unknown mesh {missing}") from None
        main = infos[(definition.outputs or definition.inputs)[0].mesh]
        hosts: dict[Place, int] = {}
        for info in infos.values():
            hosts.update({(info.kind, d): w for d, w in zip(info.devices, info.workers, strict=True)})
        mine = [place for place in hosts if hosts[place] == self.worker]
        functions: dict[int, Callable[..., Any]] = {}
        alone = kernel.alone(definition, infos) if kernel.alone is not None else None
        main_coords = dict(zip([(main.kind, d) for d in main.devices], coords(tuple(main.shape)), strict=True))
        seen = as_seen(definition)
        for place in mine:
            site = Site(seen, fn, infos, main, main_coords.get(place), place, self.device_of(place), self.files)
            made = (alone or kernel.build)(site)
            functions[self.place_index[place]] = made if seen is definition else cutting(made, definition, site)
        bound = Bound(functions, kernel, communicates=kernel.communicates and alone is None)
        if kernel.name == "random":
            bound.draws = draw(definition, fn, self.device_of(mine[0] if mine else (main.kind, 0)), infos)
        elif not mine:
            return None
        if bound.communicates:
            workers = tuple(sorted(set(hosts.values())))
            group = None
            if len(workers) > 1:
                many_hosts = any(info.locals for info in infos.values())
                devices = {(host if many_hosts else 0, self.device_of(place)) for place, host in hosts.items()}
                own_gpus = len(devices) == len(hosts) == len(workers) and {d.type for _, d in devices} == {"cuda"}
                group = self.group(workers, "nccl" if own_gpus and len(infos) == 1 else "gloo")
            bound.comm = Comm(mine, hosts, group, self.worker, self.device_of)
            source = infos[(definition.inputs or definition.outputs)[0].mesh]
            bound.members = Members(source)
        return bound

    def bind_into(self, definition: Definition, position: int) -> dict[int, Callable[..., Any]]:
        """Functions of an elementwise definition that write into input ``position`` where all inputs are contiguous; of a
        redistribution without communication, functions that hand over a piece that stays what it is."""
        key = (definition.sig, position)
        found = self._into.get(key)
        if found is None:
            bound = self.bind(definition)
            assert bound is not None
            places = {index: self.device_of(self.places[index]) for index in bound.functions}
            if definition.kernel == "redistribute":
                whole = {self.place_index[place] for place in kept_whole(definition, self.meshes) if place in self.place_index}
                found = {index: handing_over(fn) if index in whole else fn for index, fn in bound.functions.items()}
            else:
                found = {index: into(definition, position, fn, places[index]) for index, fn in bound.functions.items()}
            self._into[key] = found
        return found

    def group(self, workers: tuple[int, ...], kind: str) -> Group:
        """The group of some workers in this epoch. The first time it blocks until all of them make it.

        Raises:
            ConnectionLostError: one of them is gone.
        """
        group = self._groups.get((workers, kind))
        if group is None:
            make = self._make_group
            group = make(workers, kind, self.epoch) if self.epoch else make(workers, kind)
            self._groups[workers, kind] = group
        return group

    def abort(self) -> None:
        """Let no exchange wait any longer: all fail with ConnectionLostError. Any thread may call this."""
        for group in list(self._groups.values()):
            group.abort()

    def regroup(self, epoch: int, hosts: dict[Place, int]) -> None:
        """Devices are on other workers from now on: drop what was made for the old ones. Meshes were announced anew."""
        self.epoch = epoch
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._bound.clear()
        self._into.clear()
        for place, host in hosts.items():
            if host != self.worker and place in self.place_index:
                del self.place_index[place]


def _no_function(*_: Any, **__: Any) -> Any:
    raise ProtocolError("this definition names no function of torch")
