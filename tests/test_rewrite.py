"""Rules on plans: what each makes of a plan, when it keeps its hands off, and that no bit changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.runtime.comm import Wire, merged, split
from dtorch.runtime.executor import Executor
from dtorch.runtime.kernels.into import into
from dtorch.runtime.plan import steps_of
from dtorch.runtime.rewrite import RULES, chosen, rewrite
from dtorch.runtime.rewrite.block import Block
from dtorch.transport.messages import Definition, Layout, MeshInfo

MANY = 64 * 1024  # floats, above what is worth forgetting early
HERE = MeshInfo(1, "cpu", (2,), (0, 1), (0, 0))
APART = MeshInfo(1, "cpu", (2,), (0, 1), (1, 2))
WHOLE, CUT, PENDING = (Layout(1, (MANY,), "float32", (code,)) for code in (-1, 0, -2))
FLAGS = Layout(1, (MANY,), "bool", (-1,))

_A, _B, _N = ["t", 0], ["t", 1], ["n", 0]
DEFINITIONS: dict[str, tuple[Any, ...]] = {
    # name: op, kernel, args, inputs, outputs, writes
    "zeros": ("torch.zeros", "local", [["u", [MANY]]], (), (WHOLE,), ()),
    "add": ("torch.add", "local", [_A, _B], (WHOLE, WHOLE), (WHOLE,), ()),
    "exp": ("torch.exp", "local", [_A], (WHOLE,), (WHOLE,), ()),
    "scale": ("torch.mul", "local", [_A, _N], (WHOLE,), (WHOLE,), ()),
    "lt": ("torch.lt", "local", [_A, _B], (WHOLE, WHOLE), (FLAGS,), ()),
    "clamp": ("torch.clamp", "local", [_A, 0.0, 2.0], (WHOLE,), (WHOLE,), ()),
    "flip": ("torch.flip", "local", [_A, ["u", [0]]], (WHOLE,), (WHOLE,), ()),
    "view": ("torch.Tensor.view", "local", [_A, MANY], (WHOLE,), (WHOLE,), ()),
    "pick": ("torch.Tensor.__getitem__", "local", [_A, _N], (WHOLE,), (Layout(1, (), "float32", (-1,)),), ()),
    "add_": ("torch.Tensor.add_", "local", [_A, _B], (WHOLE, WHOLE), (WHOLE,), (0,)),
    "rand": ("torch.rand", "random", [["u", [MANY]]], (), (WHOLE,), ()),
    "cut": ("dtorch.redistribute", "redistribute", [], (WHOLE,), (CUT,), ()),
    "stay": ("dtorch.redistribute", "redistribute", [], (CUT,), (CUT,), ()),
    "gather": ("dtorch.redistribute", "redistribute", [], (CUT,), (WHOLE,), ()),
    "reduce": ("dtorch.redistribute", "redistribute", [], (PENDING,), (WHOLE,), ()),
    "exp cut": ("torch.exp", "local", [_A], (CUT,), (CUT,), ()),
}
NUMBERS = {name: number for number, name in enumerate(DEFINITIONS, 1)}
KNOWN = {
    number: Definition(
        number, op, kernel, args, {}, ins, outs, writes, {"random": True} if kernel == "random" else {"axes": []}
    )
    for (name, (op, kernel, args, ins, outs, writes)), number in zip(DEFINITIONS.items(), NUMBERS.values(), strict=True)
}


def block(*calls: tuple[Any, ...], dying: tuple[int, ...] = (), mesh: MeshInfo = HERE) -> Block:
    steps = steps_of([[NUMBERS[name], *rest] for name, *rest in calls], KNOWN)
    return Block(tuple(steps), frozenset(dying), {1: mesh})


def lines(found: Block) -> list[str]:
    return str(found).splitlines()


def test_tensors_are_forgotten_after_their_last_use() -> None:
    before = block(("exp", 1, 0), ("exp", 2, 1), ("add", 3, 1, 2), ("exp", 4, 3), dying=(1, 2, 3))
    assert lines(before) == ["1 = exp(0)", "2 = exp(1)", "3 = add(1, 2)", "4 = exp(3)"]
    assert lines(rewrite(before, ("free_early",))) == [
        "1 = exp(0)",
        "2 = exp(1)",
        "3 = add(1, 2) free 1 2",
        "4 = exp(3) free 3",
    ]


def test_small_tensors_and_those_that_live_on_are_not_forgotten_early() -> None:
    before = block(("pick", 1, 0, 5), ("exp", 2, 0), dying=(1,))
    assert rewrite(before, ("free_early",)) == before


def test_calls_whose_results_nobody_reads_are_left_out() -> None:
    before = block(("exp", 1, 0), ("add", 2, 1, 0), ("exp", 3, 0), ("exp", 4, 3), dying=(1, 2, 3))
    assert lines(rewrite(before, ("drop_dead",))) == ["3 = exp(0)", "4 = exp(3)"]


def test_calls_that_draw_write_or_may_fail_on_values_are_never_left_out() -> None:
    before = block(("rand", 1), ("pick", 2, 0, 7), ("add_", 0, 0), ("exp", 3, 0), dying=(1, 2))
    assert rewrite(before, ("drop_dead",)) == before


def test_a_redistribution_done_before_is_not_done_again() -> None:
    before = block(("gather", 1, 0), ("exp", 2, 1), ("gather", 3, 0), ("add", 4, 2, 3), dying=(1, 2, 3))
    assert lines(rewrite(before, ("move_once",))) == ["1 = redistribute(0)", "2 = exp(1)", "4 = add(2, 1)"]


@pytest.mark.parametrize(
    "calls",
    [
        [("gather", 1, 0), ("gather", 2, 0)],  # the results live on
        [("gather", 1, 0), ("add_", 9, 9), ("gather", 3, 0)],  # 9 may be a view of what 0 is
        [("exp cut", 5, 0), ("gather", 1, 5), ("add_", 1, 1), ("gather", 3, 5)],
        [("exp cut", 5, 0), ("gather", 1, 5), ("view", 6, 1), ("add_", 6, 6), ("gather", 3, 5)],
    ],
)
def test_a_redistribution_is_done_again_where_results_could_be_told_apart(calls: list[tuple[Any, ...]]) -> None:
    before = block(*calls, dying=(1, 3, 6))
    assert rewrite(before, ("move_once",)) == before


def test_a_write_elsewhere_does_not_keep_a_redistribution() -> None:
    before = block(("exp cut", 5, 0), ("gather", 1, 5), ("add_", 9, 9), ("gather", 3, 5), ("exp", 4, 3), dying=(1, 3, 5))
    assert len(rewrite(before, ("move_once",)).items) == 4


def test_a_result_takes_the_memory_of_an_input_that_dies() -> None:
    before = block(("exp", 1, 0), ("exp", 2, 1), ("add", 3, 0, 2), ("scale", 4, 3, 2.0), dying=(1, 2, 3))
    assert lines(rewrite(before, ("free_early", "reuse_memory"))) == [
        "1 = exp(0)",
        "2 = exp(1) free 1 into 1",
        "3 = add(0, 2) free 2 into 2",
        "4 = mul(3, #2.0) free 3 into 3",
    ]


def test_a_copy_of_what_dies_on_the_same_device_is_no_copy() -> None:
    before = block(("exp cut", 1, 0), ("stay", 2, 1), ("stay", 3, 0), ("gather", 4, 2), dying=(0, 1, 2))
    assert lines(rewrite(before, ("free_early", "reuse_memory"))) == [
        "1 = exp(0)",
        "2 = redistribute(1) free 1 into 1",
        "3 = redistribute(0) free 0",  # 0 came from outside
        "4 = redistribute(2) free 2",
    ]


@pytest.mark.parametrize(
    "calls",
    [
        [("exp", 2, 0)],  # 0 came from outside: a view of it may live
        [("exp", 1, 0), ("view", 5, 1), ("exp", 2, 1)],  # 5 is a view of 1
        [("exp", 1, 0), ("lt", 2, 1, 0)],  # another dtype
        [("exp", 1, 0), ("flip", 2, 1)],  # not element by element
        [("exp", 1, 0), ("add", 2, 1, 1)],  # both inputs are the one
        [("exp", 1, 0), ("add_", 1, 0), ("exp", 2, 0)],
    ],
)
def test_memory_is_not_taken_where_somebody_may_look_at_it(calls: list[tuple[Any, ...]]) -> None:
    after = rewrite(block(*calls, dying=(0, 1, 2)), ("free_early", "reuse_memory"))
    assert all(" into " not in line for line in lines(after))


def test_communication_begins_at_once_and_is_waited_for_where_it_is_needed() -> None:
    calls = [("gather", 1, 0), ("exp", 3, 2), ("exp", 4, 3), ("add", 5, 1, 4), ("exp", 6, 5)]
    assert lines(rewrite(block(*calls, mesh=APART), ("overlap",))) == [
        "launch 1 = redistribute(0)",
        "3 = exp(2)",
        "4 = exp(3)",
        "wait 1 = redistribute(0)",
        "5 = add(1, 4)",
        "6 = exp(5)",
    ]
    assert rewrite(block(*calls), ("overlap",)) == block(*calls)  # one worker hosts all


def test_what_is_ready_together_is_sent_as_one() -> None:
    before = block(("gather", 1, 0), ("reduce", 3, 2), ("exp", 5, 4), ("add", 6, 1, 3), mesh=APART)
    assert lines(rewrite(before, ("overlap",))) == [
        "launch 1 = redistribute(0) + 3 = redistribute(2)",
        "5 = exp(4)",
        "wait 1 = redistribute(0) + 3 = redistribute(2)",
        "6 = add(1, 3)",
    ]


def test_nothing_that_writes_draws_or_needs_the_result_passes_a_wait() -> None:
    for barrier in (("add_", 8, 8), ("rand", 8), ("exp", 5, 1)):
        before = block(("gather", 1, 0), barrier, ("add", 6, 1, 1), mesh=APART)
        assert rewrite(before, ("overlap",)) == before
    chained = block(("cut", 1, 0), ("gather", 2, 1), mesh=APART)
    assert rewrite(chained, ("overlap",)) == chained


def test_what_is_sent_lives_until_it_is_waited_for() -> None:
    before = block(("gather", 1, 0), ("exp", 3, 2), ("add", 4, 1, 3), dying=(0, 1, 3), mesh=APART)
    assert lines(rewrite(before, ("overlap", "free_early"))) == [
        "launch 1 = redistribute(0)",
        "3 = exp(2)",
        "wait 1 = redistribute(0) free 0",
        "4 = add(1, 3) free 1 3",
    ]


def test_exchanges_sent_as_one_keep_their_own_status() -> None:
    one, two, three = torch.ones(2), torch.zeros(3), torch.ones(1)
    wires = [
        Wire({7: [one]}, {7: [((2,), torch.float32)]}, True),
        Wire({7: [two], 8: [three]}, {7: [((3,), torch.float32)], 8: [((1,), torch.float32)]}, False),
    ]
    whole = merged(wires)
    assert whole.ok
    assert {worker: len(specs) for worker, specs in whole.wanted.items()} == {7: 4, 8: 2}
    first, second = split((whole.sends, True), wires)
    assert (first, second) == (({7: [one]}, True), ({7: [two], 8: [three]}, False))


def test_rules_are_chosen_by_name() -> None:
    assert chosen(None) == chosen("all") == chosen("") == tuple(RULES)
    assert chosen("none") == ()
    assert chosen("free_early, drop_dead") == ("drop_dead", "free_early")
    with pytest.raises(ValueError, match="names no rule fast; there are move_once, drop_dead"):
        chosen("fast")


# ---- bits

TABLE: dict[str, Callable[..., Any]] = {
    "torch.zeros": torch.zeros,
    "torch.add": torch.add,
    "torch.exp": torch.exp,
    "torch.mul": torch.mul,
    "torch.lt": torch.lt,
    "torch.clamp": torch.clamp,
    "torch.flip": torch.flip,
    "torch.Tensor.view": torch.Tensor.view,
    "torch.Tensor.__getitem__": torch.Tensor.__getitem__,
    "torch.Tensor.add_": torch.Tensor.add_,
    "torch.rand": torch.rand,
}


def outcome(calls: list[list[Any]], frees: list[int], rules: tuple[str, ...]) -> list[Any]:
    """What slots hold after a batch, as one worker runs it that hosts both devices."""
    failures: list[Any] = []
    executor = Executor(
        1, 0, TABLE.__getitem__, lambda place: torch.device("cpu"), lambda *_: pytest.fail("no group"), failures.append, rules
    )
    executor.add_mesh(HERE)
    for definition in KNOWN.values():
        executor.add_definition(definition)
    executor.run(1, msgspec.msgpack.encode([[], []]), [])
    generator = torch.Generator().manual_seed(3)
    for store in executor.stores:
        store.extend([None] * 64)
        for slot, layout in ((0, WHOLE), (1, WHOLE), (2, CUT), (3, PENDING)):
            size = MANY // 2 if layout is CUT else MANY
            store[slot] = torch.rand(size, generator=generator)
    torch.manual_seed(5)
    executor.run(2, msgspec.msgpack.encode([calls, [[1, frees]]]), [])
    assert not failures
    return [value for store in executor.stores for value in store]


def test_no_rule_changes_a_bit_of_any_of_many_programs() -> None:
    pick = random.Random(11)
    for _ in range(25):
        kinds = {WHOLE: [0, 1], CUT: [2], PENDING: [3]}
        calls: list[list[Any]] = []
        slot = 4
        for _ in range(14):
            name = pick.choice([n for n in DEFINITIONS if n != "zeros"])
            definition = KNOWN[NUMBERS[name]]
            ins = [pick.choice(kinds[layout]) for layout in definition.inputs]
            numbers = {"scale": [0.5], "pick": [pick.randrange(MANY)]}.get(name, [])
            outs = [] if definition.writes else [slot]
            if outs:
                kinds.setdefault(definition.outputs[0], []).append(slot)
                slot += 1
            calls.append([NUMBERS[name], *outs, *ins, *numbers])
        frees = [s for s in range(4, slot) if pick.random() < 0.7]
        expected = outcome(calls, frees, ())
        for rules in (*((rule,) for rule in RULES), ("free_early", "reuse_memory"), tuple(RULES)):
            for a, b in itertools.zip_longest(expected, outcome(calls, frees, rules)):
                assert (a is None) == (b is None), (calls, rules)
                assert a is None or (torch.equal(a, b) and a.stride() == b.stride()), (calls, rules)


def test_a_worker_a_device_overlaps_and_coalesces_with_the_same_bits(workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    a, b = torch.randn(6, 5), torch.randn(6, 5)

    def step(x: dtorch.Tensor, y: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor, dtorch.Tensor]:
        left, right = x.redistribute(placements=[Replicate()]), y.redistribute(placements=[Replicate()])
        local = (x * 2.0 + y).exp()
        total = (x.sum(0) + y.sum(0)).redistribute(placements=[Replicate()])
        return left + right, local, total * left.sum()

    found = []
    for rules in ("none", "all"):
        monkeypatch.setenv("DTORCH_REWRITE", rules)
        dtorch.init(workers="per-device")
        x, y = (dtorch.Tensor(t, device_mesh=mesh, placements=[Shard(0)]) for t in (a, b))
        wrong = dtorch.Tensor(torch.ones(6), device_mesh=mesh, placements=[Shard(0)])
        compiled = dtorch.compile(step)
        found.append([t.to_torch() for t in (*step(x, y), *compiled(x, y), *compiled(x, y))])
        # What fails stays with what depends on it, also where exchanges go as one.
        bad = torch.linalg.cholesky(dtorch.Tensor(-torch.eye(6), device_mesh=mesh, placements=[Replicate()]))
        whole, spoiled = (t.redistribute(placements=[p]) for t, p in ((wrong, Replicate()), (bad, Shard(0))))
        gathered = spoiled.redistribute(placements=[Replicate()])
        assert torch.equal(whole.to_torch(), torch.ones(6))
        with pytest.raises(dtorch.OpError):
            gathered.to_torch()
    dtorch.init(workers=workers)
    for none, every in zip(*found, strict=True):
        assert torch.equal(none, every)


def test_silu_into_its_input_leaves_out_the_flag_that_only_the_plain_one_has() -> None:
    layout = Layout(0, (3,), "float32", (-1,))
    call = Definition(0, "torch.nn.functional.silu", "local", [["t", 0]], {"inplace": False}, (layout,), (layout,), (), {})
    x = torch.tensor([1.0, -2.0, 3.0])
    want = torch.nn.functional.silu(x)
    assert into(call, 0, torch.nn.functional.silu, torch.device("cpu"))(x) is x
    assert torch.equal(x, want)
