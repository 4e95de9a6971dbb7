"""Small calls run in one thread: which ones, with the same bits, and threads are as before afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch.runtime.kernels.threads import in_one_thread, is_small, take_num_threads
from dtorch.transport.messages import Definition, Layout

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP is looked for in /proc")
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def definition(op: str, *shapes: tuple[int, ...]) -> Definition:
    layouts = tuple(Layout(1, shape, "float32", (0,)) for shape in shapes)
    return Definition(1, op, "local", [], {}, layouts, layouts[:1])


@pytest.mark.parametrize(
    ("op", "shapes", "small"),
    [
        (ATTENTION, [(1, 4, 8, 16)] * 3, True),
        (ATTENTION, [(1, 4, 1, 64), (1, 4, 100, 64), (1, 4, 100, 64)], True),
        (ATTENTION, [(1, 4, 1024, 64)] * 3, False),
        (ATTENTION, [(4, 8), (6, 8), (6, 8)], True),
        ("torch.nn.functional.layer_norm", [(4, 64), (64,), (64,)], True),
        ("torch.nn.functional.layer_norm", [(512, 576)], False),
        ("torch.nn.functional.group_norm", [(2, 8, 30)], True),
        ("torch.nn.functional.linear", [(2, 2), (2, 2)], False),  # how its sums are cut depends on the threads
        ("torch.mean", [(4,)], False),
        ("torch.add", [(4,), (4,)], False),
    ],
)
def test_which_are_small(op: str, shapes: list[tuple[int, ...]], small: bool) -> None:
    assert is_small(definition(op, *shapes)) is small


def attention(generator: torch.Generator, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def any_of(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=generator))]

    heads, more, size = any_of(1, 2, 5), any_of(1, 2, 4), any_of(4, 16, 64)
    queries = any_of(1, 2, 7, 33)
    keys = any_of(queries, 5, 64)
    batch = any_of(1, 3)
    q = torch.randn(batch, heads * more, queries, size, generator=generator).to(dtype)
    k, v = (torch.randn(batch, heads, keys, size, generator=generator).to(dtype) for _ in range(2))
    kwargs = [{}, {"is_causal": True}, {"attn_mask": torch.randn(queries, keys, generator=generator).to(dtype)}]
    return (q, k, v), {**kwargs[any_of(0, 1, 2)], "enable_gqa": more > 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_attention_has_the_same_bits(four_threads: None, seed: int, dtype: torch.dtype) -> None:
    args, kwargs = attention(torch.Generator().manual_seed(seed), dtype)
    wanted = F.scaled_dot_product_attention(*args, **kwargs)
    found = in_one_thread(F.scaled_dot_product_attention)(*args, **kwargs)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("shape", [(3, 17), (7, 2, 300), (16, 64), (33, 1)], ids=str)
def test_norms_have_the_same_bits(four_threads: None, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(in_one_thread(F.layer_norm)(x, shape[-1:]), F.layer_norm(x, shape[-1:]))
    grouped = torch.randn(2, 8, *shape[1:], generator=torch.Generator().manual_seed(1))
    assert torch.equal(in_one_thread(F.group_norm)(grouped, 4), F.group_norm(grouped, 4))


@on_linux
def test_it_is_one_thread_until_the_end_also_of_a_call_that_fails(four_threads: None) -> None:
    assert in_one_thread(torch.get_num_threads)() == 1
    assert torch.get_num_threads() == 4
    with pytest.raises(RuntimeError):
        in_one_thread(torch.mm)(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.get_num_threads() == 4


def test_threads_are_set_only_where_that_changes_their_number(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    take_num_threads(4)
    assert told == []
    take_num_threads(3)
    assert told == [3]


@on_linux
def test_small_calls_tell_openmp_alone(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.set_num_threads`` tells MKL as well, for good."""
    run = in_one_thread(torch.get_num_threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail("MKL is told"))
    assert run() == 1
    assert torch.get_num_threads() == 4


def test_a_session_with_threads_has_the_bits_of_torch(four_threads: None) -> None:
    dtorch.shutdown()
    dtorch.init(num_threads=4)
    try:
        mesh = dtorch.init_device_mesh("cpu", (1,))
        args, kwargs = attention(torch.Generator().manual_seed(3), torch.float32)
        given = [dtorch.Tensor(t, device_mesh=mesh, placements=[dtorch.Replicate()]) for t in args]
        masks = {
            name: dtorch.Tensor(value, device_mesh=mesh, placements=[dtorch.Replicate()])
            if isinstance(value, torch.Tensor) else value
            for name, value in kwargs.items()
        }  # fmt: skip
        found = dtorch.nn.functional.scaled_dot_product_attention(*given, **masks)
        assert torch.equal(found.to_torch(), F.scaled_dot_product_attention(*args, **kwargs))
    finally:
        dtorch.shutdown()
