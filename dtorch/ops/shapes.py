"""Ops whose result has as many elements as their input's values say.

Such an op waits: the workers say what shape the result has, then the op is recorded again with that shape, so that what
follows is an op like any other. The inputs are made replicated first, on any placement, and so is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from dtorch.ops._op import Op
from dtorch.ops._out import written
from dtorch.ops._rules import replicate_only
from dtorch.ops._tree import tensors_of, with_tensors
from dtorch.ops.table import OPS, PUBLIC
from dtorch.ops.view import front
from dtorch.placement import Replicate
from dtorch.tensor import Tensor

_DTYPES = sorted({str(t) for t in vars(torch).values() if isinstance(t, torch.dtype)})
_BY_NAME = {str(t): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
MAX_FACTS = 144
"""Room for the shapes of all results of one call, as numbers."""


def facts_of(result: Any) -> torch.Tensor:
    """Number of results, then dtype, number of dims, sizes and strides of each; zeros behind."""
    outs = [result] if isinstance(result, torch.Tensor) else list(result)
    numbers = [len(outs)]
    for out in outs:
        numbers += [_DTYPES.index(str(out.dtype)), out.ndim, *out.shape, *out.stride()]
    if len(numbers) > MAX_FACTS:
        raise ValueError(f"{len(outs)} results are too many for an op whose shapes depend on values")
    return torch.tensor(numbers + [0] * (MAX_FACTS - len(numbers)), dtype=torch.int64, device=outs[0].device)


def shapes_from(facts: list[int]) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    """What ``facts_of`` says: (dtype, shape, strides) of every result."""
    num, rest = facts[0], facts[1:]
    shapes = []
    for _ in range(num):
        dtype, ndim = rest[:2]
        shapes.append((_DTYPES[dtype], tuple(rest[2 : 2 + ndim]), tuple(rest[2 + ndim : 2 + 2 * ndim])))
        rest = rest[2 + 2 * ndim :]
    return tuple(shapes)


class Sized:
    """An op whose shapes depend on values.

    Args:
        name: under which workers find its two halves.
        fn: torch's function.
        pack: makes of the results what torch returns; a single tensor by default when there is one result.
    """

    def __init__(self, name: str, fn: Callable[..., Any], pack: Callable[[list[Any]], Any] | None = None) -> None:
        def facts(*args: Any, **kwargs: Any) -> torch.Tensor:
            return facts_of(fn(*args, **kwargs))

        def sized(_: Any, *args: Any, **kwargs: Any) -> Any:
            made = fn(*args, **kwargs)
            return made if isinstance(made, torch.Tensor) else tuple(made)

        def stand_in(shapes: Any, *_: Any, **__: Any) -> Any:
            outs = tuple(
                torch.empty_strided(shape, stride, dtype=_BY_NAME[dtype], device="meta") for dtype, shape, stride in shapes
            )
            return outs if pack is not None else outs[0]

        def facts_stand_in(*_: Any, **__: Any) -> torch.Tensor:
            return torch.empty(MAX_FACTS, dtype=torch.int64, device="meta")

        self.name = name
        self.pack = pack
        self.facts = OPS[f"facts.{name}"] = Op(f"facts.{name}", facts, replicate_only, stand_in=facts_stand_in)
        self.sized = OPS[f"sized.{name}"] = Op(f"sized.{name}", sized, replicate_only, stand_in=stand_in)
        self.__name__ = self.__qualname__ = name
        self.__doc__ = f"``torch.{name}``. Waits for the shape of its result; inputs are made Replicate() first."

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = iter(
            [t.redistribute([Replicate()] * t.device_mesh.ndim) for t in tensors_of((args, kwargs))]
        )
        made: tuple[tuple[Any, ...], dict[str, Any]] = with_tensors((args, kwargs), whole)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._whole(args, kwargs)
        known = _known.get()
        facts: list[int] = self.facts.record(args, kwargs).tolist() if known is None else known.facts_of(self, args, kwargs)
        return self._finish(facts, args, kwargs)

    def _finish(self, facts: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = self.sized.record((shapes_from(facts), *args), kwargs)
        return made if self.pack is None else self.pack(list(made))


class _Asked(BaseException):
    """A function came to a shape that is not known yet: ``facts`` will say."""

    def __init__(self, facts: Tensor) -> None:
        self.facts = facts


class _Known:
    """The shapes that one call of ``wait_shape`` has waited for, in the order in which its function asks."""

    def __init__(self) -> None:
        self.facts: list[list[int]] = []
        self.at = 0

    def facts_of(self, op: Sized, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        self.at += 1
        if self.at > len(self.facts):
            raise _Asked(op.facts.record(args, kwargs))
        return self.facts[self.at - 1]


_known: ContextVar[_Known | None] = ContextVar("dtorch_known_shapes", default=None)


async def wait_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, whose results' shapes depend on values, without blocking the event loop meanwhile.

    ``fn`` is any such function or method of torch or dtorch, or one of your own that calls them: ``await
    dtorch.wait_shape(torch.unique, x, return_counts=True)``, ``await dtorch.wait_shape(x.nonzero)``, ``await
    dtorch.wait_shape(lambda: x[mask] * 2)``. Where it needs a shape it is left, and called again once that is known; so it
    should do nothing but make new tensors.

    Raises:
        TypeError: no shape in ``fn`` depends on values; then it can simply be called.
    """
    known = _Known()
    while True:
        known.at = 0
        token = _known.set(known)
        try:
            result = fn(*args, **kwargs)
        except _Asked as asked:
            waiting = asked.facts
        else:
            if not known.facts:
                raise TypeError(f"wait_shape: {fn!r} has a shape that is known at once; call it")
            return result
        finally:
            _known.reset(token)
        known.facts.append(await waiting.tolist_async())


