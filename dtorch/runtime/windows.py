"""Ops that look through a window: which part of an input dim the outputs of an interval read. Pure.

Intervals are half open and in global coordinates. What a window reads beyond the input, its padding, is part of the answer:
the input of ``n`` elements is ``[0, n)``, and elements outside hold what the op pads with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dtorch.runtime.layout import Box, Interval
from dtorch.runtime.moves import Placed


@dataclass(frozen=True)
class Slide:
    """Output o reads ``o * stride - before + dilation * k`` for k in [0, kernel): convolution, pooling, unfold."""

    kernel: int
    stride: int
    dilation: int
    before: int

    def reads(self, start: int, stop: int) -> Interval:
        first = start * self.stride - self.before
        return first, (stop - 1) * self.stride - self.before + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Spread:
    """Input i is spread over outputs ``i * stride - before + dilation * k`` for k in [0, kernel): transposed convolution.

    At least one element is read, even where outputs lie in holes between what inputs are spread over.
    """

    kernel: int
    stride: int
    dilation: int
    before: int

    def reads(self, start: int, stop: int) -> Interval:
        reach = self.dilation * (self.kernel - 1)
        first = -(-(start + self.before - reach) // self.stride)
        return min(first, (start + self.before) // self.stride), (stop - 1 + self.before) // self.stride + 1

    def lands(self, first: int) -> int:
        """The output on which the first spread of input ``first`` falls."""
        return first * self.stride - self.before


@dataclass(frozen=True)
class Share:
    """``size`` inputs shared out among ``num`` outputs (adaptive pooling): o reads [floor(o n / m), ceil((o + 1) n / m))."""

    size: int
    num: int

    def reads(self, start: int, stop: int) -> Interval:
        return start * self.size // self.num, -(-stop * self.size // self.num)


@dataclass(frozen=True)
class Held:
    """Every device works on what it holds; the results are reduced later."""

    size: int


@dataclass(frozen=True)
class Taps:
    """Output o is a weighted sum of a few inputs, as in interpolation.

    Attributes:
        mode: "nearest", "nearest-exact", "linear", "cubic", or "lanczos", which is always smooth.
        size, num: of input and output.
        factor: the scale factor that the user gave, None when sizes decide.
        corners: whether the corner elements of input and output coincide.
        smooth: widen the filter when shrinking (antialias).
        double: positions are computed in float64, otherwise in float32 as torch does.
    """

    mode: str
    size: int
    num: int
    factor: float | None
    corners: bool
    smooth: bool
    double: bool

    def reads(self, start: int, stop: int) -> Interval:
        index, _ = self.table()
        part = index[start:stop]
        return int(part.min()), int(part.max()) + 1

    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, weights), each of shape (num, taps); unused taps have weight 0."""
        return _table(self)


