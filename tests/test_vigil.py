"""Which workers of a head are alive: rules in virtual time, then real processes that are killed, frozen and cut off."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _cluster import PATIENCE_S, Cluster, cluster

from dtorch.cluster.sentinel import ATTEND_PATH, TICKET_HEADER, Sentinel, state_of
from dtorch.cluster.vigil import Vigil
from dtorch.transport.dial import address_of, split_address

# ---- connections, in virtual time


class Pretended:
    """A vigil over one worker that is not there."""

    def __init__(self, grace_s: float = 1.0) -> None:
        self.lost: list[str] = []
        self.asked = 0
        self.link = SimpleNamespace(connected=True, acknowledged=0, reason="cut")
        self.end: Any = SimpleNamespace(number=1, link=self.link, send=self._send)
        self.vigil = Vigil({1: self.end}, lambda _: self.end, grace_s, 3.0, self._lost, lambda _: None)
        self.now = 0.0

    def _lost(self, _: object, why: str) -> None:
        self.lost.append(why)

    def _send(self, _: object) -> None:
        self.asked += 1

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.vigil._look(1, self.end, self.now, True)


def test_a_worker_without_any_connection_is_lost_after_a_grace() -> None:
    case = Pretended()
    case.pass_s(5.0)
    case.link.connected = False
    case.pass_s(1.0)
    assert case.lost == []
    case.link.connected = True
    case.pass_s(5.0)
    case.link.connected = False
    case.pass_s(1.25)
    assert case.lost == ["cut"]


def test_a_worker_whose_process_runs_may_take_its_time_to_connect_again() -> None:
    case = Pretended()
    case.vigil._attended[1] = 1
    case.link.connected = False
    case.pass_s(500.0)
    assert case.lost == []
    case.vigil._attended[1] = 0
    case.pass_s(1.25)
    assert case.lost == ["cut"]


def test_only_a_worker_beside_which_nobody_is_has_to_answer() -> None:
    case = Pretended()
    case.pass_s(1.0)
    assert case.asked == 4
    case.vigil._attended[1] = 1
    case.pass_s(1.0)
    assert case.asked == 4


# ---- real processes


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        heard = made.head._vigil._on_sign

        def noted(number: int) -> None:
            heard(number)
            made.news.set()

        made.head._vigil._on_sign = noted
        yield made


def attended(home: Cluster, number: int) -> bool:
    return home.head._vigil._attended[number] > 0


def start(home: Cluster, **more: str) -> subprocess.Popen[bytes]:
    """A worker in a process of its own, with somebody beside it."""
    before = set(home.head.workers)
    process = subprocess.Popen(
        [sys.executable, "-m", "dtorch", "worker", "--head", home.head.url, "--devices", "cpu:1"],
        env={**os.environ, "DTORCH_API_KEY": home.worker_key, **more}, stdout=subprocess.DEVNULL,
    )
    home.until(lambda: any(attended(home, number) for number in set(home.head.workers) - before))
    return process


def test_one_that_is_killed_has_ended_and_one_that_is_stopped_is_frozen_and_may_come_back(home: Cluster) -> None:
    killed, stopped = start(home), start(home)
    try:
        killed.kill()
        home.until(lambda: len(home.head.workers) == 1)
        assert home.audit()[-1]["reason"] == "its process has ended"
        stopped.send_signal(signal.SIGSTOP)
        home.until(lambda: not home.head.workers)
        assert "frozen: its process is stopped" in home.audit()[-1]["reason"]
        assert home.head.meter.num_lost == 2
        stopped.send_signal(signal.SIGCONT)
        home.until(lambda: attended(home, 3))  # it was told, and has joined anew
        stopped.terminate()
        home.until(lambda: not home.head.workers)
        assert home.audit()[-1]["reason"] == "it left the pool"
    finally:
        for process in (killed, stopped):
            process.kill()
            process.wait()


def test_what_is_beside_a_worker_comes_again_and_ends_with_it(home: Cluster) -> None:
    worker = home.worker("cpu:1")
    kind, host, port = split_address(address_of(home.head.url))
    sentinel = Sentinel(host, port, home.worker_key, kind == "tls")
    try:
        sentinel.follow(worker._ticket)
        home.until(lambda: attended(home, 1))
        first = sentinel.pid
        assert first is not None
        sentinel.look()
        assert sentinel.pid == first
        os.kill(first, signal.SIGKILL)
        assert sentinel._process is not None
        sentinel._process.wait(PATIENCE_S)
        home.until(lambda: not attended(home, 1))
        sentinel.look()
        home.until(lambda: attended(home, 1))
        assert list(home.head.workers) == [1]
    finally:
        sentinel.stop()
    assert sentinel.pid is None
    home.until(lambda: not attended(home, 1))
    assert list(home.head.workers) == [1]  # the worker has said nothing of leaving


@pytest.mark.parametrize(("ticket", "status"), [("", 410), ("1.guessed", 410), ("7.x", 410), ("\xe9", 410)])
def test_only_who_has_the_ticket_speaks_for_a_worker(home: Cluster, ticket: str, status: int) -> None:
    home.worker("cpu:1")
    for key, expected in ((home.worker_key, status), (home.key("ann"), 403), ("wrong", 401)):
        _, host, port = split_address(address_of(home.head.url))
        connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
        try:
            headers = {"Authorization": f"Bearer {key}", TICKET_HEADER: ticket}
            connection.request("POST", ATTEND_PATH, "X", headers)
            assert connection.getresponse().status == expected
        finally:
            connection.close()
    assert list(home.head.workers) == [1]


def test_the_state_of_a_process_is_a_letter() -> None:
    assert state_of(os.getpid()) in "RSD"
    assert state_of(1 << 30) == "?"
