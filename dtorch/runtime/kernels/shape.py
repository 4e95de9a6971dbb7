"""Local work on pieces that must know where a piece lies in the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.runtime.kernels import Site, kernel


@kernel("expand")
def expand(site: Site) -> Callable[..., Any]:
    """Broadcasts to the local shape of the output; a view."""
    shape = site.local_shape(site.definition.outputs[0])
    return lambda x: x.expand(shape)


@kernel("own_copy")
def own_copy(site: Site) -> Callable[..., Any]:
    """The op on a local piece, whose result must not share memory with it: the piece may be contiguous where the
    whole is not."""
    call = site.bound()

    def run(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        made: torch.Tensor = call(x, *rest)
        return made.clone() if made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else made

    return run


@kernel("alias")
def alias(site: Site) -> Callable[..., Any]:
    """The piece itself."""
    return lambda x: x.detach()


@kernel("triangle")
def triangle(site: Site) -> Callable[..., Any]:
    """tril and triu of a piece: its diagonal is the whole's, shifted by where the piece begins."""
    box = site.box(site.definition.inputs[0])
    shift = box[-2][0] - box[-1][0]
    fn, diagonal = site.fn, int(site.params["diagonal"])

    def run(x: torch.Tensor) -> Any:
        return fn(x, diagonal + shift)

    return run


@kernel("unless_empty")
def unless_empty(site: Site) -> Callable[..., Any]:
    """The op on local pieces, for functions that refuse empty ones: of those the result is empty too."""
    layout = site.definition.outputs[0]
    shape, dtype = site.local_shape(layout), site.dtype(layout)
    if 0 not in shape or 0 in layout.shape:
        return site.bound()
    return lambda *_: torch.empty(shape, dtype=dtype, device=site.device)
