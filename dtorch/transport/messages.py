"""The one vocabulary of the control plane: every message a controller and a worker exchange.

Tagged, frozen msgspec structs; one union a direction. Tensor bytes travel beside a message (``Blob``) or through shared
memory (``SharedBlob``). Nothing here can carry code: ops are names that the worker looks up in its own op table.

A *slot* is a number that names a tensor in a session; the client recycles slots. A *signature* is the number that the
client gave to (op, static arguments, input specs). One call in a batch's body is the flat array
``[signature, *output slots, *input slots, *dynamic numbers]``.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 2
"""Peers with another version are refused in the handshake."""


class MeshInfo(msgspec.Struct, frozen=True):
    """A mesh as workers know it."""

    mesh: int  # number given by the client, unique in the session
    kind: str  # device type as the user wrote it: "cpu", "cuda"
    shape: tuple[int, ...]
    devices: tuple[int, ...]  # device ids, row-major
    workers: tuple[int, ...] = ()  # the worker of each device; filled in by the controller
    locals: tuple[int, ...] = ()  # number of each device on its worker; empty: the same as in ``devices``
    backing: tuple[str, ...] = ()  # "kind:number" of what stands for each device after it was moved, or ""


class Layout(msgspec.Struct, frozen=True):
    """A global tensor: what every worker needs to find its own piece."""

    mesh: int
    shape: tuple[int, ...]
    dtype: str  # "float32"
    codes: tuple[int, ...]  # one placement code a mesh axis, see runtime/layout.py


class Definition(msgspec.Struct, frozen=True):
    """What a signature number means. Sent once, before the first batch that calls it."""

    sig: int
    op: str  # name in the op table, "torch.add"
    kernel: str  # name in the kernel table, "local" for plain local work
    args: list[Any]  # argument template, see runtime/template.py
    kwargs: dict[str, Any]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    writes: tuple[int, ...] = ()  # indices of inputs that are written in place
    params: dict[str, Any] = {}  # what the kernel wants to know besides
    where: str = ""  # a line of the user's that calls it, "train.py:12", where a head shows it to people


class Program(msgspec.Struct, frozen=True):
    """Calls that replay as one call of signature ``sig``, whose definition has kernel "program".

    The calls of ``body`` name registers in place of slots. A register that is neither an input nor captured is written by
    a call before it is read.
    """

    sig: int
    meshes: tuple[int, ...]  # meshes that its calls touch
    body: bytes  # msgpack of [calls, [[mesh, registers that hold intermediate results], ...]]
    num_registers: int
    inputs: tuple[int, ...]  # registers filled from the call's input slots
    outputs: tuple[int, ...]  # registers that go to the call's output slots
    captured: tuple[tuple[int, int], ...]  # (register, slot): tensors used by reference
    kept: tuple[tuple[int, int], ...]  # (register, slot): tensors that the function leaves behind, such as caches
    fuse: bool = False  # local parts may run as torch.compile makes them, equal within rounding


class SharedBlob(msgspec.Struct, frozen=True, tag="shm"):
    """Bytes in an anonymous shared-memory segment of another process on this host."""

    pid: int
    fd: int
    offset: int
    size_bytes: int
    given: bool = False  # nobody else reads them: the receiver may keep them, and write


class Blob(msgspec.Struct, frozen=True, tag="raw"):
    """Bytes that travel inside the message."""

    data: bytes


class StreamBlob(msgspec.Struct, frozen=True, tag="stream"):
    """Bytes that travel in parts beside the message, between hosts (see ``cluster.py``)."""

    stream: int  # number given by the client, unique in the session
    size_bytes: int


class Fetch(msgspec.Struct, frozen=True):
    """Ask for the local pieces of a slot, after everything before it in the stream."""

    ticket: int  # names the answer
    slot: int
    mesh: int
    devices: tuple[int, ...]  # device ids whose pieces are wanted; other holders only report whether it failed
    into: SharedBlob | StreamBlob | None = None  # where to write the pieces when they are large
    layout: Layout | None = None  # with ``into``: each piece goes to its box of the whole, row-major tensor
    offsets: tuple[int, ...] = ()  # without ``layout``: each device's piece is written at its own offset


# ---- controller -> worker


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    version: int
    session: int


class Define(msgspec.Struct, frozen=True, tag="define"):
    session: int
    meshes: tuple[MeshInfo, ...]
    definitions: tuple[Definition, ...]
    programs: tuple[Program, ...] = ()


class Batch(msgspec.Struct, frozen=True, tag="batch", omit_defaults=True):
    """A piece of the program order. The same bytes go to every worker that holds a device of ``meshes``."""

    session: int
    seq: int
    meshes: tuple[int, ...]  # meshes that the calls touch; empty: all workers
    body: bytes  # msgpack of [calls, [[mesh, freed slots], ...]]; a worker keys its compiled plan by these bytes
    uploads: tuple[Blob | SharedBlob | StreamBlob, ...] = ()  # what calls of kernel "upload" take, a blob a piece
    fetches: tuple[Fetch, ...] = ()
    refused: str = ""  # why no call of it may run: all of them fail with a QuotaError of this text


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Signatures below ``sig`` will not be called again."""

    session: int
    sig: int


