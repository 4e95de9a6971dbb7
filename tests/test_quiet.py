"""What a program prints that uses dtorch: nothing of ours, however it ends; and what logging and doctor say when asked."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dtorch
from dtorch.cli import main

ROOT = Path(__file__).parent.parent
WAIT_S = 120.0  # far above what anything takes; only a failing test waits this long

BEGIN = """
import asyncio, os, signal, sys, time, torch, dtorch
mesh = dtorch.DeviceMesh("cpu", [0, 1])
x = dtorch.ones(200, 200, device_mesh=mesh, placements=[dtorch.Shard(0)])
x.to_torch()
thread = dtorch.current_session().thread
pids = list(thread.pids.values())
def hold():
    "Whoever waits, waits until it is interrupted."
    thread._pulse._states = lambda: dict.fromkeys(thread.pids, "S")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
def ready():
    print(*pids, flush=True)
"""


@contextmanager
def program(code: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    env.pop("DTORCH_WORKERS", None)
    pipe = subprocess.PIPE
    running = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    poller = select.poll()
    poller.register(handle, select.POLLIN)
    ended = poller.poll(int(1000 * WAIT_S))
    os.close(handle)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        pytest.fail(f"worker {pid} outlived its client")


ENDLESS = "ready()\nwhile True:\n    y = x + 1\n"
BLOCKED = "hold()\ny = x + 1\nready()\ny.to_torch()\n"
AWAITED = """
async def main():
    hold()
    y = x + 1
    asyncio.get_running_loop().call_soon(ready)
    await y
asyncio.run(main())
"""
SYNCHRONIZED = "hold()\ny = x + 1\nready()\ndtorch.synchronize()\n"


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd")
@pytest.mark.parametrize("code", [ENDLESS, BLOCKED, AWAITED, SYNCHRONIZED], ids=["op", "wait", "await", "synchronize"])
@pytest.mark.parametrize("everybody", [False, True], ids=["client", "group"])
def test_an_interrupted_program_ends_with_one_traceback_and_no_worker(code: str, everybody: bool) -> None:
    """Ctrl-C reaches the whole process group of a terminal; a kill reaches the client alone."""
    with program(code) as running:
        assert running.stdout is not None
        pids = [int(pid) for pid in running.stdout.readline().split()]
        assert pids, running.communicate()[1]
        if everybody:
            os.killpg(running.pid, signal.SIGINT)
        else:
            os.kill(running.pid, signal.SIGINT)
        try:
            out, err = running.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail("it goes on")
        assert running.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
        assert out == ""
        assert err.rstrip().endswith("KeyboardInterrupt"), err
        assert err.count("Traceback (most recent call last)") <= (2 if code is AWAITED else 1), err  # asyncio's own is first
        assert not re.search("exception in|never retrieved|ignored|was lost", err, re.IGNORECASE), err
        for pid in pids:
            wait_for_end(pid)


@pytest.mark.parametrize(
    "code",
    [
        "y = x + 1\n",  # work is under way
        "asyncio.run(asyncio.wait_for((x + x).value(), 60))\n",
        "sys.exit(0)\n",
        "async def main():\n    asyncio.ensure_future((x + x).value())\n    await asyncio.sleep(0)\nasyncio.run(main())\n",
        "import threading\nthreading.Thread(target=lambda: (x + x).to_torch()).start()\n",
        "dtorch.shutdown()\ndtorch.shutdown()\n",
        "dtorch.init(workers='per-device')\n"
        "x = dtorch.ones(2, device_mesh=mesh)\nx.to_torch()\n"
        "os.kill(list(dtorch.current_session().thread.pids.values())[0], signal.SIGKILL)\n(x + 1).to_torch()\n",
        "keep = [x, dtorch.compile(lambda t: t + 1)]\nkeep[1](x)\nkeep.append(keep)\n",
    ],
    ids=["work", "await", "exit", "pending", "thread", "shutdown", "loss", "cycle"],
)
def test_a_program_that_ends_without_a_word_prints_none(code: str) -> None:
    with program(code) as running:
        out, err = running.communicate(timeout=WAIT_S)
        assert (running.returncode, out, err) == (0, "", "")


def test_all_loggers_are_of_one_tree_that_is_silent_until_somebody_listens() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + "import logging\nprint(*[n for n in logging.root.manager.loggerDict if 'torch' in n])"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=WAIT_S,
    )  # fmt: skip
    assert done.stderr == ""
    ours = [name for name in done.stdout.split() if not name.startswith("torch")]
    assert ours
    assert all(name == "dtorch" or name.startswith("dtorch.") for name in ours)
    for path in sorted((ROOT / "dtorch").rglob("*.py")):
        for given in re.findall(r"getLogger\((.*?)\)", path.read_text("utf-8")):
            assert given in ("__name__", '"dtorch"'), path


def test_at_debug_the_loggers_tell_of_workers_that_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "dtorch"):
        dtorch.init()
        assert dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cpu", [0])).tolist() == [1.0, 1.0]
        pids = list(dtorch.current_session().thread.pids.values())  # type: ignore[union-attr]
        dtorch.shutdown()
    for pid in pids:
        assert re.search(rf"worker \d+ of session \d+ is up: process {pid}", caplog.text)
    assert re.search(r"worker \d+ of session \d+ has ended: ", caplog.text)


def test_doctor_tests_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^self-test, shared: ok in \d+\.\d\d s", said, re.MULTILINE)
    assert re.search(r"^self-test, per-device: ok in \d+\.\d\d s", said, re.MULTILINE)


# Workers are forks of this program, and find what it has put there.
BROKEN = """
import sys
from dtorch.transport import groups
from dtorch.cli import main
def make_group(*_, **__):
    raise OSError("no route to the other worker")
groups.make_group = make_group
sys.exit(main(["doctor"]))
"""


def test_doctor_says_which_data_plane_is_broken() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=WAIT_S, env=env)
    assert done.returncode == 1
    assert "self-test, shared: ok" in done.stdout
    (said,) = re.findall("^self-test, per-device: .*", done.stdout, re.MULTILINE)
    assert "no route to the other worker" in said
