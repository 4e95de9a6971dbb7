"""Operators and operands that a tensor cannot take: they are left to Python, as torch's operators leave them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dtorch
from dtorch.face import faced

OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.matmul, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
]  # fmt: skip


class Other:
    """Answers every operator that a tensor leaves to it."""


def _answer(name: str) -> Callable[[Any, Any], str]:
    return lambda self, other: name


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]:
    setattr(Other, f"__r{_name}__", _answer(f"r{_name}"))
for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    setattr(Other, f"__{_name}__", _answer(_name))


def made(face: str) -> Any:
    x = dtorch.arange(3)
    return faced(x) if face == "torch" else x


def outcome(call: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """The answer, or the type of the error and its words."""
    try:
        return call(left, right)
    except (TypeError, RuntimeError) as error:
        return type(error), str(error).replace("TorchTensor", "Tensor")


@pytest.mark.parametrize("face", ["native", "torch"])
@pytest.mark.parametrize("call", OPERATORS, ids=lambda call: call.__name__)
def test_an_operand_that_is_no_tensor_is_left_to_python(call: Callable[[Any, Any], Any], face: str) -> None:
    for other in ("a", None, object(), Other()):
        wanted = outcome(call, torch.arange(3), other)
        assert outcome(call, made(face), other) == wanted, other
        if not isinstance(other, Other) and not call.__name__.startswith("i"):
            assert outcome(call, other, made(face)) == outcome(call, other, torch.arange(3)), other


@pytest.mark.parametrize("face", ["native", "torch"])
def test_membership_among_other_things(face: str) -> None:
    x = made(face)
    assert (x != None) is True  # noqa: E711
    assert (x == "a") is False
    assert None not in [x]
    assert x in [None, "a", x]


@pytest.mark.parametrize("face", ["native", "torch"])
def test_dlpack_gives_the_value(face: str) -> None:
    x = made(face)
    assert torch.equal(torch.from_dlpack(x), torch.arange(3))
    assert np.from_dlpack(x).tolist() == [0, 1, 2]
