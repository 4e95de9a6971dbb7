"""Workers as actors of Ray, on a Ray cluster of two nodes; one cluster for all of these tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _up import PATIENCE_S, Up

import dtorch
from dtorch.cli import main
from dtorch.cluster.launchers.ray import actor_options, resources_for
from dtorch.session import using

HERE = Path(__file__).parent
SUBSET = ("test_intro.py", "test_redistribute.py", "test_moe.py", "test_async.py")
"""Tests of the suite that run as they are with the workers of whatever head the environment names."""
WITHOUT = "cuda or program or chains or from_shards_takes or travel or mixtral or workers_do_not"
"""These start workers of their own, for virtual GPUs for instance, or programs, or stop processes of this machine."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray cluster of two nodes with two CPUs each."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "_ray_nodes.py"), "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nodes:
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        yield json.loads(nodes.stdout.readline())["address"]
        nodes.stdin.close()


@pytest.fixture(scope="module")
def up(address: str) -> Iterator[Up]:
    """A worker of six devices on each node."""
    made = Up(
        "--on", "ray", "--address", address, "--workers", "2", "--devices", "cpu:6", "--resources", '{"CPU": 1}',
        "--placement", "STRICT_SPREAD", "--labels", "rack=a",
    )
    yield made
    made.end()


def check_program(num_workers: int) -> None:
    """A product, a sum over devices and an exchange between them, on all devices of the default session's workers."""
    mesh = dtorch.DeviceMesh("cpu", list(range(6 * num_workers)))
    torch.manual_seed(0)
    data, weight = torch.randn(16, 24), torch.randn(24, 8)
    x = dtorch.Tensor(data, device_mesh=mesh, placements=[dtorch.Shard(1)])
    w = dtorch.Tensor(weight, device_mesh=mesh, placements=[dtorch.Shard(0)])
    partial = x @ w
    assert partial.placements[0].is_partial()
    torch.testing.assert_close(partial.redistribute(placements=[dtorch.Replicate()]).to_torch(), data @ weight)
    across = x.redistribute(placements=[dtorch.Shard(0)])
    assert torch.equal(across.to_torch(), data)
    assert len(dtorch.statistics().workers) == num_workers


def test_workers_are_placed_by_the_placement_group_and_compute_together(up: Up) -> None:
    workers = up.workers()
    assert [worker["labels"]["slot"] for worker in workers] == ["0", "1"]
    assert len({worker["labels"]["node"] for worker in workers}) == 2
    assert {worker["labels"]["rack"] for worker in workers} == {"a"}
    for worker in workers:
        assert b"RayWorker" in Path(f"/proc/{worker['pid']}/cmdline").read_bytes()
    session = up.session()
    with contextlib.closing(session), using(session):
        check_program(2)


def test_the_distributed_subset_of_the_suite_runs_on_it(up: Up) -> None:
    paths = [str(HERE / name) for name in SUBSET]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", f"not ({WITHOUT})", *paths],
        env=up.environment(), cwd=HERE.parent, capture_output=True, text=True, check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert ran.stdout.count(".") > 50


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_actor_that_is_lost_is_started_again_by_ray_and_used_again(up: Up, sig: signal.Signals) -> None:
    """Of one that is frozen Ray sees nothing: the head gives it up, and ``up`` has it killed."""
    before = up.workers()
    os.kill(before[0]["pid"], sig)
    assert up.wait_said("runs again").startswith(f"worker {before[0]['name']} ")
    after = up.workers()
    assert [worker["labels"] for worker in after] == [worker["labels"] for worker in before]  # the same places
    assert after[0]["pid"] != before[0]["pid"]
    assert after[1]["pid"] == before[1]["pid"]
    session = up.session()
    with contextlib.closing(session), using(session):
        check_program(2)


def test_what_no_node_has_is_an_error_at_once(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "dtorch", "up", "--on", "ray", "--address", address, "--resources", '{"CPU": 1, "quantum": 2}',
         "--listen", "127.0.0.1:0"],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )
    assert ran.returncode == 1
    assert "a worker asks for CPU: 1, quantum: 2, and the whole Ray cluster has CPU: 4" in ran.stderr


def test_the_end_of_up_is_the_end_of_its_workers(up: Up) -> None:
    """The last test of this module."""
    pids = [worker["pid"] for worker in up.workers()]
    up.end()
    assert up.process.returncode == 0
    for pid in pids:
        with pytest.raises(FileNotFoundError):
            Path(f"/proc/{pid}/cmdline").read_bytes()


# ---- without a cluster


def test_resources_follow_from_devices() -> None:
    assert resources_for("cpu:4") == {"CPU": 4.0}
    assert resources_for("cuda:1") == {"CPU": 1.0, "GPU": 1.0}
    for wrong, text in (("cuda:8", '8 workers with "cuda:1"'), ("cuda:all", "not 'cuda:all'"), ("cpu:1,cuda:1", "one kind")):
        with pytest.raises(ValueError, match=text):
            resources_for(wrong)
    assert actor_options({"CPU": 2, "GPU": 0.5, "memory": 1e9, "rack_a": 1}) == {
        "num_cpus": 2, "num_gpus": 0.5, "memory": 1_000_000_000, "resources": {"rack_a": 1},
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--resources", "{CPU: 1}"), "as JSON"),
        (("--resources", '{"CPU": -1}'), "at least 0"),
        (("--devices", "cuda:2"), "process of its own"),
        (("--workers", "0"), "at least 1"),
    ],
)
def test_what_ray_cannot_place_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str) -> None:
    assert main(["up", "--on", "ray", *words]) == 1
    assert text in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["up", "--on", "ray"]) == 1
    assert "pip install 'dtorch[ray]'" in capsys.readouterr().err
