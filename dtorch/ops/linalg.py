"""Decompositions and solvers: each matrix of a stack is worked on alone, so the dims of the stack can be sharded."""

from __future__ import annotations

from dtorch.ops._call import Call, R, Rule, Sig, sharded
from dtorch.ops._rules import P
from dtorch.ops.table import row

PLACES = "torch torch.Tensor torch.linalg"


def stacked(*core: int, right: int | None = None) -> Rule:
    """Works on the last dims of its inputs; those before are a stack, broadcast as in elementwise ops, and lead each result.

    Args:
        core: how many last dims of each tensor input belong to one matrix, vector (1) or number (0).
        right: the input that is a right-hand side, in whose columns the result is linear.
    """

    def rule(call: Call) -> list[Sig]:
        own = list(core[: len(call.tensors)])
        if right is not None and _is_vector(call, right):
            own[right] = 1
        depths = [t.ndim - c for t, c in zip(call.tensors, own, strict=True)]
        depth = max(depths)
        sigs = []
        for dim in range(depth):
            at = [dim - (depth - d) for d in depths]
            size = max(t.shape[a] for t, a in zip(call.tensors, at, strict=True) if a >= 0)
            ins = [a if a >= 0 and (t.shape[a] != 1 or size == 1) else R for t, a in zip(call.tensors, at, strict=True)]
            if any(code != R for code in ins):
                sigs.append(sharded(call, ins, dim))
        if right is not None and len(call.outputs) == 1:
            rest = [R] * len(own)
            out = call.outputs[0]
            if own[right] == 2 and call.arg(99, "left", True):
                columns = call.tensors[right].ndim - 1
                sigs.append(sharded(call, [columns if i == right else R for i in range(len(own))], out.ndim - 1))
            rest[right] = P
            sigs.append(sharded(call, rest, P))
        return sigs

    return rule


def _is_vector(call: Call, right: int) -> bool:
    """Whether the right-hand side of ``linalg.solve`` is a vector or a stack of them."""
    a, b = call.tensors[0], call.tensors[right]
    return "solve" in call.name and right == 1 and (b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]))


row(
    "inverse inv inv_ex det logdet slogdet cholesky cholesky_ex cholesky_inverse eig eigh eigvals eigvalsh ldl_factor "
    "ldl_factor_ex lu lu_factor lu_factor_ex matrix_exp matrix_power qr svd svdvals cond geqrf pinverse",
    stacked(2),
    places=PLACES,
)
row("matrix_rank pinv", stacked(2, 0, 0), places="torch.linalg")
row("solve solve_ex solve_triangular", stacked(2, 2, right=1), places="torch.linalg")
row("cholesky_solve", stacked(2, 2, right=0), places=PLACES)
row("triangular_solve", stacked(2, 2), places=PLACES)
row("ldl_solve", stacked(2, 1, 2), places="torch.linalg")
row("lu_unpack householder_product orgqr", stacked(2, 1), places=PLACES)
row("ormqr", stacked(2, 1, 2), places=PLACES)
row("cdist", stacked(2, 2), places="torch")
