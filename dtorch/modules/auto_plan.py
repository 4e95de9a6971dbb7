"""The plan "auto": which layers of a module are split, found from the module itself.

A model's own plan comes first, where it has one (``tp_plan`` of transformers). Otherwise structure decides, within each
of the layers that a model is a stack of: attention is split between heads, a layer that widens and the one that narrows
again are a pair, tables of embeddings are split by rows. A plan decides speed and memory, never values, so a guess that
misses costs communication only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch

from dtorch.mesh import DeviceMesh
from dtorch.modules.blocks import LISTS, blocks, even_stages, inside, stacked
from dtorch.modules.plans import STAGE_AXIS, Plan, Style, keep_ties, read, sizes, usual_axis

_FROM_TRANSFORMERS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "embedding_rowwise": "vocab",
}
"""Styles of transformers that have a counterpart; weights under others go by structure."""
_GATHERED = {"colwise_rep", "colwise_gather_output"}
_HOLDERS = (*LISTS, torch.nn.Sequential)


@dataclass
class Attention:
    """The projections of one attention layer, by name.

    Attributes:
        owner: the module that holds them.
        queries: projections to ``num_heads`` heads each; ``keys``: to the keys' and values' heads, ``num_kv_heads`` each.
        fused: those that give queries, keys and values in one.
        outs: what takes the attended values.
        head: features of one head.
    """

    owner: str
    head: int
    queries: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    outs: list[str] = field(default_factory=list)
    num_heads: int = 1
    num_kv_heads: int = 1

    @property
    def first(self) -> str:
        return (*self.queries, *self.fused)[0]


def make_plan(module: torch.nn.Module, mesh: DeviceMesh, given: Any, roots: Sequence[str] = ("",)) -> Plan:
    """The plan that ``distribute`` was given, read or derived for ``module``.

    Args:
        roots: names of the parts that are called; each is a stack of layers of its own.

    Raises:
        what ``distribute`` raises for a plan.
    """
    if given is None:
        return Plan()
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(f"distribute: plan must be a dict, 'auto' or None, not {given!r}")
        plan = Plan()
        axis, expert = usual_axis(mesh), usual_axis(mesh, "expert")
        if axis is not None or expert is not None:
            plan = auto_plan(module, "" if axis is None else axis, "" if expert is None else expert)
            plan.styles = {name: style for name, style in plan.styles.items() if style.axis != ""}
        if STAGE_AXIS in (mesh.dim_names or ()):
            for root in roots:
                stages = even_stages(module.get_submodule(root), mesh.size(STAGE_AXIS))
                plan.stages.update({f"{root}.{name}" if root else name: stage for name, stage in stages.items()})
    elif isinstance(given, Mapping):
        plan = read(module, mesh, given)
    else:
        raise TypeError(f"distribute: plan must be a dict, 'auto' or None, not {type(given).__name__}")
    cut_at_heads(module, plan.styles, {style.axis: mesh.size(style.axis) for style in plan.styles.values()})
    return plan


def auto_plan(module: torch.nn.Module, axis: str | int, expert_axis: str | int) -> Plan:
    """A plan that splits over ``axis``, and stacked experts over ``expert_axis``."""
    attentions = list(find_attention(module))
    experts = _experts(module, expert_axis)
    layers = {
        name: size for name, part in module.named_modules() if (size := sizes(part)) is not None and not inside(name, experts)
    }
    found = _embeddings(module, axis)
    homes = _homes(module, list(layers))
    for home in dict.fromkeys(homes.values()):
        here = {name: layers[name] for name in layers if homes[name] == home}
        found.update(_block(here, [a for a in attentions if homes[a.first] == home], axis))
    _chains(module, layers, found, axis)
    for name, style in _own_plan(module, axis):
        if not inside(name, experts) and found.get(name) != replace(style, is_gathered=False):  # no need to gather
            found[name] = style
    keep_ties(module, found)
    found.update(experts)
    return Plan({name: replace(style, is_lenient=True) for name, style in found.items()})


def _homes(module: torch.nn.Module, names: list[str]) -> dict[str, str]:
    """Where each layer looks for its like: the layer of the stack that it is in; outside, the module that it is a member of,
    unless the stack is in there as well, whose layers then stand between it and the others."""
    own = stacked(module, names)
    stack = blocks(module)
    for name in names:
        if not own[name]:
            parent = name.rpartition(".")[0]
            while parent and isinstance(module.get_submodule(parent), _HOLDERS):
                parent = parent.rpartition(".")[0]
            around = any(not parent or inside(block, [parent]) for block in stack)
            own[name] = f"{name}!" if around else f"{parent}?"
    return own


def _own_plan(module: torch.nn.Module, axis: str | int) -> Iterator[tuple[str, Style]]:
    """What the outermost parts that have a plan say."""
    seen: list[str] = []
    for prefix, part in module.named_modules():
        plan = getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None)
        if not isinstance(plan, dict) or not plan or inside(prefix, seen) or "" in seen:
            continue
        seen.append(prefix)
        for name, layer in part.named_modules():
            for pattern, text in plan.items():
                kind = _FROM_TRANSFORMERS.get(text)
                if kind is not None and fnmatchcase(name, pattern) and (sizes(layer) or isinstance(layer, torch.nn.Embedding)):
                    full = f"{prefix}.{name}" if prefix else name
                    yield full, Style(kind, axis, 1, kind != "colwise" or text in _GATHERED)


# ---- structure


def _embeddings(module: torch.nn.Module, axis: str | int) -> dict[str, Style]:
    """Tables outside of the stack; those inside, of relative positions, are small."""
    stack = blocks(module)
    return {
        name: Style("vocab", axis, 1, True)
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Embedding) and part.num_embeddings >= 2 * part.embedding_dim and part.max_norm is None
        if not inside(name, stack)
    }


def _experts(module: torch.nn.Module, axis: str | int) -> dict[str, Style]:
    """Modules that hold the weights of several experts, stacked: parameters of three dims of one length."""
    found: dict[str, Style] = {}
    for name, part in module.named_modules():
        own = list(part.parameters(recurse=False))
        deep = [value for value in own if value.ndim == 3]
        if len(deep) >= 2 and len({value.shape[0] for value in own if value.ndim >= 2}) == 1 and deep[0].shape[0] > 1:
            found[name] = Style("expert", axis)
    return found


def _block(layers: dict[str, tuple[int, int]], attentions: list[Attention], axis: str | int) -> dict[str, Style]:
    """Within one layer of the stack: attention, pairs, and what is left."""
    found: dict[str, Style] = {}
    for a in attentions:
        for name in (*a.queries, *a.keys, *a.fused):
            found[name] = Style("colwise", axis)
        for name in a.outs:
            found[name] = Style("rowwise", axis, 1, True)
    _pairs(layers, found, axis)
    loose = [a for a in attentions if not a.outs]
    for name, (ins, outs) in layers.items():
        if name in found:
            continue
        if loose and ins > outs:  # takes what an attention gives beside other things
            found[name] = Style("rowwise", axis, 1, True)
        elif outs > ins:
            found[name] = Style("colwise", axis, 1, True)
    return found


def _pairs(layers: dict[str, tuple[int, int]], found: dict[str, Style], axis: str | int) -> None:
    """Layers that widen, as many as there are side by side (also two halves in one, of which one gates the other), and the
    next that narrows what they give to what they took."""
    names = list(layers)
    for at, name in enumerate(names):
        ins, outs = layers[name]
        if name in found or outs <= ins:
            continue
        for later in names[at + 1 :]:
            if later not in found and layers[later] in ((outs, ins), (outs // 2, ins)) and layers[later][0] > 0:
                found[later] = Style("rowwise", axis, 1, True)
                for other in names[at : names.index(later)]:
                    if other not in found and layers[other] == (ins, outs):
                        found[other] = Style("colwise", axis)
                break


def _chains(
    module: torch.nn.Module, layers: dict[str, tuple[int, int]], found: dict[str, Style], axis: str | int
) -> None:
    """In a Sequential, a layer and the next one that takes its features: nothing between them asks for the whole."""
    for prefix, part in module.named_modules():
        if not isinstance(part, torch.nn.Sequential):
            continue
        own = [full for key, _ in part.named_children() if (full := f"{prefix}.{key}" if prefix else key) in layers]
        for first, second in pairwise(own):
            is_free = first not in found or (found[first].is_gathered and found[first].kind == "colwise")
            if is_free and second not in found and layers[first][1] == layers[second][0]:
                found[first], found[second] = Style("colwise", axis), Style("rowwise", axis, 1, True)


# ---- attention

_QUERY, _KEY = frozenset(["q", "wq", "query", "queries"]), frozenset(["k", "v", "wk", "wv", "key", "keys", "value", "values"])
_FUSED = re.compile(r"c_attn|qkv|query_key_value|Wqkv")
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_head", "dim_head")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


def find_attention(module: torch.nn.Module) -> Iterator[Attention]:
    """The attention layers of a module: owners of projections that are called queries, keys and values, or of three and
    more projections beside a number of heads."""
    for name, part in module.named_modules():
        own = {f"{name}.{key}" if name else key: child for key, child in part.named_children() if sizes(child) is not None}
        if not own:
            continue
        fused = [full for full in own if _FUSED.search(full.rsplit(".", 1)[-1])]
        queries = [full for full in own if _words(full) & _QUERY and full not in fused]
        keys = [full for full in own if _words(full) & _KEY and full not in fused]
        if not fused and (not queries or not keys):
            queries, keys = _nameless(part, own)
        if not queries and not fused:
            continue
        width = _width(own, queries, fused)
        head = _head_size(part, width)
        if head is None or width % head:
            continue
        made = Attention(name, head, queries, keys, fused, num_heads=max(width // head, 1))
        least = min((outs for full in keys if (outs := _outs(own[full])) % head == 0), default=width)
        made.num_kv_heads = max(least // head, 1)
        made.outs = _after(module, name, part, width, {*queries, *keys, *fused})
        yield made


def _words(name: str) -> set[str]:
    return set(re.split(r"[_\W\d]+", name.rsplit(".", 1)[-1].lower()))


def _outs(part: torch.nn.Module) -> int:
    size = sizes(part)
    return size[1] if size is not None else 0


def _width(own: dict[str, torch.nn.Module], queries: list[str], fused: list[str]) -> int:
    """Features of all heads of the queries."""
    if queries:
        return _outs(own[queries[0]])
    others = [size[0] for full, child in own.items() if full not in fused and (size := sizes(child)) is not None]
    return others[-1] if others else _outs(own[fused[0]]) // 3


def _nameless(part: torch.nn.Module, own: dict[str, torch.nn.Module]) -> tuple[list[str], list[str]]:
    """Of three and more projections beside a number of heads: those of the same input as the first, less the last one, which
    takes what the first gives."""
    if len(own) < 3 or not _fact(part, _NUM_HEADS):
        return [], []
    names = list(own)
    ins, width = sizes(own[names[0]]) or (0, 0)
    head = _head_size(part, width)
    same = [full for full in names if (sizes(own[full]) or (0, 0))[0] == ins]
    if len(same) == len(names) and sizes(own[names[-1]]) == (width, ins) and len(names) > 3:
        same = same[:-1]
    good = len(same) >= 3 and head is not None and all(_outs(own[full]) % head == 0 for full in same)
    return (same[:1], same[1:]) if good else ([], [])


def _after(module: torch.nn.Module, name: str, part: torch.nn.Module, width: int, known: set[str]) -> list[str]:
    """The projections after attention: in its module, or else the next layer in the same part of the model."""
    prefix = f"{name}." if name else ""
    inner = [
        full for own, child in part.named_modules()
        if (full := prefix + own) not in known and (size := sizes(child)) is not None and size[0] == width
        and _is_near(part, own)
    ]
    if inner or not name:
        return inner
    block = stacked(module, [name])[name]
    later = [n for n, _ in module.named_modules()]
    for other in later[later.index(name) :]:
        if block and not inside(other, [block]):
            break
        size = sizes(module.get_submodule(other))
        if size is not None and other not in known and not _words(other) & (_QUERY | _KEY):
            return [other] if size[0] == width else []
    return []


def _is_near(part: torch.nn.Module, own: str) -> bool:
    """A member, or a member of a member that only holds others."""
    *path, _ = own.split(".")
    return all(isinstance(part.get_submodule(".".join(path[: i + 1])), _HOLDERS) for i in range(len(path)))


def _head_size(part: torch.nn.Module, width: int) -> int | None:
    size = _fact(part, _HEAD_SIZES)
    if size:
        return size
    num = _fact(part, _NUM_HEADS)
    return width // num if num and width % num == 0 else None


def _fact(part: torch.nn.Module, names: Sequence[str]) -> int:
    """A positive number that a module, or the config that it keeps, has under one of ``names``; 0 if there is none."""
    for holder in (part, part.__dict__.get("config")):
        facts = getattr(holder, "__dict__", {})
        for name in names:
            value = facts.get(name)
            if type(value) is int and value > 0:
                return value
    return 0


def cut_at_heads(module: torch.nn.Module, styles: dict[str, Style], num_devices: dict[str | int, int]) -> None:
    """Cut attention's projections between heads, unless ``styles`` say where, and keys and values of fewer heads than there
    are devices not at all.

    Args:
        num_devices: along each axis that the styles name.
    """
    for a in find_attention(module):
        for name in (*a.queries, *a.keys, *a.fused, *a.outs):
            style = styles.get(name)
            if style is None or style.block != 1 or style.kind not in ("colwise", "rowwise"):
                continue
            group = max(a.num_heads // a.num_kv_heads, 1)
            if a.num_kv_heads < min(num_devices.get(style.axis, 1), a.num_heads):  # replicated keys and values
                if name in a.keys and not a.fused:
                    styles[name] = replace(style, kind="replicate")
                    continue
                group = 1
            block = a.head * (1 if name in a.keys or name in a.fused else group)
            part = module.get_submodule(name)
            size = sizes(part)
            if size is not None and size[0 if name in a.outs else 1] % block == 0:
                styles[name] = replace(style, block=block, head=a.head, is_lenient=True)


