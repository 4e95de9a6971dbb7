"""Where the generators stood: to draw again what was drawn before, and to bring another worker to the same place."""

from __future__ import annotations

import torch

MAX_SNAPSHOTS = 1024
"""Batches that draw whose beginning is remembered; one takes 5 KB."""

States = dict[str, bytes]  # device kind -> generator state as torch gives it


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def read() -> States:
    """Where this process's generators stand."""
    return {kind: _bytes(state) for kind, state in _states().items()}


def write(states: States) -> None:
    """Put this process's generators there."""
    torch.set_rng_state(torch.frombuffer(bytearray(states["cpu"]), dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))


class Snapshots:
    """The states at the beginning of the latest batches that draw."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, torch.Tensor]] = {}

    def take(self, seq: int) -> None:
        """Batch ``seq`` begins."""
        self._states[seq] = _states()
        if len(self._states) > MAX_SNAPSHOTS:
            del self._states[next(iter(self._states))]

    def put(self, seq: int, states: States) -> None:
        """What another worker knows of batch ``seq``."""
        made = {kind: torch.frombuffer(bytearray(state), dtype=torch.uint8) for kind, state in states.items()}
        self._states = dict(sorted({**self._states, seq: made}.items())[-MAX_SNAPSHOTS:])

    @property
    def seqs(self) -> tuple[int, ...]:
        return tuple(self._states)

    def get(self, seq: int) -> States | None:
        found = self._states.get(seq)
        return None if found is None else {kind: _bytes(state) for kind, state in found.items()}
