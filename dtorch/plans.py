"""Plans: which weights of a plain torch module are split, and along which dim.

A plan names styles; ``auto_plan`` derives one. It asks the module for a plan of its own (``tp_plan`` of transformers),
and otherwise goes by what layers are called and by their shapes: projections that widen are split by output features,
those that narrow by input features, and attention's are cut at the borders of heads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from dtorch.placement import Shard
from dtorch.runtime.layout import split

STYLES = ("colwise", "rowwise", "vocab", "replicate")
_GATHERED = {"colwise_rep", "colwise_gather_output"}
_FROM_TRANSFORMERS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "embedding_rowwise": "vocab",
}
"""Styles of transformers that have a counterpart; weights under others are replicated."""


@dataclass(frozen=True)
class Style:
    """How a layer's weights are split.

    Attributes:
        kind: one of ``STYLES``.
        axis: of the mesh; "" where the plan names none.
        block: cut at multiples of this many features only.
        head: a smaller block that will do where it gives the same pieces: what one attention head has.
        is_gathered: the layer's result is made whole right away.
    """

    kind: str
    axis: str | int = ""
    block: int = 1
    is_gathered: bool = False
    head: int = 1

    def over(self, axis: str | int) -> Style:
        return replace(self, axis=axis)

    def shard(self, dim: int, size: int, num_devices: int) -> Shard:
        """A shard of ``dim`` with the smallest block that gives these pieces: equal pieces should have one name."""
        pieces = split(0, size, num_devices, self.block)
        small = next(b for b in (1, self.head, self.block) if split(0, size, num_devices, b) == pieces)
        return Shard(dim, small)

    def dim(self, owner: torch.nn.Module, name: str, value: torch.Tensor) -> int | None:
        """The dim of a parameter that is split; None for one that every device holds."""
        if self.kind == "replicate" or not value.ndim:
            return None
        if self.kind == "vocab":
            return 0
        outs, ins = (1, 0) if _is_transposed(owner, value) else (0, 1)
        if self.kind == "colwise":
            return 0 if value.ndim == 1 else outs
        return None if value.ndim == 1 else ins


def parse(text: Any) -> Style:
    """``"colwise"``, ``"colwise:axis"``, ``"colwise/64"``, ``"colwise/64:axis"``.

    Raises:
        ValueError: no such style.
    """
    match = re.fullmatch(r"(\w+)(?:/(\d+))?(?::(\w+))?", text) if isinstance(text, str) else None
    if match is None or match[1] not in STYLES or match[2] == "0":
        raise ValueError(f"distribute: {text!r} is no style; there are {', '.join(STYLES)}, as in 'colwise/64:tp'")
    kind, block, axis = match.groups()
    return Style(kind, axis or "", int(block or 1), kind in ("rowwise", "vocab"))


def styles_of(module: torch.nn.Module, styles: dict[str, Style]) -> dict[str, Style]:
    """The same styles, cut at the borders of heads in attention unless they say where."""
    heads = {name: size for name, size in head_blocks(module).items() if name in styles}
    return {
        name: replace(s, block=heads[name][0], head=heads[name][1]) if s.block == 1 and name in heads else s
        for name, s in styles.items()
    }


def auto_plan(module: torch.nn.Module, axis: str | int) -> dict[str, Style]:
    """Name of a submodule -> style over ``axis``, derived from the module."""
    own = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    found = _from_own(module, own, axis) if isinstance(own, dict) else {}
    if not found:
        found = _from_shapes(module, axis)
    _keep_ties(module, found)
    return styles_of(module, found)


def _from_own(module: torch.nn.Module, plan: dict[str, Any], axis: str | int) -> dict[str, Style]:
    found: dict[str, Style] = {}
    for name, part in module.named_modules():
        for pattern, text in plan.items():
            kind = _FROM_TRANSFORMERS.get(text)
            if kind is not None and fnmatchcase(name, pattern) and _is_matrix(part):
                found[name] = Style(kind, axis, 1, kind != "colwise" or text in _GATHERED)
    return found


_QUERY_NAMES = "q k v query key value q_proj k_proj v_proj q_lin k_lin v_lin to_q to_k to_v wq wk wv"
_QUERIES = frozenset(_QUERY_NAMES.split())
_FUSED = frozenset({"c_attn", "qkv", "query_key_value", "in_proj", "qkv_proj", "Wqkv"})
_GLUED = re.compile(r"gate_up|up_gate|packed|fused|w12")


def _from_shapes(module: torch.nn.Module, axis: str | int) -> dict[str, Style]:
    """Widening layers by their outputs, the next narrowing one by its inputs; queries, keys and values by their outputs
    and the next square layer by its inputs. What stores several projections in one is left whole."""
    found: dict[str, Style] = {}
    after_queries = after_widening = False
    for name, part in module.named_modules():
        last = name.rsplit(".", 1)[-1]
        if isinstance(part, torch.nn.Embedding):
            if part.num_embeddings >= 2 * part.embedding_dim and part.max_norm is None:
                found[name] = Style("vocab", axis, 1, True)
            continue
        sizes = _sizes(part)
        if sizes is None:
            continue
        ins, outs = sizes
        if last in _QUERIES:
            found[name], after_queries = Style("colwise", axis), True
        elif last in _FUSED or _GLUED.search(last):
            after_queries = after_widening = False
        elif after_queries:
            found[name], after_queries = Style("rowwise", axis, 1, True), False
        elif outs > ins:
            found[name], after_widening = Style("colwise", axis), True
        elif ins > outs and after_widening:
            found[name], after_widening = Style("rowwise", axis, 1, True), False
    head = _head(module)
    if head in found:
        found[head] = Style("colwise", axis, 1, True)
    return found


def _head(module: torch.nn.Module) -> str:
    """The name of the layer that gives a model's logits."""
    get = getattr(module, "get_output_embeddings", None)
    last = get() if callable(get) else None
    return next((name for name, part in module.named_modules() if last is not None and part is last), "")


