"""The tensors in a tree of arguments: lists, tuples, dicts and slices."""

from __future__ import annotations

from typing import Any

from dtorch.tensor import Tensor


def tensors_of(tree: Any) -> list[Any]:
    """All dtorch tensors in an argument tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in tensors_of(item)]
    if isinstance(tree, dict):
        return [t for item in tree.values() for t in tensors_of(item)]
    if isinstance(tree, slice):
        return [t for item in (tree.start, tree.stop, tree.step) for t in tensors_of(item)]
    return []


def with_tensors(tree: Any, tensors: Any) -> Any:
    """The same tree with its dtorch tensors replaced, in order."""
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, list):
        return [with_tensors(item, tensors) for item in tree]
    if isinstance(tree, tuple):
        return tuple(with_tensors(item, tensors) for item in tree)
    if isinstance(tree, dict):
        return {k: with_tensors(v, tensors) for k, v in tree.items()}
    return tree
