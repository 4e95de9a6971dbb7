"""Code for one kind of straight module: from a call's inputs to its recorded calls, with nothing looked at twice.

A loop over what has to be as before, and one over the calls, would cost about what it saves, so both are written out here and
compiled once for each kind of module, as ``ops/_patterns.py`` does for ops. For a layer with a weight it reads

    def call(*args, **kwargs):
        ...
        is_same = not d0['_forward_hooks'] and 'forward' not in d0 and h3['linear'] is h4 ...
        if is_same:
            p0 = d0['_parameters']['weight']
        ...
        play = plays((a0._spec, p0._spec))
        ...

and what it plays

    def play(frame, i0, i1):
        ...
        put(((s0, r0, i0, i1), *at))
        ...

Pure, but for compiling. Names of attributes come in as literals only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtorch.written import function

TENSOR, STATIC = "tensor", "static"
Entry = str | tuple[int] | bool | None
"""What an argument is: None or a truth itself, ``(n,)`` for a tuple of n tensors, ``TENSOR``, or ``STATIC``: a number, a
dtype."""
Shape = tuple[tuple[str | None, Entry], ...]
"""Arguments of a call: positional ones, whose name is None, and then those that are given by name."""

ABSENT, EMPTY, SAME, EQUAL = "absent", "empty", "same", "equal"
"""What a place is to be: without an entry; false (no hooks); the same object; equal (the plan's own hooks)."""


@dataclass
class Places:
    """What has to be as it was found, as conditions over names; ``names`` are what these stand for.

    No module and no tensor is among ``names``: all are looked up at each call, from the module that is called (``d0`` is its
    ``__dict__``), which must not be held by what is made of this.
    """

    ways: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    _known: dict[int, str] = field(default_factory=dict)
    _num_parts: int = 1

    def name(self, value: Any) -> str:
        """A name for an object."""
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = f"h{len(self.names)}"
            self.names[known] = value
        return known

    def part(self, owner: int, name: str) -> int:
        """A number for the submodule ``name`` of part ``owner``; the module itself is part 0."""
        made, self._num_parts = self._num_parts, self._num_parts + 1
        self.ways += [f"m{made} = d{owner}['_modules'][{name!r}]", f"d{made} = m{made}.__dict__"]
        return made

    def entry(self, home: str, key: str, kind: str, value: Any = None) -> None:
        """What a dict is to have under ``key``."""
        if kind == ABSENT:
            self.require(f"{key!r} not in {home}")
        elif kind == EMPTY:
            self.require(f"not {home}[{key!r}]")
        else:
            self.require(f"{home}[{key!r}] {'is' if kind == SAME else '=='} {self.name(value)}")

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """What an attribute of a class or function is to be."""
        self.require(f"getattr({self.name(owner)}, {name!r}) is {self.name(value)}")

    def require(self, condition: str) -> None:
        if condition not in self.conditions:
            self.conditions.append(condition)


def _found(places: Places, fetch: Sequence[str], otherwise: str, indent: str) -> str:
    """Source lines that look everything up and then ``fetch``."""
    lines = [
        "m0 = reference()", "d0 = m0.__dict__", "try:", *[f"    {line}" for line in places.ways],
        f"    is_same = {' and '.join(places.conditions)}", "    if is_same:", "        pass",
        *[f"        {line}" for line in fetch], "except (KeyError, AttributeError):", "    is_same = False",
        "if not is_same:", f"    return {otherwise}",
    ]  # fmt: skip
    return "".join(f"{indent}{line}\n" for line in lines)


def holding(places: Places, inputs: Sequence[str], names: dict[str, Any]) -> Callable[[], list[Any] | None]:
    """The parameters and buffers, if everything is as it was; else None. Arguments are those of ``calling``."""
    fetch = f"found = [{', '.join(inputs)}]"
    text = f"def holds():\n{_found(places, [fetch], 'None', '    ')}    return found\n"
    return function(text, "holds", {**places.names, **names}, "holds")  # type: ignore[no-any-return]


def calling(places: Places, shape: Shape, inputs: Sequence[str], is_faced: bool, names: dict[str, Any]) -> Any:
    """What ``module(...)`` does for arguments of one shape, none ``STATIC``. All else goes to ``slowly(args, kwargs)``.

    Args:
        inputs: expressions for its parameters and buffers.
        is_faced: tensors are torch-faced.
        names: ``reference`` gives the module; ``plays`` gives what ``playing`` has made for specs of inputs.
    """
    slowly = "return slowly(args, kwargs)"
    positional = [f"a{i}" for i, (name, _) in enumerate(shape) if name is None]
    by_name = [f"a{i} = kwargs[{name!r}]" for i, (name, _) in enumerate(shape) if name is not None]
    lines = [f"if len(args) != {len(positional)} or len(kwargs) != {len(by_name)}:", f"    {slowly}"]
    lines += [f"{', '.join(positional)}, = args"] if positional else []
    lines += ["try:", *[f"    {line}" for line in by_name], "except KeyError:", f"    {slowly}"] if by_name else []
    checks, unpacked, given = [], [], []
    for i, (_, entry) in enumerate(shape):
        if entry is None or type(entry) is bool:
            checks.append(f"a{i} is {entry}")
        elif type(entry) is tuple:
            parts = [f"a{i}_{k}" for k in range(entry[0])]
            checks.append(f"type(a{i}) is tuple and len(a{i}) == {entry[0]}")
            unpacked.append(f"{', '.join(parts)}, = a{i}")
            given += parts
        else:
            given.append(f"a{i}")
    lines += [f"if not ({' and '.join(checks)}):", f"    {slowly}", *unpacked] if checks else []
    params = [f"p{i}" for i in range(len(inputs))]
    both = (*given, *params)
    fetch = [f"{param} = {expression}" for param, expression in zip(params, inputs, strict=True)]
    after = [f"if not ({' and '.join(f'type({name}) is kind' for name in both)}):", f"    {slowly}"] if both else []
    after += [f"{name} = {name}._native" for name in both] if is_faced else []
    after += [
        f"play = plays(({''.join(f'{name}._spec, ' for name in both)}))",
        "if play is None or ((num_modes() != 1 or type(mode_at(0)) is not usual) and has_other_modes()):", f"    {slowly}",
        f"made = play({', '.join(['getframe(2)', *[f'{name}._slot' for name in both]])})",
        "return slowly(args, kwargs) if made is None else made",
    ]  # fmt: skip
    body = [*[f"    {line}\n" for line in lines], _found(places, fetch, "slowly(args, kwargs)", "    ")]
    body += [f"    {line}\n" for line in after]
    text = f"def call(*args, **kwargs):\n{''.join(body)}"
    return function(text, "call", {**places.names, **names}, "call")


def playing(
    steps: Sequence[Any],
    num_inputs: int,
    results: Sequence[int],
    dead: Sequence[Sequence[int]],
    names: dict[str, Any],
    is_tuple: bool,
    is_faced: bool,
) -> Callable[..., Any]:
    """A function (frame, slot of each input) that records the calls and gives the result; None where ops run one by one.

    Args:
        steps: ``tape.Step``; a place below ``num_inputs`` is an input.
        results: their places; ``spec0`` and so on in ``names`` are their specs.
        dead: places of what is dead then, for each mesh; ``dead0`` and so on in ``names`` are their lists.
        is_tuple: the result is a tuple.
        is_faced: tensors are torch-faced.
    """

    def slot(place: int) -> str:
        return f"i{place}" if place < num_inputs else f"r{place - num_inputs}"

    own: dict[str, Any] = {}
    lines, calls, place = [], [], num_inputs
    if any(step.at is None for step in steps):
        lines += ["code = frame.f_code"]
        lines += ["at = (code, frame.f_lasti) if inside(code.co_filename) is False else source(frame)"]
    for i, step in enumerate(steps):
        outs = [slot(place + k) for k in range(step.num_outs)]
        place += step.num_outs
        for out in outs:
            lines += ["try:", f"    {out} = take()", "except IndexError:"]
            lines += ["    if recorder.is_sync:", "        return None"] if out == "r0" else []
            lines += [f"    {out} = recorder.grant()"]
        own[f"s{i}"], own[f"n{i}"], own[f"t{i}"] = step.sig, step.numbers, step.at
        numbers = [f"*n{i}"] if step.numbers else []
        calls.append(f"({', '.join([f's{i}', *outs, *map(slot, step.ins), *numbers])})")
        calls.append("*at" if step.at is None else f"*t{i}")
    lines.append(f"put(({', '.join(calls)}))")
    for i, places in enumerate(dead):  # after their last use was put
        lines += [f"if not dead{i}:", "    wake()", f"dead{i}.extend(({', '.join(map(slot, places))},))"]
    lines += ["if recorder.expects_after_put:", "    recorder.after_put()", "session.num_played += 1"]
    for i, place in enumerate(results):
        lines += [f"o{i} = new(Tensor)", f"o{i}._spec = spec{i}", f"o{i}._slot = {slot(place)}"]
    made = ", ".join(f"faced(o{i})" if is_faced else f"o{i}" for i in range(len(results)))
    lines.append(f"return ({made},)" if is_tuple else f"return {made}")
    given = ", ".join(f"i{i}" for i in range(num_inputs))
    text = f"def play(frame, {given}):\n" + "".join(f"    {line}\n" for line in lines)
    return function(text, "play", {**names, **own}, "play")  # type: ignore[no-any-return]
