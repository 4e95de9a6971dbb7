"""The quick ways through ``Op.record``: one for each pattern of argument types that an op has met.

Where the types of a call's arguments are known, so is where its tensors, numbers and static arguments stand, and no
argument is looked at one by one. A ``Way`` is a function that was found for one pattern; the keys that it gives hold no
types, as each pattern has a cache of its own. Whatever is in no cache goes through ``Op.slowly``, which fills them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from dtorch.frames import INSIDE, source
from dtorch.policy import auto_redistribute
from dtorch.runtime.signature import Signature
from dtorch.tensor import Tensor

if TYPE_CHECKING:
    from dtorch.ops._op import Op

Way = Callable[[tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]
"""Values of the arguments -> (key in the pattern's cache; slots of tensors, then the numbers). Key None: call ``slowly``."""

STATIC = frozenset(
    {type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis)}
)
"""Types of arguments that are part of a key as they are."""
_SEQUENCES = frozenset({tuple, list, torch.Size})
_new = object.__new__
__tracebackhide__ = True  # pytest shows the caller's frames, not these; IPython looks for it among a frame's own variables
_spec, _slot = attrgetter("_spec"), attrgetter("_slot")


class Ways:
    """The patterns that one op has met.

    Attributes:
        faced: pattern with torch faces -> (its way, its cache); see ``face.py``.
        record: ``record(args, kwargs, frame)`` records one call of the op; the result is known by shape, its value comes
            later. ``frame`` is the caller's, from which the user's line is found.
        record_repairing: the same as inside ``auto_redistribute()``.
        slowly_repairing: ``Op.slowly`` inside ``auto_redistribute()``.
    """

    def __init__(self, op: Op) -> None:
        self._found: dict[Any, tuple[Way, dict[Any, Signature]]] = {}
        self.faced: dict[Any, tuple[Way, dict[Any, Signature]]] = {}
        self._tensors: dict[Any, Signature] = {}  # of calls of up to three tensors, or of a tensor and one or two ints
        self._caches = [self._tensors]
        self.record = self._make(op, op.slowly)
        self.slowly_repairing = auto_redistribute()(op.slowly)
        self.record_repairing = self._make(op, self.slowly_repairing)

    def clear(self) -> None:
        self._found.clear()
        self.faced.clear()
        for cache in self._caches:
            cache.clear()

    def new_cache(self) -> dict[Any, Signature]:
        self._caches.append({})
        return self._caches[-1]

    def _make(self, op: Op, slowly: Callable[..., Any]) -> Callable[..., Any]:
        found, of_tensors = self._found, self._tensors
        tensor, no_numbers = Tensor, op.numbers is False

        def record(args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None = None) -> Any:
            if frame is None:
                frame = _getframe(1)
            key: Any
            kinds: Any = None
            ins: tuple[Any, ...]
            cache = of_tensors
            values = args
            if kwargs:
                values = (*args, *kwargs.values())
                kinds = (*kwargs, *map(type, values))
            elif len(args) == 2:
                a, b = args
                kind, last = type(a), type(b)
                if kind is tensor is last:
                    key, ins = (a._spec, b._spec), (a._slot, b._slot)
                elif kind is tensor and last is int and no_numbers:
                    key, ins = (a._spec, b), (a._slot,)
                else:
                    kinds = kind, last
            elif len(args) == 1:
                (a,) = args
                kinds = type(a)
                if kinds is tensor:
                    key, ins, kinds = a._spec, (a._slot,), None
            elif len(args) == 3:
                a, b, c = args
                kind, middle, last = type(a), type(b), type(c)
                if kind is tensor and middle is int is last and no_numbers:
                    key, ins = (a._spec, b, c), (a._slot,)
                elif kind is tensor and middle is tensor is last:
                    key, ins = (a._spec, b._spec, c._spec), (a._slot, b._slot, c._slot)
                else:
                    kinds = kind, middle, last
            else:
                kinds = tuple(map(type, args))
            if kinds is not None:
                known = found.get(kinds)
                if known is None:
                    known = found[kinds] = find_way(op, args, kwargs), {}
                way, cache = known
                key, ins = way(values)
            sig = cache.get(key)
            if sig is None:
                __tracebackhide__ = True
                return slowly(args, kwargs, frame, cache, key)
            if not sig.is_plain:
                return op.emit(sig, ins, source(frame), args)
            try:
                slot = sig.take()
            except IndexError:
                return op.emit(sig, ins, source(frame), args)
            code = frame.f_code
            if INSIDE.get(code.co_filename) is False:
                sig.put(((sig.id, slot, *ins), code, frame.f_lasti))
            else:
                sig.put(((sig.id, slot, *ins), *source(frame)))
            out = _new(tensor)
            out._spec = sig.spec
            out._slot = slot
            return out

        return record


