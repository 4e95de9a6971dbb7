"""Local parts of a program as torch.compile makes them: for programs whose results need to be equal within rounding only.

Where a part cannot be compiled it runs as it is. A part that writes in place is tried on copies first, so that what fails has
written nothing; if one fails later, its results are poisoned, since running it again might write twice. CUDA graphs (torch's
mode "reduce-overhead") have not been run: there was no GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtorch.runtime import kernels
from dtorch.runtime.plan import GENERAL, KILL, SCALAR, Begun, Finish, Joint, Local, Replay, Run
from dtorch.runtime.poison import Poison

if TYPE_CHECKING:
    from dtorch.runtime.executor import Executor
    from dtorch.runtime.lowering import Parts

logger = logging.getLogger(__name__)

MIN_CALLS = 2
"""Runs of fewer calls are left as they are."""


class Fused:
    """A local part of a plan, compiled on its first run.

    Attributes:
        part: what it computes, as it is.
        needed: place -> slots that something after it reads.
    """

    def __init__(self, part: Local, needed: set[int]) -> None:
        self.part = part
        self.segments = {index: Segment(runs, needed) for index, runs in part.runs.items()}

    def run(self, executor: Executor, plain: Callable[[int, list[Run]], None]) -> None:
        """Run it on the executor's stores; ``plain`` runs a place's instructions one by one."""
        for index, segment in self.segments.items():
            store = executor.stores[index]
            try:
                is_done = segment.run(store)
            except Exception as error:
                poison = executor.fail(segment.first_call, executor.places[index], error)
                for slot in (*segment.outs, *segment.written):
                    store[slot] = poison
                is_done = True
            if not is_done:
                plain(index, self.part.runs[index])


class Segment:
    """The instructions of one place as one function.

    Attributes:
        ins: slots that it reads before it writes them.
        outs: slots that it makes and something after it reads.
        dead: slots that it makes or forgets and nobody reads.
        written: slots of tensors that it writes in place.
    """

    def __init__(self, runs: Sequence[Run], needed: set[int]) -> None:
        self._runs = runs
        made: dict[int, None] = {}
        ins: dict[int, None] = {}
        killed: set[int] = set()
        written: dict[int, None] = {}
        for run in runs:
            for code in run.code:
                if run.form == GENERAL:
                    written.update((code[2][w], None) for w in code[4])
                outs, given = slots_of(run.form, code)
                ins.update((slot, None) for slot in given if slot not in made)
                made.update((slot, None) for slot in outs)
                if run.form == KILL:
                    killed.add(code[0])
        self.ins, self.dead = tuple(ins), tuple(killed)
        self.outs = tuple(slot for slot in made if slot in needed and slot not in killed)
        self.written = tuple(written)
        self.num_calls = sum(len(run.code) for run in runs if run.form != KILL)
        self.first_call = next((call for run in runs for call in run.calls), 0)
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    def run(self, store: list[Any]) -> bool:
        """Run it; False where that is not possible, and nothing has been done.

        Raises:
            Exception: it failed, and may have written.
        """
        tensors = [store[slot] for slot in self.ins]
        if self._failed or any(type(t) is Poison for t in tensors) or self.num_calls < MIN_CALLS:
            return False
        try:
            if self._compiled is None:
                made = compiled(self.body, tensors)
                if self.written:
                    made(*copies(tensors))
                self._compiled = made
            if not self.written:
                found = self._compiled(*tensors)
        except Exception:  # whatever a compiler may come up with: the plain way says what is wrong with the program itself
            logger.warning("a program is not fused here: torch.compile failed", exc_info=True)
            self._failed = True
            return False
        if self.written:
            found = self._compiled(*tensors)
        for slot, value in zip(self.outs, found, strict=True):
            store[slot] = value
        for slot in self.dead:
            store[slot] = None
        return True

    def body(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The instructions on tensors in the order of ``ins``; the answer has those of ``outs``."""
        s: dict[int, Any] = dict(zip(self.ins, tensors, strict=True))
        for run in self._runs:
            for code in run.code:
                if run.form == KILL:
                    continue
                if run.form == GENERAL:
                    f, outs, ins, numbers, writes = code
                    result = f(*[s[i] for i in ins], *numbers)
                    if len(outs) == 1 and isinstance(result, torch.Tensor):
                        s[outs[0]] = result
                    elif not writes:
                        s.update(zip(outs, result, strict=True))
                elif run.form == SCALAR:
                    f, out, a, number = code
                    s[out] = f(s[a], number)
                else:
                    f, out, *given = code
                    s[out] = f(*[s[i] for i in given])
        return tuple(s[slot] for slot in self.outs)


def slots_of(form: int, code: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(made, read) of an instruction."""
    if form == KILL:
        return (), ()
    if form == GENERAL:
        return code[1], code[2]
    return (code[1],), code[2:3] if form == SCALAR else code[2:]


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies to be written; those of tensors that share memory share theirs."""
    whole: dict[int, torch.UntypedStorage] = {}
    made = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        copy = whole.setdefault(storage.data_ptr(), storage.clone()) if storage.nbytes() else storage  # type: ignore[no-untyped-call]
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
        view = view.conj() if tensor.is_conj() else view
        made.append(torch._neg_view(view) if tensor.is_neg() else view)
    return made


def compiled(body: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """``body`` traced for tensors like these and given to torch.compile; with CUDA graphs where they are on a GPU.

    It is traced on copies, so that what it writes in place is not written twice.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = kernels.with_all_keys(make_fx(body))(*copies(tensors))
    on_gpu = any(t.is_cuda for t in tensors)
    return kernels.with_all_keys(torch.compile(traced, mode="reduce-overhead" if on_gpu else "default", dynamic=False))


def fuse(parts: Parts, lasting: set[int]) -> list[Any]:
    """The parts of a program with its local ones fused.

    Args:
        lasting: registers whose tensors leave the program.
    """
    found: list[Any] = []
    needed = set(lasting)
    for part in reversed(parts):
        if isinstance(part, Local):
            fused = Fused(part, set(needed))
            found.append(fused)
            for segment in fused.segments.values():
                needed.update(segment.ins)
        else:
            found.append(part)
            needed.update(_read(part))
    return found[::-1]


def _read(part: Joint | Begun | Finish | Replay) -> set[int]:
    if isinstance(part, Finish):
        part = part.begun
    steps = [joint.step for joint in part.joints] if isinstance(part, Begun) else [part.step]
    return {slot for step in steps for slot in step.ins}
