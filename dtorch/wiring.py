"""What a session stands on: a controller and workers of its own in this machine, or a head's."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dtorch.runtime.controller import Controller
from dtorch.runtime.lineage import Bounds
from dtorch.runtime.rewrite import RULES, chosen
from dtorch.runtime.shell import ControllerThread, Listener
from dtorch.transport.bulk import SegmentPool

if TYPE_CHECKING:
    from dtorch.cluster.buffers import RemotePool
    from dtorch.cluster.remote import RemoteController, Target


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
    lineage: Bounds | None = None  # what is remembered to get over the loss of a worker; None: it ends the session
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
        from dtorch.cluster.buffers import RemotePool
        from dtorch.cluster.remote import RemoteController

        buffers = RemotePool()
        remote = RemoteController(options.target, listener, buffers)
        return Wires(buffers, remote, remote.session)
    virtual = dict(options.virtual)
    kinds = {"cpu", *virtual} if options.workers == "shared" else set()
    shared = frozenset(kind for kind in kinds if virtual.get(kind, kind) == "cpu")
    pool = SegmentPool()
    thread = ControllerThread(
        Controller(number, shared, recover=options.lineage),
        listener,
        entry="dtorch.worker:main",
        worker_args={"virtual": virtual, "num_threads": options.num_threads, "rules": options.rules},
        listen=options.listen,
        start_timeout_s=options.start_timeout_s,
    )
    return Wires(pool, thread, number)


def chosen_options(
    workers: str | None = None,
    virtual: dict[str, str] | None = None,
    listen: str | None = None,
    sync: bool | None = None,
    num_threads: int | None = None,
    start_timeout_s: float = 120.0,
    recover: bool | None = None,
    lineage: Bounds | None = None,
) -> Options:
    """Options as ``dtorch.init`` takes them; what is None is taken from the environment.

    Raises:
        ValueError: an option has a value that it cannot have.
    """
    workers = workers or os.environ.get("DTORCH_WORKERS") or "shared"
    if workers not in ("shared", "per-device"):
        raise ValueError(f"workers must be 'shared' or 'per-device', not {workers!r}")
    if virtual is None:
        text = os.environ.get("DTORCH_VIRTUAL", "")
        virtual = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    for kind, other in virtual.items():
        if not re.fullmatch(r"cpu|cuda(:\d+)?", other):
            raise ValueError(
                f"virtual={{{kind!r}: {other!r}}}: "
                "'cpu', 'cuda' or one GPU such as 'cuda:0' can stand for a device kind"
            )
    if listen is not None and not re.fullmatch(r"[^:]+(:\d{1,5})?", listen):
        raise ValueError(f"listen is 'host' or 'host:port', not {listen!r}")
    sync = default_sync() if sync is None else sync
    if num_threads is None:
        num_threads = torch.get_num_threads()
    if num_threads < 1 or start_timeout_s <= 0:
        raise ValueError(
            f"num_threads={num_threads!r} must be at least 1, and start_timeout_s={start_timeout_s!r} above 0"
        )
    rules = chosen(os.environ.get("DTORCH_REWRITE"))
    if recover is None:
        recover = os.environ.get("DTORCH_RECOVER", "1" if workers == "per-device" else "0") not in ("", "0")
    bounds = (lineage or Bounds()) if recover else None
    return Options(workers, tuple(sorted(virtual.items())), listen, sync, num_threads, start_timeout_s, rules, bounds)


def default_sync() -> bool:
    """Whether DTORCH_SYNC asks for running op by op."""
    return os.environ.get("DTORCH_SYNC", "") not in ("", "0")
