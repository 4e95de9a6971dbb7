"""Bytes that tensors of a session hold on each device of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dtorch.transport.messages import DeviceMemory

if TYPE_CHECKING:
    from dtorch.runtime.executor import Executor


class MemoryMeter:
    """Counts storages, each once however many tensors view it.

    On the CPU, torch keeps no books, so the stores are walked: when statistics are asked for, and, from the first time on
    (``watching``), after every op, for the peak. CUDA devices answer from the allocator.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.watching = False
        self._peak: dict[int, int] = {}

    def allocated(self, index: int) -> int:
        """Bytes held by hosted place ``index`` now."""
        seen: dict[int, int] = {}
        for value in self._executor.stores[index]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    def observe(self) -> None:
        for index in range(len(self._executor.places)):
            self._peak[index] = max(self._peak.get(index, 0), self.allocated(index))

    def observe_step(self, instructions: Iterator[Any]) -> _Watched:
        return _Watched(self, instructions)

    def report(self, device_of: Any, reset_peak: bool) -> tuple[DeviceMemory, ...]:
        """One entry a hosted place."""
        if not self.watching:
            self.watching = True
            self._peak.clear()
        self.observe()
        entries = []
        for index, (kind, number) in enumerate(self._executor.places):
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
    """An iterator over instructions that measures after each."""

    def __init__(self, meter: MemoryMeter, instructions: Iterator[Any]) -> None:
        self._meter = meter
        self._instructions = instructions

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        self._meter.observe()
        return next(self._instructions)

    def __length_hint__(self) -> int:
        hint: int = self._instructions.__length_hint__()  # type: ignore[attr-defined]
        return hint
