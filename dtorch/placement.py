"""Placements: what a tensor is along one axis of its mesh.

Instances are immutable and unique: equal placements are the same object, so they compare and hash at C speed as parts
of the keys under which calls are looked up.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from .runtime import layout
from .transport.errors import PlacementError


class Placement:
    """Base of ``Shard``, ``Replicate`` and ``Partial``; never made itself."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Placement:
        raise TypeError("Placement is the base class; use Shard(dim), Replicate() or Partial(reduce_op)")

    def is_shard(self, dim: int | None = None) -> bool:
        """Is this a shard, along ``dim`` where given?"""
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Are reductions pending, by ``reduce_op`` where given?"""
        return False

    @property
    def code(self) -> int:
        """The int that stands for this placement on the wire, see ``runtime/layout.py``."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable, so {name!r} can not be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable, so {name!r} can not be deleted")


class Shard(Placement):
    """Each device along the mesh axis holds one piece of dim ``dim``, cut as ``torch.chunk`` does.

    Args:
        dim: dim of the tensor; negative dims count from the end and are resolved when they meet a tensor.
        block: cut only at multiples of this many elements, such as the head dim of a flattened (heads, head dim).
    """

    __slots__ = ("block", "dim")
    __match_args__ = ("dim", "block")
    dim: int
    block: int

    def __new__(cls, dim: int, block: int = 1) -> Shard:
        made = _SHARDS.get((dim, block))
        # a look-up by value would take True or 1.0 for 1
        if made is not None and type(dim) is int and type(block) is int:
            return made
        dim, block = _index("Shard", "dim", dim), _index("Shard", "block", block)
        if not -layout.MAX_DIMS <= dim < layout.MAX_DIMS:
            raise ValueError(f"Shard expects a dim from -{layout.MAX_DIMS} to {layout.MAX_DIMS - 1}, got {dim}")
        if block < 1:
            raise ValueError(f"Shard expects a block of at least 1 element, got {block}")
        made = object.__new__(cls)
        object.__setattr__(made, "dim", dim)
        object.__setattr__(made, "block", block)
        return _SHARDS.setdefault((dim, block), made)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    @property
    def code(self) -> int:
        if self.dim < 0:
            raise ValueError(f"{self} has no code: resolve its dim first, with normalize(placements, ndim, mesh)")
        return layout.shard_code(self.dim, self.block)

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})" if self.block == 1 else f"Shard(dim={self.dim}, block={self.block})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.dim, self.block)


class Replicate(Placement):
    """Every device along the mesh axis holds the whole."""

    __slots__ = ()

    def __new__(cls) -> Replicate:
        return _REPLICATE

    def is_replicate(self) -> bool:
        return True

    @property
    def code(self) -> int:
        return layout.REPLICATE

    def __repr__(self) -> str:
        return "Replicate()"

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicate, ()


class Partial(Placement):
    """Every device along the mesh axis holds a piece of full shape; reducing the pieces gives the tensor.

    When several axes of a mesh are partial, the value is that of reducing them from left to right.

    Args:
        reduce_op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``.
    """

    __slots__ = ("reduce_op",)
    __match_args__ = ("reduce_op",)
    reduce_op: str

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        made = _PARTIALS.get(reduce_op) if isinstance(reduce_op, str) else None
        if made is None:
            raise ValueError(f"Partial expects one of {', '.join(map(repr, _PARTIALS))}, got {reduce_op!r}")
        return made

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    @property
    def code(self) -> int:
        return layout.partial_code(self.reduce_op)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Partial, (self.reduce_op,)


