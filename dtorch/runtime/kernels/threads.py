"""Small calls for which torch would wake its threads all the same.

Attention and two norms go to OpenMP's threads as soon as there are two rows or heads, however small. Between calls these
wait actively, for a millisecond or so, and take the core that the client records on. A head or a row is computed by one
thread from its first to its last number, so that how many there are changes no bit; of linears and reductions it does.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from dtorch.transport.messages import Definition

_OPENMP = re.compile(r"/lib(gomp|omp|iomp5)[-.][^/]*$")
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
    """``fn``, computed by the calling thread alone, where torch's OpenMP is found.

    ``torch.set_num_threads`` would do it for MKL as well, which is slower from then on inside parallel loops
    (``take_num_threads``).
    """
    set_num_threads = _openmp_setter()
    if set_num_threads is None:
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        num_threads = torch.get_num_threads()
        if num_threads == 1 or torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        set_num_threads(1)
        try:
            return fn(*args, **kwargs)
        finally:
            set_num_threads(num_threads)

    return call


@cache
def _openmp_setter() -> Callable[[int], None] | None:
    """``omp_set_num_threads``, for the thread that calls it, of the library that torch has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if _OPENMP.search(line)}
    own = str(Path(torch.__file__).parent)
    for path in sorted(loaded, key=lambda path: not path.startswith(own)):
        found: Any = getattr(ctypes.PyDLL(path), "omp_set_num_threads", None)
        if found is not None:
            found.argtypes, found.restype = [ctypes.c_int], None
            before = torch.get_num_threads()
            found(before + 1)
            is_torchs = torch.get_num_threads() == before + 1
            found(before)
            if is_torchs:
                return found  # type: ignore[no-any-return]
    return None


def take_num_threads(num_threads: int) -> None:
    """``torch.set_num_threads``, if that changes anything: to say what is so already makes attention on the CPU 9% slower,
    as MKL is then told for good how many threads to take, also inside torch's own parallel loops."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
