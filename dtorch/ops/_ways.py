"""The quick ways through ``Op.record``: one for each pattern of argument types that an op has met.

``_patterns.py`` writes them. A pattern's key holds no types, as each has a cache of its own. Whatever is in no cache goes
through ``Op.slowly``, which fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from dtorch.frames import INSIDE, source
from dtorch.ops._patterns import FLOAT, INT, LIST, NATIVE, OWN, PART, SEQUENCE, STATIC, Entrances, Face, Way, entrances, way_of
from dtorch.policy import auto_redistribute, repairing
from dtorch.runtime.signature import Signature
from dtorch.tensor import Tensor

if TYPE_CHECKING:
    from dtorch.ops._op import Op

Learn = Callable[[tuple[Any, ...], dict[str, Any]], Way]
"""The way for a pattern that is new: of the arguments of its first call."""

_SEQUENCES = frozenset({tuple, list, torch.Size})
_new = object.__new__
__tracebackhide__ = True  # pytest shows the caller's frames, not these; IPython looks for it among a frame's own variables


class Ways:
    """The patterns that one op has met.

    Attributes:
        record: ``record(args, kwargs, frame)`` records one call of the op; the result is known by shape, its value comes
            later. ``frame`` is the caller's, from which the user's line is found.
        call: the same of an op's own arguments.
        record_repairing: as ``record``, inside ``auto_redistribute()``.
        slowly_repairing: ``Op.slowly`` inside ``auto_redistribute()``.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        self._known: list[dict[Any, Way]] = []
        self._caches: list[dict[Any, Signature]] = []
        self.slowly_repairing = auto_redistribute()(op.slowly)
        self.record, self.call = self.entrances(lambda args, kwargs: self.way(NATIVES, args, kwargs, op.slowly))
        self.record_repairing = repairing(self.record)

    def clear(self) -> None:
        for known in self._known:
            known.clear()  # and with the ways their caches
        for cache in self._caches:
            cache.clear()

    def new_cache(self) -> dict[Any, Signature]:
        self._caches.append({})
        return self._caches[-1]

    def entrances(self, learn: Learn) -> Entrances:
        """Entrances to ways that ``learn`` gives."""
        ways: dict[Any, Way] = {}
        self._known.append(ways)
        return entrances(ways, learn)

    def way(self, face: Face, args: tuple[Any, ...], kwargs: dict[str, Any], slowly: Callable[..., Any]) -> Way:
        """The way for calls whose arguments have the types of these, under these names."""
        roles = _roles(self._op, face, args, kwargs)
        if roles is None:
            return lambda args, kwargs, frame: slowly(args, kwargs, frame, {}, None)
        return way_of(roles, tuple(kwargs), face, {}, slowly, self._op.emit)


class Front:
    """A function that stands before an op and hands most calls on as they are: the op's ways are quicker for these.

    Args:
        op: what it records by.
        function: the function, for all other calls.
        hands_on: whether it hands on a call of these (args, kwargs), whatever the tensors among them.

    Attributes:
        record: as ``Ways.record``, of any call of the function.
        call: the function, by this way.
    """

    def __init__(
        self, op: Op, function: Callable[..., Any], hands_on: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    ) -> None:
        self.op = op
        self.function = function
        self.hands_on = hands_on
        self.record, call = op.ways.entrances(lambda args, kwargs: op.ways.way(NATIVES, args, kwargs, self._slowly))
        self.call: Callable[..., Any] = wraps(function)(call)

    def _slowly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType, cache: dict[Any, Signature], key: Any
    ) -> Any:
        if key is None or not self.hands_on(args, kwargs):
            return self.function(*args, **kwargs)
        return self.op.slowly(args, kwargs, frame, cache, key)


def _all_native(given: Sequence[Any]) -> Sequence[Any] | None:
    return given if {*map(type, given)} == {Tensor} else None


NATIVES = Face(Tensor, "", _all_native, ("return out",), lambda made: made, {})
"""``dtorch.Tensor``."""


def _roles(op: Op, face: Face, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The role of every argument; None where some argument has none."""
    if "out" in kwargs:
        return None
    roles = ""
    values = (*args, *kwargs.values())
    for name, value in zip((*range(len(args)), *kwargs), values, strict=True):
        kind = type(value)
        if kind is face.kind:
            roles += OWN
        elif kind is Tensor:
            roles += NATIVE
        elif kind in (int, float) and op.is_number(name):
            roles += INT if kind is int else FLOAT
        elif kind in STATIC:
            roles += PART
        elif kind in _SEQUENCES:
            roles += SEQUENCE
        else:
            return None
    if OWN in roles:
        return roles
    if roles.count(SEQUENCE) == 1 and not {INT, FLOAT, NATIVE} & {*roles}:  # what ``cat`` takes
        return roles.replace(SEQUENCE, LIST)
    return None


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
