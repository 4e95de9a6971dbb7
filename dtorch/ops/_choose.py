"""Fit the placements of a call to the signatures of its rule, axis by axis. Pure.

``fit`` answers which signature each mesh axis uses; ``repair`` answers, when one has none, which placements the inputs
should have instead, at the least number of bytes moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dtorch.ops._call import Call, R, Sig
from dtorch.runtime.layout import is_partial, is_shard, shard_block, shard_code, shard_dim

Verify = Callable[[Call, "tuple[tuple[int, ...], ...]", "tuple[tuple[int, ...], ...]"], bool]

LOCAL = frozenset({"local", "filled"})
"""Kernels that run the op's own function on pieces; another axis may need another kernel, which then serves all."""


@dataclass(frozen=True)
class Fit:
    """How a call runs.

    Attributes:
        ins: codes that each input has when the op sees it: its own, or its own cut further on this device alone.
        outs: codes of each output.
        kernel: name of the worker's kernel, and ``axes``, the mesh axes that need it.
        sigs: the signature chosen on each mesh axis.
    """

    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    kernel: str
    axes: tuple[int, ...]
    sigs: tuple[Sig, ...]


def match(sig: Sig, actual: Sequence[int], narrow: frozenset[int] = frozenset()) -> Sig | None:
    """The signature with blocks filled in, when ``actual`` fits it.

    Args:
        narrow: inputs that may be cut: where they are replicated and the signature wants a shard, each device takes its part
            of what it has. That costs no communication.
    """
    block: int | None = None
    for i, (want, have) in enumerate(zip(sig.ins, actual, strict=True)):
        if have == R and i in narrow and is_shard(want):
            continue
        if want == have:
            if is_shard(have) and want < 64:  # a block that the signature spells out binds no other input
                if block is None:
                    block = shard_block(have)
                elif block != shard_block(have):
                    return None
            continue
        if not (is_shard(want) and is_shard(have)) or want >= 64 or shard_dim(have) != want:
            return None
        if block is None:
            block = shard_block(have)
        elif block != shard_block(have):
            return None
    if block is None or block == 1:
        return sig
    outs = tuple(shard_code(o, block) if 0 <= o < 64 else o for o in sig.outs)
    ins = tuple(shard_code(i, block) if 0 <= i < 64 else i for i in sig.ins)
    return Sig(ins, outs, sig.kernel, sig.params)


def fit(
    call: Call, sigs: Sequence[Sequence[Sig]], verify: Verify | None = None, fixed: frozenset[int] = frozenset()
) -> Fit | None:
    """Choose a signature for every mesh axis from that axis' list; None when an axis has none that is legal.

    Args:
        fixed: inputs that must be seen whole as they are (they are written in place).
    """
    chosen: list[Sig] = []
    narrow = frozenset(range(len(call.tensors))) - fixed - frozenset(call.mutates)
    for axis, size in enumerate(call.mesh_shape):
        actual = tuple(t.codes[axis] for t in call.tensors)
        found = _find(call, sigs[axis], actual, narrow)
        if found is None:
            if size != 1:
                return None
            found = Sig(actual, (_alone(call, actual, fixed),) * len(call.outputs))
        chosen.append(found)
    return _combine(call, chosen, verify)


def _alone(call: Call, actual: tuple[int, ...], fixed: frozenset[int]) -> int:
    """The code of results along an axis of one device: what is written in place keeps its own."""
    written = min(fixed, default=None)
    keeps = written is not None and call.outputs[0].shape == call.tensors[written].shape
    return actual[written] if keeps and written is not None else R


def _find(call: Call, sigs: Sequence[Sig], actual: tuple[int, ...], narrow: frozenset[int]) -> Sig | None:
    if all(code == R for code in actual):
        return call.all_replicate()
    for sig in sigs:
        found = match(sig, actual)
        if found is not None:
            return found
    best: Sig | None = None
    fewest = len(actual)
    for sig in sigs:
        found = match(sig, actual, narrow)
        if found is not None:
            cuts = sum(want != have for want, have in zip(found.ins, actual, strict=True))
            if cuts < fewest:
                best, fewest = found, cuts
    return best


