"""Reductions: results over sharded dims stay pending where an addition, a maximum or the like completes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.ops._call import Call, R, Sig, TensorArg, sharded
from dtorch.ops._rules import P_AVG, P_MAX, P_MIN, P_PRODUCT, P, pointwise, reduced_dim
from dtorch.ops.table import composite, row
from dtorch.policy import auto_redistribute

Over = tuple[tuple[int, ...], bool]
"""(reduced dims, keepdim)."""


def over(call: Call, dim_at: int = 1, keepdim_at: int = 2) -> Over | None:
    """What a call reduces; None when its arguments are of another form (the outputs' shape tells)."""
    x = call.tensors[0]
    dim = call.arg(dim_at, "dim", None)
    if isinstance(dim, (TensorArg, bool)):
        return None
    dims = call.dims(dim_at, "dim", x.ndim) if x.ndim else ()
    return confirmed(call, dims, bool(call.arg(keepdim_at, "keepdim", False)))


def confirmed(call: Call, dims: tuple[int, ...], keepdim: bool) -> Over | None:
    """The reduction, when the output has the shape that it gives."""
    kept = [1 if d in dims else n for d, n in enumerate(call.tensors[0].shape) if keepdim or d not in dims]
    return (dims, keepdim) if tuple(kept) == call.outputs[0].shape else None


def reduces(
    call: Call, found: Over | None, inside: Callable[[int, dict[str, Any]], Sig | None], kernel: str = "local"
) -> list[Sig]:
    """Signatures of a reduction: dims outside pass through, ``inside`` answers for a reduced dim.

    Args:
        inside: of (input dim, {"dims", "keepdim"}).
        kernel: for the dims outside.
    """
    if found is None:
        return []
    dims, keepdim = found
    x = call.tensors[0]
    rest = (R,) * (call.num_inputs - 1)
    sigs = []
    for dim in range(x.ndim):
        if dim not in dims:
            sigs.append(sharded(call, (dim, *rest), reduced_dim(dim, dims, keepdim), kernel=kernel))
        else:
            sig = inside(dim, {"dims": list(dims), "keepdim": keepdim})
            if sig is not None:
                sigs.append(sig)
    return sigs


def gathering(call: Call, dim: int, out: int = R) -> Sig:
    """Tensor 0, sharded on ``dim``, is made whole inside the kernel; the outputs are cut on ``out`` again."""
    return sharded(call, (dim, *(R,) * (call.num_inputs - 1)), out, kernel="gathered")


def is_inexact(call: Call) -> bool:
    """Whether tensor 0 and all outputs are of floating or complex dtypes, so that a pending sum keeps its meaning."""
    dtypes = [call.tensors[0].dtype, *(o.dtype for o in call.outputs)]
    return all(d.is_floating_point or d.is_complex for d in dtypes)


def keeps(call: Call, *codes: int) -> list[Sig]:
    """Signatures that leave tensor 0 pending as it is."""
    rest = (R,) * (call.num_inputs - 1)
    return [sharded(call, (code, *rest), code) for code in codes]


def _sum(call: Call) -> list[Sig]:
    sigs = reduces(call, over(call), lambda dim, _: sharded(call, (dim,), P))
    return sigs + (keeps(call, P, P_AVG) if is_inexact(call) else [])


def _nansum(call: Call) -> list[Sig]:
    return reduces(call, over(call), lambda dim, _: sharded(call, (dim,), P))


def _mean(call: Call) -> list[Sig]:
    sigs = reduces(call, over(call), lambda dim, params: sharded(call, (dim,), P, kernel="mean", params=params))
    return sigs + (keeps(call, P, P_AVG) if is_inexact(call) else [])


def _nanmean(call: Call) -> list[Sig]:
    if not is_inexact(call) or call.tensors[0].dtype.is_complex:
        return reduces(call, over(call), lambda dim, _: gathering(call, dim))
    return reduces(call, over(call), lambda dim, params: sharded(call, (dim,), R, kernel="nanmean", params=params))


def _prod(call: Call) -> list[Sig]:
    sigs = reduces(call, over(call), lambda dim, _: sharded(call, (dim,), P_PRODUCT))
    return sigs + (keeps(call, P_PRODUCT) if is_inexact(call) else [])


def _extreme(code: int) -> Callable[[Call], list[Sig]]:
    kind = "max" if code == P_MAX else "min"

    def rule(call: Call) -> list[Sig]:
        def inside(dim: int, params: dict[str, Any]) -> Sig:
            return sharded(call, (dim,), code, kernel="extreme", params={**params, "kind": kind})

        return reduces(call, over(call), inside) + keeps(call, code)

    return rule


def _aminmax(call: Call) -> list[Sig]:
    def inside(dim: int, params: dict[str, Any]) -> Sig:
        kinds = {**params, "kind": ["min", "max"]}
        return sharded(call, (dim,), (P_MIN, P_MAX), kernel="extreme", params=kinds)

    return reduces(call, over(call, 99, 99), inside)


def _logical(code: int) -> Callable[[Call], list[Sig]]:
    """any, all: of bools a maximum or a minimum; an empty piece gives what changes nothing by itself."""

    def rule(call: Call) -> list[Sig]:
        return reduces(call, over(call), lambda dim, _: sharded(call, (dim,), code))

    return rule


def _count_nonzero(call: Call) -> list[Sig]:
    return reduces(call, over(call, 1, 99), lambda dim, _: sharded(call, (dim,), P))


def _logsumexp(call: Call) -> list[Sig]:
    if call.tensors[0].dtype.is_complex:
        return reduces(call, over(call), lambda dim, _: gathering(call, dim))
    return reduces(call, over(call), lambda dim, params: sharded(call, (dim,), R, kernel="logsumexp", params=params))


def _spread(root: bool) -> Callable[[Call], list[Sig]]:
    """var, std, var_mean, std_mean: (unbiased), (dim, unbiased, keepdim) or (dim, *, correction, keepdim)."""

    def rule(call: Call) -> list[Sig]:
        given, named = call.args[1:], call.kwargs
        if given and isinstance(given[0], bool):
            dim, unbiased, keepdim = None, given[0], False
        else:
            dim = given[0] if given else named.get("dim")
            unbiased = given[1] if len(given) > 1 else named.get("unbiased", True)
            keepdim = given[2] if len(given) > 2 else named.get("keepdim", False)
        correction = named.get("correction")
        if correction is None:
            correction = 1 if unbiased else 0
        ndim = call.tensors[0].ndim
        dims = Call.dims(call, 99, "", ndim, dim) if ndim else ()
        more = {"correction": float(correction), "root": root}

        def inside(own: int, params: dict[str, Any]) -> Sig:
            return sharded(call, (own,), R, kernel="moments", params={**params, **more})

        return reduces(call, confirmed(call, dims, bool(keepdim)), inside, "filled")

    return rule


def _norm(call: Call) -> list[Sig]:
    """All of torch's norms: those of vectors combine; of matrices only the Frobenius norm does."""
    x = call.tensors[0]
    place = call.name.rsplit(".", 1)[-1] if call.name.startswith("torch.linalg") else "norm"
    order = call.arg(1, "p" if place == "norm" and not call.name.startswith("torch.linalg") else "ord", _DEFAULT[place])
    if call.name == "torch.linalg.norm":
        order = call.arg(1, "ord", None)
    dim = call.arg(2, "dim", (-2, -1) if place == "matrix_norm" else None)
    keepdim = bool(call.arg(3, "keepdim", False))
    dims = call.dims(99, "", x.ndim, dim) if x.ndim else ()
    found = confirmed(call, dims, keepdim)
    is_matrix = place == "matrix_norm" or (call.name == "torch.linalg.norm" and order is not None and len(dims) == 2)
    if order == "fro" or order is None:
        order = 2.0
    elif isinstance(order, str) or is_matrix:
        return reduces(call, found, lambda d, _: gathering(call, d))

    def inside(d: int, params: dict[str, Any]) -> Sig:
        return sharded(call, (d,), R, kernel="vector_norm", params={**params, "order": float(order)})

    return reduces(call, found, inside)


_DEFAULT: dict[str, Any] = {"norm": "fro", "vector_norm": 2, "matrix_norm": "fro"}


def _trace(call: Call) -> list[Sig]:
    sigs = [sharded(call, (dim,), P, kernel="trace") for dim in (0, 1)]
    return sigs + (keeps(call, P, P_AVG) if is_inexact(call) else [])


def _arg_extreme(kind: str) -> Callable[[Call], list[Sig]]:
    def rule(call: Call) -> list[Sig]:
        dim = call.arg(1, "dim", None)

        def inside(own: int, params: dict[str, Any]) -> Sig:
            more = {"dim": None if dim is None else own, "kind": kind}
            return sharded(call, (own,), R, kernel="extreme_at", params={**params, **more})

        return reduces(call, over(call), inside)

    return rule


def _max(code: int) -> Callable[[Call], list[Sig]]:
    """max, min: of all elements, along a dim with indices, or elementwise of two tensors."""
    kind = "max" if code == P_MAX else "min"

    def rule(call: Call) -> list[Sig]:
        if call.num_inputs == 2:
            return [*pointwise()(call), sharded(call, (code, code), code)]
        if len(call.outputs) == 1:
            return _extreme(code)(call)
        return _arg_extreme(kind)(call)

    return rule


def _order_statistic(dim_at: int) -> Callable[[Call], list[Sig]]:
    """median, quantile: of all elements when no dim is given."""

    def rule(call: Call) -> list[Sig]:
        return reduces(call, over(call, dim_at, dim_at + 1), lambda dim, _: gathering(call, dim))

    return rule


def _quantile(call: Call) -> list[Sig]:
    """Along a dim other dims may be sharded. Several quantiles stand in a dim of their own, in front."""
    x, dim = call.tensors[0], call.arg(2, "dim", None)
    if dim is None or not x.ndim:
        return [gathering(call, d) for d in range(x.ndim)]
    own, kept = dim % x.ndim, bool(call.arg(3, "keepdim", False))
    front = call.outputs[0].ndim - x.ndim + (not kept)
    rest = (R,) * (call.num_inputs - 1)
    local = [(d, front + reduced_dim(d, [] if kept else [own], kept)) for d in range(x.ndim) if d != own]
    return [*(sharded(call, (d, *rest), out, kernel="filled") for d, out in local), gathering(call, own)]


row("sum", _sum)
row("nansum", _nansum)
row("mean", _mean)
row("nanmean", _nanmean)
row("prod", _prod)
row("amax", _extreme(P_MAX))
row("amin", _extreme(P_MIN))
row("aminmax", _aminmax)
row("any", _logical(P_MAX))
row("all", _logical(P_MIN))
row("count_nonzero", _count_nonzero)
row("logsumexp", _logsumexp)
row("var var_mean", _spread(root=False))
row("std std_mean", _spread(root=True))
row("norm vector_norm matrix_norm", _norm)
row("trace", _trace)
row("argmax", _arg_extreme("max"))
row("argmin", _arg_extreme("min"))
row("max", _max(P_MAX))
row("min", _max(P_MIN))
row("median nanmedian", _order_statistic(1))
row("quantile nanquantile", _quantile)


@composite(torch.equal, method="equal", public="equal")
def equal(input: Any, other: Any) -> bool:
    """Whether two tensors have the same shape and elements; blocks. Other placements are redistributed."""
    if tuple(input.shape) != tuple(other.shape):
        return False
    with auto_redistribute():
        return bool((input == other).all().item())


@composite(torch.allclose, method="allclose", public="allclose")
def allclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether all elements are close, with broadcasting; blocks. Other placements are redistributed."""
    with auto_redistribute():
        return bool(torch.isclose(input, other, rtol, atol, equal_nan).all().item())
