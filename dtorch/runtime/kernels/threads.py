"""Small calls for which torch would wake its threads all the same.

Attention and two norms go to OpenMP's threads as soon as there are two rows or heads, however small. Between calls these
wait actively, for a millisecond or so, and take the core that the client records on. A head or a row is computed by one
thread from its first to its last number, so that how many there are changes no bit; of linears and reductions it does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from dtorch.transport.messages import Definition

_MAX_PRODUCTS = 1 << 16
"""Multiplications of queries with keys, up to which one thread is as quick as waking others (some 20 us)."""
_MAX_ROWS = 1 << 14
"""Elements of a norm, likewise."""


def is_small(definition: Definition) -> bool:
    """Whether one thread does for a call on the CPU, with the same bits."""
    shapes = [layout.shape for layout in definition.inputs]
    match definition.op.rpartition(".")[2]:
        case "scaled_dot_product_attention" if len(shapes) > 1 and len(shapes[1]) > 1:
            return prod(shapes[0]) * shapes[1][-2] <= _MAX_PRODUCTS
        case "layer_norm" | "group_norm" if shapes:
            return prod(shapes[0]) <= _MAX_ROWS
        case _:
            return False


def in_one_thread(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, computed by the calling thread alone."""

    def call(*args: Any, **kwargs: Any) -> Any:
        num_threads = torch.get_num_threads()
        if num_threads == 1 or torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        torch.set_num_threads(1)
        try:
            return fn(*args, **kwargs)
        finally:
            torch.set_num_threads(num_threads)

    return call
