"""The error for placements that no rule takes: which signature is nearest, and the call that would be legal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtorch.expressions import Spoken
from dtorch.ops._call import Call, Sig
from dtorch.ops._choose import Verify, by_cost, repair
from dtorch.placement import Partial, Placement, from_code
from dtorch.transport.errors import PlacementError


def placement_error(
    op: str, call: Call, sigs: Sequence[Sequence[Sig]], tensors: Sequence[Any], said: Spoken, writes: int | None,
    verify: Verify | None,
) -> PlacementError:  # fmt: skip
    """What to raise for a call that fits no signature.

    Args:
        sigs: legal signatures of each mesh axis.
        said: the call in the user's words.
        writes: the input that is written in place.
    """
    sizes = [t._spec.size_bytes for t in tensors]
    wanted = repair(call, sigs, sizes, frozenset(), verify)
    fix = detail = ""
    if wanted is not None:
        methods = [
            "" if t._spec.codes == codes else f".redistribute(placements=[{', '.join(as_code(from_code(c)) for c in codes)}])"
            for t, codes in zip(tensors, wanted, strict=True)
        ]
        if writes is not None and methods[writes]:
            detail = "It writes in place, so the placements of what it writes cannot change."
        else:
            fix = said.with_methods(methods) or "; ".join(
                f"{_name(said, i)}{method}" for i, method in enumerate(methods) if method
            )
    axis, ordered = _nearest(call, sigs, sizes, wanted)
    mesh = tensors[0]._spec.mesh
    name = "" if mesh.ndim == 1 else f" {axis}" if mesh.dim_names is None else f" {mesh.dim_names[axis]!r}"
    return PlacementError(
        op, [str(t._spec) for t in tensors], list(map(signature_text, ordered)), fix, detail, name, str(mesh), *said.line
    )


def _name(said: Spoken, i: int) -> str:
    span = said.spans[i]
    if span is None:
        return f"input{i}"
    own = said.text[span[0] : span[1]]
    return f"({own})" if span[2] else own


def _nearest(
    call: Call, sigs: Sequence[Sequence[Sig]], sizes: Sequence[int], wanted: tuple[tuple[int, ...], ...] | None
) -> tuple[int, list[Sig]]:
    """The first mesh axis on which something must change, and its signatures, the one of ``wanted`` first."""
    axes = [axis for axis, size in enumerate(call.mesh_shape) if size > 1] or [0]
    axis = axes[0]
    chosen: tuple[int, ...] = ()
    if wanted is not None:
        moved = [a for a in axes if any(codes[a] != t.codes[a] for codes, t in zip(wanted, call.tensors, strict=True))]
        axis = next(iter(moved), axis)
        chosen = tuple(codes[axis] for codes in wanted)
    ordered = by_cost(call, axis, (*sigs[axis], call.all_replicate()), sizes)
    return axis, sorted(ordered, key=lambda sig: sig.ins != chosen)


def signature_text(sig: Sig) -> str:
    """``(Shard(dim=0), Replicate()) -> Shard(dim=0)``"""
    if all(code == -1 for code in (*sig.ins, *sig.outs)):
        return "all Replicate"
    return f"({', '.join(str(from_code(c)) for c in sig.ins)}) -> {', '.join(str(from_code(c)) for c in sig.outs)}"


def as_code(placement: Placement) -> str:
    """A placement as Python that makes it."""
    return f'Partial("{placement.reduce_op}")' if isinstance(placement, Partial) else str(placement)
