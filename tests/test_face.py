"""The torch face: a torch.Tensor that records."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, TensorFuture, TorchTensor
from dtorch.face import faced


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


A = torch.arange(20.0).reshape(4, 5) / 7


@pytest.fixture
def x(mesh: DeviceMesh) -> Any:
    return faced(dtorch.tensor(A, device_mesh=mesh, placements=[Shard(0)]))


def test_is_a_tensor_and_a_future(x: Any) -> None:
    assert issubclass(type(x), torch.Tensor)
    assert issubclass(type(x), TensorFuture)
    assert (x.shape, x.dtype, x.device) == (A.shape, A.dtype, A.device)
    assert x.placements == (Shard(0),)
    assert torch.equal(x.to_torch(), A)

    async def both() -> tuple[torch.Tensor, torch.Tensor]:
        return await x, await x.value()

    assert all(torch.equal(value, A) for value in asyncio.run(both()))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + 1,
        lambda x: 2 - x,
        lambda x: torch.add(x, x),
        lambda x: x @ x.T,
        lambda x: F.softmax(x, dim=-1),
        lambda x: F.layer_norm(x, (5,)),
        lambda x: x.max(dim=1).values,
        lambda x: torch.split(x, 2, dim=1)[1],
        lambda x: torch.cat([x, torch.ones(1, 5)]),
        lambda x: torch.ones(4, 5) + x,
        lambda x: x[1:, None, ::2],
        lambda x: x.mT,
        lambda x: torch.stack(list(x)),
        lambda x: x.to(torch.float64),
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: x.cumsum(1),
        lambda x: x.data,
        lambda x: torch.nn.Linear(5, 5).requires_grad_(False).to(x.dtype)(x) * 0,
    ],
)  # fmt: skip
def test_ops_answer_in_kind(x: Any, call: Any) -> None:
    made = call(x)
    assert type(made) is TorchTensor
    assert_close(made.to_torch(), call(A))
    assert made.shape == call(A).shape


def test_equal_numbers_of_other_types_are_other_calls(x: Any) -> None:
    """1, True and 1.0 are equal as keys of a dict, and torch takes only some of them."""
    for value in (1, True, 1.0):
        assert torch.equal(x.long().mul(value).to_torch(), A.long().mul(value))
        assert x.long().mul(value).dtype == A.long().mul(value).dtype
    assert torch.equal(x.sum(1).to_torch(), A.sum(1))
    for _ in range(2):
        with pytest.raises(TypeError):
            x.sum(1.0)


def test_calls_of_one_pattern_are_told_apart(x: Any) -> None:
    """The quick ways know a call by the types of its arguments: what else differs makes another result all the same."""
    for _ in range(2):
        for dim, keepdim in ((0, True), (1, False), (-1, True)):
            assert_close(x.mean(dim, keepdim=keepdim).to_torch(), A.mean(dim, keepdim=keepdim))
        assert_close(torch.mean(x, dim=1, dtype=torch.float64).to_torch(), A.mean(1, dtype=torch.float64))
        assert torch.equal(torch.clamp(x, min=1).to_torch(), A.clamp(min=1))
        assert torch.equal(torch.clamp(x, max=1).to_torch(), A.clamp(max=1))
        assert torch.equal(x.add(1.5).to_torch(), A + 1.5)
        assert torch.equal(x.add(2.5).to_torch(), A + 2.5)


def test_lists_of_one_pattern_are_told_apart(x: Any) -> None:
    """As a cache makes them: first a plain tensor without elements beside a face, then faces alone."""
    empty = torch.tensor([])
    for _ in range(3):
        assert torch.equal(torch.cat([empty, x], dim=-2).to_torch(), A)
        assert torch.equal(torch.cat([x, x], dim=-2).to_torch(), torch.cat([A, A]))
        assert torch.equal(torch.cat([torch.ones(1, 5), x], dim=-2).to_torch(), torch.cat([torch.ones(1, 5), A]))
        assert torch.equal(torch.cat([x, empty, x.native], dim=0).to_torch(), torch.cat([A, A]))
        with pytest.raises(TypeError, match="meta device"):
            torch.cat([empty.to("meta"), x], dim=-2)
    assert torch.cat([empty.double(), x], dim=-2).dtype == torch.float64


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cat([torch.tensor([]), x]),
        lambda x: torch.add(x, torch.ones(4, 5)),
        lambda x: x[np.int64(1)],
        lambda x: x.mul(np.float32(2)),
        lambda x: torch.linalg.matrix_norm(x),
        lambda x: torch.var_mean(x, dim=0),
    ],
)
def test_a_call_leaves_its_tensors_to_nobody(mesh: DeviceMesh, call: Any) -> None:
    """Not in a cycle either, which the collector would find some time later: their memory is free at once."""
    call(faced(dtorch.tensor(A, device_mesh=mesh)))  # signatures are kept, and may be
    gc.collect()
    gc.disable()
    try:
        x = faced(dtorch.tensor(A, device_mesh=mesh, placements=[Shard(0)]))
        held = weakref.ref(x.native)
        call(x)
        del x
        assert held() is None
    finally:
        gc.enable()


def test_a_cache_that_begins_with_nothing_is_captured_once(mesh: DeviceMesh) -> None:
    def step(x: Any) -> Any:
        keys = torch.cat([torch.tensor([]), x], dim=-2)
        return torch.cat([keys, x], dim=-2)

    compiled = dtorch.compile(step)
    x = faced(dtorch.tensor(A, device_mesh=mesh))
    for _ in range(4):
        assert torch.equal(compiled(x).to_torch(), torch.cat([A, A]))
    assert compiled.num_recordings == 1


def test_what_changes_nothing_gives_the_tensor_itself(x: Any) -> None:
    assert x.contiguous() is x
    assert x.to(torch.float32) is x
    assert x.to(dtype=torch.float32) is x
    turned = x.mT.contiguous()
    assert turned.is_contiguous()
    assert torch.equal(turned.to_torch(), A.mT)
    assert torch.equal(x.to(torch.float64).to_torch(), A.double())
    assert x.native.contiguous() is x.native


def test_native_and_faced_together_answer_torch_faced(x: Any) -> None:
    native = x.native
    for made in (native + x, x + native, torch.add(native, x), dtorch.add(native, x), dtorch.cat([native, x])):
        assert type(made) is TorchTensor
    assert type(native + native) is dtorch.Tensor


def test_writes_are_seen_by_both_faces(x: Any) -> None:
    native, same = x.native, x
    same += 1
    assert same is x
    assert x.mul_(2) is x
    assert torch.add(x, 1, out=x) is x
    x[0] = 5
    want = ((A + 1) * 2 + 1).index_fill(0, torch.tensor([0]), 5)
    assert_close(native.to_torch(), want)


def test_writes_into_a_plain_tensor_arrive_there(x: Any) -> None:
    plain = torch.zeros(4, 5)
    assert plain.add_(x) is plain
    plain[1:3] = x[:2]
    plain.index_copy_(0, torch.tensor([3]), x[:1])
    torch.mul(plain, x, out=plain)
    want = torch.zeros(4, 5) + A
    want[1:3] = A[:2]
    want[3] = A[0]
    assert type(plain) is torch.Tensor
    assert torch.equal(plain, want * A)


def test_placements_are_repaired(x: Any, mesh: DeviceMesh) -> None:
    other = faced(dtorch.tensor(A, device_mesh=mesh, placements=[Shard(1)]))
    for _ in range(2):  # the second time from memory
        assert torch.equal((x + other).to_torch(), A + A)
        assert torch.equal(x.flip(0).to_torch(), A.flip(0))
    with pytest.raises(dtorch.PlacementError):
        x.native + other.native
    rows = torch.tensor([3, 0])
    other.index_put_((rows, rows), torch.zeros(2))  # written whole, and copied back
    assert other.placements == (Shard(1),)
    assert torch.equal(other.to_torch(), A.index_put((rows, rows), torch.zeros(2)))


def test_as_a_number(x: Any) -> None:
    total = x.sum()
    assert float(total) == pytest.approx(float(A.sum()))
    assert bool((x >= 0).all())
    assert_close(torch.full((2,), total), torch.full((2,), float(A.sum())))
    assert len(range(TorchTensor(torch.tensor(3)))) == 3
    assert x.tolist() == A.tolist()


def test_torch_tensor_of_a_symbol_is_a_copy(x: Any) -> None:
    with pytest.warns(UserWarning, match="copy construct"):
        made = torch.tensor(x, dtype=torch.float64)
    x.zero_()
    assert type(made) is TorchTensor
    assert torch.equal(made.to_torch(), A.double())


def test_gradients_are_clipped_and_optimizers_step(mesh: DeviceMesh) -> None:
    def make() -> Any:
        made: Any = torch.nn.Parameter(A.clone())
        made.grad = A.sin()
        return made

    def ours() -> Any:
        made: Any = torch.nn.Parameter(TorchTensor(A, device_mesh=mesh).redistribute([Shard(1)]))
        made.grad = TorchTensor(A.sin(), device_mesh=mesh)
        return made

    with torch.no_grad():
        for step in (torch.optim.AdamW, torch.optim.SGD):
            one, two = make(), ours()
            norm = torch.nn.utils.clip_grad_norm_([two], 0.5)
            assert_close(float(norm), float(torch.nn.utils.clip_grad_norm_([one], 0.5)))
            for param in (one, two):
                step([param], lr=0.1).step()
            assert_close(two.to_torch(), one.data)
            assert two.placements == (Shard(1),)


def test_parameters_keep_what_is_set_on_them(x: Any) -> None:
    param: Any = torch.nn.Parameter(x, requires_grad=False)
    assert isinstance(param, torch.nn.Parameter)
    param.mark = "kept"  # type: ignore[attr-defined]
    assert copy.deepcopy(param).__dict__["mark"] == "kept"
    layer: Any = torch.nn.Linear(5, 4, bias=False)
    layer.weight = param
    assert dict(layer.named_parameters())["weight"] is param
    assert layer.double().weight.dtype == torch.float64
    layer.load_state_dict({"weight": A + 1})
    assert layer.weight.placements == (Shard(0),)
    assert torch.equal(layer.weight.to_torch(), (A + 1).double())


def test_questions(x: Any) -> None:
    assert torch.is_tensor(x)
    assert torch.is_floating_point(x)
    assert x.is_leaf
    assert x.grad_fn is None
    assert x.grad is None
    assert not x.is_sparse
    assert torch.numel(x) == x.numel() == 20
    assert len(x) == 4


def test_what_goes_past_the_protocol_is_refused(x: Any) -> None:
    with pytest.raises(NotImplementedError, match="goes past __torch_function__"):
        torch.vmap(lambda row: row + 1)(x)
    with pytest.raises(TypeError, match="pickled"):
        copy.copy(x).__reduce_ex__(4)


def test_made_from_data(mesh: DeviceMesh) -> None:
    made = TorchTensor(A, device_mesh=mesh)
    assert made.placements == (Replicate(),)
    assert TorchTensor(made) is made
    assert repr(made) == repr(made.native)


class Seen(TorchFunctionMode):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_other_modes_are_asked_inside_a_distributed_module(mesh: DeviceMesh) -> None:
    """A forward's ops on faces skip torch's way to them, but for modes that stand around the call."""
    module = dtorch.distribute(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.SiLU()), mesh, "auto")
    plain = copy.deepcopy(module)  # faces; its values are read below
    with Seen() as seen:
        out = module(A)
    assert {"linear", "silu"} <= set(seen.names)
    weight, bias = (p.to_torch() for p in plain.parameters())  # type: ignore[operator]  # torch-faced
    assert_close(out.to_torch(), F.silu(F.linear(A, weight, bias)))
    assert torch.equal(module(A).to_torch(), out.to_torch())


def test_arrays_of_numpy_are_told_apart(x: Any) -> None:
    """Each is a tensor for a moment only, and the next may lie where it lay."""
    added = [np.full((4, 5), float(i), dtype=np.float32) for i in range(3)]
    assert torch.equal(x.native.addcmul(added[1], added[2]).to_torch(), A + 2)
    assert torch.equal(x.native.addcmul(added[0], added[2]).to_torch(), A)


def test_a_list_of_numbers_on_a_mesh_is_made_a_tensor() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.TorchTensor(dtorch.tensor([[1.5, 2.0], [3.0, 4.0]], device_mesh=mesh))
    assert torch.tensor([x[0, 0], 7.0, x.sum()]).tolist() == [1.5, 7.0, 10.5]
    assert torch.tensor([[x.max(), 1.0], [2.0, x[1][0]]]).tolist() == [[4.0, 1.0], [2.0, 3.0]]
    assert torch.equal(x[:, 1:].to_torch(), torch.tensor([[2.0], [4.0]]))
    assert torch.equal(x[x > 2].to_torch(), torch.tensor([3.0, 4.0]))
    assert torch.arange(3)[x[0].long() - 1].tolist() == [0, 1]
