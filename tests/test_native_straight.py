"""Straight modules of dtorch.nn: what is played is what the module itself would have recorded."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _straight import double_and_back, eps, hook, no_bias, own_forward, played, pre_hook_outside, written
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, nn
from dtorch.modules import replay
from dtorch.modules.binding import why_not
from dtorch.modules.playing import TENSOR
from dtorch.session import current_session

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_is_on", True)


def mesh(tp: int = 1) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))


class Block(nn.Module):
    """The same file in torch: ``Twin``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6, eps=0.5)
        self.up = nn.ColumnParallelLinear(6, 8)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.5)
        self.down = nn.RowParallelLinearWithReplicateOutput(8, 6)
        self.scale = 2.0

    def forward(self, x: Any, y: Any = None) -> Any:
        if y is not None:
            x = x * y
        return x + self.drop(self.down(self.act(self.up(self.norm(x))))) * self.scale


class Twin(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.RMSNorm(6, eps=0.5)
        self.up = torch.nn.Linear(6, 8)
        self.act = torch.nn.GELU()
        self.drop = torch.nn.Dropout(0.5)
        self.down = torch.nn.Linear(8, 6)
        self.scale = 2.0
        self.eval()

    forward = Block.forward


X = torch.linspace(-1, 2, 18).reshape(3, 6)
CALL = ((None, TENSOR),)


def made(tp: int = 1) -> Any:
    with mesh(tp):
        block = Block()
    block.load_state_dict(Twin().state_dict())
    return block.eval()


def on(x: torch.Tensor, tp: int = 1) -> Any:
    return dtorch.Tensor(x, device_mesh=mesh(tp))


def check(ours: Any, theirs: Any, *args: Any, plays: int | None = 1, tp: int = 1, **kwargs: Any) -> None:
    """``ours`` gives what ``theirs`` does, bit by bit on one device, also when it is played."""

    def here(value: Any) -> Any:
        return on(value, tp) if isinstance(value, torch.Tensor) else value

    given = [here(value) for value in args], {name: here(value) for name, value in kwargs.items()}
    for _ in range(4):
        mine, num = played(lambda: ours(*given[0], **given[1]))
        expected = theirs(*args, **kwargs)
        assert torch.equal(mine, expected) if tp == 1 else torch.allclose(mine, expected, atol=1e-5)
    if plays is not None:
        assert num == plays


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_it_records_the_same_calls(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = made(tp), made(tp)
    assert why_not(ours, CALL) == ""
    x = on(X, tp)
    for _ in range(4):
        before = dtorch.statistics().ops
        mine, num = played(lambda: ours(x))
        between = dtorch.statistics().ops
        monkeypatch.setattr(replay, "_is_on", False)
        theirs, none = played(lambda: plain(x))
        monkeypatch.setattr(replay, "_is_on", True)
        assert torch.equal(mine, theirs)
        assert dtorch.statistics().ops - between == between - before
    assert (num, none) == (1, 0)
    assert ours(x).placements == plain(x).placements
    check(ours, Twin(), X, tp=tp)


def test_it_is_off() -> None:
    replay._is_on = False
    ours = made()
    check(ours, Twin(), X, plays=0)


# ---- what changes between calls


def replaced(block: Any) -> None:
    weight = torch.arange(6.0)
    block.norm.weight = nn.Parameter(on(weight)) if isinstance(block, Block) else torch.nn.Parameter(weight)


def attribute(block: Any) -> None:
    block.scale = 0.25


def part(block: Any) -> None:
    block.act = nn.ReLU() if isinstance(block, Block) else torch.nn.ReLU()


def around(block: Any) -> None:
    if isinstance(block, Block):
        block.up.redistribute_output = lambda out: out * 2
    else:
        hook(block)


def around_itself(block: Any) -> None:
    if isinstance(block, Block):
        block.redistribute_input = lambda x: x + 1
    else:
        pre_hook_outside(block)


def half_way(block: Any) -> None:
    """Only the last part is another one."""
    old = block.down
    if isinstance(block, Block):
        with mesh():
            block.down = nn.Linear(8, 6)
    else:
        block.down = torch.nn.Linear(8, 6)
    block.down.load_state_dict({name: value * 2 for name, value in old.state_dict().items()})


CHANGES = [
    replaced, written, attribute, eps, hook, pre_hook_outside, part, no_bias, own_forward, around, around_itself,
    double_and_back, half_way,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    ours, theirs = made(), Twin()
    check(ours, theirs, X)
    change(ours)
    change(theirs)
    check(ours, theirs, X, plays=None)


def test_names_of_classes_and_modules_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = made(), Twin()
    check(ours, theirs, X)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.GELU, "forward", lambda self, x: torch.relu(x))
        check(ours, theirs, X, plays=None)
    with monkeypatch.context() as patch:
        patch.setattr(functional, "gelu", lambda x, approximate: x * 2)
        check(ours, theirs, X, plays=None)
    with monkeypatch.context() as patch:
        patch.setattr(nn.RowParallelLinearWithReplicateOutput, "redistribute_output", lambda self, out: out * 3)
        mine = ours(on(X)).to_torch()
        assert torch.allclose(mine, X + (theirs(X) - X) * 3, atol=1e-5)
    check(ours, theirs, X)


def test_training_draws_anew_each_time() -> None:
    ours = made()
    check(ours, Twin(), X)
    ours.train()
    one, two, three = [ours(on(X)).to_torch() for _ in range(3)]
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    ours.eval()
    check(ours, Twin(), X)


def test_copies_and_pickles_run_their_own_code() -> None:
    ours = made()
    check(ours, Twin(), X)
    other, theirs = copy.deepcopy(ours), Twin()
    assert "_straight" not in other.__dict__
    for block in (other, theirs):
        block.norm.weight.add_(1)
    check(other, theirs, X)
    check(ours, Twin(), X)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    state = ours.__getstate__()
    assert "_straight" not in state
    assert "_straight" in ours.__dict__


def test_a_model_without_tensors_can_be_pickled() -> None:
    act = nn.GELU()
    check(act, torch.nn.GELU(), X, plays=0)
    check(pickle.loads(pickle.dumps(act)), torch.nn.GELU(), X, plays=0)


def test_other_shapes() -> None:
    ours, theirs = made(), Twin()
    for x in (X, X[:2], X[None], X, X[:1], X[:0]):
        check(ours, theirs, x)


def test_another_session() -> None:
    ours = made()
    check(ours, Twin(), X)
    with dtorch.session(workers="shared"):
        other = made()
        check(other, Twin(), X)
        check(other, Twin(), X[:2])
    check(ours, Twin(), X)


def test_signatures_are_forgotten() -> None:
    ours = made()
    check(ours, Twin(), X)
    current_session().forget_signatures()
    value, num = played(lambda: ours(on(X)))
    assert num == 0
    assert torch.equal(value, Twin()(X))
    check(ours, Twin(), X)


# ---- arguments


def test_arguments_of_all_kinds() -> None:
    ours, theirs = made(), Twin()
    check(ours, theirs, X)
    check(ours, theirs, X, X + 1)
    check(ours, theirs, X, None)
    check(ours, theirs, X, y=X + 2)
    check(ours, theirs, x=X, y=None)
    check(ours, theirs, y=X, x=X * 2)
    check(ours, theirs, X, 2, plays=None)
    check(ours, theirs, X)
    one = on(X)
    for _ in range(3):
        assert torch.equal(ours(one, one).to_torch(), theirs(X, X))


def test_what_is_plain_is_not_played() -> None:
    ours = made()
    check(ours, Twin(), X)
    with pytest.raises(TypeError):
        ours(object())
    check(ours, Twin(), X)


class Pair(nn.Module):
    def forward(self, x: Any, angles: tuple[Any, Any], flip: bool = False) -> tuple[Any, Any]:
        cos, sin = angles
        first, second = (x.chunk(2, dim=-1) if not flip else x.flip(-1).chunk(2, dim=-1))
        return first * cos - second * sin, turned(first, *angles) + second


def turned(x: Any, cos: Any, sin: Any) -> Any:
    return dtorch.cat((x * cos, -x * sin), dim=-1).sum(-1, keepdim=True)


def test_tuples_in_and_out() -> None:
    pair = Pair()
    x, cos, sin = on(X), on(X[:, :3] + 1), on(X[:, 3:])
    for flip in (False, True, False):
        x_, cos_, sin_ = X.flip(-1) if flip else X, X[:, :3] + 1, X[:, 3:]
        first, second = x_.chunk(2, dim=-1)
        expected = first * cos_ - second * sin_, (torch.cat((first * cos_, -first * sin_), -1)).sum(-1, keepdim=True) + second
        for _ in range(4):
            before = current_session().num_played
            out = pair(x, (cos, sin), flip)
            assert type(out) is tuple
            assert all(torch.equal(a.to_torch(), b) for a, b in zip(out, expected, strict=True))
        assert current_session().num_played - before == 1
    with pytest.raises((ValueError, TypeError)):
        pair(x, (cos,))
    with pytest.raises(TypeError):
        pair(x)


class Turned(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x * 1).unsqueeze(0).transpose(0, 1).transpose(0, 1).squeeze(0).unsqueeze(-1)


class Views(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.unsqueeze(0).transpose(0, 1).transpose(1, 2)


def test_results_are_views_where_torchs_are() -> None:
    ours, x = Views(), on(X)
    for factor in (2.0, 4.0, 8.0, 16.0):
        out = ours(x)
        out.mul_(2)
        assert torch.equal(x.to_torch(), X * factor)
    ours, x = Turned(), on(X)
    for _ in range(4):
        ours(x).mul_(2)
        assert torch.equal(x.to_torch(), X)


class Same(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x * 2, (x + 1) * 3, x)


class Fresh(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + dtorch.zeros(6, device_mesh=mesh()) * 2 - 1


class Reads(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2 if x.sum().item() > 0 else x * 3 - x + x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return ((x + self.calls) * 2 - 1) * 3


def test_what_is_not_played() -> None:
    for module in (Same(), Fresh(), Reads(), Counts()):
        before = current_session().num_played
        for _ in range(5):
            module(on(X))
        assert current_session().num_played == before
    counts = Counts()
    values = [counts(on(X)).to_torch() for _ in range(4)]
    assert [value[0, 0].item() for value in values] == [((X[0, 0].item() + n) * 2 - 1) * 3 for n in (1, 2, 3, 4)]
    negative = Reads()
    for x in (X, X - 9, X, X - 9):
        assert torch.equal(negative(on(x)).to_torch(), x * 2 if x.sum() > 0 else x * 3 - x + x)


# ---- what is in force around a call


class Crossed(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return (x @ y) * 2 + 1 - 3


def test_repaired_placements_are_no_straight_line_elsewhere() -> None:
    x = dtorch.Tensor(torch.ones(4, 4), device_mesh=mesh(2), placements=[Shard(0)])
    y = dtorch.Tensor(torch.ones(4, 4), device_mesh=mesh(2), placements=[Shard(0)])
    crossed = Crossed()
    with dtorch.auto_redistribute():
        for _ in range(5):
            assert crossed(x, y).to_torch().eq(6).all()
    with pytest.raises(dtorch.PlacementError):
        crossed(x, y)
    whole = y.redistribute([Replicate()])
    for _ in range(4):
        assert crossed(x, whole).to_torch().eq(6).all()
    with dtorch.auto_redistribute():
        assert crossed(x, whole).to_torch().eq(6).all()


def test_other_modes_see_every_call() -> None:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    ours = made()
    check(ours, Twin(), X)
    with Mode():
        ours(on(X))
    assert functional.gelu in seen or any(getattr(func, "__name__", "") == "gelu" for func in seen)


def test_a_mesh_in_force() -> None:
    ours, theirs = made(), Twin()
    with mesh():
        check(ours, theirs, X)


def test_explain_sees_every_module() -> None:
    ours = made()
    check(ours, Twin(), X)
    seen = str(dtorch.explain(ours, on(X)))
    assert "down" in seen
    check(ours, Twin(), X)


def test_compile_takes_it_in() -> None:
    ours = made()
    check(ours, Twin(), X)
    compiled = dtorch.compile(ours)
    for _ in range(3):
        assert torch.equal(compiled(on(X)).to_torch(), Twin()(X))
    fresh = made()
    compiled = dtorch.compile(fresh)
    for _ in range(3):
        assert torch.equal(compiled(on(X)).to_torch(), Twin()(X))
    check(fresh, Twin(), X)


class Wrong(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        x = x + 1
        x = x * 2
        return x.reshape(-1).index_select(0, y) * 2


def test_an_error_names_the_line_of_the_module() -> None:
    wrong, x = Wrong(), on(X)
    fine, bad = on(torch.tensor([0, 1])), on(torch.tensor([0, 99]))
    for _ in range(4):
        _, num = played(lambda: wrong(x, fine))
    assert num == 1
    with pytest.raises(Exception, match=r"test_native_straight\.py") as found:
        wrong(x, bad).to_torch()
    assert "index_select(0, y)" in str(found.value) or str(Wrong.forward.__code__.co_firstlineno + 3) in str(found.value)


# ---- a whole model


@pytest.mark.parametrize("tp", [1, 2])
def test_a_llama_layer_is_one_straight_line(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_size=4,
        rope_theta=1e4, norm_eps=1e-5, max_positions=64,
    )  # fmt: skip
    with mesh(tp):
        model = llama.Llama(config)
    ids, positions = on(torch.arange(10).reshape(2, 5), tp), on(torch.arange(5).repeat(2, 1), tp)
    monkeypatch.setattr(replay, "_is_on", False)
    with mesh(tp):
        plain = llama.Llama(config)
        plain.load_state_dict({name: value.to_torch() for name, value in model.state_dict().items()})
        expected = plain(ids, positions).to_torch()
        expected_without = plain(ids).to_torch()
    monkeypatch.setattr(replay, "_is_on", True)
    layer = ((None, TENSOR), (None, (2,)), (None, TENSOR), (None, None))
    assert why_not(model.model.layers[0], layer) == ""
    assert "update" in why_not(model.model.layers[0], (*layer[:3], (None, "cache")))
    with mesh(tp):
        for _ in range(4):
            value, num = played(lambda: model(ids, positions))
            assert torch.equal(value, expected)
        assert num >= 3  # both layers, and the rotary embedding
        for _ in range(3):
            value, num = played(lambda: model(ids))  # without a mask
            assert torch.equal(value, expected_without)
        assert num >= 3
        cache, other = llama.KVCache(), llama.KVCache()
        for step in range(4):
            at = slice(step, step + 1)
            given = ids[:, at], positions[:, at]
            mine = model(*given, cache).to_torch()
            assert torch.equal(mine, plain(*given, other).to_torch())
        value, num = played(lambda: model(ids, positions))
        assert torch.equal(value, expected)
        assert num >= 3
