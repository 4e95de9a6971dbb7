"""Pieces that are not one box: along a dim several intervals, and devices that trade such pieces.

*Spans* are disjoint half-open intervals in ascending order; a tensor that holds spans of a dim holds them densely, one after
the other. A *region* is one entry of spans a dim. Planning is pure, so every device of a line knows what all of them do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from dtorch.runtime.comm import Exchange, Place
from dtorch.runtime.kernels import Steps
from dtorch.runtime.layout import Interval

Spans = tuple[Interval, ...]
Region = tuple[Spans, ...]


def spans_of(intervals: Iterable[Interval]) -> Spans:
    """Intervals as spans: in order, what touches or overlaps joined, empty ones left out."""
    made: list[Interval] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if made and made[-1][1] >= start:
            made[-1] = (made[-1][0], max(made[-1][1], stop))
        else:
            made.append((start, stop))
    return tuple(made)


def spans_of_numbers(numbers: Iterable[int]) -> Spans:
    return spans_of((n, n + 1) for n in set(numbers))


def size(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def meet(a: Spans, b: Spans) -> Spans:
    """What lies in both."""
    return spans_of((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)


def take(spans: Spans, start: int, stop: int) -> Spans:
    """From the ``start``-th to before the ``stop``-th of the numbers in ``spans``."""
    made, before = [], 0
    for low, high in spans:
        first, last = max(low, low + start - before), min(high, low + stop - before)
        if first < last:
            made.append((first, last))
        before += high - low
    return spans_of(made)


def numbers(spans: Spans) -> list[int]:
    return [n for start, stop in spans for n in range(start, stop)]


def _where(part: Spans, within: Spans) -> slice | list[int]:
    """Where ``part`` lies in a dim that holds ``within``."""
    found, before = [], 0
    for low, high in within:
        found += [(before + a - low, before + b - low) for a, b in meet(part, ((low, high),))]
        before += high - low
    joined = spans_of(found)
    return slice(*joined[0]) if len(joined) == 1 else numbers(joined)


class _Piece:
    """One part of a tensor that goes from one device to another."""

    def __init__(self, part: Region, within: Region, device: torch.device) -> None:
        self.shape = tuple(map(size, part))
        self._at = [_where(*pair) for pair in zip(part, within, strict=True)]
        self._lists = {d: torch.tensor(at, device=device) for d, at in enumerate(self._at) if isinstance(at, list)}
        self._slices = tuple(at if isinstance(at, slice) else slice(None) for at in self._at)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        x = x[self._slices]
        for dim, at in self._lists.items():
            x = x.index_select(dim, at)
        return x

    def put(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        if not self._lists:
            out[self._slices] = piece
            return
        index: list[torch.Tensor] = []
        for dim, num in enumerate(self.shape):
            at = self._lists.get(dim)
            if at is None:
                first = self._slices[dim].start
                at = torch.arange(first, first + num, device=out.device)
            index.append(at.reshape([-1 if d == dim else 1 for d in range(len(self.shape))]))
        out[tuple(index)] = piece


class Trade:
    """Devices that each have a region of a tensor, and each want one.

    Dims of the tensor after those of the regions are whole. Where a device's region is empty it neither gives nor gets.

    Args:
        places: the devices of the line; ``me`` is the number of this one.
        have, want: the region of each.
        sources: for each device, the devices whose regions tile what it wants; by default all.
    """

    def __init__(
        self,
        places: Sequence[Place],
        me: int,
        have: Sequence[Region],
        want: Sequence[Region],
        device: torch.device,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> None:
        everyone = range(len(places))
        givers = sources if sources is not None else [everyone] * len(places)
        self._wanted = tuple(map(size, want[me]))
        self._is_kept = have[me] == want[me]
        self._sends: list[tuple[Place, _Piece]] = []
        self._receives: list[tuple[Place | None, tuple[int, ...], _Piece]] = []
        self._own: _Piece | None = None
        for other in everyone:
            if me in givers[other] and other != me:
                part = _common(have[me], want[other])
                if part is not None:
                    self._sends.append((places[other], _Piece(part, have[me], device)))
            if other in givers[me]:
                part = _common(have[other], want[me])
                if part is None:
                    continue
                here = _Piece(part, want[me], device)
                if other == me:
                    self._own = _Piece(part, have[me], device)
                self._receives.append((None if other == me else places[other], here.shape, here))

    def outgoing(self, x: torch.Tensor) -> list[tuple[Place, torch.Tensor]]:
        return [(place, piece.of(x)) for place, piece in self._sends]

    def incoming(self, x: torch.Tensor) -> list[tuple[Place, tuple[int, ...]]]:
        tail = x.shape[len(self._wanted) :]
        return [(place, (*shape, *tail)) for place, shape, _ in self._receives if place is not None]

    def assemble(self, x: torch.Tensor, got: Iterator[torch.Tensor]) -> torch.Tensor:
        """What is wanted here, of what is here and what came."""
        if self._is_kept:
            return x
        parts = [
            (self._own.of(x) if place is None and self._own is not None else next(got), piece)
            for place, _, piece in self._receives
        ]
        if len(parts) == 1 and parts[0][1].shape == self._wanted:
            return parts[0][0]
        out = x.new_empty((*self._wanted, *x.shape[len(self._wanted) :]))
        for part, piece in parts:
            piece.put(out, part)
        return out

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """As ``trade``, where each device wants a part of what it has."""
        return self.assemble(x, iter(()))


def trade(*pairs: tuple[Trade, torch.Tensor]) -> Steps:
    """Perform several trades of tensors of one dtype in one exchange. Answers what is wanted of each."""
    sends = [sent for plan, x in pairs for sent in plan.outgoing(x)]
    receives = [entry for plan, x in pairs for entry in plan.incoming(x)]
    got = iter((yield Exchange(sends, receives, pairs[0][1].dtype)))
    return [plan.assemble(x, got) for plan, x in pairs]


def _common(a: Region, b: Region) -> Region | None:
    part = tuple(meet(x, y) for x, y in zip(a, b, strict=True))
    return part if all(part) else None
