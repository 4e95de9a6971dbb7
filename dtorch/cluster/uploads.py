"""What has come of a client's uploads whose batches have not, kept in case a worker is lost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dtorch.runtime.lineage import Stream
from dtorch.transport.cluster import Part
from dtorch.transport.codec import Frame
from dtorch.transport.messages import Blob, SharedBlob, StreamBlob

MAX_UPLOADS = 4096
"""Uploads under way of which anything is kept."""


@dataclass
class _Upload:
    mesh: int
    devices: tuple[int, ...]
    size_bytes: int  # that may be kept of it: all, or nothing
    frames: list[Frame] = field(default_factory=list)
    came_bytes: int = 0


class Uploads:
    """Uploads under way in one session, by stream."""

    def __init__(self) -> None:
        self._uploads: dict[int, _Upload] = {}

    def add(self, part: Part, frame: Frame, limit_bytes: int) -> None:
        """A part goes by. Parts of a stream come in order; whether it is kept is decided with its first.

        Args:
            frame: the part as it came.
            limit_bytes: of all that may be kept here.
        """
        upload = self._uploads.get(part.stream)
        if upload is None:
            if part.offset or len(self._uploads) >= MAX_UPLOADS:
                return
            fits = 0 < part.total <= limit_bytes - self.size_bytes
            upload = self._uploads[part.stream] = _Upload(part.mesh, part.devices, part.total if fits else 0)
        upload.came_bytes += len(part.data)
        if upload.came_bytes <= upload.size_bytes:
            upload.frames.append(frame)
        else:
            upload.frames.clear()
            upload.size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Of what is kept, and of what will come of it."""
        return sum(upload.size_bytes for upload in self._uploads.values())

    def take(self, blobs: Iterable[Blob | SharedBlob | StreamBlob]) -> tuple[Stream, ...]:
        """What is kept of the uploads of a batch, which have all come."""
        streams = []
        for blob in blobs:
            upload = self._uploads.pop(blob.stream, None) if isinstance(blob, StreamBlob) else None
            if upload is not None and upload.size_bytes and isinstance(blob, StreamBlob):
                streams.append(Stream(blob.stream, upload.mesh, upload.devices, tuple(upload.frames)))
        return tuple(streams)

    def kept(self) -> Iterator[tuple[int, tuple[int, ...], Frame]]:
        """(mesh, devices, frame) of all that is kept, in order."""
        for upload in self._uploads.values():
            for frame in upload.frames:
                yield upload.mesh, upload.devices, frame

    def clear(self) -> None:
        self._uploads.clear()
