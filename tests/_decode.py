"""A program with all that makes trouble for those who must run parts of it again."""

from __future__ import annotations

from collections.abc import Callable

import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

MESH = DeviceMesh("cpu", [0, 1])


def decode(harm: Callable[[int], None]) -> list[torch.Tensor]:
    """A cache written through views, replicated state changed in place by what the devices tell each other, random numbers,
    recycled slots, uploads in one and (where a head is between) in parts, and values read in the middle.

    Args:
        harm: is called before each of ten steps, with its number.
    """
    dtorch.manual_seed(3)
    source = torch.Generator().manual_seed(1)
    weights = dtorch.Tensor(torch.randn(8, 8, generator=source), device_mesh=MESH, placements=[Replicate()])
    x = dtorch.Tensor(torch.randn(6, 8, generator=source), device_mesh=MESH, placements=[Shard(0)])
    large = dtorch.Tensor(torch.randn(400, 400, generator=source), device_mesh=MESH, placements=[Shard(1)])
    cache = dtorch.zeros(6, 12, 8, device_mesh=MESH, placements=[Shard(0)])
    recent = cache[:, 4:8]
    read = []
    for step in range(10):
        harm(step)
        hidden = torch.tanh(torch.matmul(x, weights))
        cache[:, step].copy_(hidden)
        noise = dtorch.rand(6, 8, device_mesh=MESH, placements=[Shard(0)])
        x = torch.nn.functional.dropout(hidden + recent.sum(1) * 0.1, 0.2, True) + noise
        total = hidden.sum(0).redistribute([Replicate()])
        weights.mul_(0.99)
        weights[0].add_(total * 0.01)
        columns = weights.redistribute([Shard(1)])  # each device cuts for itself
        if step % 4 == 2:
            read.append(total.to_torch())
    recent.add_(1.0)
    after = dtorch.rand(3, device_mesh=MESH)
    return [*read, *(tensor.to_torch() for tensor in (x, cache, weights, columns, large, after))]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """To the bit."""
    return len(ones) == len(others) and all(map(torch.equal, ones, others))
