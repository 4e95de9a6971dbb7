"""Products: placements follow from labels of dims, as in einsum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtorch.ops._call import Call, R, Rule, Sig, TensorArg, sharded
from dtorch.ops._rules import P, contraction
from dtorch.ops.table import row
from dtorch.runtime.layout import is_shard, shard_block, shard_code, shard_dim

Labelled = tuple[list[str], str, tuple[int, ...]]

_BATCH = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def batch(*ndims: int) -> tuple[list[str], str]:
    """Labels of leading dims that broadcast: (one text a tensor, the result's)."""
    most = max(ndims, default=0)
    return [_letters(most)[most - n :] for n in ndims], _letters(most)


def _letters(num: int) -> str:
    return _BATCH[:num] if num <= len(_BATCH) else "".join(chr(0x4E00 + i) for i in range(num))


def fixed(*texts: str, out: str, added: Sequence[int] = ()) -> Callable[[Call], Labelled]:
    """The same labels for every call. A text is matched from the right, so an added tensor may lack leading dims."""

    def labels(call: Call) -> Labelled:
        ins = [text[len(text) - t.ndim :] if t.ndim else "" for text, t in zip(texts, call.tensors, strict=False)]
        return ins, out, tuple(added)

    return labels


def _matmul(call: Call) -> Labelled:
    a, b = call.tensors
    if a.ndim == 1 and b.ndim == 1:
        return ["k", "k"], "", ()
    if a.ndim == 1:
        (text,), out = batch(b.ndim - 2)
        return ["k", text + "kj"], out + "j", ()
    if b.ndim == 1:
        (text,), out = batch(a.ndim - 2)
        return [text + "ik", "k"], out + "i", ()
    (left, right), out = batch(a.ndim - 2, b.ndim - 2)
    return [left + "ik", right + "kj"], out + "ij", ()


def _swapped(call: Call) -> Labelled:
    a, b = call.tensors
    (left, right), out, added = _matmul(Call(call.name, call.args, call.kwargs, (b, a), call.outputs, call.mesh_shape))
    return [right, left], out, added


def _linear(call: Call) -> Labelled:
    x, w = call.tensors[:2]
    rows, bias = ("o", "o") if w.ndim == 2 else ("", "")
    (lead,), _ = batch(x.ndim - 1)
    return [lead + "i", rows + "i", bias][: call.num_inputs], lead + rows, (2,) if call.num_inputs == 3 else ()


def _bilinear(call: Call) -> Labelled:
    (lead,), _ = batch(call.tensors[0].ndim - 1)
    return [lead + "i", lead + "j", "oij", "o"][: call.num_inputs], lead + "o", (3,) if call.num_inputs == 4 else ()


def _bilinear_rule(call: Call) -> list[Sig]:
    """torch's own refuses pieces without features, of which nothing but a bias is left."""
    added = 3 if call.num_inputs == 4 else None
    return [Sig(s.ins, s.outs, "contracted", {"added": added}) for s in contraction(_bilinear)(call)]


def _inner(call: Call) -> Labelled:
    a, b = call.tensors
    if not a.ndim or not b.ndim:
        text = _letters(a.ndim + b.ndim)
        return [text[: a.ndim], text[a.ndim :]], text, ()
    text = _letters(a.ndim + b.ndim - 2)
    left, right = text[: a.ndim - 1], text[a.ndim - 1 :]
    return [left + "k", right + "k"], text, ()


def _vecdot(call: Call) -> Labelled:
    a, b = call.tensors
    dim = call.arg(2, "dim", -1)
    (left, right), out = batch(a.ndim, b.ndim)
    place = dim if dim < 0 else dim - len(out)
    return [left, right], out.replace(out[place], ""), ()


def _tensordot(call: Call) -> Labelled:
    a, b = call.tensors[:2]
    dims = call.arg(2, "dims", 2)
    if isinstance(dims, int):
        ours, theirs = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        ours, theirs = ([d] if isinstance(d, int) else list(d) for d in dims)
    text = _letters(a.ndim + b.ndim)
    left, right = list(text[: a.ndim]), list(text[a.ndim :])
    for i, j in zip(ours, theirs, strict=True):
        right[j % b.ndim] = left[i % a.ndim]
    gone = {left[i % a.ndim] for i in ours}
    out = [c for c in (*left, *right) if c not in gone]
    return ["".join(left), "".join(right)], "".join(out), ()


def _chain(call: Call) -> Labelled:
    """multi_dot, chain_matmul: the first and the last may be vectors."""
    num = call.num_inputs
    text = _letters(num + 1)
    ins = [text[i : i + 2] for i in range(num)]
    if call.tensors[0].ndim == 1:
        ins[0] = ins[0][1:]
    if call.tensors[-1].ndim == 1:
        ins[-1] = ins[-1][:1]
    counted: dict[str, int] = {}
    for c in "".join(ins):
        counted[c] = counted.get(c, 0) + 1
    return ins, "".join(c for c in text if counted.get(c) == 1), ()


def _einsum(call: Call) -> Labelled:
    """The equation with its ellipsis spelled out; the sublist form is turned into an equation first."""
    equation, ndims = call.args[0], [t.ndim for t in call.tensors]
    if isinstance(equation, TensorArg):
        subs = [a for a in call.args if not isinstance(a, TensorArg)]
        equation = ",".join(map(_spelled, subs[: call.num_inputs]))
        if len(subs) > call.num_inputs:
            equation += "->" + _spelled(subs[-1])
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    hidden = max((n - len(s.replace("...", "")) for s, n in zip(left.split(","), ndims, strict=True)), default=0)
    dots = "".join(chr(0x4E00 + i) for i in range(hidden))
    ins = []
    for sub, ndim in zip(left.split(","), ndims, strict=True):
        own = ndim - len(sub.replace("...", ""))
        ins.append(sub.replace("...", dots[hidden - own :] if own else ""))
    if arrow:
        out = right.replace("...", dots)
    else:
        plain = left.replace("...", "").replace(",", "")
        out = dots + "".join(sorted(c for c in set(plain) if plain.count(c) == 1))
    return ins, out, ()


def _spelled(sub: Any) -> str:
    return "".join("..." if s is Ellipsis else "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[s] for s in sub)


def _kron(call: Call) -> list[Sig]:
    """A cut of the first factor cuts the product at multiples of the second's size; the second must be whole."""
    a, b = call.tensors
    ndim = max(a.ndim, b.ndim)
    sigs = []
    codes = {c for c in a.codes if is_shard(c) and shard_block(c) > 1}
    for code in (*sorted(codes), *range(a.ndim)):
        dim = shard_dim(code)
        at, own = dim + ndim - a.ndim, dim - a.ndim + b.ndim
        size = b.shape[own] if own >= 0 else 1
        if size and (b.ndim <= a.ndim or all(n == 1 for n in b.shape[: b.ndim - a.ndim])):
            sigs.append(sharded(call, (code, R), shard_code(at, shard_block(code) * size)))
    return sigs + [sharded(call, codes, P) for codes in ((P, R), (R, P)) if _is_inexact(call)]


def _is_inexact(call: Call) -> bool:
    return all(t.dtype.is_floating_point or t.dtype.is_complex for t in call.tensors)


def _addition(rule: Rule) -> Rule:
    """beta * input + alpha * product. Whole numbers scaled by fractions are rounded at the end, so they cannot be pending."""

    def scaled(call: Call) -> list[Sig]:
        fractions = [v for v in call.kwargs.values() if isinstance(v, float)]
        if not fractions or _is_inexact(call):
            return rule(call)
        return [s for s in rule(call) if P not in (*s.ins, *s.outs)]

    return scaled


def _addmv(call: Call) -> list[Sig]:
    """For a matrix without rows torch gives the vector that is added, which does not fit if it was to be broadcast."""
    sigs = contraction(fixed("i", "ik", "k", out="i", added=(0,)))(call)
    return [s for s in sigs if not is_shard(s.outs[0]) or is_shard(s.ins[0])]


row("matmul __matmul__", contraction(_matmul))
row("__rmatmul__", contraction(_swapped), places="torch.Tensor")
row("mm", contraction(fixed("ik", "kj", out="ij")))
row("bmm", contraction(fixed("bik", "bkj", out="bij")))
row("mv", contraction(fixed("ik", "k", out="i")))
row("dot vdot", contraction(fixed("k", "k", out="")))
row("inner", contraction(_inner))
row("outer ger", contraction(fixed("i", "j", out="ij")))
row("vecdot", contraction(_vecdot), places="torch.linalg")
row("addmm", _addition(contraction(fixed("ij", "ik", "kj", out="ij", added=(0,)))))
row("addmv", _addition(_addmv))
row("addr", _addition(contraction(fixed("ij", "i", "j", out="ij", added=(0,)))))
row("addbmm", _addition(contraction(fixed("ij", "bik", "bkj", out="ij", added=(0,)))))
row("baddbmm", _addition(contraction(fixed("bij", "bik", "bkj", out="bij", added=(0,)))))
row("linear", contraction(_linear), places="torch.nn.functional")
row("bilinear", _bilinear_rule, places="torch.nn.functional")
row("tensordot", contraction(_tensordot), places="torch")
row("chain_matmul multi_dot", contraction(_chain), places="torch torch.linalg")
row("einsum", contraction(_einsum), places="torch")
row("kron", _kron)
