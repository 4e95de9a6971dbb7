"""An op of your own, on shards: python examples/custom_op.py

``swiglu`` stands for a third-party kernel: a function of torch tensors that dtorch knows nothing about. Registered by
name, with the placements under which it may run on pieces, it is an op like any other. The workers import it from this
file; no code is sent to them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import dtorch
from dtorch import DeviceMesh, PlacementError, Replicate, Shard


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated unit of today's language models, for x (tokens, dim), gate and up (hidden, dim)."""
    return torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)


def main(num_devices: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent))  # workers inherit it, so they find this file as a module
    run = dtorch.register_op(
        "custom_op:swiglu",
        rule=[
            ((Shard(0), Replicate(), Replicate()), Shard(0)),  # tokens are independent
            ((Replicate(), Shard(0), Shard(0)), Shard(1)),  # and so are hidden units
        ],
    )
    mesh = DeviceMesh("cpu", list(range(num_devices)))
    torch.manual_seed(0)
    x, gate, up = torch.randn(8, 16), torch.randn(24, 16), torch.randn(24, 16)
    expected = swiglu(x, gate, up)
    rows = dtorch.tensor(x, device_mesh=mesh)
    columns = [dtorch.tensor(w, device_mesh=mesh, placements=[Shard(0)]) for w in (gate, up)]
    result = run(rows, *columns)
    torch.testing.assert_close(result.to_torch(), expected)
    print(f"{num_devices} devices, weights cut by hidden unit: the result is {result.placements[0]}, as plain torch's")
    narrow = dtorch.tensor(x, device_mesh=mesh, placements=[Shard(1)])
    try:
        run(narrow, *columns)
    except PlacementError as error:
        print(f"cut inputs that no rule covers are refused: {str(error).splitlines()[0]}")
    with dtorch.auto_redistribute():
        torch.testing.assert_close(run(narrow, *columns).to_torch(), expected)
    print("and redistributed where that is asked for")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Register an op and shard it.")
    parser.add_argument("--devices", type=int, default=3, help="virtual CPU devices (default: %(default)s)")
    main(parser.parse_args().devices)
