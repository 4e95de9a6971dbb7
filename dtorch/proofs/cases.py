"""Calls to prove rules on: what torch's operator database makes the op table record, with the data of each call.

Needs the ``test`` extra: the database is part of ``torch.testing``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from types import MethodDescriptorType, SimpleNamespace, WrapperDescriptorType
from typing import Any

import torch

import dtorch
from dtorch.ops import table
from dtorch.ops._call import Call, R, Result, Sig, TensorArg, flat_tensors
from dtorch.ops._choose import Fit, fit
from dtorch.ops._op import Op
from dtorch.proofs.bench import MESH
from dtorch.runtime.layout import is_shard, shard_code, shard_dim
from dtorch.runtime.template import Filler, TensorRef, dtype_name, freeze
from dtorch.session import current_session
from dtorch.transport.messages import Definition, Layout

DTYPES = (torch.float32, torch.int64, torch.bool)


@dataclass
class Case:
    """One recorded call.

    Attributes:
        call: as rules see it, all inputs replicated.
        args, kwargs: with references in place of tensors and dynamic numbers.
        tensors: the values of its inputs.
        numbers: its dynamic numbers.
    """

    op: Op
    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Any
    tensors: list[torch.Tensor]
    numbers: list[float] = field(default_factory=list)

    def on(self, num: int, codes: Sequence[int] | None = None) -> Call:
        """The call on ``num`` devices, its inputs placed by ``codes`` (replicated by default)."""
        placed = codes or (R,) * len(self.call.tensors)
        infos = tuple(replace(t, codes=(c,)) for t, c in zip(self.call.tensors, placed, strict=True))
        return replace(self.call, tensors=infos, mesh_shape=(num,), axis=0)

    def signatures(self, call: Call) -> list[Sig]:
        """What the rule offers for ``call``; of an op in place, what leaves its target where it is."""
        sigs = self.op.rule(call)
        w = self.op.writes
        return sigs if w is None else [s for s in sigs if all(o == s.ins[w] for o in s.outs)]

    def fit(self, num: int, sig: Sig) -> Fit | None:
        """How the op would run under ``sig`` alone; None when its last check says no."""
        fixed = frozenset() if self.op.writes is None else frozenset({self.op.writes})
        return fit(self.on(num, sig.ins), [[sig]], self.op.verify, fixed)

    def fit_blocks(self, num: int, sig: Sig, block: int) -> Fit | None:
        """How the op runs when what ``sig`` wants sharded is cut at multiples of ``block``."""
        codes = [shard_code(shard_dim(c), block) if is_shard(c) else c for c in sig.ins]
        call = self.on(num, codes)
        fixed = frozenset() if self.op.writes is None else frozenset({self.op.writes})
        return fit(call, [self.signatures(call)], self.op.verify, fixed)

    def definition(self, num: int, found: Fit) -> Definition:
        """What workers would be sent."""
        desk = _Desk()
        call = self.on(num, [c for (c,) in found.ins])
        like: Any = SimpleNamespace(mesh=None, layout=Layout(MESH, (), "float32", (R,)))
        self.op.signature(desk, like, call, found, self.args, self.kwargs, self.finish)
        assert desk.made is not None
        return desk.made

    @property
    def name(self) -> str:
        """Under which workers find the function."""
        return f"flat:{self.op.name}" if self.call.is_nested else self.op.name

    def expected(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What torch gives for the whole tensors."""
        given = [t.clone() for t in tensors]
        return self.apply(given, [o.shape for o in self.call.outputs])

    def apply(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """The op's function of ``tensors``; ``shapes`` of its results, for ops that are told them."""
        filler = Filler(torch.device("cpu"), shapes)
        fill = filler.fill
        result = table.resolve(self.name)(
            *[fill(freeze(a), tensors, self.numbers) for a in self.args],
            **{k: fill(freeze(v), tensors, self.numbers) for k, v in self.kwargs.items()},
        )
        if self.op.writes is not None:
            return [tensors[self.op.writes]]
        return flat_tensors(result)

    def __str__(self) -> str:
        shapes = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in self.tensors)
        rest = [repr(a) for a in self.args if not _holds_tensor(a)] + [
            f"{k}={v!r}" for k, v in self.kwargs.items() if not _holds_tensor(v)
        ]
        return f"{self.op.name}({', '.join([shapes, *rest])})"[:160]


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return not (value is None or isinstance(value, (bool, int, float, str, complex, torch.dtype)))