PUBLIC["wait_shape"] = wait_shape

NONZERO = Sized("nonzero", torch.nonzero)
NONZERO_TUPLE = Sized("nonzero_tuple", lambda x: torch.nonzero(x, as_tuple=True), tuple)
MASKED_SELECT = Sized("masked_select", torch.masked_select)
BINCOUNT = Sized("bincount", torch.bincount)
ARGWHERE = Sized("argwhere", torch.argwhere)
REPEATS = Sized("repeat_interleave", torch.repeat_interleave)
UNIQUE = Sized("unique", lambda *a, **k: _listed(torch.unique(*a, **k)), list)
UNIQUE_CONSECUTIVE = Sized("unique_consecutive", lambda *a, **k: _listed(torch.unique_consecutive(*a, **k)), list)


def _listed(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@front("nonzero")
def nonzero(input: Tensor, *, as_tuple: bool = False, out: Any = None) -> Any:
    """``torch.nonzero``. Waits for the number of nonzero elements."""
    made = NONZERO_TUPLE(input) if as_tuple else NONZERO(input)
    return made if out is None else written(out, made)


for _sized in (MASKED_SELECT, BINCOUNT, ARGWHERE):
    front(_sized.name)(_sized)


def _unpacked(outs: list[Any]) -> Any:
    return outs[0] if len(outs) == 1 else tuple(outs)


@front("unique")
def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """``torch.unique``. Waits for the number of different values."""
    return _unpacked(UNIQUE(input, sorted=sorted, return_inverse=return_inverse, return_counts=return_counts, dim=dim))


@front("unique_consecutive")
def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """``torch.unique_consecutive``. Waits for the number of runs."""
    made = UNIQUE_CONSECUTIVE(input, return_inverse=return_inverse, return_counts=return_counts, dim=dim)
    return _unpacked(made)


_repeat_number = OPS["torch.repeat_interleave"]


@front("repeat_interleave")
def repeat_interleave(
    input: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """``torch.repeat_interleave``. With a tensor of repeats it waits for their sum, unless ``output_size`` gives it."""
    named = {} if output_size is None else {"output_size": output_size}
    if repeats is None:
        return REPEATS(input, **named)
    if isinstance(repeats, (list, tuple)):
        repeats = torch.tensor(repeats)
    if isinstance(repeats, torch.Tensor) and isinstance(input, Tensor):
        repeats = input._spec.session.upload(repeats, input._spec.mesh, None)
    if isinstance(repeats, int):
        return _repeat_number.record((input, repeats, dim), named)
    return REPEATS(input, repeats, dim, **named)


_where = OPS.get("torch.where")


@front("where")
def where(condition: Any, input: Any = None, other: Any = None, *, out: Any = None) -> Any:
    """``torch.where``. With the condition alone it is ``nonzero(as_tuple=True)``, and waits."""
    if input is None and other is None:
        return nonzero(condition, as_tuple=True)
    assert _where is not None
    return _where.record((condition, input, other), {} if out is None else {"out": out})


def _where_method(self: Any, condition: Any, other: Any) -> Any:
    return where(condition, self, other)


def _register_where() -> None:
    from dtorch.ops.table import METHODS
    from dtorch.tensor import TORCH

    METHODS["where"] = _where_method
    TORCH[torch.Tensor.where] = _where_method


_register_where()
