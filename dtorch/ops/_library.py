"""Ops of torch's own library, ``torch.ops.aten.name.overload``, and the private functions that torch's Python calls.

They run on replicated tensors, as functions without a row do. What an op writes, and whether it draws, is read from its
schema. Ops of other libraries are refused: workers run what torch itself brings, and what ``register_op`` announced.
"""

from __future__ import annotations

from typing import Any

import torch

ATEN = "torch.ops.aten."
LIBRARY = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
PRIVATE = "torch._C._VariableFunctions"

_WORDS = """
    from_file _use_cudnn_ctc_loss _cudnn_ctc_loss _cudnn_rnn _cudnn_rnn_flatten_weight _cudnn_init_dropout_state
    _assert_async _assert_scalar _print _sync _has_compatible_shallow_copy_type _scaled_mm _scaled_mm_v2
    _nested_tensor_from_mask _nested_tensor_from_tensor_list _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _flash_attention_forward
    _efficient_attention_forward _fill_mem_eff_dropout_mask_ _philox_next _fused_dropout _standard_gamma
    _sample_dirichlet set_ resize_as_sparse_ record_stream _local_scalar_dense item _from_blob _foobar _make_dep_token
    as_tensor asarray tensor from_numpy scalar_tensor range promote_types result_type can_cast _propagate_xla_data
    _copy_from _copy_from_and_resize _resize_output_ _nnpack_available _debug_has_internal_overlap _pin_memory
    _efficientzerotensor _lazy_clone
"""
REFUSED = frozenset(_WORDS.split())
"""Not ops on tensors, without a CPU kernel, or drawing without saying so."""


_PREFIXES = ("__", "_foreach", "_fused", "_amp", "_test", "_cufft", "_sobol", "_philox", "_dyn")
_KINDS = "sparse quantize nested cudnn miopen mkldnn fbgemm weight_int triton mps cslt".split()  # noqa: SIM905


def allowed(name: str) -> bool:
    """Whether workers run the library's op or the private function of that name."""
    if name in REFUSED or name.startswith(_PREFIXES):
        return False
    return not any(word in name for word in _KINDS)


def find(name: str) -> Any:
    """The op called "torch.ops.aten.slice.Tensor" or, for all its overloads, "torch.ops.aten.slice".

    None when workers do not run it.
    """
    if not name.startswith(ATEN):
        return None
    short, _, overload = name[len(ATEN) :].partition(".")
    if not allowed(short) or not hasattr(torch.ops.aten, short):
        return None
    packet = getattr(torch.ops.aten, short)
    if overload and overload not in packet.overloads():
        return None
    op = getattr(packet, overload) if overload else packet
    try:
        written(op)
    except TypeError:
        return None
    return op


def written(op: Any) -> int | None:
    """Which argument a library op writes into and returns; None for none.

    Raises:
        TypeError: it takes or gives no tensors, draws, or writes elsewhere.
    """
    names = [] if isinstance(op, torch._ops.OpOverload) else op.overloads()
    overload = getattr(op, next((n for n in names if "out" not in n), names[0])) if names else op
    schema = overload._schema
    if torch.Tag.nondeterministic_seeded in overload.tags:
        raise TypeError(f"{overload} draws")
    if not any("Tensor" in str(a.type) for a in schema.arguments) or not schema.returns:
        raise TypeError(f"{overload} takes no tensors")
    if not all("Tensor" in str(r.type) for r in schema.returns):
        raise TypeError(f"{overload} gives no tensors")
    targets = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    returned = [r for r in schema.returns if r.alias_info is not None and r.alias_info.is_write]
    if not returned:
        return None  # what it writes beside its results (running statistics) is noticed when shapes are inferred
    if targets == [0] and len(schema.returns) == 1:
        return 0
    raise TypeError(f"{overload} writes into argument {targets[0]}")
