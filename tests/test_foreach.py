"""``torch._foreach_*`` on lists of distributed tensors: every function that torch has, in every form of its schema."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

NAMES = sorted(name for name in dir(torch) if name.startswith("_foreach_"))
SHAPES = ((5,), (3, 3), ())
INTEGRAL = ("pow",)


def lists(offset: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(offset)
    return [torch.rand(shape, generator=draw) * 0.8 + 0.1 for shape in SHAPES]


def forms(name: str) -> list[list[Any]]:
    """Arguments for each overload that takes them: lists, numbers, lists of numbers, a tensor."""
    found = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        if any(a.name == "out" for a in schema.arguments):
            continue
        args: list[Any] = []
        for position, argument in enumerate(schema.arguments):
            kind = str(argument.type)
            if argument.kwarg_only or (argument.name in ("non_blocking", "ord", "dtype")):
                continue
            if kind == "List[Tensor]":
                args.append(lists(position))
            elif kind == "Tensor":
                args.append(torch.rand(3) if argument.name == "scalars" else torch.tensor(2.0))
            elif kind.startswith("List["):
                args.append([2.0, 3.0, 0.5])
            else:
                args.append(2.0)
        if name.startswith("_foreach_mm"):
            args = [[torch.rand(3, 3), torch.rand(2, 2)], [torch.rand(3, 3), torch.rand(2, 2)]]
        found.append(args)
    return found


def put(value: Any, mesh: DeviceMesh, cut: bool) -> Any:
    if isinstance(value, list):
        return [put(v, mesh, cut) for v in value]
    if isinstance(value, torch.Tensor):
        placed = Shard(0) if cut and value.ndim else Replicate()
        return dtorch.tensor(value, device_mesh=mesh, placements=[placed])
    return value


def plain(value: Any) -> Any:
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value.to_torch()


@pytest.mark.parametrize("name", NAMES)
def test_each_function_is_torchs(name: str) -> None:
    fn = getattr(torch, name)
    mesh = DeviceMesh("cpu", [0, 1])
    ran = 0
    for args in forms(name):
        for cut in (False, True):
            given = put(args, mesh, cut)
            expected_in = [[t.clone() for t in a] if isinstance(a, list) and isinstance(a[0], torch.Tensor) else a
                           for a in args]
            expected = fn(*expected_in)
            with dtorch.auto_redistribute():
                made = fn(*given)
            assert type(made) is type(expected)
            if name.endswith("_"):
                assert made is given[0]
            for got, want in zip(plain(made), expected, strict=True):
                if cut:
                    torch.testing.assert_close(got, want)
                else:
                    assert torch.equal(got, want)
            ran += 1
    assert ran >= 2


def test_keywords_and_dtypes() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    x, y = lists(0), lists(1)
    a, b = put(x, mesh, True), put(y, mesh, True)
    with dtorch.auto_redistribute():
        for got, want in (
            (torch._foreach_add(a, b, alpha=3), torch._foreach_add(x, y, alpha=3)),
            (torch._foreach_norm(a, ord=1), torch._foreach_norm(x, ord=1)),
            (torch._foreach_norm(a, float("inf")), torch._foreach_norm(x, float("inf"))),
            (torch._foreach_norm(a, 2, torch.float64), torch._foreach_norm(x, 2, torch.float64)),
            (torch._foreach_addcmul(a, b, b, value=0.5), torch._foreach_addcmul(x, y, y, value=0.5)),
            (torch._foreach_lerp(a, b, weight=0.25), torch._foreach_lerp(x, y, weight=0.25)),
        ):
            for g, w in zip(plain(got), want, strict=True):
                torch.testing.assert_close(g, w)


@pytest.mark.parametrize(
    "call",
    [
        lambda a: torch._foreach_add(a, [1.0]),
        lambda a: torch._foreach_add(a, [a[0]]),
        lambda a: torch._foreach_add(a, 1.0, alpha=2),
        lambda a: torch._foreach_exp(a, 3),
        lambda a: torch._foreach_mul(a, a[:2]),
    ],
)
def test_wrong_calls_raise_what_torch_raises(call: Any) -> None:
    given = lists(0)
    with pytest.raises((TypeError, RuntimeError)) as expected:
        call(given)
    with pytest.raises(expected.type) as met:
        call(put(given, DeviceMesh("cpu", [0, 1]), True))
    assert str(met.value).split(":")[0] == str(expected.value).split(":")[0]
