"""Straight modules of distributed models: what is played is what the module itself would have recorded."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _straight import double_and_back, eps, hook, no_bias, own_forward, played, pre_hook_outside, written
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import dtorch
from dtorch import DeviceMesh, Replicate, TorchTensor
from dtorch.failures import SignatureFacts
from dtorch.modules import replay
from dtorch.modules.tape import Step, Tape, tape_of
from dtorch.session import current_session
from dtorch.transport.messages import Layout


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 7.0))
        self.eps = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = Norm()
        self.up = torch.nn.Linear(6, 8)
        self.act = torch.nn.GELU()
        self.drop = torch.nn.Dropout(0.5)
        self.down = torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Model(torch.nn.Module):
    """What is called is never a straight line: it has hooks."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(*args, **kwargs)


X = torch.linspace(-1, 2, 18).reshape(3, 6)


def mesh(tp: int = 1) -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))


def placed(block: torch.nn.Module, tp: int = 1) -> Any:
    return dtorch.distribute(Model(block).eval(), mesh(tp))


def check(ours: Any, theirs: torch.nn.Module, *args: Any, plays: int | None = None, **kwargs: Any) -> None:
    """``ours`` gives what ``theirs`` does, bit by bit, also when it is played."""
    for _ in range(3):
        made, num = played(lambda: ours(*args, **kwargs))
        assert torch.equal(made, theirs(*args, **kwargs))
    if plays is not None:
        assert num == plays


@pytest.mark.parametrize("tp", [1, 2])
def test_it_records_the_same_calls(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = placed(Block(), tp)
    monkeypatch.setenv("DTORCH_STRAIGHT", "0")
    plain = placed(Block(), tp)
    for _ in range(3):
        before = dtorch.statistics().ops
        mine, num = played(lambda: ours(X))
        between = dtorch.statistics().ops
        theirs, none = played(lambda: plain(X))
        assert torch.equal(mine, theirs)
        assert dtorch.statistics().ops - between == between - before
    assert (num, none) == (1, 0)  # the block as a whole
    if tp == 1:
        assert torch.equal(mine, Block().eval()(X))
    assert dtorch.statistics().straight_calls >= 2


def test_layers_that_are_alike_share_what_was_recorded() -> None:
    ours = dtorch.distribute(torch.nn.Sequential(Norm(), Norm(), Norm()), mesh())
    _, num = played(lambda: ours(torch.ones(7, 6)))
    assert num == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_llama(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )

    def made() -> Any:
        torch.manual_seed(0)
        return dtorch.distribute(transformers.LlamaForCausalLM(config).eval(), mesh(tp))

    ours = made()
    monkeypatch.setenv("DTORCH_STRAIGHT", "0")
    plain = made()
    ids = torch.arange(6).reshape(2, 3)
    for _ in range(3):
        mine, num = played(lambda: ours(input_ids=ids).logits)
        assert torch.equal(mine, plain(input_ids=ids).logits.to_torch())
    assert num == 17
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **options).to_torch(), plain.generate(ids, **options).to_torch())


# ---- what changes between calls


def replaced(block: Any) -> None:
    if isinstance(block.norm.weight, TorchTensor):
        new = torch.arange(6.0)
        block.norm.weight = torch.nn.Parameter(TorchTensor(dtorch.tensor(new, device_mesh=mesh())))
    else:
        block.norm.weight = torch.nn.Parameter(torch.arange(6.0))


def part(block: Any) -> None:
    block.act = torch.nn.ReLU()


def hooks_are_other_ones(block: Any) -> None:
    block.up._forward_hooks = type(block.up._forward_hooks)()
    block.up.register_forward_hook(lambda module, args, out: out * 2)


