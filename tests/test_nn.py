"""dtorch.nn beside torch.nn: the same layers, numbers, state dicts and hooks."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, nn


def tp_mesh(tp: int) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))


def dp_tp_mesh() -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def on(mesh: DeviceMesh, x: torch.Tensor, *placements: dtorch.Placement) -> dtorch.Tensor:
    return dtorch.Tensor(x, device_mesh=mesh, placements=list(placements) or None, dtype=x.dtype)


def check_parameters(ours: nn.Module, theirs: torch.nn.Module) -> None:
    values = dict(theirs.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == set(values)
    for name, param in ours.named_parameters():
        assert isinstance(param, dtorch.Tensor)
        assert isinstance(param, nn.Parameter)
        assert torch.equal(param.to_torch(), values[name]), name


# ---- parallel layers

LINEARS: dict[str, tuple[Any, Any, Any, Any]] = {  # placements of weight, bias and, for a replicated input, output
    "ColumnParallelLinear": (Shard(0), Shard(0), Shard(1)),  # type: ignore[dict-item]
    "ColumnParallelLinearWithReplicateOutput": (Shard(0), Shard(0), Replicate()),  # type: ignore[dict-item]
    "ColumnParallelLinearWithReplicateInputOutput": (Shard(0), Shard(0), Replicate()),  # type: ignore[dict-item]
    "RowParallelLinear": (Shard(1), Partial(), Partial()),  # type: ignore[dict-item]
    "RowParallelLinearWithReplicateOutput": (Shard(1), Partial(), Replicate()),  # type: ignore[dict-item]
    "ReplicateParallelLinear": (Replicate(), Replicate(), Replicate()),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("bias", [True, False])
def test_parallel_linear_is_torchs_linear(name: str, tp: int, bias: bool) -> None:
    mesh = tp_mesh(tp)
    torch.manual_seed(3)
    theirs = torch.nn.Linear(7, 5, bias=bias)
    dtorch.manual_seed(3)
    ours = getattr(nn, name)(7, 5, bias=bias, device_mesh=mesh)
    weight, bias_placement, out_placement = LINEARS[name]
    assert ours.weight.placements == (weight,)
    assert ours.bias is None or ours.bias.placements == (bias_placement,)
    check_parameters(ours, theirs)
    x = torch.randn(4, 7)
    out = ours(on(mesh, x))
    assert out.placements == (out_placement,)
    assert_close(out.to_torch(), theirs(x).detach())


@pytest.mark.parametrize("name", LINEARS)
def test_only_the_axis_named_tp_is_split(name: str) -> None:
    x = torch.randn(4, 6)
    for mesh, has_tp in ((dp_tp_mesh(), True), (DeviceMesh("cpu", [0, 1]), False)):
        layer = getattr(nn, name)(6, 4, device_mesh=mesh)
        expected = (Replicate(), LINEARS[name][0]) if has_tp else (Replicate(),)
        assert layer.weight.placements == expected
        out = layer(on(mesh, x, Shard(0), Replicate()) if has_tp else on(mesh, x))
        if has_tp:
            assert out.placements == (Shard(0), LINEARS[name][2])
        state = {key: value.to_torch() for key, value in layer.state_dict().items()}
        assert_close(out.to_torch(), torch.nn.functional.linear(x, state["weight"], state["bias"]))


@pytest.mark.parametrize("tp", [2, 3])
def test_column_then_row_needs_no_communication_between(tp: int) -> None:
    mesh = tp_mesh(tp)
    with mesh:
        up, down = nn.ColumnParallelLinear(5, 7), nn.RowParallelLinearWithReplicateOutput(7, 5)
    x = torch.randn(3, 5)
    hidden = up(on(mesh, x))
    assert hidden.placements == (Shard(1),)
    out = down(hidden)
    assert out.placements == (Replicate(),)
    w = [p.to_torch() for p in (up.weight, up.bias, down.weight, down.bias)]
    linear = torch.nn.functional.linear
    assert_close(out.to_torch(), linear(linear(x, w[0], w[1]), w[2], w[3]))


def test_block_keeps_heads_whole() -> None:
    mesh = tp_mesh(2)
    with mesh:
        column = nn.ColumnParallelLinear(4, 12, block=4)
        row = nn.RowParallelLinear(12, 4, block=4)
        even = nn.ColumnParallelLinear(4, 8, block=4)
    assert [tuple(s.shape) for s in column.weight.to_shards()] == [(8, 4), (4, 4)]
    assert even.weight.placements == (Shard(0),)
    x = torch.randn(3, 4)
    hidden = column(on(mesh, x))
    assert hidden.view(3, 3, 4).placements == (Shard(1),)
    assert row(hidden).placements == (Partial(),)
    assert "block=4" in repr(column)


@pytest.mark.parametrize(("num_devices", "of_queries", "of_keys"), [(2, Shard(0, 6), Shard(0, 2)), (3, Shard(0), Shard(0)),
                                                                    (4, Shard(0, 2), Replicate())])  # fmt: skip
def test_groups_stay_whole_while_there_are_enough(num_devices: int, of_queries: Any, of_keys: Any) -> None:
    """9 query heads of 2 features over 3 key/value heads."""
    with tp_mesh(num_devices):
        queries = nn.ColumnParallelLinear(4, 18, block=2, groups=3)
        keys = nn.ColumnParallelLinear(4, 6, block=2, groups=3)
        out = nn.RowParallelLinearWithReplicateOutput(18, 4, block=2, groups=3)
        x = dtorch.randn(5, 4)
    assert queries.weight.placements == queries.bias.placements == (of_queries,)
    assert keys.weight.placements == keys.bias.placements == (of_keys,)
    assert out.weight.placements == (Shard(1, of_queries.block),)
    assert "block=2, groups=3" in repr(keys)
    theirs = [torch.nn.Linear(4, 18), torch.nn.Linear(4, 6), torch.nn.Linear(18, 4)]
    for layer, other in zip((queries, keys, out), theirs, strict=True):
        layer.load_state_dict(other.state_dict())
    plain = x.to_torch()
    assert_close(keys(x).to_torch(), theirs[1](plain), rtol=1e-5, atol=1e-6)
    assert_close(out(queries(x)).to_torch(), theirs[2](theirs[0](plain)), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="18 features are not groups=4 of whole blocks"):
        nn.ColumnParallelLinear(4, 18, groups=4)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_embedding_with_replicate_output(tp: int) -> None:
    mesh = tp_mesh(tp)
    torch.manual_seed(1)
    theirs = torch.nn.Embedding(10, 7, padding_idx=2)
    dtorch.manual_seed(1)
    ours = nn.EmbeddingWithReplicateOutput(10, 7, padding_idx=2, device_mesh=mesh)
    assert ours.weight.placements == (Shard(1),)
    check_parameters(ours, theirs)
    ids = torch.tensor([[1, 2, 9], [0, 0, 3]])
    out = ours(on(mesh, ids))
    assert out.placements == (Replicate(),)
    assert torch.equal(out.to_torch(), theirs(ids).detach())


# ---- state


@pytest.mark.parametrize("name", LINEARS)
def test_full_state_dict_splits_itself_and_comes_back(name: str) -> None:
    mesh = tp_mesh(3)
    layer = getattr(nn, name)(7, 5, device_mesh=mesh)
    placements = [p.placements for p in layer.parameters()]
    state = {"weight": torch.randn(5, 7), "bias": torch.randn(5)}
    assert not any(layer.load_state_dict(state))
    assert [p.placements for p in layer.parameters()] == placements
    back = layer.state_dict()
    assert list(back) == ["weight", "bias"]
    for key, value in back.items():
        assert isinstance(value, dtorch.Tensor)
        assert torch.equal(value.to_torch(), state[key])


def test_state_dict_moves_between_meshes() -> None:
    here = nn.ColumnParallelLinear(7, 5, device_mesh=tp_mesh(3))
    there = nn.RowParallelLinear(7, 5, device_mesh=tp_mesh(2))
    there.load_state_dict(here.state_dict())
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a.to_torch(), b.to_torch())
    assert there.weight.placements == (Shard(1),)


def test_load_state_dict_reports_as_torch_does() -> None:
    state = {"weight": torch.zeros(5, 5), "more": torch.zeros(1)}
    with pytest.raises(RuntimeError) as theirs:
        torch.nn.Linear(7, 5).load_state_dict(state)
    with pytest.raises(RuntimeError) as ours:
        nn.Linear(7, 5).load_state_dict(state)
    assert str(ours.value) == str(theirs.value)
    assert list(state) == ["weight", "more"]
    assert isinstance(state["weight"], torch.Tensor)
    missing, unexpected = nn.Linear(7, 5).load_state_dict({"more": torch.zeros(1)}, strict=False)
    assert (missing, unexpected) == (["weight", "bias"], ["more"])


def test_load_state_dict_casts_or_assigns() -> None:
    layer = nn.Linear(3, 2, bias=False, device_mesh=tp_mesh(2))
    values = torch.randn(2, 3, dtype=torch.float64)
    layer.load_state_dict({"weight": values})
    assert torch.equal(layer.weight.to_torch(), values.float())
    layer.load_state_dict({"weight": values}, assign=True)
    assert layer.weight.dtype == torch.float64
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight.to_torch(), values)


def test_buffers_are_state_too() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", dtorch.ones(3))
            self.register_buffer("scratch", dtorch.zeros(3), persistent=False)

    with tp_mesh(2):
        module = Scale()
    module.load_state_dict({"scale": torch.arange(3.0)})
    assert module.scale.to_torch().tolist() == [0, 1, 2]
    assert list(module.state_dict()) == ["scale"]
    assert [name for name, _ in module.named_buffers()] == ["scale", "scratch"]
    module.scale = dtorch.zeros(3)
    assert list(module.state_dict()) == ["scale"]


# ---- module


def test_deepcopy_is_apart() -> None:
    layer = nn.ColumnParallelLinearWithReplicateOutput(4, 3, device_mesh=tp_mesh(2))
    twin = copy.deepcopy(layer)
    twin.weight.zero_()
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.placements == layer.weight.placements
    assert layer.weight.abs().sum().item() > 0
    assert twin(on(tp_mesh(2), torch.ones(1, 4))).shape == (1, 3)


def test_conversions_keep_the_parameters() -> None:
    layer = nn.Linear(4, 3, device_mesh=tp_mesh(2))
    weight = layer.weight
    assert layer.to(torch.float64) is layer
    assert layer.weight is weight
    assert weight.dtype == torch.float64
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    layer.half()
    assert weight.dtype == torch.float16
    layer.to(tp_mesh(3))
    assert weight.device_mesh == tp_mesh(3)
    assert sum(p.numel() for p in layer.parameters()) == 15
    layer.requires_grad_(False)
    assert not weight.requires_grad


def test_plain_tensor_is_no_parameter() -> None:
    layer = nn.Linear(4, 3)
    with pytest.raises(TypeError, match=r"dtorch\.nn\.Parameter"):
        layer.register_parameter("extra", dtorch.zeros(3))
    with pytest.raises(TypeError):
        layer.weight = dtorch.zeros(3, 4)
    layer.extra = dtorch.zeros(3)
    layer.extra = nn.Parameter(dtorch.zeros(3))
    layer.bias = None
    assert [name for name, _ in layer.named_parameters()] == ["weight", "extra"]
    layer.more = torch.nn.Parameter(dtorch.ones(2))
    assert layer.more.requires_grad
    assert isinstance(layer.more, nn.Parameter)
    assert not isinstance(dtorch.zeros(3), nn.Parameter)


def test_containers_and_apply() -> None:
    with tp_mesh(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)}))
        params = nn.ParameterList([nn.Parameter(dtorch.zeros(2))])
    names = [name for name, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.a.weight", "2.a.bias"]
    assert isinstance(model[0], torch.nn.Linear)
    assert len(list(params.parameters())) == 1
    seen: list[str] = []
    model.apply(lambda m: seen.append(type(m).__name__))
    assert seen.count("Linear") == 3
    assert not model.eval().training
    assert "Linear(in_features=4, out_features=4, bias=True)" in repr(model)


def test_functional_call_uses_other_values() -> None:
    layer = nn.Linear(3, 2, device_mesh=tp_mesh(2))
    before = layer.weight
    x = on(tp_mesh(2), torch.ones(1, 3))
    out = nn.functional_call(layer, {"weight": dtorch.zeros(2, 3, device_mesh=tp_mesh(2))}, (x,))
    assert torch.equal(out.to_torch()[0], layer.bias.to_torch())
    assert layer.weight is before


# ---- hooks


def test_redistribute_hooks() -> None:
    mesh = tp_mesh(2)
    calls: list[str] = []

    class Split(nn.Module):
        def redistribute_input(self, x: dtorch.Tensor, y: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor]:
            calls.append("input")
            return x.redistribute([Shard(0)]), y.redistribute([Shard(0)])

        def forward(self, x: dtorch.Tensor, y: dtorch.Tensor) -> dtorch.Tensor:
            assert x.placements == y.placements == (Shard(0),)
            calls.append("forward")
            return x + y

        def redistribute_output(self, out: dtorch.Tensor) -> dtorch.Tensor:
            calls.append("output")
            return out.redistribute([Replicate()])

    x = on(mesh, torch.ones(4))
    module = Split()
    assert module(x, x).placements == (Replicate(),)
    assert calls == ["input", "forward", "output"]
    identity = nn.Identity()
    identity.redistribute_input = lambda x: x.redistribute([Shard(0)])
    assert identity(x).placements == (Shard(0),)
    identity.redistribute_output = lambda x: x.redistribute([Replicate()])
    assert identity(x).placements == (Replicate(),)


def test_torch_hooks_run() -> None:
    mesh = tp_mesh(2)
    layer = nn.RowParallelLinearWithReplicateOutput(4, 3, device_mesh=mesh)
    x = on(mesh, torch.ones(2, 4))
    plain = layer(x).to_torch()
    calls: list[str] = []
    handles = [
        layer.register_forward_pre_hook(lambda m, args: calls.append("pre")),
        layer.register_forward_hook(lambda m, args, out: out * 2),
    ]
    assert_close(layer(x).to_torch(), 2 * plain)
    assert calls == ["pre"]
    for handle in handles:
        handle.remove()
    assert torch.equal(layer(x).to_torch(), plain)


# ---- torch's layers

LAYERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "Linear": (lambda m: m.Linear(6, 5), (3, 6)),
    "LayerNorm": (lambda m: m.LayerNorm(6), (3, 6)),
    "RMSNorm": (lambda m: m.RMSNorm(6, eps=1e-5), (3, 6)),
    "Flatten": (lambda m: m.Flatten(), (3, 2, 2)),
    "GroupNorm": (lambda m: m.GroupNorm(2, 4), (3, 4, 5)),
    "GELU": (lambda m: m.GELU(), (3, 6)),
    "GELU tanh": (lambda m: m.GELU(approximate="tanh"), (3, 6)),
    "SiLU": (lambda m: m.SiLU(), (3, 6)),
    "ReLU": (lambda m: m.ReLU(), (3, 6)),
    "Softmax": (lambda m: m.Softmax(dim=-1), (3, 6)),
    "LogSoftmax": (lambda m: m.LogSoftmax(dim=-1), (3, 6)),
    "Dropout eval": (lambda m: m.Dropout().eval(), (3, 6)),
    "Dropout train": (lambda m: m.Dropout(0.5), (3, 6)),
    "Conv2d": (lambda m: m.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
    "Conv1d": (lambda m: m.Conv1d(3, 4, 3), (2, 3, 6)),
    "BatchNorm1d eval": (lambda m: m.BatchNorm1d(4).eval(), (3, 4)),
    "Sequential": (lambda m: m.Sequential(m.Linear(6, 8), m.GELU(), m.Linear(8, 2)), (3, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_torchs(name: str) -> None:
    make, shape = LAYERS[name]
    mesh = tp_mesh(2)
    x = torch.randn(*shape)
    torch.manual_seed(5)
    theirs = make(torch.nn)
    expected = theirs(x).detach()
    dtorch.manual_seed(5)
    with mesh:
        ours = make(nn)
    out = ours(on(mesh, x))
    check_parameters(ours, theirs)
    assert_close(out.to_torch(), expected)


@pytest.mark.parametrize(
    "theirs", [torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.RMSNorm(4), torch.nn.Embedding(4, 4)]
)
def test_a_layer_takes_what_stands_in_its_weights_place(theirs: torch.nn.Module) -> None:
    """As pruning and parametrizations leave it: an attribute that is no parameter."""
    with tp_mesh(1) as mesh:
        sizes = (4, 4) if isinstance(theirs, (torch.nn.Linear, torch.nn.Embedding)) else (4,)
        ours = getattr(nn, type(theirs).__name__)(*sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.arange(4) if isinstance(theirs, torch.nn.Embedding) else torch.arange(16.0).reshape(4, 4)
    for module in (ours, theirs):
        weight = module._parameters.pop("weight")
        assert weight is not None
        module.weight = (weight * 2).detach()
    assert torch.equal(ours(on(mesh, x)).to_torch(), theirs(x))


def test_embedding_layer() -> None:
    mesh = tp_mesh(2)
    torch.manual_seed(5)
    theirs = torch.nn.Embedding(6, 4)
    dtorch.manual_seed(5)
    ours = nn.Embedding(6, 4, device_mesh=mesh)
    ids = torch.tensor([1, 5, 0])
    assert torch.equal(ours(on(mesh, ids)).to_torch(), theirs(ids).detach())


def test_layers_inside_torch_layers_count() -> None:
    mesh = tp_mesh(2)
    x = torch.randn(2, 5, 8)
    torch.manual_seed(5)
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    expected, weights = theirs(x, x, x)
    dtorch.manual_seed(5)
    ours = nn.MultiheadAttention(8, 2, batch_first=True, device_mesh=mesh)
    check_parameters(ours, theirs)
    query = on(mesh, x)
    out, our_weights = ours(query, query, query)
    assert_close(out.to_torch(), expected.detach())
    assert_close(our_weights.to_torch(), weights.detach())


class OfTorch(torch.nn.Module):
    """Somebody's model, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, 8))
        self.register_buffer("table", torch.arange(8.0))
        self.kept = torch.nn.Buffer(torch.full((8,), 2.0))
        self.made = torch.nn.Buffer(torch.full((8,), 0.5), persistent=False)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.GELU(), torch.nn.Linear(6, 8, bias=False))

    def forward(self, x: Any) -> Any:
        return self.inner(x * self.scale + self.table * self.kept - self.made)


