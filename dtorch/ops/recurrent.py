"""Recurrent layers: the sequences of a batch are independent, time and features are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.ops._call import Call, R, Sig
from dtorch.ops._op import Op
from dtorch.ops._rules import replicate_only
from dtorch.ops.table import OPS, PUBLIC, composite
from dtorch.ops.view import record
from dtorch.tensor import TORCH


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Called as f(data, batch_sizes, states, weights, ...), rather than f(input, states, weights, has_biases, ...)."""
    return isinstance(args[3], (list, tuple))


def _by_batch(call: Call) -> list[Sig]:
    """f(input (T, B, F) or (B, T, F), states (L, B, H), ..., batch_first): B may be sharded."""
    num_states = len(call.outputs) - 1
    batch = 0 if call.args[8] else 1
    weights = (R,) * (len(call.tensors) - 1 - num_states)
    return [Sig((batch, *(1,) * num_states, *weights), (batch, *(1,) * num_states))]


def _packed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` of packed sequences, with the number of rows at each time given as ints."""

    def call(data: Any, sizes: Sequence[int], *more: Any) -> Any:
        return fn(data, torch.tensor(sizes), *more)

    return call


def _layer(name: str) -> None:
    fn = getattr(torch, name)
    kinds = {
        f"torch.{name}": Op(f"torch.{name}", fn, _by_batch),
        f"recurrent.{name}": Op(f"recurrent.{name}", fn, replicate_only, random=True),
        f"packed.{name}": Op(f"packed.{name}", _packed(fn), replicate_only),
        f"packed.recurrent.{name}": Op(f"packed.recurrent.{name}", _packed(fn), replicate_only, random=True),
    }
    OPS.update(kinds)

    def call(*args: Any) -> Any:
        packed = _is_packed(args)
        dropout, is_training = args[6:8] if packed else args[5:7]
        kind = f"recurrent.{name}" if dropout and is_training else f"torch.{name}" if not packed else name
        if packed:
            kind, args = f"packed.{kind}", (args[0], tuple(args[1].tolist()), *args[2:])
        return kinds[kind].record(args, {})

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``torch.{name}``. Dropout between its layers is drawn for the whole, on replicated inputs."
    TORCH[fn] = PUBLIC[name] = call


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _layer(_name)


# ---- packed sequences: how many rows there are depends on the lengths, which are waited for


@composite(torch._pack_padded_sequence)
def pack_padded_sequence(input: Any, lengths: Any, batch_first: bool) -> tuple[Any, torch.Tensor]:
    """The steps of all sequences, longest first, one time after the other: (rows (N, ...), rows at each time (T,))."""
    lens = [int(n) for n in lengths.tolist()]
    steps = input.transpose(0, 1) if batch_first else input
    if len(lens) != steps.shape[1]:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(lens)} (batch_size={steps.shape[1]})"
        )
    if not lens or lens[-1] <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0")
    if lens != sorted(lens, reverse=True):
        raise RuntimeError("`lengths` array must be sorted in decreasing order when `enforce_sorted` is True")
    sizes = [sum(n > t for n in lens) for t in range(lens[0])]
    rows = [t * len(lens) + b for t, size in enumerate(sizes) for b in range(size)]
    flat = steps.reshape(steps.shape[0] * steps.shape[1], *steps.shape[2:])
    return record("torch.index_select", flat, 0, torch.tensor(rows)), torch.tensor(sizes)


@composite(torch._pad_packed_sequence)
def pad_packed_sequence(
    data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Any, torch.Tensor]:
    """The reverse of packing: (padded sequences, their lengths)."""
    sizes = [int(n) for n in batch_sizes.tolist()]
    num_steps = max(len(sizes), total_length)
    padding = data.shape[0]  # the row after the last
    rows, at = [], 0
    for t in range(num_steps):
        size = sizes[t] if t < len(sizes) else 0
        rows += [*range(at, at + size), *[padding] * (sizes[0] - size)]
        at += size
    more = record("torch.cat", [data, data.new_full((1, *data.shape[1:]), padding_value)], 0)
    steps = record("torch.index_select", more, 0, torch.tensor(rows)).reshape(num_steps, sizes[0], *data.shape[1:])
    lengths = torch.tensor([sum(size > b for size in sizes) for b in range(sizes[0])])
    return steps.transpose(0, 1) if batch_first else steps, lengths
