"""The safetensors format: a header that says where each tensor lies, and which bytes a slice is. Pure.

A file is 8 bytes (the size of the header, little endian), the header (JSON: name -> dtype, shape, [start, stop) of its bytes
after the header; and "__metadata__", a dict of strings), and the tensors, row-major. See the format's description at
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dtorch.runtime.layout import Box

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What other readers take for a sane header."""
METADATA = "__metadata__"

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
}  # fmt: skip
"""The format's name of a dtype -> torch's. Its dtypes of 4 and 6 bits are left out: their elements are no bytes."""
NAMES = {name: code for code, name in DTYPES.items()}

_SIZES = {"bool": 1, "complex64": 8}


def itemsize(dtype: str) -> int:
    """Bytes of an element, by torch's name of the dtype."""
    if dtype in _SIZES:
        return _SIZES[dtype]
    digits = dtype.partition("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits) // 8


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        dtype: torch's name of it.
        start: its first byte, counted from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


class FormatError(ValueError):
    """The bytes are no safetensors file; says what is wrong with them."""


def header_size(head: bytes, file_bytes: int) -> int:
    """Bytes of the header, from the file's first 8 bytes. Raises FormatError."""
    if len(head) < LENGTH_BYTES:
        raise FormatError(f"it has {len(head)} bytes, and the size of the header alone takes {LENGTH_BYTES}")
    size = int.from_bytes(head[:LENGTH_BYTES], "little")
    if size > MAX_HEADER_BYTES:
        raise FormatError(f"its first {LENGTH_BYTES} bytes announce a header of {size} bytes; this is another format")
    if LENGTH_BYTES + size > file_bytes:
        raise FormatError(f"it announces a header of {size} bytes and has {file_bytes} in all: it is cut short")
    return size


def parse_header(text: bytes, file_bytes: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """(name -> entry, metadata), from the header's JSON.

    Args:
        text: the header, without the 8 bytes before it.
        file_bytes: size of the whole file.

    Raises:
        FormatError: it is no header, or names bytes that the file does not have.
    """
    try:
        tree = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise FormatError(f"its header is no JSON object: {error}") from None
    metadata = tree.pop(METADATA, None) or {}
    begin = LENGTH_BYTES + len(text)
    entries = {name: _entry(name, node, begin, file_bytes) for name, node in tree.items()}
    return entries, {str(k): str(v) for k, v in metadata.items()}


def _entry(name: str, node: Any, begin: int, file_bytes: int) -> Entry:
    match node:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise FormatError(f"its header says of {name!r} only {node!r}; expected dtype, shape and data_offsets")
    if code not in DTYPES:
        raise FormatError(f"{name!r} has dtype {code}, which torch has no tensors of; there are {', '.join(DTYPES)}")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(f"{name!r} has shape {shape}")
    entry = Entry(DTYPES[code], tuple(shape), begin + start)
    if start < 0 or stop - start != entry.size_bytes:
        raise FormatError(
            f"{name!r} of shape {shape} and dtype {code} takes {entry.size_bytes} bytes, its offsets are [{start}, {stop}]"
        )
    if begin + stop > file_bytes:
        raise FormatError(f"{name!r} ends at byte {begin + stop}, and the file has {file_bytes}: it is cut short")
    return entry


def build_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry], int]:
    """The first bytes of a file, where each tensor goes, and the size of the file.

    Tensors lie in the order of falling alignment and then of names, as other writers do it; so each begins at a multiple
    of its itemsize.

    Args:
        tensors: name -> (torch's name of the dtype, shape).
    """
    tree: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    starts: dict[str, int] = {}
    for name in sorted(tensors, key=lambda n: (-itemsize(tensors[n][0]), n)):
        dtype, shape = tensors[name]
        starts[name] = at
        size = math.prod(shape) * itemsize(dtype)
        tree[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = msgspec.json.encode(tree)
    text += b" " * (-len(text) % 8)
    begin = LENGTH_BYTES + len(text)
    entries = {name: Entry(tensors[name][0], tuple(tensors[name][1]), begin + start) for name, start in starts.items()}
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, entries, begin + at


def runs(shape: Sequence[int], part: Box, item_bytes: int) -> tuple[int, Iterator[int]]:
    """A box of a row-major tensor as runs of equal length: (bytes of a run, offset of each from the tensor's first byte).

    Runs come in the row-major order of the box, so they lie one behind the other in a contiguous piece.
    """
    sizes = [stop - start for start, stop in part]
    if 0 in sizes:
        return 0, iter(())
    whole = len(shape)  # dims from here on are whole
    while whole and part[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    # the run: one interval of the last cut dim, and everything after it
    length = item_bytes * math.prod(shape[whole:])
    strides = [0] * len(shape)
    step = item_bytes
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= shape[dim]
    if not whole:
        return length, iter((0,))
    outer = whole - 1
    base = sum(part[dim][0] * strides[dim] for dim in range(whole))
    return length * sizes[outer], _offsets(base, sizes[:outer], strides[:outer])


def _offsets(base: int, sizes: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    if not sizes:
        yield base
        return
    for i in range(sizes[0]):
        yield from _offsets(base + i * strides[0], sizes[1:], strides[1:])