class Seed(msgspec.Struct, frozen=True, tag="seed", omit_defaults=True):
    """From here on draw from stream ``stream``: where it stands or, with ``seed``, as after torch.manual_seed.

    A session has one stream of random numbers for each task that seeds, and stream 0 for everybody else.
    """

    session: int
    seed: int | None
    stream: int = 0
    ended: tuple[int, ...] = ()  # streams that nobody will draw from again


class Generators(msgspec.Struct, frozen=True):
    """Where the generators of a session stand."""

    stream: int  # the one that is drawn from
    states: dict[int, dict[str, bytes]]  # stream -> device kind -> generator state as torch gives it


class Allow(msgspec.Struct, frozen=True, tag="allow"):
    """Names of ops that users registered; a worker imports no others."""

    session: int
    names: tuple[str, ...]


class AskStatistics(msgspec.Struct, frozen=True, tag="ask_statistics"):
    session: int
    ticket: int
    memory: bool  # tell about memory too, which from then on is watched op by op on CPU devices
    reset_peak: bool
    idle: bool = False  # not before the devices have executed what they were given


class StartTrace(msgspec.Struct, frozen=True, tag="start_trace"):
    """A profile begins: note what is executed from here on, at most ``limit`` events."""

    session: int
    limit: int


class AskTrace(msgspec.Struct, frozen=True, tag="ask_trace"):
    """Tell the time and, with ``stop``, what was noted; the profile is over then."""

    session: int
    ticket: int
    stop: bool


class AskRandomState(msgspec.Struct, frozen=True, tag="ask_random_state"):
    """A worker that starts late continues where this one's generators stand."""

    session: int
    ticket: int


class RandomState(msgspec.Struct, frozen=True, tag="random_state"):
    """Answer to AskRandomState, passed on to the worker that starts."""

    session: int
    ticket: int
    states: Generators


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the worker after what is queued."""


# ---- after a loss: everybody halts, tells what it holds, and is told what to copy and what to run again
#
# All of these carry an *epoch*, one a loss or move. A worker that has halted ignores everything else of the program order
# until it is told to resume.


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Stop at the next call, also inside an exchange. Comes past everything that is queued."""

    session: int
    epoch: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Is that worker alive? Comes past everything that is queued."""

    number: int


class AskHeld(msgspec.Struct, frozen=True, tag="ask_held"):
    """Halt here, if not before, and answer with Held."""

    session: int
    epoch: int


class AskSnapshots(msgspec.Struct, frozen=True, tag="ask_snapshots"):
    """Where did the generators stand when these batches began?"""

    session: int
    epoch: int
    seqs: tuple[int, ...]


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """A piece goes from one device to another, or to another worker of the same device. Places are numbered in Regroup."""

    leaf: int
    slot: int
    source: int
    source_worker: int
    target: int
    target_worker: int


class Regroup(msgspec.Struct, frozen=True, tag="regroup"):
    """Devices may be elsewhere from now on: make groups anew, and copy."""

    session: int
    epoch: int
    places: tuple[tuple[str, int], ...]  # device kind and id; later messages of this epoch refer to the order
    hosts: tuple[int, ...]  # the worker of each
    roots: tuple[tuple[int, ...], ...]  # leaf -> places that have it already, in its slot
    copies: tuple[Copy, ...]


class Redone(msgspec.Struct, frozen=True, array_like=True):
    """A call that runs again."""

    index: int  # in its batch
    call: list[Any]
    places: tuple[int, ...]
    recalls: tuple[tuple[int, int], ...]  # (slot, leaf): what the slot is to hold before
    kills: tuple[int, ...]  # slots to forget after
    draw: bool  # only move the generators on


class Reread(msgspec.Struct, frozen=True, array_like=True):
    """A value that was under way is read after the calls."""

    fetch: Fetch
    recalls: tuple[tuple[int, int], ...]


class Redo(msgspec.Struct, frozen=True, tag="redo"):
    """Calls of batch ``seq`` run again, on stores of their own."""

    session: int
    epoch: int
    seq: int
    calls: tuple[Redone, ...]
    uploads: tuple[Blob | SharedBlob | StreamBlob, ...] = ()
    rereads: tuple[Reread, ...] = ()
    states: Generators | None = None  # where the generators are to stand before
    marks: tuple[Seed, ...] = ()  # what the client said of them then, just before this batch


class PlaceFinal(msgspec.Struct, frozen=True, array_like=True):
    """What a place holds from now on. Masks of slots are little-endian bytes."""

    place: int
    live: bytes  # everything else is forgotten
    redone: bytes  # taken from the stores of the calls that ran again
    copied: tuple[tuple[int, int], ...]  # (slot, leaf)
    lost: bytes


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Put what was copied and made again in place, and go on with the program order behind batch ``seq``."""

    session: int
    epoch: int
    seq: int
    finals: tuple[PlaceFinal, ...]
    states: Generators | None = None