def _index(owner: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{owner} expects an int as {name}, got {value!r} of type {type(value).__name__}")
    return operator.index(value)


def _partial(reduce_op: str) -> Partial:
    made = object.__new__(Partial)
    object.__setattr__(made, "reduce_op", reduce_op)
    return made


# The instances. One Shard for every (dim, block) that a program names: few, so they are kept for ever.
_SHARDS: dict[tuple[int, int], Shard] = {}
_REPLICATE: Replicate = object.__new__(Replicate)
_PARTIALS: dict[str, Partial] = {op: _partial(op) for op in layout.PARTIAL_CODES}


def from_code(code: int) -> Placement:
    """The placement that a wire code stands for."""
    if layout.is_shard(code):
        return Shard(layout.shard_dim(code), layout.shard_block(code))
    if layout.is_partial(code):
        return Partial(layout.partial_op(code))
    return _REPLICATE


class HasAxes(Protocol):
    """What ``normalize`` wants of a mesh."""

    @property
    def ndim(self) -> int: ...


def normalize(placements: Sequence[Any], ndim_tensor: int, mesh: HasAxes) -> tuple[Placement, ...]:
    """Check placements against a tensor and a mesh, and resolve negative dims.

    Args:
        placements: one placement a mesh axis. Those of ``torch.distributed.tensor`` are welcome.
        ndim_tensor: number of dims of the tensor.
        mesh: the mesh that the tensor lives on.

    Raises:
        PlacementError: wrong length, something that is no placement, or a shard of a dim that the tensor lacks.
    """
    if not isinstance(placements, (tuple, list)):
        if isinstance(placements, Placement) or not isinstance(placements, Sequence) or isinstance(placements, str):
            raise _error(
                (placements,),
                f"Expected a list with one placement a mesh axis ({mesh.ndim} here), got {placements!r}; "
                "write placements=[...].",
            )
        placements = tuple(placements)
    try:
        return _normalize(tuple(placements), ndim_tensor, mesh.ndim)
    except TypeError:  # something unhashable; the same code without the cache words the complaint
        return _normalize.__wrapped__(tuple(placements), ndim_tensor, mesh.ndim)


@lru_cache(maxsize=4096)
def _normalize(placements: tuple[Any, ...], ndim_tensor: int, ndim_mesh: int) -> tuple[Placement, ...]:
    if len(placements) != ndim_mesh:
        raise _error(
            placements,
            f"Expected one placement a mesh axis, {ndim_mesh} in all, got {len(placements)}; "
            f"name each axis, with Replicate() where nothing is split.",
        )
    return tuple(_resolve(placement, placements, ndim_tensor) for placement in placements)


def _resolve(given: Any, placements: tuple[Any, ...], ndim_tensor: int) -> Placement:
    placement = given if isinstance(given, Placement) else _adopt(given, placements)
    if not isinstance(placement, Shard):
        return placement
    if -ndim_tensor <= placement.dim < ndim_tensor:
        return placement if placement.dim >= 0 else Shard(placement.dim + ndim_tensor, placement.block)
    if ndim_tensor == 0:
        raise _error(placements, f"A tensor without dims can not be split, got {placement}; use Replicate().")
    raise _error(
        placements,
        f"Expected a dim from -{ndim_tensor} to {ndim_tensor - 1} (the tensor has {ndim_tensor} "
        f"dim{'s' if ndim_tensor > 1 else ''}), got {placement}; choose an existing dim or use Replicate().",
    )


def _adopt(given: Any, placements: tuple[Any, ...]) -> Placement:
    """Translate a placement of torch's DTensor, known by its methods so that torch.distributed is not imported."""
    if not isinstance(given, type) and hasattr(given, "is_shard") and hasattr(given, "is_partial"):
        # a strided shard interleaves pieces and a masked partial hides a buffer: neither is a plain placement
        if getattr(given, "split_factor", 1) == 1 and not hasattr(given, "mask_buffer"):
            if given.is_shard():
                return Shard(given.dim)
            if given.is_replicate():
                return _REPLICATE
            if given.is_partial() and given.reduce_op in _PARTIALS:
                return Partial(given.reduce_op)
        raise _error(
            placements, f"Expected a placement that dtorch has, got {given!r}; use Shard, Replicate or Partial."
        )
    hint = f"{given.__name__}(...)" if isinstance(given, type) else "Shard(dim), Replicate() or Partial()"
    raise _error(placements, f"Expected a placement, got {given!r} of type {type(given).__name__}; use {hint}.")


def _error(placements: tuple[Any, ...], detail: str) -> PlacementError:
    return PlacementError(op="placements", actual=list(map(repr, placements)), legal=[], detail=detail)
