"""Modules of torch.nn on meshes, beside the same modules without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import dtorch
from dtorch import DeviceMesh, Shard, TorchTensor


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@lru_cache
def mesh(**axes: int) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


X, Y = (torch.linspace(-5, 5, 3 * t * 12).sin().view(3, t, 12) for t in (5, 7))
PADDED = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
CAUSAL = nn.Transformer.generate_square_subsequent_mask


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.layer(packed)
        return *nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=6), state


def transformer_layer(**more: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, **more)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "lstm": (lambda: nn.LSTM(12, 8, 2, batch_first=True, bidirectional=True), lambda m: m(X)),
    "lstm_state": (
        lambda: nn.LSTM(12, 8, proj_size=4), lambda m: m(X, (torch.ones(1, 5, 4), torch.ones(1, 5, 8)))
    ),
    "gru": (lambda: nn.GRU(12, 8, 2), lambda m: m(X)),
    "gru_unbatched": (lambda: nn.GRU(12, 8), lambda m: m(X[0])),
    "rnn": (lambda: nn.RNN(12, 8, nonlinearity="relu"), lambda m: m(X)),
    "lstm_cell": (lambda: nn.LSTMCell(12, 8), lambda m: m(X[0])),
    "packed_lstm": (lambda: Packed(nn.LSTM(12, 8, batch_first=True)), lambda m: m(X, torch.tensor([4, 5, 2]))),
    "packed_gru": (lambda: Packed(nn.GRU(12, 8, 2)), lambda m: m(X, torch.tensor([5, 1, 3]))),
    "attention": (
        lambda: nn.MultiheadAttention(12, 3, batch_first=True), lambda m: m(X, Y, Y, average_attn_weights=False)
    ),
    "attention_masked": (
        lambda: nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True),
        lambda m: m(X, X, X, key_padding_mask=PADDED, attn_mask=CAUSAL(5).isinf(), need_weights=False),
    ),
    "encoder": (lambda: nn.TransformerEncoder(transformer_layer(), 2), lambda m: m(X, src_key_padding_mask=PADDED)),
    "encoder_norm_first": (
        lambda: nn.TransformerEncoder(transformer_layer(norm_first=True), 2, enable_nested_tensor=False), lambda m: m(X)
    ),
    "transformer": (
        lambda: nn.Transformer(12, 3, 1, 1, 24, batch_first=True), lambda m: m(X, Y, tgt_mask=CAUSAL(7), tgt_is_causal=True)
    ),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(12, 9)), lambda m: m(X)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(12, 9)), lambda m: m(X)),
    "embedding_bag": (lambda: nn.EmbeddingBag(20, 8), lambda m: m(torch.tensor([[1, 2, 3], [4, 5, 6]]))),
    "transposed_conv": (
        lambda: nn.Sequential(nn.ConvTranspose1d(5, 6, 3, stride=2), nn.GroupNorm(2, 6), nn.PReLU(6)), lambda m: m(X)
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name][0]().eval()


def flat(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [] if tree is None else [t for part in tree for t in flat(part)]


@pytest.mark.filterwarnings("default:enable_nested_tensor")
@pytest.mark.parametrize("axes", [{"tp": 1}, {"tp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, axes: dict[str, int]) -> None:
    call = MODULES[name][1]
    for ours, theirs in zip(flat(call(dtorch.distribute(build(name), mesh(**axes)))), flat(call(build(name))), strict=True):
        value = ours.to_torch() if isinstance(ours, TorchTensor) else ours
        if axes == {"tp": 1}:
            assert torch.equal(value, theirs)
        else:
            assert_close(value, theirs)


def test_recurrent_layers_keep_a_split_batch() -> None:
    out, (hidden, cell) = dtorch.distribute(build("lstm"), mesh(dp=2))(X)
    assert (out.placements, hidden.placements, cell.placements) == ((Shard(0),), (Shard(1),), (Shard(1),))


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_between_recurrent_layers_is_torchs(packed: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.LSTM(12, 8, 2, dropout=0.5, batch_first=True)
        return Packed(layer) if packed else layer

    inputs = (X, torch.tensor([4, 5, 2])) if packed else (X,)
    plain, ours = make(), dtorch.distribute(make(), mesh(dp=2))
    torch.manual_seed(4)
    theirs = plain(*inputs)[0]
    dtorch.manual_seed(4)
    assert_close(ours(*inputs)[0].to_torch(), theirs)
    dtorch.manual_seed(5)
    assert not torch.equal(ours(*inputs)[0].to_torch(), theirs)


def test_bad_lengths_are_torchs_errors() -> None:
    lengths = torch.tensor([4, 0, 1])
    with pytest.raises(RuntimeError, match="has to be greater than 0"):
        build("packed_lstm")(X, lengths)
    with pytest.raises(RuntimeError, match="has to be greater than 0"):
        dtorch.distribute(build("packed_lstm"), mesh(dp=2))(X, lengths)


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs), nn.ReLU(),
            nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.short(x)).relu()


class Inverted(nn.Module):
    """A block as ConvNeXt has it: depthwise convolution, norm over channels, an MLP, a learned scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(size, size, 7, padding=3, groups=size)
        self.norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.scale = nn.Parameter(torch.full((size,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale * self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 7, 2, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Residual(6, 10, 2), Inverted(10),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 7),
    )  # fmt: skip


@pytest.mark.parametrize("axes", [{"tp": 1}, {"tp": 2}, {"tp": 3}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_conv_nets(axes: dict[str, int], training: bool) -> None:
    images = torch.linspace(-9, 9, 3 * 3 * 32 * 32).sin().view(3, 3, 32, 32)
    plain, ours = conv_net().train(training), dtorch.distribute(conv_net().train(training), mesh(**axes))
    made, want = ours(images).to_torch(), plain(images)
    if axes == {"tp": 1}:
        assert torch.equal(made, want)
    assert_close(made, want)
    for name, value in plain.named_buffers():  # running means of batch norm, over the whole batch
        assert_close(ours.get_buffer(name).to_torch(), value)  # type: ignore[attr-defined]
