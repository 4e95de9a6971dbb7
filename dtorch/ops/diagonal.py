"""Ops that take diagonals out and make matrices of them."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.ops._affine import map_view, partial_through, region
from dtorch.ops._call import Call, Sig
from dtorch.ops._rules import P_AVG, P
from dtorch.ops.table import row
from dtorch.runtime.windows import Looked, Slide, plain


def _sums_stay(call: Call) -> list[Sig]:
    return [s for s in partial_through(call) if s.ins[0] in (P, P_AVG)]


def _embedded(call: Call, dim1: int, dim2: int, offset: int) -> Sig:
    """The last dim sharded: its elements are handed to the devices that hold their rows (``dim1``)."""
    last = call.tensors[0].ndim - 1
    looked = plain(Looked(last, dim1, Slide(1, 1, 1, max(-offset, 0))))
    params: dict[str, Any] = {"body": "diag_embed", "looked": [looked], "dims": [dim1, dim2], "offset": offset}
    return Sig((last,), (dim1,), "window", params)


def _diag(call: Call) -> list[Sig]:
    """Of a matrix its diagonal, copied; of a vector the matrix."""
    x, out = call.tensors[0], call.outputs[0]
    offset = call.arg(1, "offset" if call.name.endswith("flat") else "diagonal", 0)
    sigs = _sums_stay(call)
    if x.ndim == 1:
        return [*sigs, _embedded(call, 0, 1, offset)]
    mapped = map_view(lambda t: torch.diagonal(t, offset), x.shape, x.dtype) if x.ndim == 2 and out.ndim == 1 else None
    if mapped is not None and out.shape[0] > 1:
        regions = [region(0, 0, [(0, out.shape[0])], mapped[0].dims)]
        sigs += [Sig((d,), (0,), "remap", {"regions": regions}) for d in (0, 1)]
    return sigs


def _diag_embed(call: Call) -> list[Sig]:
    x, ndim = call.tensors[0], call.outputs[0].ndim
    dim1, dim2 = call.arg(2, "dim1", -2) % ndim, call.arg(3, "dim2", -1) % ndim
    kept = [d for d in range(ndim) if d not in (dim1, dim2)]
    sigs = [Sig((d,), (o,)) for d, o in zip(range(x.ndim - 1), kept, strict=True)] + _sums_stay(call)
    return [*sigs, _embedded(call, dim1, dim2, call.arg(1, "offset", 0))]


row("diag diagflat", _diag, in_place=False)
row("diag_embed", _diag_embed, in_place=False)
