"""The source of a function as a tree, where it is certain that the function was made of it."""

from __future__ import annotations

import ast
import linecache
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import TypeVar

_SAME = (
    "co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount",
    "co_posonlyargcount",
)  # fmt: skip
"""What two code objects share that do the same."""

T = TypeVar("T")
_Place = tuple[str, int]  # name of a function, and the first of its lines


def source_tree(code: CodeType) -> ast.FunctionDef | None:
    """The function's source; None where it is not at hand, or has changed since the function was made."""
    trees, codes = _file(code.co_filename)
    place = code.co_name, code.co_firstlineno
    tree, again = trees.get(place), codes.get(place)
    if tree is None or again is None:
        return None
    return tree if all(repr(getattr(code, name)) == repr(getattr(again, name)) for name in _SAME) else None


@lru_cache(maxsize=4)
def _file(name: str) -> tuple[dict[_Place, ast.FunctionDef], dict[_Place, CodeType]]:
    """Functions of a file: as they are written, and as Python makes them of that. Of two at one place there is none."""
    text = "".join(linecache.getlines(name))
    try:
        tree = ast.parse(text)
        made = compile(text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}, {}
    trees = [(_place(node), node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    codes = [((code.co_name, code.co_firstlineno), code) for code in _inside(made)]
    return _only(trees), _only(codes)


def _place(node: ast.FunctionDef) -> _Place:
    return node.name, min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])


def _inside(code: CodeType) -> Iterator[CodeType]:
    for found in code.co_consts:
        if isinstance(found, CodeType):
            yield found
            yield from _inside(found)


def _only(pairs: list[tuple[_Place, T]]) -> dict[_Place, T]:
    num = Counter(place for place, _ in pairs)
    return {place: found for place, found in pairs if num[place] == 1}
