"""distribute() with pipeline stages, experts and other axes of the mesh; and the plans derived from a module alone."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.modules.auto_plan import make_plan
from dtorch.modules.blocks import assign, blocks

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        yield


@lru_cache
def mesh(**axes: int) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


# ---- a decoder with names of its own


class Mixer(nn.Module):
    """Attention whose projections have no telling names: queries, keys, values, and what takes them together."""

    def __init__(self, size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head = num_heads, size // num_heads
        self.one, self.two = nn.Linear(size, size), nn.Linear(size, num_kv_heads * self.head)
        self.three, self.four = nn.Linear(size, num_kv_heads * self.head), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.one, self.two, self.three))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.four(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(size, inner), nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x).sigmoid() * self.b(x))


class Step(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.before, self.mixer = nn.LayerNorm(size), Mixer(size, 6, 2)
        self.between, self.gated = nn.LayerNorm(size), Gated(size, 33)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.before(x)) * scale
        return x + self.gated(self.between(x))


class Tower(nn.Module):
    """The last layer shares its weights with the first table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 24)
        self.steps = nn.ModuleList([Step(24) for _ in range(3)])
        self.last = nn.Linear(24, 61, bias=False)
        self.last.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 24))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.table(ids)
        for step in self.steps:
            x = step(x, self.scale)
        return self.last(x + first)  # what was on the first stage is wanted on the last


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


IDS = torch.arange(21).reshape(3, 7)


MESHES = [
    {"tp": 2}, {"tp": 5}, {"pp": 2}, {"pp": 3, "tp": 2}, {"dp": 2, "pp": 3}, {"ulysess_cp": 2, "tp": 2},
    {"pp": 2, "ring_cp": 2},
]  # fmt: skip


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_auto_on_any_mesh(axes: dict[str, int]) -> None:
    ours = dtorch.distribute(tower(), mesh(**axes))
    for _ in range(2):
        assert_close(ours(IDS).to_torch(), tower()(IDS))  # type: ignore[attr-defined]
    assert ours.last.weight is ours.table.weight


def test_auto_finds_attention_and_pairs_by_structure() -> None:
    styles = {name: (s.kind, s.block) for name, s in make_plan(tower(), mesh(tp=2), "auto").styles.items()}
    assert styles["steps.0.mixer.one"] == ("colwise", 12)  # three heads of four, for each key/value head
    assert styles["steps.0.mixer.two"] == styles["steps.0.mixer.three"] == ("colwise", 4)
    assert styles["steps.0.mixer.four"] == ("rowwise", 12)
    assert [styles[f"steps.2.gated.{name}"][0] for name in "abc"] == ["colwise", "colwise", "rowwise"]
    assert (styles["table"][0], styles["last"][0]) == ("vocab", "colwise")
    fewer = make_plan(tower(), mesh(tp=3), "auto").styles  # two key/value heads, three devices
    assert (fewer["steps.0.mixer.one"].block, fewer["steps.0.mixer.two"].kind) == (4, "replicate")


def test_auto_pairs_in_chains_and_glued_halves() -> None:
    chain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    kinds = {name: s.kind for name, s in make_plan(chain, mesh(tp=2), "auto").styles.items()}
    assert kinds == {"0": "colwise", "2": "rowwise"}

    class Glued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 24), nn.Linear(12, 6)

    kinds = {name: s.kind for name, s in make_plan(Glued(), mesh(tp=2), "auto").styles.items()}
    assert kinds == {"wide": "colwise", "narrow": "rowwise"}


def test_fused_projections_are_cut_between_heads() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=67, n_embd=36, n_layer=1, n_head=3, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    plain = transformers.GPT2Model(config).eval()
    ours = dtorch.distribute(copy.deepcopy(plain), mesh(tp=2))
    assert ours.h[0].attn.c_attn.weight.placements == (Shard(1, 12),)
    seen = {}
    ours.h[0].attn.c_proj.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    assert_close(ours(IDS).last_hidden_state.to_torch(), plain(IDS).last_hidden_state)
    assert seen["x"].placements == (Shard(2, 12),)  # no head was gathered on the way


# ---- stages by name


def test_stages_by_name() -> None:
    two = mesh(pp=2, tp=2)
    first, last = two.unbind("pp")
    ours = dtorch.distribute(
        tower(), two, {"table": "stage:0", "steps.1": "stage:1", "steps.2.*": "stage:0 replicate", "steps.1.gated.a": "colwise"}
    )
    where = {name: value.device_mesh for name, value in ours.named_parameters()}  # type: ignore[attr-defined]
    assert where["steps.0.gated.a.weight"] == first  # goes with what is defined before it
    assert where["steps.1.gated.a.weight"] == where["steps.1.before.bias"] == last
    assert where["steps.2.gated.a.weight"] == first
    assert ours.steps[1].gated.a.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
    assert ours.scale.device_mesh == first
    assert_close(ours(IDS).to_torch(), tower()(IDS))  # type: ignore[attr-defined]


