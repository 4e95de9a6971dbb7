"""Which functions are straight lines: the judge alone, on small forwards."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from dtorch.modules.binding import why_not
from dtorch.modules.sources import source_tree
from dtorch.modules.straight import SOME, UNKNOWN, Facts, Straight, judge


def judged(body: str, arguments: str = "self, x, y=None", facts: Facts = ()) -> Straight | str:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (tree,) = ast.parse(f"def forward({arguments}):\n{lines}\n").body
    assert isinstance(tree, ast.FunctionDef)
    return judge(tree, facts=facts)


GOOD = {
    "a norm": """
        '''Says what it does.'''
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)""",
    "a multilayer perceptron": "return self.down(self.act(self.gate(x)) * self.up(x))",
    "walrus": "return (z := x + 1) * z",
    "several names at once": "a, b = x.chunk(2, dim=-1)\nreturn functional.silu(a) * b",
    "an annotated name": "z: Tensor = x + y\nreturn z",
    "literal indices": "return x[..., None, :-1] + x[0]",
    "unpacked sizes": "return x.view(*x.shape[:-1], 2, -1)",
    "comparison": "return x * (x > 0)",
    "numbers of math": "return x * math.sqrt(2.0 / math.pi)",
    "a method of its own": "return self._norm(x.float()) * self.weight",
    "deep attributes": "return x.to(self.proj.weight.dtype)",
    "nothing runs after a return": "return x\nreturn x or y",
}

BAD = {
    "branch": ("if x.shape[0] > 1:\n    x = x + 1\nreturn x", "If"),
    "conditional expression": ("return x if y is None else y", "IfExp"),
    "or": ("return x or y", "BoolOp"),
    "not": ("return not x", "UnaryOp"),
    "chained comparison": ("return 0 < x < 1", "Compare"),
    "identity": ("return x is y", "Compare"),
    "membership": ("return x in y", "Compare"),
    "loop": ("for layer in self.layers:\n    x = layer(x)\nreturn x", "For"),
    "while": ("while x:\n    x = x - 1\nreturn x", "While"),
    "comprehension": ("return torch.cat([f(x) for f in self.parts])", "ListComp"),
    "attribute store": ("self.seen = x\nreturn x", "stores into Attribute"),
    "item store": ("x[0] = 1\nreturn x", "stores into Subscript"),
    "augmented": ("x += 1\nreturn x", "AugAssign"),
    "global": ("global count\ncount = 1\nreturn x", "Global"),
    "bare call": ("print(x)\nreturn x", "Expr"),
    "assert": ("assert x.shape\nreturn x", "Assert"),
    "in place": ("return x.add_(1)", "add_ works in place"),
    "out": ("return torch.add(x, 1, out=y)", "out="),
    "double star": ("return torch.add(x, **y)", "out="),
    "nested function": ("def g(z):\n    return z\nreturn g(x)", "FunctionDef"),
    "lambda": ("return (lambda z: z)(x)", "calls what is no name"),
    "calls an argument": ("return y(x)", "calls what is no name"),
    "try": ("try:\n    return x\nfinally:\n    pass", "Try"),
    "with": ("with torch.no_grad():\n    x = x + 1\nreturn x", "With"),
    "delete": ("z = x\ndel x\nreturn z", "Delete"),
    "import": ("import math\nreturn x", "Import"),
    "raise": ("raise ValueError", "Raise"),
    "nothing": ("y = x", "does not end"),
    "yield": ("yield x\nreturn x", "Expr"),
    "await": ("return (yield)", "Yield"),
    "self escapes": ("return helper(self, x)", "self itself is used"),
    "self renamed": ("self = y\nreturn self.weight", "another value"),
    "calls itself": ("return self(x)", "self itself is called"),
    "tensor index": ("return x[y]", "an index that is no literal"),
    "unknown attribute": ("return x.grad", "the attribute grad"),
    "data": ("return x.data", "the attribute data"),
    "formatted": ("return functional.pad(x, f'{y}')", "JoinedStr"),
    "before its value": ("z = z + x\nreturn z", "no value yet"),
    "a dict": ("return {'x': x}", "Dict"),
    "starred target": ("a, *b = x.chunk(3)\nreturn a", "stores into"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_straight_line(name: str) -> None:
    body = "\n".join(line.strip() for line in GOOD[name].strip().splitlines())
    assert isinstance(judged(body), Straight), judged(body)


@pytest.mark.parametrize("name", BAD)
def test_no_straight_line(name: str) -> None:
    body, why = BAD[name]
    found = judged(body)
    assert isinstance(found, str), "is taken for a straight line"
    assert why in found


@pytest.mark.parametrize("arguments", ["self, *x", "self, x, **y", "*x"])
def test_any_number_of_arguments(arguments: str) -> None:
    assert "any number" in str(judged("return 1", arguments))


def test_what_it_refers_to() -> None:
    found = judged(
        "return self.down(torch.relu(self.up(x)) * self.scale).to(torch.float32) * math.sqrt(2.0) + self.weight.dtype"
    )
    assert found == Straight(
        reads={("scale",), ("weight", "dtype")},
        calls={(("down",), ((SOME,), ())), (("up",), ((UNKNOWN,), ()))},
        methods={"to"},
        globals_read={("torch", "float32")},
        globals_called={(("torch", "relu"), ((UNKNOWN,), ()))},
        numbers_called={("math", "sqrt")},
    )


BRANCH = """
if y is not None:
    x = self.with_y(x, y)
