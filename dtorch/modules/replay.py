"""Straight modules: a module of a distributed model whose forward is a straight line is recorded once for each kind of input,
and then played.

``attach`` gives a module the attribute that torch's ``Module.__call__`` looks at first, as ``module.compile()`` does; copies
and pickles leave it out. Each call makes sure that nothing has changed which the forward looks at (``Bound.holds``); whenever
that is not so, and for inputs not met before, the module's own code runs, and what it records is looked at (``tape.py``).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from sys import _getframe
from typing import Any

import torch

from dtorch.face import TorchTensor, faced
from dtorch.frames import INSIDE, source
from dtorch.interop import FaceMode, has_other_modes
from dtorch.modules.binding import Bound, bind
from dtorch.modules.playing import calling, holding, playing
from dtorch.modules.tape import tape_of
from dtorch.ops.table import also_cleared
from dtorch.spec import OWN, Spec
from dtorch.tensor import Tensor

MAX_TAPES = 64
"""Kinds of inputs that are kept for one kind of module; past it they are forgotten."""
MAX_CLEARED = 8
"""How often they are forgotten for that, before no more are kept: inputs that are other ones each time are not worth it."""
MAX_KINDS = 4096
"""Kinds of modules that are kept."""
MAX_VAIN = 3
"""Recordings of one kind of input that could not be played before its module's own code runs for good."""
MAX_BINDINGS = 16
"""How often what a module looks at may have changed before its own code runs for good."""

_STATIC = frozenset({type(None), bool, int, str, torch.dtype})


@dataclass(eq=False)
class _Straight:
    """What modules share whose forwards record the same calls.

    Attributes:
        plays: specs of the inputs and other arguments -> what records the calls.
        vain: the same -> how many recordings were in vain.
        num_cleared: how often there were too many kinds of inputs.
    """

    plays: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    vain: dict[Any, int] = field(default_factory=dict)
    num_cleared: int = 0

    def clear(self) -> None:
        self.plays.clear()
        self.vain.clear()
        self.num_cleared = 0


_kinds: dict[Any, _Straight] = {}
_alive: weakref.WeakSet[_Straight] = weakref.WeakSet()


def _forget() -> None:
    """Signatures are forgotten, and with them what calls them."""
    for straight in list(_alive):
        straight.clear()


also_cleared.append(_forget)


def _straight(kind: Any) -> _Straight:
    found = _kinds.get(kind)
    if found is None:
        if len(_kinds) >= MAX_KINDS:
            _kinds.clear()
        found = _kinds[kind] = _Straight()
        _alive.add(found)
    return found


def is_on() -> bool:
    """Whether straight modules are played: unless DTORCH_STRAIGHT=0 says otherwise."""
    return os.environ.get("DTORCH_STRAIGHT", "1") != "0"


def attach(modules: Iterable[torch.nn.Module]) -> None:
    """Let those of the modules be played that are straight lines.

    Args:
        modules: of a distributed model, each after those that it calls.
    """
    for module in modules:
        if _WAY_IN not in module.__dict__:
            bound = bind(module)
            if bound is not None:
                module.__dict__[_WAY_IN] = _Caller(weakref.ref(module), bound).call


_WAY_IN = "_compiled_call_impl"


