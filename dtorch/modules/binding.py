"""Which modules are straight lines, and what has to stay as it is for that.

``bind`` goes through a module's ``forward`` and all that it calls (``straight.py`` reads each, knowing of arguments what the
call shows), looks up every name, and notes where it was found: a ``Bound`` holds as long as each of these places holds the same
object. Parameters and buffers are not part of that: they are inputs, looked up anew at each call.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from dtorch.modules.around import Gather
from dtorch.modules.playing import ABSENT, EMPTY, EQUAL, SAME, TENSOR, Places, Shape
from dtorch.modules.sources import source_tree
from dtorch.modules.straight import FACTS, UNKNOWN, Fact, Facts, Given, Path, Straight, fact_of, judge
from dtorch.nn import module as native
from dtorch.ops._op import Op
from dtorch.ops.table import FUNCTIONAL, METHODS, OPS
from dtorch.tensor import TORCH

MAX_DEPTH = 8
"""Functions within functions that are looked into."""

_Module = torch.nn.Module
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS]
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format)
_COMPOSITES = frozenset({"to", "type", "type_as", "contiguous", "view_as", "reshape_as", "expand_as", "narrow", "select"})
"""Methods made of several ops that read no values."""
_ASKING = frozenset({"size", "dim", "numel", "stride"})
_MISSING = object()
_WAYS_IN = {name: getattr(_Module, name) for name in ("__call__", "_call_impl", "__getattr__")}
_NATIVE_WAYS = {name: getattr(native.Module, name) for name in ("__call__", "_call_placed", "_placed", "__getattr__")}
_AROUND = ("redistribute_input", "redistribute_output")


class Unfit(Exception):
    """Why a module is not called as a straight line."""


@dataclass
class Bound:
    """A module whose forward is a straight line.

    Attributes:
        kind: what two modules share whose forwards record the same calls for inputs of the same specs. Hashable.
        inputs: expressions for its parameters and buffers, see ``playing.py``.
        places: what has to stay as it is.
    """

    kind: Any
    inputs: list[str]
    places: Places


def bind(module: torch.nn.Module, shape: Shape) -> Bound | None:
    """``module``, called like that, as a straight line; None where it is none."""
    try:
        return _Binder(module, shape).bound()
    except Unfit:
        return None


def usual_shape(module: torch.nn.Module) -> Shape:
    """A call with a tensor for each argument that has no default."""
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    return ((None, TENSOR),) * (0 if code is None else max(code.co_argcount - 1 - len(forward.__defaults__ or ()), 0))


def why_not(module: torch.nn.Module, shape: Shape | None = None) -> str:
    """Why ``module``, called like that, is no straight line; "" where it is one."""
    try:
        _Binder(module, usual_shape(module) if shape is None else shape).bound()
    except Unfit as why:
        return str(why)
    return ""


class _Binder:
    def __init__(self, module: torch.nn.Module, shape: Shape) -> None:
        self._module = module
        known = [(name, fact_of(entry)) for name, entry in shape]
        by_name = sorted((name, fact) for name, fact in known if name is not None)
        self._given: Given = tuple([fact for name, fact in known if name is None]), tuple(by_name)
        self._places = Places()
        self._parts = {id(module): 0}
        self._params: dict[tuple[int, str], int] = {}
        self._inputs: list[str] = []
        self._kinds: dict[tuple[int, Given], Any] = {}
        for hooks in _GLOBAL_HOOKS:
            if hooks:
                raise Unfit("hooks are called around all modules")
            self._places.require(f"not {self._places.name(hooks)}")
        for name in _WAYS_IN:
            self._expect_attribute(_Module, name)
        if isinstance(module, native.Module):
            for name in _NATIVE_WAYS:
                self._expect_attribute(native.Module, name)
            self._places.require(f"not {self._places.name(native.watchers)}")

    def bound(self) -> Bound:
        return Bound(self._of_module(self._module, 0, self._given), self._inputs, self._places)

    def _members(self, module: torch.nn.Module) -> str:
        """The name of a module's ``__dict__``."""
        return f"d{self._parts[id(module)]}"

    def _expect(self, home: str, name: str, value: Any) -> None:
        """From now on ``home[name]`` is to be ``value``."""
        self._places.entry(home, name, ABSENT if value is _MISSING else SAME, value)

    def _expect_attribute(self, owner: Any, name: str) -> Any:
        """The attribute of a class or function, which is to stay."""
        found = getattr(owner, name, None)
        self._places.attribute(owner, name, found)
        return found

    # ---- modules and functions: the answer is what kind of straight line it is

    def _of_module(self, module: torch.nn.Module, depth: int, given: Given) -> Any:
        known = self._kinds.get((id(module), given))
        if known is not None:
            return known
        kind, members, home = type(module), module.__dict__, self._members(module)
        _check_class(kind)
        if "forward" in members:
            raise Unfit(f"this {kind.__name__} has a forward of its own")
        is_native = issubclass(kind, native.Module)
        if module is not self._module or is_native:
            self._expect(home, "_compiled_call_impl", members.get("_compiled_call_impl", _MISSING))
        if module is self._module:
            self._places.require(f"type(m0) is {self._places.name(kind)}")
        self._expect(home, "forward", _MISSING)
        held = []
        for name in _HOOKS:
            hooks = members[name]
            if not hooks:
                self._places.entry(home, name, EMPTY)
            elif all(type(hook) is Gather for hook in hooks.values()):
                self._places.entry(home, name, EQUAL, dict(hooks))
                held += [hook.axis for hook in hooks.values()]
            else:
                raise Unfit(f"{kind.__name__} has hooks")
        if is_native:
            held += [self._around(module, name, depth) for name in _AROUND]
        forward = self._expect_attribute(kind, "forward")
        made = self._of_function(forward, module, depth, given), tuple(held)
        self._kinds[id(module), given] = made
        return made

    def _around(self, module: torch.nn.Module, name: str, depth: int) -> Any:
        """What a native module does with its inputs or its result."""
        if name in module.__dict__:
            raise Unfit(f"{type(module).__name__} has a {name} of its own")
        self._expect(self._members(module), name, _MISSING)
        found = self._expect_attribute(type(module), name)
        return None if found is None else self._of_function(found, module, depth + 1, None)

    def _of_function(self, function: Any, module: torch.nn.Module | None, depth: int, given: Given) -> Any:
        reads = native.STRAIGHT.get(function) if module is not None and type(function) is FunctionType else None
        if reads is not None and module is not None:
            self._expect_attribute(function, "__code__")
            return (function, *[self._read(module, (name,)) for name in reads])
        if depth > MAX_DEPTH:
            raise Unfit("it calls too deep")
        if type(function) is not FunctionType or function.__closure__ or function.__dict__.get("__wrapped__"):
            raise Unfit(f"{function!r} is no plain function")
        facts = _facts(function, given, module is not None)
        found = _judged(self._expect_attribute(function, "__code__"), module is not None, facts)
        if isinstance(found, str):
            raise Unfit(f"{function.__qualname__} is no straight line: {found}")
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        kind: list[Any] = [function, facts, *map(_constant, defaults)]
        for name in sorted(found.methods):
            if not _is_harmless_method(name):
                raise Unfit(f"{function.__qualname__} calls the method {name}")
        for path in sorted(found.globals_read):
            kind.append((path, _constant(self._global(function, path))))
        for path in sorted(found.numbers_called):
            kind.append((path, self._called(function, path, None, depth, with_tensors=False)))
        for path, passed in sorted(found.globals_called, key=repr):
            kind.append((path, self._called(function, path, passed, depth)))
        if module is not None:
            for path in sorted(found.reads):
                kind.append((path, self._read(module, path)))
            for path, passed in sorted(found.calls, key=repr):
                kind.append((path, "called", self._call(module, path, depth, passed)))
        return tuple(kind)

    # ---- names

    def _global(self, function: FunctionType, path: Path) -> Any:
        home: dict[str, Any] = function.__globals__
        value: Any = None
        for at, name in enumerate(path):
            if name not in home:
                raise Unfit(f"{function.__qualname__} uses {'.'.join(path)}, which is no global name")
            value = home[name]
            self._expect(self._places.name(home), name, value)
            if at < len(path) - 1:
                if type(value) is not ModuleType:
                    raise Unfit(f"{function.__qualname__} uses {'.'.join(path)}")
                getattr(value, path[at + 1], None)  # a module may make its names when they are asked for
                home = value.__dict__
        return value

    def _called(self, function: FunctionType, path: Path, given: Given, depth: int, with_tensors: bool = True) -> Any:
        value = self._global(function, path)
        if is_harmless(value) or (not with_tensors and getattr(math, getattr(value, "__name__", ""), None) is value):
            return value
        if (getattr(value, "__module__", None) or "torch").partition(".")[0] in ("torch", "dtorch"):
            raise Unfit(f"{function.__qualname__} calls {'.'.join(path)}")
        return self._of_function(value, None, depth + 1, given)

    def _read(self, module: torch.nn.Module, path: Path) -> Any:
        """An attribute that is used as a value: a constant, or a parameter or buffer, or a fact about one of these."""
        owner, rest = self._inside(module, path)
        name, after = rest[0], rest[1:]
        if not FACTS.issuperset(after):
            raise Unfit(f"it reads {'.'.join(path)}")
        members, home = owner.__dict__, self._members(owner)
        own = inspect.getattr_static(type(owner), name, _MISSING)
        if name in members:
            if own is not _MISSING and hasattr(type(own), "__get__"):
                raise Unfit(f"{name} is a descriptor of its class")
            self._expect(home, name, members[name])
            return "constant", _constant(members[name]), after
        self._expect(home, name, _MISSING)
        if own is not _MISSING:
            self._expect_attribute(type(owner), name)
            return "constant", _constant(own), after
        for kind in ("_parameters", "_buffers"):
            tensors, where = members[kind], f"{home}[{kind!r}]"
            if name in tensors:
                if tensors[name] is None:
                    self._expect(where, name, None)
                    return "constant", None, after
                at = self._params.setdefault((id(tensors), name), len(self._params))
                if at == len(self._inputs):
                    self._inputs.append(f"{where}[{name!r}]")
                return "input", at, after
            self._expect(where, name, _MISSING)
        raise Unfit(f"it reads {'.'.join(path)}")

    def _call(self, module: torch.nn.Module, path: Path, depth: int, given: Given) -> Any:
        """An attribute that is called: a submodule, a method of the class, a function that the module holds, or a method of a
        tensor that it holds."""
        owner, rest = self._inside(module, path)
        name = rest[0]
        if len(rest) > 1:
            if len(rest) > 2 or not _is_harmless_method(rest[1]):
                raise Unfit(f"it calls {'.'.join(path)}")
            return self._read(owner, (name,))
        members, home = owner.__dict__, self._members(owner)
        own = inspect.getattr_static(type(owner), name, _MISSING)
        if name in members:
            if own is not _MISSING or not is_harmless(members[name]):
                raise Unfit(f"it calls {'.'.join(path)}")
            self._expect(home, name, members[name])
            return members[name]
        self._expect(home, name, _MISSING)
        if own is not _MISSING:
            if owner is not module or type(own) is not FunctionType:
                raise Unfit(f"it calls {'.'.join(path)}")
            self._expect_attribute(type(owner), name)
            return self._of_function(own, module, depth + 1, given)
        part = self._submodule(owner, name)
        return self._of_module(part, depth + 1, given)

    def _inside(self, module: torch.nn.Module, path: Path) -> tuple[torch.nn.Module, Path]:
        """The submodule that a path leads to, and what is left of the path."""
        at = 0
        while at < len(path) - 1 and path[at] in module.__dict__["_modules"] and path[at] not in module.__dict__:
            if inspect.getattr_static(type(module), path[at], _MISSING) is not _MISSING:
                break
            self._expect(self._members(module), path[at], _MISSING)
            module = self._submodule(module, path[at])
            _check_class(type(module))
            at += 1
        return module, path[at:]

    def _submodule(self, owner: torch.nn.Module, name: str) -> torch.nn.Module:
        members, home = owner.__dict__, self._members(owner)
        for kind in ("_parameters", "_buffers"):  # where torch looks first
            if name in members[kind]:
                raise Unfit(f"it calls the tensor {name}")
            self._expect(f"{home}[{kind!r}]", name, _MISSING)
        part = members["_modules"].get(name)
        if not isinstance(part, _Module):
            raise Unfit(f"it calls {name}, which is no submodule")
        known = self._parts.get(id(part))
        if known is None:
            made = self._parts[id(part)] = self._places.part(self._parts[id(owner)], name)
            self._places.require(f"type(m{made}) is {self._places.name(type(part))}")
        else:
            self._places.require(f"{home}['_modules'][{name!r}] is m{known}")
        return part


