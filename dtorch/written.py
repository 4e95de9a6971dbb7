"""Functions that dtorch writes as source and compiles, as ``dataclasses`` does for ``__init__``: the one place that runs such.

Whoever calls it writes names of its own and literals only, nothing that a user's program says.
"""

from __future__ import annotations

import linecache
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

_FILE = str(Path(__file__).with_name("_written.py"))  # no such file: what tracebacks name, and ours by its place


def function(text: str, name: str, names: dict[str, Any], label: str) -> Any:
    """The function ``name`` of a source text. Tracebacks show its lines.

    Args:
        names: its globals.
        label: what tracebacks add to the name of the file.
    """
    known = dict(names)
    exec(_code(text, label), known)
    return known[name]


@lru_cache(maxsize=8192)
def _code(text: str, label: str) -> CodeType:
    file = f"{_FILE}:{label}:{hash(text) & 0xFFFFFFFF:08x}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return compile(text, file, "exec", dont_inherit=True)