def _keep_ties(module: torch.nn.Module, styles: dict[str, Style]) -> None:
    """A weight that several layers share is split in one way: all by its rows, or not at all."""
    sharing: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(value), []).append(name.rpartition(".")[0])
    for names in sharing.values():
        kinds = {styles[n].kind if n in styles else "" for n in names}
        if len(names) > 1 and not kinds <= {"vocab", "colwise"}:
            for n in names:
                styles.pop(n, None)


# ---- heads


def head_blocks(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Name of an attention projection -> (features that must stay together, features of one head): the former are those
    of one key/value head, or of the queries that use it."""
    found: dict[str, tuple[int, int]] = {}
    for name, part in module.named_modules():
        children = dict(part.named_children())
        sizes = {key: _sizes(child) for key, child in children.items()}
        queries = [key for key in children if key in _QUERIES and sizes[key] is not None]
        size = _head_size(part, [sizes[key] for key in queries])
        if not queries or size is None:
            continue
        prefix = f"{name}." if name else ""
        outs = {key: sizes[key][1] for key in queries}  # type: ignore[index]
        least = min(outs.values())
        for key in queries:
            found[prefix + key] = size * max(outs[key] // least, 1), size
        most = max(outs.values())
        follower = _follower(module, name, most)
        if follower:
            found[follower] = size * max(most // least, 1), size
    return found


def _follower(module: torch.nn.Module, name: str, num_features: int) -> str:
    """The projection after attention: the first layer from there on that takes ``num_features`` and is no query."""
    seen = False
    for other, part in module.named_modules():
        seen = seen or other == name
        sizes = _sizes(part)
        if seen and sizes is not None and other.rsplit(".", 1)[-1] not in _QUERIES:
            return other if sizes[0] == num_features else ""
    return ""


_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_head", "dim_head")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


def _head_size(part: torch.nn.Module, sizes: list[Any]) -> int | None:
    for name in _HEAD_SIZES:
        value = getattr(part, name, None)
        if type(value) is int and value > 0:
            return value
    for name in _NUM_HEADS:
        value = getattr(part, name, None)
        if type(value) is int and value > 0 and sizes and sizes[0][1] % value == 0:
            return int(sizes[0][1] // value)
    return None


# ---- layers


def _is_matrix(part: torch.nn.Module) -> bool:
    return isinstance(part, torch.nn.Embedding) or _sizes(part) is not None


def _sizes(part: torch.nn.Module) -> tuple[int, int] | None:
    """(input features, output features) of a layer that multiplies by one matrix."""
    weight = part._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(part, torch.nn.Embedding):
        return None
    ins, outs = (0, 1) if _is_transposed(part, weight) else (1, 0)
    return int(weight.shape[ins]), int(weight.shape[outs])


def _is_transposed(part: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether the weight is stored as [inputs, outputs], as in layers that call themselves 1-d convolutions."""
    return weight.ndim == 2 and not isinstance(part, torch.nn.Linear) and hasattr(part, "nf")
