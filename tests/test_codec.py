"""Frames survive a round trip, and bytes from elsewhere raise ProtocolError and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.transport import codec
from dtorch.transport import messages as m
from dtorch.transport.errors import ProtocolError

LAYOUT = m.Layout(0, (4, 4), "float32", (0, -1))
SHARED = m.SharedBlob(12, 3, 4096, 64)
TO_WORKER: list[m.ToWorker] = [
    m.Welcome(m.PROTOCOL_VERSION, 7),
    m.Define(
        1,
        (m.MeshInfo(0, "cpu", (2, 1), (0, 1)),),
        (m.Definition(3, "torch.add", "local", [1, [2.5, None], {"a": "b"}], {"dim": -1}, (LAYOUT,), (LAYOUT,), (0,)),),
    ),
    m.Batch(1, 9, (0,), b"\x92\x90\x90", (m.Blob(b"abc"), SHARED), (m.Fetch(5, 2, 0, (0, 1), SHARED, LAYOUT),)),
    m.Forget(1, 40),
    m.Seed(1, 2**62),
    m.Seed(1, None, 3, (1, 2)),
    m.Allow(1, ("custom:package.module:function",)),
    m.AskStatistics(1, 2, True, False),
    m.AskStatistics(1, 2, False, False, True),
    m.StartTrace(1, 1000),
    m.AskTrace(1, 2, True),
    m.Stop(),
]
FROM_WORKER: list[m.FromWorker] = [
    m.Hello(m.PROTOCOL_VERSION, 0, 4242),
    m.Done(1, 9, 123456789),
    m.Failure(1, 9, -1, 2, 3, "cpu:0", "IndexError", "out of range", "Traceback"),
    m.Done(
        1,
        9,
        5,
        (
            m.Value(1, 5, 0, (m.Piece(0, (2, 2), "float32", b"\0" * 16), m.Piece(1, (), "bool", None)), None),
            m.Value(1, 6, 0, (), 2),
        ),
    ),
    m.Statistics(1, 2, 0, (m.DeviceMemory("cpu", 0, 1, 2, 3),), {"batches": 4}),
    m.Trace(1, 2, 0, 123, (("cpu", 0),), b"\0" * 72, 3),
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda x: type(x).__name__)
def test_messages_to_a_worker_survive(message: m.ToWorker) -> None:
    assert codec.decode_to_worker(codec.encode(message)) == message


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda x: type(x).__name__)
def test_messages_from_a_worker_survive(message: m.FromWorker) -> None:
    assert codec.decode_from_worker(codec.encode(message)) == message


def test_each_direction_refuses_the_other() -> None:
    with pytest.raises(ProtocolError, match="not a message from a worker"):
        codec.decode_from_worker(codec.encode(TO_WORKER[0]))
    with pytest.raises(ProtocolError, match="not a message to a worker"):
        codec.decode_to_worker(codec.encode(FROM_WORKER[0]))


def test_size_is_checked_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 8)
    with pytest.raises(ProtocolError, match="above 8 bytes"):
        codec.decode_to_worker(b"\xc1" * 9)
    with pytest.raises(ProtocolError, match="above 8 bytes"):
        codec.decode_from_worker(b"\xc1" * 9)
    with pytest.raises(ProtocolError, match="Batch"):
        codec.encode(m.Batch(1, 9, (0,), b"x" * 100))


def _garbage(frame: bytes) -> None:
    for decode in (codec.decode_to_worker, codec.decode_from_worker):
        try:
            decode(frame)
        except ProtocolError as error:
            text = str(error)
            assert len(text) < 300


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_error(frame: bytes) -> None:
    _garbage(frame)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TO_WORKER + FROM_WORKER), st.data())
def test_damaged_frames_raise_only_protocol_error(message: m.ToWorker | m.FromWorker, data: st.DataObject) -> None:
    frame = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _garbage(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    _garbage(bytes(frame))


def _define_with(args: bytes) -> bytes:
    """A Define whose only definition carries ``args`` (raw msgpack) as its untyped argument template."""
    marker = b"MARKER--"
    frame = codec.encode(m.Define(1, (), (m.Definition(1, "x", "local", [marker], {}, (), ()),)))
    packed = msgspec.msgpack.encode([marker])
    assert frame.count(packed) == 1
    return frame.replace(packed, args)


@pytest.mark.parametrize(
    "args",
    [
        b"\x91" * 100_000 + b"\xc0",  # nesting
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 items
        b"\x91\xdf\xff\xff\xff\xff",  # a map of as many
        b"\x91\xc6\xff\xff\xff\xff",  # bytes of as many
        b"\x91\x81\x80\xc0",  # a map as a map's key
        b"\x91\xa2\xff\xfe",  # bad UTF-8
        b"\x91\xd6\xff\x00",  # cut extension
    ],
    ids=["nesting", "array", "map", "bytes", "map-key", "utf8", "extension"],
)
def test_hostile_untyped_parts_raise_only_protocol_error(args: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_to_worker(_define_with(args))
