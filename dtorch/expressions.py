"""The user's own words for the inputs of a call: what stands in the source of the line that made it."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from dtorch.frames import INSIDE, source
from dtorch.lines import NOWHERE, Line, line_at
from dtorch.runtime.positions import locate

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


@dataclass(frozen=True)
class Spoken:
    """A call in the user's words.

    Attributes:
        text: source of the expression, or "" when there is none to be found.
        spans: where each tensor input stands in ``text`` (start, stop), and whether parentheses must go around it before a
            method is called on it; None for those that do not stand there as such.
        line: where it stands.
    """

    text: str
    spans: tuple[tuple[int, int, bool] | None, ...]
    line: Line = NOWHERE

    def with_methods(self, methods: Sequence[str]) -> str:
        """The expression with ``.method(...)`` behind each input that has one ("" for none); "" where that cannot be said."""
        edits = []
        for span, method in zip(self.spans, methods, strict=True):
            if method and span is None:
                return ""
            if method and span is not None:
                edits.append((span, method))
        if not self.text or not edits or len({span[:2] for span, _ in edits}) < len(edits):
            return ""
        made = self.text
        for (start, stop, is_compound), method in sorted(edits, reverse=True):
            own = made[start:stop]
            made = made[:start] + (f"({own})" if is_compound else own) + method + made[stop:]
        return made


def spoken(frame: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any], is_tensor: type) -> Spoken:
    """The expression that called an op with these arguments.

    Args:
        frame: of whoever called the op. If that is not the user's, as inside a module, inputs are known by name only.
        is_tensor: inputs are the arguments of this type, in lists too, in order.
    """
    values = list(_leaves((args, kwargs), is_tensor))
    code, offset = source(frame)
    line = line_at(locate(code, offset), None if frame is None else frame.f_globals)
    nothing = Spoken("", (None,) * len(values), line)
    user = frame
    while user is not None and user.f_code is not code:
        user = user.f_back
    if user is None or sys.version_info < (3, 11):
        return nothing
    text = _segment(user, offset)
    try:
        tree = ast.parse(f"({text}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        return nothing
    spans: list[tuple[int, int, bool] | None] = []
    is_direct = frame is not None and INSIDE.get(frame.f_code.co_filename) is False
    nodes = list(_matched(tree, args, kwargs, is_tensor)) if is_direct else []
    if len(nodes) != len(values):
        nodes = [_named(tree, user, value) for value in values]
    for node in nodes:
        spans.append(None if node is None else (*_interval(text, node), not isinstance(node, _ATOMS)))
    return Spoken(text, tuple(spans), line)


def _segment(frame: FrameType, offset: int) -> str:
    """Source of the expression whose instruction is at ``offset``."""
    positions = list(frame.f_code.co_positions())
    first, last, start, stop = positions[offset // 2] if offset // 2 < len(positions) else (None,) * 4
    if first is None or last is None or start is None or stop is None:
        return ""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    if len(lines) != last - first + 1:
        return ""
    data = [line.encode() for line in lines]
    data[-1] = data[-1][:stop]  # columns count bytes
    data[0] = data[0][start:]
    return b"".join(data).decode(errors="replace")


def _leaves(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, kind)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner, kind)
    elif isinstance(value, slice):
        yield from _leaves((value.start, value.stop, value.step), kind)


def _matched(tree: ast.expr, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type) -> Iterator[ast.expr | None]:
    """The node of each tensor, where arguments of the call and parts of the expression correspond."""
    parts: list[ast.expr] = []
    named: dict[str, ast.expr] = {}
    match tree:
        case ast.BinOp(left, _, right):
            parts = [left, right]
        case ast.Compare(left, [_], [right]):
            parts = [left, right]
        case ast.UnaryOp(_, operand):
            parts = [operand]
        case ast.Subscript(whole, index):
            parts = [whole, index]
        case ast.Call(function, given, keywords):
            if any(isinstance(node, ast.Starred) for node in given) or any(word.arg is None for word in keywords):
                return
            named = {word.arg: word.value for word in keywords if word.arg}
            parts = given
            if len(given) + 1 == len(args) and isinstance(function, ast.Attribute):
                parts = [function.value, *given]
    if len(parts) == len(args):
        for value, node in zip(args, parts, strict=True):
            yield from _inner(value, node, kind)
        for name, value in kwargs.items():
            yield from _inner(value, named.get(name), kind)


def _inner(value: Any, node: ast.expr | None, kind: type) -> Iterator[ast.expr | None]:
    if isinstance(value, kind):
        yield node
    elif isinstance(value, (list, tuple)):
        nodes: list[ast.expr | None] = list(node.elts) if isinstance(node, (ast.List, ast.Tuple)) else []
        if len(nodes) != len(value) or any(isinstance(inner, ast.Starred) for inner in nodes):
            nodes = [None] * len(value)
        for part, inner in zip(value, nodes, strict=True):
            yield from _inner(part, inner, kind)


def _named(tree: ast.expr, frame: FrameType, value: Any) -> ast.expr | None:
    """The first name in the expression that stands for ``value``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
            if found is value or (isinstance(found, torch.Tensor) and getattr(found, "native", None) is value):
                return node
    return None


def _interval(text: str, node: ast.expr) -> tuple[int, int]:
    """Where a node stands in the text, whose first line was parsed behind a parenthesis."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def at(line: int, column: int) -> int:
        data = lines[line - 1].encode()
        return starts[line - 1] + len(data[: column - (line == 1)].decode(errors="replace"))

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
