"""Code for one pattern of argument types: from a call's arguments to its recorded call, with no argument looked at twice.

Where the types of a call's arguments are known, so is where its tensors, numbers and static arguments stand. A loop over them
would cost more than all the rest, so each pattern gets a function of its own, written here and compiled once a process (as
``dataclasses`` does for ``__init__``); ops share it, each with its own cache. For ``(tensor, tensor)`` it reads

    def way(args, kwargs, frame):
        a0, a1 = args
        sig = known((a0._spec, a1._spec))
        if sig is None:
            return slowly(args, kwargs, frame, cache, (a0._spec, a1._spec))
        ...
        sig.put(((sig.id, slot, a0._slot, a1._slot), code, frame.f_lasti))
        ...

Pure, but for compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from sys import _getframe
from types import FrameType
from typing import Any, NamedTuple

import torch

from dtorch.frames import INSIDE, source
from dtorch.runtime.signature import Signature
from dtorch.tensor import Tensor
from dtorch.written import function

Way = Callable[[tuple[Any, ...], dict[str, Any], FrameType], Any]
"""Records a call of the pattern: (args, kwargs, the caller's frame) -> the result."""

STATIC = frozenset(
    {type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis)}
)
"""Types of arguments that are part of a key as they are."""

OWN, NATIVE, INT, FLOAT, PART, SEQUENCE, LIST = "TNIFSQL"
"""Roles of arguments: a tensor of the face that the pattern is for; a native one where that is another; numbers that vary from
call to call; a static argument; a sequence of such; a list of tensors."""


@dataclass(frozen=True, eq=False)
class Face:
    """How tensors of one face are taken in and given out.

    Attributes:
        kind: their type.
        native: what follows a tensor's name where the native one is meant.
        listed: native tensors of a list that are not all of ``kind``, or None where the list is none of tensors.
        give: source lines that return the native tensor ``out`` of ``spec`` under this face.
        given: the result of the slow paths under this face.
        names: what ``give`` needs.
    """

    kind: type
    native: str
    listed: Callable[[Sequence[Any]], Sequence[Any] | None]
    give: tuple[str, ...]
    given: Callable[[Any], Any]
    names: dict[str, Any]


_INT64, _UINT64 = -(2**63), 2**64 - 1


@lru_cache(maxsize=4096)
def source_of(roles: str, names: tuple[str, ...], face: Face) -> str:
    """The function of a pattern.

    Args:
        roles: of each argument, those given by name last.
        names: of these.
    """
    num_places = len(roles) - len(names)
    lines: list[str] = []
    if num_places:
        lines.append("".join(f"a{i}, " for i in range(num_places)) + "= args")
    lines += [f"a{i} = kwargs[{name!r}]" for i, name in enumerate(names, num_places)]
    lines += [f"a{i} = a{i}{face.native}" for i, role in enumerate(roles) if role == OWN and face.native]
    key, ins, numbers = [], [], []
    for i, role in enumerate(roles):
        if role in (OWN, NATIVE):
            key.append(f"a{i}._spec")
            ins.append(f"a{i}._slot")
        elif role == PART:
            key.append(f"a{i}")
        elif role == SEQUENCE:
            lines += [f"k{i} = (*map(type, a{i}),)", f"if not are_static(k{i}):", f"    {_SLOWLY % 'None'}"]
            key += f"k{i}", f"*a{i}"
        elif role == LIST:
            lines += _of_list(i, face)
            key.append("*specs")
            ins.append("*slots")
        else:
            numbers.append(f"a{i}")
    whole = key[0] if len(key) == 1 and not key[0].startswith("*") else _tuple(key)
    emitted = f"return given(emit(sig, {_tuple((*ins, *numbers))}, source(frame), args))"
    call = _tuple(("sig.id", "slot", *ins, *numbers))
    lines += [f"sig = known({whole})", "if sig is None:", f"    {_SLOWLY % whole}"]
    bounds = [f" or not {_INT64} <= a{i} <= {_UINT64}" for i, role in enumerate(roles) if role == INT]
    lines += [f"if sig.shape{''.join(bounds)}:", f"    {emitted}"]  # several results, or one written in place
    lines += ["try:", "    slot = sig.take()", "except IndexError:", f"    {emitted}"]
    lines += ["code = frame.f_code", "if inside(code.co_filename) is False:"]
    lines += [f"    sig.put(({call}, code, frame.f_lasti))", "else:"]
    lines += [f"    sig.put(({call}, *source(frame)))"]
    lines += ["out = new(Tensor)", "out._spec = spec = sig.spec", "out._slot = slot", *face.give]
    return "def way(args, kwargs, frame):\n" + "".join(f"    {line}\n" for line in lines)


