"""torch DTensor over two gloo processes; every process runs the whole program. Start with torchrun, see timing.py.

Prints the figures of rank 0 as one JSON object.
"""

from __future__ import annotations

import json

import torch
from timing import Samples, per_op_us
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

NUM_OPS, NUM_FETCHES, NUM_REPETITIONS = 3000, 300, 5


def main() -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size() if distributed.is_initialized() else 2,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    y = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    w = distribute_tensor(torch.eye(4), mesh, [Replicate()])

    def chain(num: int) -> DTensor:
        z = x
        for _ in range(num):
            z = z + y
        return z

    def add(num: int) -> None:
        for _ in range(num):
            torch.add(x, y)

    def linear(num: int) -> None:
        for _ in range(num):
            torch.nn.functional.linear(x, w)

    def view(num: int) -> None:
        for _ in range(num):
            x.view(4, 2, 2)

    def index(num: int) -> None:
        for _ in range(num):
            x[:, 1:3]

    def fetch(num: int) -> None:
        for _ in range(num):
            (x + y).full_tensor()

    bodies = {"record x + y": chain, "record torch.add": add, "record F.linear": linear, "record x.view": view,
              "record x[:, 1:3]": index}  # fmt: skip
    found: dict[str, float] = {}
    with torch.no_grad():
        for name, body in bodies.items():
            samples = Samples([per_op_us(body, NUM_OPS) for _ in range(1 + NUM_REPETITIONS)][1:])
            found[name] = samples.median
        found["chain, 2 devices"] = found["record x + y"]  # ops run where they are called, so this is one figure
        one = Samples([per_op_us(fetch, 1) for _ in range(NUM_FETCHES)][NUM_FETCHES // 10 :])
    for percent in (50, 99):
        found[f"op and value, 2 devices, blocking, p{percent}"] = one.quantile(percent / 100)
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


main()
