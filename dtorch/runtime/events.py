"""What a controller is told, and what it answers: events in, instructions out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from dtorch.transport.codec import Frame
from dtorch.transport.messages import (
    Allow,
    Blob,
    Definition,
    Failure,
    Fetch,
    Forget,
    FromWorker,
    MeshInfo,
    Program,
    Seed,
    SharedBlob,
    StartTrace,
    Statistics,
    StreamBlob,
    Trace,
    Value,
)

Place = tuple[str, int]
"""A device as the client names it: kind and id."""

# ---- events


class Submission(Protocol):
    """A batch as the controller sees it: all but its calls. The recorder's ``Outgoing`` is one."""

    @property
    def seq(self) -> int: ...
    @property
    def body(self) -> bytes: ...
    @property
    def meshes(self) -> tuple[MeshInfo, ...]: ...
    @property
    def definitions(self) -> tuple[Definition, ...]: ...
    @property
    def programs(self) -> tuple[Program, ...]: ...
    @property
    def uploads(self) -> tuple[Blob | SharedBlob | StreamBlob, ...]: ...
    @property
    def fetches(self) -> tuple[Fetch, ...]: ...
    @property
    def freed_meshes(self) -> tuple[int, ...]: ...
    @property
    def signatures(self) -> Collection[int]: ...
    @property
    def refused(self) -> str: ...


@dataclass(frozen=True)
class Submitted:
    """The client sent a batch."""

    batch: Submission


@dataclass(frozen=True)
class Defined:
    """The client announced meshes and signatures ahead of the batch that uses them."""

    meshes: tuple[MeshInfo, ...]
    definitions: tuple[Definition, ...]
    programs: tuple[Program, ...]


@dataclass(frozen=True)
class Sent:
    """The client sent a message for all workers, in program order."""

    message: Seed | Forget | Allow | StartTrace


@dataclass(frozen=True)
class Asked:
    """The client wants every worker's statistics."""

    ticket: int
    memory: bool
    reset_peak: bool
    idle: bool = False


@dataclass(frozen=True)
class AskedTrace:
    """The client wants every worker's clock and, with ``stop``, what it noted since the profile began."""

    ticket: int
    stop: bool


@dataclass(frozen=True)
class Joined:
    worker: int


@dataclass(frozen=True)
class Received:
    worker: int
    message: FromWorker


PRINTED = "; it printed last: "
"""In a reason, before what a worker printed."""


@dataclass(frozen=True)
class Exited:
    worker: int
    reason: str


@dataclass(frozen=True)
class Migrating:
    """The client wants devices to be elsewhere.

    Attributes:
        places: what moves.
        target: beside which device, on the same worker and the same hardware; None: to a worker of their own if
            ``leaving`` is None, else to whoever remains.
        leaving: a worker that is to end once nothing lives there any more.

    Where somebody else places devices, that has been changed already; ``places`` and ``target`` do not matter.
    """

    ticket: int
    places: tuple[Place, ...]
    target: Place | None = None
    leaving: int | None = None


@dataclass(frozen=True)
class Closing:
    pass


Event = Submitted | Defined | Sent | Asked | AskedTrace | Joined | Received | Exited | Migrating | Closing

# ---- instructions


@dataclass(frozen=True)
class Start:
    """Start a process for these devices."""

    worker: int
    kind: str
    device: int
    shared: bool  # it hosts every CPU device that has no worker of its own


@dataclass(frozen=True)
class Send:
    worker: int
    frame: Frame


@dataclass(frozen=True)
class Finished:
    """Every worker concerned has executed batch ``seq``."""

    seq: int


@dataclass(frozen=True)
class Settled:
    """All parts of a fetch are here; ``error`` is (worker, failure number) when the value is poisoned."""

    ticket: int
    values: tuple[Value, ...]
    error: tuple[int, int] | None


@dataclass(frozen=True)
class Counted:
    """All workers have answered a request for statistics or for what they noted."""

    ticket: int
    answers: tuple[Statistics, ...] | tuple[Trace, ...]


@dataclass(frozen=True)
class Failed:
    """A call failed on a worker."""

    worker: int
    failure: Failure


@dataclass(frozen=True)
class Suspect:
    """A worker lost touch with another one. That one's end will be reported; if it is not, this worker's is assumed."""

    worker: int
    reason: str
    epoch: int = 0  # if anybody is lost meanwhile, this is settled


@dataclass(frozen=True)
class Lost:
    """A worker ended on its own, and there is no going on: the session is over."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Interrupt:
    """Tell a worker past everything that is queued to halt."""

    worker: int
    epoch: int


@dataclass(frozen=True)
class Kill:
    """Make sure that a worker which counts as lost does not come back."""

    worker: int


@dataclass(frozen=True)
class Vacated:
    """A worker that is not the session's own was to be left, and holds nothing of the session any more."""

    worker: int


@dataclass(frozen=True)
class Halting:
    """The workers are to halt; ``Regained`` says that they go on."""


@dataclass(frozen=True)
class Forfeited:
    """Tensors are gone for good, in plain words."""

    worker: int
    reason: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Regained:
    """Everybody goes on after a loss or a move.

    Attributes:
        lost: workers and how they ended.
        moved: devices that are on another worker than before.
        tickets: of the moves that the client asked for.
    """

    lost: tuple[tuple[int, str], ...]
    moved: tuple[Place, ...]
    recomputed_ops: int
    copied_bytes: int
    tickets: tuple[int, ...] = ()


Instruction = (
    Start | Send | Finished | Settled | Counted | Failed | Suspect | Lost | Interrupt | Kill | Vacated | Halting
    | Forfeited | Regained
)
