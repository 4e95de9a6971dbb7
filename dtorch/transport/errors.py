"""Every exception dtorch raises, in one tree.

::

    DTorchError
    +-- PlacementError       (ValueError)      the user's placements do not allow the op
    +-- MeshError            (ValueError)      a mesh is malformed, or tensors live on different meshes
    +-- OpError              (RuntimeError)    an op failed on a worker; also the original torch type where one exists
    +-- NonFiniteError       (FloatingPointError) an op gave NaN or Inf inside ``check_finite()``
    +-- SessionClosedError   (RuntimeError)    you shut the runtime down and then used one of its tensors
    +-- WorkerLostError      (RuntimeError)    the world broke it: a worker process is gone
    +-- ConnectionLostError  (ConnectionError) the world broke it: the control plane is gone
    +-- AuthError            (PermissionError) a peer could not prove who it is
    +-- QuotaError           (RuntimeError)    a limit of the session was reached
    +-- ProtocolError        (RuntimeError)    a peer sent something that the vocabulary does not contain
    +-- LaunchError          (RuntimeError)    an engine cannot start workers

Facts are attributes; the text is made in ``__str__``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class DTorchError(Exception):
    """Root of every exception dtorch raises on its own account."""


class PlacementError(DTorchError, ValueError):
    """No legal signature of ``op`` fits the placements of its inputs.

    Attributes:
        op: public name of the op, such as ``"torch.add"``.
        actual: one entry per tensor input, its placements as text.
        legal: the signatures that would have been legal on one mesh axis, as text, the nearest first.
        fix: the call as the user wrote it, made legal; or what to do with its inputs; or "".
        detail: what else the user should know, or "".
        axis: which mesh axis ``legal`` is about, or "" where there is one only.
        mesh: the mesh, as text, or "".
        location: ``file:line`` of the user's call, or "Cell In[3], line 2" in a notebook, or "".
        source: text of the statement there, or "".
    """

    def __init__(
        self, op: str, actual: list[str], legal: list[str], fix: str = "", detail: str = "", axis: str = "", mesh: str = "",
        location: str = "", source: str = "",
    ) -> None:  # fmt: skip
        super().__init__(op, actual, legal, fix, detail, axis, mesh, location, source)
        self.location, self.source = location, source
        self.op, self.actual, self.legal, self.fix, self.detail = op, actual, legal, fix, detail
        self.axis, self.mesh = axis, mesh

    def __str__(self) -> str:
        placed = ", ".join(self.actual)
        if self.legal or not self.detail:
            lines = [f"{self.op} has no rule for inputs placed as {placed or '(no tensors)'}."]
            lines += [self.detail] if self.detail else []
        else:  # not a matter of rules: the placements themselves are wrong
            lines = [self.detail, f"Given to {self.op}: {placed or 'nothing'}."]
        if self.location:
            lines.append(f"  at {self.location}")
            lines.extend(f"     {line}" for line in self.source.splitlines())
        if self.mesh:
            lines.append(f"All on {self.mesh}." if len(self.actual) > 1 else f"It is on {self.mesh}.")
        if self.legal:
            lines.append(f"The nearest legal signature on mesh axis{self.axis}: {self.legal[0]}" if self.axis
                         else f"The nearest legal signature: {self.legal[0]}")
            others = self.legal[1:8]
            if others:
                lines.append("Others: " + "; ".join(others) + ("; ..." if len(self.legal) > 8 else ""))
        if self.fix:
            lines.append(f"This would be legal: {self.fix}")
            lines.append("Or let dtorch insert it: with dtorch.auto_redistribute(): ...")
        return "\n".join(lines)


class MeshError(DTorchError, ValueError):
    """A mesh is malformed, names a device that does not exist, or tensors of one op live on different meshes."""


class OpError(DTorchError, RuntimeError):
    """An op failed on a worker, or a value depends on one that did.

    When torch raised ``T`` on the worker, the exception that users see is an instance of both ``OpError`` and ``T``
    (see ``op_error``), so ``except IndexError`` and ``except torch.OutOfMemoryError`` work as on one device.

    Attributes:
        op: public name of the op.
        message: torch's own words.
        kind: name of the type raised on the worker.
        location: ``file:line`` of the user's call, or "Cell In[3], line 2" in a notebook, or "".
        source: text of the statement there, or "".
        inputs: one entry per tensor input: shape, dtype and placements, as text.
        worker: name of the worker.
        device: device on which the op ran, as text.
        trace: traceback on the worker, as text.
        mesh: the mesh of its inputs and results, as text, or "".
    """

    def __init__(
        self,
        op: str,
        message: str,
        kind: str = "RuntimeError",
        location: str = "",
        source: str = "",
        inputs: list[str] | None = None,
        worker: str = "",
        device: str = "",
        trace: str = "",
        mesh: str = "",
    ) -> None:
        facts = (op, message, kind, location, source, inputs or [], worker, device, trace, mesh)
        super().__init__(*facts)
        self.op, self.message, self.kind, self.location, self.source = op, message, kind, location, source
        self.inputs, self.worker, self.device, self.trace, self.mesh = inputs or [], worker, device, trace, mesh

    def __str__(self) -> str:
        lines = [f"{self.message}"]
        if self.location:
            lines.append(f"  at {self.location}")
            lines.extend(f"     {line}" for line in self.source.splitlines())
        where = " ".join(part for part in (self.worker, self.device) if part)
        of_mesh = f" of {self.mesh}" if self.mesh else ""
        lines.append(f"  in {self.op}" + (f" on {where}{of_mesh}" if where else ""))
        lines.extend(f"  input {i}: {text}" for i, text in enumerate(self.inputs))
        if sys.version_info < (3, 11):  # where a traceback does not show notes
            lines.extend(getattr(self, "__notes__", ()))
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return op_error, (self.args,)


class NonFiniteError(DTorchError, FloatingPointError):
    """Inside ``dtorch.check_finite()``, an op gave a value that is not finite.

    Attributes:
        op: public name of the op.
        location: ``file:line`` of the user's call, or "".
        source: text of that line, or "".
        inputs: one entry per tensor input: shape, dtype and placements, as text.
        output: the same of the result.
        num_nan: elements that are NaN.
        num_inf: elements that are infinite.
    """

    def __init__(
        self, op: str, location: str, source: str, inputs: list[str], output: str, num_nan: int, num_inf: int
    ) -> None:
        super().__init__(op, location, source, inputs, output, num_nan, num_inf)
        self.op, self.location, self.source, self.inputs, self.output = op, location, source, inputs, output
        self.num_nan, self.num_inf = num_nan, num_inf

    def __str__(self) -> str:
        kinds = ((self.num_nan, "NaN"), (self.num_inf, "infinite"))
        lines = [f"{self.op} gave {' and '.join(f'{num} {kind}' for num, kind in kinds if num)} elements"]
        if self.location:
            lines.append(f"  at {self.location}")
        if self.source:
            lines.extend(f"     {line}" for line in self.source.splitlines())
        lines.extend(f"  input {i}: {text}" for i, text in enumerate(self.inputs))
        return "\n".join([*lines, f"  output: {self.output}"])


def op_error(facts: tuple[Any, ...]) -> OpError:
    """Build an ``OpError`` that is also the builtin or torch exception named by its ``kind``.

    Args:
        facts: the positional arguments of ``OpError``.
    """
    kind = str(facts[2])
    if kind == "RuntimeError" and any(words in str(facts[1]) for words in _OUT_OF_MEMORY):
        kind = "OutOfMemoryError"
    base = _BASES.get(kind)
    if base is None or issubclass(OpError, base):
        return OpError(*facts)
    cls = _MIXED.get(kind)
    if cls is None:
        cls = _MIXED[kind] = type(f"OpError[{kind}]", (OpError, base), {"__module__": OpError.__module__})
    made: OpError = cls(*facts)
    return made


_BASES: dict[str, type[BaseException]] = {
    t.__name__: t
    for t in (
        IndexError, ValueError, TypeError, ZeroDivisionError, OverflowError, MemoryError, NotImplementedError, KeyError,
        OSError, FileNotFoundError, PermissionError,
        torch.OutOfMemoryError, torch.linalg.LinAlgError,  # type: ignore[attr-defined]  # its stubs do not list it
    )
}  # fmt: skip
_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""What torch's allocator for the CPU says; it raises a plain RuntimeError."""
_MIXED: dict[str, type[OpError]] = {}