CHANGES = [
    replaced, written, eps, hook, pre_hook_outside, part, no_bias, own_forward, hooks_are_other_ones, double_and_back
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    ours, theirs = placed(Block()), Model(Block()).eval()
    check(ours, theirs, X, plays=1)
    change(ours.block)
    change(theirs.block)
    check(ours, theirs, X)


def test_a_change_that_is_taken_back() -> None:
    ours, theirs = placed(Block()), Model(Block()).eval()
    check(ours, theirs, X, plays=1)
    handles = [model.block.act.register_forward_hook(lambda *_: torch.zeros(())) for model in (ours, theirs)]
    ours.block.act.register_forward_hook(lambda module, args, out: args[0] * 0)
    ours(X)
    for handle in handles:
        handle.remove()
    ours.block.act._forward_hooks.clear()
    check(ours, theirs, X, plays=1)


def test_the_class_and_global_names_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = placed(Block()), Model(Block()).eval()
    check(ours, theirs, X, plays=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.GELU, "forward", lambda self, x: torch.relu(x))
        check(ours, theirs, X)
    with monkeypatch.context() as patch:
        patch.setattr(functional, "gelu", lambda x, approximate: x * 2)
        check(ours, theirs, X)
    with monkeypatch.context() as patch:
        patch.setattr(Norm.forward, "__code__", (lambda self, x: x + self.eps).__code__)
        check(ours, theirs, X)
    check(ours, theirs, X, plays=1)


def test_training_draws_anew_each_time() -> None:
    ours = placed(Block())
    check(ours, Model(Block()).eval(), X, plays=1)
    ours.train()
    one, two, three = [ours(X).to_torch() for _ in range(3)]
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    ours.eval()
    check(ours, Model(Block()).eval(), X, plays=1)


def test_a_copy_has_its_own_parameters() -> None:
    ours = placed(Block())
    check(ours, Model(Block()).eval(), X, plays=1)
    other, theirs = copy.deepcopy(ours), Model(Block()).eval()
    for block in (other.block, theirs.block):
        block.norm.weight.add_(1)
    check(other, theirs, X)
    check(ours, Model(Block()).eval(), X, plays=1)
    assert "_compiled_call_impl" not in other.block.__dict__
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_other_shapes_and_dtypes() -> None:
    ours, theirs = placed(Block()), Model(Block()).eval()
    for x in (X, X[:2], X[None], X, X[:1], X[:0]):
        check(ours, theirs, x, plays=1)


def test_signatures_are_forgotten() -> None:
    ours, theirs = placed(Block()), Model(Block()).eval()
    check(ours, theirs, X, plays=1)
    current_session().forget_signatures()
    made, num = played(lambda: ours(X))
    assert num == 0
    assert torch.equal(made, theirs(X))
    check(ours, theirs, X, plays=1)


# ---- arguments


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, dim: int = 0, keepdim: bool = False) -> torch.Tensor:
        return (x - y * 2).sum(dim, keepdim=keepdim)


def test_arguments_of_all_kinds() -> None:
    ours, theirs = placed(Two()), Model(Two())
    check(ours, theirs, X, X + 1, plays=1)
    check(ours, theirs, X, y=X + 1, plays=1)
    check(ours, theirs, X, X + 1, 1, plays=1)
    check(ours, theirs, X, X + 1, dim=1, keepdim=True, plays=1)
    check(ours, theirs, x=X, y=X + 1, plays=1)
    check(ours, theirs, X, X)  # put on the mesh twice
    one = TorchTensor(dtorch.tensor(X, device_mesh=mesh()))
    check(lambda: ours.block(one, one), lambda: theirs(X, X))  # type: ignore[arg-type]


class Turned(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0).transpose(0, 1)


def test_results_are_views_where_torchs_are() -> None:
    ours = placed(Turned()).block
    x = TorchTensor(dtorch.tensor(X, device_mesh=mesh()))
    for factor in (1.0, 2.0, 4.0):
        made, num = ours(x), current_session().num_played
        made.mul_(2)
        assert torch.equal(x.to_torch(), X * 2 * factor)
    assert num > 0


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32)


class Counted(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0).expand(n, -1, -1)


def test_what_is_not_played() -> None:
    check(placed(Same()), Same(), X, plays=0)  # gives its argument back
    check(placed(torch.nn.ReLU(inplace=True)), torch.nn.ReLU(), X, plays=0)
    ours = placed(Counted())
    for n in (2, 3, 2):  # reads a value
        made, num = played(lambda n=n: ours(X, torch.tensor(n)))  # type: ignore[misc]
        assert torch.equal(made, X.expand(n, -1, -1))
        assert num == 0