def put(op: Op, sig: Signature, ins: tuple[Any, ...], args: tuple[Any, ...], frame: FrameType) -> Any:
    """Record a call whose signature is known, as the last part of ``record`` does.

    Args:
        ins: slots of the inputs, then the numbers.
    """
    if not sig.is_plain:
        return op.emit(sig, ins, source(frame), args)
    try:
        slot = sig.take()
    except IndexError:
        return op.emit(sig, ins, source(frame), args)
    code = frame.f_code
    if INSIDE.get(code.co_filename) is False:
        sig.put(((sig.id, slot, *ins), code, frame.f_lasti))
    else:
        sig.put(((sig.id, slot, *ins), *source(frame)))
    out = _new(Tensor)
    out._spec = sig.spec
    out._slot = slot
    return out


def find_way(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Way:
    """The way for calls of ``op`` whose arguments have the types of these, under these names."""
    tensors: list[int] = []
    numbers: list[int] = []
    statics: list[int] = []
    sequences: list[int] = []
    values = (*args, *kwargs.values())
    for at, (name, value) in enumerate(zip((*range(len(args)), *kwargs), values, strict=True)):
        kind = type(value)
        if kind is Tensor:
            tensors.append(at)
        elif kind in (int, float) and op.is_number(name):
            numbers.append(at)
        elif kind in STATIC:
            statics.append(at)
        elif kind in _SEQUENCES:
            sequences.append(at)
        else:
            return _unknown
    if "out" in kwargs:
        return _unknown
    if not tensors:
        if len(sequences) == 1 and not numbers:
            return _of_list(sequences[0], _picker(statics))
        return _unknown
    leading = tensors == [*range(len(tensors))]
    if leading and not sequences and not numbers and len(tensors) <= len(LEADING):
        return LEADING[len(tensors)]
    if leading and not sequences and not statics and len(tensors) == 1:
        return _one_and_numbers
    return _mixed(_picker(tensors), _picker(numbers), _picker(statics), _picker(sequences))


def _picker(at: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Takes the items at these places out of a tuple."""
    if not at or at == [*range(at[0], at[-1] + 1)]:
        return itemgetter(slice(at[0], at[-1] + 1) if at else slice(0))
    return itemgetter(*at)


def _unknown(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    return None, ()


# ---- up to four tensors, and after them static arguments: unpacked by hand, which is what makes them quick


def _one_and_statics(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    a = values[0]
    return (a._spec, values[1:]), (a._slot,)


def _two_and_statics(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    a, b = values[0], values[1]
    return (a._spec, b._spec, values[2:]), (a._slot, b._slot)


def _three_and_statics(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    a, b, c = values[0], values[1], values[2]
    return (a._spec, b._spec, c._spec, values[3:]), (a._slot, b._slot, c._slot)


def _four_and_statics(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    a, b, c, d = values[0], values[1], values[2], values[3]
    return (a._spec, b._spec, c._spec, d._spec, values[4:]), (a._slot, b._slot, c._slot, d._slot)


LEADING: dict[int, Way] = {1: _one_and_statics, 2: _two_and_statics, 3: _three_and_statics, 4: _four_and_statics}
"""Number of leading tensors -> the way of calls where nothing but static arguments follows them."""


def _one_and_numbers(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    a = values[0]
    return a._spec, (a._slot, *values[1:])


# ---- any others


def _mixed(
    tensors: Callable[[Any], tuple[Any, ...]],
    numbers: Callable[[Any], tuple[Any, ...]],
    statics: Callable[[Any], tuple[Any, ...]],
    sequences: Callable[[Any], tuple[Any, ...]],
) -> Way:

    def way(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        own = tensors(values)
        key: Any = (*map(_spec, own), statics(values))
        for sequence in sequences(values):
            kinds = (*map(type, sequence),)
            if not STATIC.issuperset(kinds):
                return None, ()
            key = (key, kinds, *sequence)
        return key, (*map(_slot, own), *numbers(values))

    return way


def _of_list(place: int, statics: Callable[[Any], tuple[Any, ...]]) -> Way:
    """One list or tuple of tensors, such as ``cat`` takes, and beside it static arguments."""
    native = {Tensor}

    def way(values: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        own = values[place]
        if len(own) == 2:
            a, b = own
            if type(a) is Tensor is type(b):
                return (a._spec, b._spec, statics(values)), (a._slot, b._slot)
            return None, ()
        if {*map(type, own)} != native:
            return None, ()
        return (*map(_spec, own), statics(values)), tuple(map(_slot, own))

    return way
