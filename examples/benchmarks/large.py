"""Large ops, end to end: python examples/benchmarks/large.py [--json FILE]

Products of matrices and attention whose kernels take far longer than anything around them, from issuing them to their end,
beside plain torch with as many threads; and a chain of elementwise ops on large tensors, where memory counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from report import Row, add_json_option, compared, print_machine, print_table, table_output, write_json
from timing import alternate

import dtorch

REST_S = 0.02
"""Before each repetition: threads of OpenMP in the rival's process go on polling for a while, and take a core."""


def products(x: Any, w: Any) -> Any:
    for _ in range(4):
        x = x @ w
    return x


def attention(q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def elementwise(x: Any) -> Any:
    for _ in range(4):
        x = (x * 0.5 + 1.0).tanh()
    return x


def ms(body: Callable[..., Any], given: list[Any], after: Callable[[], None] | None) -> float:
    time.sleep(REST_S)
    start = time.perf_counter()
    kept = body(*given)
    if after is not None:
        after()
    took = (time.perf_counter() - start) * 1e3
    del kept
    if after is not None:
        after()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="Large ops, end to end.")
    add_json_option(parser)
    parser.add_argument("--repetitions", type=int, default=7, help="of each (%(default)s)")
    args = parser.parse_args()
    out = table_output(args.json)
    dtorch.init(workers="shared")
    facts = print_machine(out)
    mesh = dtorch.DeviceMesh("cpu", [0])
    workloads: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {}
    for side in (1024, 2048):
        name = f"4 products of {side} x {side}"
        workloads[name] = products, [torch.randn(side, side), torch.randn(side, side) / side**0.5]
    for num_tokens in (1024, 4096):
        name = f"causal attention, 8 heads, {num_tokens} tokens"
        workloads[name] = attention, [torch.randn(1, 8, num_tokens, 64) for _ in range(3)]
    workloads["12 elementwise ops on 64 MiB"] = elementwise, [torch.randn(4096, 4096)]
    rows: list[Row] = []
    for name, (body, given) in workloads.items():
        ours = [dtorch.Tensor(t, device_mesh=mesh, placements=[dtorch.Replicate()]) for t in given]
        if body is not elementwise:
            assert torch.equal(body(*ours).to_torch(), body(*given))
        rivals = {
            "dtorch": partial(ms, body, ours, dtorch.synchronize),
            "torch": partial(ms, body, given, None),
        }
        rows.append(compared(name, "ms", alternate(rivals, args.repetitions, num_warmups=3)))
        own, torchs = rows[-1].samples["dtorch"], rows[-1].samples["torch"]
        rows[-1].note = f"best {own.best / torchs.best:.2f}, {own.median - torchs.median:+.2f} ms"
        del ours
    dtorch.shutdown()
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
