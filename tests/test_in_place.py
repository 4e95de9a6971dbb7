"""Whatever writes in place is seen by every view, also by views of sharded dims, which are copies with a link."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard
from tests._sharding import distribute, mesh_of

NOT_HERE = frozenset(
    {
        "apply_", "as_strided_", "coalesced_", "detach_", "map2_", "map_", "rename_", "requires_grad_", "resize_",
        "resize_as_", "resize_as_sparse_", "retain_grad_", "set_", "share_memory_", "sparse_resize_",
        "sparse_resize_and_clear_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
    }
)  # fmt: skip
"""They write no values: they change what a tensor is, or are for other kinds of tensors."""
BASE = torch.rand(7, 4, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1


def arguments() -> Iterator[tuple[Any, ...]]:
    """Arguments of which some fit each method of a (4, 4) tensor."""
    draw = torch.Generator().manual_seed(1)
    square, rows, vector = (torch.rand(n, generator=draw) * 0.5 for n in ((4, 4), (2, 4), (4,)))
    index, mask = torch.tensor([1, 0]), square > 0.25
    zeros = torch.zeros(1, 4, dtype=torch.long)
    yield from ((), (0.3,), (2,), (square,), (square, 0.5), (square, square + 1), (0.2, 0.7), (2, 0, 1.0), (0, 1), (0,))
    yield from ((0, index, rows), (0, index, 0.5), (mask, 0.5), (mask, torch.arange(16.0)), (index, rows[0, :2]))
    yield from ((0, zeros, square), (0, zeros, square, "sum"), (0, index, rows, "prod"), (vector, vector), (square, vector))
    yield from (((torch.tensor([0, 1]),), rows), (torch.stack([square] * 2), torch.stack([square] * 2)))
    yield from ((square > 2, torch.zeros(16)), (torch.ones(4, 4, dtype=torch.long) * 6,))


def put(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(put(v) for v in value)
    return distribute(value, mesh_of(3), [Replicate()]) if isinstance(value, torch.Tensor) else value


def check_write(write: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> bool:
    """Write into a view of a sharded dim: it, what it looks at, and what else looks there change as in torch. False when
    torch takes no such arguments."""
    base = BASE.clone() if dtype.is_floating_point else (BASE * 20).to(dtype)
    mine = distribute(base, mesh_of(3), [Shard(0)])
    theirs = (base[1:5], base, base[2:7])
    torch.manual_seed(3)
    try:
        write(theirs[0], *args)
    except Exception:
        return False
    views = (mine[1:5], mine, mine[2:7])
    dtorch.manual_seed(3)
    with dtorch.auto_redistribute():
        write(views[0], *put(args))
    for got, want in zip(views, theirs, strict=True):
        torch.testing.assert_close(got.to_torch(), want, equal_nan=True)
    return True


METHODS = sorted(n for n in dir(torch.Tensor) if n.endswith("_") and not n.startswith("_") and n not in NOT_HERE)


@pytest.mark.filterwarnings("ignore")  # of torch, about some of the arguments
def test_methods() -> None:
    untried = []
    for name in METHODS:
        for args in arguments():

            def write(x: Any, *given: Any, name: str = name) -> Any:
                return getattr(x, name)(*given)

            if check_write(write, args) or check_write(write, args, torch.int64):
                break
        else:
            untried.append(name)
    assert set(untried) <= {"addbmm_", "addmv_", "baddbmm_", "cauchy_", "float_power_"}, untried


@pytest.mark.filterwarnings("ignore:dropout")
@pytest.mark.parametrize("name", sorted(n for n, f in vars(F).items() if not n.startswith("_") and inspect.isfunction(f)))
def test_functions_with_a_flag(name: str) -> None:
    fn = getattr(F, name)
    if "inplace" not in inspect.signature(fn).parameters:
        return
    assert any(check_write(lambda x, *given: fn(x, *given, inplace=True), args) for args in ((), (0.3,), (0.3, 0.5)))
    x, given = distribute(BASE - 0.5, mesh_of(3), [Replicate()]), {"threshold": (0.3, 0.5)}.get(name, ())
    wanted = BASE - 0.5
    if "dropout" not in name and name != "rrelu":
        y = x + 0
        fn(y, *given, inplace=True)  # nobody takes the result
        assert fn(y, *given, inplace=True) is y
        fn(fn(wanted, *given, inplace=True), *given, inplace=True)
        torch.testing.assert_close(y.to_torch(), wanted)


def test_running_statistics() -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2))

    def update(fn: Callable[..., Any]) -> Callable[..., Any]:
        def write(mean: Any, *given: Any) -> None:
            fn(given[0], mean[:, 0], mean[:, 1].abs_(), None, None, True)

        return write

    for fn in (F.batch_norm, F.instance_norm):
        assert check_write(update(fn), (x,))
        mean, var = (distribute(t, mesh_of(3), [Replicate()]) for t in (torch.zeros(4), torch.ones(4)))
        assert not mean.to_torch().any()
        fn(distribute(x, mesh_of(3), [Replicate()]), mean, var, None, None, True)
        wanted = torch.zeros(4), torch.ones(4)
        fn(x, *wanted, None, None, True)
        torch.testing.assert_close(mean.to_torch(), wanted[0])  # not the value fetched before
        torch.testing.assert_close(var.to_torch(), wanted[1])


FOREACH = sorted(n for n in dir(torch) if n.startswith("_foreach_") and n != "_foreach_powsum")


def test_foreach() -> None:
    square = BASE[:4] + 0.1
    each: tuple[tuple[Any, ...], ...] = (
        (), (2.0,), ([square],), ([square], [square]), ([square], 0.5), ([0.3],), ([square], [square], [0.3]), (square.sum(),)
    )  # fmt: skip
    for name in FOREACH:
        fn = getattr(torch, name)
        tried = 0
        for args in each:
            try:
                wanted = fn([BASE[1:5].clone()], *args)
            except Exception:
                continue
            tried += 1
            if name.endswith("_"):
                assert check_write(lambda x, *given, fn=fn: fn([x], *given), args)
                continue
            with dtorch.auto_redistribute():
                made = fn([distribute(BASE, mesh_of(3), [Shard(0)])[1:5]], *put(args))
            assert type(made) is type(wanted)
            torch.testing.assert_close(made[0].to_torch(), wanted[0], equal_nan=True)
        assert tried, name
    with pytest.raises(RuntimeError, match="same number of tensors, got 1 and 2"):
        torch._foreach_add([put(square)], [put(square)] * 2)