def _tuple(parts: Sequence[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


_SLOWLY = "return slowly(args, kwargs, frame, cache, %s)"


def _of_list(i: int, face: Face) -> list[str]:
    """Two tensors, as mostly, are unpacked by hand."""
    return [
        f"if len(a{i}) == 2 and type(a{i}[0]) is kind is type(a{i}[1]):",
        f"    b, c = a{i}",
        *([f"    b, c = b{face.native}, c{face.native}"] if face.native else []),
        "    specs, slots = (b._spec, c._spec), (b._slot, c._slot)",
        "else:",
        f"    own = listed(a{i})",
        "    if own is None:",
        f"        {_SLOWLY % 'None'}",
        "    specs, slots = (*map(spec_of, own),), (*map(slot_of, own),)",
    ]


_FIND = """\
        if kwargs:
            kinds = (*kwargs, *map(type, args), *map(type, kwargs.values()))
        elif len(args) == 2:
            kinds = type(args[0]), type(args[1])
        elif len(args) == 1:
            kinds = type(args[0])
        else:
            kinds = (*map(type, args),)
        way = known(kinds)
        if way is None:
            way = ways[kinds] = learn(args, kwargs)
"""
_ENTRANCES = f"""\
def entrances(ways, known, learn):
    def record(args, kwargs, frame=None):
        if frame is None:
            frame = getframe(1)
{_FIND}\
        return way(args, kwargs, frame)

    def call(*args, **kwargs):
{_FIND}\
        return way(args, kwargs, getframe(1))

    return record, call
"""


class Entrances(NamedTuple):
    """The functions through which an op is called under one face; both look for the way of the pattern at hand.

    Attributes:
        record: ``record(args, kwargs, frame)``, where ``frame`` is that of the user's line; the caller's when it is left out.
        call: of an op's own arguments, as the user writes them.
    """

    record: Callable[..., Any]
    call: Callable[..., Any]


def entrances(ways: dict[Any, Way], learn: Callable[[tuple[Any, ...], dict[str, Any]], Way]) -> Entrances:
    """The entrances to ``ways``, by types of arguments; ``learn`` makes the way of those that are new."""
    return Entrances(*_entrances(ways, ways.get, learn))


def way_of(
    roles: str,
    names: tuple[str, ...],
    face: Face,
    cache: dict[Any, Signature],
    slowly: Callable[..., Any],
    emit: Callable[..., Any],
) -> Way:
    """The way of calls of one op.

    Args:
        cache: key -> signature, of this op and pattern.
        slowly: ``slowly(args, kwargs, frame, cache, key)`` records a call whose key is not in ``cache``, and puts it there
            unless ``key`` is None.
        emit: ``Op.emit``, for signatures that give no single new tensor, and when no slot is at hand.
    """
    known = {
        **_GLOBALS, **face.names, "kind": face.kind, "listed": face.listed, "given": face.given,
        "cache": cache, "known": cache.get, "slowly": slowly, "emit": emit,
    }  # fmt: skip
    label = f"{roles}:{','.join(names)}:{face.kind.__name__}"
    return function(source_of(roles, names, face), "way", known, label)  # type: ignore[no-any-return]


_HIDDEN = {"__name__": __name__, "__tracebackhide__": True}  # pytest shows the caller's frames, not these
_GLOBALS = {
    "Tensor": Tensor, "new": object.__new__, "source": source, "inside": INSIDE.get, "are_static": STATIC.issuperset,
    "spec_of": attrgetter("_spec"), "slot_of": attrgetter("_slot"), **_HIDDEN,
}  # fmt: skip
_entrances = function(_ENTRANCES, "entrances", {"getframe": _getframe, **_HIDDEN}, "entrances")
