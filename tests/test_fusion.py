"""Programs whose local parts run as torch.compile makes them: same values, written once, and as they are where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from dtorch.runtime.executor import Executor
from dtorch.runtime.fusion import copies
from dtorch.runtime.poison import Poison
from dtorch.transport.messages import Definition, Failure, Layout, MeshInfo, Program

compile_it = torch.compile
ADD, ADD_, EXP, VIEW, RAND, SCALE, CAREFUL_, SPLIT = range(1, 9)
PROGRAM = 100


def careful_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes, and then refuses what is above 100."""
    x.add_(y)
    torch._assert_async((x < 100).all())
    return x


class Bench:
    """An executor of one device, with programs to be fused on tensors of one shape."""

    def __init__(self, shape: tuple[int, ...] = (4, 4)) -> None:
        self.failures: list[Failure] = []
        table: dict[str, Callable[..., Any]] = {
            "torch.add": torch.add, "torch.Tensor.add_": torch.Tensor.add_, "torch.exp": torch.exp, "torch.t": torch.t,
            "torch.rand": torch.rand, "torch.mul": torch.mul, "careful_": careful_, "torch.aminmax": torch.aminmax,
        }  # fmt: skip
        self.executor = Executor(
            1, 0, table.__getitem__, lambda place: torch.device("cpu"), lambda *_: pytest.fail("no group"), self.failures.append
        )
        self.executor.add_mesh(MeshInfo(1, "cpu", (1,), (0,), (0,)))
        whole = Layout(1, shape, "float32", (-1,))
        scalar = Layout(1, (), "float32", (-1,))
        one, two, number = [["t", 0]], [["t", 0], ["t", 1]], [["t", 0], ["n", 0]]
        for definition in (
            Definition(ADD, "torch.add", "local", two, {}, (whole, whole), (whole,)),
            Definition(ADD_, "torch.Tensor.add_", "local", two, {}, (whole, whole), (whole,), (0,)),
            Definition(EXP, "torch.exp", "local", one, {}, (whole,), (whole,)),
            Definition(VIEW, "torch.t", "local", one, {}, (whole,), (whole,)),
            Definition(RAND, "torch.rand", "random", [["l", list(shape)]], {}, (), (whole,), params={"random": True}),
            Definition(SCALE, "torch.mul", "local", number, {}, (whole,), (whole,)),
            Definition(CAREFUL_, "careful_", "local", two, {}, (whole, whole), (whole,), (0,)),
            Definition(SPLIT, "torch.aminmax", "local", one, {}, (whole,), (scalar, scalar)),
        ):
            self.executor.add_definition(definition)
        self.whole = whole
        self.seq = 0
        self._run([], [])
        self.executor.stores[0].extend([None] * 32)

    def _run(self, *body: Any) -> None:
        self.seq += 1
        self.executor.run(self.seq, msgspec.msgpack.encode(body), [])

    def program(
        self, calls: Sequence[Sequence[Any]], dying: list[int], outputs: tuple[int, ...], captured: int | None = 7
    ) -> Callable[[torch.Tensor], list[Any]]:
        """A program in which register 0 is given and 1 is the tensor in slot ``captured``; it gives ``outputs``."""
        outs = (self.whole,) * len(outputs)
        self.executor.add_definition(Definition(PROGRAM, "dtorch.program", "program", [], {}, (self.whole,), outs))
        body = msgspec.msgpack.encode([calls, [[1, dying]] if dying else []])
        taken = ((1, captured),) if captured is not None else ()
        self.executor.add_program(Program(PROGRAM, (1,), body, 16, (0,), outputs, taken, (), True))

        def run(x: Any) -> list[Any]:
            store = self.executor.stores[0]
            store[0] = x
            slots = list(range(8, 8 + len(outputs)))
            self._run([[PROGRAM, *slots, 0]], [])
            return [store[slot] for slot in slots]

        return run


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of the compiler, which is one that generates no code, so that it is quick."""
    asked: list[dict[str, Any]] = []

    def compiler(traced: Any, **options: Any) -> Any:
        asked.append(options)
        return compile_it(traced, backend="aot_eager", dynamic=options["dynamic"])

    monkeypatch.setattr(torch, "compile", compiler)
    return asked


def test_what_is_written_in_place_is_written_once(compilations: list[dict[str, Any]]) -> None:
    bench = Bench()
    run = bench.program([[ADD, 2, 0, 1], [ADD_, 1, 2], [EXP, 3, 2], [ADD, 4, 3, 1]], [2, 3], (4,))
    total = torch.rand(4, 4)
    bench.executor.stores[0][7] = total.clone()
    for _ in range(3):
        x = torch.rand(4, 4)
        made = x + total
        total = total + made
        torch.testing.assert_close(run(x)[0], made.exp() + total)
        torch.testing.assert_close(bench.executor.stores[0][7], total)
    assert compilations == [{"mode": "default", "dynamic": False}]
    assert not bench.failures


def test_views_of_what_is_written_see_it(compilations: list[dict[str, Any]]) -> None:
    bench = Bench()
    run = bench.program([[VIEW, 2, 1], [ADD_, 1, 0], [ADD, 3, 2, 0]], [2], (3,))
    for _ in range(2):
        before, x = torch.rand(4, 4), torch.rand(4, 4)
        bench.executor.stores[0][7] = before.clone()
        torch.testing.assert_close(run(x)[0], (before + x).t() + x)
    assert len(compilations) == 1


def test_inputs_that_share_memory_go_on_sharing_it(compilations: list[dict[str, Any]]) -> None:
    bench = Bench()
    run = bench.program([[ADD_, 1, 1], [ADD, 2, 0, 0]], [], (2,))
    for _ in range(2):
        memory = torch.rand(4, 4)
        bench.executor.stores[0][7] = memory.clone()
        torch.testing.assert_close(run(bench.executor.stores[0][7].t())[0], (memory * 2).t() * 2)
    assert len(compilations) == 1


def test_random_numbers_and_numbers_of_a_call_are_not_part_of_what_is_compiled(compilations: list[dict[str, Any]]) -> None:
    bench = Bench()
    calls = [[EXP, 2, 0], [SCALE, 3, 2, 0.5], [RAND, 4], [ADD, 5, 3, 4], [EXP, 6, 5]]
    run = bench.program(calls, [2, 3, 4, 5], (6,), captured=None)
    torch.manual_seed(5)
    x = torch.rand(4, 4)
    torch.manual_seed(7)
    found = [run(x)[0] for _ in range(2)]
    torch.manual_seed(7)
    for value in found:
        torch.testing.assert_close(value, (x.exp() * 0.5 + torch.rand(4, 4)).exp())
    assert len(compilations) == 2  # before and behind the draw


def test_several_outputs_and_empty_tensors(compilations: list[dict[str, Any]]) -> None:
    bench = Bench()
    run = bench.program([[SPLIT, 2, 3, 0], [EXP, 4, 0]], [], (2, 3, 4), captured=None)
    x = torch.randn(4, 4)
    assert [v.tolist() for v in run(x)] == [x.min().item(), x.max().item(), x.exp().tolist()]
    empty = Bench((0, 3))
    (made,) = empty.program([[EXP, 2, 0], [ADD, 3, 2, 0]], [2], (3,), captured=None)(torch.empty(0, 3))
    assert made.shape == (0, 3)


def test_poison_passes_by_the_compiler(compilations: list[dict[str, Any]]) -> None:
    bench = Bench()
    run = bench.program([[EXP, 2, 0], [ADD, 3, 2, 0]], [2], (3,), captured=None)
    assert type(run(Poison(3))[0]) is Poison
    torch.testing.assert_close(run(torch.zeros(4, 4))[0], torch.ones(4, 4))
    assert len(compilations) == 1


def test_what_cannot_be_compiled_runs_as_it_is_and_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []

    def compiler(traced: Any, **options: Any) -> Any:
        asked.append(options)

        def fails(*tensors: torch.Tensor) -> Any:
            tensors[0].add_(1000)  # it has written when it fails
            raise RuntimeError("no compiler")

        return fails

    monkeypatch.setattr(torch, "compile", compiler)
    bench = Bench()
    run = bench.program([[ADD_, 1, 0], [EXP, 2, 1]], [], (2,))
    bench.executor.stores[0][7] = torch.zeros(4, 4)
    with caplog.at_level(logging.WARNING):
        for number in (1.0, 2.0):
            torch.testing.assert_close(run(torch.ones(4, 4))[0], torch.full((4, 4), number).exp())
    assert len(asked) == 1
    assert [record.message for record in caplog.records].count("a program is not fused here: torch.compile failed") == 1


def test_a_part_that_fails_after_it_has_written_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)
    bench = Bench()
    run = bench.program([[CAREFUL_, 1, 0], [EXP, 2, 1]], [], (2,))
    bench.executor.stores[0][7] = torch.zeros(4, 4)
    run(torch.ones(4, 4))
    assert not bench.failures
    assert type(run(torch.full((4, 4), 100.0))[0]) is Poison
    assert bench.executor.stores[0][7].unique().tolist() == [101.0]  # as without the compiler, which is not asked twice
    assert [failure.kind for failure in bench.failures] == ["RuntimeError"]


def test_copies_keep_what_shares_memory_and_how_it_lies() -> None:
    base = torch.randn(3, 4, dtype=torch.complex64)
    one, two, three = copies([base, base.t(), base.conj().imag])
    assert torch.equal(one, base)
    assert three.is_neg()
    one.zero_()
    assert not two.any()
    assert not three.any()
    assert base.any()
    assert two.stride() == base.t().stride()
