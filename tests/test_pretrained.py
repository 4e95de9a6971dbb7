"""Directories of transformers and diffusers, straight onto a mesh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TINY: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "tied": ("LlamaForCausalLM", "LlamaConfig", {**TINY, "tie_word_embeddings": True}),
    "experts": ("MixtralForCausalLM", "MixtralConfig", {**TINY, "num_local_experts": 3}),
    "conv1d": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 37, "n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 64}),
    "legacy": ("BertModel", "BertConfig", {**TINY, "num_key_value_heads": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_directory_of_transformers(tmp_path: Path, case: str) -> None:
    class_name, config_name, facts = CASES[case]
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    plain = cls(getattr(transformers, config_name)(**facts)).eval()
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    mesh = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    model = dtorch.from_pretrained(tmp_path, mesh)
    ids = torch.tensor([[1, 5, 9, 30, 2]])
    with torch.no_grad():
        wanted = plain(ids)[0]
    torch.testing.assert_close(model(ids)[0].to_torch(), wanted)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name].to_torch(), value)
    with torch.device("meta"):  # buffers too: what is not saved is made anew
        lost = cls(plain.config)
    dtorch.distribute(lost, mesh, "auto", weights=tmp_path).eval()
    torch.testing.assert_close(lost(ids)[0].to_torch(), wanted)


def test_a_model_within_a_larger_one(tmp_path: Path) -> None:
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval()
    plain.model.save_pretrained(tmp_path / "inner")
    outer = transformers.LlamaForCausalLM(plain.config)
    dtorch.distribute(outer, dtorch.DeviceMesh("cpu", [0, 1]))
    with pytest.raises(RuntimeError, match=r'Missing key.*"lm_head.weight"'):
        dtorch.load_into(outer, tmp_path / "inner")
    keys = dtorch.load_into(outer, tmp_path / "inner", strict=False)
    assert keys == (["lm_head.weight"], [])
    assert torch.equal(outer.model.norm.weight.to_torch(), plain.model.norm.weight)


def test_what_a_directory_lacks_is_said(tmp_path: Path) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        dtorch.from_pretrained(tmp_path, mesh)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForNothing"]}')
    with pytest.raises(ValueError, match=r"LlamaForNothing.*model_class="):
        dtorch.from_pretrained(tmp_path, mesh)


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8,), norm_num_groups=2,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    )
    plain = diffusers.DDIMPipeline(model, diffusers.DDIMScheduler(num_train_timesteps=10))
    plain.save_pretrained(tmp_path)
    pipe = dtorch.from_pretrained(tmp_path, dtorch.DeviceMesh("cpu", [0, 1]), None)
    assert isinstance(pipe.unet.conv_in.weight, dtorch.TorchTensor)
    x, t = torch.randn(1, 1, 8, 8), torch.tensor([3])
    with torch.no_grad():
        torch.testing.assert_close(pipe.unet(x, t)[0].to_torch(), model.eval()(x, t)[0])
