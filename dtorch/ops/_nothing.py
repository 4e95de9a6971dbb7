"""Plain tensors without elements among the arguments of an op, as caches of keys and values begin with them."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.mesh import DeviceMesh

MAX_NOTHINGS = 256
"""Shapes of tensors without elements that a session keeps."""


def nothing(session: Any, like: torch.Tensor, mesh: DeviceMesh) -> Any:
    """A tensor without elements, of the shape and dtype of ``like``, replicated. It is always the same one, so it is only to
    be read."""
    if session.recorder.is_capturing:  # what is made there belongs to the program
        return session.upload(like, mesh, None)
    key = (tuple(like.shape), like.dtype, mesh)
    made = session.nothings.get(key)
    if made is None:
        if len(session.nothings) >= MAX_NOTHINGS:
            session.nothings.clear()
        made = session.nothings[key] = session.upload(like, mesh, None)
    return made
