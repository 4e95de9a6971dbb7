"""torch functions without a row of their own.

They run on replicated tensors. Which functions these are follows from torch's own list of overridable functions, less
those that are no ops on tensors; client and workers derive it alike, so the list stays the allow-list of what a
worker runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from dtorch.ops import _library, table
from dtorch.ops._op import Op
from dtorch.ops._rules import replicate_only
from dtorch.ops.table import OPS
from dtorch.tensor import TORCH, Tensor

_BODIES = "torch._C._nn"
"""What functions of torch.nn.functional call inside, once their own bodies run on our tensors (``nn/_expand.py``)."""

_PLACES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    ("torch.Tensor", torch.Tensor),
    (_BODIES, torch._C._nn),
    (_library.PRIVATE, torch._C._VariableFunctions),
)

_WORDS = """
    apply_ map_ map2_ backward register_hook register_post_accumulate_grad_hook retain_grad data_ptr storage
    untyped_storage storage_type storage_offset set_ resize resize_as resize_as_sparse_
    share_memory_ is_shared numpy tolist item __array__ __array_wrap__ __dlpack__ __dlpack_device__ __reduce__
    __reduce_ex__ __setstate__ __deepcopy__ __repr__ __str__ __format__ __dir__ __hash__ __len__ __iter__
    __contains__ __bool__ __int__ __float__ __complex__ __index__ __long__ __nonzero__ get_device cuda cpu xpu
    ipu mtia hpu to_mkldnn is_set_to as_subclass new_tensor new names rename rename_ refine_names align_to
    align_as unflatten_names has_names requires_grad_ detach_ save load compile from_file frombuffer manual_seed
    record_stream pin_memory is_pinned module_load to_sparse to_sparse_coo to_sparse_csr to_sparse_csc
    to_sparse_bsr to_sparse_bsc sparse_resize_ sparse_resize_and_clear_ sparse_mask sparse_dim dense_dim indices
    values crow_indices col_indices ccol_indices row_indices coalesce is_coalesced smm sspmm _indices _values
    _nnz quantize_per_tensor quantize_per_channel rrelu_ get_device_module
    rrelu_with_noise rrelu_with_noise_ native_dropout dropout fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices _fused_dropout _standard_gamma _sample_dirichlet
    _dirichlet_grad pca_lowrank svd_lowrank lobpcg int_repr dequantize lu_unpack_ choose_qparams_optimized
"""

_REFUSED = frozenset(_WORDS.split())
"""Not ops on tensors, or random ones for which a draw on every device would be wrong."""


def _allowed(name: str, place: str) -> bool:
    if place == _library.PRIVATE and not _library.allowed(name):
        return False
    if place == _library.PRIVATE and name.startswith("_"):
        return name not in _REFUSED
    if name in _REFUSED or name.startswith(("_", "sym_", "q_", "fbgemm_", "miopen_", "mkldnn_", "cudnn_")):
        return False
    return "sparse" not in name and "quantize" not in name


@lru_cache(maxsize=1)
def generic_names() -> dict[str, Callable[..., Any]]:
    """Name in the op table -> torch function, for every function that has no row and may run on replicated tensors."""
    from torch.overrides import get_overridable_functions

    known = {id(fn) for fns in get_overridable_functions().values() for fn in fns}
    found: dict[str, Callable[..., Any]] = {}
    for place, holder in _PLACES:
        for name in dir(holder):
            if not _allowed(name, place):
                continue
            fn = getattr(holder, name, None)
            if not callable(fn) or isinstance(fn, type) or fn in TORCH or f"{place}.{name}" in OPS:
                continue
            if id(fn) in known or place in ("torch.Tensor", _BODIES, _library.PRIVATE):
                found[f"{place}.{name}"] = fn
    return found


def missing_ops() -> list[str]:
    """Names of torch's functions that have no rule of their own: they run on replicated tensors only."""
    return sorted(name for name in generic_names() if not name.startswith((_library.PRIVATE, _BODIES)))


def generic(name: str) -> Op | None:
    """The op of a function without a row, made on first use; None when there is no such function."""
    fn = generic_names().get(name) or _library.find(name)
    if fn is None:
        return None
    op = OPS.get(name)
    if op is None:
        short = name.rsplit(".", 1)[-1]
        writes = 0 if short.endswith("_") and not short.endswith("__") else None
        if isinstance(fn, _library.LIBRARY):
            writes = _library.written(fn)
        op = OPS[name] = Op(name, fn, replicate_only, writes=writes)
        TORCH[fn] = op
    return op


@lru_cache(maxsize=1)
def _name_of() -> dict[Callable[..., Any], str]:
    return {fn: name for name, fn in generic_names().items()}


def record_missing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function without a row on replicated tensors.

    Raises:
        NotImplementedError: it is no function that a worker would run.
        PlacementError: an input is not replicated.
    """
    name = f"torch.ops.{func}" if isinstance(func, _library.LIBRARY) else _name_of().get(func)
    op = generic(name) if name is not None else None
    if op is None:
        called = getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func))
        raise NotImplementedError(
            f"dtorch has no {called}: it is not in the op table, and no function that could run on replicated tensors. "
            "Fetch the values with to_torch(), or compose it of other ops"
        )
    return op.record(args, kwargs)


def method(name: str) -> Callable[..., Any]:
    """A method of torch.Tensor without a row. Raises AttributeError when there is none."""
    op = generic(f"torch.Tensor.{name}")
    if op is None:
        raise AttributeError(f"'dtorch.Tensor' object has no attribute {name!r}")

    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op.record((self, *args), kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``Tensor.{name}`` on replicated tensors."
    return call


def _missing_attribute(self: Tensor, name: str) -> Any:
    if name.startswith("_") or name not in _method_names():
        raise AttributeError(f"'dtorch.Tensor' object has no attribute {name!r}")
    made = method(name)
    setattr(Tensor, name, made)
    return made.__get__(self)


@lru_cache(maxsize=1)
def _method_names() -> frozenset[str]:
    return frozenset(name.rsplit(".", 1)[-1] for name in generic_names() if name.startswith("torch.Tensor."))


def _resolve_generic(name: str) -> Callable[..., Any]:
    op = generic(name)
    if op is None:
        raise KeyError(name)
    return op.fn


def _query(name: str, answer: Callable[..., Any]) -> None:
    """A question about a tensor that is answered here, without its value."""
    for holder in (torch, torch.Tensor):
        fn = getattr(holder, name, None)
        if fn is not None:
            TORCH.setdefault(fn, answer)
    if not hasattr(Tensor, name):
        setattr(Tensor, name, answer)


_query("is_complex", lambda x: x.dtype.is_complex)
_query("is_floating_point", lambda x: x.dtype.is_floating_point)
_query("is_signed", lambda x: x.dtype.is_signed)
_query("numel", lambda x: x.numel())
_query("is_nonzero", lambda x: bool(x))
_query("is_same_size", lambda x, other: x.shape == other.shape)
_query("is_inference", lambda x: False)
_query("is_distributed", lambda x: False)
_query("_is_all_true", lambda x: x.all())  # what torch's own checks of values call
_query("_is_any_true", lambda x: x.any())
_query("is_conj", lambda x: bool(x._spec.meta.is_conj()))
_query("is_neg", lambda x: bool(x._spec.meta.is_neg()))

Tensor.__getattr__ = _missing_attribute  # type: ignore[method-assign]
table.unknown = _resolve_generic
