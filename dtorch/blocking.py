"""A word for whoever blocks a running event loop: which line does, and what to await instead."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from types import FrameType

from dtorch.frames import LIBRARIES
from dtorch.lines import cell_name, line_at
from dtorch.runtime.notebook import in_notebook

MAX_LINES = 4096
"""Lines remembered as warned of; past it they are forgotten together."""

_FORMS = {
    "item": "await x.item_async()",
    "tolist": "await x.tolist_async()",
    "to_torch": "await x.value()",
    "get": "await asyncio.wait_for(x.value(), timeout)",
    "wait": "await asyncio.wait_for(x.value(), timeout)",
    "exception": "await x.value(), which raises it",
    "to_shards": "await x.to_shards_async()",
    "numpy": "(await x).numpy()",
    "__array__": "(await x).numpy()",
    "__repr__": "print(await x)",
    "_repr_html_": "display(await x)",
    "__format__": "f'{await x}'",
    "__bool__": "if await x.item_async(): ...",
    "__contains__": "await (element == x).any().item_async()",
    "__float__": "float(await x.item_async())",
    "__int__": "int(await x.item_async())",
    "__index__": "int(await x.item_async())",
    "__complex__": "complex(await x.item_async())",
    "equal": "torch.equal(await x, await y)",
    "allclose": "torch.allclose(await x, await y)",
    "synchronize": "await dtorch.synchronize_async()",
    "save_safetensors": "await asyncio.to_thread(dtorch.save_safetensors, tensors, path)",
    "__next__": "async for done in dtorch.as_completed(...)",
}
"""What blocks, and its awaitable form."""

_SHOWS = ("__repr__", "_repr_html_", "__format__")
_HERE = os.path.dirname(os.path.abspath(__file__))
_FACE = os.path.join(_HERE, "face.py")
_SHAPES = os.path.join(_HERE, "ops", "shapes.py")
_warned: set[tuple[str, int]] = set()


class BlockingWarning(RuntimeWarning):
    """A value was waited for on a running event loop, which stood still meanwhile. Said once a line."""


def check_loop() -> None:
    """Warn of the user's line if this thread runs an event loop. Call it where a wait is about to block.

    Showing a tensor in a notebook is no offence: cells run on a loop, and nothing else waits for it.
    """
    if asyncio._get_running_loop() is not None:
        _warn(sys._getframe(1))


def _warn(frame: FrameType | None) -> None:
    name, for_shape = "", False
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        code = frame.f_code
        if code.co_filename.startswith(_HERE) and code.co_filename != _FACE and code.co_name != "__torch_function__":
            name = code.co_name  # in the end that of what the user called
            for_shape |= code.co_filename == _SHAPES
        frame = frame.f_back
    if frame is None or (name in _SHOWS and in_notebook()):
        return
    path, line = frame.f_code.co_filename, frame.f_lineno
    if (path, line) in _warned:
        return
    form = _FORMS.get(name)
    if for_shape:
        text = "this waits for the shape of its result and blocks the running event loop; write await dtorch.wait_shape(...)"
    elif form is not None:
        text = f"{name.strip('_')}() blocks the running event loop until the value is there; write {form} instead"
    else:
        text = "this waits for a value and blocks the running event loop meanwhile; await the value before"
    place, source = line_at((path, line), frame.f_globals)
    text = f"{text} ({place}: {source})" if source else f"{text} ({place})"
    warnings.warn_explicit(text, BlockingWarning, cell_name(path) or path, line)
    if len(_warned) >= MAX_LINES:
        _warned.clear()
    _warned.add((path, line))  # not reached when the warning was turned into an error: then every time is one
