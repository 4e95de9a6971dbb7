"""Where an instruction of compiled code stands in its source."""

from __future__ import annotations

from types import CodeType


def locate(code: CodeType | None, offset: int) -> tuple[str, int] | None:
    """File name and line number of the instruction at ``offset`` of ``code``."""
    if code is None:
        return None
    line: int | None = code.co_firstlineno
    for start, stop, number in code.co_lines():
        if start <= offset < stop and number is not None:
            line = number
            break
    return code.co_filename, line or 0