def _check_class(kind: type[torch.nn.Module]) -> None:
    """Calls and attributes must be torch's, or those of ``dtorch.nn.Module``."""
    is_usual = kind.__getattribute__ is object.__getattribute__ and kind._wrapped_call_impl is _Module._wrapped_call_impl
    ways = _WAYS_IN
    if issubclass(kind, native.Module):
        is_placed = kind.__call__ is native.Module._call_placed
        ways = {**_NATIVE_WAYS, "__call__": kind.__call__} if is_placed else _NATIVE_WAYS
    if not is_usual or any(getattr(kind, name) is not way for name, way in ways.items()):
        raise Unfit(f"{kind.__name__} is called, or looks its attributes up, in a way of its own")


def is_harmless(function: Any) -> bool:
    """Whether calls of ``function`` are ops that neither write nor read values, whatever they are given."""
    if type(function) is functools.partial:
        given = (*function.args, *function.keywords.values())
        return all(type(value) in _CONSTANTS for value in given) and is_harmless(function.func)
    try:
        return function in _harmless_composites() or _is_harmless_op(TORCH.get(function) or _own_functions().get(function))
    except TypeError:  # no name in any table can be looked up
        return False


@cache
def _own_functions() -> dict[Any, Op]:
    """The functions of ``dtorch`` and ``dtorch.nn.functional`` that are ops."""
    return {op.function: op for op in OPS.values()}


