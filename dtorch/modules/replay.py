"""Straight modules: a module of a distributed model whose forward is a straight line is recorded once for each kind of input,
and then played.

``attach`` gives a module the attribute that torch's ``Module.__call__`` looks at first, as ``module.compile()`` does; copies
and pickles leave it out. Each call makes sure that nothing has changed which the forward looks at (``Places``); whenever that
is not so, and for inputs not met before, the module's own code runs, and what it records is looked at (``tape.py``).
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
from dtorch.interop import FaceMode, MeshMode, has_other_modes
from dtorch.modules.binding import bind, usual_shape
from dtorch.modules.playing import STATIC, TENSOR, Entry, Shape, calling, holding, playing
from dtorch.modules.tape import tape_of
from dtorch.nn import module as native
from dtorch.ops.table import also_cleared
from dtorch.policy import is_auto
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
MIN_STEPS = 3
"""Calls of a ``dtorch.nn.Module`` that are worth it."""

_STATIC = frozenset({int, str, torch.dtype})


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
            caller = _Caller(weakref.ref(module), is_faced=True)
            if caller.bind(module, usual_shape(module)) is not None:
                module.__dict__[_WAY_IN] = caller.call


def _straighten(module: Any, num_calls: int) -> Callable[..., Any] | None:
    """For ``dtorch.nn.Module``: one that is called a second time may be a straight line."""
    global _is_on
    if _is_on is None:
        _is_on = is_on()
    if _num_watched:
        return None
    found: Any = None
    if _is_on:
        found = _Caller(weakref.ref(module), is_faced=False).call if num_calls else 1
    module.__dict__[_NATIVE_WAY_IN] = found
    return found if num_calls else None


_WAY_IN, _NATIVE_WAY_IN = "_compiled_call_impl", "_straight"
_is_on: bool | None = None
_num_watched = 0  # modules whose own code is being looked at: what they call is part of that


class _Caller:
    """One module's calls. Does not hold the module, which holds it.

    Attributes:
        call: what the module does when it is called.
    """

    def __init__(self, reference: weakref.ref[torch.nn.Module], is_faced: bool) -> None:
        self._reference = reference
        self._is_faced = is_faced
        self._known: dict[Shape, _Known | None] = {}
        self._num_bindings = 0
        self._num_vain = 0
        self.call: Callable[..., Any] = self._any

    def bind(self, module: torch.nn.Module, shape: Shape) -> _Known | None:
        """Get ready for calls of a shape; None where they are no straight line."""
        if self._num_bindings >= MAX_BINDINGS:
            return None
        self._num_bindings += 1
        bound = bind(module, shape)
        if bound is None:
            self._known.setdefault(shape, None)  # what was known may be so again
            return None
        straight = _straight((bound.kind, shape))
        names = {
            "reference": self._reference, "plays": straight.plays.get, "slowly": self.slowly,
            "kind": TorchTensor if self._is_faced else Tensor, "usual": FaceMode if self._is_faced else MeshMode,
            "num_modes": torch._C._len_torch_function_stack, "mode_at": torch._C._get_function_stack_at,
            "has_other_modes": has_other_modes, "getframe": _getframe,
        }  # fmt: skip
        made = self._known[shape] = holding(bound.places, bound.inputs, names), straight
        if not any(entry == STATIC for _, entry in shape):
            self._answer(module, calling(bound.places, shape, bound.inputs, self._is_faced, names))
        return made

    def _answer(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        """From now on do that when the module is called."""
        home, name = module.__dict__, _WAY_IN if self._is_faced else _NATIVE_WAY_IN
        if home.get(name) == self.call:
            home[name] = call
        self.call = call

    def _in_vain(self, module: torch.nn.Module) -> None:
        """A call could not be played, nor its like."""
        self._num_vain += 1
        if self._num_vain >= MAX_VAIN and not any(self._known.values()):
            home = module.__dict__
            if self._is_faced:
                home.pop(_WAY_IN, None)
            else:
                home[_NATIVE_WAY_IN] = None

    def _any(self, *args: Any, **kwargs: Any) -> Any:
        return self.slowly(args, kwargs)

    def slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of any arguments: played if it is known, else by the module's own code, which is looked at."""
        module: Any = self._reference()
        own_call = module._call_impl if self._is_faced else module._own_call
        tensors: list[Any] = []
        shape: list[tuple[str | None, Entry]] = []
        statics: list[Any] = []
        kind = TorchTensor if self._is_faced else Tensor
        for name, value in (*[(None, value) for value in args], *kwargs.items()):
            entry = _entry(value, kind)
            if entry is _UNFIT:
                self._in_vain(module)
                return own_call(*args, **kwargs)
            if entry == TENSOR:
                tensors.append(value)
            elif entry == STATIC:
                statics.append((type(value), value))
            elif type(entry) is tuple:
                tensors += value
            shape.append((name, entry))
        found = self._params(module, tuple(shape))
        if found is None or has_other_modes():
            return own_call(*args, **kwargs)
        params, straight = found
        if any(type(tensor) is not kind for tensor in params):
            return own_call(*args, **kwargs)
        both = [*tensors, *params]
        if self._is_faced:
            both = [tensor._native for tensor in both]
        slots = [tensor._slot for tensor in both]
        key = (*[tensor._spec for tensor in both], *statics)
        play = straight.plays.get(key)
        if play is not None:
            made = play(_getframe(1), *slots)
            return own_call(*args, **kwargs) if made is None else made
        if straight.vain.get(key, 0) >= MAX_VAIN:
            self._in_vain(module)
            return own_call(*args, **kwargs)
        return _look_on(straight, key, own_call, args, kwargs, slots, self._is_faced)

    def _params(self, module: torch.nn.Module, shape: Shape) -> tuple[list[Any], _Straight] | None:
        """Parameters and buffers of the module for calls of a shape, and what is known of these."""
        known = self._known.get(shape, _UNFIT)
        if known is _UNFIT:
            known = self.bind(module, shape)
        if known is not None:
            params = known[0]()
            if params is None:
                known = self.bind(module, shape)  # something has changed
                params = None if known is None else known[0]()
            if known is not None and params is not None:
                return params, known[1]
        self._in_vain(module)
        return None


