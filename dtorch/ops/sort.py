"""Ops that order or accumulate along a dim; along a sharded dim indices are global."""

from __future__ import annotations

from dtorch.ops._call import Call, R, Rule, Sig, sharded
from dtorch.ops._rules import P_AVG, P
from dtorch.ops.reduce import gathering, is_inexact, keeps, over, reduces
from dtorch.ops.table import row
from dtorch.runtime.windows import Looked, Slide, plain


def _dim(call: Call, dim_at: int, default: int | None = -1, name: str = "dim") -> int | None:
    """The dim of the call, not negative; None when it has none (0-d, or not given)."""
    ndim = call.tensors[0].ndim
    dim = call.arg(dim_at, name, default)
    return dim % ndim if ndim and isinstance(dim, int) and not isinstance(dim, bool) else None


def _elsewhere(call: Call, dim: int) -> list[Sig]:
    """Dims other than ``dim`` pass through."""
    rest = (R,) * (call.num_inputs - 1)
    return [sharded(call, (d, *rest), d) for d in range(call.tensors[0].ndim) if d != dim]


def _scan(kind: str) -> Rule:
    def rule(call: Call) -> list[Sig]:
        dim = _dim(call, 1)
        if dim is None:
            return []
        sigs = _elsewhere(call, dim)
        if kind == "logcumsumexp" and call.tensors[0].dtype.is_complex:
            sigs.append(gathering(call, dim, dim))
        else:
            sigs.append(sharded(call, (dim,), dim, kernel="scan", params={"dim": dim, "kind": kind}))
        if kind == "cumsum" and is_inexact(call):
            sigs += keeps(call, P, P_AVG)
        return sigs

    return rule


def _extremes(call: Call) -> list[Sig]:
    """cummax, cummin."""
    dim = _dim(call, 1)
    if dim is None:
        return []
    params = {"dim": dim, "kind": call.name.rsplit(".", 1)[-1]}
    return [*_elsewhere(call, dim), sharded(call, (dim,), dim, kernel="scan_extreme", params=params)]


def _sort(call: Call) -> list[Sig]:
    """sort and argsort: (dim, descending), or stable before them where it is given by position."""
    given = call.args[1:]
    stable_first = bool(given) and (isinstance(given[0], bool) or given[0] is None)
    dim = call.arg(2 if stable_first else 1, "dim", -1)
    ndim = call.tensors[0].ndim
    if not ndim or isinstance(dim, bool) or not isinstance(dim, int):
        return []
    return [*_elsewhere(call, dim % ndim), gathering(call, dim % ndim, dim % ndim)]


def _msort(call: Call) -> list[Sig]:
    return [*_elsewhere(call, 0), gathering(call, 0, 0)] if call.tensors[0].ndim else []


def _topk(call: Call) -> list[Sig]:
    dim, k = _dim(call, 2), call.arg(1, "k")
    if dim is None or not isinstance(k, int):
        return []
    params = {"dim": dim, "k": k, "largest": call.arg(3, "largest", True), "sorted": call.arg(4, "sorted", True)}
    return [*_elsewhere(call, dim), sharded(call, (dim,), R, kernel="topk", params=params)]


def _kthvalue(call: Call) -> list[Sig]:
    dim = _dim(call, 2)
    return [] if dim is None else reduces(call, _along(call, dim, 3), lambda d, _: gathering(call, d))


def _mode(call: Call) -> list[Sig]:
    dim = _dim(call, 1)
    return [] if dim is None else reduces(call, _along(call, dim, 2), lambda d, _: gathering(call, d))


def _along(call: Call, dim: int, keepdim_at: int) -> tuple[tuple[int, ...], bool] | None:
    found = over(call, 99, 99)
    return found if found is not None and len(found[0]) == 1 else ((dim,), bool(call.arg(keepdim_at, "keepdim", False)))


def _diff(call: Call) -> list[Sig]:
    """diff(n, dim, prepend, append)."""
    dim = _dim(call, 2)
    if dim is None:
        return []
    num = call.num_inputs
    sigs = [sharded(call, (d,) * num, d) for d in range(call.tensors[0].ndim) if d != dim]
    if is_inexact(call):
        sigs += [sharded(call, (code,) * num, code) for code in (P, P_AVG)]
    if num > 1:
        return [*sigs, gathering(call, dim, dim)]
    window = plain(Looked(dim, dim, Slide(call.arg(1, "n", 1) + 1, 1, 1, 0)))
    return [*sigs, sharded(call, (dim,), dim, kernel="window", params={"body": "own", "looked": [window]})]


def _renorm(call: Call) -> list[Sig]:
    """renorm(p, dim, maxnorm): norms of the slices along ``dim``."""
    dim = _dim(call, 2)
    if dim is None:
        return []
    return [sharded(call, (dim,), dim), *(gathering(call, d, d) for d in range(call.tensors[0].ndim) if d != dim)]


def _bucketize(call: Call) -> list[Sig]:
    """bucketize(input, boundaries), searchsorted(sorted_sequence, values): boundaries whole, values anyhow."""
    if call.num_inputs != 2 or call.name.rsplit(".", 1)[-1] != "bucketize":
        return []
    return [sharded(call, (d, R), d) for d in range(call.tensors[0].ndim)]


def _searchsorted(call: Call) -> list[Sig]:
    if call.num_inputs != 2:
        return []
    edges, values = call.tensors
    if edges.ndim == 1:
        return [sharded(call, (R, d), d) for d in range(values.ndim)]
    last = edges.ndim - 1
    return [*(sharded(call, (d, d), d) for d in range(last)), sharded(call, (R, last), last)]


row("cumsum", _scan("cumsum"))
row("cumprod", _scan("cumprod"))
row("logcumsumexp", _scan("logcumsumexp"))
row("cummax cummin", _extremes)
row("sort argsort", _sort)
row("msort", _msort)
row("topk", _topk)
row("kthvalue", _kthvalue)
row("mode", _mode)
row("diff", _diff)
row("renorm", _renorm)
row("bucketize", _bucketize)
row("searchsorted", _searchsorted)
