"""How long a loss takes: to be noticed, and until the session goes on with the bits that it would have had.

    python examples/benchmarks/recovery.py [--kills 30] [--devices 4]

In a session with a worker a device, a decode loop (a cache written in place, replicated state, random numbers) is disturbed
again and again: a worker is killed, every third time frozen (SIGSTOP). The bits are compared with an undisturbed run. Then
devices are moved, with 1 to 64 MB on them. All times are seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import time
import tracemalloc

import msgspec
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.runtime.lineage import Bounds, Lineage
from dtorch.transport.messages import Blob, Definition, Layout


def decode(mesh: DeviceMesh, steps: int, disturb_at: int, disturb: object) -> torch.Tensor:
    dtorch.manual_seed(0)
    source = torch.Generator().manual_seed(1)
    weights = dtorch.Tensor(torch.randn(64, 64, generator=source) * 0.1, device_mesh=mesh, placements=[Replicate()])
    x = dtorch.Tensor(torch.randn(16, 64, generator=source), device_mesh=mesh, placements=[Shard(0)])
    cache = dtorch.zeros(16, steps, 64, device_mesh=mesh, placements=[Shard(0)])
    for step in range(steps):
        if step == disturb_at and callable(disturb):
            dtorch.synchronize()
            disturb()
        x = torch.tanh(torch.matmul(x, weights) + cache.sum(1) * 0.01)
        cache[:, step].copy_(x)
        weights[0].add_(x.sum(0).redistribute([Replicate()]) * 0.001)
        x = x + dtorch.rand(16, 64, device_mesh=mesh, placements=[Shard(0)])
    return torch.cat([x.to_torch().flatten(), cache.to_torch().flatten(), weights.to_torch().flatten()])


def show(name: str, values: list[float]) -> None:
    ordered = sorted(values)
    print(f"{name:54} p50 {statistics.median(ordered):.3f}  max {ordered[-1]:.3f}  ({len(ordered)})")


def losses(num_kills: int, num_devices: int) -> None:
    session = dtorch.init(workers="per-device")
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    undisturbed = decode(mesh, 20, -1, None)
    noticed: dict[str, list[float]] = {"killed": [], "frozen": []}
    halted: dict[str, list[float]] = {"killed": [], "frozen": []}
    again = 0
    for number in range(num_kills):
        how, sig = ("frozen", signal.SIGSTOP) if number % 3 == 2 else ("killed", signal.SIGKILL)
        struck = [0.0]

        def strike(sig: int = sig, number: int = number, struck: list[float] = struck) -> None:
            worker = session.thread.worker_of("cpu", number % num_devices)
            struck[0] = time.monotonic()
            os.kill(session.thread.pids[worker], sig)

        began = len(session.elastic.losses)
        assert torch.equal(decode(mesh, 20, 10, strike), undisturbed), "other bits than undisturbed"
        loss = session.elastic.losses[-1]
        assert len(session.elastic.losses) == began + 1
        noticed[how].append(loss.noticed_at - struck[0])
        halted[how].append(loss.halted_s)
        again += loss.recomputed_ops
    for how in ("killed", "frozen"):
        if noticed[how]:
            show(f"a worker {how}: until it was noticed", noticed[how])
            show(f"a worker {how}: from then until all went on", halted[how])
    print(f"calls that ran again, a loss: {again / num_kills:.0f}; bits as undisturbed: yes")
    dtorch.shutdown()


def moves() -> None:
    session = dtorch.init(workers="per-device")
    mesh = DeviceMesh("cpu", [0, 1])
    for size in (1, 4, 16, 64):
        x = dtorch.ones(size * 2, 1024, 256, device_mesh=mesh, placements=[Shard(0)])
        dtorch.synchronize()
        taken = [session.migrate("cpu:1") for _ in range(3)]
        pause = statistics.median(move.pause_s for move in taken)
        print(f"move of a device with {size} MB: pause {pause:.3f}, {taken[0].moved_bytes} bytes")
        del x
    start = time.monotonic()
    dtorch.ones(3, device_mesh=DeviceMesh("cpu", [7])).to_torch()
    print(f"a new worker gives its first value after {time.monotonic() - start:.3f}")
    dtorch.shutdown()


def memory() -> None:
    """The lineage of a million calls whose bodies all differ, in which everything hangs together."""
    piece = Layout(1, (4,), "float32", (0,))
    lineage = Lineage(Bounds())
    lineage.define(
        (
            Definition(1, "dtorch.upload", "upload", [], {}, (), (piece,)),
            Definition(2, "torch.mul", "local", [], {}, (piece,), (piece,)),
        ),
        (),
    )
    lineage.add(1, msgspec.msgpack.encode(([[1, 0, 0]], [])), (Blob(b""),))
    bodies = [
        msgspec.msgpack.encode(([[2, 1 - k % 2, k % 2, float(i * 1000 + k)] for k in range(1000)], [])) for i in range(1000)
    ]
    tracemalloc.start()
    spent = 0.0
    for i, body in enumerate(bodies):
        began = time.perf_counter()
        lineage.add(i + 2, body)
        if lineage.is_full:
            lineage.prune(i + 1)
        spent += time.perf_counter() - began
        if i in (99, 499, 999):
            print(f"lineage after {i + 1} 000 calls: {tracemalloc.get_traced_memory()[0] / 1e6:.1f} MB of its own, "
                  f"{lineage.size_bytes / 1e6:.1f} MB of bodies")  # fmt: skip
    tracemalloc.stop()
    print(f"cost of remembering, a call: {spent:.3f} us with tracing of memory on")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--devices", type=int, default=4)
    chosen = parser.parse_args()
    logging.getLogger("dtorch").setLevel(logging.ERROR)
    losses(chosen.kills, chosen.devices)
    moves()
    memory()
