"""Attention: batches and heads are independent, and so are queries; a sequence may be cut (context parallelism)."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.ops._call import Call, R, Sig, sharded
from dtorch.ops._op import Op
from dtorch.ops._rules import replicate_only
from dtorch.ops._ways import Front
from dtorch.ops.norm import index_of
from dtorch.ops.table import FUNCTIONAL, OPS, composite, row
from dtorch.policy import auto_redistribute
from dtorch.runtime.kernels._spans import meet, spans_of
from dtorch.runtime.layout import Interval, box, coords, is_shard, shard_block, shard_code, shard_dim, split
from dtorch.tensor import FRONTS, Tensor

HEADS_AXES = frozenset({"ulysess_cp", "ulysses_cp"})
"""Names of mesh axes along which a cut sequence is exchanged for batches and heads; along others its keys go round."""


def _attention(call: Call) -> list[Sig]:
    """scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).

    query (..., Hq, L, E), key and value (..., Hk, S, E and Ev), mask broadcast to (..., Hq, L, S).
    """
    roles = [index_of(call, i, name) for i, name in enumerate(("query", "key", "value"))]
    if roles != [0, 1, 2]:
        return []
    ndim, value = call.outputs[0].ndim, call.tensors[2]
    sigs = [sig for dim in range(ndim - 2) for sig in _leading(call, dim)]
    sigs += _sequence(call)
    sigs.append(sharded(call, [R, R, value.ndim - 1] + [R] * (call.num_inputs - 3), ndim - 1))
    return [Sig(s.ins, s.outs, "filled") if s.kernel == "local" else s for s in sigs]


def _params(call: Call) -> dict[str, Any]:
    return {"causal": bool(call.arg(5, "is_causal", False)), "scale": call.kwargs.get("scale")}


def _leading(call: Call, dim: int) -> list[Sig]:
    """Batches and heads. With grouped heads the pieces of the query hold exactly the groups of the pieces of the key, which
    ``consistent`` checks, or every device has all keys and uses those of its queries."""
    ndim = call.outputs[0].ndim
    size = call.outputs[0].shape[dim]
    codes, blocks = [], []
    for tensor in call.tensors:
        own = dim - (ndim - tensor.ndim)
        is_whole = own < 0 or (tensor.shape[own] == 1 and size != 1)
        codes.append(R if is_whole else own)
        blocks.append(1 if is_whole else size // max(tensor.shape[own], 1))
    if all(c == R for c in codes):
        return []
    sigs = []
    if max(blocks) > 1:  # grouped heads: the query may be cut at multiples of the group
        group = max(blocks)
        met = (c for t in call.tensors[1:3] for c in t.codes if is_shard(c) and shard_dim(c) == dim)
        for block in sorted({1, *map(shard_block, met)}):
            cut = [R if c == R else shard_code(c, block * group // b) for c, b in zip(codes, blocks, strict=True)]
            sigs.append(sharded(call, cut, shard_code(dim, block * group)))
        shared = [R if i in (1, 2) and b > 1 else c for i, (c, b) in enumerate(zip(codes, blocks, strict=True))]
        sigs.append(sharded(call, shared, dim, kernel="attention", params=_params(call)))
        if not _aligned(call, dim):
            return sigs
    return [*sigs, sharded(call, codes, dim)]


def _aligned(call: Call, dim: int) -> bool:
    """Whether query, key and value, as far as this mesh axis cuts their heads, are cut between the same groups."""
    num, ndim = call.mesh_shape[call.axis], call.outputs[0].ndim
    cuts = set()
    for tensor in call.tensors[:3]:
        code, own = tensor.codes[call.axis], dim - (ndim - tensor.ndim)
        if is_shard(code) and shard_dim(code) == own:
            group = call.outputs[0].shape[dim] // max(tensor.shape[own], 1)
            parts = split(0, tensor.shape[own], num, shard_block(code))
            cuts.add(tuple((start * group, stop * group) for start, stop in parts if start < stop))
    return len(cuts) <= 1


def _sequence(call: Call) -> list[Sig]:
    """The sequence: cut for queries alone, for keys alone, or for both; see ``runtime/kernels/attention.py``."""
    q, k, v = call.tensors[:3]
    params = _params(call)
    sizes = (q.shape[-2], k.shape[-2])
    cuts: list[list[int]] = [[], []]  # codes of a mask that is cut along the queries, along the keys
    whole: list[int] = []
    for mask in call.tensors[3:]:
        whole.append(R)
        for i in (0, 1):
            dim = mask.ndim - 2 + i
            cuts[i].append(R if mask.shape[dim] == 1 and sizes[i] != 1 else dim)
    of_q, of_k, of_v, out = q.ndim - 2, k.ndim - 2, v.ndim - 2, call.outputs[0].ndim - 2

    def sig(ins: list[int], to: int, role: str) -> Sig:
        return sharded(call, ins, to, kernel="attention", params={**params, f"role{call.axis}": role})

    both = "heads" if call.axis_name in HEADS_AXES else "ring"
    masks = [whole, *cuts] if whole else [[]]
    if params["causal"]:
        sigs = [sig([of_q, R, R, *m], out, "query") for m in masks[:2]]
    else:
        sigs = [sharded(call, [of_q, R, R, *cuts[0]], out)]
    sigs += [sig([R, of_k, of_v, *m], R, "keys") for m in (masks[0], *masks[2:])]
    return sigs + [sig([of_q, of_k, of_v, *m], out, both) for m in masks]


def consistent(call: Call, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> bool:
    """Whether on every device the heads of the query are the groups of the heads of key and value; or lie among them, where
    a mesh axis cuts the heads of the query alone."""
    q, k, v = call.tensors[:3]
    if min(t.ndim for t in (q, k, v)) < 3 or q.shape[-3] == k.shape[-3] == v.shape[-3]:
        return True
    heads = [[is_shard(c) and shard_dim(c) == t.ndim - 3 for c in ins[t.index]] for t in (q, k, v)]
    shares = any(a and not b and not c for a, b, c in zip(*heads, strict=True))
    for coord in coords(call.mesh_shape):
        of_q, *others = (box(t.shape, ins[t.index], call.mesh_shape, coord)[-3] for t in (q, k, v))
        for t, part in zip((k, v), others, strict=True):
            if of_q[0] == of_q[1] or t.shape[-3] == 0:
                continue
            group = q.shape[-3] // t.shape[-3]
            held = (part[0] * group, part[1] * group)
            if not (held[0] <= of_q[0] and of_q[1] <= held[1] if shares else held == of_q):
                return False
    return True


def _sees(call: Call, ins: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the devices that trade pieces of a sequence hold among them what their queries and keys need of the mask."""
    q, k, *_ = call.tensors
    line = [
        axis
        for axis, (of_q, of_k) in enumerate(zip(ins[0], ins[1], strict=True))
        if is_shard(of_q) and is_shard(of_k) and shard_dim(of_q) == q.ndim - 2 and shard_dim(of_k) == k.ndim - 2
    ]
    for mask in call.tensors[3:]:
        for tensor, dim in ((q, -2), (k, -1)):
            if mask.shape[dim] == 1 and tensor.shape[-2] != 1:
                continue
            needed: dict[tuple[int, ...], list[Interval]] = {}
            held: dict[tuple[int, ...], list[Interval]] = {}
            for coord in coords(call.mesh_shape):
                rest = tuple(at for axis, at in enumerate(coord) if axis not in line)
                needed.setdefault(rest, []).append(box(tensor.shape, ins[tensor.index], call.mesh_shape, coord)[-2])
                held.setdefault(rest, []).append(box(mask.shape, ins[mask.index], call.mesh_shape, coord)[dim])
            if any(meet(spans_of(part), spans_of(held[rest])) != spans_of(part) for rest, part in needed.items()):
                return False
    return True


