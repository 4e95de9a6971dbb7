"""Workers on several hosts: network namespaces where this machine makes them, else several loopback addresses."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from _cluster import Cluster, cluster

import dtorch
from dtorch.session import using


class Host(NamedTuple):
    enter: list[str]  # what to put before a command
    address: str
    wire: str = ""  # the interface by which this machine reaches it


class Hosts(NamedTuple):
    head: str  # where the head listens
    hosts: list[Host]


NUM = 3


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Hosts that reach the head and each other by addresses of their own."""
    tag = f"dt{os.getpid() % 10_000}"
    spaces = [f"{tag}n{number}" for number in range(NUM)]
    net = f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}"
    try:
        try:
            _ip("link", "add", f"{tag}b", "type", "bridge")
            _ip("addr", "add", f"{net}.1/24", "dev", f"{tag}b")
            _ip("link", "set", f"{tag}b", "up")
            for number, space in enumerate(spaces):
                _ip("netns", "add", space)
                _ip("link", "add", f"{tag}v{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", f"{tag}v{number}", "master", f"{tag}b", "up")
                _ip("-n", space, "addr", "add", f"{net}.{number + 2}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
            made = [
                Host(["ip", "netns", "exec", space], f"{net}.{n + 2}", f"{tag}v{n}") for n, space in enumerate(spaces)
            ]
            found = Hosts(f"{net}.1", made)
        except (OSError, subprocess.CalledProcessError):
            found = Hosts("127.0.0.1", [Host([], f"127.0.0.{number + 2}") for number in range(NUM)])
        yield found
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{tag}b"], check=False, capture_output=True)


def start(home: Cluster, host: Host) -> subprocess.Popen[bytes]:
    """A worker on a host."""
    arguments = ["--head", home.head.url, "--devices", "cpu:1", "--name", host.address]
    if not host.enter:
        arguments += ["--address", host.address]
    return subprocess.Popen(
        [*host.enter, sys.executable, "-m", "dtorch", "worker", *arguments],
        env={**os.environ, "DTORCH_API_KEY": home.worker_key},
    )


def test_workers_on_several_hosts_form_groups_of_any_kind(hosts: Hosts, tmp_path: Path) -> None:
    with cluster(tmp_path, host=hosts.head) as home:
        processes = []
        try:
            for host in hosts.hosts:
                processes.append(start(home, host))
            home.run(asyncio.wait_for(home._until(lambda: len(home.head.workers) == NUM), 120.0))
            if hosts.hosts[0].enter:
                assert {end.address for end in home.head.workers.values()} == {host.address for host in hosts.hosts}
            session = home.session(home.key("ann"))
            data = torch.arange(36.0).reshape(6, 6)
            with using(session):
                for devices in ([0, 1, 2], [0, 1], [1, 2], [2, 0]):  # each its own group
                    mesh = dtorch.DeviceMesh("cpu", devices)
                    x = dtorch.Tensor(data, device_mesh=mesh, placements=[dtorch.Shard(0)])
                    total = x.sum(0).redistribute(placements=[dtorch.Replicate()])
                    across = x.redistribute(placements=[dtorch.Shard(1)])
                    assert torch.equal(total.to_torch(), data.sum(0))
                    assert torch.equal(across.to_torch(), data)
                workers = dtorch.statistics().workers
            assert len(workers) == NUM
            assert all(counters["exchanges"] > 0 for counters in workers.values())
            session.close()
            processes[0].send_signal(signal.SIGSTOP)
            home.until(lambda: len(home.head.workers) == NUM - 1)
            assert "frozen" in home.audit()[-1]["reason"]
            processes[0].send_signal(signal.SIGCONT)  # it finds out, and joins again
            home.until(lambda: len(home.head.workers) == NUM)
        finally:
            for process in processes:
                process.terminate()
            codes = [process.wait(30) for process in processes]
        assert codes == [0] * NUM


def test_a_worker_that_is_cut_off_is_given_up_and_joins_anew_when_it_is_back(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts.hosts[0]
    if not host.wire:
        pytest.skip("this machine makes no network namespaces")
    with cluster(tmp_path, host=hosts.head) as home:
        process = start(home, host)
        try:
            home.run(asyncio.wait_for(home._until(lambda: len(home.head.workers) == 1), 120.0))
            _ip("link", "set", host.wire, "down")
            home.until(lambda: not home.head.workers)
            # By its silence, or by its connections if this machine was held up meanwhile: no more is sure.
            assert re.search("does not answer any more|did not come back", home.audit()[-1]["reason"])
            _ip("link", "set", host.wire, "up")
            home.until(lambda: list(home.head.workers) == [2])
            reasons = [event["reason"] for event in home.audit() if event["event"] == "refused"]
            assert reasons == ["this worker was given up"]  # it was told
        finally:
            process.terminate()
            assert process.wait(30) == 0
