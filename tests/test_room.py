"""Back-pressure: a worker that does not keep up slows the client down, and nothing grows."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import dtorch
from dtorch import DeviceMesh
from dtorch.runtime.room import MAX_BATCHES, MAX_BYTES, Room
from dtorch.session import current_session


def test_too_many_batches_fill_the_room_and_half_of_it_must_be_free_again() -> None:
    room = Room()
    for seq in range(MAX_BATCHES + 1):
        assert not room.is_full
        room.enter(seq, 10)
    assert room.is_full
    for seq in range(MAX_BATCHES // 2):
        room.leave(seq)
        assert not room.is_roomy
    room.leave(MAX_BATCHES)
    assert room.is_roomy
    assert room.num_bytes == 10 * room.num_batches


def test_bytes_fill_the_room_but_one_batch_may_be_of_any_size() -> None:
    room = Room()
    room.enter(1, 10 * MAX_BYTES)
    assert not room.is_full
    room.enter(2, 1)
    assert room.is_full
    room.leave(1)
    room.leave(1)  # no matter
    assert room.is_roomy
    assert (room.num_batches, room.num_bytes) == (1, 1)


class _Watched(threading.Condition):
    """A condition that tells when somebody begins to wait for it."""

    def __init__(self, waited: threading.Event) -> None:
        super().__init__()
        self._waited = waited

    def wait(self, timeout: float | None = None) -> bool:
        self._waited.set()
        return super().wait(timeout)


def test_a_held_worker_holds_the_client_back(monkeypatch: pytest.MonkeyPatch) -> None:
    dtorch.init()
    mesh = DeviceMesh("cpu", [0])
    piece = torch.ones(4 * 2**20)  # 16 MiB
    total = dtorch.zeros(4 * 2**20, device_mesh=mesh)
    dtorch.synchronize()
    thread = current_session().thread
    waits = threading.Event()
    thread._roomy = _Watched(waits)
    monkeypatch.setattr(thread._pulse, "_states", lambda: dict.fromkeys(thread.pids, "S"))  # stopped, and yet not lost
    pid = next(iter(thread.pids.values()))
    sent = []

    def feed() -> None:
        nonlocal total
        for number in range(40):  # 640 MiB, more than the room
            total = total + dtorch.tensor(piece, device_mesh=mesh)
            sent.append(number)

    feeder = threading.Thread(target=feed)
    os.kill(pid, signal.SIGSTOP)
    try:
        feeder.start()
        assert waits.wait(60.0)
        assert len(sent) < 40
        assert thread.room.num_bytes <= MAX_BYTES + 2 * 2**25  # a batch may come to be on top
    finally:
        os.kill(pid, signal.SIGCONT)
        feeder.join()
    assert total[:3].tolist() == [40.0] * 3
    assert thread.room.num_bytes < MAX_BYTES


def test_ops_without_bytes_are_held_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh("cpu", [0])
    x = dtorch.ones(2, device_mesh=mesh)
    dtorch.synchronize()
    thread = current_session().thread
    waits = threading.Event()
    thread._roomy = _Watched(waits)
    monkeypatch.setattr(thread._pulse, "_states", lambda: dict.fromkeys(thread.pids, "S"))  # stopped, and yet not lost
    pid = next(iter(thread.pids.values()))
    found = []

    def work() -> None:
        y = x
        for _ in range(MAX_BATCHES * 1024 + 2048):
            y = y * 1.0
        found.append(y.tolist())

    worker = threading.Thread(target=work)
    os.kill(pid, signal.SIGSTOP)
    try:
        worker.start()
        assert waits.wait(60.0)
        assert not found
        assert thread.room.num_batches <= MAX_BATCHES + 3  # the timer may have sent some too
    finally:
        os.kill(pid, signal.SIGCONT)
        worker.join()
    assert found == [[1.0, 1.0]]
