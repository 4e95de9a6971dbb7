"""torch.nn's attention modules with batches and sequences that are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import dtorch
from dtorch import Replicate, Shard, nn

B, T, S, E = 3, 5, 7, 8
NAMES = ("dp", "ring_cp")
PLACEMENTS = [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Shard(1))]
HIDDEN = torch.rand(B, S, generator=torch.Generator().manual_seed(1)) < 0.3
HIDDEN[:, 0] = False
CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(T)
CALLS: dict[str, dict[str, Any]] = {
    "self": {},
    "self causal": {"attn_mask": CAUSAL, "is_causal": True},
    "self causal by mask": {"attn_mask": CAUSAL.isinf()},
    "cross": {"cross": True},
    "cross padded": {"cross": True, "key_padding_mask": HIDDEN},
    "cross both masks": {
        "cross": True, "key_padding_mask": torch.where(HIDDEN, -torch.inf, 0.0), "attn_mask": torch.randn(B * 2, T, S),
    },
    "cross bool masks": {"cross": True, "key_padding_mask": HIDDEN, "attn_mask": torch.eye(T, S) > 0},
    "weights": {"cross": True, "need_weights": True, "key_padding_mask": HIDDEN},
    "weights of heads": {"need_weights": True, "average_attn_weights": False},
}


def pair(placements: Any, **options: Any) -> tuple[Any, Any, dtorch.DeviceMesh]:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, 2, batch_first=True, **options).eval().requires_grad_(False)
    with mesh, nn.skip_init():
        ours = nn.MultiheadAttention(E, 2, batch_first=True, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, mesh


@pytest.mark.parametrize("name", CALLS)
def test_attention_of_split_batches_and_sequences(name: str) -> None:
    options = {"need_weights": False, **CALLS[name]}
    cross = options.pop("cross", False)
    x, y = torch.randn(B, T, E), torch.randn(B, S, E)
    for placements in PLACEMENTS:
        for more in ({}, {"bias": False}):
            ours, theirs, mesh = pair(placements, **more)
            query = dtorch.tensor(x, device_mesh=mesh, placements=list(placements))
            key = dtorch.tensor(y, device_mesh=mesh, placements=list(placements)) if cross else query
            got, weights = ours(query, key, key, **options)
            want, scores = theirs(x, y if cross else x, y if cross else x, **options)
            assert got.placements == tuple(placements)
            assert_close(got.to_torch(), want, rtol=1e-5, atol=1e-5)
            assert (weights is None) == (scores is None)
            if scores is not None:
                assert_close(weights.to_torch(), scores, rtol=1e-5, atol=1e-5)


def test_other_widths_of_keys_and_values_and_no_batch() -> None:
    ours, theirs, mesh = pair(None, kdim=3, vdim=4)
    x, k, v = torch.randn(T, E), torch.randn(S, 3), torch.randn(S, 4)
    cut = [Shard(0), Shard(0)]
    placed = [dtorch.tensor(t, device_mesh=mesh, placements=cut) for t in (x, k, v)]
    got, _ = ours(*placed, need_weights=False)
    assert got.placements == tuple(cut)
    assert_close(got.to_torch(), theirs(x, k, v, need_weights=False)[0], rtol=1e-5, atol=1e-5)
    got, weights = ours(*placed)
    want, scores = theirs(x, k, v)
    assert_close(got.to_torch(), want, rtol=1e-5, atol=1e-5)
    assert_close(weights.to_torch(), scores, rtol=1e-5, atol=1e-5)


def test_a_transformer_layer_of_split_sequences() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    theirs = torch.nn.TransformerDecoderLayer(E, 2, 12, batch_first=True).eval().requires_grad_(False)
    with mesh, nn.skip_init():
        ours = nn.TransformerDecoderLayer(E, 2, 12, batch_first=True).eval()
    ours.load_state_dict(theirs.state_dict())
    x, y = torch.randn(B, T, E), torch.randn(B, S, E)
    split = [Shard(0), Shard(1)]
    placed = [dtorch.tensor(t, device_mesh=mesh, placements=split) for t in (x, y)]
    got = ours(*placed, tgt_mask=CAUSAL, tgt_is_causal=True)
    assert got.placements == tuple(split)
    assert_close(got.to_torch(), theirs(x, y, tgt_mask=CAUSAL, tgt_is_causal=True), rtol=1e-5, atol=1e-5)


def test_wrong_calls_are_told_as_torch_tells_them() -> None:
    ours, _, mesh = pair(None)
    x = dtorch.randn(B, T, E, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        ours(x, x, x, is_causal=True, need_weights=False)
    with pytest.raises(AssertionError, match="6 features, not 8"):
        ours(x[..., :6], x[..., :6], x[..., :6], need_weights=False)
    with pytest.raises(AssertionError, match="not all 2 or 3"):
        ours(x, x[0], x[0], need_weights=False)
