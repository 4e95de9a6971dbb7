"""Peak memory beside plain torch: python examples/benchmarks/memory.py [--json FILE]

`a = rand; b = f(a); c = g(b); return h(c)` with 64 MiB tensors, and a prefill of SmolLM2-135M. Plain torch runs in a process
of its own. What is compared is how far the resident memory of the process that computes (plain torch's, dtorch's worker)
rises above where it stood before, by the kernel's own books (VmHWM); and for dtorch also what `dtorch.memory_stats` says.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples

import dtorch
from dtorch.session import current_session

sys.path.insert(0, str(Path(__file__).parents[1]))

MIB = 2**20
SIDE = 4096  # 64 MiB of float32
NUM_TOKENS = 512


def resident(pid: int, field: str) -> int:
    """VmRSS or VmHWM of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not tell {field}")


def rise(pid: int, work: Callable[[], Any]) -> int:
    """How far the resident memory of ``pid`` rises above where it stands, in bytes, while ``work`` runs."""
    before = resident(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts anew
    kept = work()
    peak = resident(pid, "VmHWM")
    del kept
    return peak - before


def function(lib: Any, **where: Any) -> Any:
    """Four ops, as one writes them; a local variable lives to the end of the function."""
    a = lib.rand(SIDE, SIDE, **where)
    b = a * 2.0
    c = b.exp()
    return c + 1.0


def prefill(model: Any, lib: Any, ids: Any, positions: Any) -> Any:
    return model(ids, positions)[:, -1:].argmax(dim=-1)


def plain(what: str, random: bool) -> int:
    """In this process, with plain torch."""
    if what == "function":
        function(torch)
        return rise(os.getpid(), lambda: function(torch))
    import decode
    import plain as names

    config, state_dict = decode.weights(random)
    source = names.load_llama()
    with torch.no_grad():
        model = source.Llama(source.LlamaConfig.from_hf(config))
        model.load_state_dict(state_dict, assign=True)
        ids, positions = torch.arange(NUM_TOKENS)[None], torch.arange(NUM_TOKENS)[None]
        prefill(model, torch, ids[:, :8], positions[:, :8])
        return rise(os.getpid(), lambda: prefill(model, torch, ids, positions))


def ours(what: str, random: bool, compiled: bool) -> tuple[int, int]:
    """(rise of the worker's resident memory, rise of the peak that memory_stats tells), one device."""
    os.environ["DTORCH_KEEP_PAGES"] = "0"  # or the pages of the run before would hide what this one needs
    dtorch.init(workers="shared")
    mesh = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    work: Callable[[], Any]
    if what == "function":

        def work() -> Any:
            return function(dtorch, device_mesh=mesh)

    else:
        import decode
        import llama

        config, state_dict = decode.weights(random)
        with mesh:
            model = llama.Llama(llama.LlamaConfig.from_hf(config))
            model.load_state_dict(state_dict)
        whole = [dtorch.Replicate()]
        numbers = torch.arange(NUM_TOKENS)[None]
        ids = dtorch.Tensor(numbers, device_mesh=mesh, placements=whole)
        positions = dtorch.Tensor(numbers, device_mesh=mesh, placements=whole)

        def step(ids: Any, positions: Any) -> Any:
            return prefill(model, dtorch, ids, positions)

        run = dtorch.compile(step) if compiled else step

        def work() -> Any:
            with mesh:
                return run(ids, positions)

    def finished() -> Any:
        kept = work()
        dtorch.synchronize()
        return kept

    finished()
    finished()
    pid = current_session().thread.pids[0]
    risen = rise(pid, finished)
    before = dtorch.memory_stats(mesh, reset_peak=True)[0].allocated
    kept = finished()
    peak = dtorch.memory_stats(mesh)[0].peak - before
    del kept
    dtorch.shutdown()
    return risen, peak


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory beside plain torch.")
    add_json_option(parser)
    parser.add_argument("--random", action="store_true", help="random weights of SmolLM2's shapes")
    parser.add_argument("--only", default="function,prefill", help="(%(default)s)")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        print(json.dumps(plain(args.plain, args.random)))
        return
    out = table_output(args.json)
    facts = print_machine(out)
    rows = []
    for what in args.only.split(","):
        command = [sys.executable, __file__, "--plain", what, *(["--random"] if args.random else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        beside = json.loads(done.stdout.splitlines()[-1])
        for compiled in (False, True) if what == "prefill" else (False,):
            risen, peak = ours(what, args.random, compiled)
            name = f"peak of the {what}{', compiled' if compiled else ''}"
            row = Row(name, "MiB", risen / MIB, f"memory_stats: {peak / MIB:.1f} MiB")
            row.others["torch"] = beside / MIB
            row.samples = {"dtorch": Samples([risen / MIB]), "torch": Samples([beside / MIB])}
            rows.append(row)
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
