"""examples/llama.py under data, tensor and pipeline parallelism, beside transformers' Llama."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import dtorch
from dtorch import Replicate, Shard

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # what transformers warns about is not ours

EXAMPLES = Path(__file__).parent.parent / "examples"
IDS = torch.tensor([[7, 3, 11, 20, 4], [5, 9, 2, 40, 1], [6, 6, 30, 31, 32]])
POSITIONS = torch.arange(5).expand(3, 5).contiguous()


@pytest.fixture(scope="module")
def llama() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import llama

        yield llama
    finally:
        sys.path.remove(str(EXAMPLES))


@lru_cache
def theirs() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=36, intermediate_size=40, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


SIZES = [(1, 1, 1), (1, 1, 3), (1, 2, 2), (1, 3, 2), (2, 1, 2), (2, 2, 3), (3, 3, 1), (3, 1, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "dp{} tp{} pp{}".format(*sizes))
def test_data_tensor_and_pipeline_parallel(llama: ModuleType, sizes: tuple[int, int, int]) -> None:
    mesh = dtorch.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "pp"))
    stages = mesh.unbind("pp")
    with dtorch.nn.skip_init():
        model = llama.Llama(llama.LlamaConfig.from_hf(theirs().config), stages)
    model.load_state_dict(theirs().state_dict())
    for stage, own in zip(stages, llama.assign_layers_to_stages(4, len(stages)), strict=True):
        for layer in own:
            assert model.model.layers[layer].mlp.up_proj.weight.device_mesh == stage
    by_row = [Shard(0), Replicate(), Replicate()]
    ids, positions = (dtorch.tensor(x, device_mesh=mesh, placements=by_row) for x in (IDS, POSITIONS))
    logits = model(ids, positions)
    assert logits.device_mesh == stages[-1]
    assert logits.placements == (Shard(0), Replicate())
    assert_close(logits.to_torch(), theirs()(IDS).logits, rtol=1e-4, atol=1e-5)
    with stages[0]:
        cache = llama.KVCache()
        cache.BUCKET = 8
    made = []
    for _ in range(5):
        ids = model.next_token(ids, positions, cache)
        positions = positions[:, -1:] + 1
        made.append(ids.to_torch())
    want = theirs().generate(IDS, max_new_tokens=5, do_sample=False)
    assert torch.equal(torch.cat(made, 1), want[:, 5:])


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 3), (2, 3), (5, 2), (3, 1)])
def test_layers_are_assigned_in_order_and_evenly(llama: ModuleType, num_layers: int, num_stages: int) -> None:
    stages = llama.assign_layers_to_stages(num_layers, num_stages)
    assert [layer for own in stages for layer in own] == list(range(num_layers))
    counts = [len(own) for own in stages]
    assert len(counts) == num_stages
    assert max(counts) - min(counts) <= 1
