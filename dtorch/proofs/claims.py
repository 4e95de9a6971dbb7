"""Rules proven: every signature that a rule claims runs on real data, and its result is compared with torch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dtorch.ops._call import Sig
from dtorch.ops._choose import Fit
from dtorch.ops._rules import P_AVG
from dtorch.placement import from_code
from dtorch.proofs.bench import Bench, Mismatch, near
from dtorch.proofs.cases import Case
from dtorch.runtime.layout import is_partial, is_shard

MESHES = (2, 4)
"""Devices: op_db's tensors have dims of 1 to 20, so pieces are uneven on both, and on the larger some are empty."""

BLOCK = 2


LAPACK = frozenset(
    {
        "cholesky", "cholesky_inverse", "cholesky_solve", "det", "geqrf", "inverse", "logdet", "lstsq", "lu_solve", "lu_unpack",
        "matrix_exp", "matrix_power", "orgqr", "ormqr", "pinverse", "qr", "slogdet", "svd", "triangular_solve",
    }
)
"""Functions whose NaN is not tried: LAPACK ends the process on some."""

KERNELS_DIFFER = frozenset(
    {"scaled_dot_product_attention", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
)
"""Functions for which torch has several kernels, chosen by shape, that treat NaN differently. So have orthogonal polynomials,
whose degree is made a whole number, which NaN has none of."""

OVERWRITING = {"max_unpool1d": 1, "max_unpool2d": 2, "max_unpool3d": 3}
"""Functions that may write several values to one place, in no promised order -> dims of a plane. Where an index stands twice in
a plane, only the data as given are tried: in these the values for one place are equal."""

CHOICES = frozenset({"topk"})
"""Functions that may point at any of equal values."""


@dataclass
class Verdict:
    """What ``prove`` found of one case: how many runs were right, and each claim that is false, with the reason."""

    right: int
    false: list[str]


def prove(case: Case, meshes: Sequence[int] = MESHES) -> Verdict:
    """Run all that the case's rule claims, on several data sets; also with what is sharded cut at multiples of a block."""
    verdict = Verdict(0, [])
    if case.op.short_name.startswith(("empty", "new_empty")):  # their values are whatever was in memory
        return verdict
    data = [(what, given, want) for what, given in variants(case) if (want := _expected(case, given)) is not None]
    for num in meshes:
        bench = Bench(num)
        for sig in case.signatures(case.on(num)):
            fits = [("", case.fit(num, sig))]
            if _has_no_average(case, sig):
                continue
            if any(is_shard(c) for c in sig.ins) and num == meshes[0]:
                fits.append((f" in blocks of {BLOCK}", case.fit_blocks(num, sig, BLOCK)))
            for blocks, found in fits:
                if found is None:
                    continue
                for what, given, want in data:
                    wrong = _run(bench, case, found, given, want)
                    if wrong is None:
                        verdict.right += 1
                    else:
                        verdict.false.append(f"{case}: {line(sig)}{blocks} on {num} devices, {what}: {wrong}")
                        break
    return verdict


def _has_no_average(case: Case, sig: Sig) -> bool:
    """Whether truth values would be pending an average."""
    return any(c == P_AVG and t.dtype == torch.bool for c, t in zip(sig.ins, case.tensors, strict=True))


def _expected(case: Case, given: list[torch.Tensor]) -> list[torch.Tensor] | None:
    try:
        with torch.no_grad():
            return case.expected(given)
    except Exception:  # torch refuses such data
        return None


def _run(
    bench: Bench, case: Case, found: Fit, given: Sequence[torch.Tensor], want: Sequence[torch.Tensor]
) -> str | None:
    """Why a fit is false; None when it is right."""
    draw = torch.Generator().manual_seed(bench.num)
    pieces = [bench.cut(t, code, draw) for t, (code,) in zip(given, found.ins, strict=True)]
    try:
        with torch.no_grad():
            results = bench.run(case.definition(bench.num, found), pieces, case.numbers)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    for number, (held, (code,), right) in enumerate(zip(results, found.outs, want, strict=True)):
        try:
            got = bench.join(held, code, tuple(right.shape))
        except (Mismatch, NotImplementedError) as error:  # the latter: what is pending cannot be reduced in its dtype
            return f"output {number}: {error}"
        if number == 1 and case.op.short_name in CHOICES:  # any of equals may be chosen: does it point at the value?
            dim = case.call.arg(2, "dim", -1)
            got, right = given[0].gather(dim, got), want[0]
        if any(is_partial(c) for (c,) in found.ins):  # terms of a sum may overflow or meet infinity where the sum does not
            got, right = got[right.isfinite()], right[right.isfinite()]
        if not near(got, right):
            return f"output {number}: {_short(got)} is not {_short(right)}"
    return None


def variants(case: Case) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Data sets alike in shape and dtype: as given, turned round with signs mixed, with ties, and with NaN."""
    tensors = case.tensors
    name = case.op.short_name
    spared = "linalg" in case.op.name or "_polynomial_" in name or name in LAPACK | KERNELS_DIFFER
    floats = any(t.is_floating_point() for t in tensors) and not spared
    yield "the data as given", list(tensors)
    others = {"mixed signs": [_mixed(t) for t in tensors], "ties": [_tied(t) for t in tensors]}
    if floats:
        others["NaN"] = [_with_nan(t, float("nan")) for t in tensors]
    for what, made in others.items():
        if name not in OVERWRITING or not _stands_twice(made[1], OVERWRITING[name]):
            yield what, made


def _stands_twice(index: torch.Tensor, num_dims: int) -> bool:
    """Whether a plane, the last dims of ``index``, names one place twice."""
    planes = index.flatten(index.ndim - num_dims).sort().values
    return bool((planes[..., 1:] == planes[..., :-1]).any())


def _mixed(t: torch.Tensor) -> torch.Tensor:
    turned = t.flatten().flip(0).reshape(t.shape)
    if t.dtype == torch.bool:
        return turned ^ (torch.arange(t.numel()) % 3 == 0).reshape(t.shape)
    if not t.is_floating_point() or not t.numel():
        return turned
    signs = (torch.arange(t.numel()) % 3 - 1).sign().reshape(t.shape)
    return torch.where(signs == 0, turned, turned * signs)


def _tied(t: torch.Tensor) -> torch.Tensor:
    if not t.numel():
        return t
    pairs = t.flatten()[torch.arange(t.numel()) // 3].reshape(t.shape)
    return pairs.round() if t.is_floating_point() else pairs


def _with_nan(t: torch.Tensor, value: float) -> torch.Tensor:
    if not t.is_floating_point() or t.numel() < 2:
        return t
    flat = t.flatten().clone()
    flat[1::4] = value
    return flat.reshape(t.shape)


def line(sig: Sig) -> str:
    """A signature as text: "Shard(dim=0), Replicate() -> Shard(dim=0)"."""
    return f"{', '.join(str(from_code(c)) for c in sig.ins)} -> {', '.join(str(from_code(c)) for c in sig.outs)}"


def _short(t: torch.Tensor) -> str:
    return " ".join(repr(t).split())[:80]
