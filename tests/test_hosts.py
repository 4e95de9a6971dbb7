"""Workers on several hosts: network namespaces where this machine allows them, else several loopback addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from _hosts import Hosts, hosts

from dtorch.cluster.keys import KeyFile

CLIENT = """
import torch
import dtorch

def program(num):
    mesh = dtorch.DeviceMesh("cpu", list(range(num)))
    torch.manual_seed(0)
    data, weight = torch.randn(12, 6), torch.randn(6, 4)
    x = dtorch.Tensor(data, device_mesh=mesh, placements=[dtorch.Shard(1)])
    w = dtorch.Tensor(weight, device_mesh=mesh, placements=[dtorch.Shard(0)])
    whole = (x @ w).redistribute(placements=[dtorch.Replicate()])
    torch.testing.assert_close(whole.to_torch(), data @ weight)
    assert torch.equal(x.redistribute(placements=[dtorch.Shard(0)]).to_torch(), data)
    return len(dtorch.statistics().workers)

print("workers", program(NUM), flush=True)
program(2)
"""


class Place:
    """Programs on hosts, or on this one with an address for each worker."""

    def __init__(self, folder: Path, made: Hosts | None, stack: ExitStack) -> None:
        self._hosts, self._stack = made, stack
        self.file = KeyFile(folder / "keys.json")
        self.worker_key, self.client_key = self.file.create("pool", "worker")[1], self.file.create("me", "client")[1]
        self.addresses = made.addresses if made is not None else [f"127.0.0.{number}" for number in range(1, 5)]
        head = self.start(0, "head", "--listen", f"{self.addresses[0]}:0", "--keys", str(self.file.path))
        assert head.stdout is not None
        self.url = head.stdout.readline().split()[2].rstrip(",")

    def start(self, host: int, *words: str, key: str = "") -> subprocess.Popen[str]:
        """``dtorch`` there, ended with the test."""
        return self._popen(host, "-m", "dtorch.cluster.launchers.tied", *words, key=key)

    def _popen(self, host: int, *words: str, key: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "DTORCH_API_KEY": key, "DTORCH_HEAD": getattr(self, "url", "")}
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment, **options}
        if self._hosts is not None:
            process = self._hosts.start(host, sys.executable, *words, **options)
        else:
            process = subprocess.Popen([sys.executable, *words], text=True, **options)
        self._stack.enter_context(process)
        if process.stdin is not None:
            self._stack.callback(process.stdin.close)
        return process

    def worker(self, host: int) -> subprocess.Popen[str]:
        """A worker there; waits until it has joined."""
        more = [] if self._hosts is not None else ["--address", self.addresses[host]]
        made = self.start(host, "worker", "--devices", "cpu:2", *more, key=self.worker_key)
        assert made.stdout is not None
        line = made.stdout.readline()
        assert line.startswith("worker "), line
        return made

    def client(self, host: int, num: int) -> str:
        """Run the client's program there on ``num`` devices; the answer is what it prints."""
        source = CLIENT.replace("NUM", str(num))
        process = self._popen(host, "-c", source, key=self.client_key, stderr=subprocess.PIPE)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with hosts(4) as made, ExitStack() as stack:
        yield Place(tmp_path, made, stack)


def test_groups_form_across_hosts_and_anew_when_a_host_is_lost(place: Place) -> None:
    """The head on host 0, workers on 1 and 2, a client on 3; then the worker of host 2 dies and host 0 has one instead."""
    place.worker(1)
    lost = place.worker(2)
    assert place.client(3, 4) == "workers 2\n"
    lost.kill()
    lost.wait()
    place.worker(0)
    assert place.client(3, 4) == "workers 2\n"
