"""Comparing a module on a mesh with the same module on plain torch, submodule by submodule.

    report = dtorch.testing.compare(module, reference, inputs)
    print(report)          # the first submodule whose output differs, and by how much
    report.check()         # AssertionError if there is one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree

from dtorch.control import manual_seed
from dtorch.creation import target_mesh
from dtorch.face import TorchTensor
from dtorch.mesh import DeviceMesh
from dtorch.nn.module import Module
from dtorch.tensor import Tensor

_WHOLE = "(the module itself)"


@dataclass(frozen=True)
class Difference:
    """How one output of one call of a submodule compares with the reference's.

    Attributes:
        name: of the submodule, as in ``named_modules()``.
        kind: its class.
        call: which of its calls, from 0.
        max_abs: largest absolute difference; NaN where only one of the two is NaN, infinite where shapes differ.
        max_rel: largest difference relative to the reference's element.
        is_close: within the tolerance.
        detail: what differs beside the values: shapes, dtypes, the number of outputs.
    """

    name: str
    kind: str
    call: int
    max_abs: float
    max_rel: float
    is_close: bool
    detail: str = ""

    def __str__(self) -> str:
        again = f", call {self.call}" if self.call else ""
        size = self.detail or f"largest difference {self.max_abs:.3g} absolute, {self.max_rel:.3g} relative"
        return f"{self.name or _WHOLE} ({self.kind}{again}): {size}"


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; true when every output is close.

    Attributes:
        differences: one entry a call of a submodule, in the order in which the calls ended: children before parents.
        unmatched: submodules that only one of the two has called.
    """

    differences: tuple[Difference, ...]
    unmatched: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        """The first submodule whose output differs by more than the tolerance; what it called was still right."""
        return next((d for d in self.differences if not d.is_close), None)

    @property
    def max_abs(self) -> float:
        """Largest absolute difference of any output."""
        return max((d.max_abs for d in self.differences), default=0.0)

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        lines = []
        if self.first is None:
            lines.append(f"{len(self.differences)} outputs compared, all close; largest difference {self.max_abs:.3g}")
        else:
            at = self.differences.index(self.first)
            lines.append(f"the first output that differs, after {at} that are close:\n  {self.first}")
            wrong = sum(not d.is_close for d in self.differences)
            lines.append(f"{wrong} of {len(self.differences)} outputs differ")
        if self.unmatched:
            lines.append(f"called in one of the two only: {', '.join(n or _WHOLE for n in self.unmatched)}")
        return "\n".join(lines)

    def check(self) -> None:
        """Raises AssertionError with the report when an output differs."""
        if not self:
            raise AssertionError(str(self))


@dataclass(frozen=True)
class _Pair:
    """What one call of a submodule has returned on either side."""

    name: str
    kind: str
    call: int
    own: list[Any]
    wanted: list[torch.Tensor]


