"""The examples' language model on meshes beside the same file on plain torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import dtorch
from dtorch import Replicate, Shard

EXAMPLES = Path(__file__).parent.parent / "examples"
MESHES = [(1, 1), (1, 2), (1, 3), (2, 2)]
IDS = torch.tensor([[0, 0, 7, 3, 11], [5, 9, 2, 40, 1]])
POSITIONS = torch.tensor([[-2, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
NUM_STEPS = 6


@pytest.fixture(scope="module")
def examples() -> Iterator[tuple[ModuleType, ModuleType]]:
    """llama.py on dtorch, and on plain torch."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import llama
        import plain

        yield llama, plain.load_llama()
    finally:
        sys.path.remove(str(EXAMPLES))


def config(module: ModuleType) -> Any:
    return module.LlamaConfig(
        vocab_size=50, hidden_size=36, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=3, head_size=6,
        rope_theta=10000.0, norm_eps=1e-5, max_positions=128,
    )


@pytest.fixture(scope="module")
def twin(examples: tuple[ModuleType, ModuleType]) -> Any:
    """The model on plain torch."""
    torch.manual_seed(0)
    return examples[1].Llama(config(examples[1])).requires_grad_(False)


def mesh_of(shape: tuple[int, int]) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def split(mesh: dtorch.DeviceMesh, x: torch.Tensor) -> dtorch.Tensor:
    return dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(0), Replicate()], dtype=x.dtype)


@pytest.mark.parametrize("shape", MESHES)
def test_same_seed_same_model(shape: tuple[int, int], examples: tuple[ModuleType, ModuleType], twin: Any) -> None:
    dtorch.manual_seed(0)
    with mesh_of(shape):
        model = examples[0].Llama(config(examples[0]))
    state = twin.state_dict()
    assert set(model.state_dict()) == set(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_torch(), state[name]), name


@pytest.mark.parametrize("shape", MESHES)
def test_logits(shape: tuple[int, int], examples: tuple[ModuleType, ModuleType], twin: Any) -> None:
    mesh = mesh_of(shape)
    with mesh, dtorch.nn.skip_init():
        model = examples[0].Llama(config(examples[0]))
        model.load_state_dict(twin.state_dict())
        logits = model(split(mesh, IDS), split(mesh, POSITIONS))
    assert logits.placements == (Shard(0), Replicate())
    expected = twin(IDS, POSITIONS)
    if shape == (1, 1):
        assert torch.equal(logits.to_torch(), expected)
    else:
        assert_close(logits.to_torch(), expected)


@pytest.mark.parametrize("shape", MESHES)
def test_decoding_with_a_cache(shape: tuple[int, int], examples: tuple[ModuleType, ModuleType], twin: Any) -> None:
    def decode(module: ModuleType, model: Any, ids: Any, positions: Any) -> list[Any]:
        cache = module.KVCache()
        cache.BUCKET = 8  # grows on the way
        tokens = []
        for _ in range(NUM_STEPS):
            ids = model.next_token(ids, positions, cache)
            positions = positions[:, -1:] + 1
            tokens.append(ids)
        return [tokens, cache.k_BKLH[-1]]

    expected, keys = decode(examples[1], twin, IDS, POSITIONS)
    mesh = mesh_of(shape)
    with mesh, dtorch.nn.skip_init():
        model = examples[0].Llama(config(examples[0]))
        model.load_state_dict(twin.state_dict())
        tokens, our_keys = decode(examples[0], model, split(mesh, IDS), split(mesh, POSITIONS))
    assert [t.tolist() for t in tokens] == [t.tolist() for t in expected]
    if shape == (1, 1):
        assert torch.equal(our_keys.to_torch(), keys)
    else:
        assert_close(our_keys.to_torch(), keys)
