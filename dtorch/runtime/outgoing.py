"""A batch as the client hands it over: to its controller, or to a head."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from dtorch.runtime.lineage import blob_bytes
from dtorch.transport.messages import Blob, Definition, Fetch, MeshInfo, Program, SharedBlob, StreamBlob


class Outgoing(msgspec.Struct):
    """One batch on its way to the controller."""

    seq: int
    body: bytes
    calls: list[tuple[Any, ...]]  # what ``body`` encodes
    meshes: tuple[MeshInfo, ...]
    definitions: tuple[Definition, ...]
    programs: tuple[Program, ...]
    uploads: tuple[Blob | SharedBlob | StreamBlob, ...]
    fetches: tuple[Fetch, ...]
    freed_meshes: tuple[int, ...]  # meshes whose tensors died
    keep: tuple[Any, ...] = ()  # whoever may send ``uploads`` again refers to these: they hold the memory

    refused = ""  # a head may refuse a batch, a client's own controller does not

    @property
    def size_bytes(self) -> int:
        """Of the calls and of what they upload, wherever it travels."""
        return len(self.body) + sum(map(blob_bytes, self.uploads))

    @property
    def signatures(self) -> set[int]:
        """Signatures that are called."""
        return {call[0] for call in self.calls}


class Outlet(Protocol):
    """Where batches go: the controller's shell, or a list in tests. Called in the client's thread."""

    def submit(self, batch: Outgoing) -> None: ...
    def request_flush(self, delay_s: float) -> None:
        """Call ``Recorder.tick`` from another thread after about ``delay_s``."""
        ...

    def wait_for_room(self) -> None:
        """Block while too many batches are in flight."""
        ...
