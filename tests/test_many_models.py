"""Models of kinds that no plan was written for: tiny, random, unmodified; the bits of torch on one device, close on more."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import dtorch
from dtorch import DeviceMesh, TorchTensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.filterwarnings("default")  # what these libraries warn about is not ours


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    diffusers.logging.set_verbosity_error()
    with torch.no_grad(), warnings.catch_warnings():
        yield


@lru_cache
def mesh(**axes: int) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def wave(*shape: int) -> torch.Tensor:
    return torch.linspace(-7, 7, torch.Size(shape).numel()).sin().view(shape)


IDS = torch.tensor([[5, 7, 9, 11, 13, 2, 4], [3, 6, 1, 8, 10, 12, 14], [21, 22, 23, 24, 25, 26, 27]])
MASK = torch.ones_like(IDS).index_put_((torch.tensor([1, 1]), torch.tensor([0, 1])), torch.tensor(0))
TEXT = {"input_ids": IDS, "attention_mask": MASK}
PICTURED = torch.tensor([[5, 66, 66, 66, 66, 7, 8], [66, 66, 66, 66, 9, 8, 3]])

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
READER = {**SIZES, "vocab_size": 67, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
WRITER = {**READER, "num_key_value_heads": 2, "eos_token_id": None}
SEER = {**SIZES, "image_size": 16, "patch_size": 8}
LISTENER = {
    **READER, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
PAIR = {
    "vocab_size": 67, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
LATENT = {
    "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip

Case = tuple[str, dict[str, Any], Callable[[Any], Any]]


def writes(m: Any) -> tuple[Any, ...]:
    options = {"attention_mask": MASK, "max_new_tokens": 2, "do_sample": False}
    return m(**TEXT).logits, m.generate(IDS, **options)


def translates(m: Any) -> tuple[Any, ...]:
    options = {"attention_mask": MASK, "max_new_tokens": 2, "do_sample": False, "num_beams": 2}
    return m(**TEXT, decoder_input_ids=IDS[:, :4]).logits, m.generate(IDS, **options)


def hidden(**inputs: Any) -> Callable[[Any], Any]:
    return lambda m: (m(**inputs).last_hidden_state,)


PICTURE, LARGE = hidden(pixel_values=wave(2, 3, 16, 16)), hidden(pixel_values=wave(2, 3, 32, 32))
SOUND = hidden(input_values=wave(2, 800))

FROM_TRANSFORMERS: dict[str, Case] = {
    "Phi3ForCausalLM": ("Phi3Config", WRITER, writes),  # queries, keys and values in one; both halves of a gate in one
    "FalconForCausalLM": ("FalconConfig", {**WRITER, "new_decoder_architecture": True, "num_kv_heads": 2}, writes),
    "BloomForCausalLM": ("BloomConfig", {**WRITER, "n_head": 4, "n_layer": 2}, writes),
    "OPTForCausalLM": ("OPTConfig", {**WRITER, "ffn_dim": 48, "word_embed_proj_dim": 24}, writes),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", WRITER, writes),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**WRITER, "head_dim": 8, "sliding_window": 4}, writes),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {**WRITER, **LATENT}, writes),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {**WRITER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4}, writes,
    ),
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {**WRITER, "state_size": 4, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 4}, writes,
    ),
    "BartForConditionalGeneration": ("BartConfig", PAIR, translates),
    "DebertaModel": ("DebertaConfig", {**READER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, hidden(**TEXT)),
    "LongformerModel": ("LongformerConfig", {**READER, "attention_window": 4}, hidden(**TEXT)),  # looks at memory
    "Dinov2Model": ("Dinov2Config", SEER, PICTURE),
    "SiglipVisionModel": ("SiglipVisionConfig", SEER, lambda m: (m(wave(2, 3, 16, 16)).pooler_output,)),
    "VideoMAEModel": ("VideoMAEConfig", {**SEER, "num_frames": 4}, hidden(pixel_values=wave(2, 4, 3, 16, 16))),
    "SwinModel": (
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, LARGE,
    ),
    "Wav2Vec2Model": ("Wav2Vec2Config", LISTENER, SOUND),
    "WavLMModel": ("WavLMConfig", LISTENER, SOUND),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {"vision_config": {**SEER, "model_type": "clip_vision_model"}, "text_config": {**WRITER, "model_type": "llama"},
         "image_token_index": 66, "vision_feature_layer": -1},
        lambda m: (m(input_ids=PICTURED, pixel_values=wave(2, 3, 16, 16)).logits,),
    ),
}  # fmt: skip

WORDS = wave(2, 5, 16)
SEEN = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
TIMES = torch.tensor([3, 700])
NOISE, CLIP = wave(2, 4, 8, 8), wave(2, 4, 2, 8, 8)
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}
STACK = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


def denoises(sample: torch.Tensor, **more: Any) -> Callable[[Any], Any]:
    return lambda m: m(sample, **{"timestep": TIMES, **more}, return_dict=False)[:1]


FROM_DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "PixArtTransformer2DModel": (
        {**HEADS, "sample_size": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 16, "norm_num_groups": 4},
        denoises(NOISE, encoder_hidden_states=WORDS, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    "DiTTransformer2DModel": (
        {**HEADS, "sample_size": 8, "out_channels": 8, "norm_num_groups": 4, "num_embeds_ada_norm": 10},
        denoises(NOISE, class_labels=torch.tensor([1, 3])),
    ),
    "UNet2DModel": (
        {**STACK, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4},
        denoises(wave(2, 3, 16, 16)),
    ),
    "WanTransformer3DModel": (
        {**HEADS, "attention_head_dim": 12, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 48,
         "cross_attn_norm": True, "rope_max_seq_len": 32},
        denoises(CLIP, encoder_hidden_states=WORDS),
    ),
    "LTXVideoTransformer3DModel": (
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 16},
        denoises(
            wave(2, 16, 8), encoder_hidden_states=WORDS, encoder_attention_mask=SEEN, timestep=TIMES.float(), num_frames=1,
            height=4, width=4,
        ),
    ),
    "CogVideoXTransformer3DModel": (
        {**HEADS, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "sample_width": 8, "sample_height": 8,
         "sample_frames": 5, "max_text_seq_length": 5},
        denoises(wave(2, 2, 4, 8, 8), encoder_hidden_states=WORDS),
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
         "num_decoder_blocks": (1, 1)},
        lambda m: (m.encode(wave(2, 3, 16, 16)).latents, m.decode(NOISE).sample, m(wave(2, 3, 16, 16)).sample),
    ),
    "ControlNetModel": (
        {**STACK, "in_channels": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 16,
         "attention_head_dim": 4, "conditioning_embedding_out_channels": (4, 8)},
        lambda m: m(NOISE, TIMES, WORDS, controlnet_cond=wave(2, 3, 16, 16), return_dict=False)[0],
    ),
}  # fmt: skip


def built(name: str) -> tuple[Any, Callable[[Any], Any]]:
    torch.manual_seed(0)
    if name in FROM_DIFFUSERS:
        options, call = FROM_DIFFUSERS[name]
        return getattr(diffusers, name)(**options).eval(), call
    config, options, call = FROM_TRANSFORMERS[name]
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval(), call


@lru_cache
def plain(name: str) -> tuple[torch.Tensor, ...]:
    model, call = built(name)
    return tuple(call(model))


@pytest.mark.parametrize("axes", [{"tp": 1}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", [*FROM_TRANSFORMERS, *FROM_DIFFUSERS])
def test_models(name: str, axes: dict[str, int]) -> None:
    model, call = built(name)
    for ours, theirs in zip(call(dtorch.distribute(model, mesh(**axes))), plain(name), strict=True):
        assert type(ours) is TorchTensor
        if axes == {"tp": 1} or not theirs.is_floating_point():
            assert torch.equal(ours.to_torch(), theirs)
        else:
            assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=2e-5)
