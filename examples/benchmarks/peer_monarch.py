"""Monarch's tensor engine over two CPU processes. Prints its figures as one JSON object."""

from __future__ import annotations

import json

import torch
from monarch import fetch_shard
from monarch.actor import this_host
from timing import Samples, per_op_us

NUM_OPS, NUM_FETCHES, NUM_REPETITIONS = 1000, 200, 3


def main() -> None:
    torch.set_num_threads(1)
    mesh = this_host().spawn_procs({"gpus": 2})
    with mesh.activate():
        x = torch.ones(4)
        fetch_shard(x + 1).result()

        def chain(num: int) -> torch.Tensor:
            z = x
            for _ in range(num):
                z = z + 1
            return z

        def chain_to_end(num: int) -> None:
            fetch_shard(chain(num)).result()

        def fetch(num: int) -> None:
            for _ in range(num):
                fetch_shard(x + 1).result()

        found: dict[str, float] = {}
        for name, body in {"record x + y": chain, "chain, 2 devices": chain_to_end}.items():
            samples = [
                per_op_us(body, NUM_OPS, after=lambda: fetch_shard(x + 1).result()) for _ in range(1 + NUM_REPETITIONS)
            ]
            found[name] = Samples(samples[1:]).median
        one = Samples([per_op_us(fetch, 1) for _ in range(NUM_FETCHES)][NUM_FETCHES // 10 :])
    for percent in (50, 99):
        found[f"op and value, 2 devices, blocking, p{percent}"] = one.quantile(percent / 100)
    print(json.dumps(found))
    mesh.stop().get()


main()
