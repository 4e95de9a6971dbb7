"""A line of the user's code, named and shown as its author knows it: a file's line or a notebook's cell, and the statement."""

from __future__ import annotations

import io
import linecache
import sys
import tokenize
from typing import Any, NamedTuple

MAX_SHOWN = 8
"""Lines of a statement that are shown; of a longer one the rest is left out."""


class Line(NamedTuple):
    """Where a call stands.

    Attributes:
        place: "file.py:12", or "Cell In[3], line 2" in a notebook; "" when nothing is known.
        text: the statement there, over several lines where it spans them; "" when its source is not at hand.
    """

    place: str
    text: str


NOWHERE = Line("", "")


def line_at(at: tuple[str, int] | None, module_globals: dict[str, Any] | None = None) -> Line:
    """The line at (file name, number), numbers counting from 1."""
    if at is None:
        return NOWHERE
    path, number = at
    following = linecache.getlines(path, module_globals)[max(0, number - 1) : number - 1 + MAX_SHOWN]
    return Line(place(path, number), dedented(following[: extent(following)]))


def place(path: str, number: int) -> str:
    """How people call a line: cells of a notebook are code of files that nobody sees."""
    cell = cell_name(path)
    return f"{cell}, line {number}" if cell else f"{path}:{number}"


def cell_name(path: str) -> str:
    """ "Cell In[3]" where ``path`` stands for a cell of IPython; else ""."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = find() if find is not None else None
    name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = name(path) if name is not None else None
    return " ".join(found) if found else ""


def extent(lines: list[str]) -> int:
    """How many of these lines the statement at the first one takes: until all brackets that it opens are closed."""
    depth = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
            elif token.type in (tokenize.NEWLINE, tokenize.NL) and depth <= 0:
                return token.start[0]
            if depth < 0:  # the first line is not the statement's first
                return 1
    except (tokenize.TokenError, SyntaxError):  # it goes on below what is shown, or the text is no Python
        pass
    return len(lines) if depth > 0 else min(1, len(lines))


def dedented(lines: list[str]) -> str:
    """The lines as one text, without the indentation of the first."""
    if not lines:
        return ""
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[min(margin, len(line) - len(line.lstrip())) :].rstrip() for line in lines).strip()