# ---- worker -> controller


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    worker: int
    pid: int
    pulse: bool = False  # a second link, for what must not wait behind the program order: Ping, Halt


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Call ``index`` of batch ``seq`` raised on this worker. ``index`` -1: not one call's fault."""

    session: int
    seq: int
    index: int
    error: int  # number of this failure on this worker; poisoned values refer to it
    sig: int
    device: str
    kind: str  # name of the exception's type
    text: str
    trace: str


class Piece(msgspec.Struct, frozen=True):
    device: int
    shape: tuple[int, ...]
    dtype: str
    data: bytes | None  # None: written into the segment that the fetch named


class Value(msgspec.Struct, frozen=True):
    """This worker's part of the answer to a fetch."""

    session: int
    ticket: int
    worker: int
    pieces: tuple[Piece, ...]
    error: int | None = None  # the slot is poisoned by this failure of this worker


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    """A batch was executed. What it fetched comes along, so that an op and its value cost one answer."""

    session: int
    seq: int
    busy_ns: int
    values: tuple[Value, ...] = ()  # one a fetch of which this worker hosts a part
    held_bytes: int = 0  # by the session on this worker, where that is counted


class DeviceMemory(msgspec.Struct, frozen=True):
    kind: str
    device: int
    allocated: int  # bytes
    peak: int
    reserved: int


class Statistics(msgspec.Struct, frozen=True, tag="statistics"):
    session: int
    ticket: int
    worker: int
    memory: tuple[DeviceMemory, ...]
    counters: dict[str, int]


class Trace(msgspec.Struct, frozen=True, tag="trace"):
    """Answer to AskTrace."""

    session: int
    ticket: int
    worker: int
    clock_ns: int  # of this worker, as it answers
    places: tuple[tuple[str, int], ...]  # (device kind, id) that ``events`` number
    events: bytes  # rows of int64 in this host's byte order, see runtime/tracing.py
    dropped: int  # events beyond the limit


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    number: int


class PlaceHeld(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    device: int
    held: bytes  # mask of slots, little-endian


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Answer to AskHeld: where this worker has halted, and what its devices hold there."""

    session: int
    epoch: int
    worker: int
    seq: int  # the first batch not executed to its end
    done: bytes  # mask of its calls that were executed, little-endian
    draws: int  # how many of these draw random numbers
    places: tuple[PlaceHeld, ...]
    snapshots: tuple[int, ...]  # batches for which it knows where the generators stood
    states: Generators  # where they stand here


class Snapshots(msgspec.Struct, frozen=True, tag="snapshots"):
    """Answer to AskSnapshots: batch -> where the generators stood."""

    session: int
    epoch: int
    states: dict[int, Generators]


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """Answer to Resume."""

    session: int
    epoch: int
    worker: int
    copied_bytes: int  # that this worker has sent to others


ToWorker = (
    Welcome | Define | Batch | Forget | Seed | Allow | AskStatistics | AskRandomState | RandomState
    | StartTrace | AskTrace | Stop | Halt | Ping | AskHeld | AskSnapshots | Regroup | Redo | Resume
)
FromWorker = Hello | Done | Failure | Statistics | RandomState | Trace | Pong | Held | Snapshots | Resumed
