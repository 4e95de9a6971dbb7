"""Bytes that tensors of a session hold on each device of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch

from dtorch.transport.messages import DeviceMemory

if TYPE_CHECKING:
    from dtorch.runtime.executor import Executor


LARGE_BYTES = 4096


class MemoryMeter:
    """Counts storages, each once however many tensors view it.

    On the CPU, torch keeps no books, so the stores are walked: when statistics are asked for, and, from the first time on
    (``watching``), after every op that makes a tensor of 4 KiB or more, for the peak. CUDA devices answer from the allocator.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.watching = False
        self._peak: dict[int, int] = {}

    def allocated(self, index: int) -> int:
        """Bytes held by hosted place ``index`` now."""
        seen: dict[int, int] = {}
        for store in self._executor.all_stores(index):
            for value in store:
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    def observe(self) -> None:
        for index in range(len(self._executor.places)):
            self._peak[index] = max(self._peak.get(index, 0), self.allocated(index))

    def observe_step(self, instructions: Iterator[Any], index: int) -> _Watched:
        """``instructions`` of hosted place ``index``, with a look at the memory after each that makes a large tensor."""
        return _Watched(self, instructions, index)

    def is_large(self, instruction: tuple[Any, ...], index: int) -> bool:
        """Whether what an instruction has made is worth a walk over the store; the batch's end looks at the rest."""
        store = self._executor.stores[index]
        outs = instruction[1] if isinstance(instruction[1], tuple) else instruction[1:2]
        return any(isinstance(v := store[o], torch.Tensor) and v.untyped_storage().nbytes() >= LARGE_BYTES for o in outs)

    def report(self, device_of: Any, reset_peak: bool) -> tuple[DeviceMemory, ...]:
        """One entry a hosted place."""
        if not self.watching:
            self.watching = True
            self._peak.clear()
        self.observe()
        entries = []
        hosted = self._executor.binder.place_index
        for index, (kind, number) in enumerate(self._executor.places):
            if hosted.get((kind, number)) != index:  # it has moved away
                continue
            device = device_of((kind, number))
            now = self.allocated(index)
            peak, reserved = self._peak[index], now
            if device.type == "cuda":
                now = torch.cuda.memory_allocated(device)
                peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
                if reset_peak:
                    torch.cuda.reset_peak_memory_stats(device)
            if reset_peak:
                self._peak[index] = now
            entries.append(DeviceMemory(kind, number, now, peak, reserved))
        return tuple(entries)


class _Watched:
    """An iterator over instructions that looks at the memory after each."""

    def __init__(self, meter: MemoryMeter, instructions: Iterator[Any], index: int) -> None:
        self._meter = meter
        self._instructions = instructions
        self._index = index
        self._last: tuple[Any, ...] | None = None

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        if self._last is not None and self._meter.is_large(self._last, self._index):
            self._meter.observe()
        self._last = None  # it may be the last one
        self._last = next(self._instructions)
        return self._last

    def __length_hint__(self) -> int:
        return length_hint(self._instructions)
