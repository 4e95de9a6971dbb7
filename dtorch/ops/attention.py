"""Attention: batches and heads are independent; so are queries, where no causal mask counts them."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.ops._call import Call, R, Sig, sharded
from dtorch.ops._op import Op
from dtorch.ops._rules import replicate_only
from dtorch.ops.norm import index_of
from dtorch.ops.table import OPS, composite, row
from dtorch.runtime.layout import box, coords, is_shard, shard_block, shard_code, shard_dim


def _attention(call: Call) -> list[Sig]:
    """scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).

    query (..., Hq, L, E), key and value (..., Hk, S, E and Ev), mask broadcast to (..., Hq, L, S). With grouped heads
    the pieces of the query hold exactly the groups of the pieces of the key: ``consistent`` checks it.
    """
    q, k, v = call.tensors[:3]
    roles = [index_of(call, i, name) for i, name in enumerate(("query", "key", "value"))]
    if roles != [0, 1, 2]:
        return []
    ndim = call.outputs[0].ndim
    shape = (*call.outputs[0].shape[:-1], k.shape[-2])  # of the mask
    masks = call.tensors[3:]
    sigs = []
    for dim in range(ndim - 2):
        codes, blocks = [], []
        for tensor in call.tensors:
            own = dim - (ndim - tensor.ndim)
            is_whole = own < 0 or (tensor.shape[own] == 1 and shape[dim] != 1)
            codes.append(R if is_whole else own)
            blocks.append(1 if is_whole else shape[dim] // max(tensor.shape[own], 1))
        if all(c == R for c in codes):
            continue
        if max(blocks) > 1:  # grouped heads: the query may be cut at multiples of the group
            group = max(blocks)
            met = (c for t in (k, v) for c in t.codes if is_shard(c) and shard_dim(c) == dim)
            for block in sorted({1, *map(shard_block, met)}):
                cut = [R if c == R else shard_code(c, block * group // b) for c, b in zip(codes, blocks, strict=True)]
                sigs.append(sharded(call, cut, shard_code(dim, block * group)))
        sigs.append(sharded(call, codes, dim))
    if not call.arg(5, "is_causal", False):
        queries = [q.ndim - 2, R, R]
        for mask in masks:
            queries.append(mask.ndim - 2 if mask.ndim >= 2 and (mask.shape[-2] != 1 or shape[-2] == 1) else R)
        sigs.append(sharded(call, queries, ndim - 2))
    sigs.append(sharded(call, [R, R, v.ndim - 1] + [R] * len(masks), ndim - 1))
    return [Sig(s.ins, s.outs, "filled") for s in sigs]


def consistent(call: Call, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> bool:
    """Whether on every device the heads of the query are the groups of the heads of key and value."""
    q, k, v = call.tensors[:3]
    if min(t.ndim for t in (q, k, v)) < 3 or q.shape[-3] == k.shape[-3] == v.shape[-3]:
        return True
    for coord in coords(call.mesh_shape):
        of_q, *others = (box(t.shape, ins[t.index], call.mesh_shape, coord)[-3] for t in (q, k, v))
        for t, part in zip((k, v), others, strict=True):
            group = q.shape[-3] // max(t.shape[-3], 1)
            if of_q[0] != of_q[1] and (part[0] * group, part[1] * group) != of_q:
                return False
    return True


row("scaled_dot_product_attention", _attention, verify=consistent, places="torch.nn.functional")

_DROPPING = "attention.dropout"
OPS[_DROPPING] = Op(_DROPPING, torch.nn.functional.scaled_dot_product_attention, replicate_only, random=True)
_PLAIN = OPS["torch.nn.functional.scaled_dot_product_attention"]


@composite(torch.nn.functional.scaled_dot_product_attention, functional="scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Any:
    """As torch's. With dropout the numbers are drawn for the whole, and every input must be replicated."""
    op = OPS[_DROPPING] if dropout_p else _PLAIN
    return op.record((query, key, value, attn_mask, dropout_p, is_causal), more)
