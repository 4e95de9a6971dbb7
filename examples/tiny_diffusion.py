"""SD3 and FLUX pipelines of diffusers, whole and tiny, with random weights: for diffuse.py and for tests."""

from __future__ import annotations

import os
import string
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 8}
LATENT_CHANNELS, PATCH, POOLED, JOINT = 4, 2, 16, 32


def sd3(seed: int = 0, **changes: Any) -> Any:
    """A `StableDiffusion3Pipeline` with its three text encoders. `changes` go to the transformer's config."""
    import diffusers

    return quiet(
        diffusers.StableDiffusion3Pipeline(
            transformer=sd3_transformer(seed, **changes),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae(seed),
            text_encoder=clip(seed, "CLIPTextModelWithProjection"),
            tokenizer=clip_tokenizer(),
            text_encoder_2=clip(seed + 1, "CLIPTextModelWithProjection"),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=t5(seed),
            tokenizer_3=t5_tokenizer(),
        )
    )


def flux(seed: int = 0, **changes: Any) -> Any:
    """A `FluxPipeline` with its two text encoders. `changes` go to the transformer's config."""
    import diffusers

    return quiet(
        diffusers.FluxPipeline(
            transformer=flux_transformer(seed, in_channels=4 * LATENT_CHANNELS, **changes),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=vae(seed),
            text_encoder=clip(seed, "CLIPTextModel"),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5(seed),
            tokenizer_2=t5_tokenizer(),
        )
    )


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sd3_transformer(seed: int = 0, **changes: Any) -> Any:
    import diffusers

    torch.manual_seed(seed)
    config = {
        "sample_size": 8, "patch_size": PATCH, "in_channels": LATENT_CHANNELS, "out_channels": LATENT_CHANNELS,
        "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": JOINT,
        "caption_projection_dim": 32, "pooled_projection_dim": POOLED, "pos_embed_max_size": 32,
        "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    }  # fmt: skip
    return diffusers.SD3Transformer2DModel(**{**config, **changes}).eval()


def flux_transformer(seed: int = 0, **changes: Any) -> Any:
    import diffusers

    torch.manual_seed(seed)
    config = {
        "patch_size": 1, "in_channels": LATENT_CHANNELS, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "joint_attention_dim": JOINT, "pooled_projection_dim": POOLED, "axes_dims_rope": (2, 2, 4),
        "guidance_embeds": True,
    }  # fmt: skip
    return diffusers.FluxTransformer2DModel(**{**config, **changes}).eval()


def vae(seed: int = 0) -> Any:
    import diffusers

    torch.manual_seed(seed)
    return diffusers.AutoencoderKL(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1,
        latent_channels=LATENT_CHANNELS, norm_num_groups=4, shift_factor=0.06, scaling_factor=1.5,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip


def clip(seed: int, kind: str) -> Any:
    import transformers

    torch.manual_seed(seed)
    words = len(clip_words())
    config = transformers.CLIPTextConfig(
        **TEXT, vocab_size=words, max_position_embeddings=32, bos_token_id=words - 2, eos_token_id=words - 1,
        pad_token_id=words - 1,
    )  # fmt: skip
    return getattr(transformers, kind)(config).eval()


def t5(seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=len(t5_pieces()), d_model=JOINT, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5EncoderModel(config).eval()


# ---- tokenizers that spell: every letter is a token


def clip_words() -> list[str]:
    letters = string.ascii_lowercase
    return [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]


def clip_tokenizer() -> Any:
    import transformers

    words = {word: number for number, word in enumerate(clip_words())}
    return transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=32)


def t5_pieces() -> list[tuple[str, float]]:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("\N{LOWER ONE EIGHTH BLOCK}", -2.0)]
    return special + [(letter, -3.0) for letter in string.ascii_lowercase]


def t5_tokenizer() -> Any:
    import transformers

    return transformers.T5Tokenizer(vocab=t5_pieces(), extra_ids=0)
