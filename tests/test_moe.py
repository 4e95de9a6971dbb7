"""A mixture of experts: the same answers wherever tokens and experts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _sharding import distribute, mesh_of
from torch.testing import assert_close

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard
from dtorch.nn import functional as F
from dtorch.runtime.kernels.experts import ACTIVATIONS

D, INNER = 6, 5


def make(num_experts: int, *tokens: int, top_k: int = 2, fused: bool = True, seed: int = 0) -> list[torch.Tensor]:
    """hidden, indices, scores, up, down and, unless fused, gate."""
    torch.manual_seed(seed)
    hidden = torch.randn(*tokens, D)
    scores, indices = torch.rand(*tokens, num_experts).topk(top_k, dim=-1)
    up = torch.randn(num_experts, 2 * INNER if fused else INNER, D)
    down = torch.randn(num_experts, D, INNER)
    return [hidden, indices, scores, up, down, *([] if fused else [torch.randn(num_experts, INNER, D)])]


def dense(hidden: Any, indices: Any, scores: Any, up: Any, down: Any, gate: Any = None, activation: str = "silu") -> Any:
    """Every expert on every token, written plainly."""
    total = torch.zeros_like(hidden)
    for e in range(up.shape[0]):
        inner = hidden @ up[e].t()
        if gate is None:
            first, inner = inner.chunk(2, dim=-1)
        else:
            first = hidden @ gate[e].t()
        made = (ACTIVATIONS[activation](first) * inner) @ down[e].t()
        total += made * torch.where(indices == e, scores, 0.0).sum(-1, keepdim=True)
    return total


EP = ([Shard(0)], [Replicate()])
CASES = [  # mesh, placements of tokens, of experts, of the result
    ((3,), [Shard(0)], [Shard(0)], [Shard(0)]),
    ((3,), [Shard(1)], [Shard(0)], [Shard(1)]),
    ((3,), [Replicate()], [Shard(0)], [Partial()]),
    ((3,), [Shard(0)], [Replicate()], [Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Shard(0)]),
    ((2, 2), [Shard(1), Replicate()], [Shard(0), Shard(0)], [Shard(1), Partial()]),
]


@pytest.mark.parametrize("num_experts", [4, 5, 2])
def test_tokens_and_experts_anywhere(num_experts: int) -> None:
    inputs = make(num_experts, 3, 7)
    want = dense(*inputs)
    for shape, tokens, experts, result in CASES:
        mesh = mesh_of(*shape)
        placed = [distribute(t, mesh, tokens if i < 3 else experts) for i, t in enumerate(inputs)]
        got = F.mixture_of_experts(*placed, fused=True)
        assert got.placements == tuple(result)
        assert_close(got.to_torch(), want, rtol=1e-4, atol=1e-5)


def test_one_device_has_the_bits_of_the_plain_function() -> None:
    from dtorch.ops.moe import _apply

    inputs = make(4, 9)
    one = mesh_of(1)
    got = F.mixture_of_experts(*[distribute(t, one, [Replicate()]) for t in inputs], fused=True)
    assert torch.equal(got.to_torch(), _apply(*inputs, None, None, None, None, "silu", True, False))


def test_experts_that_get_nothing() -> None:
    """G06: every token goes to expert 0, so three devices of four get none; or no token goes anywhere."""
    hidden, indices, scores, up, down = make(4, 4, top_k=1)
    mesh = mesh_of(4)
    for chosen in (torch.zeros_like(indices), torch.full_like(indices, 3), torch.full_like(indices, 4)):
        placed = [distribute(t, mesh, [Shard(0)]) for t in (hidden, chosen, scores, up, down)]
        got = F.mixture_of_experts(*placed, fused=True).to_torch()
        assert_close(got, dense(hidden, chosen, scores, up, down), rtol=1e-4, atol=1e-5)


def test_the_torch_face() -> None:
    from dtorch.face import TorchTensor

    inputs = make(4, 6)
    where = [[Replicate()]] * 3 + [[Shard(0)]] * 2
    faces = [TorchTensor(distribute(t, mesh_of(3), p)) for t, p in zip(inputs, where, strict=True)]
    got = F.mixture_of_experts(*faces, fused=True)
    assert isinstance(got, torch.Tensor)
    assert_close(got.to_torch(), dense(*inputs), rtol=1e-4, atol=1e-5)


def test_fewer_tokens_than_devices() -> None:
    inputs = make(3, 2)
    for num in (0, 1, 2):
        few = [t[:num] if i < 3 else t for i, t in enumerate(inputs)]
        placed = [distribute(t, mesh_of(4), [Shard(0)]) for t in few]
        assert_close(F.mixture_of_experts(*placed, fused=True).to_torch(), dense(*few), rtol=1e-4, atol=1e-5)


def test_inner_features_split_beside_the_experts() -> None:
    inputs = make(3, 5, fused=False)
    mesh = mesh_of(2, 2)
    tokens, wide, down = [Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(0), Shard(2)]
    where = [tokens, tokens, tokens, wide, down, wide]
    got = F.mixture_of_experts(*[distribute(t, mesh, p) for t, p in zip(inputs, where, strict=True)])
    assert got.placements == (Shard(0), Partial())
    assert_close(got.to_torch(), dense(*inputs), rtol=1e-4, atol=1e-5)


def test_biases_transposed_weights_and_other_activations() -> None:
    hidden, indices, scores, up, down, gate = make(4, 5, fused=False)
    one, mesh = mesh_of(1), mesh_of(3)
    biases = {"up_bias": torch.randn(4, INNER), "down_bias": torch.randn(4, D), "gate_bias": torch.randn(4, INNER)}
    flipped = [hidden, indices, scores, up.transpose(1, 2), down.transpose(1, 2), gate.transpose(1, 2)]
    for activation in ACTIVATIONS:
        results = []
        for target, where in ((one, [Replicate()]), (mesh, [Shard(0)])):
            named = {name: distribute(t, target, where) for name, t in biases.items()}
            for tensors, transposed in (([hidden, indices, scores, up, down, gate], False), (flipped, True)):
                placed = [distribute(t.contiguous(), target, where) for t in tensors]
                made = F.mixture_of_experts(*placed, **named, activation=activation, transposed=transposed)
                results.append(made.to_torch())
        for other in results[1:]:
            assert_close(other, results[0], rtol=1e-4, atol=1e-5)
    plain = F.mixture_of_experts(*[distribute(t, one, [Replicate()]) for t in flipped], activation="gelu", transposed=True)
    assert_close(plain.to_torch(), dense(hidden, indices, scores, up, down, gate, "gelu"), rtol=1e-4, atol=1e-5)


def test_indices_and_scores_that_every_device_has() -> None:
    hidden, indices, scores, up, down = make(4, 5)
    mesh = mesh_of(3)
    where = [[Shard(0)], [Replicate()], [Replicate()], [Shard(0)], [Shard(0)]]
    placed = [distribute(t, mesh, p) for t, p in zip((hidden, indices, scores, up, down), where, strict=True)]
    got = F.mixture_of_experts(*placed, fused=True)
    assert_close(got.to_torch(), dense(hidden, indices, scores, up, down), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"activation": "swoosh"}, "there are 'silu'"),
        ({"fused": False}, r"down has shape \(4, 6, 5\), not \(4, 6, 10\)"),
        ({"up": torch.zeros(4, 6)}, "up must be"),
        ({"scores": torch.zeros(5, 1)}, r"scores has shape \(5, 1\), not \(5, 2\)"),
        ({"gate": torch.zeros(4, 5, 6)}, "`gate` must be None"),
        ({"gate_bias": torch.zeros(4, 5)}, "a gate_bias without a gate"),
        ({"indices": torch.zeros(5, 2, dtype=torch.int32)}, "indices must be int64"),
        ({"hidden": torch.zeros(5, 6, dtype=torch.float64)}, "hidden is torch.float64, but up is torch.float32"),
    ],
)
def test_wrong_calls(change: dict[str, Any], text: str) -> None:
    values: dict[str, Any] = dict(zip(("hidden", "indices", "scores", "up", "down"), make(4, 5), strict=True))
    values |= {"fused": True} | change
    one = mesh_of(1)
    placed = {k: distribute(v, one, [Replicate()]) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    with pytest.raises((ValueError, TypeError), match=text):
        F.mixture_of_experts(**placed)


def test_placements_that_do_not_fit_say_so() -> None:
    inputs = make(4, 6)
    where = [[Shard(1)], [Replicate()], [Replicate()], [Shard(0)], [Shard(0)]]
    placed = [distribute(t, mesh_of(2), p) for t, p in zip(inputs, where, strict=True)]
    with pytest.raises(PlacementError, match="mixture_of_experts"):
        F.mixture_of_experts(*placed, fused=True)
    with dtorch.auto_redistribute():
        assert_close(F.mixture_of_experts(*placed, fused=True).to_torch(), dense(*inputs), rtol=1e-4, atol=1e-5)


MESHES = [
    ((3,), ("ep",), [Shard(0)]),
    ((3,), ("ep",), [Replicate()]),
    ((2, 2), ("dp", "ep"), [Shard(0), Shard(1)]),
    ((2, 2), ("ep", "tp"), [Shard(1), Replicate()]),
    ((2, 3), ("tp", "dp"), [Replicate(), Shard(0)]),
    ((2,), None, [Shard(1)]),
]


@pytest.mark.parametrize(("shape", "names", "where"), MESHES, ids=lambda v: str(v))
def test_a_layer_equals_transformers_mixtral(shape: Any, names: Any, where: Any) -> None:
    theirs, x = mixtral()
    mesh = dtorch.init_device_mesh("cpu", shape, mesh_dim_names=names)
    with dtorch.nn.skip_init(), mesh:
        ours = dtorch.nn.MixtureOfExperts(D, INNER, 5, 2)
    gate, up = theirs.experts.gate_up_proj.detach().chunk(2, dim=1)
    ours.load_state_dict(
        {"router": theirs.gate.weight, "gate_proj": gate, "up_proj": up, "down_proj": theirs.experts.down_proj}
    )
    got = ours(dtorch.tensor(x, device_mesh=mesh, placements=where))
    assert got.placements == tuple(where)
    with torch.no_grad():
        assert_close(got.to_torch(), theirs(x), rtol=1e-4, atol=1e-5)


def mixtral() -> tuple[Any, torch.Tensor]:
    pytest.importorskip("transformers")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=D, intermediate_size=INNER, num_local_experts=5, num_experts_per_tok=2)
    ).eval()
    for weight in block.parameters():
        torch.nn.init.normal_(weight)
    return block, torch.randn(3, 5, D)


def test_the_layer_draws_as_many_numbers_on_any_mesh_and_checks_top_k() -> None:
    drawn = []
    for shape in ((1,), (3,)):
        dtorch.manual_seed(1)
        with dtorch.init_device_mesh("cpu", shape, mesh_dim_names=("ep",)):
            drawn.append([p.to_torch() for p in dtorch.nn.MixtureOfExperts(D, INNER, 4, 2).parameters()])
    for one, three in zip(*drawn, strict=True):
        assert torch.equal(one, three)
        assert one.abs().max() > 0
    with pytest.raises(ValueError, match="between 1 and all 4 experts"):
        dtorch.nn.MixtureOfExperts(D, INNER, 4, 5)


SCHEMES = [  # dp, ep, tp, ring_cp
    (1, 3, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 4, 1, 2), (2, 1, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SCHEMES, ids=lambda sizes: "dp{} ep{} tp{} ring{}".format(*sizes))
def test_a_model_like_mixtral(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Llama of the examples with experts in its layers; tokens split over "ep" too, as batch or sequence allow."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    import llama

    torch.manual_seed(0)
    hf = transformers.MixtralConfig(
        vocab_size=50, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=32, num_local_experts=5, num_experts_per_tok=2,
        rms_norm_eps=1e-5, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.MixtralForCausalLM(hf).eval().requires_grad_(False)
    config = llama.LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=20, num_layers=2, num_heads=6, num_kv_heads=3, head_size=4,
        rope_theta=hf.rope_parameters["rope_theta"], norm_eps=1e-5, max_positions=32,
    )  # fmt: skip
    mesh = dtorch.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep", "tp", "ring_cp"))
    with dtorch.nn.skip_init(), mesh:
        model = llama.Llama(config)
        for layer in model.model.layers:
            layer.mlp = dtorch.nn.MixtureOfExperts(24, 20, 5, 2)
    model.load_state_dict(ours(theirs.state_dict()))
    ids = torch.randint(50, (3, 7))
    where = [Shard(0), Shard(0), Replicate(), Shard(1)]
    with mesh:
        logits = model(dtorch.tensor(ids, device_mesh=mesh, placements=where))
    assert logits.placements == tuple(where)
    assert_close(logits.to_torch(), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def ours(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Mixtral's weights under the names of ``MixtureOfExperts``."""
    made = {}
    for name, value in state_dict.items():
        prefix, _, last = name.rpartition("mlp.")
        if last == "experts.gate_up_proj":
            made[f"{prefix}mlp.gate_proj"], made[f"{prefix}mlp.up_proj"] = value.chunk(2, dim=1)
        else:
            new = {"gate.weight": "router", "experts.down_proj": "down_proj"}.get(last)
            made[name if new is None else f"{prefix}mlp.{new}"] = value
    return made
