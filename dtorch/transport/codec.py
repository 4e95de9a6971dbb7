"""Messages to bytes and back. The only place that knows the wire format (msgpack, see ``messages.py``)."""

from __future__ import annotations

import msgspec

from .errors import ProtocolError
from .messages import FromWorker, ToWorker

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Frames above this are refused before they are parsed; larger values travel through ``bulk.py``."""

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

# What a typed decoder raises on hostile bytes: its own errors, bad UTF-8 (ValueError), a map as a map's key
# (TypeError), nesting deeper than the stack (RecursionError), a length that no memory can hold (MemoryError).
_REFUSED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError)


def encode(message: ToWorker | FromWorker) -> bytes:
    """One frame for ``message``.

    Raises:
        ProtocolError: the frame would be above ``MAX_FRAME_BYTES``.
    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(frame)} bytes is above {MAX_FRAME_BYTES} bytes")
    return frame


def decode_to_worker(frame: bytes) -> ToWorker:
    """The message that a controller sent.

    Raises:
        ProtocolError: the bytes are not one message of the vocabulary.
    """
    _check_size(frame)
    try:
        return _to_worker.decode(frame)
    except _REFUSED as error:
        raise ProtocolError(f"not a message to a worker: {_words(error)}") from error


def decode_from_worker(frame: bytes) -> FromWorker:
    """The message that a worker sent.

    Raises:
        ProtocolError: the bytes are not one message of the vocabulary.
    """
    _check_size(frame)
    try:
        return _from_worker.decode(frame)
    except _REFUSED as error:
        raise ProtocolError(f"not a message from a worker: {_words(error)}") from error


def _check_size(frame: bytes) -> None:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is above {MAX_FRAME_BYTES} bytes")


def _words(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
