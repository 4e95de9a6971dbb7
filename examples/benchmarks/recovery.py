"""How long a loss takes: to be noticed, and until the session goes on with the bits that it would have had.

    python examples/benchmarks/recovery.py [--kills 30] [--devices 4] [--only NAME]
    python examples/benchmarks/recovery.py --load SECONDS

* losses: in a session with a worker a device, a decode loop (a cache written in place, replicated state, random numbers) is
  disturbed again and again: a worker is killed, every third time frozen (SIGSTOP). The bits are compared with an undisturbed
  run.
* pool: idle workers of a head are killed and frozen in turn; how long until the head has given them up.
* moves: devices are moved, with 1 to 64 MB on them.
* memory: of the lineage.

All times are seconds. ``--load`` does something else: a session with workers of its own and one of a head compute without a
pause, beside twice as many busy processes as there are processors, and now and then a call keeps the interpreter's lock of
its worker for 4 s. How many workers are given up meanwhile? None should be.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import torch
from own_head import own_head

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.cluster.remote import Target
from dtorch.runtime.lineage import Bounds, Lineage
from dtorch.session import Session, using
from dtorch.transport.messages import Blob, Definition, Layout
from dtorch.wiring import Options


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


def pool(num_kills: int) -> None:
    noticed: dict[str, list[float]] = {"killed": [], "frozen": []}
    with own_head() as home:
        for number in range(num_kills):
            how, sig = ("frozen", signal.SIGSTOP) if number % 2 else ("killed", signal.SIGKILL)
            worker = home.worker("--name", f"victim-{number}")
            time.sleep(1.0)  # it has settled
            struck = time.time()
            worker.send_signal(sig)
            left = home.wait_left(f"victim-{number}")
            noticed[how].append(left["at"] - struck)
            worker.kill()
    for how, values in noticed.items():
        if values:
            show(f"in a head's pool, a worker {how}: until it was noticed", values)


def load(seconds: float, num_devices: int) -> None:
    """Nobody is killed or frozen, and everybody is busy."""
    loads: list[float] = []
    with own_head() as home, contextlib.ExitStack() as stack:
        for _ in range(num_devices):
            home.worker("--allow", "hold_lock")
        sessions = [Session(Options(workers="per-device")), Session(Options(target=Target(home.url, home.key)))]
        stop, rounds = threading.Event(), [0, 0]
        for place, session in enumerate(sessions):
            _work(session, num_devices, lambda: True)  # what is met first takes long
            thread = threading.Thread(target=_keep_busy, args=(session, num_devices, stop, rounds, place))
            thread.start()
            stack.callback(session.close)
            stack.callback(thread.join)
        stack.callback(stop.set)
        for _ in range(2 * (os.cpu_count() or 1)):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(5.0, max(0.0, until - time.monotonic())))
            loads.append(os.getloadavg()[0])
        own = sessions[0].elastic.losses
        left, ended = home.events("worker left"), home.events("session ended")
    print(f"{seconds:g} s at a load of {min(loads):.0f} to {max(loads):.0f}, {num_devices} workers each: "
          f"{len(own)} of a session's own workers given up, {len(left)} of a head's pool, {len(ended)} sessions of the head; "
          f"{rounds[0]} and {rounds[1]} rounds of work")  # fmt: skip
    for text in (*(str(loss) for loss in own), *(event["reason"] for event in (*left, *ended))):
        print(f"    {text}")


def _keep_busy(session: Session, num_devices: int, stop: threading.Event, rounds: list[int], place: int) -> None:
    began = time.monotonic()

    def holds() -> bool:
        nonlocal began
        now = time.monotonic()
        if now - began < 15.0:
            return False
        began = now
        return True

    while not stop.is_set() and session.recorder.closed is None:
        _work(session, num_devices, holds)
        rounds[place] += 1


def _work(session: Session, num_devices: int, holds: Callable[[], bool]) -> None:
    hold = dtorch.register_op("hold_lock:hold", rule="pointwise")
    with using(session):
        mesh = DeviceMesh("cpu", list(range(num_devices)))
        weight = dtorch.Tensor(torch.eye(256), device_mesh=mesh, placements=[Replicate()])
        x = dtorch.ones(256 * num_devices, 256, device_mesh=mesh, placements=[Shard(0)])
        for _ in range(20):
            x = torch.tanh(x @ weight)
        if holds():
            x = hold(x)
        x.sum(0).redistribute([Replicate()]).to_torch()


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
    parser.add_argument("--only", choices=("losses", "pool", "moves", "memory"), action="append", help="may be repeated")
    parser.add_argument("--load", type=float, default=0.0, metavar="SECONDS", help="look for false alarms, and nothing else")
    chosen = parser.parse_args()
    logging.getLogger("dtorch").setLevel(logging.ERROR)
    parts = {
        "losses": lambda: losses(chosen.kills, chosen.devices), "pool": lambda: pool(chosen.kills), "moves": moves,
        "memory": memory,
    }
    if chosen.load:
        load(chosen.load, chosen.devices)
    else:
        for part in chosen.only or parts:
            parts[part]()
