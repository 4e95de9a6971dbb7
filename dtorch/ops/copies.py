"""``torch.*_copy``: the view of the same name, copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dtorch.ops._affine import affine
from dtorch.ops._call import Call, Sig
from dtorch.ops.table import OPS, composite, row
from dtorch.tensor import TORCH


def _as_view(call: Call) -> list[Sig]:
    """As the view of the same name, which shows what the copy holds."""
    name = call.name.rpartition(".")[2].removesuffix("_copy")
    view = next((n for n in (f"torch.{name}", f"torch.Tensor.{name}") if n in OPS), None)
    return affine(replace(call, name=view)) if view else []


row(
    "diagonal_copy narrow_copy permute_copy slice_copy split_copy split_with_sizes_copy squeeze_copy t_copy transpose_copy "
    "unbind_copy unsqueeze_copy",
    _as_view,
    in_place=False,
    places="torch",
)

_VIEWS = "alias as_strided detach expand select unfold view view_as_complex view_as_real"
"""Those whose rules need to see the view itself."""


def _copy_of(name: str) -> Callable[..., Any] | None:
    named = {"alias": "clone", "view": "reshape"}.get(name, name)
    view = TORCH.get(getattr(torch, named, None)) or TORCH.get(getattr(torch.Tensor, named, None))
    if view is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs).clone(memory_format=torch.contiguous_format)

    call.__name__ = call.__qualname__ = f"{name}_copy"
    call.__doc__ = f"``torch.{name}_copy``: a copy of what ``{name}`` shows."
    return call


for _name in _VIEWS.split():
    _function = getattr(torch, f"{_name}_copy", None)
    _made = _copy_of(_name)
    if _function is not None and _made is not None:
        composite(_function, public=f"{_name}_copy")(_made)
