"""examples/llama.py under data, tensor, pipeline and context parallelism, beside transformers' Llama."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
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


AXES = ("dp", "tp", "pp", "ulysess_cp", "ring_cp")
SCHEMES = [sizes for sizes in product((1, 2, 3), repeat=5) if prod(sizes) <= 16]


def make(llama: ModuleType, sizes: tuple[int, ...], names: tuple[str, ...] = AXES) -> tuple[Any, dtorch.DeviceMesh]:
    mesh = dtorch.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with dtorch.nn.skip_init():
        stages = mesh.unbind("pp") if "pp" in names else [mesh]
        model = llama.Llama(llama.LlamaConfig.from_hf(theirs().config), stages)
    model.load_state_dict(theirs().state_dict())
    return model, mesh


@pytest.mark.parametrize("num_devices", sorted({prod(sizes) for sizes in SCHEMES}))
def test_every_scheme_has_the_logits_of_transformers(llama: ModuleType, num_devices: int) -> None:
    """Every combination of sizes 1, 2, 3 of five axes with that many devices; nothing divides evenly."""
    want = theirs()(IDS).logits
    for sizes in SCHEMES:
        if prod(sizes) != num_devices:
            continue
        model, mesh = make(llama, sizes)
        stages = mesh.unbind("pp")
        for stage, own in zip(stages, llama.assign_layers_to_stages(4, len(stages)), strict=True):
            for layer in own:
                assert model.model.layers[layer].mlp.up_proj.weight.device_mesh == stage
        logits = model(dtorch.tensor(IDS, device_mesh=mesh))
        assert logits.device_mesh == stages[-1]
        assert logits.placements == (Replicate(),) * 4
        assert_close(logits.to_torch(), want, rtol=1e-4, atol=1e-5, msg=lambda text, sizes=sizes: f"{sizes}: {text}")


@pytest.mark.parametrize("names", [("pp",), ("tp",), ("ring_cp",), ("ulysess_cp", "pp"), ("pp", "dp")], ids=" ".join)
def test_a_mesh_may_lack_axes_or_have_them_in_another_order(llama: ModuleType, names: tuple[str, ...]) -> None:
    model, mesh = make(llama, (2, 3)[: len(names)], names)
    logits = model(dtorch.tensor(IDS, device_mesh=mesh))
    assert_close(logits.to_torch(), theirs()(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "tp"), [((8, 4), 8), ((9, 3), 2), ((9, 3), 5), ((3, 1), 4)], ids=str)
def test_any_number_of_devices_over_any_number_of_heads(llama: ModuleType, heads: tuple[int, int], tp: int) -> None:
    """G03: with more devices than key/value heads every device has these, and cuts fall between query heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=51, hidden_size=heads[0] * 4, intermediate_size=26, num_hidden_layers=1, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    mesh = dtorch.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    with dtorch.nn.skip_init():
        model = llama.Llama(llama.LlamaConfig.from_hf(config), [mesh])
    model.load_state_dict(other.state_dict())
    q, k, out = (getattr(model.model.layers[0].self_attn, f"{name}_proj").weight for name in "qko")
    for rows in [*(piece.shape[0] for piece in q.to_shards()), *(piece.shape[1] for piece in out.to_shards())]:
        assert rows % 4 == 0
    assert (k.placements == (Replicate(),)) == (tp > heads[1])
    assert_close(model(dtorch.tensor(IDS, device_mesh=mesh)).to_torch(), other(IDS).logits, rtol=1e-4, atol=1e-5)


CACHED = [(1, 2, 2, 1, 1), (2, 2, 3, 1, 1), (1, 1, 1, 2, 1), (2, 2, 1, 1, 3), (1, 3, 2, 2, 2), (2, 1, 1, 3, 2), (1, 4, 2, 1, 1)]


@pytest.mark.parametrize("sizes", CACHED, ids=lambda sizes: " ".join(map("{}{}".format, AXES, sizes)))
def test_a_cache_split_like_the_sequence_yields_the_same_tokens(llama: ModuleType, sizes: tuple[int, ...]) -> None:
    model, mesh = make(llama, sizes)
    by_row = [Shard(0), *[Replicate()] * 4]
    ids, positions = (dtorch.tensor(x, device_mesh=mesh, placements=by_row) for x in (IDS, POSITIONS))
    stages = mesh.unbind("pp")
    logits = model(ids, positions)
    assert logits.placements == (Shard(0), *[Replicate()] * 3)
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
    assert cache.k_BKLH[0].placements[2:] == (Shard(2), Shard(2))


def test_padding_on_the_left_is_not_seen(llama: ModuleType) -> None:
    model, mesh = make(llama, (1, 2, 1, 2, 2))
    ids, positions = IDS.clone(), POSITIONS.clone()
    ids[1, :2], positions[1] = 0, torch.arange(-2, 3)
    logits = model(*(dtorch.tensor(x, device_mesh=mesh) for x in (ids, positions)))
    alone = theirs()(IDS[1:2, 2:]).logits
    assert_close(logits.to_torch()[1:2, 2:], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="say the tokens' positions"):
        model(dtorch.tensor(ids, device_mesh=mesh), None, llama.KVCache())


def test_batches_in_flight_overlap_in_the_stages(llama: ModuleType) -> None:
    """G05: batches of 3, 3 and 2 rows through three stages. All are recorded before a value is asked for, so each stage
    begins the next batch as soon as it is done with one; together they are the whole batch."""
    model, mesh = make(llama, (1, 1, 3, 1, 1))
    rows = torch.cat((IDS, IDS.flip(1), IDS[:2] + 1))
    first = [model(dtorch.tensor(part, device_mesh=mesh)) for part in rows.split(3)]
    assert [tuple(logits.shape[:2]) for logits in first] == [(3, 5), (3, 5), (2, 5)]
    assert_close(torch.cat([x.to_torch() for x in first]), theirs()(rows).logits, rtol=1e-4, atol=1e-5)


def test_the_example_compares_itself(llama: ModuleType, monkeypatch: Any, capsys: Any) -> None:
    options = ["--dp", "2", "--tp", "2", "--pp", "2", "--ring-cp", "2", "--length", "11"]
    monkeypatch.setattr(sys, "argv", ["llama.py", *options])
    llama.main()
    assert "16 devices: dp 2, tp 2, pp 2, ulysess_cp 1, ring_cp 2" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["llama.py", "--tp", "0"])
    with pytest.raises(SystemExit):
        llama.main()
    assert "sizes are at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 3), (2, 3), (5, 2), (3, 1)])
def test_layers_are_assigned_in_order_and_evenly(llama: ModuleType, num_layers: int, num_stages: int) -> None:
    stages = llama.assign_layers_to_stages(num_layers, num_stages)
    assert [layer for own in stages for layer in own] == list(range(num_layers))
    counts = [len(own) for own in stages]
    assert len(counts) == num_stages
    assert max(counts) - min(counts) <= 1
