"""A client's batch as it comes to the head. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from dtorch.runtime.lineage import Stream, blob_bytes
from dtorch.transport.cluster import Submit
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Blob, Fetch, MeshInfo, SharedBlob, StreamBlob


class Batch(msgspec.Struct, frozen=True):
    """A client's batch as the controller takes it: its definitions came before."""

    seq: int
    body: bytes
    signatures: tuple[int, ...]
    freed_meshes: tuple[int, ...]
    uploads: tuple[Blob | SharedBlob | StreamBlob, ...]
    fetches: tuple[Fetch, ...]
    refused: str = ""
    streams: tuple[Stream, ...] = ()
    meshes: tuple[MeshInfo, ...] = ()
    definitions: tuple[Any, ...] = ()
    programs: tuple[Any, ...] = ()


def upload_bytes(asked: Submit) -> int:
    return sum(map(blob_bytes, asked.uploads))


def num_calls(body: bytes) -> int:
    """Calls in a batch's body, read from its first bytes: msgpack of [calls, frees].

    Raises:
        ProtocolError: it does not begin like a body.
    """
    if len(body) >= 2 and body[0] == 0x92:
        kind = body[1]
        if kind & 0xF0 == 0x90:
            return kind & 0x0F
        if kind in (0xDC, 0xDD):
            size = 2 if kind == 0xDC else 4
            return int.from_bytes(body[2 : 2 + size], "big")
    raise ProtocolError("a batch's body is not what it should be")
