"""Which line of the user's code issued a call, kept without walking a traceback."""

from __future__ import annotations

import os
from types import CodeType, FrameType

import torch

LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(__file__)))
INSIDE: dict[str, bool] = {}
"""File name -> whether it is torch's or dtorch's."""


def source(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """Code and instruction offset of the innermost frame that is neither torch's nor dtorch's."""
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        inside = INSIDE.get(name)
        if inside is None:
            inside = INSIDE[name] = name.startswith(LIBRARIES)
        if not inside:
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return (first.f_code, first.f_lasti) if first is not None else (None, 0)
