"""Functions whose result takes the memory of an input that nobody else needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import num_numbers
from dtorch.runtime.template import Filler, bind
from dtorch.transport.messages import Definition


def into(
    definition: Definition, position: int, plain: Callable[..., Any], device: torch.device
) -> Callable[..., torch.Tensor]:
    """The function of a call's tensors and numbers that returns tensor ``position``, now with the result in it.

    Where an input is not contiguous the result might have other strides, so ``plain`` is called there. What is not a tensor
    (an input that failed) raises, as it does in ``plain``.
    """
    num = len(definition.inputs)
    # torch.nn.functional.silu(x, inplace) has an argument that the function with ``out`` lacks
    args = definition.args[:1] if definition.op.endswith(".silu") else definition.args
    out = {**{k: v for k, v in definition.kwargs.items() if k != "inplace"}, "out": ["t", position]}
    f = _with_out(definition.op)
    write = bind(f, args, out, Filler(device, []), num, num_numbers(definition))
    first, second = ["t", 0], ["t", 1]
    if definition.args == [first, second] and not definition.kwargs:
        if position == 0:
            return lambda a, b: f(a, b, out=a) if a.is_contiguous() and b.is_contiguous() else plain(a, b)
        return lambda a, b: f(a, b, out=b) if a.is_contiguous() and b.is_contiguous() else plain(a, b)
    if definition.args == [first] and not definition.kwargs:
        return lambda a: f(a, out=a) if a.is_contiguous() else plain(a)
    if definition.args == [first, ["n", 0]] and not definition.kwargs:
        return lambda a, number: f(a, number, out=a) if a.is_contiguous() else plain(a, number)

    def run(*values: Any) -> torch.Tensor:
        fits = all(tensor.is_contiguous() for tensor in values[:num])
        made: torch.Tensor = write(*values) if fits else plain(*values)
        return made

    return run


def handing_over(plain: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The input itself where it is what ``plain``, which copies it, would return."""
    return lambda x: x if x.is_contiguous() else plain(x)


def _with_out(op: str) -> Callable[..., Any]:
    name = op.rpartition(".")[2]
    found: Callable[..., Any] = getattr(torch._C._nn if name in ("silu", "gelu") else torch, name)
    return found
