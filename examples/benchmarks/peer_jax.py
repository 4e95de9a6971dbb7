"""JAX with two host devices in one process. Prints its figures as one JSON object."""

from __future__ import annotations

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from timing import Samples, per_op_us

NUM_OPS, NUM_FETCHES, NUM_REPETITIONS = 3000, 500, 5


def main() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    x, y = (jax.device_put(jnp.ones((4, 4)), rows) for _ in range(2))
    alone = jax.device_put(jnp.ones((4, 4)), jax.devices()[0])

    def chain(num: int) -> jax.Array:
        z = x
        for _ in range(num):
            z = z + y
        return z

    def chain_to_end(num: int) -> None:
        np.asarray(chain(num))

    def chain_of_one(num: int) -> None:
        z = alone
        for _ in range(num):
            z = z + alone
        np.asarray(z)

    def fetch(num: int) -> None:
        for _ in range(num):
            np.asarray(x + y)

    def fetch_alone(num: int) -> None:
        for _ in range(num):
            np.asarray(alone + alone)

    found: dict[str, float] = {}
    bodies = {"record x + y": chain, "chain, 2 devices": chain_to_end, "chain, 1 device": chain_of_one}
    for name, body in bodies.items():
        # What an issuing loop leaves behind is waited for outside of its time.
        samples = [
            per_op_us(body, NUM_OPS, after=lambda: np.asarray(x + y)) for _ in range(1 + NUM_REPETITIONS)
        ]
        found[name] = Samples(samples[1:]).median
    for devices, body in (("", fetch_alone), ("2 devices, ", fetch)):
        one = Samples([per_op_us(body, 1) for _ in range(NUM_FETCHES)][NUM_FETCHES // 10 :])
        for percent in (50, 99):
            found[f"op and value, {devices}blocking, p{percent}"] = one.quantile(percent / 100)
    print(json.dumps(found))


main()
