"""What a session stands on: a controller and workers of its own in this machine, or a head's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dtorch.runtime.controller import Controller
from dtorch.runtime.rewrite import RULES
from dtorch.runtime.shell import ControllerThread, Listener
from dtorch.transport.bulk import SegmentPool

if TYPE_CHECKING:
    from dtorch.cluster.remote import RemoteController, RemotePool, Target


@dataclass(frozen=True)
class Options:
    """What ``dtorch.init`` decides. See there."""

    workers: str = "shared"
    virtual: tuple[tuple[str, str], ...] = ()
    listen: str | None = None
    sync: bool = False
    num_threads: int = 1
    start_timeout_s: float = 120.0
    rules: tuple[str, ...] = tuple(RULES)
    target: Target | None = None  # the head whose workers are used, in place of workers of our own


class Wires(NamedTuple):
    """What a session stands on."""

    pool: SegmentPool | RemotePool  # memory for large values
    thread: ControllerThread | RemoteController  # the way to the workers
    number: int  # of the session there


def wire(options: Options, number: int, listener: Listener) -> Wires:
    """Start workers, or connect to a head.

    Args:
        number: of the session in this process.
    """
    if options.target is not None:
        from dtorch.cluster.remote import RemoteController, RemotePool

        buffers = RemotePool()
        remote = RemoteController(options.target, listener, buffers)
        return Wires(buffers, remote, remote.session)
    virtual = dict(options.virtual)
    kinds = {"cpu", *virtual} if options.workers == "shared" else set()
    shared = frozenset(kind for kind in kinds if virtual.get(kind, kind) == "cpu")
    pool = SegmentPool()
    thread = ControllerThread(
        Controller(number, shared),
        listener,
        entry="dtorch.worker:main",
        worker_args={"virtual": virtual, "num_threads": options.num_threads, "rules": options.rules},
        listen=options.listen,
        start_timeout_s=options.start_timeout_s,
    )
    return Wires(pool, thread, number)