@cache
def _harmless_composites() -> frozenset[Any]:
    """Functions made of several ops that ask for no more than whether a number is 0. Draws are seen when they are recorded."""
    names = "dropout", "scaled_dot_product_attention"
    return frozenset(home for name in names for home in (getattr(torch.nn.functional, name), FUNCTIONAL[name]))


def _is_harmless_op(op: Any) -> bool:
    """Draws and writes that do not belong to every call of an op (``inplace=True``) are seen when it is recorded."""
    return type(op) is Op and not op.random and op.writes is None and op.stand_in is None and not op.short_name.endswith("_")


def _is_harmless_method(name: str) -> bool:
    return name in _COMPOSITES or name in _ASKING or (not name.endswith("_") and _is_harmless_op(METHODS.get(name)))


def _constant(value: Any) -> Any:
    """A constant as part of a kind: equal only to the same value of the same type."""
    if type(value) is float:
        return "float", value.hex()
    if type(value) is tuple:
        return ("tuple", *map(_constant, value))
    if isinstance(value, _CONSTANTS):
        return type(value), value
    raise Unfit(f"it uses {value!r:.60}, which may change")


def _facts(function: FunctionType, given: Given, has_self: bool) -> Facts:
    """What is known of a function's arguments in a call."""
    if given is None:
        return ()
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positions = names[has_self : code.co_argcount]
    defaults = function.__defaults__ or ()
    found: dict[str, Any] = dict(zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False))
    found.update(function.__kwdefaults__ or {})
    facts: dict[str, Fact] = {name: fact_of(value) for name, value in found.items()}
    facts.update(zip(positions, given[0], strict=False))
    facts.update(given[1])
    return tuple([(name, facts[name]) for name in names if facts.get(name, UNKNOWN) != UNKNOWN])


@cache
def _judged(code: CodeType, has_self: bool, facts: Facts) -> Straight | str:
    """Of a code object, by its source."""
    if code.co_freevars:
        return "it uses names of a function around it"
    tree = source_tree(code)
    return "its source is not at hand" if tree is None else judge(tree, has_self, facts)
