"""What the control plane says beyond one machine: between a client and a head, and between a head and its workers.

The messages of ``messages.py`` are used as they are; here are those that a shared cluster adds. Between hosts there is no
shared memory, so large bytes travel as *streams*: parts of at most ``PART_BYTES``, which a head passes on as they come,
reading nothing of them but session and stream.

    client                                       head                                    worker
      | -- GET /v1/client, Bearer key ----------> |                                        |
      | -- Attach(version, ticket, received) ---> | <---- GET /v1/worker, Bearer key ----- |
      | <- Attached(version, session, ticket) --- | <---- Enlist(version, devices, ...) -- |
      |                                           | ----- Enlisted(version, worker) -----> |
      | -- Reserve(devices) --------------------> | ----- Open(session, tenant, ...) ----> |
      | -- Define, Part*, Submit ---------------> | ----- Define, Part*, Batch ----------> |
      | <- Finished, Answer, Part*, ... --------- | <---- Part*, Done -------------------- |
      | -- Leave -------------------------------> | ----- Drop(session) -----------------> |

After the two first messages, frames are numbered (``numbered.py``): a ticket and the number of the last frame received
continue a stream whose connection broke.
"""

from __future__ import annotations

import msgspec

from .messages import (
    Allow,
    AskHeld,
    AskRandomState,
    AskSnapshots,
    AskStatistics,
    AskTrace,
    Batch,
    Blob,
    Define,
    Done,
    Failure,
    Fetch,
    Forget,
    Halt,
    Held,
    RandomState,
    Redo,
    Regroup,
    Resume,
    Resumed,
    Seed,
    Snapshots,
    StartTrace,
    Statistics,
    Stop,
    StreamBlob,
    Trace,
    Value,
)

PART_BYTES = 2 * 1024 * 1024
"""Bytes in one part of a stream: little enough that others' messages need not wait long behind it."""

STREAM_WINDOW_BYTES = 8 * 1024 * 1024
"""Of parts that a worker may send before it is given credit for more."""

# ---- both ways


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A piece of a stream: of an upload towards the workers, of a value towards the client."""

    session: int
    stream: int
    offset: int  # in the stream, bytes
    total: int  # of an upload: bytes of the whole stream
    mesh: int  # of an upload: the mesh
    devices: tuple[int, ...]  # of an upload: those of the mesh whose workers need it; empty: all
    data: memoryview  # the last field, see ``codec.encode_part``


# ---- client -> head


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    version: int
    ticket: str = ""  # of the session to go on with; "" opens one
    received: int = 0  # number of the last frame that the client has had
    name: str = ""  # for people who list sessions


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Asks for the devices of a new mesh, before the mesh is announced."""

    session: int
    ticket: int
    kind: str
    devices: tuple[int, ...]


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A batch. Its meshes and definitions came before."""

    session: int
    seq: int
    signatures: tuple[int, ...]  # called in ``body``
    body: bytes
    freed_meshes: tuple[int, ...] = ()  # meshes whose tensors died
    uploads: tuple[Blob | StreamBlob, ...] = ()
    fetches: tuple[Fetch, ...] = ()


class Migrate(msgspec.Struct, frozen=True, tag="migrate"):
    """Devices are to be elsewhere. Answered by Reserved at once, and by Regained once they are."""

    session: int
    ticket: int
    places: tuple[tuple[str, int], ...]  # device kind and id, as the client numbers them
    target: tuple[str, int] | None = None  # onto the hardware of this one; None: onto hardware that the session does not use


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The client ends its session."""

    session: int


# ---- head -> client


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    version: int
    session: int
    ticket: str  # proves that the client is the one that opened the session
    received: int  # number of the last frame that the head has had
    devices: dict[str, int]  # kind -> how many a mesh of this session may have now
    grace_s: float  # how long a broken connection may take to come back


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    seq: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """A fetch is settled: controller's ``Settled``."""

    ticket: int
    values: tuple[Value, ...]
    error: tuple[int, int] | None


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """Answer to AskStatistics."""

    ticket: int
    statistics: tuple[Statistics, ...]


class Traces(msgspec.Struct, frozen=True, tag="traces"):
    """Answer to AskTrace."""

    ticket: int
    traces: tuple[Trace, ...]


class CallFailed(msgspec.Struct, frozen=True, tag="call_failed"):
    worker: int
    failure: Failure


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """Answer to Reserve and Migrate. ``error`` is the name of an exception of ``errors.py``, "" when the devices are there."""

    ticket: int
    error: str = ""
    text: str = ""


