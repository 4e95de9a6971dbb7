"""What a cluster costs its head: python examples/benchmarks/cluster.py [--json FILE] [--only NAME]

* scale: 10, 100 and 1000 workers, 1, 10 and 100 sessions, each on all of them. Codec, controllers, placing and meter are the
  real ones; workers are simulated: they answer at once and execute nothing. One process, no sockets.
* fair: two tenants who always want the device, with ops of unlike length, on real threads.
* call: one op and its value through a head and a worker in processes of their own, beside a call of a Ray actor.
* restart: a torchrun job of two ranks, from ``kill -9`` of one until all have met again. How long a session takes to
  recover is measured by ``recovery.py``.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from own_head import own_head
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import HERE, Samples

import dtorch
from dtorch.cluster.head import MAX_BATCH_BYTES, MAX_CALLS, Options
from dtorch.cluster.meter import Meter
from dtorch.cluster.pool import Pool
from dtorch.cluster.submitted import Batch
from dtorch.runtime.controller import Controller, Defined, Finished, Joined, Received, Send, Start, Submitted
from dtorch.runtime.lineage import Bounds
from dtorch.runtime.turns import Turns
from dtorch.transport import codec
from dtorch.transport.cluster import DeviceLoad, Load, Use
from dtorch.transport.messages import Definition, Done, Layout, MeshInfo

SECTIONS = ("scale", "fair", "call", "restart")
CALLS = 64
TRACED = 10_000
"""Workers times sessions up to which memory is measured, which takes long."""


# ---- many workers, many sessions


class Client:
    """A session as the head has it: one mesh on all workers, batches of ``CALLS`` calls of one signature."""

    def __init__(self, number: int, num_workers: int) -> None:
        devices = tuple(range(num_workers))
        bounds = Bounds(MAX_CALLS, MAX_BATCH_BYTES, Options().remember_bytes)
        self.controller = Controller(number, frozenset(), lambda _, device: (device + 1, ("cpu", 0)), bounds)
        self.number, self.seq = number, 0
        layout = Layout(1, (num_workers, 4), "float32", (0,))
        add = Definition(1, "torch.add", "local", [["t", 0], ["t", 1]], {}, (layout, layout), (layout,))
        made = self.controller.handle(Defined((MeshInfo(1, "cpu", (num_workers,), devices),), (add,), ()))
        for start in made:
            if isinstance(start, Start):
                self.controller.handle(Joined(start.worker))
        self.body = msgspec.msgpack.encode(([[1, slot + 2, 0, 1] for slot in range(CALLS)], []))

    def batch(self) -> int:
        """Send a batch and take in that everybody has executed it; the answer is the number of frames."""
        self.seq += 1
        out = self.controller.handle(Submitted(Batch(self.seq, self.body, (1,), (), (), ())))
        sends = [each for each in out if isinstance(each, Send)]
        finished = False
        for send in sends:
            done = codec.decode_from_pool_worker(codec.encode(Done(self.number, self.seq, 1000, (), 4096)))
            assert isinstance(done, Done)
            finished = any(isinstance(each, Finished) for each in self.controller.handle(Received(send.worker, done)))
        assert finished
        return len(sends)


def scale(_: argparse.Namespace) -> list[Row]:
    rows = []
    for num_workers in (10, 100, 1000):
        rows.append(_place(num_workers))
        for num_sessions in (1, 10, 100):
            rows += _scale(num_workers, num_sessions)
    return rows


def _place(num_workers: int) -> Row:
    pool, found = Pool(), Samples()
    for _ in range(num_workers):
        pool.enlist((("cpu", 0),))
    for session in range(3):
        began = time.perf_counter()
        pool.reserve(session, "cpu", range(num_workers))
        found.values.append((time.perf_counter() - began) * 1e3)
    return Row(f"{num_workers} workers: placing a mesh on all of them, once", "ms", found.median, samples={"dtorch": found})


def _scale(num_workers: int, num_sessions: int) -> list[Row]:
    gc.collect()
    is_traced = num_workers * num_sessions <= TRACED
    if is_traced:
        tracemalloc.start()
    meter = Meter()
    for worker in range(1, num_workers + 1):
        meter.joined(worker)
    clients = [Client(number, num_workers) for number in range(1, num_sessions + 1)]
    for client in clients:
        meter.opened(client.number, f"tenant {client.number % 10}", "")
        client.batch()
    held = tracemalloc.get_traced_memory()[0] if is_traced else 0
    tracemalloc.stop()
    batches, beats = Samples(), Samples()
    rounds = max(2, 10_000 // (num_workers * num_sessions))
    for _ in range(rounds):
        began = time.perf_counter()
        for client in clients:
            client.batch()
        batches.values.append((time.perf_counter() - began) / num_sessions * 1e6)
    uses = tuple(Use(client.number, 1000, 0, 4096, {"torch.add": CALLS}) for client in clients)
    for _ in range(max(3, 200 // num_sessions)):
        frame = codec.encode(Load(time.perf_counter_ns(), 1, 1, (DeviceLoad("cpu", 0, 1, 1),), uses))
        began = time.perf_counter()
        for worker in range(1, 11):
            said = codec.decode_from_pool_worker(frame)
            assert isinstance(said, Load)
            meter.loaded(worker, said)
        beats.values.append((time.perf_counter() - began) / 10 * 1e6)
    name = f"{num_workers} workers, {num_sessions} sessions"
    note = f"{batches.median / num_workers:.1f} us a worker"
    memory = [Row(f"{name}: memory", "MB", held / 1e6)] if is_traced else []
    return [
        Row(f"{name}: a batch", "us", batches.median, note, samples={"dtorch": batches}),
        Row(f"{name}: a worker's report", "us", beats.median, samples={"dtorch": beats}),
        *memory,
    ]


# ---- two who always want the device


def fair(_: argparse.Namespace) -> list[Row]:
    turns, stop = Turns(), threading.Event()
    sizes = {1: 400, 2: 60}

    def work(session: int, size: int) -> None:
        x = torch.ones(size, size)
        turns.take(session)
        while not stop.is_set():
            x @ x
            turns.step(session)
        turns.give(session)

    for session in sizes:
        turns.add(session, f"tenant {session}", 1.0, 0)
    threads = [threading.Thread(target=work, args=item) for item in sizes.items()]
    for thread in threads:
        thread.start()
    time.sleep(5.0)
    got = [turns.spent_ns(session) for session in sizes]
    stop.set()
    for thread in threads:
        thread.join()
    index = sum(got) ** 2 / (len(got) * sum(each**2 for each in got))
    note = f"ops of 400 x 400 x 400 and 60 x 60 x 60; one got {got[0] / got[1]:.3f} of the other's time, in 5 s"
    return [Row("two busy tenants: Jain's index", "1 is best", index, note)]


# ---- one call


def _times(call: Callable[[], Any], num: int = 300) -> Samples:
    for _ in range(50):
        call()
    found = Samples()
    for _ in range(num):
        began = time.perf_counter()
        call()
        found.values.append((time.perf_counter() - began) * 1e6)
    return found


def call(_: argparse.Namespace) -> list[Row]:
    ours = _through_a_head()
    rows = [Row("one op and its value, through a head", "us", ours.median, f"p95 {ours.quantile(0.95):.0f}",
                samples={"dtorch": ours})]  # fmt: skip
    try:
        import ray
    except ImportError:
        return rows
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    class Adder:
        def __init__(self) -> None:
            self.x = torch.ones(4, 4)

        def add(self) -> float:
            return float((self.x + 1).sum())

    actor = ray.remote(Adder).remote()
    theirs = _times(lambda: ray.get(actor.add.remote()))
    ray.shutdown()
    rows.append(Row("the same in a method of a Ray actor", "us", None, f"p95 {theirs.quantile(0.95):.0f}",
                    {"ray": theirs.median}, {"ray": theirs}))  # fmt: skip
    return rows


def _through_a_head() -> Samples:
    with own_head() as home:
        home.worker()
        dtorch.connect(home.url, home.key)
        x = dtorch.Tensor(torch.ones(4, 4), device_mesh=dtorch.DeviceMesh("cpu", [0]))
        found = _times(lambda: (x + 1).sum().item())
        dtorch.shutdown()
    return found


# ---- torchrun


def restart(args: argparse.Namespace) -> list[Row]:
    found = Samples()
    for _ in range(args.restarts):
        with tempfile.NamedTemporaryFile() as file:
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
                 str(HERE / "peer_restart.py"), file.name],
                check=True, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            killed, *met = (float(line) for line in Path(file.name).read_text().split())
            found.values.append(max(met) - killed)
    if not found.values:
        return []
    note = f"{len(found.values)} kills, longest {max(found.values):.2f}; what the job had computed is gone"
    return [Row("a killed rank until all ranks have met again", "s", None, note, {"torchrun": found.median},
                {"torchrun": found})]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="may be repeated")
    parser.add_argument("--restarts", type=int, default=5, help="jobs of torchrun")
    add_json_option(parser)
    args = parser.parse_args()
    out = table_output(args.json)
    facts = print_machine(out)
    sections = {"scale": scale, "fair": fair, "call": call, "restart": restart}
    rows = [row for name in args.only or SECTIONS for row in sections[name](args)]
    outcome = {name: "measured" for name in ("ray", "torchrun") if any(name in row.others for row in rows)}
    print_table(rows, outcome, out)
    write_json(args.json, facts, rows, outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
