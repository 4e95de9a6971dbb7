"""What an op costs: python examples/benchmarks/latency.py [--json FILE]

Prints one table. Every figure stands beside plain torch executing the same in the same process, repetitions of the two
alternating, and beside torch DTensor (two gloo processes), JAX (two host devices) and Monarch where they are installed.
Look at the ratios; the microseconds are those of the machine, and want it quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from report import Row, add_json_option, compared, print_machine, print_table, table_output, write_json
from timing import HERE, Samples, add_clock_option, alternate, peers, per_op_us, process_s, torchrun

import dtorch

SECTIONS = ("record", "chain", "latency", "start", "peers")


# ---- one op, recorded


def chained(x: Any, y: Any) -> Callable[[int], Any]:
    def body(num: int) -> Any:
        z = x
        for _ in range(num):
            z = z + y
        return z

    return body


def repeated(op: Callable[[], Any]) -> Callable[[int], Any]:
    def body(num: int) -> None:
        for _ in range(num):
            op()

    return body


def attention(x: Any, y: Any) -> Callable[[int], Any]:
    """With keywords, as models call it."""
    q, k, mask = x.view(1, 1, 4, 4), y.view(1, 1, 4, 4), x.view(1, 1, 4, 4) > 0
    attend = torch.nn.functional.scaled_dot_product_attention
    return repeated(lambda: attend(q, k, k, attn_mask=mask, dropout_p=0.0, scale=0.5))


def record(args: argparse.Namespace) -> list[Row]:
    """Time of the client's thread to record an op, against plain torch executing it."""
    mesh = dtorch.DeviceMesh("cpu", [0])
    plain = [torch.ones(4, 4), torch.ones(4, 4)]
    ours = [dtorch.Tensor(t, device_mesh=mesh, placements=[dtorch.Replicate()]) for t in plain]
    functional = torch.nn.functional
    bodies: dict[str, Callable[[Any, Any], Callable[[int], Any]]] = {
        "record x + y": chained,
        "record torch.add": lambda x, y: repeated(lambda: torch.add(x, y)),
        "record F.linear": lambda x, y: repeated(lambda: functional.linear(x, y)),
        "record x.view": lambda x, y: repeated(lambda: x.view(4, 2, 2)),
        "record x[:, 1:3]": lambda x, y: repeated(lambda: x[:, 1:3]),
        "record F.scaled_dot_product_attention": attention,
    }
    rows = []
    for name, make in bodies.items():
        our_body, plain_body = make(*ours), make(*plain)
        try:
            our_body(1)
            dtorch.synchronize()
        except Exception as error:
            rows.append(Row(name, "us", None, note=f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        samples = alternate(
            {
                "dtorch": partial(per_op_us, our_body, args.num_recorded, dtorch.synchronize, args.clock),
                "torch": partial(per_op_us, plain_body, args.num_recorded, None, args.clock),
            },
            args.repetitions,
        )
        rows.append(compared(name, "us", samples))
    return rows


# ---- many ops, to the end


def sharded(num_devices: int) -> tuple[Any, Any]:
    """Two tiny tensors cut over this many CPU devices."""
    mesh = dtorch.DeviceMesh("cpu", list(range(num_devices)))
    full = torch.ones(4, 4)
    x, y = (dtorch.Tensor(full, device_mesh=mesh, placements=[dtorch.Shard(0)]) for _ in range(2))
    return x, y


def chain(args: argparse.Namespace) -> list[Row]:
    """Recording, sending and executing a long chain of tiny ops, up to its value."""
    rows = chains_in_one_process(args)
    dtorch.init(workers="per-device")
    rows.append(compared("chain, 2 devices, a process each", "us/op", chains(args, {"dtorch": sharded(2)})))
    dtorch.init(workers="shared")
    return rows


def chains(args: argparse.Namespace, inputs: dict[str, tuple[Any, Any]]) -> dict[str, Samples]:
    """Times up to the value of chains that start from ``inputs``, and of plain torch's."""

    def to_end(x: Any, y: Any) -> Callable[[int], Any]:
        body = chained(x, y)
        return lambda num: body(num).to_torch()

    bodies = {name: to_end(x, y) for name, (x, y) in inputs.items()}
    bodies["torch"] = chained(torch.ones(4, 4), torch.ones(4, 4))
    rivals = {name: partial(per_op_us, body, args.num_chained) for name, body in bodies.items()}
    return alternate(rivals, args.repetitions)


def chains_in_one_process(args: argparse.Namespace) -> list[Row]:
    before = dtorch.statistics()
    found = chains(args, {"one": sharded(1), "two": sharded(2)})
    after = dtorch.statistics()
    num_batches = after.batches - before.batches
    size_bytes = after.bytes_by_plane["control"] - before.bytes_by_plane["control"]
    hits = sum(w["plan_hits"] for w in after.workers.values()) - sum(w["plan_hits"] for w in before.workers.values())
    return [
        compared("chain, 1 device", "us/op", {"dtorch": found["one"], "torch": found["torch"]}),
        compared("chain, 2 devices", "us/op", {"dtorch": found["two"], "torch": found["torch"]}),
        Row(
            "bytes per call, chains",
            "bytes",
            size_bytes / (after.ops - before.ops),
            note=f"{hits / num_batches:.0%} of batches found a plan",
        ),
        Row("bytes per call, whole session", "bytes", after.bytes_per_op),
    ]


# ---- one op and its value


def latency(args: argparse.Namespace) -> list[Row]:
    """From issuing one op to holding its value."""
    plain = torch.ones(4, 4)
    rows = []
    own = Samples([per_op_us(repeated(lambda: plain + plain), 1) for _ in range(args.num_values)])
    for num_devices in (1, 2):
        x, y = sharded(num_devices)

        def blocking(x: Any = x, y: Any = y) -> Samples:
            return Samples([per_op_us(lambda _: (x + y).to_torch(), 1) for _ in range(args.num_values)])

        async def awaited(x: Any = x, y: Any = y) -> Samples:
            found = Samples()
            for _ in range(args.num_values):
                start = time.perf_counter()
                await (x + y)
                found.values.append((time.perf_counter() - start) * 1e6)
            return found

        blocking()  # warm
        for how, found in (("blocking", blocking()), ("awaited", asyncio.run(awaited()))):
            for q in (0.5, 0.99):
                devices = "" if num_devices == 1 else f", {num_devices} devices"
                row = Row(f"op and value{devices}, {how}, p{q * 100:.0f}", "us", found.quantile(q))
                row.others["torch"] = own.quantile(q)
                row.samples = {"dtorch": found}
                rows.append(row)
    return rows


# ---- the start


def start(args: argparse.Namespace) -> list[Row]:
    """The whole two-device program, from nothing to its end."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # both find what this process finds
    samples = alternate(
        {
            "dtorch": lambda: process_s([sys.executable, str(HERE / "start_dtorch.py")], env),
            "torchrun": lambda: process_s([sys.executable, *torchrun(2), str(HERE / "start_torchrun.py")], env),
            "import torch": lambda: process_s([sys.executable, "-c", "import torch"], env),
        },
        args.starts,
    )
    row = compared("start-up, two-device program", "s", samples)
    row.note = ", ".join(f"{who} {value:.2f} s" for who, value in row.others.items())
    return [row]


# ---- all


@contextmanager
def busy(num: int) -> Iterator[None]:
    """So many other programs compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def add_peers(rows: list[Row], args: argparse.Namespace) -> dict[str, str]:
    """Fill in the figures of other systems; the answer says for each how it went."""
    outcome = {}
    by_name = {row.name: row for row in rows}
    for peer in peers(args.jax_python, args.monarch_python):
        found = peer.figures()
        if isinstance(found, str):
            outcome[peer.name] = found
            continue
        outcome[peer.name] = "measured"
        for name, value in found.items():
            if name in by_name:
                by_name[name].others[peer.name] = value
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what an op costs, beside plain torch and others.")
    add_json_option(parser)
    add_clock_option(parser)  # of the section "record"
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas (default: all)")
    parser.add_argument("--repetitions", type=int, default=7, help="of each figure (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=5, help="starts of each program (default: %(default)s)")
    parser.add_argument("--num-recorded", type=int, default=20_000, help="ops in a recording repetition (%(default)s)")
    parser.add_argument("--num-chained", type=int, default=100_000, help="ops in a chain (%(default)s)")
    parser.add_argument("--num-values", type=int, default=2_000, help="single ops whose value is taken (%(default)s)")
    parser.add_argument("--beside", type=int, default=0, help="programs that want a core meanwhile (%(default)s)")
    parser.add_argument("--jax-python", default=sys.executable, metavar="PYTHON", help="an interpreter that has JAX")
    parser.add_argument("--monarch-python", default=sys.executable, metavar="PYTHON", help="one that has Monarch")
    args = parser.parse_args()
    chosen = args.only.split(",")
    unknown = set(chosen) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    out = table_output(args.json)

    dtorch.init(workers="shared")
    facts = print_machine(out)
    rows: list[Row] = []
    with busy(args.beside):
        for section in (record, chain, latency, start):
            if section.__name__ in chosen:
                rows += section(args)
    dtorch.shutdown()
    outcome = add_peers(rows, args) if "peers" in chosen else {}
    print_table(rows, outcome, out)
    write_json(args.json, facts, rows, outcome)


if __name__ == "__main__":
    main()
