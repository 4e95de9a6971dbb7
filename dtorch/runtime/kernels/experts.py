"""A mixture of experts: each token visits the experts that its router chose, where they are.

Two ways over a mesh axis that splits the experts. Tokens that every device has are answered by each device as far as its
own experts go, and the answers are summands. Tokens that the same axis splits travel: the devices tell each other how many
tokens will come, exchange the tokens that are needed there and no others (each once, however many experts want it), and
send the answers back to where the tokens came from. There is no capacity and no padding; a device may get nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dtorch.runtime.comm import Exchange, Place
from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.kernels._lines import boxes_along, places_along, rank_along
from dtorch.runtime.layout import Interval, is_shard

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "identity": lambda x: x,
}

TENSORS = ("hidden", "indices", "scores", "up", "down", "gate", "up_bias", "down_bias", "gate_bias")
"""Names of the tensors of a call, in the order of its arguments."""


@dataclass(frozen=True)
class Form:
    """How an expert computes: ``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` without a gate.

    Attributes:
        fused: ``up`` holds the gate in the first half of its output features.
        transposed: weights are (experts, in, out) instead of (experts, out, in).
    """

    activation: str
    fused: bool
    transposed: bool

    def expert(self, x: torch.Tensor, weights: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """What one expert makes of rows ``x``."""

        def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
            weight = weights[name][number]
            bias = weights.get(f"{name}_bias")
            return F.linear(rows, weight.t() if self.transposed else weight, None if bias is None else bias[number])

        activation = ACTIVATIONS[self.activation]
        inner = linear("up", x)
        if self.fused:
            gate, inner = inner.chunk(2, dim=-1)
            inner = activation(gate) * inner
        else:
            inner = activation(linear("gate", x)) * inner if "gate" in weights else activation(inner)
        return linear("down", inner)


def routed(
    x: torch.Tensor, indices: torch.Tensor, scores: torch.Tensor, weights: dict[str, torch.Tensor], first: int, form: Form
) -> torch.Tensor:
    """The scored sum, for each row, of what the experts here make of it; zeros for a row that none of them sees.

    Args:
        x: rows, shape (N, D).
        indices: the experts of each row, shape (N, K); scores: their weights.
        first: number of the expert that comes first in ``weights``.
    """
    out = torch.zeros_like(x)
    num = weights["up"].shape[0]
    chosen = indices.t().reshape(-1) - first
    chosen = torch.where((chosen >= 0) & (chosen < num), chosen, num)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=num + 1)[:num].tolist()
    start = 0
    for number, count in enumerate(counts):
        if not count:
            continue
        at = order[start : start + count]
        start += count
        rows, rank = at % x.shape[0], at // x.shape[0]
        made = form.expert(x[rows], weights, number) * scores[rows, rank, None]
        out.index_add_(0, rows, made.to(out.dtype))
    return out


def mixture(*tensors: torch.Tensor, names: Sequence[str], form: Form) -> torch.Tensor:
    """All experts, on hidden states of any number of dims: the op on one device."""
    given = dict(zip(names, tensors, strict=True))
    hidden, indices, scores = (given.pop(name) for name in TENSORS[:3])
    x, chosen, shares = _flat(hidden, indices, scores)
    return routed(x, chosen, shares, given, 0, form).reshape(hidden.shape)


def _flat(*values: torch.Tensor) -> list[torch.Tensor]:
    return [value.reshape(-1, value.shape[-1]) for value in values]


@kernel("experts", communicates=True)
def experts(site: Site) -> Callable[..., Steps]:
    """The experts that are here, on the tokens that are here or, on axes that split both, on those that travel here.

    params: names (of the inputs), activation, fused, transposed.
    """
    names = site.params["names"]
    form = Form(site.params["activation"], site.params["fused"], site.params["transposed"])
    layouts = dict(zip(names, site.definition.inputs, strict=True))
    axes = tuple(a for a in site.axes if is_shard(layouts["hidden"].codes[a]) and is_shard(layouts["up"].codes[a]))
    owned = [part[0] for part in boxes_along(site, layouts["up"], axes)]
    me = rank_along(site, axes)
    places = places_along(site, axes)

    def run(*tensors: torch.Tensor) -> Steps:
        given = dict(zip(names, tensors, strict=True))
        hidden, indices, scores = (given.pop(name) for name in TENSORS[:3])
        x, chosen, shares = _flat(hidden, indices, scores)
        if not axes:
            return routed(x, chosen, shares, given, owned[me][0], form).reshape(hidden.shape)
        wanted = [_rows_for(chosen, part) for part in owned]
        counts = yield from _swap(
            places, me, [torch.tensor([len(rows)], device=site.device) for rows in wanted], [(1,)] * len(places), torch.int64
        )
        arriving = [int(count) for count in counts]
        there: list[torch.Tensor] = []
        for values in (x, chosen, shares):
            shapes = [(n, values.shape[1]) for n in arriving]
            there.append(torch.cat((yield from _swap(places, me, [values[r] for r in wanted], shapes, values.dtype))))
        made = routed(there[0], there[1], there[2], given, owned[me][0], form)
        back = yield from _swap(places, me, torch.split(made, arriving), [(len(r), x.shape[1]) for r in wanted], x.dtype)
        out = torch.zeros_like(x)
        for rows, answer in zip(wanted, back, strict=True):
            out.index_add_(0, rows, answer)
        return out.reshape(hidden.shape)

    return run


def _rows_for(chosen: torch.Tensor, part: Interval) -> torch.Tensor:
    """Rows that want at least one of the experts in an interval."""
    return ((chosen >= part[0]) & (chosen < part[1])).any(1).nonzero().reshape(-1)


def _swap(
    places: Sequence[Place], me: int, pieces: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> Steps:
    """Give the i-th piece to the i-th place. Answers what the places gave, in their order, the own piece among them."""
    sends = [(place, piece) for i, (place, piece) in enumerate(zip(places, pieces, strict=True)) if i != me and len(piece)]
    receives = [(place, shape) for i, (place, shape) in enumerate(zip(places, shapes, strict=True)) if i != me and shape[0]]
    got = iter((yield Exchange(sends, receives, dtype)))
    empty = pieces[me][:0]
    return [pieces[i] if i == me else next(got) if shape[0] else empty for i, shape in enumerate(shapes)]
