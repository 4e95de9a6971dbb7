"""What is known of a session's random streams without asking a worker: which are as they were seeded. Pure."""

from __future__ import annotations

from dtorch.transport.messages import Seed


class Seeds:
    """Where the streams stand at some point of the program, or what a part of it does to them.

    Args:
        stream: the one that is drawn from at the beginning.

    Attributes:
        stream: the one that is drawn from at the end.
        seeds: stream -> seed, of those that were seeded and have not been drawn from since.
        drawn: streams that have been drawn from.
        ended: streams that nobody draws from again.
    """

    __slots__ = ("drawn", "ended", "seeds", "stream")

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        self.seeds: dict[int, int] = {}
        self.drawn: set[int] = set()
        self.ended: set[int] = set()

    @property
    def alive(self) -> set[int]:
        """Streams of which something is known."""
        return {*self.seeds, *self.drawn}

    def mark(self, mark: Seed) -> None:
        """The client says whose turn it is."""
        self.stream = mark.stream
        if mark.seed is not None:
            self.seeds[mark.stream] = mark.seed
            self.drawn.discard(mark.stream)
        self._end(mark.ended)

    def draw(self) -> None:
        """Random numbers are drawn."""
        self.seeds.pop(self.stream, None)
        self.drawn.add(self.stream)

    def then(self, later: Seeds) -> None:
        """What ``later`` says comes after this."""
        for stream in later.drawn:
            self.seeds.pop(stream, None)
        self.drawn = self.drawn - later.seeds.keys() | later.drawn
        self.seeds.update(later.seeds)
        self.stream = later.stream
        self._end(later.ended)

    def _end(self, streams: tuple[int, ...] | set[int]) -> None:
        self.ended.update(streams)
        self.drawn.difference_update(streams)
        for stream in streams:
            self.seeds.pop(stream, None)

    def marks(self, session: int) -> tuple[Seed, ...]:
        """Messages that bring a worker here; streams in ``drawn`` stay where they are."""
        rest = [Seed(session, seed, stream) for stream, seed in self.seeds.items() if stream != self.stream]
        return (*rest, Seed(session, self.seeds.get(self.stream), self.stream, tuple(sorted(self.ended))))
