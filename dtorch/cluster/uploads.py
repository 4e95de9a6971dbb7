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
    frames: list[Frame] = field(default_factory=list)
    size_bytes: int = 0
    is_whole: bool = True  # all that has come is kept


class Uploads:
    """Uploads under way in one session, by stream."""

    def __init__(self) -> None:
        self._uploads: dict[int, _Upload] = {}

    def add(self, part: Part, frame: Frame, limit_bytes: int) -> None:
        """A part goes by. Parts of a stream come in order.

        Args:
            frame: the part as it came.
            limit_bytes: of all that may be kept here.
        """
        upload = self._uploads.get(part.stream)
        if upload is None:
            if part.offset or len(self._uploads) >= MAX_UPLOADS:
                return
            upload = self._uploads[part.stream] = _Upload(part.mesh, part.devices)
        if upload.is_whole and self.size_bytes + len(part.data) <= limit_bytes:
            upload.frames.append(frame)
            upload.size_bytes += len(part.data)
        else:
            upload.frames.clear()
            upload.size_bytes, upload.is_whole = 0, False

    @property
    def size_bytes(self) -> int:
        return sum(upload.size_bytes for upload in self._uploads.values())

    def take(self, blobs: Iterable[Blob | SharedBlob | StreamBlob]) -> tuple[Stream, ...]:
        """What is kept of the uploads of a batch, which have all come."""
        streams = []
        for blob in blobs:
            upload = self._uploads.pop(blob.stream, None) if isinstance(blob, StreamBlob) else None
            if upload is not None and upload.is_whole and isinstance(blob, StreamBlob):
                streams.append(Stream(blob.stream, upload.mesh, upload.devices, tuple(upload.frames)))
        return tuple(streams)

    def kept(self) -> Iterator[tuple[int, tuple[int, ...], Frame]]:
        """(mesh, devices, frame) of all that is kept, in order."""
        for upload in self._uploads.values():
            for frame in upload.frames:
                yield upload.mesh, upload.devices, frame

    def clear(self) -> None:
        self._uploads.clear()
