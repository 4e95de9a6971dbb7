"""Uploads under way that a head remembers: wholly or not at all, within a bound."""

from __future__ import annotations

from dtorch.cluster.uploads import Uploads
from dtorch.transport.cluster import Part
from dtorch.transport.messages import StreamBlob


def part(stream: int, offset: int, size: int, total: int) -> Part:
    return Part(1, stream, offset, total, 2, (3,), memoryview(bytes(size)))


def test_an_upload_is_kept_wholly_or_not_at_all() -> None:
    uploads = Uploads()
    uploads.add(part(1, 0, 40, 80), b"a", 100)
    assert uploads.size_bytes == 80  # what will come of it counts
    uploads.add(part(2, 0, 10, 30), b"b", 100)
    uploads.add(part(3, 0, 10, 20), b"c", 100)
    uploads.add(part(1, 40, 40, 80), b"d", 100)
    uploads.add(part(2, 10, 20, 30), b"e", 100)
    uploads.add(part(3, 10, 10, 20), b"f", 100)
    assert uploads.size_bytes == 100
    assert [frame for _, _, frame in uploads.kept()] == [b"a", b"d", b"c", b"f"]
    streams = uploads.take([StreamBlob(n, 1) for n in (1, 2, 3)])
    assert [(stream.number, stream.mesh, stream.devices, stream.frames) for stream in streams] == [
        (1, 2, (3,), (b"a", b"d")),
        (3, 2, (3,), (b"c", b"f")),
    ]
    assert uploads.size_bytes == 0


def test_one_that_is_larger_than_it_said_is_not_kept() -> None:
    uploads = Uploads()
    uploads.add(part(1, 0, 40, 50), b"a", 100)
    uploads.add(part(1, 40, 40, 50), b"b", 100)
    assert uploads.size_bytes == 0
    assert not list(uploads.kept())
    uploads.add(part(2, 0, 40, -1), b"a", 100)
    uploads.add(part(3, 10, 40, 50), b"a", 100)  # nobody knows its beginning
    assert not list(uploads.kept())
    assert uploads.take([StreamBlob(n, 1) for n in (1, 2, 3)]) == ()
