"""The devices of a mesh in one process, without workers: cuts tensors, runs one definition on the pieces, joins the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.ops import table
from dtorch.runtime import kernels
from dtorch.runtime.comm import Answers, Comm, Members, Place, fold
from dtorch.runtime.cuts import as_seen, cutting
from dtorch.runtime.kernels import Site
from dtorch.runtime.layout import REPLICATE, box, is_shard, partial_op, slices
from dtorch.transport.messages import Definition, MeshInfo

MESH = 1
"""Number of the bench's mesh in layouts."""

CPU = torch.device("cpu")


class Mismatch(Exception):
    """Pieces that are not what their placement says."""


class Bench:
    """``num`` devices along one mesh axis."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.mesh = MeshInfo(MESH, "cpu", (num,), tuple(range(num)), (0,) * num)
        self._members = Members(self.mesh)
        self._places: list[Place] = [("cpu", rank) for rank in range(num)]

    # ---- pieces

    def cut(self, tensor: torch.Tensor, code: int, draw: torch.Generator) -> list[torch.Tensor]:
        """What each device holds of ``tensor`` under ``code``. Pending pieces are of mixed signs, and none says the value."""
        if code == REPLICATE:
            return [tensor.clone() for _ in range(self.num)]
        if is_shard(code):
            whole = tuple((0, n) for n in tensor.shape)
            parts = [slices(box(tuple(tensor.shape), (code,), (self.num,), (rank,)), whole) for rank in range(self.num)]
            return [tensor[part].clone(memory_format=torch.contiguous_format) for part in parts]
        return _pending(tensor, self.num, partial_op(code), draw)

    def join(self, pieces: Sequence[torch.Tensor], code: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of which devices hold ``pieces`` under ``code``.

        Raises:
            Mismatch: a piece has another shape than ``code`` says, or replicas differ.
        """
        for rank, piece in enumerate(pieces):
            expected = tuple(b - a for a, b in box(shape, (code,), (self.num,), (rank,)))
            if tuple(piece.shape) != expected:
                raise Mismatch(f"device {rank} holds a piece of shape {tuple(piece.shape)}, not {expected}")
        if code == REPLICATE:
            for rank, piece in enumerate(pieces[1:], 1):
                if not near(piece, pieces[0]):
                    raise Mismatch(f"devices 0 and {rank} hold different replicas")
            return pieces[0]
        if is_shard(code):
            return torch.cat(list(pieces), code % 64)
        return fold(pieces, partial_op(code))

    # ---- running

    def run(
        self, definition: Definition, inputs: Sequence[Sequence[torch.Tensor]], numbers: Sequence[float]
    ) -> list[list[torch.Tensor]]:
        """Run a definition's kernel as workers do.

        Args:
            inputs: for each input, what each device holds.
            numbers: the call's dynamic numbers.

        Returns:
            For each output, what each device holds; for a definition that writes, of what was written.
        """
        kernel = kernels.find(definition.kernel)
        fn = table.resolve(definition.op)
        if any(layout.dtype.startswith("complex") for layout in (*definition.inputs, *definition.outputs)):
            fn = kernels.with_all_keys(fn)
        seen = as_seen(definition)
        calls: list[Callable[..., Any]] = []
        for rank, place in enumerate(self._places):
            site = Site(seen, fn, {MESH: self.mesh}, self.mesh, (rank,), place, CPU)
            made = kernel.build(site)
            calls.append(made if seen is definition else cutting(made, definition, site))
        held = list(zip(*inputs, strict=True))
        if kernel.communicates:
            results = self._in_lockstep([call(*own, *numbers) for call, own in zip(calls, held, strict=True)])
        else:
            results = [call(*own, *numbers) for call, own in zip(calls, held, strict=True)]
        if definition.writes:
            return [list(inputs[w]) for w in definition.writes]
        rows = [[result] if isinstance(result, torch.Tensor) else list(result) for result in results]
        return [list(column) for column in zip(*rows, strict=True)]

    def _in_lockstep(self, generators: Sequence[Any]) -> list[Any]:
        comm = Comm(self._places, dict.fromkeys(self._places, 0), None, 0, lambda _: CPU)
        left = dict(zip(self._places, generators, strict=True))
        answers: dict[Place, Any] = dict.fromkeys(left)
        results: dict[Place, Any] = {}
        while left:
            requests = {}
            for place in list(left):
                try:
                    requests[place] = left[place].send(answers[place])
                except StopIteration as stop:
                    results[place] = stop.value
                    del left[place]
            if requests and len(requests) < self.num:
                raise Mismatch("some devices communicate and others have ended")
            if requests:
                answers = _answers(comm.perform(self._members, requests, True))
        return [results[place] for place in self._places]


def _answers(round_: Answers) -> dict[Place, Any]:
    """What a round of communication gives when nothing has to leave the process."""
    try:
        next(round_)
    except StopIteration as done:
        answers: dict[Place, Any] = done.value[0]
        return answers
    raise AssertionError("all devices of a bench are in one process")


def _pending(tensor: torch.Tensor, num: int, op: str, draw: torch.Generator) -> list[torch.Tensor]:
    def noise() -> torch.Tensor:
        made = torch.randint(-48, 49, tensor.shape, generator=draw)
        if tensor.is_floating_point() or tensor.is_complex():
            return made.to(tensor.dtype) / 8  # exact, and no whole numbers: rounding would seem linear
        return (made // 8).to(tensor.dtype)

    owner = torch.randint(0, num, tensor.shape, generator=draw)
    if tensor.dtype == torch.bool:  # added, truth values are joined by "or"
        rest = torch.full_like(tensor, op in ("min", "product"))
        return [torch.where(owner == rank, tensor, rest) for rank in range(num)]
    if op in ("sum", "avg"):
        summands = [noise() for _ in range(num - 1)]
        summands.append(tensor - sum(summands))
        return [s * num for s in summands] if op == "avg" else summands
    if op == "product":
        signs = [(noise() >= 0).to(tensor.dtype) * 2 - 1 for _ in range(num)]
        last = torch.stack(signs).prod(0)
        return [torch.where(owner == rank, tensor * last * own, own) for rank, own in enumerate(signs)]
    farther = [tensor - noise().abs() if op == "max" else tensor + noise().abs() for _ in range(num)]
    bound = torch.minimum if op == "max" else torch.maximum  # whole numbers wrap round at their ends
    return [torch.where(owner == rank, tensor, bound(tensor, far)) for rank, far in enumerate(farther)]


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal, or as close as sums in another order are; NaN is near NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if got.dtype == torch.bool or not (got.is_floating_point() or got.is_complex()):
        return torch.equal(got, want)
    if not got.numel():
        return True
    rough = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(got.dtype, 1e-3)
    finite = want[want.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(got, want, rtol=rough, atol=rough * max(scale, 0.1) * 0.1, equal_nan=True)
