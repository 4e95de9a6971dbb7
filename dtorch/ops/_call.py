"""One call of an op as placement rules see it, and what a rule answers. Pure: shapes and codes, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch.runtime.layout import REPLICATE

R = REPLICATE


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument of a call."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: tuple[int, ...]  # one placement code a mesh axis
    stride: tuple[int, ...] = ()

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Result:
    """An output as torch's meta device infers it. ``alias`` names the input whose memory it shows, if any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    alias: int | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Sig:
    """A legal signature on one mesh axis: placement codes of all tensor inputs -> codes of all outputs.

    A shard code without a block (0..63) fits a shard of that dim with any block, the same block for all inputs; outputs then
    inherit the block. ``kernel`` names the worker's kernel; "local" runs the op on local pieces without communication.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    kernel: str = "local"
    params: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass
class Call:
    """(op, arguments, inferred outputs). Tensors in ``args``/``kwargs`` are TensorArg objects, numbers are themselves."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[TensorArg, ...]
    outputs: tuple[Result, ...]
    mesh_shape: tuple[int, ...]
    axis: int = 0  # the mesh axis a rule is asked about
    mutates: tuple[int, ...] = ()  # inputs that the op writes into beside its results (running statistics)
    itself: int | None = None  # the one of these that is also the result
    axis_names: tuple[str, ...] = ()  # of the mesh, when it has names
    is_nested: bool = False  # the result is a tree of which the outputs are the leaves

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position`` or called ``name``."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def dims(self, position: int, name: str, ndim: int, default: Any = None) -> tuple[int, ...]:
        """A dim argument (None, an int or several) as sorted non-negative dims; None means all."""
        value = self.arg(position, name, default)
        if isinstance(value, TensorArg):
            value = default
        if value is None or (isinstance(value, (tuple, list)) and not value):
            return tuple(range(ndim))
        if isinstance(value, int):
            value = (value,)
        return tuple(sorted(d % ndim if ndim else 0 for d in value))

    @property
    def axis_name(self) -> str:
        """The name of the mesh axis that a rule is asked about; empty when it has none."""
        return self.axis_names[self.axis] if self.axis_names else ""

    @property
    def num_inputs(self) -> int:
        return len(self.tensors)

    def all_replicate(self) -> Sig:
        return Sig((R,) * len(self.tensors), (R,) * len(self.outputs))


Rule = Callable[[Call], "list[Sig]"]


def has_no_values(given: torch.Tensor) -> str:
    """Why a plain tensor cannot be put on a mesh, in words that follow "a plain tensor"; "" where it can."""
    if given.is_nested or given.is_quantized:
        return "that is nested" if given.is_nested else "that is quantized"
    if given.is_meta:
        return "on the meta device"
    return "" if given.layout == torch.strided else f"of layout {given.layout}"


def refuse_without_values(what: str, given: Any) -> None:
    """Raise TypeError for a plain tensor, in nested sequences as well, that cannot be put on a mesh; ``what`` names it."""
    if isinstance(given, (list, tuple)):
        for value in given:
            refuse_without_values(what, value)
        return
    kind = has_no_values(given) if isinstance(given, torch.Tensor) else ""
    if not kind:
        return
    raise TypeError(
        f"{what} is a plain tensor {kind}; only dense tensors with values can be mixed in (they are taken as replicated)"
    )


FLAT = "flat:"
"""Before an op's name: the same function, whose nested result comes as one flat tuple of tensors."""


def flat_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a nested result, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for item in tree for t in flat_tensors(item)]
    return []


def rebuilder(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """Makes the like of ``tree``, a nested result, of its leaves.

    Raises:
        TypeError: a leaf is neither a tensor nor None.
    """
    if isinstance(tree, torch.Tensor):
        return lambda leaves: leaves[0]
    if tree is None:
        return lambda leaves: None
    if not isinstance(tree, (tuple, list)):
        raise TypeError(f"a result of type {type(tree).__name__} in a sequence")
    parts = [(rebuilder(item), len(flat_tensors(item))) for item in tree]
    kind = type(tree)

    def rebuild(leaves: Sequence[Any]) -> Any:
        made, at = [], 0
        for part, size in parts:
            made.append(part(leaves[at : at + size]))
            at += size
        return kind(*made) if hasattr(kind, "_fields") else kind(made)

    return rebuild


def sharded(call: Call, ins: Sequence[int], out: int | Sequence[int], **more: Any) -> Sig:
    """A Sig from loose parts: ``out`` may be one code for all outputs."""
    outs = (out,) * len(call.outputs) if isinstance(out, int) else tuple(out)
    return Sig(tuple(ins), outs, **more)