def test_somebody_elses_mode_sees_every_op() -> None:
    ours, theirs = placed(Block()), Model(Block()).eval()
    check(ours, theirs, X, plays=1)
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        made, num = played(lambda: ours(X))
    assert torch.equal(made, theirs(X))
    assert num == 0
    assert functional.gelu in seen

    class Changes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is functional.gelu else func(*args, **(kwargs or {}))

    x = torch.ones(9, 6)
    with Changes():
        for _ in range(2):
            assert torch.equal(ours(x).to_torch(), theirs(x))
    check(ours, theirs, x, plays=1)  # nothing was learnt from that


class Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 3) * broken(x)


def broken(x: torch.Tensor) -> torch.Tensor:
    return x.view(5, 5)


def test_what_a_module_raises_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = placed(Fails())
    calls = []
    original = torch.nn.Module._call_impl
    for error in (KeyError, AttributeError):

        def fail(self: Any, *args: Any, error: type[Exception] = error, **kwargs: Any) -> Any:
            calls.append(type(self).__name__)
            if isinstance(self, Fails):
                raise error("no such thing")
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, "_call_impl", fail)
            with pytest.raises(error, match="no such thing"):
                ours.block(TorchTensor(dtorch.tensor(X, device_mesh=mesh())))
    assert calls == ["Fails", "Fails"]
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        ours(X)


def test_kinds_of_inputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_TAPES", 2)
    monkeypatch.setattr(replay, "MAX_CLEARED", 1)
    current_session().forget_signatures()
    ours, theirs = placed(Two()), Model(Two())
    for num in range(1, 8):
        x = torch.ones(num, 11)
        check(ours, theirs, x, x + 1, plays=1 if num <= 4 else 0)


# ---- with the rest


class Embeds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.table(ids))


def test_an_error_names_the_line_in_the_module() -> None:
    ours = placed(Embeds())
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 5])
    ours(good).to_torch()
    _, num = played(lambda: ours(good))
    assert num == 1
    before = current_session().num_played
    made = ours(bad)
    assert current_session().num_played == before + 1
    line = Embeds.forward.__code__.co_firstlineno + 1
    with pytest.raises(dtorch.OpError, match=f"test_replay.py:{line}"):
        made.to_torch()


def test_an_error_in_a_layer_of_torch_names_the_line_that_calls_it() -> None:
    ours = placed(torch.nn.Embedding(5, 4))
    for ids in ([0, 4], [1, 2]):
        ours(torch.tensor(ids)).to_torch()
    made = ours.block(TorchTensor(dtorch.tensor(torch.tensor([0, 5]), device_mesh=mesh())))
    with pytest.raises(dtorch.OpError, match=r"test_replay.py:\d+") as raised:
        made.to_torch()
    assert "made = ours.block(" in str(raised.value)


def test_compile_takes_it_in() -> None:
    ours, theirs = placed(Block()), Model(Block()).eval()
    check(ours, theirs, X, plays=1)
    compiled = dtorch.compile(ours)
    for _ in range(3):
        assert torch.equal(compiled(X).to_torch(), theirs(X))
    assert (compiled.num_recordings, compiled.num_replays) == (1, 3)


def test_explain_sees_every_layer() -> None:
    ours = dtorch.distribute(Model(Block()).eval(), mesh(2))
    ours(X)
    ours(X)
    assert [row.layer for row in dtorch.explain(ours, inputs=X).communication] == ["block.down"]
    ours(X)  # explaining makes all caches start afresh
    _, num = played(lambda: ours(X))
    assert num == 1


def test_op_by_op_it_is_not_played() -> None:
    ours = placed(Block())
    check(ours, Model(Block()).eval(), X, plays=1)
    with dtorch.check_finite():
        assert played(lambda: ours(X))[1] == 0
    with dtorch.check_finite(), pytest.raises(dtorch.NonFiniteError, match=r"rsqrt|mul|pow"):
        ours(X * 1e30)
    check(ours, Model(Block()).eval(), X, plays=1)


def test_a_module_and_what_it_made_go_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        dtorch.synchronize()
        before = current_session().recorder.num_slots
        ours = placed(Block())
        for _ in range(3):
            ours(X).to_torch()
        del ours
        dtorch.synchronize()
        assert current_session().recorder.num_slots == before
    finally:
        gc.enable()


