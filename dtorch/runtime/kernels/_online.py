"""Attention over keys that arrive in parts, by the online softmax (Milakov and Gimelshein, 2018).

For each query a maximum, a sum of powers and a weighted sum of values are carried; a further part of the keys rescales
them. Two such states, over different keys, combine in the same way, which is what Ring Attention (Liu et al., 2023) and
flash decoding rest on. Sums are carried in float32 or wider, and a query that sees no key gets zeros, as torch gives.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dtorch.runtime.comm import Reduce
from dtorch.runtime.kernels import Steps
from dtorch.runtime.kernels._lines import wide

SCORES = 1 << 21
"""Elements of the score matrix that are computed at a time, where torch's fused kernels do not serve."""
CAUSAL_ROWS = 256
"""Queries that are computed at a time under a causal mask: keys that none of them sees are left out."""

_State = tuple[torch.Tensor, "torch.Tensor | float", torch.Tensor]
"""Of some queries: maximum or log of the sum, sum relative to it, and weighted sum of values."""


class Lanes:
    """Which key/value lane each query lane uses: batches and heads are flattened to one dim, a lane each.

    Attributes:
        group: neighbouring query lanes that share each lane, when that holds throughout; else 0 and ``index`` says.
    """

    def __init__(self, used: Sequence[int], num: int, device: torch.device) -> None:
        group = len(used) // num if num and len(used) % num == 0 else 0
        regular = bool(group) and list(used) == [lane // group for lane in range(len(used))]
        self.num, self.group = num, group if regular else 0
        self.index = torch.tensor(used, dtype=torch.int64, device=device)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """A lane for each query lane."""
        if self.group == 1:
            return x
        return x.repeat_interleave(self.group, 0) if self.group else x.index_select(0, self.index)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """``expand``, or something that broadcasts to it."""
        return x if x.shape[0] == 1 else self.expand(x)

    def matmul(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Each query lane's ``rows`` times the lane of ``x`` that it uses; lanes that share one are one product."""
        if self.group <= 1:
            return torch.bmm(rows, x if self.group else self.expand(x))
        lanes, num, inner = rows.shape
        return torch.bmm(rows.reshape(self.num, -1, inner), x).view(lanes, num, x.shape[2])


class Online:
    """The state of a set of queries.

    Args:
        q: queries, shape (lanes, rows, E).
        positions: of the rows, ascending; read when ``causal``.
        width: features of the values.
    """

    def __init__(self, q: torch.Tensor, scale: float, width: int, positions: list[int], causal: bool) -> None:
        self.carried = wide(q.dtype)
        self.q, self.scale, self.positions, self.causal = q, scale, positions, causal
        self.top = q.new_full(q.shape[:2], -math.inf, dtype=self.carried)
        self.total = q.new_zeros(q.shape[:2], dtype=self.carried)
        self.values = q.new_zeros((*q.shape[:2], width), dtype=self.carried)
        self._rows = torch.tensor(positions, device=q.device) if causal else None
        self._fused = _fused(q, width)

    def add(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        keys: list[int],
        k_lanes: Lanes,
        v_lanes: Lanes,
        mask_lanes: Lanes | None,
    ) -> None:
        """Let the queries see more keys.

        Args:
            k, v: shape (lanes, keys, E or width).
            mask: shape (lanes, rows or 1, keys or 1); bool (True: seen) or added to the scores.
            keys: positions of the keys, ascending; read when causal.
        """
        lanes, num_rows, _ = self.q.shape
        num_keys = k.shape[1]
        if not lanes or not num_rows or not num_keys:
            return
        fused = self._fused if mask is None and k_lanes.group == v_lanes.group else None
        at_keys = torch.tensor(keys, device=k.device) if self.causal else None
        step = num_rows if fused is not None else max(1, SCORES // (lanes * num_keys))
        step = min(step, CAUSAL_ROWS) if self.causal else step
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            done, whole, seen = 0, num_keys, num_keys  # keys dealt with; those that all rows see; those that any row sees
            if self.causal:
                whole = bisect_right(keys, self.positions[rows.start])
                seen = bisect_right(keys, self.positions[rows.stop - 1])
            if fused is not None and whole:
                self._absorb(rows, self._by_torch(fused, rows, k[:, :whole], v[:, :whole], k_lanes))
                done = whole
            if done == seen:
                continue
            scores = k_lanes.matmul(self.q[:, rows].to(self.carried) * self.scale, k[:, done:seen].to(self.carried).mT)
            if mask is not None and mask_lanes is not None:
                scores = scores + mask_lanes.spread(_additive(_part(mask, rows, seen), self.carried))
            if whole < seen:
                assert at_keys is not None
                assert self._rows is not None
                later = at_keys[whole:seen] > self._rows[rows, None]
                scores[:, :, whole - done :].masked_fill_(later, -math.inf)
            top = scores.amax(2)
            powers = scores.sub_(_finite(top).unsqueeze(2)).exp_()
            values = v_lanes.matmul(powers, v[:, done:seen].to(self.carried))
            self._absorb(rows, (top, powers.sum(2), values))

    def _by_torch(
        self, fused: Callable[..., tuple[torch.Tensor, ...]], rows: slice, k: torch.Tensor, v: torch.Tensor, lanes: Lanes
    ) -> _State:
        """All keys for some rows, by one of torch's fused kernels. Rows of lanes that share a key stand under each other."""
        q = self.q[:, rows]
        shape = q.shape
        if lanes.group:
            q = q.reshape(lanes.num, -1, shape[2])
        else:
            k, v = lanes.expand(k), lanes.expand(v)
        values, log_sum = fused(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scale=self.scale)[:2]
        log_sum = log_sum[0, :, : q.shape[1]].reshape(shape[:2])
        return log_sum.to(self.carried), 1.0, values.reshape(*shape[:2], -1).to(self.carried)

    def _absorb(self, rows: slice, other: _State) -> None:
        top, total, values = other
        had = self.top[:, rows]
        both = torch.maximum(had, top)
        base = _finite(both)
        keep, gain = (had - base).exp_(), (top - base).exp_()
        self.top[:, rows] = both
        self.total[:, rows] = self.total[:, rows] * keep + gain * total
        self.values[:, rows] = self.values[:, rows] * keep.unsqueeze(2) + values * gain.unsqueeze(2)

    def merge(self, axes: tuple[int, ...]) -> Steps:
        """Combine the states of the same queries over the keys of all devices along mesh ``axes``."""
        dtype, shape = self.carried, tuple(self.top.shape)
        top = yield Reduce(self.top, axes, "max", shape, dtype)
        shrink = (self.top - _finite(top)).exp()
        self.total = yield Reduce(self.total * shrink, axes, "sum", shape, dtype)
        values = self.values * shrink.unsqueeze(2)
        self.values = yield Reduce(values, axes, "sum", tuple(values.shape), dtype)
        self.top = top

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        total = self.total.unsqueeze(2)
        return torch.where(total == 0, torch.zeros_like(total), self.values / total).to(dtype)


def _fused(q: torch.Tensor, width: int) -> Callable[..., tuple[torch.Tensor, ...]] | None:
    """Torch's kernel that gives results and logs of sums for such queries, where there is one."""
    depth = q.shape[2]
    if not depth or depth != width:
        return None
    if q.device.type == "cpu":
        if q.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    elif q.device.type == "cuda" and q.dtype in (torch.float32, torch.float16, torch.bfloat16) and depth % 8 == 0:
        return partial(torch.ops.aten._scaled_dot_product_efficient_attention, attn_bias=None, compute_log_sumexp=True)
    return None


def _finite(top: torch.Tensor) -> torch.Tensor:
    """A maximum to subtract: 0 where no key was seen yet."""
    return top.masked_fill(top == -math.inf, 0.0)


def _part(mask: torch.Tensor, rows: slice, num_keys: int) -> torch.Tensor:
    return mask[:, rows if mask.shape[1] != 1 else slice(None), : num_keys if mask.shape[2] != 1 else 1]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), -math.inf)
