"""What each rule on plans gains: python examples/benchmarks/rules.py [--json FILE]

Each workload runs with all rules and with all but one, in turn. "ratio" is time with the rule against time without it; where
memory is what a rule saves, the peaks of the device are compared too. Workloads are made to show one rule; a rule costs or
gains nothing elsewhere, since it is applied once, when a worker makes a plan.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

RULES = ("move_once", "drop_dead", "overlap", "free_early", "reuse_memory")
MIB = 2**20

Work = Callable[[], Any]


def chain(num_devices: int) -> Work:
    """Elementwise ops on 16 MiB, each result used once."""
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    x = dtorch.Tensor(torch.rand(2048, 2048), device_mesh=mesh, placements=[Replicate()])

    def step(x: Any) -> Any:
        for _ in range(8):
            x = (x * 0.5 + 1.0).tanh()
        return x

    compiled = dtorch.compile(step)
    return lambda: compiled(x)


def unread(num_devices: int) -> Work:
    """Half of the results are not used, as the hidden states and masks of a model that returns only some."""
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    x = dtorch.Tensor(torch.rand(256, 256), device_mesh=mesh, placements=[Replicate()])

    def step(x: Any) -> Any:
        for _ in range(20):
            x.exp().softmax(-1)
            x = x.sin()
        return x

    compiled = dtorch.compile(step)
    return lambda: compiled(x)


def moved_again(num_devices: int) -> Work:
    """Four readers of the same activations, as the layers after a norm whose weights are whole, each gather them: 4 MiB."""
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    x = dtorch.Tensor(torch.rand(1024, 1024), device_mesh=mesh, placements=[Shard(0)])

    def step(x: Any) -> Any:
        for _ in range(2):
            y = x * 1.0
            x = x + sum(y.redistribute(placements=[Replicate()])[i].sum() for i in range(4)) * 0.0
        return x

    compiled = dtorch.compile(step)
    return lambda: compiled(x)


def many_small(num_devices: int) -> Work:
    """32 small tensors are reduced, as gradients of norms and biases are."""
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    xs = [dtorch.Tensor(torch.rand(64, 32), device_mesh=mesh, placements=[Shard(0)]) for _ in range(32)]

    def step(xs: list[Any]) -> Any:
        pending = [x.sum(0) for x in xs]
        return [p.redistribute(placements=[Replicate()]) for p in pending]

    compiled = dtorch.compile(step)
    return lambda: compiled(xs)


def beside_work(num_devices: int) -> Work:
    """4 MiB are gathered while a product that does not need them is computed."""
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    x = dtorch.Tensor(torch.rand(1024, 1024), device_mesh=mesh, placements=[Shard(0)])
    w = dtorch.Tensor(torch.rand(512, 512), device_mesh=mesh, placements=[Replicate()])

    def step(x: Any, w: Any) -> Any:
        for _ in range(4):
            whole = x.redistribute(placements=[Replicate()])
            w = (w @ w) * 1e-3
            x = x + whole.sum() * 0.0
        return x, w

    compiled = dtorch.compile(step)
    return lambda: compiled(x, w)


WORKLOADS: list[tuple[str, Callable[[int], Work], str, int]] = [
    # rule, workload, workers, devices
    ("free_early", chain, "shared", 1),
    ("reuse_memory", chain, "shared", 1),
    ("drop_dead", unread, "shared", 1),
    ("move_once", moved_again, "shared", 2),
    ("move_once", moved_again, "per-device", 2),
    ("overlap", many_small, "per-device", 2),
    ("overlap", beside_work, "per-device", 2),
]


def sent_bytes() -> int:
    """Between workers, so far."""
    return sum(counters["exchanged_bytes"] for counters in dtorch.statistics().workers.values())


def measure(
    make: Callable[[int], Work], workers: str, num_devices: int, rules: str, num: int
) -> tuple[list[float], tuple[int, int]]:
    """Milliseconds a step; the peak bytes of the first device, and bytes that go between workers in a step."""
    os.environ["DTORCH_REWRITE"] = rules
    dtorch.init(workers=workers)
    work = make(num_devices)
    for _ in range(3):
        work()
    dtorch.synchronize()
    times = []
    before = sent_bytes()
    for _ in range(num):
        start = time.perf_counter()
        kept = work()
        dtorch.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        del kept
    sent = (sent_bytes() - before) // num
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    dtorch.memory_stats(mesh, reset_peak=True)
    kept = work()
    dtorch.synchronize()
    peak = dtorch.memory_stats(mesh)[0].peak
    del kept
    return times, (peak, sent)


def main() -> None:
    parser = argparse.ArgumentParser(description="What each rule on plans gains.")
    add_json_option(parser)
    parser.add_argument("--rounds", type=int, default=3, help="sessions with and without the rule (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a session (%(default)s)")
    parser.add_argument("--only", choices=RULES, action="append", help="may be repeated")
    args = parser.parse_args()
    out = table_output(args.json)
    facts = print_machine(out)
    rows = []
    for rule, make, workers, num_devices in WORKLOADS:
        if args.only and rule not in args.only:
            continue
        found = {"with": Samples(), "without": Samples()}
        peaks = {}
        for _ in range(args.rounds):
            for name, rules in (("without", ",".join(r for r in RULES if r != rule)), ("with", "all")):
                times, peaks[name] = measure(make, workers, num_devices, rules, args.steps)
                found[name].values += times
        (peak, sent), (peak_without, sent_without) = peaks["with"], peaks["without"]
        note = f"peak {peak / MIB:.1f} MiB with, {peak_without / MIB:.1f} without"
        if sent_without:
            note += f"; sent a step {sent / MIB:.2f} MiB with, {sent_without / MIB:.2f} without"
        row = Row(f"{rule}: {make.__name__}, {num_devices} devices, {workers}", "ms", found["with"].median, note)
        row.others["torch"] = found["without"].median
        row.samples = {"dtorch": found["with"], "torch": found["without"]}
        rows.append(row)
        print_table(rows[-1:], {}, out)
    dtorch.shutdown()
    print('\n"torch" is dtorch without the rule', file=out)
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
