"""Attention whose sequence is cut: context parallelism.

One plan covers every way a mesh axis can take part (its *role*, chosen by the op's rule):

=========  =====================================================================================================
"heads"    queries and keys are cut. Sequence is exchanged for batches and heads, all-to-all, and back afterwards
           (DeepSpeed-Ulysses, Jacobs et al., 2023).
"ring"     queries and keys are cut. Each device keeps its queries and sees the keys in as many parts as the axis has
           devices, one at a time (Ring Attention, Liu et al., 2023).
"keys"     only keys are cut. Each device answers for its keys, and the answers are merged (flash decoding).
"query"    only queries are cut. Local, but a causal mask must know where they are.
=========  =====================================================================================================

Batches and heads are flattened to *lanes*. The *line* of a device are those that differ from it on axes of the first two
roles. A device of it computes some lanes, by its place on the axes "heads", for some queries, by its place on the axes
"ring": its own or, under a causal mask, an early and a late piece of the sequence, so that all have as much to do (zig-zag,
as in Striped Attention, Brandon et al., 2023). A part of the keys is a slice of what each device of the line holds, not one
device's block: it is spread over the sequence, so every part costs every device as much as the last did.

Where the queries are few beside the keys (decoding), keys stay: queries go everywhere and answers are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import functional as F

from dtorch.runtime.kernels import Site, Steps, kernel
from dtorch.runtime.kernels._lines import boxes_along, places_along, rank_along
from dtorch.runtime.kernels._online import Lanes, Online
from dtorch.runtime.kernels._spans import Region, Spans, Trade, meet, numbers, size, spans_of, spans_of_numbers, take, trade
from dtorch.runtime.layout import Interval, is_shard, shard_dim
from dtorch.transport.messages import Layout


class Line:
    """Who computes what in a line. Pure but for the site's numbers; the same on each of its devices.

    Attributes:
        axes: mesh axes of the roles "heads" and "ring".
        merged: mesh axes along which states over different keys are merged.
        rows: by member, the queries that it computes; held_rows, held_keys: what it holds.
        parts: by part and member, the keys of that part.
        moves, keys_move: whether queries, and keys, leave the device that holds them.
    """

    def __init__(self, site: Site, q: Layout, k: Layout, causal: bool) -> None:
        roles = {axis: site.params.get(f"role{axis}") for axis in site.axes}
        heads = tuple(a for a in site.axes if roles[a] == "heads")
        ring = tuple(a for a in site.axes if roles[a] == "ring")
        self.axes = tuple(sorted(heads + ring))
        num_rows, num_keys = q.shape[-2], k.shape[-2]
        few = bool(self.axes) and 4 * num_rows * math.prod(q.shape[:-2]) <= num_keys * math.prod(k.shape[:-2])
        if few:
            heads, ring = (), self.axes
        self.places, self.me = places_along(site, self.axes), rank_along(site, self.axes)
        sizes = [site.mesh.shape[axis] for axis in self.axes]
        coords = [_digits(i, sizes) for i in range(len(self.places))]
        self.coords = [dict(zip(self.axes, c, strict=True)) for c in coords]
        self.heads = [_rank(site, heads, c) for c in self.coords]
        self.num_heads = math.prod(site.mesh.shape[a] for a in heads)
        turn = [_rank(site, ring, c) for c in self.coords]
        num_parts = math.prod(site.mesh.shape[a] for a in ring)
        self.held_rows = [spans_of([part[-2]]) for part in boxes_along(site, q, self.axes)]
        self.held_keys = [spans_of([part[-2]]) for part in boxes_along(site, k, self.axes)]
        everyone = range(len(self.places))
        all_rows = _union(self.held_rows)
        alike = [[j for j in everyone if turn[j] == turn[i]] for i in everyone]
        if few:
            self.rows = [all_rows for _ in everyone]
            self.parts = [[_union(self.held_keys[j] for j in alike[i]) for i in everyone]]
        else:
            if causal and num_parts > 1:
                self.rows = [balanced(all_rows, num_keys, num_parts, turn[i]) for i in everyone]
            else:
                self.rows = [_union(self.held_rows[j] for j in alike[i]) for i in everyone]
            slices = [_union(_slice(held, t, num_parts) for held in self.held_keys) for t in range(num_parts)]
            self.parts = [[_visible(keys, self.rows[i], causal) for i in everyone] for keys in slices]
        self.answers = alike if few else [list(everyone) for _ in everyone]
        self.merged = tuple(a for a in site.axes if roles[a] == "keys") + (ring if few else ())
        self.moves = self.num_heads > 1 or few or (causal and num_parts > 1)
        self.keys_move = bool(self.axes) and not few

    def lanes(self, num: int, member: int) -> Interval:
        """Which of ``num`` lanes a member computes."""
        at = self.heads[member]
        return num * at // self.num_heads, num * (at + 1) // self.num_heads

    def holders(self, codes: Sequence[int]) -> list[list[int]]:
        """By member, those from which it gets a tensor of these codes: those that differ from it where the tensor is cut."""
        kept = [axis for axis in self.axes if not is_shard(codes[axis])]
        return [[j for j, other in enumerate(self.coords) if all(other[a] == own[a] for a in kept)] for own in self.coords]


def balanced(rows: Spans, num_keys: int, num: int, at: int) -> Spans:
    """The rows of the ``at``-th of ``num`` devices, so that under a causal mask all have as many scores to compute.

    Row i sees i + 1 keys, or all ``num_keys``. The rows that see more and more are cut in 2 ``num`` pieces, of which a device
    takes one from either end; the others are cut evenly.
    """
    growing = meet(rows, ((0, num_keys),))
    flat = meet(rows, ((num_keys, max(num_keys, rows[-1][1])),)) if rows else ()
    count, rest = size(growing), size(flat)
    pieces = [take(growing, count * i // (2 * num), count * (i + 1) // (2 * num)) for i in (at, 2 * num - 1 - at)]
    return _union((*pieces, take(flat, rest * at // num, rest * (at + 1) // num)))


def _union(parts: Iterable[Spans]) -> Spans:
    return spans_of(interval for spans in parts for interval in spans)


def _slice(held: Spans, at: int, num: int) -> Spans:
    count = size(held)
    return take(held, count * at // num, count * (at + 1) // num)


def _visible(keys: Spans, rows: Spans, causal: bool) -> Spans:
    if not rows:
        return ()
    return meet(keys, ((0, rows[-1][1]),)) if causal else keys


def _digits(number: int, sizes: Sequence[int]) -> list[int]:
    digits = []
    for num in reversed(sizes):
        digits.append(number % num)
        number //= num
    return digits[::-1]


def _rank(site: Site, axes: Sequence[int], coord: dict[int, int]) -> int:
    rank = 0
    for axis in axes:
        rank = rank * site.mesh.shape[axis] + coord[axis]
    return rank


class Operand:
    """A tensor of the call as the line trades it: its own lanes, and which of them each lane of the result uses."""

    def __init__(self, site: Site, layout: Layout, line: Line) -> None:
        out = site.definition.outputs[0]
        self.local = site.local_shape(layout)
        self.lead = math.prod(self.local[:-2])
        self.used = _lane_map(site, layout, out)
        num = len(self.used)
        self.wanted = [spans_of_numbers(self.used[slice(*line.lanes(num, i))]) for i in range(len(line.places))]
        own = numbers(self.wanted[line.me])
        at = {lane: i for i, lane in enumerate(own)}
        mine = self.used[slice(*line.lanes(num, line.me))]
        self.lanes = Lanes([at[lane] for lane in mine], len(own), site.device)
        self.all: Spans = spans_of([(0, self.lead)])

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.lead, *self.local[-2:])


def _lane_map(site: Site, layout: Layout, out: Layout) -> list[int]:
    """For each lane of the result here, the lane of a tensor here that it uses: dims broadcast, and heads are shared."""
    box, target = site.box(layout), site.box(out)
    extra = len(out.shape) - len(layout.shape)
    lanes = torch.zeros((), dtype=torch.int64)
    for dim in range(len(out.shape) - 2):
        lanes = lanes.unsqueeze(-1)
        own = dim - extra
        start, stop = target[dim]
        at = torch.arange(start, stop)
        if own >= 0:
            at = at // (out.shape[dim] // layout.shape[own]) - box[own][0] if layout.shape[own] else at
            lanes = lanes * (box[own][1] - box[own][0]) + at
        else:
            lanes = lanes + torch.zeros_like(at)
    return [int(lane) for lane in lanes.reshape(-1).tolist()]


@kernel("attention", communicates=True)
def attention(site: Site) -> Callable[..., Steps]:
    """params: causal, scale (None: 1 / sqrt(E)), ``role<axis>`` for each axis that cuts the sequence."""
    layouts = site.definition.inputs
    causal, out = bool(site.params["causal"]), site.definition.outputs[0]
    line = Line(site, layouts[0], layouts[1], causal)
    me, device = line.me, site.device
    q, k, v = (Operand(site, layout, line) for layout in layouts[:3])
    mask = Masked(site, layouts[3], line) if len(layouts) > 3 else None
    width, depth = v.local[-1], layouts[0].shape[-1]
    scale = site.params["scale"]
    scale = 1 / math.sqrt(max(depth, 1)) if scale is None else float(scale)
    out_shape, dtype = site.local_shape(out), site.dtype(out)
    num_lanes = math.prod(out_shape[:-2])
    members = range(len(line.places))

    def plan(have: list[Region], want: list[Region], sources: list[list[int]] | None = None) -> Trade:
        return Trade(line.places, me, have, want, device, sources)

    take_q = plan([(q.all, held) for held in line.held_rows], [(q.wanted[i], line.rows[i]) for i in members])
    take_k, take_v = (
        [plan([(x.all, held) for held in line.held_keys], [(x.wanted[i], part[i]) for i in members]) for part in line.parts]
        for x in (k, v)
    )
    lanes = [spans_of([line.lanes(num_lanes, i)]) for i in members]
    whole: Spans = spans_of([(0, num_lanes)])
    give = plan(
        [(lanes[i], line.rows[i]) for i in members], [(whole, held) for held in line.held_rows], line.answers
    )
    rows, keys = line.rows[me], [part[me] for part in line.parts]
    complete = (rows, keys[0]) == (((0, layouts[0].shape[-2]),), ((0, layouts[1].shape[-2]),))
    direct = not line.merged and len(keys) == 1 and (complete or not causal) and all((lanes[me], rows, keys[0]))
    at_rows, at_keys = (numbers(rows), [numbers(part) for part in keys]) if causal else ([], [[] for _ in keys])

    def run(*values: torch.Tensor) -> Steps:
        xq, xk, xv = q.flat(values[0]), k.flat(values[1]), v.flat(values[2])
        xm = None if mask is None else mask.flat(values[3])
        if line.moves:
            (xq,) = yield from trade((take_q, xq))
        xq = q.lanes.expand(xq)
        state = None if direct else Online(xq, scale, width, at_rows, causal)
        made: torch.Tensor | None = None
        for t, positions in enumerate(at_keys):
            if line.keys_move:
                k_part, v_part = yield from trade((take_k[t], xk), (take_v[t], xv))
            else:
                k_part, v_part = take_k[t].alone(xk), take_v[t].alone(xv)
            m_part = None
            if mask is not None and xm is not None:
                m_part = (yield from trade((mask.parts[t], xm)))[0] if mask.travels else mask.parts[t].alone(xm)
            if state is None:
                made = _direct(xq, k_part, v_part, m_part, k.lanes, v.lanes, mask, causal, site.params["scale"])
            else:
                state.add(k_part, v_part, m_part, positions, k.lanes, v.lanes, None if mask is None else mask.lanes)
        if state is not None:
            if line.merged:
                yield from state.merge(line.merged)
            made = state.result(dtype)
        assert made is not None
        if line.moves:
            (made,) = yield from trade((give, made))
        return made.reshape(out_shape)

    return run


class Masked(Operand):
    """The mask, whose last two dims may be cut, whole, or broadcast."""

    def __init__(self, site: Site, layout: Layout, line: Line) -> None:
        super().__init__(site, layout, line)
        inputs = site.definition.inputs
        ndim = len(layout.shape)
        sizes = (inputs[0].shape[-2], inputs[1].shape[-2])
        is_one = [layout.shape[ndim - 2 + i] == 1 and sizes[i] != 1 for i in (0, 1)]
        one: Spans = ((0, 1),)
        have = [(self.all, *(spans_of([interval]) for interval in part[-2:])) for part in boxes_along(site, layout, line.axes)]
        self.travels = any(is_shard(layout.codes[a]) and shard_dim(layout.codes[a]) >= ndim - 2 for a in line.axes)
        sources = line.holders(layout.codes)
        self.parts = []
        for part in line.parts:
            want = [
                (wanted, one if is_one[0] else rows, one if is_one[1] else keys)
                for wanted, rows, keys in zip(self.wanted, line.rows, part, strict=True)
            ]
            self.parts.append(Trade(line.places, line.me, have, want, site.device, sources))


def _direct(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    k_lanes: Lanes,
    v_lanes: Lanes,
    masked: Masked | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Torch's own function, where all keys are here at once. Lanes stand where it has heads."""
    shared = k_lanes.group > 1 and v_lanes.group == k_lanes.group
    if not shared:
        k, v = k_lanes.expand(k), v_lanes.expand(v)
    if mask is not None and masked is not None:
        mask = masked.lanes.spread(mask).unsqueeze(0)
    made = F.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, 0.0, causal, scale=scale, enable_gqa=shared
    )
    return made.squeeze(0)
