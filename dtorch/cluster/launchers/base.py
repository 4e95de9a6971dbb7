"""What a launcher is told, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

LAUNCH, SLOT, NODE = "launch", "slot", "node"
"""Labels of workers that a launcher has started: which launch, which worker of it, which node of its engine."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """The workers of one launch, which are all alike."""

    launch: str  # names the launch, and its workers with a number behind
    head: str  # URL
    key: str  # an API key of the role "worker"
    devices: str  # of each, such as "cpu:4"
    labels: dict[str, str] = {}
    allow: tuple[str, ...] = ()  # modules from which ops of users may be imported
    folders: tuple[str, ...] = ()  # where sessions may read and write files
    num_threads: int = 1
    ca_file: str = ""  # of the authority of the head's certificate; the same path on every machine

    def name(self, slot: int) -> str:
        return f"{self.launch}-{slot}"

    def labels_of(self, slot: int) -> dict[str, str]:
        return {**self.labels, LAUNCH: self.launch, SLOT: str(slot)}


def arguments(spec: WorkerSpec, slot: int) -> list[str]:
    """Of ``dtorch`` for one worker. The key is not among them: others can read command lines."""
    made = ["worker", "--head", spec.head, "--devices", spec.devices, "--name", spec.name(slot)]
    made += ["--threads", str(spec.num_threads)]
    for name, value in spec.labels_of(slot).items():
        made += ["--labels", f"{name}={value}"]
    for module in spec.allow:
        made += ["--allow", module]
    for folder in spec.folders:
        made += ["--files", folder]
    return made


def environment(spec: WorkerSpec) -> dict[str, str]:
    """What a worker's environment has beside the rest."""
    return {"DTORCH_API_KEY": spec.key, **({"DTORCH_CA_FILE": spec.ca_file} if spec.ca_file else {})}


class Incarnation(NamedTuple):
    """One process of a worker. Its successor has the same slot."""

    slot: int
    pid: int
    node: str = ""  # of the engine; "" where it has one only


@dataclass(frozen=True)
class Ended:
    """A worker that its engine does not start again.

    Attributes:
        error: why; empty when it has left of its own, as after ``dtorch drain``.
    """

    slot: int
    error: str = ""


class Launcher(Protocol):
    """Starts workers and starts those anew that die. Used from one event loop, which it never blocks."""

    async def start(self, spec: WorkerSpec, num_workers: int) -> None:
        """Ask the engine for workers; they join the head once they run.

        Raises:
            LaunchError: the engine cannot be used, or never could start them.
        """

    async def kill(self, which: Incarnation) -> None:
        """End a process that does not answer, if it is still there. The engine starts another."""

    async def wait_ended(self) -> Ended:
        """The next worker that is not started again."""

    async def stop(self) -> None:
        """End every worker: they leave the pool, those that do not are killed. May be called at any time, and twice."""
