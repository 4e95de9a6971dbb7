"""Whether a function is a straight line: the same ops in the same order, whatever its tensors hold.

``judge`` looks at the source of a ``forward``: one statement after another, nothing stored but local names, nothing read
but the arguments, attributes of ``self`` and global names, and nothing asked of a tensor that depends on its value. It
does not know what the names stand for: it tells which there are, and ``binding.py`` looks at them. Whatever is not known
here to be harmless is a reason. Of arguments it may be known whether they are None, true or false (``Facts``): a branch
that this decides is no branch. Pure.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

Path = tuple[str, ...]
Fact = str | bool | None
"""What is known of a value: that it is None, True or False; that it is something else (``SOME``); or nothing (``UNKNOWN``)."""
Facts = tuple[tuple[str, Fact], ...]
"""Name of an argument -> what is known of it; what is not named is unknown."""
Given = tuple[tuple[Fact, ...], Facts] | None
"""What is known of a call's arguments, by position and by name; None where ``*`` hides which is which."""

SOME, UNKNOWN = "some", "unknown"
FACTS = frozenset({"shape", "dtype", "device", "ndim", "T", "mT"})
"""Attributes of tensors that do not depend on values."""
_SCALARS = (type(None), bool, int, float, str, type(Ellipsis))


def fact_of(value: object) -> Fact:
    """What there is to know of a value, or of what stands for one."""
    return value if value is None or isinstance(value, bool) else SOME


@dataclass
class Straight:
    """What a straight line refers to.

    Attributes:
        reads: attributes of ``self`` that are read, as ("weight",) or ("proj", "weight", "dtype").
        calls: attributes of ``self`` that are called, and with what.
        methods: names of methods called on tensors (or on sizes, numbers and the like).
        globals_read: global names, with the attributes after them, that are used as values: ("torch", "float32").
        globals_called: those that are called, and with what.
        numbers_called: those that are called with nothing but literals and such global names.
    """

    reads: set[Path] = field(default_factory=set)
    calls: set[tuple[Path, Given]] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    globals_read: set[Path] = field(default_factory=set)
    globals_called: set[tuple[Path, Given]] = field(default_factory=set)
    numbers_called: set[Path] = field(default_factory=set)


class Crooked(Exception):
    """Why a function is no straight line."""


def judge(function: ast.FunctionDef, has_self: bool = True, facts: Facts = ()) -> Straight | str:
    """What the function refers to; or, where it is no straight line, why.

    Args:
        has_self: its first argument is the module; else it is given tensors only.
        facts: what is known of its arguments.
    """
    try:
        return _Judge(function, has_self, facts).found
    except Crooked as why:
        return str(why)


