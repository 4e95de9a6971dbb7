"""Where the generators of a session stand and stood: one for each stream of random numbers, to draw again what was drawn
before, and to bring another worker to the same place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dtorch.transport import messages
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Seed

MAX_SNAPSHOTS = 1024
"""Batches that draw whose beginning is remembered; one takes 5 KB, and nothing for streams that have not moved since."""

States = Mapping[str, torch.Tensor]  # device kind -> generator state as torch gives it; never changed in place


class Generators:
    """The streams of one session on this worker. One is in this process's generators, the others are parked.

    Attributes:
        stream: the one that is drawn from.
    """

    def __init__(self) -> None:
        self.stream = 0
        self._parked: dict[int, States] = {}

    def mark(self, mark: Seed) -> None:
        """Draw from the stream that the client names from here on. One that is not known here, since all that was drawn from
        it is forgotten, begins anywhere."""
        if mark.stream != self.stream:
            self._parked[self.stream] = _now()
            self.stream = mark.stream
            states = self._parked.pop(mark.stream, None)
            if states is not None:
                _put(states)
        if mark.seed is not None:
            torch.manual_seed(mark.seed)
        for stream in mark.ended:
            self._parked.pop(stream, None)

    def all(self) -> tuple[int, dict[int, States]]:
        """The stream that is drawn from, and where each one stands."""
        return self.stream, {**self._parked, self.stream: _now()}

    def read(self) -> messages.Generators:
        """The same as a message."""
        return _message(*self.all())

    def write(self, states: messages.Generators) -> None:
        """Let all streams stand there. Raises ProtocolError."""
        if states.stream not in states.states:
            raise ProtocolError("the stream that is drawn from has no state")
        made = {stream: _tensors(kinds) for stream, kinds in states.states.items()}
        _put(made.pop(states.stream))
        self.stream, self._parked = states.stream, made


class Snapshots:
    """Where the generators stood at the beginning of the latest batches that draw."""

    def __init__(self, generators: Generators) -> None:
        self._generators = generators
        self._states: dict[int, tuple[int, dict[int, States]]] = {}

    def take(self, seq: int) -> None:
        """Batch ``seq`` begins."""
        self._states[seq] = self._generators.all()
        if len(self._states) > MAX_SNAPSHOTS:
            del self._states[next(iter(self._states))]

    def take_again(self, seq: int) -> None:
        """Batch ``seq``, which was executed before, begins again."""
        self._states[seq] = self._generators.all()
        self._states = dict(sorted(self._states.items())[-MAX_SNAPSHOTS:])

    @property
    def seqs(self) -> tuple[int, ...]:
        return tuple(self._states)

    def get(self, seq: int) -> messages.Generators | None:
        found = self._states.get(seq)
        return None if found is None else _message(*found)


def _now() -> States:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _put(states: States) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" not in states:  # it has drawn nothing on CUDA devices yet
        torch.cuda.manual_seed_all(torch.initial_seed())
    elif torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _message(stream: int, states: dict[int, States]) -> messages.Generators:
    found = {number: {kind: state.numpy().tobytes() for kind, state in kinds.items()} for number, kinds in states.items()}
    return messages.Generators(stream, found)


def _tensors(kinds: Mapping[str, bytes]) -> States:
    return {kind: torch.frombuffer(bytearray(state), dtype=torch.uint8) for kind, state in kinds.items()}
