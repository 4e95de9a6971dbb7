"""Which line of the user's code issued a call, kept without walking a traceback."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(__file__)))
INSIDE: dict[str, bool] = {}
"""File name -> whether it is torch's or dtorch's."""


def source(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """Code and instruction offset of the innermost frame that is neither torch's nor dtorch's."""
    found = users(frame) or frame
    return (found.f_code, found.f_lasti) if found is not None else (None, 0)


def users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither torch's nor dtorch's."""
    while frame is not None:
        name = frame.f_code.co_filename
        inside = INSIDE.get(name)
        if inside is None:
            inside = INSIDE[name] = name.startswith(LIBRARIES)
        if not inside:
            return frame
        frame = frame.f_back
    return None


def where() -> str:
    """The user's line that is running, such as "train.py:12"; "" when there is none."""
    frame = users(sys._getframe(1))
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
