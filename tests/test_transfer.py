"""Tensors that move keep what they are: values, strides, and the memory that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.runtime.transfer import decode_manifests, encode_manifests, pack, unpack
from dtorch.transport.errors import ProtocolError


def moved(*items: Any) -> tuple[list[Any], int]:
    """What arrives, and how many bytes went."""
    manifest, buffers = pack(items)
    (read,) = decode_manifests(encode_manifests([manifest]))
    assert read.buffer_sizes() == [buffer.numel() for buffer in buffers]
    copies = [buffer.clone() for buffer in buffers]
    return unpack(read, copies, torch.device("cpu")), sum(read.buffer_sizes())


def test_values_strides_and_dtypes_arrive() -> None:
    given = [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.arange(6, dtype=torch.int8).view(2, 3),
        torch.tensor(True),
        torch.empty(0, 5, dtype=torch.float64),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(4, 1).expand(4, 3),
        torch.arange(3.0)[1].expand(1),  # one element, of any stride
    ]
    got, _ = moved(*given)
    for before, after in zip(given, got, strict=True):
        assert torch.equal(before, after)
        assert (before.stride(), before.dtype, before.shape) == (after.stride(), after.dtype, after.shape)
        assert not before.numel() or before.data_ptr() != after.data_ptr()


def test_memory_that_is_shared_stays_shared_and_moves_once() -> None:
    base = torch.arange(100.0).view(10, 10)
    (whole, row, column), size = moved(base, base[3], base[:, 2])
    assert size == base.nbytes
    row.zero_()
    column.fill_(7.0)
    assert torch.equal(whole[3, 3:], torch.zeros(7))
    assert torch.equal(whole[:, 2], torch.full((10,), 7.0))


def test_no_more_moves_than_the_views_show() -> None:
    base = torch.randn(1000, 1000)
    (column,), size = moved(base[:, 5:7])
    assert size == 2 * 1000 * 4
    assert torch.equal(column, base[:, 5:7])
    assert column.stride() == (1000, 1)
    (middle,), size = moved(base[400:600])
    assert size == 200 * 1000 * 4
    (left, right), size = moved(base[:, :10], base[:, 5:20])  # they overlap, in part
    assert size == (10 + 15) * 1000 * 4
    left[:, 5:10] = 1.0
    assert torch.equal(right[:, :5], torch.ones(1000, 5))
    assert torch.equal(middle, base[400:600])


def test_conjugate_and_negative_views_stay_what_they_are() -> None:
    base = torch.randn(5, dtype=torch.complex64)
    (plain, conj, imag), _ = moved(base, base.conj(), base.conj().imag)
    assert conj.is_conj()
    assert imag.is_neg()
    assert torch.equal(conj, base.conj())
    assert torch.equal(imag, base.conj().imag)
    plain.zero_()
    assert torch.equal(conj, torch.zeros(5, dtype=torch.complex64))


def test_what_is_no_tensor_is_left_out() -> None:
    got, size = moved(None, torch.ones(2), object())
    assert got[0] is None
    assert got[2] is None
    assert (got[1].tolist(), size) == ([1.0, 1.0], 8)


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not manifests"):
        decode_manifests(b"\xc1")
