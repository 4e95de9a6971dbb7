"""What a torch function would give: shapes, strides and dtypes, found without the data.

Small calls run for real, on zeros: quick, exact to the stride, and wrong calls raise in torch's own words. Large ones run
on the meta device. Many meta functions are Python references behind a decorator that imports torch's compiler on their
first call, which takes a second and more and has no other effect unless the compiler is in use. ``defer_compiler`` lets
such a call go ahead without the import for as long as nobody else has imported it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MARK = "__dynamo_disable"  # where torch._disable_dynamo keeps what it made of a function


def defer_compiler() -> None:
    """Prepare all of torch's references; does nothing when the compiler is loaded already."""
    if "torch._dynamo" in sys.modules:
        return
    pending = [*vars(torch._refs).values()]
    for table in torch._decomp.global_decomposition_table.values():
        pending.extend(table.values())
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if not isinstance(value, FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        inside = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        pending.extend(inside)
        if value.__code__.co_filename == torch._compile.__file__:
            for fn in inside:
                if isinstance(fn, FunctionType) and not hasattr(fn, _MARK):
                    setattr(fn, _MARK, _until_loaded(fn))


def _until_loaded(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")
        disable = getattr(compiler, "disable", None)
        if disable is None:
            return fn(*args, **kwargs)
        disabled = disable(fn, True, wrapping=False)
        setattr(fn, _MARK, disabled)
        return disabled(*args, **kwargs)

    return call


SMALL_ELEMENTS = 1 << 17
"""Calls whose inputs have no more elements than this together run for real."""
MAX_REAL_ELEMENTS = 1 << 22
"""So do larger ones that fail on the meta device, for the sake of their words."""


def outcome(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], metas: Sequence[torch.Tensor], random: bool
) -> tuple[Any, Sequence[torch.Tensor]]:
    """What ``fn`` gives for meta tensors in ``args`` and ``kwargs``, as tensors without meaningful data.

    Args:
        metas: the meta tensors among the arguments, in order.
        random: it draws random numbers, and this process's generators must not move.

    Returns:
        The result, and the tensors that stood for ``metas`` (an op in place has changed them).
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError("torch.jit.trace of tensors on a mesh: they have no memory here; use dtorch.compile")
    size = sum(m.numel() for m in metas)
    if size <= SMALL_ELEMENTS and not random:
        real = stand_ins(args, kwargs, metas)
        try:
            with torch.no_grad():
                return fn(*real[0], **real[1]), real[2]
        except Exception:
            # Wrong for every value, or only for zeros (a division, an inverse)? The meta device knows no values.
            try:
                with torch.no_grad():
                    return fn(*args, **kwargs), metas
            except Exception:
                logger.debug("%s fails on the meta device too", fn)
            for whole in (False, True):
                real = stand_ins(args, kwargs, metas, 1, whole)
                try:
                    with torch.no_grad():
                        return fn(*real[0], **real[1]), real[2]
                except Exception:
                    logger.debug("%s fails on ones too", fn)
            raise
    try:
        with torch.no_grad():
            return fn(*args, **kwargs), metas
    except Exception:
        if size > MAX_REAL_ELEMENTS:
            raise
        real = stand_ins(args, kwargs, metas)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = fn(*real[0], **real[1])
        if random:
            return made, real[2]
        raise


def stand_ins(
    args: tuple[Any, ...], kwargs: dict[str, Any], metas: Sequence[torch.Tensor], value: int = 0, integers: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """The arguments with zeros on the CPU in place of meta tensors, or with another ``value``.

    Args:
        integers: give it to integers too, which may be indices.
    """
    made: dict[int, torch.Tensor] = {}
    for m in metas:
        filled = torch.empty_strided(m.shape, m.stride(), dtype=m.dtype)
        inexact = m.dtype.is_floating_point or m.dtype.is_complex
        made[id(m)] = filled.fill_(value if inexact or integers else 0).data  # data: of version 0

    given = [made[id(m)] for m in metas]
    return tuple(_standing(a, made) for a in args), {k: _standing(v, made) for k, v in kwargs.items()}, given


def _standing(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """``value`` with what was ``made`` in place of the tensors of these ids."""
    if isinstance(value, torch.Tensor):
        return made[id(value)]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, tuple):
        return tuple(_standing(v, made) for v in value)
    if isinstance(value, list):
        return [_standing(v, made) for v in value]
    if isinstance(value, slice):
        return slice(_standing(value.start, made), _standing(value.stop, made), _standing(value.step, made))
    return value


defer_compiler()