class _Judge:
    def __init__(self, function: ast.FunctionDef, has_self: bool, facts: Facts) -> None:
        self.found = Straight()
        given = function.args
        if given.vararg is not None or given.kwarg is not None:
            raise Crooked("it takes any number of arguments")
        names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        if has_self and (not (given.posonlyargs or given.args) or names[0] in ("", "cls")):
            raise Crooked("it has no self")
        self.own = names.pop(0) if has_self else ""
        self.known = set(names)
        self.is_local = _stored(function)
        if self.own in self.is_local:
            raise Crooked(f"it gives {self.own} another value")
        self.facts = {name: fact for name, fact in facts if name not in self.is_local}
        if not self.returns(function.body):
            raise Crooked("it does not end with its result")

    # ---- statements

    def returns(self, body: list[ast.stmt]) -> bool:
        """Look at statements; whether they end with a result, after which nothing runs."""
        return any(self.statement(node) for node in body)

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assign():
                self.value(node.value)
                for target in node.targets:
                    self.store(target)
            case ast.AnnAssign(value=ast.expr() as value) if node.simple:
                self.value(value)
                self.store(node.target)
            case ast.Return(value=ast.expr() as value):
                self.value(value)
                return True
            case ast.If():
                return self.returns(node.body if self.decided(node.test, node) else node.orelse)
            case ast.Pass() | ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case _:
                raise Crooked(f"line {node.lineno}: {type(node).__name__}")
        return False

    def store(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.known.add(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)) and not any(isinstance(e, ast.Starred) for e in target.elts):
            for element in target.elts:
                self.store(element)
        else:
            raise Crooked(f"line {target.lineno}: stores into {type(target).__name__}")

    # ---- what is known without running anything

    def decided(self, test: ast.expr, node: ast.stmt | ast.expr) -> bool:
        """Which way a condition goes."""
        fact = self.fact(test)
        if isinstance(fact, str):
            raise Crooked(f"line {node.lineno}: {type(node).__name__}")
        return bool(fact)

    def fact(self, node: ast.expr) -> Fact:
        match node:
            case ast.Constant():
                return fact_of(node.value)
            case ast.Name():
                return self.facts.get(node.id, UNKNOWN)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                left = self.fact(node.left)
                return UNKNOWN if left == UNKNOWN else (left is None) == isinstance(node.ops[0], ast.Is)
            case ast.UnaryOp(op=ast.Not()):
                inner = self.fact(node.operand)
                return UNKNOWN if isinstance(inner, str) else not inner
            case ast.BoolOp():
                ends = isinstance(node.op, ast.Or)
                for part in node.values:
                    found = self.fact(part)
                    if isinstance(found, str):
                        return UNKNOWN
                    if bool(found) == ends:
                        break
                return found
            case ast.IfExp():
                test = self.fact(node.test)
                return UNKNOWN if isinstance(test, str) else self.fact(node.body if test else node.orelse)
            case ast.Tuple() | ast.List() | ast.BinOp():
                return SOME
        return UNKNOWN

    def given(self, node: ast.Call) -> Given:
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            return None
        by_name = sorted((keyword.arg or "", self.fact(keyword.value)) for keyword in node.keywords)
        return tuple([self.fact(argument) for argument in node.args]), tuple(by_name)

    # ---- expressions

    def value(self, node: ast.expr) -> bool:
        """Look at an expression that is used as a value; whether it is made of literals and global names alone."""
        match node:
            case ast.Constant():
                if not isinstance(node.value, _SCALARS):
                    raise Crooked(f"line {node.lineno}: a literal of type {type(node.value).__name__}")
                return True
            case ast.Name():
                return self.name(node)
            case ast.Attribute():
                return self.attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.BinOp():
                left, right = self.value(node.left), self.value(node.right)
                return left and right
            case ast.UnaryOp() if not isinstance(node.op, ast.Not):
                return self.value(node.operand)
            case ast.IfExp():
                return self.value(node.body if self.decided(node.test, node) else node.orelse)
            case (ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not())) if not isinstance(self.fact(node), str):
                return False
            case ast.Compare() if len(node.ops) == 1 and not isinstance(node.ops[0], (ast.In, ast.NotIn, ast.Is, ast.IsNot)):
                self.value(node.left)
                self.value(node.comparators[0])
                return False
            case ast.Tuple() | ast.List():
                for element in node.elts:
                    self.value(element.value if isinstance(element, ast.Starred) else element)
                return False
            case ast.Subscript():
                self.value(node.value)
                self.index(node.slice)
                return False
            case ast.NamedExpr():
                self.value(node.value)
                self.store(node.target)
                return False
        raise Crooked(f"line {node.lineno}: {type(node).__name__}")

    def name(self, node: ast.Name) -> bool:
        if node.id == self.own:
            raise Crooked(f"line {node.lineno}: {self.own} itself is used")
        if node.id in self.known:
            return False
        if node.id in self.is_local:
            raise Crooked(f"line {node.lineno}: {node.id} has no value yet")
        self.found.globals_read.add((node.id,))
        return True

    def attribute(self, node: ast.Attribute) -> bool:
        root, path = _chain(node)
        if root is None:
            if node.attr not in FACTS:
                raise Crooked(f"line {node.lineno}: the attribute {node.attr}")
            self.value(node.value)
            return False
        if root == self.own:
            self.found.reads.add(path)
            return False
        if root in self.known or root in self.is_local:
            if not FACTS.issuperset(path) or root not in self.known:
                raise Crooked(f"line {node.lineno}: the attribute {node.attr}")
            return False
        self.found.globals_read.add((root, *path))
        return True

    def call(self, node: ast.Call) -> bool:
        found, function = self.found, node.func
        is_literal = True
        for argument in node.args:
            is_literal = self.value(argument.value if isinstance(argument, ast.Starred) else argument) and is_literal
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg == "out":
                raise Crooked(f"line {node.lineno}: **, or out=")
            is_literal = self.value(keyword.value) and is_literal
        root, path = _chain(function)
        if root is not None and root == self.own:
            if not path:
                raise Crooked(f"line {node.lineno}: {self.own} itself is called")
            found.calls.add((path, self.given(node)))
            return False
        if root is not None and root not in self.known and root not in self.is_local:
            if is_literal:
                found.numbers_called.add((root, *path))
            else:
                found.globals_called.add(((root, *path), self.given(node)))
            return is_literal
        if not isinstance(function, ast.Attribute):
            raise Crooked(f"line {node.lineno}: calls what is no name")
        if function.attr.endswith("_"):
            raise Crooked(f"line {node.lineno}: {function.attr} works in place")
        self.value(function.value)
        found.methods.add(function.attr)
        return False

    def index(self, node: ast.expr) -> None:
        """Of an index only literals are known not to be tensors, whose values might be read."""
        if isinstance(node, ast.Tuple):
            for element in node.elts:
                self.index(element)
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper, node.step):
                if bound is not None:
                    self.index(bound)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self.index(node.operand)
        elif not isinstance(node, ast.Constant) or not isinstance(node.value, _SCALARS):
            raise Crooked(f"line {node.lineno}: an index that is no literal")


def _chain(node: ast.expr) -> tuple[str | None, Path]:
    """``a.b.c`` -> ("a", ("b", "c")); (None, ()) for what does not begin with a name."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    return (node.id, tuple(reversed(path))) if isinstance(node, ast.Name) else (None, ())


def _stored(function: ast.FunctionDef) -> set[str]:
    """Names that are local because something is stored in them."""
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))}