Window = Slide | Spread | Share | Held | Taps
_KINDS: dict[str, type[Any]] = {"slide": Slide, "spread": Spread, "share": Share, "held": Held, "taps": Taps}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class Looked:
    """A dim of the input seen through a window.

    Attributes:
        dim, out: of the input, of the outputs.
        unit: consecutive elements of the output dim that belong to one window position.
    """

    dim: int
    out: int
    window: Window
    unit: int = 1

    def reads(self, held: Interval, wanted: Interval) -> Interval:
        """What a device needs that holds ``held`` of the input dim and makes ``wanted`` of the output dim."""
        if isinstance(self.window, Held):
            return held
        start, stop = wanted
        return self.window.reads(start // self.unit, -(-stop // self.unit)) if start < stop else (0, 0)


def plain(looked: Looked) -> list[Any]:
    """As plain data, for the wire."""
    w = looked.window
    return [looked.dim, looked.out, looked.unit, _NAMES[type(w)], *(getattr(w, name) for name in w.__dataclass_fields__)]


def looked_of(data: Sequence[Any]) -> Looked:
    """The reverse of ``plain``."""
    dim, out, unit, kind, *rest = data
    return Looked(dim, out, _KINDS[kind](*rest), unit)


def spans(source: Placed, target: Placed, looked: Sequence[Looked]) -> list[Box]:
    """What each device needs of the input so that it can make its part of the output, padding included; row-major."""
    found = []
    for held, wanted in zip(source.boxes(), target.boxes(), strict=True):
        span = list(held)
        for seen in looked:
            span[seen.dim] = seen.reads(held[seen.dim], wanted[seen.out])
        found.append(tuple(span))
    return found


def clipped(span: Box, shape: Sequence[int]) -> Box:
    """The part of ``span`` that lies inside a tensor of ``shape``."""
    return tuple((min(max(a, 0), n), min(max(b, 0), n)) for (a, b), n in zip(span, shape, strict=True))


# ---- interpolation, as torch's CPU and CUDA functions do it (aten/src/ATen/native/UpSample.h)


@lru_cache(maxsize=64)
def _table(taps: Taps) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if taps.double else torch.float32
    n, m = taps.size, taps.num
    at = torch.arange(m, dtype=dtype)
    if taps.corners:
        scale = torch.tensor((n - 1) / (m - 1) if m > 1 else 0.0, dtype=dtype)
    else:
        scale = torch.tensor(1.0 / taps.factor if taps.factor else n / m, dtype=dtype)
    if taps.mode.startswith("nearest"):
        source = at * scale
        if taps.mode == "nearest-exact":  # rounded where torch rounds it, so that ties fall alike
            source = ((at.double() + 0.5) * scale.double() - 0.5).to(dtype).clamp(min=0) + 0.5
        index = source.float().floor().long().clamp(max=n - 1)
        return index[:, None], torch.ones(m, 1, dtype=dtype)
    if n == m and (taps.smooth or taps.mode == "linear"):
        return torch.arange(m)[:, None], torch.ones(m, 1, dtype=dtype)
    if taps.smooth:
        return _filtered(taps, at, scale)
    source = at * scale if taps.corners else (at + 0.5) * scale - 0.5
    if taps.mode == "linear":
        source = source.clamp(min=0)
        low = source.floor().clamp(max=n - 1)
        part = (source - low).clamp(0, 1)
        first = low.long()
        return torch.stack([first, (first + 1).clamp(max=n - 1)], 1), torch.stack([1 - part, part], 1)
    low = source.floor()
    part = source - low
    index = (low.long()[:, None] + torch.arange(-1, 3)).clamp(0, n - 1)
    away = torch.stack([part + 1, part, 1 - part, 2 - part], 1)
    return index, cubic(away, -0.75)


def cubic(x: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' convolution kernel at distances ``x`` >= 0 (Keys 1981, Cubic convolution interpolation)."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def lanczos(x: torch.Tensor) -> torch.Tensor:
    """sinc(x) sinc(x / 3) at distances ``x`` below 3 (Duchon 1979, Lanczos filtering in one and two dimensions)."""
    return torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), torch.zeros_like(x))


_REACH = {"linear": 1.0, "cubic": 2.0, "lanczos": 3.0}
_FILTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: (1 - x).clamp(min=0), "cubic": lambda x: cubic(x, -0.5), "lanczos": lanczos
}  # fmt: skip


def _filtered(taps: Taps, at: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The filter widened by the scale, cut at the borders and normed."""
    wide = max(float(scale), 1.0)
    support = _REACH[taps.mode] * wide
    center = (at + 0.5) * scale
    first = (center - support + 0.5).trunc().long().clamp(min=0)
    last = (center + support + 0.5).trunc().long().clamp(max=taps.size)
    most = int((last - first).max()) if taps.num else 1
    steps = torch.arange(most)
    index = first[:, None] + steps
    used = index < last[:, None]
    away = ((index.to(at.dtype) - center[:, None] + 0.5) / wide).abs()
    weight = _FILTERS[taps.mode](away)
    weight = torch.where(used, weight, torch.zeros_like(weight))
    total = weight.sum(1, keepdim=True)
    return index.minimum(last[:, None] - 1), weight / torch.where(total == 0, torch.ones_like(total), total)
