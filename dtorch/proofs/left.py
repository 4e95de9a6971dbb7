"""Signatures that the search finds and that no rule offers, by reason.

``python -m dtorch ops --search`` prints the reason beside what it finds; a test runs the search and fails on what has none.
"""

from __future__ import annotations

_LEFT = {
    "a pending sum goes through a function that is linear, but is seldom pending there: it is reduced first": "P",
    "constants: the shape alone decides, and a replicated result costs no communication": """
        new_empty new_empty_strided new_full new_ones new_zeros zeros_like ones_like full_like empty_like
        """,
    "losses that no large model shards; they run on whole tensors": """
        gaussian_nll_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss ctc_loss
        poisson_nll_loss margin_ranking_loss soft_margin_loss linear_cross_entropy_with_options linear_cross_entropy nll_loss
        hinge_embedding_loss cosine_embedding_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
        """,
    "functions of torch's own internals, which no public function calls on our tensors": """
        _unsafe_masked_index _unsafe_masked_index_put_accumulate _chunk_cat _upsample_bilinear2d_aa hash_tensor _safe_softmax
        slice _batch_norm_with_update native_channel_shuffle split_with_sizes
        """,
    "numerical calculus and statistics on small data": """
        trapezoid trapz cumulative_trapezoid gradient cov corrcoef histc histogram histogramdd quantile nanquantile vander
        tensorsolve tensorinv pdist block_diag cartesian_prod combinations unravel_index isin nonzero_static
        """,
    "torch refuses pieces without rows, or computes them in another way": "addmv avg_pool2d",
    "a result that is the same in one order of its elements only: cut, it would have to be put together anew": """
        cat index_put index_copy index_add index_fill put scatter scatter_add scatter_reduce index_reduce masked_scatter
        diagonal_scatter as_strided_scatter gather take where embedding_bag index
        """,
}
"""Reason -> short names of functions; "P" stands for whatever is pending."""

LEFT = {name: reason for reason, names in _LEFT.items() for name in names.split()}


def reason_for(op: str, is_pending: bool) -> str | None:
    """Why a signature of ``op`` ("torch.linalg.det") is left; None when nobody has said.

    Args:
        is_pending: an input of the signature is pending.
    """
    if is_pending:
        return LEFT["P"]
    parts = op.split(".")
    return next((LEFT[part] for part in reversed(parts) if part in LEFT), None)
