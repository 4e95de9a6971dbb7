"""An op during which its process can do nothing else: a call in C that keeps the interpreter's lock."""

from __future__ import annotations

import time

import torch

SECONDS = 4.0


def hold(x: torch.Tensor) -> torch.Tensor:
    """``x``, after about ``SECONDS`` without the lock for anybody else, but for moments between the calls."""
    if x.device.type != "meta":  # there only the shape is asked for
        digits, until = 1 << 20, time.monotonic() + SECONDS
        while time.monotonic() < until:
            began = time.monotonic()
            pow(3, digits)
            if time.monotonic() - began < SECONDS / 8:
                digits *= 2
    return x.clone()
