"""Tensors that leave their place with everything that makes them what they are: strides, and memory that they share.

``pack`` turns tensors into a manifest (plain data) and buffers (bytes); ``unpack`` makes the same tensors of them somewhere
else. Memory is moved once however many tensors view it, and no more of it than they view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from dtorch.runtime.template import dtype_name, dtype_of
from dtorch.transport.errors import ProtocolError
from dtorch.transport.groups import flat_bytes

_ALIGN = 64  # bytes; what torch's allocator aligns to, on which the path that a kernel takes may depend


class View(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a memory. ``item`` is its place in the list that was packed; ``start`` counts bytes."""

    item: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    is_conj: bool
    is_neg: bool


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that some tensors view: one buffer with all of it, or one a view with its elements, row-major."""

    size_bytes: int
    views: tuple[View, ...]
    packed: bool


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    num_items: int
    memories: tuple[Memory, ...]

    def buffer_sizes(self) -> list[int]:
        """Bytes of each buffer."""
        sizes: list[int] = []
        for memory in self.memories:
            if memory.packed:
                sizes += [_numel(v.shape) * dtype_of(v.dtype).itemsize for v in memory.views]
            else:
                sizes.append(memory.size_bytes)
        return sizes


_decoder = msgspec.msgpack.Decoder(list[Manifest])


def encode_manifests(manifests: list[Manifest]) -> bytes:
    return msgspec.msgpack.encode(manifests)


def decode_manifests(data: bytes) -> list[Manifest]:
    """Raises ProtocolError."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not manifests of tensors: {error}") from None


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its conjugate and negative bits: the elements as they lie in memory."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the storage that a tensor views, and the one after the last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def pack(items: Sequence[Any]) -> tuple[Manifest, list[torch.Tensor]]:
    """Manifest and buffers (uint8, on the tensors' devices) of tensors; what is no tensor is left out.

    Buffers may be the tensors' own memory: they are to be read before anything else runs.
    """
    groups: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            groups.setdefault(storage.data_ptr() if storage.nbytes() else -1 - index, []).append(index)
    memories: list[Memory] = []
    buffers: list[torch.Tensor] = []
    for indices in groups.values():
        tensors = [_plain(items[i]) for i in indices]
        extents = [_extent(t) for t in tensors]
        first = min(start for start, _ in extents) // _ALIGN * _ALIGN
        size = max(stop for _, stop in extents) - first
        views = tuple(
            View(
                i, dtype_name(t.dtype), tuple(t.shape), tuple(t.stride()), start - first,
                items[i].is_conj(), items[i].is_neg(),
            )
            for i, t, (start, _) in zip(indices, tensors, extents, strict=True)
        )  # fmt: skip
        packed = sum(t.numel() * t.element_size() for t in tensors) < size
        memories.append(Memory(size, views, packed))
        if packed:
            buffers += [flat_bytes(t) for t in tensors]
        else:
            whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
            buffers.append(whole.set_(tensors[0].untyped_storage(), first, (size,), (1,)))
    return Manifest(len(items), tuple(memories)), buffers


def unpack(manifest: Manifest, buffers: Sequence[torch.Tensor], device: torch.device) -> list[Any]:
    """The tensors of a manifest, on ``device`` and in memory of their own; None where there was no tensor.

    Args:
        buffers: as ``pack`` gave them; they are copied.
    """
    items: list[Any] = [None] * manifest.num_items
    rest = iter(buffers)
    for memory in manifest.memories:
        size = max(memory.size_bytes, 1)
        base = torch.empty(size, dtype=torch.uint8, device=device)
        if not memory.packed and memory.size_bytes:
            base[: memory.size_bytes].copy_(next(rest))
        elif not memory.packed:
            next(rest)
        for view in memory.views:
            dtype = dtype_of(view.dtype)
            made = torch.empty(0, dtype=dtype, device=device)
            made.set_(base.untyped_storage(), view.start // dtype.itemsize, view.shape, view.stride)
            if memory.packed:
                data = next(rest)
                if data.numel():
                    made.copy_(data.view(dtype).view(view.shape))
            if view.is_neg:
                made = torch._neg_view(made)
            items[view.item] = made.conj() if view.is_conj else made
    return items
