"""dtorch where other people's loops, tasks and processes are."""

from __future__ import annotations

import asyncio
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
import torch
import uvloop

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

EXAMPLES = Path(__file__).parents[1] / "examples"
MESH = DeviceMesh("cpu", [0, 1])
WAIT_S = 60.0


async def _six() -> float:
    x = dtorch.ones(3, device_mesh=MESH, placements=[Shard(0)])
    return float(await (x + x).sum().item_async())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run, lambda made: anyio.run(lambda: made, backend="asyncio")])
def test_any_runner(run: Any) -> None:
    assert run(_six()) == 6.0


def test_anyio_groups_and_timeouts() -> None:
    async def main() -> list[float]:
        found: list[float] = []

        async def one() -> None:
            found.append(await _six())

        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(one)
        found.append(await anyio.to_thread.run_sync(lambda: (dtorch.ones(2, device_mesh=MESH) * 3).sum().item()))
        with anyio.move_on_after(0):
            await dtorch.ones(2, device_mesh=MESH)
        return found

    assert anyio.run(main) == [6.0] * 4


async def test_task_groups_and_timeouts() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("asyncio has task groups from Python 3.11 on")
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_six()) for _ in range(3)]
    assert [task.result() for task in tasks] == [6.0] * 3
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await _six()
    assert await _six() == 6.0


async def test_interleaved_tasks_see_their_own_mesh_and_policy() -> None:
    turn = [asyncio.Event(), asyncio.Event()]

    async def task(number: int, mesh: DeviceMesh) -> tuple[Any, bool]:
        with mesh, dtorch.auto_redistribute(number == 0):
            made = torch.zeros(4, 4)
            turn[number].set()
            await turn[1 - number].wait()
            made = made + torch.ones(4, 4)
            rows, columns = (made.redistribute(placements=[Shard(dim)]) for dim in (0, 1))
            try:
                await (rows + columns)
                return made.device_mesh, True  # type: ignore[attr-defined]
            except dtorch.PlacementError:
                return made.device_mesh, False  # type: ignore[attr-defined]

    meshes = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    found = await asyncio.gather(*(task(i, mesh) for i, mesh in enumerate(meshes)))
    assert found == [(meshes[0], True), (meshes[1], False)]
    assert type(torch.zeros(1)) is torch.Tensor


def test_a_loop_that_closes_while_values_are_pending() -> None:
    x = dtorch.ones(300, 300, device_mesh=MESH, placements=[Replicate()])
    loop = asyncio.new_event_loop()
    waiting = loop.create_task((x @ x).value())
    loop.run_until_complete(asyncio.wait([waiting], timeout=0))
    waiting.cancel()
    loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
    loop.close()
    assert asyncio.run(_six()) == 6.0


def test_threads_without_a_loop() -> None:
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(_six()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [6.0] * 3


def script(code: str, *, keys: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), **env}
    return subprocess.run([sys.executable, "-c", code], input=keys, capture_output=True, text=True, timeout=120, env=env)


def test_a_fork_of_a_parent_that_never_used_it_and_nothing_of_ours_is_printed() -> None:
    code = """
import os, dtorch
def six():
    x = dtorch.ones(3, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
    return (x + x).sum().item()
pid = os.fork()
if pid == 0:
    print("child", six(), flush=True)
    dtorch.shutdown()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("parent", six())
"""
    done = script(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["child", "6.0", "parent", "6.0"]


def test_breakpoint_in_user_code(tmp_path: Path) -> None:
    path = tmp_path / "stops.py"
    path.write_text(
        "import dtorch\n"
        "def double(x):\n"
        "    y = x + x\n"
        "    breakpoint()\n"
        "    return y\n"
        "print(double(dtorch.ones(2, device_mesh=dtorch.DeviceMesh('cpu', [0, 1]))).tolist())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "DTORCH_SYNC": "1"}
    keys = "p y.tolist()\np y.shape\nup\nlist\ncontinue\n"
    done = subprocess.run(
        [sys.executable, str(path)], input=keys, capture_output=True, text=True, timeout=120, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "[2.0, 2.0]" in done.stdout
    assert "torch.Size([2])" in done.stdout
    assert done.stdout.rstrip().endswith("[2.0, 2.0]")


async def test_fastapi() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        module = importlib.import_module("fastapi_app")
    finally:
        sys.path.remove(str(EXAMPLES))
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    expected = module.make_model()(torch.tensor(rows))
    async with module.lifespan(module.app) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await module.app({**scope, "state": dict(state)}, receive, send)

        transport = httpx.ASGITransport(app=with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            answers = await asyncio.gather(*(http.post("/predict", json={"rows": rows}) for _ in range(4)))
            for answer in answers:
                torch.testing.assert_close(torch.tensor(answer.json()["outputs"]), expected)
            assert (await http.post("/predict", json={"rows": [[1.0]]})).status_code == 422
            assert (await http.get("/health")).json() == {"healthy": True}
            dtorch.shutdown()
            answer = await http.get("/health")
            assert (answer.status_code, answer.json()["healthy"]) == (503, False)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc")
def test_fastapi_under_uvicorn() -> None:
    """A server of its own process: it answers requests that come together, and SIGTERM ends it and its workers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
        command = ["-m", "uvicorn", "--app-dir", str(EXAMPLES), "--fd", str(listening.fileno()), "fastapi_app:app"]
        running = subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=env, pass_fds=[listening.fileno()]
        )
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def ask() -> list[Any]:
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as http:
                assert (await http.get("/health")).json() == {"healthy": True}  # waits in the backlog until it is up
                return await asyncio.gather(*(http.post("/predict", json={"rows": [[i, 2.0, 3.0]]}) for i in range(8)))

        try:
            answers = asyncio.run(ask())
            tasks = Path(f"/proc/{running.pid}/task").iterdir()
            children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
            ends = [os.pidfd_open(pid) for pid in children]
            running.terminate()
            _, said = running.communicate(timeout=WAIT_S)
        finally:
            running.kill()
            running.communicate()
    assert [answer.status_code for answer in answers] == [200] * 8
    assert len({str(answer.json()) for answer in answers}) == 8
    assert "Application shutdown complete" in said
    assert "Traceback" not in said
    assert "Error" not in said
    assert running.returncode in (0, -signal.SIGTERM)  # uvicorn raises the signal again once it is done
    assert ends
    for end in ends:  # which the workers' end comes before
        poller = select.poll()
        poller.register(end, select.POLLIN)
        assert poller.poll(1000 * WAIT_S)
        os.close(end)
