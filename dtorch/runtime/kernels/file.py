"""Pieces of tensors from and into files: each device its own slice, row-major, at its place in the file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dtorch.runtime.files import FileAccess
from dtorch.runtime.kernels import Site, kernel
from dtorch.runtime.layout import Box, box, coords, is_partial, numel
from dtorch.runtime.safetensors import runs
from dtorch.runtime.template import dtype_of
from dtorch.transport.groups import flat_bytes
from dtorch.transport.messages import Layout, MeshInfo

MAPPED_BYTES = 4096
"""Runs shorter than this are picked from the mapped file; longer ones are read one by one."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@kernel("read")
def read(site: Site) -> Callable[..., Any]:
    """Reads this device's piece of a tensor that lies in a file, and converts it to the output's dtype.

    ``params``: path; size_bytes of the whole file, which must not have changed; stored, the dtype in the file. Called with
    what other devices of this worker have read so far (box -> piece), and the byte at which the tensor begins.
    """
    layout = site.definition.outputs[0]
    part = site.box(layout)
    shape = tuple(layout.shape)
    path, size_bytes = str(site.params["path"]), int(site.params["size_bytes"])
    stored, wanted = dtype_of(site.params["stored"]), site.dtype(layout)
    assert not any(map(is_partial, layout.codes)), "a file holds no summands"

    def run(seen: dict[Box, torch.Tensor], start: int) -> torch.Tensor:
        known = seen.get(part)
        if known is not None:
            return known.to(site.device, copy=True)
        piece = read_box(site.files, path, size_bytes, start, shape, part, stored)
        made = seen[part] = piece.to(site.device, wanted)
        return made

    return run


def read_box(
    files: FileAccess, path: str, size_bytes: int, start: int, shape: tuple[int, ...], part: Box, dtype: torch.dtype
) -> torch.Tensor:
    """A box of a row-major tensor that begins at byte ``start`` of a file of ``size_bytes`` bytes.

    Raises:
        OSError: the file cannot be read, or has another size by now.
    """
    piece = torch.empty([stop - begin for begin, stop in part], dtype=dtype)
    if not numel(part):
        return piece
    fd = files.open(path, os.O_RDONLY)
    try:
        now = os.fstat(fd).st_size
        if now != size_bytes:
            raise OSError(f"{path!r} had {size_bytes} bytes when its header was read and has {now} here: another file")
        run_bytes, offsets = runs(shape, part, dtype.itemsize)
        flat = _bytes(piece)
        if run_bytes < MAPPED_BYTES and run_bytes < len(flat):
            _pick(fd, start, shape, part, piece)
        else:
            at = 0
            for offset in offsets:
                _fill(fd, flat[at : at + run_bytes], start + offset)
                at += run_bytes
    finally:
        os.close(fd)
    files.counters["bytes_read"] += len(flat)
    return piece


def _bytes(contiguous: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU."""
    array: Any = flat_bytes(contiguous).numpy()
    return memoryview(array)


def _fill(fd: int, into: memoryview, at: int) -> None:
    while into:
        count = os.preadv(fd, [into], at)
        if not count:
            raise OSError("the file ended while it was read")
        into, at = into[count:], at + count


def _pick(fd: int, start: int, shape: tuple[int, ...], part: Box, piece: torch.Tensor) -> None:
    """Copy a box with short rows out of the mapped file."""
    word = _WORDS[piece.element_size()]
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped:
        whole = np.ndarray(shape, word, buffer=mapped, offset=start)
        target = np.ndarray(tuple(piece.shape), word, buffer=_bytes(piece))
        np.copyto(target, whole[tuple(slice(*interval) for interval in part)])
        del whole, target  # they hold the mapping


@kernel("write")
def write(site: Site) -> Callable[..., Any]:
    """Writes this device's piece of a tensor to its place in a file, if it is this device's turn among those that hold it.

    Inputs: the tensor, and a receipt: bytes that each device has written so far, one element a device. The answer is the
    new receipt; what failed before poisons it. Called with the byte at which the tensor begins in the file, and a number
    that says whose turn it is. ``params``: path.
    """
    layout = site.definition.inputs[0]
    part = site.box(layout)
    holders = _holders(layout, site.mesh, part)
    shape, path = tuple(layout.shape), str(site.params["path"])
    assert site.coord is not None
    mine = holders.index(site.coord)

    def run(x: torch.Tensor, receipt: torch.Tensor, start: int, turn: int) -> torch.Tensor:
        if turn % len(holders) != mine or not numel(part):
            return receipt + 0
        return receipt + write_box(site.files, path, start, shape, part, x)

    return run


def _holders(layout: Layout, mesh: MeshInfo, part: Box) -> list[tuple[int, ...]]:
    """Coordinates of all devices that hold this box."""
    facts = tuple(layout.shape), tuple(layout.codes), tuple(mesh.shape)
    return [coord for coord in coords(tuple(mesh.shape)) if box(*facts, coord) == part]


def write_box(files: FileAccess, path: str, start: int, shape: tuple[int, ...], part: Box, piece: torch.Tensor) -> int:
    """Put a piece to its place in an existing file; the answer is the number of bytes written. Raises OSError."""
    plain = piece.resolve_conj().resolve_neg().detach().cpu().contiguous()
    run_bytes, offsets = runs(shape, part, plain.element_size())
    flat = _bytes(plain)
    # Never through a mapping: pages at the borders of pieces belong to several writers, perhaps on several hosts.
    fd = files.open(path, os.O_WRONLY)
    try:
        at = 0
        for offset in offsets:
            _drain(fd, flat[at : at + run_bytes], start + offset)
            at += run_bytes
    finally:
        os.close(fd)
    files.counters["bytes_written"] += at
    return at


def _drain(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


@kernel("sync_file")
def sync_file(site: Site) -> Callable[..., Any]:
    """Receipt -> receipt, once what this host has written to the file is on its disk."""
    path = str(site.params["path"])

    def run(receipt: torch.Tensor) -> torch.Tensor:
        fd = site.files.open(path, os.O_WRONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return receipt + 0

    return run
