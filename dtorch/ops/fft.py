"""Fourier transforms: along dims that are whole; all others can be sharded, and pending sums stay pending.

The library that computes them refuses tensors without elements, which a device may well hold.
"""

from __future__ import annotations

from typing import Any

from dtorch.ops._call import Call, R, Rule, Sig, sharded
from dtorch.ops._rules import _linear
from dtorch.ops.table import row


def transform(default: int | tuple[int, ...] | None, shape_at: int | None = 1) -> Rule:
    """A transform along the argument ``dim``.

    Args:
        default: its default; None: all dims, or as many last ones as ``s`` has sizes.
        shape_at: position of ``n`` or ``s``, after which ``dim`` stands; None where there is none.
    """

    def rule(call: Call) -> list[Sig]:
        x = call.tensors[0]
        dim_at = 1 if shape_at is None else shape_at + 1
        dims: Any = call.arg(dim_at, "dim", default)
        if dims is None:
            sizes = None if shape_at is None else call.arg(shape_at, "s")
            dims = range(x.ndim) if sizes is None else range(x.ndim - len(sizes), x.ndim)
        whole = {d % x.ndim for d in ((dims,) if isinstance(dims, int) else dims)} if x.ndim else set()
        kept = [sharded(call, (d,), d, kernel="unless_empty") for d in range(x.ndim) if d not in whole]
        return kept + _linear(call, "first")

    return rule


def _spectrogram(num_dims: int) -> Rule:
    """stft and istft: signals of a batch are apart; a window is whole."""

    def rule(call: Call) -> list[Sig]:
        rest = (R,) * (len(call.tensors) - 1)
        batch = [sharded(call, (0, *rest), 0, kernel="unless_empty")] if call.tensors[0].ndim > num_dims else []
        return batch + _linear(call, "first")

    return rule


row("fft ifft rfft irfft hfft ihfft", transform(-1), places="torch.fft")
row("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2", transform((-2, -1)), places="torch.fft")
row("fftn ifftn rfftn irfftn hfftn ihfftn", transform(None), places="torch.fft")
row("fftshift ifftshift", transform(None, shape_at=None), places="torch.fft")
row("stft", _spectrogram(1), places="torch torch.Tensor")
row("istft", _spectrogram(2), places="torch torch.Tensor")
