"""Messages to bytes and back. The only place that knows the wire format (msgpack, see ``messages.py``)."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import structs

from . import cluster
from .errors import ProtocolError
from .messages import FromWorker, ToWorker

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Frames above this are refused before they are parsed; larger values travel through ``bulk.py``."""

T = TypeVar("T")
Frame = bytes | memoryview
"""What a link carries."""

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_client: msgspec.msgpack.Decoder[cluster.FromClient] = msgspec.msgpack.Decoder(cluster.FromClient)
_to_client: msgspec.msgpack.Decoder[cluster.ToClient] = msgspec.msgpack.Decoder(cluster.ToClient)
_from_pool: msgspec.msgpack.Decoder[cluster.FromPoolWorker] = msgspec.msgpack.Decoder(cluster.FromPoolWorker)
_to_pool: msgspec.msgpack.Decoder[cluster.ToPoolWorker] = msgspec.msgpack.Decoder(cluster.ToPoolWorker)

_NO_BYTES = b"\xc4\x00"  # msgpack's; b"\xc6" begins bytes with a size of 32 bits
_DATA, _PART = b"\xa4data", b"\xa4type\xa4part"

# What a typed decoder raises on hostile bytes: its own errors, bad UTF-8 (ValueError), a map as a map's key
# (TypeError), nesting deeper than the stack (RecursionError), a length that no memory can hold (MemoryError).
_REFUSED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError)


Message = ToWorker | FromWorker | cluster.FromClient | cluster.ToClient | cluster.FromPoolWorker | cluster.ToPoolWorker


def encode(message: Message) -> bytes:
    """One frame for ``message``.

    Raises:
        ProtocolError: the frame would be above ``MAX_FRAME_BYTES``.
    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(frame)} bytes is above {MAX_FRAME_BYTES} bytes")
    return frame


def encode_part(part: cluster.Part) -> tuple[bytes, memoryview]:
    """As ``encode``, in two pieces; the second is the part's data as it is."""
    frame = encode(structs.replace(part, data=memoryview(b"")))
    assert frame.endswith(_NO_BYTES), "data is the last field"
    return frame[: -len(_NO_BYTES)] + b"\xc6" + len(part.data).to_bytes(4, "big"), part.data


def split_part(begin: memoryview) -> tuple[bytes, int, int] | None:
    """Where the data of a part begin, from the first bytes of its frame.

    Returns:
        (the frame without data, bytes before the data, bytes of the data); None when it is not a part, or is not seen.
    """
    first = bytes(begin)
    at = first.find(_DATA + b"\xc6")
    stop = at + len(_DATA) + 5
    if at < 0 or stop > len(first) or _PART not in first[:at]:
        return None
    return first[: at + len(_DATA)] + _NO_BYTES, stop, int.from_bytes(first[stop - 4 : stop], "big")


def decode_to_worker(frame: Frame) -> ToWorker:
    """The message that a controller sent.

    Raises:
        ProtocolError: the bytes are not one message of the vocabulary.
    """
    return _decode(_to_worker, frame, "a message to a worker")


def decode_from_worker(frame: Frame) -> FromWorker:
    """The message that a worker sent.

    Raises:
        ProtocolError: the bytes are not one message of the vocabulary.
    """
    return _decode(_from_worker, frame, "a message from a worker")


def decode_from_client(frame: Frame) -> cluster.FromClient:
    """The message that a client sent to its head. Raises ProtocolError."""
    return _decode(_from_client, frame, "a message from a client")


def decode_to_client(frame: Frame) -> cluster.ToClient:
    """The message that a head sent to a client. Raises ProtocolError."""
    return _decode(_to_client, frame, "a message to a client")


def decode_from_pool_worker(frame: Frame) -> cluster.FromPoolWorker:
    """The message that a worker sent to its head. Raises ProtocolError."""
    return _decode(_from_pool, frame, "a message from a worker")


def decode_to_pool_worker(frame: Frame) -> cluster.ToPoolWorker:
    """The message that a head sent to a worker. Raises ProtocolError."""
    return _decode(_to_pool, frame, "a message to a worker")


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: Frame, what: str) -> T:
    _check_size(frame)
    try:
        return decoder.decode(frame)
    except _REFUSED as error:
        raise ProtocolError(f"not {what}: {_words(error)}") from error


def _check_size(frame: Frame) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is above {MAX_FRAME_BYTES} bytes")


def _words(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