else:
    x = self.without(x)
return x * (1 if y is None else 2)
"""

DECIDED: dict[str, tuple[str, Facts, set[str]]] = {
    "None": (BRANCH, (("y", None),), {"without"}),
    "something": (BRANCH, (("y", SOME),), {"with_y"}),
    "a truth": ("if y:\n    return self.on(x)\nreturn self.off(x)", (("y", True),), {"on"}),
    "not": ("if not y:\n    return self.on(x)\nreturn self.off(x)", (("y", False),), {"on"}),
    "and": ("if y is not None and x is None:\n    return self.on(x)\nreturn x", (("x", SOME), ("y", SOME)), set()),
    "or": ("if y is None or x is None:\n    x = self.on(x)\nreturn x", (("y", None),), {"on"}),
    "a call's argument": ("return self.on(x, causal=y is None)", (("y", None),), {"on"}),
    "what is not run may be anything": (
        "if y is None:\n    pass\nelse:\n    print(x)\nreturn self.on(x)", (("y", None),), {"on"}
    ),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_branch_that_is_decided(name: str) -> None:
    body, facts, called = DECIDED[name]
    found = judged(body, facts=facts)
    assert isinstance(found, Straight), found
    assert {path[0] for path, _ in found.calls} == called
    assert isinstance(judged(body), str) or name == "a call's argument", "nothing is known, and still it is straight"


UNDECIDED: dict[str, tuple[str, Facts]] = {
    "unknown": (BRANCH, (("x", SOME),)),
    "truth of something": ("if y:\n    x = x + 1\nreturn x", (("y", SOME),)),
    "another value": ("y = x\nif y is None:\n    x = x + 1\nreturn x", (("y", None),)),
    "a value in one branch": ("if x is None:\n    y = x\nif y is None:\n    x = x + 1\nreturn x", (("x", SOME), ("y", None))),
    "and": ("if x is not None and y:\n    x = x + 1\nreturn x", (("x", SOME), ("y", SOME))),
    "a result": ("if self.on(x) is None:\n    x = x + 1\nreturn x", (("x", SOME),)),
    "a name of the branch that is not run": ("if y is not None:\n    z = x\nreturn z", (("y", None),)),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_branch_that_is_not_decided(name: str) -> None:
    body, facts = UNDECIDED[name]
    assert isinstance(judged(body, facts=facts), str)


def test_what_is_known_goes_on_into_calls() -> None:
    found = judged("return self.on(x, y, None, flag=y is None, other=self.eps)", facts=(("y", None),))
    assert isinstance(found, Straight)
    given = ((UNKNOWN, None, None), (("flag", True), ("other", UNKNOWN)))
    assert found.calls == {(("on",), given)}
    found = judged("return self.on(*y, None)")
    assert isinstance(found, Straight)
    assert found.calls == {(("on",), None)}  # nobody knows which argument that is


# ---- what names stand for


class Base(torch.nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.part = torch.nn.Linear(3, 3)
        self.eps = 1e-6
        self.sizes = [1, 2]
        self.shape = (3, 3)


def halved(x: Any) -> Any:
    return x / 2


def noisy(x: Any) -> Any:
    return x + torch.rand(3)


COUNT = [0]
THREE = 3


class Reads(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halved(self.part(x)) * self.weight * self.scale + self.eps * THREE * math.sqrt(2.0)


class Tuples(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.shape[:-1], self.weight, None, self.eps)


class Methods(Base):
    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x.float())


class Lists(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.sizes)


class Globals(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * COUNT


class Random(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(x)


class Items(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.item()


class Property(Base):
    @property
    def factor(self) -> float:
        return 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Lookups(Base):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Calls(Base):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class CallsPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.part = Calls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


class Mutable(Base):
    def forward(self, x: torch.Tensor, seen: Any = []) -> torch.Tensor:  # noqa: B006
        return x * self.weight


class Unregistered(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"a": torch.ones(3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


class Changing(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part.float()(x)


class Unknown(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x, x))


def closing(factor: int) -> torch.nn.Module:
    class Closes(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return Closes()


def own_forward() -> torch.nn.Module:
    made = Reads()
    made.forward = lambda x: x  # type: ignore[method-assign]
    return made


def hooked_part() -> torch.nn.Module:
    made = Reads()
    made.part.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize("kind", [Reads, Tuples, Methods, torch.nn.Linear, torch.nn.LayerNorm, torch.nn.GELU])
def test_a_straight_module(kind: Any) -> None:
    made = kind(3, 3) if kind is torch.nn.Linear else kind(3) if kind is torch.nn.LayerNorm else kind()
    assert why_not(made) == ""


CROOKED: list[tuple[Callable[[], torch.nn.Module], str]] = [
    (Lists, "may change"), (Globals, "may change"), (Random, "calls torch.rand"), (Items, "the method item"),
    (Property, "may change"), (Lookups, "a way of its own"), (Calls, "a way of its own"), (CallsPart, "a way of its own"),
    (Mutable, "may change"), (Unregistered, "may change"), (Changing, "calls"), (Unknown, "no global name"),
    (lambda: closing(2), "no plain function"), (own_forward, "a forward of its own"), (hooked_part, "has hooks"),
    (lambda: torch.nn.Sequential(torch.nn.ReLU()), "For"), (lambda: torch.nn.Conv2d(1, 1, 1), "If"),
    (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)), ""),
]  # fmt: skip


@pytest.mark.parametrize(("make", "why"), CROOKED)
def test_no_straight_module(make: Callable[[], torch.nn.Module], why: str) -> None:
    found = why_not(make())
    assert found
    assert why in found


def test_hooks_around_all_modules() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "all modules" in why_not(Reads())
    finally:
        handle.remove()


def test_a_source_is_believed_only_if_it_gives_the_same_code() -> None:
    tree = source_tree(halved.__code__)
    assert tree is not None
    assert tree.name == "halved"
    assert source_tree(halved.__code__.replace(co_consts=(None, 3))) is None
    known: dict[str, Any] = {}
    exec("def nowhere(x):\n    return x", known)
    assert source_tree(known["nowhere"].__code__) is None
