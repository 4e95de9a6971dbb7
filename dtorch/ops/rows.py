"""Ops that treat rows apart: all dims but those that a row spans may be sharded."""

from __future__ import annotations

import torch

from dtorch.ops._call import Call, R, Sig, sharded
from dtorch.ops._rules import P, pointwise
from dtorch.ops.reduce import is_inexact
from dtorch.ops.table import row


def _glu(call: Call) -> list[Sig]:
    x = call.tensors[0]
    dim = call.arg(1, "dim", -1) % x.ndim
    return [sharded(call, (d,), d) for d in range(x.ndim) if d != dim]


def _distance(call: Call) -> list[Sig]:
    """pairwise_distance, cosine_similarity: broadcast, then reduce one dim."""
    a, b = call.tensors
    ndim = max(a.ndim, b.ndim)
    if not ndim:
        return []
    is_cosine = call.name.endswith("cosine_similarity")
    dim = call.arg(2, "dim", 1) % ndim if is_cosine else ndim - 1
    keepdim = not is_cosine and bool(call.arg(4, "keepdim", False))
    shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
    sigs = []
    for d in range(ndim):
        own = [d - (ndim - t.ndim) for t in (a, b)]
        codes = [o if o >= 0 and (t.shape[o] != 1 or shape[d] == 1) else R for o, t in zip(own, (a, b), strict=True)]
        if d != dim and any(c != R for c in codes):
            sigs.append(sharded(call, codes, d if keepdim or d < dim else d - 1))
    return sigs


def _cross(call: Call) -> list[Sig]:
    """cross(input, other, dim): torch.cross takes the first dim of three elements where none is given."""
    shape = call.outputs[0].shape
    default = -1 if "linalg" in call.name else next((d for d, n in enumerate(shape) if n == 3), -1)
    dim = call.arg(2, "dim", default)
    given = dim is not None and (call.arg(2, "dim") is not None or "linalg" in call.name)
    dim = (default if dim is None else dim) % len(shape)
    # where torch looks for the dim, a piece of three elements along an earlier one would be taken for it
    return [s for s in pointwise("each")(call) if s.outs[0] != dim and (given or not 0 <= s.outs[0] < dim)]


def _embedding_bag(call: Call) -> list[Sig]:
    """Bags of one size each, a row of indices: rows are apart."""
    indices, weight = call.tensors[:2]
    if indices.ndim != 2 or call.arg(3, "max_norm", None) is not None:
        return []
    weights = call.num_inputs - 2
    sigs = [
        sharded(call, (0, R, *(0,) * weights), 0, kernel="filled"),
        sharded(call, (R, 1, *(R,) * weights), 1, kernel="filled"),
    ]
    return sigs if call.num_inputs <= 3 and weight.ndim == 2 else []


def _histc(call: Call) -> list[Sig]:
    """Counts of pieces add up, where the range does not depend on the values."""
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    if low == high or not is_inexact(call):
        return []
    return [sharded(call, (d,), P) for d in range(call.tensors[0].ndim)]


def _isin(call: Call) -> list[Sig]:
    """isin(elements, test_elements): each element is for itself."""
    elements = call.args[0] if call.args else call.kwargs.get("elements")
    if elements is not call.tensors[0]:
        return []
    rest = (R,) * (call.num_inputs - 1)
    return [sharded(call, (d, *rest), d) for d in range(elements.ndim)]


def _fresh(call: Call) -> list[Sig]:
    """new_zeros and its like look at no element."""
    code = call.tensors[0].codes[call.axis]
    return [Sig((code,), (R,))] if call.num_inputs == 1 else []


row("glu", _glu, places="torch.nn.functional")
row("cosine_similarity pairwise_distance", _distance)
row("cross", _cross)
row("embedding_bag", _embedding_bag, places="torch.nn.functional")
row("histc", _histc)
row("isin", _isin, in_place=False)
row("new_zeros new_ones new_full", _fresh, in_place=False, places="torch.Tensor")
