"""Functions on the running session: seeds, waiting, statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtorch.blocking import check_loop
from dtorch.mesh import DeviceMesh
from dtorch.runtime.promise import Promise
from dtorch.session import Session, current_session
from dtorch.transport.messages import DeviceMemory
from dtorch.transport.messages import Statistics as WorkerStatistics


def manual_seed(seed: int) -> None:
    """Seed all generators, in program order. Numbers drawn afterwards are those of plain torch after
    ``torch.manual_seed(seed)``, whatever the placement and the number of workers.

    A seed belongs to the running asyncio task: that task, and those it starts that do not seed themselves, draw the same
    numbers whatever other tasks draw meanwhile. Outside of tasks (in scripts, a notebook's cells, plain threads) it is for
    everybody who draws without a seed of a task's. A ``dtorch.session`` has generators of its own.

    Args:
        seed: as torch takes it: an int of at most 64 bits; negative ones count from 2**64.

    Raises:
        RuntimeError: it has more than 64 bits.
        CaptureError: inside a function that is being compiled: seed before the call.
    """
    seed = int(seed)
    if not -(2**63) <= seed < 2**64:
        raise RuntimeError(f"Overflow when unpacking long long: the seed {seed} has more than 64 bits")
    current_session().seed(seed)


def synchronize() -> None:
    """Wait until all issued work is done.

    Raises:
        OpError: an op failed and nobody has seen its error yet.
        WorkerLostError: a worker is gone.
    """
    done = current_session().synchronize()
    check_loop()
    done.result()


async def synchronize_async() -> None:
    """As ``synchronize``, without blocking the event loop."""
    await current_session().synchronize()


@dataclass(frozen=True)
class MemoryStats:
    """Memory of one device, in bytes.

    Attributes:
        device: such as "cpu:0".
        allocated: held by tensors now; storages that several tensors view count once.
        peak: the most held since the last reset. CPU devices are watched from the first call of ``memory_stats`` on.
        reserved: taken from the system; on CPU devices the same as ``allocated``.
    """

    device: str
    allocated: int
    peak: int
    reserved: int


def memory_stats(device_mesh: DeviceMesh | None = None, *, reset_peak: bool = False) -> list[MemoryStats]:
    """Memory of each device in bytes: allocated, peak, reserved.

    Args:
        device_mesh: its devices, in row-major order; all devices in use when left out.
        reset_peak: let ``peak`` start from what is allocated now.

    Raises:
        TypeError: it is no mesh.
        MeshError: it names devices that do not exist here.
    """
    return _memory(device_mesh, _asked(device_mesh, reset_peak).result())


async def memory_stats_async(device_mesh: DeviceMesh | None = None, *, reset_peak: bool = False) -> list[MemoryStats]:
    """As ``memory_stats`` (``device_mesh``, ``reset_peak``), without blocking the event loop."""
    return _memory(device_mesh, await _asked(device_mesh, reset_peak))


def _asked(device_mesh: DeviceMesh | None, reset_peak: bool) -> Promise[tuple[WorkerStatistics, ...]]:
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"memory_stats: expected a DeviceMesh, got {type(device_mesh).__name__}")
    session = current_session()
    if device_mesh is not None:
        session.mesh_number(device_mesh)
    return session.ask_statistics(memory=True, reset_peak=reset_peak)


def _memory(device_mesh: DeviceMesh | None, answers: tuple[WorkerStatistics, ...]) -> list[MemoryStats]:
    found = {(m.kind, m.device): m for answer in answers for m in answer.memory}
    places = sorted(found)
    if device_mesh is not None:
        places = [(device_mesh.device_type, device) for device in device_mesh.devices]
    entries = [found.get(place) or DeviceMemory(*place, 0, 0, 0) for place in places]  # one that no worker has met is empty
    return [MemoryStats(f"{m.kind}:{m.device}", m.allocated, m.peak, m.reserved) for m in entries]


@dataclass(frozen=True)
class Statistics:
    """What the session has done, a frozen record.

    Attributes:
        ops: calls recorded and sent.
        batches: batches sent.
        signatures: different calls known (op, static arguments, input specs).
        signature_misses: calls that had to be inferred; ops - signature_misses found their signature.
        recordings: of compiled functions, one for each kind of input.
        slots: slots that hold tensors.
        batches_in_flight: sent, not yet executed by all workers.
        bytes_by_plane: "control": bytes of batches recorded; "sent": bytes of frames sent to workers.
        lost_workers: workers that ended unasked, and whose loss the session got over.
        recomputed_ops: calls that ran a second time for that.
        moved_bytes: pieces of tensors that went from one worker to another because of a loss or a move.
        straight_calls: calls of modules of distributed models whose ops were recorded at once, from an earlier call.
        workers: number -> counters: calls, batches, plan_hits, plan_misses, failures, exchanges,
            bytes_read and bytes_written (of pieces of tensors, from and into files).
    """

    ops: int
    batches: int
    signatures: int
    signature_misses: int
    recordings: int
    slots: int
    batches_in_flight: int
    bytes_by_plane: dict[str, int]
    workers: dict[int, dict[str, int]]
    lost_workers: int = 0
    recomputed_ops: int = 0
    moved_bytes: int = 0
    straight_calls: int = 0

    @property
    def bytes_per_op(self) -> float:
        """Mean bytes of a call on the wire."""
        return self.bytes_by_plane["control"] / self.ops if self.ops else math.nan


def statistics() -> Statistics:
    """Counters of the session; waits for the workers' own counters, after all work recorded so far."""
    session = current_session()
    return _counted(session, session.ask_statistics().result())


async def statistics_async() -> Statistics:
    """As ``statistics``, without blocking the event loop."""
    session = current_session()
    return _counted(session, await session.ask_statistics())


def _counted(session: Session, answers: tuple[WorkerStatistics, ...]) -> Statistics:
    recorder = session.recorder
    return Statistics(
        ops=recorder.num_ops,
        batches=recorder.num_batches,
        signatures=session.num_signatures,
        signature_misses=session.num_misses,
        recordings=session.num_programs,
        slots=recorder.num_slots,
        batches_in_flight=recorder.num_in_flight,
        bytes_by_plane={"control": recorder.num_bytes, "sent": session.thread.bytes_sent},
        workers={answer.worker: answer.counters for answer in answers},
        lost_workers=session.elastic.lost_workers,
        recomputed_ops=session.elastic.recomputed_ops,
        moved_bytes=session.elastic.copied_bytes,
        straight_calls=session.num_played,
    )
