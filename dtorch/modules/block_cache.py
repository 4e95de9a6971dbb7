"""First-block cache: a diffusion step whose first layer changes little takes what the other layers add from an earlier one.

The residual that the first layer of the stack adds says how much a step differs from the one before. Where it has changed
by less than a threshold, the layers after the first are not run: what they added last time is added again. The method is
ParaAttention's "first block cache" (https://github.com/chengzeyi/ParaAttention), after TeaCache
(https://arxiv.org/abs/2411.19108).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch.modules.blocks import blocks

MAX_KINDS = 8
"""Kinds of call (by the shapes of the first layer's inputs) whose residuals are kept; past it the oldest is forgotten."""


@dataclass
class _Kept:
    """What a call of one kind left behind.

    Attributes:
        residual: what the first layer added.
        rest: what all others added, one for each output of the last.
        outs: how each layer's outputs look: positions that are None in place of a tensor.
        last: the layer that was called last.
        num_skips: calls in a row that did without the layers.
    """

    residual: Any
    rest: list[Any] = field(default_factory=list)
    outs: dict[str, list[bool] | None] = field(default_factory=dict)
    last: str = ""
    num_skips: int = 0


class FirstBlockCache:
    """What ``first_block_cache`` returns; also a context manager, which removes the cache at its end.

    Attributes:
        num_calls: calls of the module so far.
        num_skipped: those that ran the first layer only.
        changes: by how much the first layer's residual differed from the kept one, for each call that had one; the latest
            1000.
    """

    def __init__(self, module: torch.nn.Module, threshold: float, max_skips: int | None) -> None:
        self.threshold = threshold
        self.max_skips = max_skips
        self.num_calls = self.num_skipped = 0
        self.changes: list[float] = []
        self._kept: dict[Any, _Kept] = {}
        self._called: list[str] = []
        self._first: list[Any] = []  # the first layer's outputs in this call
        self._latest: list[Any] = []  # those of the latest layer
        self._now: _Kept | None = None
        self._skips = False
        self._layers = {name: module.get_submodule(name) for name in blocks(module)}
        self._hooks = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end),
        ]
        for name, layer in self._layers.items():
            layer.forward = self._wrapped(name, layer.forward)

    def reset(self) -> None:
        """Forget the steps so far: the next one runs all layers."""
        self._kept.clear()

    def remove(self) -> None:
        """Take the cache off the module."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers.values():
            layer.__dict__.pop("forward", None)
        self.reset()

    def __enter__(self) -> FirstBlockCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    # ---- around a call of the module

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        self.num_calls += 1
        self._called, self._first, self._latest, self._now, self._skips = [], [], [], None, False

    def _end(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self._skips and self._now is not None and self._called[-1] != self._now.last:
            raise RuntimeError(
                f"first_block_cache: this call ended with layer {self._called[-1]!r}, those before with {self._now.last!r}; "
                "call reset() where the module begins to be called in another way"
            )
        if self._now is not None and not self._skips and self._latest:
            pairs = zip(self._latest, self._first, strict=True)
            self._now.rest = [None if a is None or b is None else a - b for a, b in pairs]
            self._now.last = self._called[-1]
        self._first, self._latest, self._now = [], [], None

    def _wrapped(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_first = not self._called
            self._called.append(name)
            if is_first:
                out = forward(*args, **kwargs)
                self._decide(name, args, kwargs, out)
                return out
            if self._skips:
                return self._instead(name)
            out = forward(*args, **kwargs)
            self._note(name, out)
            return out

        return call

    def _decide(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """After the first layer: whether the others run."""
        self._first = _leaves(out)
        given = list(_tensors((kwargs.get("hidden_states"), args, kwargs)))
        main = max((t for t in reversed(self._first) if t is not None), key=torch.Tensor.numel, default=None)
        before = next((t for t in given if main is not None and t.shape == main.shape), None)
        if main is None or before is None:
            raise ValueError(f"first_block_cache: layer {name!r} gives nothing of the shape of what it is given")
        residual = main - before
        key = (name, *[(tuple(t.shape), t.dtype) for t in given])
        kept = self._kept.get(key)
        if kept is not None and kept.last:
            change = float((residual - kept.residual).abs().mean() / kept.residual.abs().mean())
            self.changes = [*self.changes[-999:], change]
            limited = self.max_skips is not None and kept.num_skips >= self.max_skips
            if change < self.threshold and not limited:
                kept.num_skips += 1
                self.num_skipped += 1
                self._now, self._skips = kept, True
                return
        self._now = self._kept[key] = _Kept(residual)
        while len(self._kept) > MAX_KINDS:
            del self._kept[next(iter(self._kept))]

    def _note(self, name: str, out: Any) -> None:
        """After another layer has run."""
        kept, leaves = self._now, _leaves(out)
        if kept is None:
            return
        if len(leaves) != len(self._first) or any(
            a is not None and b is not None and a.shape != b.shape for a, b in zip(leaves, self._first, strict=True)
        ):
            raise ValueError(
                f"first_block_cache: layer {name!r} gives {_shapes(leaves)}, the first layer {_shapes(self._first)}; only "
                "stacks whose layers all give the same can be cached"
            )
        kept.outs[name] = [t is None for t in leaves] if isinstance(out, (tuple, list)) else None
        self._latest = leaves

    def _instead(self, name: str) -> Any:
        """What a layer gives that is not run: what the first gave, and the last one in addition what was added last time."""
        kept = self._now
        assert kept is not None
        if name not in kept.outs:
            raise RuntimeError(f"first_block_cache: layer {name!r} was not called before; call reset() first")
        made = self._first
        if name == kept.last:
            made = [a if a is None or b is None else a + b for a, b in zip(made, kept.rest, strict=True)]
        gone = kept.outs[name]
        return made[0] if gone is None else tuple(None if g else t for g, t in zip(gone, made, strict=True))


def first_block_cache(module: torch.nn.Module, threshold: float = 0.1, *, max_skips: int | None = None) -> FirstBlockCache:
    """Let a diffusion transformer skip the layers after the first where a step differs little from the one before.

    The module may be plain or distributed, over any axes, before or after this call. Every call reads one number, by which
    the client decides; it is the same for every mesh. A larger threshold skips more and changes the image more: compare
    with an image without cache, as ``examples/diffuse.py --cache`` does.

    Args:
        module: a stack of layers that all give tensors of the same shapes, such as the transformers of SD3 and FLUX.
        threshold: skip where the mean change of the first layer's residual, as a share of its mean size, is below this. 0
            skips nothing.
        max_skips: at most so many steps in a row are skipped; None for any number.

    Returns:
        A handle with figures, ``reset()`` and ``remove()``.

    Raises:
        ValueError: the module has fewer than two layers; a negative or no threshold.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"first_block_cache: expected a torch.nn.Module, got {type(module).__name__}")
    if not threshold >= 0:
        raise ValueError(f"first_block_cache: threshold must be 0 or more, not {threshold}")
    if max_skips is not None and max_skips < 1:
        raise ValueError(f"first_block_cache: max_skips must be at least 1, not {max_skips}; use threshold=0 to skip nothing")
    names = blocks(module)
    if len(names) < 2:
        raise ValueError(
            f"first_block_cache: {type(module).__name__} is a stack of {len(names)} layers; there is nothing to skip"
        )
    if any("forward" in module.get_submodule(name).__dict__ for name in names):
        raise ValueError(f"first_block_cache: {type(module).__name__} has a cache, or its layers' forwards were replaced")
    return FirstBlockCache(module, threshold, max_skips)


def _leaves(out: Any) -> list[Any]:
    """The members of a layer's result that are tensors or None, by position."""
    members = list(out) if isinstance(out, (tuple, list)) else [out]
    return [t if isinstance(t, torch.Tensor) else None for t in members]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _tensors(value)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _shapes(leaves: list[Any]) -> str:
    return "(" + ", ".join("None" if t is None else str(list(t.shape)) for t in leaves) + ")"