def test_only_what_a_stage_needs_is_there() -> None:
    ours = dtorch.distribute(tower(), mesh(pp=3), "auto")
    counts = [0, 0, 0]
    for value in ours.parameters():
        counts[value.device_mesh.devices[0]] += 1  # type: ignore[attr-defined]
    assert counts == [19, 18, 18]  # the table, and a layer of 18 each


def test_assign() -> None:
    assert assign(7, 3) == [0, 0, 1, 1, 2, 2, 2]
    assert blocks(tower()) == ["steps.0", "steps.1", "steps.2"]


@pytest.mark.parametrize(
    ("axes", "plan", "error", "text"),
    [
        ({"pp": 2}, {"steps.0": "stage:2"}, ValueError, "on stage 2, but the mesh axis 'pp' has 2 stages, 0 to 1"),
        ({"tp": 2}, {"steps.0": "stage:1"}, dtorch.MeshError, "axis 'pp', which .* lacks: it has 'tp'"),
        ({"tp": 2}, {"steps.*": "expert:ep"}, dtorch.MeshError, "axis 'ep', which .* lacks"),
        ({"pp": 4}, "auto", ValueError, "a stack of 3 layers, which do not make 4 pipeline stages"),
        ({"tp": 2}, {"last": "stage"}, ValueError, "'stage' is no style"),
        ({"tp": 2}, {"last": "colwise rowwise"}, ValueError, "'colwise rowwise' is no style"),
        ({"tp": 9}, {"steps.0.gated.a": "colwise/6"}, ValueError, "over the 9 devices .* its dim 0 has 6 blocks of 6"),
        ({"tp": 2}, {3: "colwise"}, TypeError, "keys are texts or compiled patterns, not int"),
    ],
)
def test_bad_plans(axes: dict[str, int], plan: Any, error: type[Exception], text: str) -> None:
    module = tower()
    with pytest.raises(error, match=text):
        dtorch.distribute(module, mesh(**axes), plan)
    assert type(module.last.weight) is nn.Parameter  # nothing was touched


def test_sizes_that_cannot_be_split_are_named_before_any_forward() -> None:
    with pytest.raises(ValueError, match=r"'0.weight' cannot be split .* over the 5 devices .* its dim 0 has 3 elements"):
        dtorch.distribute(nn.Sequential(nn.Linear(4, 3)), mesh(tp=5), {"0": "colwise"})


# ---- experts


@pytest.mark.parametrize("axes", [{"tp": 1}, {"tp": 2}, {"ep": 3}, {"dp": 2, "ep": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_experts(axes: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=41, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=5, num_experts_per_tok=2,
    )  # fmt: skip
    plain = transformers.MixtralModel(config).eval()
    ours = dtorch.distribute(copy.deepcopy(plain), mesh(**axes))
    made, want = ours(IDS).last_hidden_state, plain(IDS).last_hidden_state
    experts = ours.layers[0].mlp.experts
    if axes == {"tp": 1}:
        assert torch.equal(made.to_torch(), want)
        assert experts.config is ours.config
    else:
        assert_close(made.to_torch(), want, rtol=1e-4, atol=1e-5)
        axis = experts.down_proj.device_mesh.axis("ep" if "ep" in axes else "tp")
        assert experts.down_proj.placements[axis] == experts.gate_up_proj.placements[axis] == Shard(0)
        assert experts.config._experts_implementation == "dtorch"
    assert plain.layers[0].mlp.experts.config._experts_implementation != "dtorch"


# ---- what cannot be compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its tracer
def test_compilers_are_refused() -> None:
    ours = dtorch.distribute(nn.Sequential(nn.Linear(4, 4)), mesh(tp=2))
    x = torch.ones(2, 4)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace of a distributed module.*use dtorch\.compile"):
        torch.jit.trace(ours, (x,), check_trace=False)
    with pytest.raises(AttributeError, match=r"torch\.jit\.script of a distributed module"):
        torch.jit.script(ours)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda row: row * 2)(ours(x))
    assert ours(x).placements == (Replicate(),)  # and it still runs


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (torch.eye(4).to_sparse(), r"of layout torch\.sparse_coo"),
        (torch.ones(4, device="meta"), "on the meta device"),
    ],
    ids=["sparse", "meta"],
)
def test_plain_tensors_that_cannot_be_mixed_in_are_named(other: torch.Tensor, kind: str) -> None:
    x = dtorch.distribute(nn.Linear(4, 4), mesh(tp=2))(torch.ones(2, 4))
    assert_close((x + torch.ones(4)).to_torch(), x.to_torch() + 1)
    with pytest.raises(TypeError, match=rf"torch\.add: argument 1 is a plain tensor {kind}"):
        x + other
    with pytest.raises(TypeError, match=rf"linear: argument 1 is a plain tensor {kind}"):
        nn.functional.linear(x, other)
    with pytest.raises(TypeError, match=rf"cat: argument 0 is a plain tensor {kind}"):
        torch.cat([x, other])


def test_weights_of_another_shape() -> None:
    ours = dtorch.distribute(nn.Sequential(nn.Linear(4, 4)), mesh(tp=2))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: .*\[3, 4\].*\[4, 4\]"):
        ours.load_state_dict({"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(4)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.bias"'):
        ours.load_state_dict({"0.weight": torch.zeros(4, 4)})
