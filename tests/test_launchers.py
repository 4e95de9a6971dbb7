"""Launchers: what they are told, which workers they end, and processes of this machine as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest
import torch
from _up import PATIENCE_S, Up

import dtorch
from dtorch.cli import main
from dtorch.cluster.health import health
from dtorch.cluster.launchers.base import Ended, Incarnation, WorkerSpec, arguments, environment
from dtorch.cluster.launchers.local import MAX_FAILURES, Processes
from dtorch.cluster.launchers.up import incarnations, reachable
from dtorch.cluster.launchers.watch import Watch
from dtorch.session import using
from dtorch.transport.errors import LaunchError

SPEC = WorkerSpec(
    "job", "wss://head:7474", "dt_1_secret", "cpu:2", {"rack": "a"}, ("ops.mine",), ("/data",), 3, "/etc/ca.pem"
)

# ---- what a worker is told


def test_a_key_is_in_the_environment_and_never_on_the_command_line() -> None:
    words = arguments(SPEC, 4)
    assert not any("secret" in word for word in words)
    assert environment(SPEC) == {"DTORCH_API_KEY": "dt_1_secret", "DTORCH_CA_FILE": "/etc/ca.pem"}
    assert " ".join(words) == (
        "worker --head wss://head:7474 --devices cpu:2 --name job-4 --threads 3 --labels rack=a --labels launch=job "
        "--labels slot=4 --allow ops.mine --files /data"
    )
    assert msgspec.json.decode(msgspec.json.encode(SPEC), type=WorkerSpec) == SPEC


@pytest.mark.parametrize(
    ("says", "advertised", "ours", "url"),
    [
        ("ws://127.0.0.1:7", "", "", "ws://127.0.0.1:7"),
        ("ws://127.0.0.1:7", "", "10.0.0.1", "ws://127.0.0.1:7"),
        ("ws://0.0.0.0:7", "", "10.0.0.1", "ws://10.0.0.1:7"),
        ("wss://0.0.0.0:7", "head.example", "10.0.0.1", "wss://head.example:7"),
        ("ws://[::]:7", "", "fd00::1", "ws://[fd00::1]:7"),
    ],
)
def test_others_find_the_head_by_a_name_that_leads_there(says: str, advertised: str, ours: str, url: str) -> None:
    assert reachable(says, advertised, ours) == url


def test_workers_of_other_launches_are_not_ours() -> None:
    def listed(launch: str | None, slot: int, pid: int) -> dict[str, object]:
        return {"labels": {"launch": launch, "slot": str(slot), "node": "n"} if launch else {}, "pid": pid}

    facts = {"workers": [listed("a", 0, 10), listed("b", 0, 11), listed(None, 0, 12), listed("a", 3, 13)]}
    assert incarnations(facts, "a") == [Incarnation(0, 10, "n"), Incarnation(3, 13, "n")]


# ---- who is killed

ONE, TWO, NEXT = Incarnation(1, 100), Incarnation(2, 200), Incarnation(1, 101)


def test_a_worker_that_the_head_has_given_up_is_killed_once() -> None:
    watch = Watch(patience_s=10)
    assert watch.look(0, []) == []  # none has joined yet: its engine may wait for a machine
    assert watch.look(50, []) == []
    assert watch.look(60, [ONE, TWO]) == []
    assert watch.look(61, [TWO]) == []
    assert watch.look(71, [TWO]) == []
    assert watch.look(72, [TWO]) == [ONE]
    assert watch.look(100, [TWO]) == []
    assert watch.look(101, [NEXT, TWO]) == []
    assert watch.look(102, [TWO]) == []
    assert watch.look(113, [TWO]) == [NEXT]


def test_a_worker_that_is_back_in_time_is_left_alone() -> None:
    watch = Watch(patience_s=10)
    for now in range(0, 100, 8):
        assert watch.look(now, [ONE] if now % 16 == 0 else []) == []


def test_nothing_is_concluded_while_the_head_does_not_answer() -> None:
    watch = Watch(patience_s=10)
    watch.look(0, [ONE])
    watch.look(1, [])
    watch.blind()
    assert watch.look(50, []) == []
    assert watch.look(59, []) == []
    assert watch.look(61, []) == [ONE]


def test_a_worker_that_has_ended_for_good_is_not_looked_for() -> None:
    watch = Watch(patience_s=10)
    watch.look(0, [ONE])
    watch.forget(1)
    assert watch.look(99, []) == []


# ---- processes


async def test_processes_are_kept_running_and_ended_in_order(tmp_path: Path) -> None:
    """One leaves, one is killed again and again until it leaves, one fails and is given up."""
    programs = ("", f"echo x >> {tmp_path}/runs; [ $(wc -l < {tmp_path}/runs) -lt 3 ] && kill -9 $$; true", "exit 4")

    async def spawn(slot: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("sh", "-c", programs[slot])

    processes = Processes()
    await processes.keep(3, spawn)
    ended = [await asyncio.wait_for(processes.wait_ended(), PATIENCE_S) for _ in programs]
    assert {each.slot: bool(each.error) for each in ended} == {0: False, 1: False, 2: True}
    assert (tmp_path / "runs").read_text() == "x\n" * 3
    assert Ended(2, f"it failed {MAX_FAILURES} times in a row, with exit status 4") in ended
    await processes.stop()


async def test_processes_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch.cluster.launchers.local.STOP_S", 0.01)
    made: list[asyncio.subprocess.Process] = []

    async def spawn(_: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", "trap '' TERM; echo; read _; read _", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        made.append(process)
        return process

    processes = Processes()
    await processes.keep(1, spawn)
    await processes.kill(Incarnation(0, made[0].pid + 1))  # another's number: not this one
    assert made[0].returncode is None
    await processes.stop()
    assert made[0].returncode == -signal.SIGKILL


async def test_one_that_fails_again_and_again_ends_all() -> None:
    async def spawn(slot: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("sh", "-c", f"exit {slot}")

    processes = Processes()
    await processes.keep(2, spawn)
    with pytest.raises(LaunchError, match="process 1: it failed 3 times"):
        await asyncio.wait_for(processes.wait_all(asyncio.Event()), PATIENCE_S)
    await processes.stop()


# ---- probes


async def test_probes_tell_alive_from_ready() -> None:
    ready = False
    async with health("127.0.0.1:0", lambda: ready) as url, aiohttp.ClientSession() as http:
        async def status(path: str) -> int:
            async with http.get(url + path) as answer:
                return answer.status

        assert (await status("/healthz"), await status("/readyz"), await status("/else")) == (200, 503, 404)
        ready = True
        assert await status("/readyz") == 200
    async with health("", lambda: True) as url:
        assert url == ""
    for wrong in ("7475", "host:", "host:x", "h:70000"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            async with health(wrong, lambda: True):
                pass


# ---- the whole


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--workers", "0"), "at least 1"),
        (("--placement", "PACK"), "are for --on ray"),
        (("--head", "ws://127.0.0.1:9"), "need a key"),
        (("--head", "ws://127.0.0.1:9", "--key", "k", "--listen", "x:1"), "not ours to configure"),
        (("--head", "ws://127.0.0.1:9", "--key", "k", "--", "true"), "a head of its own"),
        (("--tls-cert", "x"), "go together"),
        (("--labels", "x"), "NAME=VALUE"),
        (("--head", "nowhere", "--key", "k"), "wss://host:port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    for name in ("DTORCH_HEAD", "DTORCH_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["up", *words]) == 1
    assert text in capsys.readouterr().err


def test_local_workers_compute_die_come_again_and_end(tmp_path: Path) -> None:
    up = Up("--workers", "2", "--devices", "cpu:1", "--name", "pair", "--keys", str(tmp_path / "keys.json"))
    try:
        before = up.workers()
        assert [worker["name"] for worker in before] == ["pair-0", "pair-1"]
        for worker in before:
            assert b"dt_" not in Path(f"/proc/{worker['pid']}/cmdline").read_bytes()
        os.kill(before[1]["pid"], signal.SIGKILL)
        up.wait_said("worker pair-1 runs again")
        os.kill(before[0]["pid"], signal.SIGSTOP)  # the head gives it up, and it is killed
        up.wait_said("worker pair-0 runs again")
        session = up.session()
        with contextlib.closing(session), using(session):
            x = dtorch.Tensor(
                torch.arange(6.0).reshape(2, 3), device_mesh=dtorch.DeviceMesh("cpu", [0, 1]), placements=[dtorch.Shard(0)]
            )
            assert (x.sum(0) * 2).sum().item() == 30.0
            assert len(dtorch.statistics().workers) == 2
        pids = [worker["pid"] for worker in up.workers()]
        assert not {worker["pid"] for worker in before} & set(pids)
    finally:
        up.end()
    assert up.process.returncode == 0
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert (tmp_path / "keys.json").read_text() == "[]"  # its keys end with it


def test_a_program_ends_it_all_with_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys; print(os.environ['DTORCH_HEAD'], os.environ['DTORCH_API_KEY'][:3]); sys.exit(5)"
    assert main(["up", "--listen", "127.0.0.1:0", "--", sys.executable, "-c", program]) == 5
    out, err = capfd.readouterr()
    assert out.startswith("ws://127.0.0.1:")
    assert "dt_" in out
    assert "DTORCH_API_KEY" not in err  # nobody else needs it
