"""Ops that users bring: ``dtorch.register_op("package.module:function", rule=...)``.

Only the name travels. A worker imports the function from its own installation, and only when the client has announced
the name before; the announcement goes to every worker of the session, also to those that start later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from dtorch.ops._call import Call, Rule, Sig
from dtorch.ops._op import Op
from dtorch.ops._rules import pointwise, replicate_only
from dtorch.ops.table import OPS
from dtorch.placement import Placement
from dtorch.runtime.controller import Sent
from dtorch.runtime.signature import Signature
from dtorch.tensor import TORCH
from dtorch.transport.messages import Allow

PREFIX = "custom:"
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FAMILIES: dict[str, Rule] = {"pointwise": pointwise(), "replicate": replicate_only}

_allowed: set[str] = set()

Pair = tuple[Sequence[Placement], "Placement | Sequence[Placement]"]
"""Placements of the tensor inputs, and of the result or results, on one mesh axis."""


class CustomOp(Op):
    """A row of the op table that a user has added. Its name is announced to a session before the first call there."""

    repeatable = True

    def signature(self, session: Any, *args: Any, **kwargs: Any) -> Signature:
        announce(session)
        if not self.repeatable:
            kwargs["params"] = {**(kwargs.get("params") or {}), "repeatable": False}
        return super().signature(session, *args, **kwargs)


def register_op(
    path: str,
    rule: str | Rule | Iterable[Pair] | None = None,
    *,
    numbers: bool | Iterable[int | str] = False,
    random: bool = False,
    writes: int | None = None,
    is_view: bool = False,
    repeatable: bool = True,
) -> CustomOp:
    """Add an op whose function the workers import by name. What is returned is called with dtorch tensors.

    The function takes and gives torch tensors and must also run on zeros of the arguments' shapes (on torch's meta
    device when they are large), because that is how the shape of its result is found. Registering a path again
    replaces it.

    Args:
        path: "package.module:function", importable here and by the workers (they inherit ``sys.path``).
        rule: on which pieces the function may run.
            None or "replicate": on whole tensors only. "pointwise": elementwise with broadcasting.
            Pairs of (placements of the tensor inputs, placement of the result): each says that the function, given such
            pieces, gives such a piece, on any mesh axis: ``[((Shard(0), Replicate()), Shard(0))]``.
            A function of a ``Call`` that gives a list of ``Sig``, as the op table's own rules.
        numbers: arguments (positions and names, True for all) whose numbers vary from call to call.
        random: it draws; then it runs once for the whole tensor.
        writes: the tensor input that it writes in place and returns.
        is_view: the result shares memory with its first input.
        repeatable: it may run again when a worker was lost (docs/failure.md). False for one that does more than compute:
            its results are then lost with the worker.

    Raises:
        ValueError: the path or the rule is written wrongly, or names the ``__main__`` module, which workers do not have.
        ImportError, AttributeError: there is no such module or function.
        TypeError: it is not callable.
    """
    fn = _import(path)
    name = PREFIX + path
    varies: frozenset[int | str] | bool = numbers if isinstance(numbers, bool) else frozenset(numbers)
    op = CustomOp(name, fn, _rule_of(rule), numbers=varies, random=random, writes=writes, is_view=is_view)
    op.repeatable = repeatable
    op.__name__ = op.__qualname__ = path.rpartition(":")[2]
    OPS[name] = op
    _allowed.add(name)
    if isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        TORCH[fn] = op  # calls of torch.ops.library.name reach it too
    return op


def announce(session: Any) -> None:
    """Tell the session's workers which names they may import, unless they know."""
    names = frozenset(_allowed)
    if getattr(session, "_announced", None) == names:
        return
    session.recorder.flush()
    session.thread.post(Sent(Allow(session.number, tuple(sorted(names)))))
    session._announced = names


def allow(names: Iterable[str]) -> None:
    """A worker's side of ``announce``."""
    _allowed.update(names)
    _load.cache_clear()


def load(name: str) -> Callable[..., Any]:
    """The function of a custom op, for workers. Raises KeyError for names that nobody announced."""
    op = OPS.get(name)
    if op is not None:  # registered before this worker was forked
        return op.fn
    if name not in _allowed:
        raise KeyError(name)
    return _load(name)


@lru_cache(maxsize=4096)
def _load(name: str) -> Callable[..., Any]:
    path = name[len(PREFIX) :]
    try:
        return _import(path)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"

    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError(f"a worker could not import {path}: {reason}")

    return missing


def _import(path: str) -> Callable[..., Any]:
    if not _PATH.fullmatch(path):
        raise ValueError(f"an op is named 'package.module:function', not {path!r}")
    module, _, name = path.partition(":")
    if module == "__main__":
        raise ValueError(f"{path!r}: workers import ops by name and have another __main__; move it into a module")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{path} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _rule_of(rule: str | Rule | Iterable[Pair] | None) -> Rule:
    if rule is None:
        return replicate_only
    if isinstance(rule, str):
        if rule not in _FAMILIES:
            known = ", ".join(map(repr, _FAMILIES))
            raise ValueError(f"rule={rule!r}: there are {known}, pairs of placements, or a function")
        return _FAMILIES[rule]
    if callable(rule):
        return rule
    pairs = [_signature(*pair) for pair in rule]

    def listed(call: Call) -> list[Sig]:
        return [
            Sig(ins, outs * len(call.outputs) if len(outs) == 1 else outs)
            for ins, outs in pairs
            if len(ins) == call.num_inputs and len(outs) in (1, len(call.outputs))
        ]

    return listed


def _signature(
    ins: Sequence[Placement], outs: Placement | Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    many = (outs,) if isinstance(outs, Placement) else tuple(outs)
    for placement in (*ins, *many):
        if not isinstance(placement, Placement):
            raise ValueError(f"a rule is made of placements; {placement!r} is none")
    return tuple(p.code for p in ins), tuple(p.code for p in many)
