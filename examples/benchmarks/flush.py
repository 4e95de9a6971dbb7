"""How soon a device starts: python examples/benchmarks/flush.py [--json FILE]

From the moment an op is recorded to the moment a worker begins to execute it, by the clocks of a profile, while the client
goes on with something else: pure Python, numpy, one call that keeps the interpreter's lock, more ops now and then, or nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples

import dtorch

BUSY_S = 0.02
NUMBERS = np.random.default_rng(0).random(60_000).tolist()


def python() -> None:
    until = time.perf_counter() + BUSY_S
    while time.perf_counter() < until:
        pass


def numpy() -> None:
    a = np.ones((300, 300))
    until = time.perf_counter() + BUSY_S
    while time.perf_counter() < until:
        a = a @ a * 1e-3


def one_call_with_the_lock() -> None:
    """Tens of milliseconds in which no other thread of the process can run Python."""
    sorted(NUMBERS)


def sparse_ops() -> None:
    until = time.perf_counter() + BUSY_S
    while time.perf_counter() < until:
        _ = X + X
        pause = time.perf_counter() + 0.0002
        while time.perf_counter() < pause:
            pass


def nothing() -> None:
    time.sleep(BUSY_S)


def delays_ms(meanwhile: Callable[[], None], num: int) -> list[float]:
    """Milliseconds from the first op's recording to its start, ``num`` times."""
    found = []
    for _ in range(num):
        dtorch.synchronize()
        with dtorch.profile() as prof:
            _ = X + X
            meanwhile()
        recorded = min(e.start_us for e in prof.events if e.kind == "record")
        started = min(e.start_us for e in prof.events if e.kind == "compute")
        found.append((started - recorded) / 1e3)
    return found


def main() -> None:
    global X
    parser = argparse.ArgumentParser(description="How soon a device starts what is recorded.")
    add_json_option(parser)
    parser.add_argument("--repetitions", type=int, default=50, help="of each (%(default)s)")
    args = parser.parse_args()
    out = table_output(args.json)
    dtorch.init(workers="shared")
    facts = print_machine(out)
    X = dtorch.ones(4, device_mesh=dtorch.DeviceMesh("cpu", [0]))
    rows = []
    for meanwhile in (nothing, python, numpy, one_call_with_the_lock, sparse_ops):
        samples = Samples(delays_ms(meanwhile, args.repetitions))
        note = f"p90 {samples.quantile(0.9):.2f}, worst {max(samples.values):.2f}"
        name = f"first op starts, client busy with {meanwhile.__name__}"
        rows.append(Row(name, "ms", samples.median, note, samples={"dtorch": samples}))
    dtorch.shutdown()
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
