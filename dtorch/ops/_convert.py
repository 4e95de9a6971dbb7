"""Arguments of foreign types: plain torch tensors become replicated ones, numpy scalars become numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtorch.future import TensorFuture
from dtorch.ops._nothing import nothing
from dtorch.ops._patterns import STATIC
from dtorch.tensor import Tensor

if TYPE_CHECKING:
    from dtorch.spec import Spec


class Conversion:
    """Called with an argument, gives what an op records in its place.

    An object, not a function within another that calls itself: such a one is a cycle, and would keep tensors until the
    collector comes round.

    Args:
        name: of the op.
        like: plain tensors go to the mesh of a tensor like this; None: there is no tensor on a mesh.
        writes: the op writes into an argument.

    Attributes:
        has_changed: something was another than what is recorded for it.

    Raises:
        TypeError: by a call, for what no op takes.
    """

    def __init__(self, name: str, like: Spec | None, writes: bool) -> None:
        self.name = name
        self.like = like
        self.writes = writes
        self.has_changed = False
        self._made: dict[int, tuple[torch.Tensor, Any]] = {}  # what is one tensor stays one; held, so that its id is its own

    def __call__(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
            items = [self(v) for v in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, slice):
            return slice(self(value.start), self(value.stop), self(value.step))
        if type(value) is Tensor or type(value) in STATIC:
            return value
        self.has_changed = True
        if isinstance(value, torch.Tensor):
            return self._uploaded(value)
        if hasattr(value, "__array__") and hasattr(value, "item") and not isinstance(value, TensorFuture):
            return value.item() if getattr(value, "ndim", 0) == 0 else self._uploaded(torch.from_numpy(value))
        if isinstance(value, (int, float)):
            return int(value) if isinstance(value, int) else float(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if hasattr(value, "__index__"):
            return int(value)
        raise TypeError(f"{self.name}: an argument of type {type(value).__name__} is not supported")

    def _uploaded(self, value: torch.Tensor) -> Any:
        if self.like is None:
            raise TypeError(f"{self.name}: no dtorch tensor among the inputs")
        if not value.numel() and not self.writes:  # what caches begin with
            return nothing(self.like.session, value, self.like.mesh)
        if id(value) not in self._made:
            self._made[id(value)] = value, self.like.session.upload(value.detach(), self.like.mesh, None)
        return self._made[id(value)][1]