_Known = tuple[Callable[[], list[Any] | None], _Straight]
"""What gives a module's parameters and buffers if everything is as it was, and what its calls share with others'."""

_UNFIT: Any = object()


def _entry(value: Any, kind: type) -> Any:
    """What an argument is, see ``playing.py``."""
    found = type(value)
    if found is kind:
        return TENSOR
    if value is None or found is bool:
        return value
    if found is tuple and value and all(type(part) is kind for part in value):
        return (len(value),)  # no bare number: True is 1, as a part of a key
    return STATIC if found in _STATIC else _UNFIT


def _look_on(
    straight: _Straight, key: tuple[Any, ...], own_call: Any, args: Any, kwargs: Any, slots: list[int], is_faced: bool
) -> Any:
    """Run the module's own code, and keep the calls that it records for the next time."""
    global _num_watched
    specs = [spec for spec in key if type(spec) is Spec]
    if not specs or len(set(slots)) < len(slots) or (not is_faced and is_auto()):
        # which of two inputs a call uses could not be told; what is repaired is no straight line elsewhere
        return own_call(*args, **kwargs)
    session = specs[0].session
    recorder = session.recorder
    outer = source(_getframe(1))
    noted = recorder.mark()
    _num_watched += 1
    try:
        result = own_call(*args, **kwargs)
    finally:
        _num_watched -= 1
        chunk = recorder.since(noted)
    if recorder.is_sync:
        return result
    made = result if type(result) is tuple else (result,)
    if is_faced and all(type(out) is TorchTensor for out in made):
        made = tuple([out._native for out in made])
    tape = None
    if made and all(type(out) is Tensor for out in made) and all(map(_is_usual, specs)):
        outs = [out._spec for out in made]
        if all(spec.link == OWN and spec.session is session for spec in outs) and len({out._slot for out in made}) == len(made):
            tape = tape_of(chunk, slots, [out._slot for out in made], session.signature_facts, outer)
    if tape is None or (not is_faced and len(tape.steps) < MIN_STEPS):
        if len(straight.vain) >= MAX_TAPES:
            straight.vain.clear()
        straight.vain[key] = MAX_VAIN if tape is not None else straight.vain.get(key, 0) + 1
        return result
    if len(straight.plays) >= MAX_TAPES:
        if straight.num_cleared >= MAX_CLEARED:
            return result
        straight.num_cleared += 1
        straight.plays.clear()
    names = {
        "take": recorder.take, "put": recorder.put, "recorder": recorder, "wake": recorder.wake, "session": session,
        "new": object.__new__, "Tensor": Tensor, "faced": faced, "inside": INSIDE.get, "source": source,
        **{f"spec{i}": spec for i, spec in enumerate(outs)},
        **{f"dead{i}": recorder.dead_of(mesh) for i, mesh in enumerate(tape.others)},
    }  # fmt: skip
    dead = list(tape.others.values())
    straight.plays[key] = playing(tape.steps, len(slots), tape.results, dead, names, type(result) is tuple, is_faced)
    return result


def _is_usual(spec: Spec) -> bool:
    """Whether calls depend on no more than the spec: not copies that stand for views, nor what may be read as a size."""
    return spec.link == OWN and (bool(spec.shape) or spec.dtype.is_floating_point or spec.dtype.is_complex)


native.straighten = _straighten