class OfBoth(OfTorch):
    """Its parameter is marked by dtorch, where that is a tensor of a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(value) if isinstance(value := torch.ones(8), dtorch.Tensor) else torch.nn.Parameter(value)

    def forward(self, x: Any) -> Any:
        return super().forward(x + self.shift)


def new_parameter(value: float) -> Any:
    return torch.nn.Parameter(torch.full((8,), value))


class OfLists(torch.nn.Module):
    """None of its parameters is made in its own method."""

    def __init__(self) -> None:
        super().__init__()
        self.first = new_parameter(2.0)
        self.more = torch.nn.ParameterList([torch.nn.Parameter(torch.full((8,), float(i))) for i in range(3)])
        self.named = torch.nn.ParameterDict({name: new_parameter(3.0) for name in "ab"})

    def forward(self, x: Any) -> Any:
        for factor in self.more:
            x = x + factor
        return x * self.first - self.named["a"] * self.named["b"]


TORCHS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: torch.nn.Linear(8, 3), (5, 8)),
    "sequence": (lambda: torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)), (5, 8)),
    "batch norm": (lambda: torch.nn.BatchNorm1d(8), (5, 8)),
    "convolution": (lambda: torch.nn.Conv2d(2, 4, 3), (2, 2, 6, 6)),
    "encoder": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "recurrent": (lambda: torch.nn.GRU(8, 4), (5, 2, 8)),
    "own": (OfTorch, (5, 8)),
    "derived": (OfBoth, (5, 8)),
    "lists": (OfLists, (5, 8)),
}


@pytest.mark.parametrize("name", TORCHS)
def test_modules_of_torch_made_under_a_mesh_have_their_parameters(name: str) -> None:
    make, shape = TORCHS[name]
    x = torch.randn(shape)
    torch.manual_seed(5)
    theirs = make().eval()
    dtorch.manual_seed(5)
    with tp_mesh(2) as mesh:
        ours = make().eval()
    check_parameters(ours, theirs)  # type: ignore[arg-type]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, type(theirs))
    assert [(n, b.to_torch().tolist()) for n, b in ours.named_buffers()] == [(n, b.tolist()) for n, b in theirs.named_buffers()]
    doubled = {key: value * 2 for key, value in theirs.state_dict().items()}
    for module in (ours, theirs):
        missing, unexpected = module.load_state_dict(doubled)
        assert not missing
        assert not unexpected
    for model in (ours, copy.deepcopy(ours)):
        out = model(on(mesh, x))
        expected = theirs(x)
        if isinstance(expected, tuple):
            out, expected = out[0], expected[0]
        assert_close(out.to_torch(), expected.detach())


def test_modules_made_without_a_mesh_stay_torchs() -> None:
    with tp_mesh(2):
        weight = dtorch.ones(3, 3)
    layer = torch.nn.Linear(3, 3)
    assert type(layer) is torch.nn.Linear
    assert type(layer.weight) is torch.nn.Parameter

    def alone() -> Any:
        return torch.nn.Parameter(weight)

    def replace(layer: torch.nn.Linear) -> None:
        layer.weight = torch.nn.Parameter(weight)

    assert isinstance(alone(), nn.Parameter)
    assert type(layer) is torch.nn.Linear
    replace(layer)
    assert [type(param) for param in layer.parameters()] == [dtorch.Tensor, torch.nn.Parameter]


def test_layer_without_mesh_is_on_one_cpu() -> None:
    layer = nn.Linear(2, 2)
    assert layer.weight.device_mesh == DeviceMesh("cpu", [0])
    with pytest.raises(ValueError, match="device or device_mesh"):
        nn.Linear(2, 2, device="cpu", device_mesh=DeviceMesh("cpu"))
    with pytest.raises(TypeError, match="DeviceMesh"):
        nn.Linear(2, 2, device_mesh="cpu")


def test_skip_init_draws_nothing() -> None:
    dtorch.manual_seed(0)
    expected = dtorch.rand(2).to_torch()
    dtorch.manual_seed(0)
    with nn.skip_init():
        nn.Linear(4, 4), nn.RowParallelLinear(4, 4), nn.EmbeddingWithReplicateOutput(4, 4), nn.MultiheadAttention(4, 2)
    assert torch.equal(dtorch.rand(2).to_torch(), expected)


def test_init_functions_give_torchs_numbers() -> None:
    names = ["uniform_", "normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "ones_",
             "zeros_", "trunc_normal_", "eye_"]
    for name in names:
        torch.manual_seed(2)
        expected = getattr(torch.nn.init, name)(torch.empty(6, 4))
        dtorch.manual_seed(2)
        for module in (torch.nn.init, nn.init):
            x = dtorch.empty(6, 4, device_mesh=tp_mesh(2), placements=[Shard(0)])
            dtorch.manual_seed(2)
            assert getattr(module, name)(x) is x
            assert torch.equal(x.to_torch(), expected), name


def test_functional_has_torchs_names() -> None:
    x = torch.randn(3, 4)
    ours = on(tp_mesh(2), x)
    assert_close(nn.functional.softmax(ours, -1).to_torch(), x.softmax(-1))
    assert_close(nn.functional.normalize(ours).to_torch(), torch.nn.functional.normalize(x))
    assert "cross_entropy" in dir(nn.functional)
    assert not hasattr(nn.functional, "no_such_function")


# ---- torch's factories inside a mesh block


def test_torch_factories_follow_the_mesh() -> None:
    mesh = tp_mesh(2)
    with mesh:
        made = [
            torch.zeros(2, 3), torch.ones((2,)), torch.empty(2), torch.full((2,), 3.0), torch.rand(2), torch.randn(2),
            torch.arange(3), torch.tensor([1, 2]), torch.as_tensor([1.0]), torch.eye(2), torch.linspace(0, 1, 3),
            torch.zeros(2, device="cpu"),
        ]
        assert isinstance(torch.zeros(2, device="meta"), torch.Tensor)
        assert torch.arange(3).to_torch().tolist() == [0, 1, 2]
        assert isinstance(torch.ones(2) + torch.ones(2), dtorch.Tensor)
        assert dtorch.tensor([1, 2]).tolist() == [1, 2]
        assert dtorch.Tensor([[1, 2]]).dtype == torch.float32
    for x in made:
        assert isinstance(x, dtorch.Tensor)
        assert x.device_mesh == mesh
    assert isinstance(torch.zeros(2), torch.Tensor)


def test_interleaved_tasks_see_their_own_mesh() -> None:
    order: list[str] = []

    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    async def inside(entered: asyncio.Event, go_on: asyncio.Event) -> None:
        with tp_mesh(2):
            entered.set()
            await go_on.wait()
            assert torch.zeros(1).device_mesh == tp_mesh(2)  # type: ignore[attr-defined]
        order.append("inside")

    async def main() -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, go_on))
        await entered.wait()
        assert isinstance(torch.zeros(1), torch.Tensor)
        with Counting() as counting:  # pushed after the other task's mode, which leaves first
            go_on.set()
            await task
            before = counting.calls
            assert isinstance(torch.zeros(1), torch.Tensor)
            assert counting.calls == before + 1

    asyncio.run(main())
    assert order == ["inside"]
    assert not torch.overrides._get_current_function_mode_stack()