# ---- which calls can be played again


def layout(*shape: int, dtype: str = "float32") -> Layout:
    return Layout(1, shape, dtype, (-1,))


FACTS = {
    1: SignatureFacts("torch.relu", (layout(3),), (layout(3),)),
    2: SignatureFacts("torch.add", (layout(3), layout(3)), (layout(3),)),
    3: SignatureFacts("torch.chunk", (layout(4),), (layout(2), layout(2))),
    4: SignatureFacts("torch.Tensor.add_", (layout(3),), (layout(3),), writes=True),
    5: SignatureFacts("torch.rand", (), (layout(3),), random=True),
    6: SignatureFacts("torch.nn.functional.batch_norm", (layout(3),), (layout(3),), mutates=True),
    7: SignatureFacts("dtorch.upload", (), (layout(3),)),
    8: SignatureFacts("torch.sum", (layout(3, dtype="int64"),), (layout(dtype="int64"),)),
    9: SignatureFacts("dtorch.compile", (layout(3),), (layout(3),)),
    10: SignatureFacts("dtorch.redistribute", (layout(3),), (layout(3),)),
}
CODE = test_compile_takes_it_in.__code__
OUTER = (CODE, 0)


def tape(calls: list[tuple[Any, ...]], inputs: list[int], *results: int) -> Tape | None:
    chunk = [part for call in calls for part in (call, CODE, 2)]
    return tape_of(chunk, inputs, results, FACTS.__getitem__, OUTER)


def test_a_tape() -> None:
    found = tape([(3, 20, 21, 10, 2), (2, 22, 20, 21, 1.5), (10, 23, 22)], [10], 23)
    at = (CODE, 2)
    steps = [Step(3, 2, (0,), (2,), at), Step(2, 1, (1, 2), (1.5,), at), Step(10, 1, (3,), (), at)]
    assert found == Tape(steps, (4,), {1: [1, 2, 3]})


def test_several_results() -> None:
    found = tape([(3, 20, 21, 10, 2), (1, 22, 20)], [10], 21, 22)
    assert found is not None
    assert (found.results, found.others) == ((2, 3), {1: [1]})
    assert tape([(3, 20, 21, 10, 2), (1, 22, 20)], [10], 21, 10) is None  # gives its input back as well


def test_a_slot_that_is_used_again() -> None:
    found = tape([(1, 20, 10), (1, 21, 20), (1, 20, 21)], [10], 20)
    assert found is not None
    assert [step.ins for step in found.steps] == [(0,), (1,), (2,)]
    assert (found.results, found.others) == ((3,), {1: [1, 2]})


def test_the_line_of_the_caller_is_left_open() -> None:
    found = tape_of([(1, 20, 10), CODE, 0], [10], [20], FACTS.__getitem__, OUTER)
    assert found is not None
    assert found.steps[0].at is None


@pytest.mark.parametrize(
    ("calls", "result"),
    [
        ([(1, 20, 10), (4, 20)], 20),  # writes
        ([(5, 20), (2, 21, 10, 20)], 21),  # draws
        ([(6, 20, 10)], 20),  # changes a buffer
        ([(7, 20, 0), (2, 21, 10, 20)], 21),  # an upload is another one each time
        ([(8, 20, 10), (1, 21, 10), (2, 22, 20, 21)], 22),  # its value may be read
        ([(9, 20, 10)], 20),  # a program
        ([(2, 20, 10, 99)], 20),  # what is no input
        ([(1, 20, 10), (1, 21, 10)], 21),  # another thread's
        ([(1, 10, 10)], 10),  # an input's slot
        ([], 10),  # gives its input back
        ([(1, 20, 10)], 99),
    ],
)
def test_what_cannot_be_played(calls: list[tuple[Any, ...]], result: int) -> None:
    assert tape(calls, [10], result) is None


def test_placements_are_kept() -> None:
    ours = dtorch.distribute(Model(Norm()), mesh(2))
    made = [ours(X) for _ in range(2)]
    assert made[0].placements == made[1].placements == (Replicate(),)
    assert type(made[1]) is TorchTensor