class Forfeited(msgspec.Struct, frozen=True, tag="forfeited"):
    """Tensors are gone for good with a worker, in plain words: controller's ``Forfeited``."""

    worker: int
    reason: str
    tensors: tuple[str, ...]


class Regained(msgspec.Struct, frozen=True, tag="regained", omit_defaults=True):
    """The session goes on after a loss or a move: controller's ``Regained``."""

    lost: tuple[tuple[int, str], ...]  # workers and how they ended
    moved: tuple[tuple[str, int], ...]  # devices that are on another worker than before
    recomputed_ops: int
    copied_bytes: int
    halted_s: float  # for which the workers stood still
    tickets: tuple[int, ...] = ()  # of the moves that the client asked for
    silent_s: float | None = None  # from the last sign of life of a lost worker until it counted as lost


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The session is over. ``error`` is the name of an exception of ``errors.py``."""

    error: str
    text: str
    worker: int = -1  # of a WorkerLostError


class Devices(msgspec.Struct, frozen=True, tag="devices"):
    """Workers came or went."""

    devices: dict[str, int]


# ---- worker -> head


class Enlist(msgspec.Struct, frozen=True, tag="enlist"):
    version: int
    pid: int
    devices: tuple[tuple[str, int], ...]  # (kind, number on the worker) of each device offered
    name: str = ""
    labels: dict[str, str] = {}
    ticket: str = ""  # of the place in the pool to go on with; "" asks for one
    received: int = 0


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """The worker wants to leave the pool: it is told to stop once its sessions are elsewhere. Said again: it leaves now."""


class SentBytes(msgspec.Struct, frozen=True, array_like=True):
    """What calls of one op, issued by one line of the user's, sent to other devices."""

    op: str
    what: str  # "gathers"
    where: str  # "train.py:12", or "" when unknown
    num_calls: int  # counted on one of the workers that take part
    size_bytes: int


class Use(msgspec.Struct, frozen=True, array_like=True):
    """What a session has used on a worker since the last report of it there."""

    session: int
    busy_ns: int  # it had the devices
    repeated_ns: int = 0  # the same, for work that was lost and done again
    held_bytes: int = 0  # now
    ops: dict[str, int] = {}  # name -> calls, each counted on one of the workers that take part
    sent: tuple[SentBytes, ...] = ()
    over: bool = False  # the last report


class DeviceLoad(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    number: int  # on the worker
    held_bytes: int  # by tensors of all sessions
    capacity_bytes: int  # of the device's memory; CPU devices of one machine share theirs


class Load(msgspec.Struct, frozen=True, tag="load", omit_defaults=True):
    """How busy a worker is: once a second, and as a session ends there."""

    clock_ns: int  # of this worker
    busy_ns: int  # its devices were had by some session, since it started
    process_bytes: int  # memory of the process
    devices: tuple[DeviceLoad, ...] = ()
    uses: tuple[Use, ...] = ()  # of sessions that used anything


# ---- head -> worker


class Enlisted(msgspec.Struct, frozen=True, tag="enlisted"):
    version: int
    worker: int  # its number in the pool
    ticket: str
    received: int
    grace_s: float


class Open(msgspec.Struct, frozen=True, tag="open"):
    """A session is about to use this worker."""

    session: int
    tenant: str  # who is served: sessions of one tenant share its weight
    weight: float
    priority: int  # higher ones go first, always
    max_bytes: int  # that the session's tensors may hold on this worker; 0: no limit


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """A session is over: free what it holds, forget what it does."""

    session: int


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """The client of a session has taken in this many bytes of parts, and so many more may be sent."""

    session: int
    size_bytes: int


FromClient = (
    Attach | Reserve | Migrate | Define | Submit | Part | Seed | Forget | Allow | AskStatistics | StartTrace | AskTrace
    | Leave
)  # fmt: skip
ToClient = (
    Attached | Finished | Answer | Counts | Traces | CallFailed | Reserved | Forfeited | Regained | Ended | Devices | Part
)  # fmt: skip
FromPoolWorker = (
    Enlist | Retire | Load | Done | Failure | Statistics | RandomState | Trace | Held | Snapshots | Resumed | Part
)  # fmt: skip
ToPoolWorker = (
    Enlisted | Open | Drop | Credit | Part | Define | Batch | Forget | Seed | Allow | AskStatistics | AskRandomState
    | RandomState | StartTrace | AskTrace | Halt | AskHeld | AskSnapshots | Regroup | Redo | Resume | Stop
)  # fmt: skip
