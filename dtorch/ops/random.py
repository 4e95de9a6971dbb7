"""Random ops. Numbers are drawn once for the whole tensor (kernel "random"), so they are plain torch's for any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.ops._call import Call, Sig
from dtorch.ops._out import written
from dtorch.ops._rules import P_AVG, P, replicate_only
from dtorch.ops.table import OPS, PUBLIC, row
from dtorch.ops.view import front, record
from dtorch.tensor import Tensor


def _own_piece(call: Call) -> list[Sig]:
    """What is drawn does not depend on the input's values: each device takes its piece of the whole."""
    ndim = call.outputs[0].ndim
    return [Sig((d,) * len(call.tensors), (d,) * len(call.outputs)) for d in range(ndim)]


row("rand_like randn_like", _own_piece, random=True, in_place=False, places="torch")
row("randint_like", _own_piece, random=True, numbers=True, in_place=False, places="torch")


def _in_place(names: str) -> None:
    """Rows that exist in place only."""
    for name in names.split():
        row(f"{name}_", _own_piece, random=True, numbers=True, in_place=True, places="torch.Tensor", writes=0)


_in_place("normal uniform random exponential log_normal cauchy geometric")


def _mask(call: Call) -> list[Sig]:
    """A factor for each element is drawn, from ones in the shape of the whole; so pieces and pending sums may stay."""
    params = {"mask": True}
    sigs = [Sig((d,), (d,), "random", params) for d in range(call.tensors[0].ndim)]
    return sigs + [Sig((code,), (code,), "random", params) for code in (P, P_AVG)]


for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
    row(_name, _mask, random=True, in_place=False, places="torch.nn.functional")
row("dropout feature_dropout", _mask, random=True, in_place=False, places="torch")
row("alpha_dropout feature_alpha_dropout", replicate_only, random=True, in_place=False,
    places="torch torch.nn.functional")
row("bernoulli poisson binomial multinomial", replicate_only, random=True, in_place=False, places="torch torch.Tensor")
row("normal", replicate_only, random=True, in_place=False, places="torch")
row("rrelu", replicate_only, random=True, in_place=False, places="torch torch.nn.functional")
row("gumbel_softmax", replicate_only, random=True, in_place=False, places="torch.nn.functional")


# ---- fronts


def _dropping(name: str, full: str, sharded: Callable[[Tensor, float], Any] | None = None) -> None:
    """Outside training nothing is drawn and the input itself is the result, as in torch."""

    def call(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **more: Any) -> Any:
        training = more.pop("train", training)
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0 or input.numel() == 0:
            return input
        if sharded is not None and any(not q.is_replicate() for q in input.placements):
            made = sharded(input, p)
        else:
            made = record(full, input, p, True)
        return input.copy_(made) if inplace else made

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``torch.nn.functional.{name}``: the numbers are plain torch's, for any placement."
    front(name)(call)

    def in_place(input: Tensor, p: float = 0.5, training: bool = True, **more: Any) -> Any:
        return call(input, p, training, True, **more)

    front(f"{name}_")(in_place)


def _alpha(x: Tensor, p: float) -> Any:
    """alpha_dropout in torch's own steps, of which only the first draws."""
    if p == 1:
        return x * x.new_zeros(())
    noise = x.clone().bernoulli_(1 - p)
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    b = noise.add(-1).mul_(alpha * a).add_(alpha * a * p)
    return x * noise.mul_(a) + b


_dropping("dropout", "torch.nn.functional.dropout")
_dropping("dropout1d", "torch.nn.functional.dropout1d")
_dropping("dropout2d", "torch.nn.functional.dropout2d")
_dropping("dropout3d", "torch.nn.functional.dropout3d")
_dropping("alpha_dropout", "torch.nn.functional.alpha_dropout", _alpha)
_dropping("feature_dropout", "torch.feature_dropout")
_dropping("feature_alpha_dropout", "torch.nn.functional.feature_alpha_dropout")


def _bernoulli_fill(x: torch.Tensor, p: float) -> torch.Tensor:
    return x.bernoulli_(p)


def _bernoulli_of(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).bernoulli_(p)


def _register() -> None:
    from dtorch.ops._op import Op

    OPS["bernoulli_"] = Op(
        "bernoulli_", _bernoulli_fill, _own_piece, writes=0, random=True, numbers=frozenset({1})
    )
    OPS["bernoulli_of"] = Op("bernoulli_of", _bernoulli_of, replicate_only, random=True)


_register()


def _refuse_generator(name: str, generator: Any) -> None:
    if generator is not None:
        raise ValueError(f"{name}: generator= is not supported; dtorch.manual_seed seeds what is drawn from")


@front("bernoulli_")
def bernoulli_(input: Tensor, p: Any = 0.5, *, generator: Any = None) -> Any:
    """``Tensor.bernoulli_``"""
    _refuse_generator("bernoulli_", generator)
    if isinstance(p, (int, float)):
        return record("bernoulli_", input, float(p))
    whole = record("bernoulli_of", _replicated(input), p)
    return input.copy_(whole.redistribute(input.placements))


def _replicated(x: Tensor) -> Tensor:
    from dtorch.placement import Replicate

    return x.redistribute([Replicate()] * x.device_mesh.ndim)


@front("bernoulli")
def bernoulli(input: Tensor, p: Any = None, *, generator: Any = None, out: Any = None) -> Any:
    """``torch.bernoulli``"""
    _refuse_generator("bernoulli", generator)
    if p is not None:
        return input.clone().bernoulli_(p)
    made = record("torch.bernoulli", input)
    return made if out is None else written(out, made)


@front("normal")
def normal(mean: Any, std: Any = 1.0, size: Sequence[int] | None = None, **named: Any) -> Any:
    """``torch.normal``: of tensors, or of two numbers and a size (then with ``device_mesh=`` and ``placements=``)."""
    _refuse_generator("normal", named.pop("generator", None))
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        return record("torch.normal", mean, std, **named)
    if size is None:
        raise TypeError("normal(): of two numbers, and without size=, has no shape")
    from dtorch.creation import FACTORIES

    return FACTORIES["normal"](float(mean), float(std), tuple(size), **named)


PUBLIC["normal"] = normal


@front("rrelu")
def rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Any:
    """``F.rrelu``; outside training a leaky_relu, which draws nothing."""
    if lower > upper:
        raise RuntimeError("Lower bound should be less than or equal to the upper bound")
    if training:
        made = record("torch.rrelu", input, lower, upper, True)
    else:
        made = record("torch.nn.functional.leaky_relu", input, (lower + upper) / 2)
    return input.copy_(made) if inplace else made
