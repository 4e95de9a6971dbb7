"""Large values in and out: python examples/benchmarks/bulk.py [--json FILE]

Upload and fetch of 256 MiB between the client and a worker of this host, beside `torch.clone` of the same tensor. Other hosts
are served by streams, see `streams.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples, alternate

import dtorch

MIB = 2**20


def ms(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    kept = work()
    took = (time.perf_counter() - start) * 1e3
    del kept
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="Large values in and out.")
    add_json_option(parser)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=7, help="of each (%(default)s)")
    args = parser.parse_args()
    out = table_output(args.json)
    dtorch.init(workers="shared")
    facts = print_machine(out)
    rows = []
    for num_devices in (1, 2):
        mesh = dtorch.DeviceMesh("cpu", list(range(num_devices)))
        where = [dtorch.Shard(0)]
        plain = torch.rand(args.mib * MIB // 4 // 1024, 1024)
        there = dtorch.Tensor(plain, device_mesh=mesh, placements=where)
        assert torch.equal(there.to_torch(), plain)

        def upload(plain: torch.Tensor = plain, mesh: Any = mesh, where: Any = where) -> Any:
            made = dtorch.Tensor(plain, device_mesh=mesh, placements=where)
            dtorch.synchronize()
            return made

        def client(plain: torch.Tensor = plain, mesh: Any = mesh, where: Any = where) -> float:
            took = ms(lambda: dtorch.Tensor(plain, device_mesh=mesh, placements=where))
            dtorch.synchronize()
            return took

        def fetch(there: Any = there) -> Any:
            return there.to_torch()

        def synced(work: Callable[[], Any]) -> float:
            took = ms(work)
            dtorch.synchronize()  # what died is freed outside of the measured time
            return took

        samples: dict[str, Samples] = alternate(
            {
                "upload": lambda work=upload: synced(work),
                "upload, client": client,
                "fetch": lambda work=fetch: synced(work),
                "torch": lambda plain=plain: ms(plain.clone),
            },
            args.repetitions,
            num_warmups=2,
        )
        for name, said in (
            ("upload", "upload, executed"), ("upload, client", "upload, the client's time"), ("fetch", "fetch")
        ):
            found = samples[name]
            row = Row(f"{said}, {args.mib} MiB, {num_devices} devices", "ms", found.median, f"best {found.best:.0f}")
            row.others["torch"] = samples["torch"].median
            row.samples = {"dtorch": found, "torch": samples["torch"]}
            rows.append(row)
    dtorch.shutdown()
    print('"torch" is torch.clone of the tensor', file=out)
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