def _combine(call: Call, chosen: Sequence[Sig], verify: Verify | None) -> Fit | None:
    real = [axis for axis, size in enumerate(call.mesh_shape) if size > 1]
    used = {chosen[axis].kernel for axis in real}
    special = used - LOCAL
    if len(special) > 1:
        return None
    kernel = special.pop() if special else max(used, default="local", key=lambda name: name == "filled")
    axes = tuple(axis for axis in real if chosen[axis].kernel == kernel) if kernel != "local" else ()
    outs = tuple(tuple(sig.outs[o] for sig in chosen) for o in range(len(call.outputs)))
    ins = tuple(tuple(sig.ins[i] for sig in chosen) for i in range(len(call.tensors)))
    for tensor, codes in zip(call.tensors, ins, strict=True):
        if codes != tensor.codes and not _is_cut(tensor.codes, codes):
            return None
    if verify is not None and not verify(call, ins, outs):
        return None
    return Fit(ins, outs, kernel, axes, tuple(chosen))


def _is_cut(have: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Whether every device holds its part under ``want`` when it holds its part under ``have``: the dims newly cut are not
    cut by an axis to the right as well, whose pieces would then lie elsewhere."""
    for axis, (before, after) in enumerate(zip(have, want, strict=True)):
        if before != after:
            dim = shard_dim(after)
            if any(is_shard(code) and shard_dim(code) == dim for code in have[axis + 1 :]):
                return False
    return True


def cost(have: int, want: int, num: int, size_bytes: float) -> float:
    """Bytes a device sends to turn one placement into another on an axis of ``num`` devices; a little for local work."""
    if have == want or num == 1:
        return 0.0
    if have == R:
        return 0.01 * size_bytes + 1
    if is_partial(have):
        if want == R:
            return 2.0 * size_bytes * (num - 1) / num + 100
        return size_bytes * (num - 1) / num + 60 if is_shard(want) else float("inf")
    if want == R:
        return size_bytes * (num - 1) / num + 50
    if is_shard(want):
        return size_bytes * (num - 1) / num / num + 40
    return float("inf")


def by_cost(call: Call, axis: int, sigs: Sequence[Sig], sizes_bytes: Sequence[int]) -> list[Sig]:
    """The signatures of one axis, those first for which the least bytes would move."""
    actual = tuple(t.codes[axis] for t in call.tensors)
    num = call.mesh_shape[axis]

    def bytes_moved(sig: Sig) -> float:
        return sum(cost(have, want, num, size) for have, want, size in zip(actual, sig.ins, sizes_bytes, strict=True))

    return sorted(sigs, key=bytes_moved)


def repair(
    call: Call, sigs: Sequence[Sequence[Sig]], sizes_bytes: Sequence[int], fixed: frozenset[int], verify: Verify | None = None
) -> tuple[tuple[int, ...], ...] | None:
    """New codes for every input, so that the call is legal at the least cost; None when nothing helps.

    What the call writes into beside its results is moved whole, never cut.

    Args:
        sizes_bytes: global size of each input.
        fixed: inputs that must keep their placements (they are written in place).
    """
    wanted: list[tuple[int, ...]] = []
    kernel = "local"
    for axis, num in enumerate(call.mesh_shape):
        actual = tuple(t.codes[axis] for t in call.tensors)
        best = _find(call, sigs[axis], actual, frozenset(range(len(call.tensors))) - fixed - frozenset(call.mutates))
        if best is None:
            least = float("inf")
            for sig in (*sigs[axis], call.all_replicate()):
                if sig.kernel not in LOCAL and kernel not in ("local", sig.kernel):
                    continue
                if any(sig.ins[i] != actual[i] for i in fixed):
                    continue
                total = sum(
                    cost(have, want, num, size) for have, want, size in zip(actual, sig.ins, sizes_bytes, strict=True)
                )
                if sig.kernel not in LOCAL:
                    total += 50
                if total < least:
                    best, least = sig, total
        if best is None:
            return None
        if best.kernel not in LOCAL:
            if kernel not in ("local", best.kernel):
                best = call.all_replicate()
            else:
                kernel = best.kernel
        wanted.append(best.ins)
    codes = tuple(tuple(axis[i] for axis in wanted) for i in range(len(call.tensors)))
    if not _verified(call, sigs, codes, verify, fixed):
        whole = (R,) * len(call.mesh_shape)
        codes = tuple(t.codes if i in fixed else whole for i, t in enumerate(call.tensors))
        if any(codes[i] != whole for i in fixed) and not _verified(call, sigs, codes, verify, fixed):
            return None
    return codes


def _verified(
    call: Call, sigs: Sequence[Sequence[Sig]], codes: tuple[tuple[int, ...], ...],
    verify: Verify | None, fixed: frozenset[int],
) -> bool:
    moved = replace(call, tensors=tuple(replace(t, codes=c) for t, c in zip(call.tensors, codes, strict=True)))
    return fit(moved, sigs, verify, fixed) is not None
