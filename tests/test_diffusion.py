"""Diffusers' models and whole pipelines, unmodified, on meshes: the same images as with plain torch."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, TorchTensor
from tests._untimed import untimed

diffusers = pytest.importorskip("diffusers")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
tiny = pytest.importorskip("tiny_diffusion")
sys.path.pop(0)

pytestmark = pytest.mark.filterwarnings("default")  # what diffusers warns about is not ours


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    import transformers

    transformers.logging.set_verbosity_error()
    diffusers.logging.set_verbosity_error()
    with torch.no_grad(), warnings.catch_warnings():
        yield


@lru_cache
def mesh(**axes: int) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


TP1 = {"tp": 1}


def check(ours: Any, theirs: torch.Tensor, axes: dict[str, int], atol: float = 1e-5) -> None:
    """The same bits on one device, and close to them on several."""
    assert type(ours) is TorchTensor
    if axes == TP1:
        assert torch.equal(ours.to_torch(), theirs)
    else:
        assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=atol)


# ---- models


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    ).eval()  # fmt: skip


def wave(*shape: int) -> torch.Tensor:
    return torch.linspace(-7, 7, torch.Size(shape).numel()).sin().view(shape)


IMAGE, LATENT = wave(2, 3, 16, 16), wave(2, 4, 8, 8)
TEXT, POOLED, TIMES = wave(2, 5, 32), wave(2, 16), torch.tensor([3.0, 700.0])
PLACES = torch.stack([torch.zeros(6), torch.arange(6.0), torch.ones(6)], dim=1)
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Any, ...]]]] = {
    "sd3": (
        tiny.sd3_transformer,
        lambda m: m(LATENT, encoder_hidden_states=TEXT, pooled_projections=POOLED, timestep=TIMES, return_dict=False),
    ),
    "flux": (
        tiny.flux_transformer,
        lambda m: m(
            wave(2, 6, 4), encoder_hidden_states=TEXT, pooled_projections=POOLED, timestep=TIMES / 1000, img_ids=PLACES,
            txt_ids=torch.zeros(5, 3), guidance=torch.tensor([3.5, 3.5]), return_dict=False,
        ),
    ),
    "vae": (tiny.vae, lambda m: (m.encode(IMAGE).latent_dist.mode(), m.decode(LATENT).sample, m(IMAGE).sample)),
    "unet": (unet, lambda m: (m(LATENT, TIMES, TEXT[..., :16]).sample, m(LATENT, 5, TEXT[..., :16]).sample)),
}  # fmt: skip


@pytest.mark.parametrize("axes", [TP1, {"tp": 2}, {"tp": 3}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, axes: dict[str, int]) -> None:
    make, call = MODELS[name]
    for ours, theirs in zip(call(dtorch.distribute(make(), mesh(**axes))), call(make()), strict=True):
        check(ours, theirs, axes)


# ---- pipelines

PIPELINES = {"sd3": tiny.sd3, "flux": tiny.flux}


@lru_cache
def pipeline(name: str) -> Any:
    return PIPELINES[name]()


def run(pipe: Any, **more: Any) -> tuple[Any, list[tuple[int, float]]]:
    """The image, and what the callback was told."""
    steps: list[tuple[int, float]] = []

    def note(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append((step, round(float(time), 3)))
        return {"latents": tensors["latents"] * 1.01}

    options = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8, "output_type": "pt", **more}
    options.setdefault("callback_on_step_end", note)
    return pipe("a red fox", generator=torch.Generator().manual_seed(5), **options).images, steps


@lru_cache
def plain_image(name: str) -> tuple[torch.Tensor, list[tuple[int, float]]]:
    return run(pipeline(name))


SCHEMES = [
    TP1, {"dp": 2}, {"tp": 3}, {"ulysess_cp": 2}, {"ring_cp": 3}, {"pp": 2}, {"dp": 2, "tp": 2, "ulysess_cp": 2},
    {"ulysess_cp": 2, "ring_cp": 2}, {"pp": 2, "dp": 2, "ring_cp": 2},
]  # fmt: skip


@pytest.mark.parametrize("axes", SCHEMES, ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_under_every_scheme(name: str, axes: dict[str, int]) -> None:
    pipe = copy.copy(pipeline(name))
    pipe.transformer = dtorch.distribute(copy.deepcopy(pipe.transformer), mesh(**axes))
    (ours, ours_steps), (theirs, their_steps) = run(pipe), plain_image(name)
    check(ours, theirs, axes)
    assert ours_steps == their_steps


@pytest.mark.parametrize("axes", [TP1, {"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_a_pipeline_is_distributed_as_a_whole(axes: dict[str, int]) -> None:
    pipe = dtorch.distribute(tiny.sd3(), mesh(**axes))
    check(run(pipe)[0], plain_image("sd3")[0], axes)
    for part in (pipe.vae, pipe.text_encoder, pipe.text_encoder_3):
        assert all(type(value) is TorchTensor for value in part.parameters())
    (image,), _ = run(pipe, output_type="pil", callback_on_step_end=None)
    assert image.size == (16, 16)
    with pytest.raises(ValueError, match="is distributed already"):
        dtorch.distribute(pipe, mesh(**axes))


def test_what_is_split_where() -> None:
    transformer = dtorch.distribute(tiny.sd3_transformer(), mesh(dp=2, tp=2, ulysess_cp=2))
    seen = {}
    layer = transformer.transformer_blocks[1]
    layer.register_forward_pre_hook(lambda m, args, named: seen.update(named), with_kwargs=True)
    layer.attn.to_q.register_forward_hook(lambda m, args, out: seen.update(query=out))
    MODELS["sd3"][1](transformer)
    assert seen["hidden_states"].placements == (Shard(0), Replicate(), Shard(1))  # guidance, whole, tokens
    assert seen["encoder_hidden_states"].placements == (Shard(0), Replicate(), Shard(1))
    assert seen["query"].placements == (Shard(0), Shard(2), Shard(1))


def peak(axes: dict[str, int], sample_size: int, **changes: Any) -> int:
    """The most bytes that any device holds for a transformer while it runs; every time the same."""
    place = mesh(**axes)
    with untimed():
        others = [stats.allocated for stats in dtorch.memory_stats(place)]
        ours = dtorch.distribute(tiny.sd3_transformer(sample_size=sample_size, **changes), place)
        found = set()
        for _ in range(2):
            dtorch.synchronize()
            dtorch.memory_stats(place, reset_peak=True)
            ours(wave(2, 4, sample_size, sample_size), TEXT, POOLED, TIMES)
            dtorch.synchronize()
            found.add(max(stats.peak - old for stats, old in zip(dtorch.memory_stats(place), others, strict=True)))
    (bytes_held,) = found
    return bytes_held


def test_peak_memory_falls_with_the_mesh() -> None:
    weights = {"sample_size": 8, "attention_head_dim": 24, "caption_projection_dim": 96}
    whole = peak(TP1, **weights)
    assert peak({"tp": 2}, **weights) < 0.85 * whole
    assert peak({"pp": 2}, **weights) < 0.85 * whole
    tokens = {"sample_size": 60}
    whole = peak(TP1, **tokens)
    assert peak({"dp": 2}, **tokens) < 0.85 * whole
    assert peak({"ulysess_cp": 2}, **tokens) < 0.85 * whole
    assert peak({"dp": 2, "ring_cp": 2}, **tokens) < 0.7 * whole


# ---- first-block cache


@pytest.mark.parametrize("name", PIPELINES)
def test_first_block_cache_is_the_same_under_every_scheme(name: str) -> None:
    options = {"num_inference_steps": 6, "callback_on_step_end": None}
    pipe = copy.copy(pipeline(name))
    exact = run(pipe, **options)[0]
    with dtorch.first_block_cache(pipe.transformer, 0.35) as cache:
        theirs = run(pipe, **options)[0]
    assert 0 < cache.num_skipped < cache.num_calls == 6
    assert (theirs - exact).square().mean() < 1e-4  # 40 dB
    assert torch.equal(run(pipe, **options)[0], exact)  # it is off again
    for axes in (TP1, {"dp": 2, "tp": 2}, {"ring_cp": 2}, {"pp": 2}):
        pipe.transformer = dtorch.distribute(PIPELINES[name]().transformer, mesh(**axes))
        ours_cache = dtorch.first_block_cache(pipe.transformer, 0.35)
        check(run(pipe, **options)[0], theirs, axes)
        assert ours_cache.num_skipped == cache.num_skipped
        assert_close(ours_cache.changes, cache.changes, rtol=1e-3, atol=1e-4)


def test_first_block_cache_options_and_bad_input() -> None:
    transformer = tiny.sd3_transformer()
    cache = dtorch.first_block_cache(transformer, 1e9, max_skips=1)
    call = MODELS["sd3"][1]
    first = call(transformer)[0]
    for _ in range(4):
        assert_close(call(transformer)[0], first, rtol=1e-4, atol=1e-6)  # the same input: what is added is the same too
    assert (cache.num_calls, cache.num_skipped) == (5, 2)  # every other one
    cache.reset()
    call(transformer)
    assert cache.num_skipped == 2
    with pytest.raises(ValueError, match="has a cache"):
        dtorch.first_block_cache(transformer)
    cache.remove()
    assert torch.equal(call(transformer)[0], first)
    with pytest.raises(ValueError, match="Linear is a stack of 0 layers"):
        dtorch.first_block_cache(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="threshold must be 0 or more, not -1"):
        dtorch.first_block_cache(transformer, -1)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str"):
        dtorch.first_block_cache("transformer")  # type: ignore[arg-type]


def test_layers_that_give_different_shapes_are_not_cached() -> None:
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)])
    module.forward = lambda x: module.layers[1](module.layers[0](x))  # type: ignore[method-assign]
    dtorch.first_block_cache(module)
    with pytest.raises(ValueError, match=r"layer 'layers.1' gives \(\[2, 3\]\), the first layer \(\[2, 4\]\)"):
        module(torch.ones(2, 4))
