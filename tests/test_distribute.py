"""distribute(): plain torch and transformers modules on a mesh, beside the same modules without one."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, TorchTensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # what transformers warns about is not ours


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with torch.no_grad(), warnings.catch_warnings():
        yield


@lru_cache
def mesh(**axes: int) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


TP1, TP2, TP3, DP2 = {"tp": 1}, {"tp": 2}, {"tp": 3}, {"dp": 2}
MESHES = pytest.mark.parametrize("axes", [TP1, TP2, TP3, DP2, {"dp": 2, "tp": 2}], ids=str)

DECODER = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
ENCODER = {name: value for name, value in DECODER.items() if name not in ("num_key_value_heads", "eos_token_id")}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", DECODER),
    "qwen3": ("Qwen3", {**DECODER, "head_dim": 8}),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 4}),
    "gemma": ("Gemma", {**DECODER, "head_dim": 8}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": None, "pad_token_id": 0},
    ),
    "mixtral": ("Mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}  # fmt: skip


def causal(name: str, **changes: Any) -> Any:
    kind, config = CAUSAL[name]
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    made = getattr(transformers, kind + suffix)(getattr(transformers, f"{kind}Config")(**{**config, **changes}))
    return made.eval()


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**ENCODER)).eval()


def t5_encoder() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5EncoderModel(config).eval()


IDS = torch.tensor([[5, 7, 9, 11, 13, 2, 4], [3, 6, 1, 8, 10, 12, 14], [21, 22, 23, 24, 25, 26, 27]])
MASK = torch.ones_like(IDS).index_put_((torch.tensor([1, 1]), torch.tensor([0, 1])), torch.tensor(0))


def check(ours: Any, theirs: torch.Tensor, axes: dict[str, int]) -> None:
    """The same bits on one device, and close to them on several."""
    assert type(ours) is TorchTensor
    if axes == TP1:
        assert torch.equal(ours.to_torch(), theirs)
    else:
        assert_close(ours.to_torch(), theirs, rtol=1e-5, atol=2e-6)


# ---- whole models


@MESHES
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(name: str, axes: dict[str, int]) -> None:
    plain, ours = causal(name), dtorch.distribute(causal(name), mesh(**axes))
    check(ours(IDS).logits, plain(IDS).logits, axes)
    check(ours(IDS, attention_mask=MASK).logits, plain(IDS, attention_mask=MASK).logits, axes)
    if axes in (TP1, TP3, DP2):
        options = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(ours.generate(IDS, **options).to_torch(), plain.generate(IDS, **options))


@MESHES
@pytest.mark.parametrize("make", [bert, t5_encoder])
def test_encoders(make: Callable[[], Any], axes: dict[str, int]) -> None:
    plain, ours = make(), dtorch.distribute(make(), mesh(**axes))
    for options in ({}, {"attention_mask": MASK}):
        check(ours(IDS, **options).last_hidden_state, plain(IDS, **options).last_hidden_state, axes)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 67, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
    ),
    "clip": (
        "CLIPModel", "CLIPConfig",
        {"text_config": {**SIZES, "vocab_size": 67, "max_position_embeddings": 16, "eos_token_id": 66},
         "vision_config": {**SIZES, "image_size": 16, "patch_size": 8}, "projection_dim": 16},
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {"vocab_size": 67, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": 16,
         "max_target_positions": 16, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "resnet": (
        "ResNetModel", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "convnext": (
        "ConvNextModel", "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
    ),
}  # fmt: skip
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
SOUNDS = torch.linspace(-1, 1, 2 * 8 * 32).cos().view(2, 8, 32)


def seeded(call: Callable[[], Any]) -> Any:
    for seed in (torch.manual_seed, dtorch.manual_seed):
        seed(3)
    return call()


CALLS: dict[str, Callable[[Any], Any]] = {
    "t5": lambda m: (m(input_ids=IDS, decoder_input_ids=IDS[:, :4]).logits, m.generate(IDS, max_new_tokens=3)),
    "clip": lambda m: [m(input_ids=IDS[:2], pixel_values=IMAGES)[key] for key in ("text_embeds", "image_embeds")],
    "whisper": lambda m: (
        m(input_features=SOUNDS, decoder_input_ids=IDS[:2, :4]).logits,
        m.generate(SOUNDS, max_new_tokens=3),
        m.generate(SOUNDS, max_new_tokens=3, num_beams=3, do_sample=False),
        m.generate(SOUNDS, max_new_tokens=3, do_sample=False, cache_implementation="static"),
        seeded(lambda: m.generate(SOUNDS, max_new_tokens=4, do_sample=True, top_k=20)),
    ),
    "resnet": lambda m: (m(IMAGES).pooler_output,),
    "convnext": lambda m: (m(IMAGES).pooler_output,),
}


@pytest.mark.parametrize("axes", [TP1, TP3, DP2], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name: str, axes: dict[str, int]) -> None:
    want = CALLS[name](any_model(name))
    for ours, theirs in zip(CALLS[name](dtorch.distribute(any_model(name), mesh(**axes))), want, strict=True):
        check(ours, theirs, axes)


GENERATE: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"cache_implementation": "static"},
    {"do_sample": True, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"eos_token_id": 40},
]


def generated(model: Any, options: dict[str, Any]) -> torch.Tensor:
    made = seeded(lambda: model.generate(IDS, attention_mask=MASK, max_new_tokens=4, **{"do_sample": False, **options}))
    return made.to_torch() if isinstance(made, TorchTensor) else made


@pytest.mark.parametrize("axes", [TP2, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("name", [*CAUSAL, "t5"])
def test_generate(name: str, axes: dict[str, int]) -> None:
    plain, ours = any_model(name), dtorch.distribute(any_model(name), mesh(**axes))
    for options in GENERATE if name == "llama" else GENERATE[:3]:
        assert torch.equal(generated(ours, options), generated(plain, options)), options


def any_model(name: str) -> Any:
    if name in CAUSAL:
        return causal(name)
    kind, config, options = OTHERS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()


def test_generate_samples_torchs_tokens() -> None:
    plain, ours = causal("llama"), dtorch.distribute(causal("llama"), mesh(tp=1))
    options = {"attention_mask": MASK, "max_new_tokens": 5, "do_sample": True, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(3)
    theirs = plain.generate(IDS, **options)
    dtorch.manual_seed(3)
    assert torch.equal(ours.generate(IDS, **options).to_torch(), theirs)


# ---- plans


def placed(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value.placements[0] for name, value in module.named_parameters()}  # type: ignore[attr-defined]


def test_auto_splits_between_heads_and_takes_the_models_own_plan() -> None:
    where = placed(dtorch.distribute(causal("llama"), mesh(tp=3)))
    attention = "model.layers.0.self_attn."
    assert where[attention + "q_proj.weight"] == Shard(0, 8)
    assert where[attention + "k_proj.weight"] == Replicate()  # two heads for three devices
    assert where[attention + "o_proj.weight"] == Shard(1, 8)
    assert where["model.layers.0.mlp.down_proj.weight"] == Shard(1)
    assert where["model.embed_tokens.weight"] == Shard(0)
    assert where["lm_head.weight"] == Shard(0)
    assert where["model.norm.weight"] == Replicate()


def test_auto_from_names_and_shapes() -> None:
    where = placed(dtorch.distribute(bert(), mesh(tp=2)))
    layer = "encoder.layer.1."
    assert where[layer + "attention.self.query.bias"] == Shard(0)
    assert where[layer + "attention.output.dense.weight"] == Shard(1)
    assert where[layer + "attention.output.dense.bias"] == Replicate()
    assert where[layer + "intermediate.dense.weight"] == Shard(0)
    assert where[layer + "output.dense.weight"] == Shard(1)
    assert where["pooler.dense.weight"] == Replicate()


def test_tied_weights_stay_tied() -> None:
    ours = dtorch.distribute(causal("llama", tie_word_embeddings=True), mesh(tp=2))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    check(ours(IDS).logits, causal("llama", tie_word_embeddings=True)(IDS).logits, TP2)


def pair() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 6))


X = torch.arange(18.0).reshape(3, 6) / 18


@pytest.mark.parametrize(
    ("plan", "first", "second"),
    [
        ("auto", Shard(0), Shard(1)),
        (None, Replicate(), Replicate()),
        ({"0": "colwise", "2": "rowwise"}, Shard(0), Shard(1)),
        ({"0": "rowwise", "2": "colwise"}, Shard(1), Shard(0)),
        ({"*": "colwise", "2.weight": "replicate"}, Shard(0), Replicate()),
        ({re.compile("[02]"): "colwise/2:tp"}, Shard(0), Shard(0)),
        ({re.compile("[0]"): "colwise/3:tp"}, Shard(0, 3), Replicate()),
        ({"2.weight": "rowwise", "*": "colwise", "0": "replicate"}, Replicate(), Shard(0)),
    ],
)
@pytest.mark.parametrize("names", [("tp",), None])
def test_plans(plan: Any, first: Any, second: Any, names: Any) -> None:
    if names is None and isinstance(plan, dict) and any(":" in style for style in plan.values()):
        return
    ours = dtorch.distribute(pair(), dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=names), plan)
    where = placed(ours)
    assert (where["0.weight"], where["2.weight"]) == (first, second)
    made = ours(X)
    assert_close(made.to_torch(), pair()(X))
    assert made.placements == (Replicate(),)


def test_an_axis_of_one_device_costs_nothing() -> None:
    ours = dtorch.distribute(causal("llama"), mesh(dp=1, tp=1, ring_cp=1))
    assert {value.placements for value in ours.parameters()} == {(Replicate(),) * 3}  # type: ignore[attr-defined]
    assert not [name for name, part in ours.named_modules() if name and (part._forward_hooks or part._forward_pre_hooks)]
    assert not dtorch.explain(ours, inputs=IDS).communication
    made = ours(IDS).logits
    assert torch.equal(made.to_torch(), causal("llama")(IDS).logits)
    assert made.placements == (Replicate(),) * 3
    with pytest.raises(ValueError, match="cut at multiples of 64"):  # what a plan says is checked all the same
        dtorch.distribute(pair(), mesh(tp=1), {"0": "colwise/64"})


# ---- as before


@pytest.mark.parametrize("kind", ["plain", "native", "faced"])
def test_inputs(kind: str) -> None:
    ours = dtorch.distribute(pair(), mesh(dp=2, tp=2))
    native = dtorch.tensor(X, device_mesh=mesh(dp=2, tp=2), placements=[Shard(0), Replicate()])
    made = ours({"plain": X, "native": native, "faced": TorchTensor(native)}[kind])
    assert type(made) is TorchTensor
    assert made.placements == (Shard(0), Replicate())
    assert_close(made.to_torch(), pair()(X))


def test_input_on_another_mesh() -> None:
    ours = dtorch.distribute(pair(), mesh(tp=2))
    assert_close(ours(dtorch.tensor(X, device_mesh=mesh(dp=3))).to_torch(), pair()(X))


def test_state_dict_and_copies() -> None:
    ours = dtorch.distribute(pair(), mesh(tp=2))
    for name, value in pair().state_dict().items():
        assert torch.equal(ours.state_dict()[name].to_torch(), value)
    twin = copy.deepcopy(ours)
    ours.load_state_dict({name: value * 2 for name, value in pair().state_dict().items()})
    want = pair()
    assert_close(twin(X).to_torch(), want(X))
    want.load_state_dict({name: value * 2 for name, value in want.state_dict().items()})
    assert_close(ours(X).to_torch(), want(X))
    assert isinstance(ours[0].weight, torch.nn.Parameter)
    assert_close(ours.double()(X.double()).to_torch(), want.double()(X.double()))


class _Making(torch.nn.Module):
    """Makes tensors in its forward, and may fail."""

    def forward(self, x: torch.Tensor, fails: bool = False) -> Any:
        positions = torch.arange(x.shape[1], device=x.device)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        cache = torch.zeros(x.shape[0], 8, device=x.device)
        cache[:, positions] = x
        if fails:
            raise KeyError("on purpose")
        return {"sum": (positions * x, mask), "cache": [cache.index_add_(1, positions, x)]}


def test_factories_in_a_forward_are_recorded() -> None:
    ours, plain = dtorch.distribute(_Making(), mesh(dp=2), None), _Making()
    made, want = ours(X), plain(X)
    for a, b in zip((*made["sum"], *made["cache"]), (*want["sum"], *want["cache"]), strict=True):
        assert type(a) is TorchTensor
        assert torch.equal(a.to_torch(), b)
    assert type(torch.zeros(2)) is torch.Tensor
    with pytest.raises(KeyError, match="on purpose"):
        ours(X, fails=True)
    assert type(torch.zeros(2)) is torch.Tensor


def test_conv_net() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 8, 3, groups=8, padding=1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(8, 5),
        )  # fmt: skip
        return layers.eval()

    images = torch.randn(3, 3, 8, 8)
    for axes in (TP1, DP2, TP2):
        check(dtorch.distribute(make(), mesh(**axes))(images), make()(images), axes)


# ---- bad input


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        ({"model.layers.*.self_attn.q_prj": "colwise"}, ValueError, "matches no .*near it are .*q_proj"),
        ({"model.layers": "colwise"}, ValueError, r"without parameters of their own.*'model.layers.\*'"),
        ({"lm_head": "diagonal"}, ValueError, "'diagonal' is no style; there are colwise"),
        ({"lm_head": "colwise/0"}, ValueError, "is no style"),
        ({"lm_head": "colwise/99"}, ValueError, "multiples of 99, but its dim 0 has 67"),
        ({"lm_head": "colwise:tb"}, dtorch.MeshError, "axis 'tb', which .* lacks"),
        ("magic", ValueError, "must be a dict, 'auto' or None, not 'magic'"),
        (["colwise"], TypeError, "must be a dict"),
    ],
)
def test_bad_plans(plan: Any, error: type[Exception], text: str) -> None:
    module = causal("llama")
    with pytest.raises(error, match=text):
        dtorch.distribute(module, mesh(tp=2), plan)
    assert type(module.lm_head.weight) is torch.nn.Parameter  # nothing was touched


def test_bad_modules() -> None:
    ours = dtorch.distribute(pair(), mesh(tp=2))
    with pytest.raises(ValueError, match="it is distributed already, over DeviceMesh"):
        dtorch.distribute(ours, mesh(tp=2))
    with pytest.raises(ValueError, match="its part '0' is distributed already"):
        dtorch.distribute(torch.nn.Sequential(ours), mesh(tp=2))
    with pytest.raises(ValueError, match=r"'weight' is on a mesh already"):
        dtorch.distribute(ours[0], mesh(tp=2))
    with pytest.raises(ValueError, match="meta device"):
        dtorch.distribute(torch.nn.Linear(2, 2, device="meta"), mesh(tp=2))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got Tensor"):
        dtorch.distribute(X, mesh(tp=2))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="expected a DeviceMesh, got str"):
        dtorch.distribute(pair(), "cpu")  # type: ignore[arg-type]


def test_bad_shapes_are_torchs_errors() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dtorch.distribute(pair(), mesh(tp=2))(X[:, :4])


def test_tensors_without_dense_values_are_named() -> None:
    ours = dtorch.distribute(pair(), mesh(tp=2))
    with pytest.raises(TypeError, match=r"argument 0 is a plain tensor of layout torch\.sparse_coo"):
        ours(X.to_sparse())
    with pytest.raises(TypeError, match="argument 'input' is a plain tensor on the meta device"):
        ours(input=X.to("meta"))
    assert type(torch.zeros(2)) is torch.Tensor