def compare(
    module: torch.nn.Module,
    reference: torch.nn.Module,
    inputs: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Run both modules on the same inputs and compare what each submodule returns. Blocks.

    Args:
        module: of ``dtorch.nn``, or one that ``dtorch.distribute`` put on a mesh.
        reference: the same model on plain torch: submodules are matched by name.
        inputs: of one call: a tensor, a tuple of positional arguments, or a dict of named ones; plain torch tensors.
            A module of ``dtorch.nn`` gets them replicated on its mesh.
        rtol, atol: tolerance; both left out: ``torch.testing.assert_close``'s for the dtype.
        seed: of torch's and of dtorch's generator before each run, so that both draw the same numbers.
    """
    pairs, unmatched = _outputs_of_both(module, reference, inputs, seed)
    found = [_compared(pair, [v.to_torch() for v in pair.own], rtol, atol) for pair in pairs]
    return Comparison(tuple(found), unmatched)


async def compare_async(
    module: torch.nn.Module,
    reference: torch.nn.Module,
    inputs: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> Comparison:
    """As ``compare``, awaiting the values: for notebooks and other code on an event loop."""
    pairs, unmatched = _outputs_of_both(module, reference, inputs, seed)
    found = [_compared(pair, [await v.value() for v in pair.own], rtol, atol) for pair in pairs]
    return Comparison(tuple(found), unmatched)


def _outputs_of_both(
    module: torch.nn.Module, reference: torch.nn.Module, inputs: Any, seed: int
) -> tuple[list[_Pair], tuple[str, ...]]:
    """The calls of both, in the order of the reference; and submodules that only one side has called."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    else:
        args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    own: dict[tuple[str, int], tuple[str, list[Any]]] = {}
    wanted: dict[tuple[str, int], tuple[str, list[Any]]] = {}
    manual_seed(seed)
    with _noting(module, own):
        if isinstance(module, Module):
            mesh = _mesh_of(module)
            module(*_on_mesh(args, mesh), **_on_mesh(kwargs, mesh))
        else:
            module(*args, **kwargs)
    torch.manual_seed(seed)
    with _noting(reference, wanted), torch.no_grad():
        reference(*args, **kwargs)
    pairs = [
        _Pair(name, kind, call, own[name, call][1], outputs)
        for (name, call), (kind, outputs) in wanted.items()
        if (name, call) in own
    ]
    unmatched = {name: None for name, call in [*wanted, *own] if ((name, call) in own) != ((name, call) in wanted)}
    return pairs, tuple(unmatched)


def _mesh_of(module: torch.nn.Module) -> DeviceMesh:
    for value in (*module.parameters(), *module.buffers()):
        if isinstance(value, Tensor):
            return value.device_mesh
    return target_mesh(None, None, "compare")


def _on_mesh(tree: Any, mesh: DeviceMesh) -> Any:
    def place(t: torch.Tensor) -> Any:
        return t if isinstance(t, TorchTensor) else Tensor(t, device_mesh=mesh)

    return _pytree.tree_map_only(torch.Tensor, place, tree)


@contextmanager
def _noting(module: torch.nn.Module, into: dict[tuple[str, int], tuple[str, list[Any]]]) -> Iterator[None]:
    """Keep copies of what each submodule returns: later code may write into the tensors themselves."""
    calls: dict[str, int] = {}

    def hook(name: str) -> Any:
        def note(called: torch.nn.Module, args: Any, output: Any) -> None:
            call = calls[name] = calls.get(name, -1) + 1
            tensors = [t for t in _pytree.tree_leaves(output) if isinstance(t, (torch.Tensor, Tensor))]
            into[name, call] = type(called).__name__, [t.detach().clone() for t in tensors]

        return note

    handles = [child.register_forward_hook(hook(name)) for name, child in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compared(pair: _Pair, own: list[torch.Tensor], rtol: float | None, atol: float | None) -> Difference:
    name, kind, call, wanted = pair.name, pair.kind, pair.call, pair.wanted
    if len(own) != len(wanted):
        return Difference(name, kind, call, float("inf"), float("inf"), False, f"{len(own)} tensors, not {len(wanted)}")
    max_abs = max_rel = 0.0
    is_close = True
    for a, b in zip(own, wanted, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            detail = f"{a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
            return Difference(name, kind, call, float("inf"), float("inf"), False, detail)
        exact = torch.complex128 if a.is_complex() else torch.float64
        tolerance = default_tolerances(a, b)
        rel = tolerance[0] if rtol is None and atol is None else rtol or 0.0
        abs_ = tolerance[1] if rtol is None and atol is None else atol or 0.0
        x, y = a.to(exact), b.to(exact)
        same = (x == y) | (x.isnan() & y.isnan())
        delta = torch.where(same, 0.0, (x - y).abs())
        is_close &= bool(torch.isclose(x, y, rtol=rel, atol=abs_, equal_nan=True).all())
        if delta.numel():
            max_abs = max(max_abs, float(delta.max())) if not delta.isnan().any() else float("nan")
            max_rel = max(max_rel, float(torch.where(same, 0.0, delta / y.abs()).nan_to_num(0.0).max()))
    return Difference(name, kind, call, max_abs, max_rel, is_close)