def case_of(op: Op, tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> Case:
    """The call ``op(*tensors, **kwargs)`` as a case, without a session."""
    with torch.no_grad():
        outs = flat_tensors(op.fn(*[t.clone() for t in tensors], **kwargs))
    infos = tuple(TensorArg(i, tuple(t.shape), t.dtype, (R,), t.stride()) for i, t in enumerate(tensors))
    results = tuple(Result(tuple(o.shape), o.stride(), o.dtype) for o in outs)
    call = Call(op.name, infos, kwargs, infos, results, (1,))
    return Case(op, call, tuple(map(TensorRef, range(len(tensors)))), kwargs, None, list(tensors))


class _Desk:
    """Stands for a session while a definition is drawn up."""

    def __init__(self) -> None:
        self.made: Definition | None = None
        self.recorder = self
        self.take = self.put = self.draw = None

    def spec(self, shape: Any, stride: Any, dtype: torch.dtype, mesh: Any, codes: tuple[int, ...]) -> Any:
        return SimpleNamespace(layout=Layout(MESH, tuple(shape), dtype_name(dtype), codes))

    def define(self, build: Callable[[int], Definition]) -> int:
        self.made = build(1)
        return 1

    def know_signature(self, *facts: Any) -> None:
        """Nobody will ask."""


@contextmanager
def watching(seen: Callable[[Case], None]) -> Iterator[None]:
    """Give ``seen`` each call that the table records under a new signature, before it runs."""
    infer = Op.infer

    def watched(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        found = infer(op, args, kwargs, tensors)
        call, tree_args, tree_kwargs, finish = found
        if not op.random and op.stand_in is None and tensors:
            values = [t.to_torch().clone() for t in tensors]
            numbers = [
                v for where, v in (*enumerate(args), *kwargs.items())
                if type(v) in (int, float) and (op.numbers is True or (op.numbers and where in op.numbers))
            ]
            whole = replace(call, tensors=tuple(replace(t, codes=(R,)) for t in call.tensors), mesh_shape=(1,))
            seen(Case(op, whole, tree_args, tree_kwargs, finish, values, numbers))
        return found

    Op.infer = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Op.infer = infer  # type: ignore[method-assign]


# ---- torch's database


@lru_cache(maxsize=1)
def entries() -> dict[str, Any]:
    """All entries of the database, by name and variant."""
    from torch.testing._internal import common_methods_invocations as database

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in database.op_db}


def cases_of(entry: Any, mesh: dtorch.DeviceMesh, num_samples: int = 8) -> list[Case]:
    """The different calls that an entry's samples make, replicated and cut; of each kind (op, argument structure, what the
    rule offers) one.

    Args:
        mesh: of one axis, to record on.
    """
    found: dict[Any, Case] = {}

    def keep(case: Case) -> None:
        offered = tuple((s.ins, s.outs, s.kernel) for s in case.signatures(case.on(3)))
        kind = (case.op, offered, *_structure((case.args, case.kwargs)), *(t.ndim for t in case.tensors), *(
            t.dtype for t in case.tensors))
        found.setdefault(kind, case)

    have = entry.supported_dtypes("cpu")
    dtypes = [d for d in DTYPES if d in have] or sorted(have, key=str)[:1]
    session = current_session()
    session.forget_signatures()  # calls that were seen before would not be new
    with warnings.catch_warnings(), watching(keep), dtorch.auto_redistribute():
        warnings.simplefilter("ignore")
        for dtype in dtypes:
            torch.manual_seed(7)
            samples = list(entry.sample_inputs("cpu", dtype, requires_grad=False))
            step = max(1, len(samples) // num_samples)
            for sample in islice(samples, 0, None, step):
                for dim in (None, 0, -1):
                    _record(entry, sample, mesh, dim)
    return list(found.values())


def _structure(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        yield len(tree)
        for item in tree:
            yield from _structure(item)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from _structure(value)
    else:
        yield type(tree) if isinstance(tree, (TensorRef, int, float)) and type(tree) is not bool else repr(tree)


def _record(entry: Any, sample: Any, mesh: dtorch.DeviceMesh, dim: int | None) -> None:
    """Call the entry's function with tensors replicated (``dim`` None) or cut along ``dim`` where they have it."""

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                return value
            cut = dim is not None and value.ndim > 0
            placed = dtorch.Shard(dim % value.ndim) if cut and dim is not None else dtorch.Replicate()
            whole = value.detach().resolve_conj().resolve_neg()
            return dtorch.Tensor(whole, device_mesh=mesh, placements=[placed])
        if isinstance(value, (list, tuple)):
            made = [put(v) for v in value]
            return made if isinstance(value, list) else type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if isinstance(value, slice):
            return slice(put(value.start), put(value.stop), put(value.step))
        return value

    fn = entry.op
    given = (put(sample.input), *put(tuple(sample.args)))
    named = {k: put(v) for k, v in sample.kwargs.items()}
    try:
        if isinstance(fn, (MethodDescriptorType, WrapperDescriptorType)):
            getattr(given[0], fn.__name__)(*given[1:], **named)
        else:
            fn(*given, **named)
    except Exception:  # tests of the entry itself say what fails; what was recorded before is worth proving
        return
