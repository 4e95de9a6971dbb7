"""Gives dtorch.Tensor its methods and operators, all from the op table."""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from types import FunctionType
from typing import Any

import torch

from dtorch.ops._op import Op
from dtorch.ops.table import METHODS, OPS, PUBLIC
from dtorch.tensor import Tensor

_new = object.__new__
Run = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
"""Of arguments and the frame whose line is noted."""
TENSORS = (torch.Tensor, Tensor)
"""Operands that are no other type's turn: what is wrong with one of them is said."""
__tracebackhide__ = True  # as in _ways.py


def method(record: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A plain function, so that it binds as a method."""
    if isinstance(record, FunctionType):
        return record

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return record(self, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = record.__doc__
    return call


def binary(op: Op) -> Callable[[Tensor, Any], Any]:
    """The hot path: an operator of two tensors, or of a tensor and a number, whose signature is known.

    The keys are those of ``Op.record``; whatever is not found there goes the long way.
    """
    cache = op.cache
    tensor = Tensor
    record = op.record

    def call(self: Tensor, other: Any) -> Any:
        kind = type(other)
        try:
            if kind is tensor:
                sig = cache[self._spec, other._spec]
                slot = sig.take()
                frame = _getframe(1)
                sig.put(((sig.id, slot, self._slot, other._slot), frame.f_code, frame.f_lasti))
            elif kind is float or (kind is int and -(2**63) <= other < 2**63):
                sig = cache[self._spec, kind]
                slot = sig.take()
                frame = _getframe(1)
                sig.put(((sig.id, slot, self._slot, other), frame.f_code, frame.f_lasti))
            else:
                sig = None
        except (KeyError, IndexError):
            sig = None
        if sig is None:
            __tracebackhide__ = True
            try:
                return record((self, other), {}, _getframe(1))
            except TypeError:  # as torch's operators do: the other operand's turn, or what Python makes of it
                if isinstance(other, TENSORS):
                    raise
                return NotImplemented
        out = _new(tensor)
        out._spec = sig.spec
        out._slot = slot
        return out

    return call


def unary(op: Op) -> Callable[[Tensor], Any]:
    record = op.record

    def call(self: Tensor) -> Any:
        return record((self,), {}, _getframe(1))

    return call


def operator(run: Run, name: str, doc: str | None = None) -> Callable[[Any, Any], Any]:
    """An operator of two, of either face, apart from the hot ones: an operand that it cannot take is left to Python."""

    def call(self: Any, other: Any) -> Any:
        __tracebackhide__ = True
        try:
            return run((self, other), {}, _getframe(1))
        except TypeError:
            if isinstance(other, TENSORS):
                raise
            return NotImplemented

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


def recording(record: Callable[..., Any]) -> Run:
    return record.record if isinstance(record, Op) else lambda args, kwargs, frame: record(*args, **kwargs)


def is_operator(name: str) -> bool:
    return name.startswith("__") and name not in ("__getitem__", "__setitem__")


_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
_REVERSED = {"radd": "add", "rmul": "mul", "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor"}
_UNARY = {"neg": "neg", "pos": "positive", "abs": "abs", "invert": "bitwise_not"}
_IN_PLACE = {
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ifloordiv": "floor_divide_", "imod": "remainder_",
    "ipow": "pow_", "iand": "bitwise_and_", "ior": "bitwise_or_", "ixor": "bitwise_xor_",
    "ilshift": "bitwise_left_shift_", "irshift": "bitwise_right_shift_",
}  # fmt: skip


def _attach() -> None:
    for name, record in METHODS.items():
        if name not in Tensor.__dict__ and name not in ("size", "dim"):
            if is_operator(name):
                setattr(Tensor, name, operator(recording(record), name, record.__doc__))
            else:
                setattr(Tensor, name, record.function if isinstance(record, Op) else method(record, name))
    for name, target in _BINARY.items():
        op = OPS.get(f"torch.{target}")
        if op is not None:
            setattr(Tensor, f"__{name}__", binary(op))
    for name, target in _REVERSED.items():
        op = OPS.get(f"torch.{target}")
        if op is not None:
            setattr(Tensor, f"__{name}__", binary(op))  # these commute
    for name, target in _UNARY.items():
        op = OPS.get(f"torch.{target}")
        if op is not None:
            setattr(Tensor, f"__{name}__", unary(op))
    for name, target in _IN_PLACE.items():
        found = METHODS.get(target)
        if found is not None:
            setattr(Tensor, f"__{name}__", operator(recording(found), f"__{name}__", found.__doc__))

    def from_table(name: str) -> Callable[..., Any]:
        return PUBLIC[name]

    def rsub(self: Tensor, other: Any) -> Any:
        return from_table("rsub")(self, other)

    def rtruediv(self: Tensor, other: Any) -> Any:
        return self.reciprocal() * other

    def rpow(self: Tensor, other: Any) -> Any:
        return from_table("pow")(other, self)

    def rfloordiv(self: Tensor, other: Any) -> Any:
        return OPS["torch.Tensor.__rfloordiv__"](self, other)

    def rmod(self: Tensor, other: Any) -> Any:
        return from_table("remainder")(other, self)

    def rmatmul(self: Tensor, other: Any) -> Any:
        return from_table("matmul")(other, self)

    for made in (rsub, rtruediv, rpow, rfloordiv, rmod, rmatmul):
        setattr(Tensor, f"__{made.__name__}__", operator(recording(made), f"__{made.__name__}__"))


_attach()
