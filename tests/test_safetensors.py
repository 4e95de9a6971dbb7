"""The format: headers and slices, without files or workers."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from dtorch.runtime.layout import box, coords
from dtorch.runtime.safetensors import (
    DTYPES,
    FormatError,
    build_header,
    header_size,
    itemsize,
    parse_header,
    runs,
)


@pytest.mark.parametrize("name", DTYPES.values())
def test_itemsize_is_torchs(name: str) -> None:
    assert itemsize(name) == getattr(torch, name).itemsize


def test_all_dtypes_of_the_format_that_torch_has_are_known() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for code, dtype in safetensors._TYPES.items():
        if dtype.itemsize * 8 >= 8 and code in DTYPES:
            assert str(dtype) == f"torch.{DTYPES[code]}"
    assert set(safetensors._TYPES) <= {*DTYPES, "F4"}


@pytest.mark.parametrize("shape", [(), (0,), (5,), (4, 3), (2, 0, 3), (3, 4, 5), (1, 2, 1, 3)])
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2)])
def test_runs_are_the_bytes_of_a_slice(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    data = full.numpy().tobytes()
    for codes in itertools.product((-1, *range(len(shape))), repeat=len(mesh)):
        seen = bytearray()
        for coord in coords(mesh):
            part = box(shape, codes, mesh, coord)
            length, offsets = runs(shape, part, 2)
            got = b"".join(data[at : at + length] for at in offsets)
            assert got == full[tuple(slice(*cut) for cut in part)].numpy().tobytes()
            seen += got
        if all(c >= 0 for c in codes):
            assert len(seen) == len(data)


def test_a_contiguous_slice_is_one_run() -> None:
    length, offsets = runs((8, 3, 2), ((2, 4), (0, 3), (0, 2)), 4)
    assert (length, list(offsets)) == (48, [48])


def test_a_header_comes_back() -> None:
    tensors = {"b": ("bfloat16", (3,)), "a": ("float32", (2, 2)), "e": ("int8", (0, 4)), "s": ("int64", ())}
    head, entries, size = build_header(tensors, {"format": "pt"})
    assert header_size(head[:8], size) == len(head) - 8
    parsed, metadata = parse_header(head[8:], size)
    assert parsed == entries
    assert metadata == {"format": "pt"}
    assert all(e.start % itemsize(e.dtype) == 0 for e in entries.values())
    assert size == len(head) + 8 + 16 + 6


def header(**node: object) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **node}}).encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[1]", "no JSON object"),
        (b"{", "no JSON object"),
        (header(dtype="F4"), "F4"),
        (header(shape=[-1]), r"\[-1\]"),
        (header(data_offsets=[0, 4]), "takes 8 bytes"),
        (header(data_offsets=[8, 16]), "cut short"),
        (header(shape=None), "expected dtype, shape"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(text: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        parse_header(text, 8 + len(text) + 8)


@pytest.mark.parametrize(("head", "words"), [(b"ab", "2 bytes"), (b"\xff" * 8, "another format"), (b"\x40" + b"\0" * 7, "cut")])
def test_what_is_wrong_with_a_file_is_said(head: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        header_size(head, 20)