class SessionClosedError(DTorchError, RuntimeError):
    """The session that held this tensor was shut down."""


class WorkerLostError(DTorchError, RuntimeError):
    """A worker process ended while the session needed it.

    Attributes:
        worker: its name.
        reason: how it ended, such as ``"killed by SIGKILL"``.
        tensors: those that could not be made again, in plain words; the session goes on without them. Empty: the session
            is over.
    """

    def __init__(self, worker: str, reason: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(worker, reason, tensors)
        self.worker, self.reason, self.tensors = worker, reason, tuple(tensors)

    def __str__(self) -> str:
        if not self.tensors:
            return (
                f"{self.worker} was lost: {self.reason}. Its tensors are gone; "
                "call dtorch.init() to start afresh (the next op does so too)."
            )
        shown = "; ".join(self.tensors[:8]) + (f"; and {len(self.tensors) - 8} more" if len(self.tensors) > 8 else "")
        num = len(self.tensors)
        return (
            f"{self.worker} was lost: {self.reason}. {num} tensor{'s' if num > 1 else ''} could not be made again: {shown}. "
            "The session goes on with all others; make these anew, or give dtorch.init(lineage=...) larger bounds."
        )


class ConnectionLostError(DTorchError, ConnectionError):
    """The control plane is gone."""


class AuthError(DTorchError, PermissionError):
    """A peer could not prove who it is."""


class QuotaError(DTorchError, RuntimeError):
    """A limit of the session was reached."""


class ProtocolError(DTorchError, RuntimeError):
    """A peer sent bytes that are not in the vocabulary."""


class LaunchError(DTorchError, RuntimeError):
    """An engine such as Ray is not there, or cannot start the workers that were asked for."""


_BASES["QuotaError"] = QuotaError  # raised on a worker that is shared
