"""Multi-head attention as torch.nn's modules call it, made of ops that keep batches, heads and sequences where they are."""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.ops.table import OPS, composite
from dtorch.policy import auto_redistribute
from dtorch.tensor import Tensor

F = torch.nn.functional
_WHOLE = OPS["torch.nn.functional.multi_head_attention_forward"]


@composite(F.multi_head_attention_forward, functional="multi_head_attention_forward")
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """As torch's, with sequences first: query (T, B, E) or (T, E).

    Batch and sequence of query, key and value may be split. With dropout in training, biases of keys and values, static
    keys or a row of zeros, all inputs must be replicated. Attention weights (``need_weights``) are products of whole
    sequences, which are gathered for them.
    """
    tensors = (query, key, value)
    is_plain = bias_k is None and bias_v is None and static_k is None and static_v is None
    is_plain = is_plain and not add_zero_attn and not (training and dropout_p)
    if not is_plain or not any(map(_is_cut, tensors)):
        return _WHOLE.record(
            (*tensors, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p,
             out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights, attn_mask, use_separate_proj_weight,
             q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v, average_attn_weights, is_causal), {},
        )  # fmt: skip
    is_batched = query.ndim == 3
    if {query.ndim, key.ndim, value.ndim} not in ({2}, {3}):
        raise AssertionError(f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} dims, not all 2 or 3")
    width = query.shape[-1]
    if width != embed_dim_to_check or width % num_heads:
        raise AssertionError(f"{width} features, not {embed_dim_to_check}, a multiple of {num_heads} heads")
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    own = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = own if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        _heads(F.linear(x, w, b), num_heads, is_batched) for x, w, b in zip(tensors, weights, biases, strict=True)
    )
    hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if hint else _mask(attn_mask, key_padding_mask, q, k)
    if not need_weights:
        made = F.scaled_dot_product_attention(q, k, v, mask, 0.0, hint)
        return _projected(made, is_batched, out_proj_weight, out_proj_bias), None
    with auto_redistribute():
        scores = torch.matmul(q * math.sqrt(1 / q.shape[-1]), k.transpose(-2, -1))
        scores = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        out = _projected(torch.matmul(scores, v), is_batched, out_proj_weight, out_proj_bias)
        scores = scores.mean(dim=1) if average_attn_weights else scores
        scores = scores if is_batched else scores.squeeze(0)
    return out.redistribute(placements=query.placements) if isinstance(query, Tensor) else out, scores


def _projected(out: Any, is_batched: bool, weight: Any, bias: Any) -> Any:
    """(B, heads, T, features) -> (T, B, E) or (T, E)."""
    out = out.permute(2, 0, 1, 3).flatten(2)
    return F.linear(out if is_batched else out.squeeze(1), weight, bias)


def _is_cut(x: Any) -> bool:
    return isinstance(x, Tensor) and any(
        p.is_shard() and n > 1 for p, n in zip(x.placements, x.device_mesh.shape, strict=True)
    )


def _heads(x: Any, num_heads: int, is_batched: bool) -> Any:
    """(T, B, E) or (T, E) -> (B, heads, T, E / heads)."""
    x = x if is_batched else x.unsqueeze(1)
    return x.unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3)


def _mask(attn_mask: Any, padding: Any, q: Any, k: Any) -> Any:
    """The two masks as one that is added to scores of shape (B, heads, T, S); None when there are none."""
    batch, num_heads, length, _ = q.shape
    both = None
    if attn_mask is not None:
        both = _added(attn_mask, q.dtype)
        if both.ndim == 3 and both.shape[0] != 1:
            both = both.reshape(batch, num_heads, length, k.shape[2])
    if padding is not None:
        hidden = _added(padding, q.dtype).reshape(batch, 1, 1, k.shape[2])
        both = hidden if both is None else both + hidden
    return both


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """A mask of scores; where a bool one is True, a key is not seen."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
