"""Looks for legal signatures that a rule does not offer: calls that could run piece by piece, but would be gathered.

Every combination of replicated, sharded and pending (sum) inputs on one mesh axis is tried with torch's own function on the
pieces alone. A combination is legal when, on every mesh and every data set, the results are pieces of torch's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

import torch

from dtorch.ops._call import R, Sig
from dtorch.ops._choose import fit, match
from dtorch.proofs.bench import Bench, Mismatch, near
from dtorch.proofs.cases import Case
from dtorch.proofs.claims import variants
from dtorch.runtime.layout import PARTIAL_CODES, is_partial, is_shard, local_shape
from dtorch.runtime.template import LocalShape

MESHES = (2, 3)
MAX_COMBINATIONS = 400
PENDING = PARTIAL_CODES["sum"]

UNCHECKED = frozenset(
    {
        "lu_unpack", "lu_solve", "ldl_solve", "ormqr", "householder_product", "orgqr", "native_batch_norm",
        "_native_batch_norm_legit", "_batch_norm_with_update", "native_layer_norm", "native_group_norm",
        "segment_reduce", "resize_", "resize_as_",
    }
)
"""Functions that believe what they are given: on pieces that do not fit together they write past their memory. So do
backward functions, which take indices."""


def search(case: Case, meshes: Sequence[int] = MESHES) -> list[Sig]:
    """Legal signatures of the case that its rule does not offer, without those that follow from another by a local cut.

    Calls that write into further arguments (running statistics) are not looked at: only results are compared.
    """
    if case.call.mutates or case.op.short_name in UNCHECKED or "_backward" in case.op.name:
        return []
    data = []
    for _, given in variants(case):
        try:
            with torch.no_grad():
                data.append((given, case.expected(given)))
        except Exception:  # torch refuses such data
            continue
    shapes = [tuple(o.shape) for o in case.call.outputs]
    if not data or [tuple(o.shape) for o in data[0][1]] != shapes or not _says_something(data[0][1]):
        return []
    found = []
    for ins in islice(_combinations(case), MAX_COMBINATIONS):
        if _is_offered(case, ins, meshes[0]):
            continue
        for form in _forms(case):
            outs = _legal(form, ins, data, meshes)
            if outs is not None:
                found.append(Sig(ins, outs))
                break
    return _strongest(found, case)


def _says_something(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether results are not all alike: of zeros or NaN alone anything seems true."""
    return any(o.numel() > 1 and not near(o, o.flatten()[:1].expand(o.shape)) for o in outputs)


def _combinations(case: Case) -> Iterator[tuple[int, ...]]:
    """Placements of all inputs; what is sharded is cut alike, at a dim of one size. What is written is never pending."""
    w = case.op.writes
    choices = []
    for i, t in enumerate(case.tensors):
        codes = [R, *(d for d, size in enumerate(t.shape) if size > 1)]
        if (t.is_floating_point() or t.is_complex()) and t.numel() > 1 and i != w:
            codes.append(PENDING)
        choices.append(codes)
    for ins in product(*choices):
        sizes = {t.shape[c] for t, c in zip(case.tensors, ins, strict=True) if is_shard(c)}
        if len(sizes) <= 1 and any(c != R for c in ins):
            yield ins


def _is_offered(case: Case, ins: tuple[int, ...], num: int) -> bool:
    call = case.on(num, ins)
    w = case.op.writes
    fixed = frozenset() if w is None else frozenset({w})
    return fit(call, [case.signatures(call)], case.op.verify, fixed) is not None


def _forms(case: Case) -> Iterator[Case]:
    """The case itself, and with the shape of its result, where that is an argument, replaced by the piece's."""
    yield case
    shape = tuple(case.call.outputs[0].shape)
    if not shape:
        return
    args = tuple(LocalShape(0) if _is_shape(a, shape) else a for a in case.args)
    kwargs = {k: LocalShape(0) if _is_shape(a, shape) else a for k, a in case.kwargs.items()}
    if any(isinstance(a, LocalShape) for a in (*args, *kwargs.values())):
        yield replace(case, args=args, kwargs=kwargs)


def _is_shape(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, (list, tuple)) and tuple(value) == shape


def _legal(
    case: Case, ins: tuple[int, ...], data: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]], meshes: Sequence[int]
) -> tuple[int, ...] | None:
    """Placements of the outputs under which the pieces' results are right every time; None when there are none."""
    w = case.op.writes
    pending = PENDING in ins
    candidates: list[list[int]] = []
    for o in case.call.outputs:
        floats = o.dtype.is_floating_point or o.dtype.is_complex
        codes = [ins[w]] if w is not None else [*(d for d, n in enumerate(o.shape) if n > 1), R]
        if pending:  # a function that is linear in what is pending
            codes = [PENDING] if floats else []
        elif w is None:
            codes += PARTIAL_CODES.values() if floats else [PENDING]
        candidates.append(codes)
    sized = any(isinstance(a, LocalShape) for a in (*case.args, *case.kwargs.values()))
    if not sized:
        left = _narrowed(case, ins, candidates, data, meshes, None)
        return tuple(codes[0] for codes in left) if left else None
    for code in [c for c in candidates[0] if is_shard(c)]:
        if _narrowed(case, ins, [[code], *candidates[1:]], data, meshes, code):
            return (code,) * len(candidates)
    return None


def _narrowed(
    case: Case, ins: tuple[int, ...], candidates: list[list[int]],
    data: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]], meshes: Sequence[int], sized: int | None,
) -> list[list[int]] | None:
    left = candidates
    for num in meshes:
        bench = Bench(num)
        for given, want in data:
            draw = torch.Generator().manual_seed(num)
            pieces = [bench.cut(t, c, draw) for t, c in zip(given, ins, strict=True)]
            held = []
            for rank in range(num):
                shapes = [
                    local_shape(o.shape, (R if sized is None else sized,), (num,), (rank,)) for o in case.call.outputs
                ]
                try:
                    with torch.no_grad():
                        held.append(case.apply([p[rank] for p in pieces], shapes))
                except Exception:  # the function does not take such pieces
                    return None
            if any(len(results) != len(want) for results in held):
                return None
            left = [
                [c for c in codes if _is_right(bench, [results[k] for results in held], c, right)]
                for k, (codes, right) in enumerate(zip(left, want, strict=True))
            ]
            if not all(left):
                return None
    return left


def _is_right(bench: Bench, held: list[torch.Tensor], code: int, want: torch.Tensor) -> bool:
    try:
        return near(bench.join(held, code, tuple(want.shape)), want)
    except (Mismatch, RuntimeError):  # RuntimeError: no such reduction of this dtype
        return False


def _strongest(found: list[Sig], case: Case) -> list[Sig]:
    """Without what another signature gives once a replicated input is cut."""
    w = case.op.writes
    narrow = frozenset(i for i in range(len(case.tensors)) if i != w)
    kept: list[Sig] = []
    for sig in sorted(found, key=lambda s: (sum(c == R for c in s.ins), any(map(is_partial, s.ins)))):
        if not any((made := match(k, sig.ins, narrow)) is not None and made.outs == sig.outs for k in kept):
            kept.append(sig)
    return kept
