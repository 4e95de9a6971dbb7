"""A session without workers: calls are recorded and none is run. What would be sent, and when tensors die, is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dtorch.known import SMALL_BYTES, known_value
from dtorch.mesh import DeviceMesh
from dtorch.runtime.outgoing import Outgoing
from dtorch.runtime.promise import Promise
from dtorch.runtime.recorder import Recorder
from dtorch.session import Session
from dtorch.spec import Spec
from dtorch.tensor import Tensor
from dtorch.transport.bulk import SegmentPool
from dtorch.transport.errors import DTorchError, SessionClosedError
from dtorch.transport.messages import Definition, MeshInfo
from dtorch.wiring import Options

_new = object.__new__


class NoValuesError(DTorchError, RuntimeError):
    """A value was read while calls are recorded only, so there is none."""


class _Nowhere:
    """Stands for the controller."""

    bytes_sent = 0
    spans = None
    ear = None

    def __init__(self) -> None:
        self.batches: list[Outgoing] = []

    def submit(self, batch: Outgoing) -> None:
        self.batches.append(batch)

    def post(self, event: Any) -> None:
        """Nobody is there to be told."""

    def request_flush(self, delay_s: float) -> None:
        """Batches are sent when they are full: nobody waits for them."""

    def wait_for_room(self) -> None:
        """There always is room."""

    def is_own_thread(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing was opened."""


class _Deaths(list[int]):
    """A mesh's list of dead slots, which also says when each died."""

    def __init__(self, recorder: DryRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def append(self, slot: int) -> None:
        super().append(slot)
        self._recorder.deaths.append((self._recorder.position, slot))

    def extend(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.append(slot)


class DryRecorder(Recorder):
    """A recorder that remembers all calls.

    Attributes:
        deaths: (number of calls recorded before, slot) for every tensor that died.
        meshes: number -> mesh.
    """

    def __init__(self, outlet: _Nowhere) -> None:
        super().__init__(outlet)
        self.deaths: list[tuple[int, int]] = []
        self.meshes: dict[int, MeshInfo] = {}

    @property
    def position(self) -> int:
        """How many calls were recorded so far."""
        return self.num_ops + len(self._buffer) // 3

    @property
    def is_capturing(self) -> bool:
        """Compiled functions are shown call by call, as if they were part of a larger one."""
        return True

    def add_mesh(self, mesh: MeshInfo) -> list[int]:
        super().add_mesh(mesh)
        self.meshes[mesh.mesh] = mesh
        dead = self._dead[mesh.mesh] = _Deaths(self)
        return dead

    def lines(self) -> Iterator[tuple[tuple[Any, ...], Any, int]]:
        """(call, code object, instruction offset) of every call, in order."""
        for seq in sorted(self._sources):
            chunk = self._sources[seq]
            yield from zip(chunk[::3], chunk[1::3], chunk[2::3], strict=True)


class DrySession(Session):
    """Records as any session does; values do not exist."""

    recorder: DryRecorder

    def __init__(self) -> None:
        self.nowhere = _Nowhere()
        super().__init__(Options())
        self.recorder = DryRecorder(self.nowhere)

    def _start(self, options: Options, number: int) -> Any:
        return SegmentPool(), self.nowhere, number

    def _check_devices(self, mesh: DeviceMesh) -> None:
        """Any device may be planned for."""

    def mesh_info(self, mesh: DeviceMesh) -> MeshInfo:
        return MeshInfo(self.mesh_number(mesh)[0], mesh.device_type, tuple(mesh.shape), tuple(mesh.devices))

    def placed(self, spec: Spec) -> Tensor:
        """A tensor that is simply there."""
        made = _new(Tensor)
        made._spec = spec
        made._slot = self.recorder.slot()
        return made

    def _upload(self, spec: Spec, parts: Sequence[torch.Tensor], kernel: str) -> Tensor:
        is_small = sum(part.nbytes for part in parts) <= SMALL_BYTES
        return super()._upload(spec, parts, kernel) if is_small and not parts[0].is_meta else self.placed(spec)

    def fetch(self, tensor: Tensor, now: bool = True) -> Any:
        _, definitions, meshes = self.recorded()
        with torch._C.DisableTorchFunction():  # factories in there are plain torch's
            value = known_value(tensor._spec, tensor._slot, self.nowhere.batches, definitions, meshes)
        if value is not None:
            found: Promise[torch.Tensor] = Promise()
            found.set_result(value)
            return found
        raise NoValuesError(
            f"the value of a tensor ({tensor._spec}) is read here, and nothing is run while a plan is explained"
        )

    def fetch_shards(self, tensor: Tensor) -> Any:
        raise NoValuesError("pieces of a tensor are read here, and nothing is run while a plan is explained")

    def synchronize(self) -> Any:
        raise NoValuesError("nothing is run while a plan is explained, so there is nothing to wait for")

    def ask_statistics(self, memory: bool = False, reset_peak: bool = False) -> Any:
        raise NoValuesError("there are no workers to ask while a plan is explained")

    def recorded(self) -> tuple[list[tuple[tuple[Any, ...], Any, int]], dict[int, Definition], dict[int, MeshInfo]]:
        """(calls with their lines, signature -> definition, number -> mesh), of all that was recorded."""
        self.recorder.flush()
        batches = self.nowhere.batches
        definitions = {d.sig: d for batch in batches for d in batch.definitions}
        return list(self.recorder.lines()), definitions, self.recorder.meshes

    def close(self) -> None:
        from dtorch.ops import table

        self.recorder.close(SessionClosedError("this tensor was made while a plan was explained, and has no value"))
        self._pool.close()
        table.clear_caches()