def _verify(call: Call, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> bool:
    return consistent(call, ins, outs) and _sees(call, ins)


row("scaled_dot_product_attention", _attention, verify=_verify, places="torch.nn.functional")

_DROPPING = "attention.dropout"
OPS[_DROPPING] = Op(_DROPPING, torch.nn.functional.scaled_dot_product_attention, replicate_only, random=True)
_PLAIN = OPS["torch.nn.functional.scaled_dot_product_attention"]


@composite(torch.nn.functional.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As torch's. With dropout the numbers are drawn for the whole: inputs are gathered for it, and the result is placed as
    the query is."""
    inputs = (query, key, value, attn_mask, dropout_p, is_causal)
    more: dict[str, Any] = {}
    if scale is not None:
        more["scale"] = scale
    if enable_gqa:
        more["enable_gqa"] = enable_gqa
    if not dropout_p:
        return _PLAIN.record(inputs, more)
    with auto_redistribute():
        made = OPS[_DROPPING].record(inputs, more)
    return made.redistribute(placements=query.placements) if isinstance(query, Tensor) else made


def _has_no_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return type(given) in (int, float) and not given


_FRONT = Front(_PLAIN, scaled_dot_product_attention, _has_no_dropout)
FRONTS[torch.nn.functional.scaled_dot_product_attention] = _FRONT
FUNCTIONAL["scaled_dot_product_attention"] = _FRONT.call
