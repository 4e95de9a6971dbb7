"""Torch's own factories inside ``with mesh:``: ``torch.zeros(3)`` gives a dtorch tensor on that mesh.

A torch function mode stands on the thread's mode stack for as long as a ``with mesh:`` block is open on that thread.
It asks which mesh is in force in the running task, so tasks that interleave on one thread do not see each other's
mesh; where none is in force it passes everything on.

``factories_on`` does the like inside the forward of a distributed module, where factories give torch-faced tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from sys import _getframe
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from dtorch import creation
from dtorch.face import TorchTensor, answer, faced
from dtorch.mesh import DeviceMesh, current_mesh, on_enter, on_exit
from dtorch.tensor import TORCH, Tensor


def _from_data(make: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` and its like keep keywords that mean nothing on a mesh."""

    def call(data: Any, *args: Any, pin_memory: bool = False, copy: bool | None = None, **kwargs: Any) -> Any:
        return make(data, *args, **kwargs)

    return call


_FACTORIES: dict[Any, Callable[..., Any]] = {
    **{factory.fn: factory for factory in creation.FACTORIES.values()},
    torch.tensor: _from_data(creation.tensor),
    torch.as_tensor: _from_data(creation.as_tensor),
    torch.asarray: _from_data(creation.as_tensor),
    torch.scalar_tensor: _from_data(creation.tensor),
}


def _beside(make: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that was given dtorch tensors: sizes, limits, or ``out``, which says where the result lives."""

    def call(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
        if out is None:
            return make(*args, **kwargs)
        kwargs.pop("device", None)
        return make(*args, out=out, device_mesh=out.device_mesh, placements=out.placements, **kwargs)

    return call


for _factory in creation.FACTORIES.values():
    TORCH.setdefault(_factory.fn, _beside(_factory))


def _stays_plain(kwargs: dict[str, Any]) -> bool:
    """Whether the call asks for what a mesh does not have: the meta device, or a plain tensor to write into."""
    device = kwargs.get("device")
    if device is not None and not isinstance(device, DeviceMesh) and torch.device(device).type == "meta":
        return True
    return isinstance(kwargs.get("out"), torch.Tensor)


class MeshMode(TorchFunctionMode):
    """Sends torch's factories to the mesh in force, and everything else where it would go without the mode."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if Tensor in types:
            op = TORCH.get(func)
            if op is not None:
                return op(*args, **kwargs) if kwargs else op(*args)
        make = _FACTORIES.get(func)
        if make is None or current_mesh() is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        return func(*args, **kwargs) if _stays_plain(kwargs) else make(*args, **kwargs)


_num_modes: Callable[[], int] = torch._C._len_torch_function_stack
_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
_push: Callable[[TorchFunctionMode], None] = overrides._push_mode
_pop: Callable[[], TorchFunctionMode] = overrides._pop_mode


def has_other_modes() -> bool:
    """Whether a torch function mode of somebody else is in force on this thread."""
    for at in range(_num_modes()):  # noqa: SIM110  # any() of a generator takes twice as long
        if type(_mode_at(at)) not in _OURS:
            return True
    return False


class _Depth(threading.local):
    """Open ``with mesh:`` blocks of a thread, and the mode that stands for them."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.mode = MeshMode()


_depth = _Depth()


def _enter(mesh: DeviceMesh) -> None:
    if _depth.num_blocks == 0:
        _push(_depth.mode)
    _depth.num_blocks += 1


def _exit() -> None:
    # A block may end on another thread than it began on (a generator that is closed late): there is nothing to take
    # away.
    if _depth.num_blocks == 0:
        return
    _depth.num_blocks -= 1
    if _depth.num_blocks == 0:
        _remove(_depth.mode)


class FaceMode(TorchFunctionMode):
    """Sends torch's factories to one mesh, with the torch face: what the forward of a plain module makes beside its
    inputs (positions, masks, caches) is then recorded like all else. What is made of given data stays plain."""

    def __init__(self, mesh: DeviceMesh, owner: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.owner = owner

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        make = _SHAPED.get(func)
        if make is None:
            if types == _FACES and not _num_modes():  # nobody else is to be asked: without torch's way there
                return answer(func, args, kwargs or _NONE, _getframe(1))
            return func(*args, **kwargs) if kwargs else func(*args)
        given = dict(kwargs or {})
        device = given.pop("device", None)
        is_here = device is None or torch.device(device).type == self.mesh.device_type
        if not is_here or given.get("out") is not None or given.get("generator") is not None:
            return func(*args, **(kwargs or {}))
        return faced(make(*args, device_mesh=self.mesh, **given))


_FACES = (TorchTensor,)
_OURS = (FaceMode, MeshMode)
_NONE: dict[str, Any] = {}
_SHAPED: dict[Any, Callable[..., Any]] = {factory.fn: factory for factory in creation.FACTORIES.values()}


def factories_on(mesh: DeviceMesh, owner: Any) -> None:
    """From here on this thread's factories make torch-faced tensors on ``mesh``, until ``factories_off(owner)``."""
    _push(FaceMode(mesh, owner))


def factories_off(owner: Any) -> None:
    """Take back the latest ``factories_on`` of ``owner`` on this thread."""
    for entry in reversed(_modes()):
        if isinstance(entry, FaceMode) and entry.owner is owner:
            _remove(entry)
            return


def _remove(mode: TorchFunctionMode) -> None:
    """Take ``mode`` off the stack; modes that other tasks have pushed above it stay."""
    if not _num_modes():
        return
    top = _pop()
    if top is mode:
        return
    _push(top)
    if not any(entry is mode for entry in _modes()):
        return
    above = []
    while (top := _pop()) is not mode:
        above.append(top)
    for entry in reversed(above):
        _push(entry)


on_enter.append(_enter)
on_exit.append(_exit)