class _Caller:
    """One module's calls. Does not hold the module, which holds it.

    Attributes:
        call: what the module does when it is called.
    """

    def __init__(self, reference: weakref.ref[torch.nn.Module], bound: Bound) -> None:
        self._reference = reference
        self._num_bindings = 0
        self._bind(bound)

    def _bind(self, bound: Bound) -> None:
        straight = _straight(bound.kind)
        names = {
            "reference": self._reference, "plays": straight.plays.get, "slowly": self.slowly, "face": TorchTensor,
            "usual": FaceMode, "num_modes": torch._C._len_torch_function_stack, "mode_at": torch._C._get_function_stack_at,
            "has_other_modes": has_other_modes, "getframe": _getframe,
        }  # fmt: skip
        self._state = holding(bound.places, bound.inputs, names), straight
        if bound.num_args > 0:
            self.call = calling(bound.places, bound.num_args, bound.inputs, names)
        else:
            self.call = self._any

    def _any(self, *args: Any, **kwargs: Any) -> Any:
        return self.slowly(args, kwargs)

    def slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of any arguments: played if it is known, else by the module's own code, which is looked at."""
        module: Any = self._reference()
        holds, straight = self._state
        params = holds()
        if params is None and self._bind_again(module):
            holds, straight = self._state
            params = holds()
        if params is None or has_other_modes():
            return module._call_impl(*args, **kwargs)
        key: list[Any] = []
        slots: list[int] = []
        names = (*range(len(args)), *kwargs, *[-1] * len(params))
        for name, value in zip(names, (*args, *kwargs.values(), *params), strict=True):
            kind = type(value)
            if kind is TorchTensor:
                native = value._native
                key.append(native._spec if type(name) is int else (name, native._spec))
                slots.append(native._slot)
            elif kind in _STATIC and name != -1:
                key.append((name, kind, value))
            else:
                return module._call_impl(*args, **kwargs)
        frozen = tuple(key)
        play = straight.plays.get(frozen)
        if play is None:
            if straight.vain.get(frozen, 0) >= MAX_VAIN:
                return module._call_impl(*args, **kwargs)
            return _look_on(straight, frozen, module, args, kwargs, slots)
        made = play(_getframe(1), *slots)
        return module._call_impl(*args, **kwargs) if made is None else made

    def _bind_again(self, module: torch.nn.Module) -> bool:
        if self._num_bindings >= MAX_BINDINGS:
            return False
        self._num_bindings += 1
        found = bind(module)
        if found is None:
            return False
        self._bind(found)
        module.__dict__[_WAY_IN] = self.call
        return True


def _look_on(
    straight: _Straight, key: tuple[Any, ...], module: Any, args: Any, kwargs: Any, slots: list[int]
) -> Any:
    """Run the module's own code, and keep the calls that it records for the next time."""
    specs = [spec for part in key for spec in (part if type(part) is tuple else (part,)) if type(spec) is Spec]
    if not specs or len(set(slots)) < len(slots):  # which of two inputs a call uses could not be told
        return module._call_impl(*args, **kwargs)
    session = specs[0].session
    recorder = session.recorder
    outer = source(_getframe(1))
    noted = recorder.mark()
    try:
        result = module._call_impl(*args, **kwargs)
    finally:
        chunk = recorder.since(noted)
    if recorder.is_sync:
        return result
    tape = None
    if type(result) is TorchTensor and all(map(_is_usual, specs)):
        spec = result._native._spec
        if spec.link == OWN and spec.session is session:
            tape = tape_of(chunk, slots, result._native._slot, session.signature_facts, outer)
    if tape is None:
        if len(straight.vain) >= MAX_TAPES:
            straight.vain.clear()
        straight.vain[key] = straight.vain.get(key, 0) + 1
        return result
    if len(straight.plays) >= MAX_TAPES:
        if straight.num_cleared >= MAX_CLEARED:
            return result
        straight.num_cleared += 1
        straight.plays.clear()
    names = {
        "take": recorder.take, "put": recorder.put, "recorder": recorder, "wake": recorder.wake, "session": session,
        "spec": spec, "new": object.__new__, "Tensor": Tensor, "faced": faced, "inside": INSIDE.get, "source": source,
        **{f"dead{i}": recorder.dead_of(mesh) for i, mesh in enumerate(tape.others)},
    }  # fmt: skip
    straight.plays[key] = playing(tape.steps, len(slots), tape.result, list(tape.others.values()), names)
    return result


def _is_usual(spec: Spec) -> bool:
    """Whether calls depend on no more than the spec: not copies that stand for views, nor what may be read as a size."""
    return spec.link == OWN and (bool(spec.shape) or spec.dtype.is_floating_point or spec.dtype.is_complex)
