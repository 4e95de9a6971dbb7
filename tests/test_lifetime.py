"""Memory is freed at once, and every way to end leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from _scripts import WAIT_S, run, start

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.session import current_session
from dtorch.transport import codec
from dtorch.transport.dial import connect
from dtorch.transport.errors import AuthError, ConnectionLostError, ProtocolError
from dtorch.transport.link import WORKER_PATH
from dtorch.transport.messages import PROTOCOL_VERSION, Done, Hello

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc")

ENDS_S = 2.0
"""How long workers may live after their client."""


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


def _allocated(mesh: DeviceMesh) -> int:
    return sum(stats.allocated for stats in dtorch.memory_stats(mesh))


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---- memory


def test_dropping_the_last_reference_frees_without_gc_and_without_an_op(mesh: DeviceMesh) -> None:
    """The worker's own statistics are asked for through the controller, past the recorder that would flush."""
    session = current_session()
    dtorch.synchronize()
    gc.collect()
    gc.disable()
    try:
        before = _allocated(mesh)
        x = dtorch.ones((512, 512), device_mesh=mesh, placements=[Shard(0)])
        y = x + x
        y.to_torch()
        assert _allocated(mesh) == before + 2 * 512 * 512 * 4
        sent = threading.Event()
        submit = session.thread.submit

        def notice(batch: Any) -> None:
            submit(batch)
            if batch.freed_meshes:
                sent.set()

        session.thread.submit = notice  # type: ignore[method-assign]
        del x, y
        assert sent.wait(WAIT_S), "nobody told the workers"
        session.thread.submit = submit  # type: ignore[method-assign]
        assert _allocated(mesh) == before
    finally:
        gc.enable()


def test_ten_thousand_steps_leave_everything_flat(mesh: DeviceMesh) -> None:
    session = dtorch.init()  # one whose peaks nobody watches: that takes time
    w = dtorch.full((8, 8), 0.5, device_mesh=mesh, placements=[Shard(0)])
    x = dtorch.ones((8, 8), device_mesh=mesh, placements=[Shard(0)])

    def steps(count: int) -> None:
        nonlocal x
        for i in range(count):
            x = (x * w + i * 1e-3) * 0.5

    steps(2000)
    x.to_torch()
    gc.collect()
    before = dtorch.statistics()
    pids = [os.getpid(), *session.thread.pids.values()]
    resident = [_resident_bytes(pid) for pid in pids]
    objects = len(gc.get_objects())
    steps(10_000)
    x.to_torch()
    after = dtorch.statistics()
    gc.collect()
    assert after.slots <= before.slots + 2
    assert after.signatures == before.signatures
    assert len(gc.get_objects()) < objects + 2000
    for pid, old in zip(pids, resident, strict=True):
        assert _resident_bytes(pid) < old + 16 * 1024 * 1024
    assert _allocated(mesh) == 2 * 8 * 8 * 4  # x and w


def test_signatures_start_afresh_when_there_are_too_many(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch.ops._op.MAX_SIGNATURES", 20)
    dtorch.init()
    for size in range(1, 40):
        x = dtorch.full((size,), float(size), device_mesh=mesh, placements=[Shard(0)])
        y = x + x
        assert (y * y).tolist() == [4.0 * size * size] * size
        x.add_(y)
        assert x.redistribute([Replicate()]).tolist() == [3.0 * size] * size
    assert dtorch.statistics().signatures < 40


def test_a_large_value_is_given_back_when_it_is_dropped(mesh: DeviceMesh) -> None:
    x = dtorch.ones((1000, 1000), device_mesh=mesh, placements=[Shard(0)])
    for _ in range(20):
        x.to_torch()
    pool = current_session()._pool.statistics()
    assert pool.created <= 3
    assert pool.leased_bytes <= 2 * 4_000_000 * 5 // 4


# ---- ends


class Ended:
    """A client program, its workers and all that it might leave."""

    def __init__(self, process: Any, pids: list[int], folder: Path) -> None:
        self.process, self.pids, self.folder = process, pids, folder
        self._fds = [os.pidfd_open(pid) for pid in pids]

    def wait_ended(self) -> None:
        """All workers end within ``ENDS_S``, and the session's folder with them."""
        left = set(self._fds)
        poller = select.poll()
        for fd in left:
            poller.register(fd, select.POLLIN)
        while left:
            ready = poller.poll(ENDS_S * 1000)
            assert ready, f"{len(left)} of {len(self._fds)} processes outlive their client by {ENDS_S} s"
            for fd, _ in ready:
                poller.unregister(fd)
                left.discard(fd)
        assert not self.folder.exists()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


CLIENT = """
    import os, sys
    import dtorch
    from dtorch import DeviceMesh, Shard
    from dtorch.session import current_session

    mesh = DeviceMesh("cpu", [0, 1])
    x = dtorch.ones((64, 64), device_mesh=mesh, placements=[Shard(0)])
    big = dtorch.ones(300_000, device_mesh=mesh, placements=[Shard(0)]).to_torch()  # through shared memory
    x.to_torch()
    thread = current_session().thread
    pids = [thread._launcher.pid, *thread.pids.values()]
    print(*pids, thread.folder, flush=True)
"""


@contextlib.contextmanager
def client(folder: Path, then: str, **env: str) -> Iterator[Ended]:
    """A client that has workers, has told of them, and then runs ``then``."""
    shm = set(os.listdir("/dev/shm"))
    process = start(folder, CLIENT + then, stdin=-1, **env)
    assert process.stdout is not None
    line = process.stdout.readline().split()
    if not line:
        raise AssertionError(process.communicate(timeout=WAIT_S)[1])
    ended = Ended(process, [int(pid) for pid in line[:-1]], Path(line[-1]))
    try:
        assert ended.folder.exists()
        yield ended
        assert not [name for name in set(os.listdir("/dev/shm")) - shm if "torch" in name]
    finally:
        process.kill()
        process.communicate()
        ended.close()


@pytest.mark.parametrize("mode", ["shared", "per-device"])
def test_a_normal_exit(tmp_path: Path, mode: str) -> None:
    with client(tmp_path, "", DTORCH_WORKERS=mode) as ended:
        out, err = ended.process.communicate(timeout=WAIT_S)
        assert (ended.process.returncode, out, err) == (0, "", "")
        ended.wait_ended()


def test_an_exception(tmp_path: Path) -> None:
    with client(tmp_path, "\n    raise ValueError('mine')\n") as ended:
        _, err = ended.process.communicate(timeout=WAIT_S)
        assert ended.process.returncode == 1
        assert err.startswith("Traceback")
        assert err.endswith("ValueError: mine\n")
        assert "dtorch" not in err
        ended.wait_ended()


@pytest.mark.parametrize("mode", ["shared", "per-device"])
def test_a_client_that_is_killed(tmp_path: Path, mode: str) -> None:
    with client(tmp_path, "\n    sys.stdin.read()\n", DTORCH_WORKERS=mode) as ended:
        ended.process.kill()
        ended.process.wait(WAIT_S)
        ended.wait_ended()


def test_ctrl_c_while_the_workers_compute(tmp_path: Path) -> None:
    then = """
    y = dtorch.full((1500, 1500), 1e-3, device_mesh=mesh, placements=[Shard(0)])
    w = dtorch.full((1500, 1500), 1e-3, device_mesh=mesh)
    for _ in range(500):
        y = torch.matmul(y, w)
    print("waiting", flush=True)
    y.to_torch()
    """
    with client(tmp_path, "\n    import torch" + then) as ended:
        assert ended.process.stdout.readline() == "waiting\n"
        ended.process.send_signal(signal.SIGINT)
        _, err = ended.process.communicate(timeout=WAIT_S)
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert err.count("Traceback") == 1
        ended.wait_ended()


def test_ctrl_c_in_asyncio(tmp_path: Path) -> None:
    then = """
    import asyncio

    async def main():
        waiting = asyncio.create_task(x.value())
        print("waiting", flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
    with client(tmp_path, then) as ended:
        assert ended.process.stdout.readline() == "waiting\n"
        ended.process.send_signal(signal.SIGINT)
        _, err = ended.process.communicate(timeout=WAIT_S)
        assert err.rstrip().endswith("KeyboardInterrupt")
        ended.wait_ended()


def test_sigterm(tmp_path: Path) -> None:
    with client(tmp_path, "\n    sys.stdin.read()\n") as ended:
        ended.process.terminate()
        ended.process.wait(WAIT_S)
        ended.wait_ended()


def test_two_scripts_side_by_side(tmp_path: Path) -> None:
    then = "\n    sys.stdin.readline()\n    print((x + x).sum().item())\n"
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with client(folders[0], then) as one, client(folders[1], then) as two:
        assert one.folder != two.folder
        for ended in (one, two):
            out, err = ended.process.communicate("go\n", timeout=WAIT_S)
            assert (out, err) == ("8192.0\n", "")
            ended.wait_ended()


def test_a_successful_script_prints_nothing_of_ours(tmp_path: Path) -> None:
    code = """
        import asyncio
        import dtorch

        mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])
        x = dtorch.rand(100, 100, device_mesh=mesh, placements=[dtorch.Shard(0)])
        y = (x + 1).redistribute([dtorch.Shard(1)])
        y.to_torch()
        asyncio.run(y.value())
        y + y  # not waited for
        print(1)
    """
    assert run(tmp_path, code, PYTHONWARNINGS="default") == "1\n"
    assert run(tmp_path, code, DTORCH_WORKERS="per-device") == "1\n"
    assert run(tmp_path, "import dtorch; print(1)") == "1\n"


def test_a_child_that_a_used_parent_forks(tmp_path: Path) -> None:
    """The child starts a session of its own; the parent's goes on."""
    code = """
        import os, sys, warnings
        import dtorch

        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
        mesh = dtorch.DeviceMesh("cpu", [0, 1])
        x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
        x.to_torch()
        pid = os.fork()
        if pid == 0:
            try:
                x.to_torch()
            except dtorch.SessionClosedError as error:
                print("child:", error, flush=True)
            print("child:", dtorch.ones(2, device_mesh=mesh).tolist(), flush=True)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print("parent:", (x + x).tolist())
    """
    assert run(tmp_path, code).splitlines() == [
        "child: the session belongs to the parent process; a forked child starts its own",
        "child: [1.0, 1.0]",
        "parent: [2.0, 2.0, 2.0, 2.0]",
    ]


def test_start_and_shut_down_again_and_again() -> None:
    for _ in range(3):
        dtorch.init()
        assert dtorch.ones(2, device_mesh=DeviceMesh("cpu", [0, 1])).tolist() == [1.0, 1.0]
        folder = current_session().thread.folder
        dtorch.shutdown()
        dtorch.shutdown()
        assert not folder.exists()


# ---- lost workers


def _kill_one() -> str:
    """Kill the last worker; its name."""
    number, pid = max(current_session().thread.pids.items())
    os.kill(pid, signal.SIGKILL)
    return f"worker {number}"


@pytest.fixture(params=["shared", "per-device"])
def both_modes(request: pytest.FixtureRequest) -> Iterator[str]:
    dtorch.init(workers=request.param, recover=False)
    yield request.param
    dtorch.shutdown()


async def test_a_worker_that_is_killed_while_values_are_awaited(mesh: DeviceMesh, both_modes: str) -> None:
    x = dtorch.full((1500, 1500), 1e-3, device_mesh=mesh, placements=[Shard(0)])
    w = dtorch.full((1500, 1500), 1e-3, device_mesh=mesh, placements=[Replicate()])
    await x
    y = x
    for _ in range(100):
        y = torch.matmul(y, w)
    z = y.redistribute([Replicate()])
    waits = [asyncio.ensure_future(value) for value in (y.value(), z.value(), x.value(), dtorch.synchronize_async())]
    await asyncio.sleep(0)
    name = _kill_one()
    loop = asyncio.get_running_loop()
    started = loop.time()
    outcomes = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), WAIT_S)
    assert loop.time() - started < 1.0
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert isinstance(outcome, dtorch.WorkerLostError)
        assert (outcome.worker, outcome.reason) == (name, "killed by SIGKILL")
        assert f"{name} was lost: killed by SIGKILL" in str(outcome)
    with pytest.raises(dtorch.WorkerLostError):
        x + x
    with pytest.raises(dtorch.WorkerLostError):
        await x
    dtorch.init(workers=both_modes)
    assert torch.equal(await dtorch.ones(3, device_mesh=mesh), torch.ones(3))


def _loop(x: dtorch.Tensor, fetch: bool) -> None:
    """Goes on until something ends it."""
    for _ in range(10**6):
        x = x * 1.0
        if fetch:
            x.to_torch()


def test_the_next_op_starts_afresh_by_itself(mesh: DeviceMesh) -> None:
    dtorch.init(recover=False)
    x = dtorch.ones(3, device_mesh=mesh)
    x.to_torch()
    _kill_one()
    with pytest.raises(dtorch.WorkerLostError):
        _loop(x, fetch=True)
    assert torch.equal(dtorch.ones(3, device_mesh=mesh).to_torch(), torch.ones(3))


def test_a_lost_worker_wakes_a_client_that_waits_for_room(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Far more is recorded than may be in flight. 2. The client waits. 3. Only then a worker is killed."""
    dtorch.init(recover=False)
    x = dtorch.ones((2000, 2000), device_mesh=mesh, placements=[Shard(0)])
    x.to_torch()
    room = current_session().thread._roomy
    wait = room.wait
    waits: list[str] = []

    def kill_and_wait(timeout: float | None = None) -> bool:
        waits.append(_kill_one())
        return wait(timeout)

    monkeypatch.setattr(room, "wait", kill_and_wait)
    with pytest.raises(dtorch.WorkerLostError):
        _loop(x, fetch=False)
    assert len(waits) == 1


def test_the_reason_has_the_last_words_of_a_worker_that_gave_up(mesh: DeviceMesh) -> None:
    dtorch.init(recover=False)
    x = dtorch.ones(3, device_mesh=mesh)
    x.to_torch()
    session = current_session()
    session.recorder.put(((987654, 1, 2), None, 0))  # a call that nobody has defined
    with pytest.raises(dtorch.WorkerLostError) as caught:
        x.to_torch()
    assert "exited with code 1; its last words: Traceback" in caught.value.reason
    assert "names an unknown signature [987654]" in caught.value.reason


def test_a_worker_that_does_not_start_in_time(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    dtorch.init(start_timeout_s=0.01)
    session = current_session()
    monkeypatch.setattr(session.thread._launcher, "spawn", lambda *_: None)
    with pytest.raises(dtorch.WorkerLostError, match=r"did not connect within 0\.01 s"):
        dtorch.ones(3, device_mesh=mesh).to_torch()
    dtorch.shutdown()


def test_a_fault_of_the_controller_ends_the_session_with_its_words(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = dtorch.ones(3, device_mesh=mesh)
    x.to_torch()
    controller = current_session().thread._controller

    def fault(_: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(controller, "_submitted", fault)
    with pytest.raises(ConnectionLostError, match="the controller failed: ZeroDivisionError: ours"):
        x.to_torch()
    assert torch.equal(dtorch.ones(3, device_mesh=mesh).to_torch(), torch.ones(3))


# ---- foreign peers


async def test_a_foreign_peer_is_refused_and_the_session_goes_on(mesh: DeviceMesh) -> None:
    x = dtorch.ones(3, device_mesh=mesh)
    await x
    thread = current_session().thread
    assert thread._server is not None
    address, path = thread._server.address, str(thread.folder / "control")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(thread.folder).st_mode & 0o777 == 0o700

    with pytest.raises(AuthError):
        await connect(address, "a wrong token", Hello(PROTOCOL_VERSION, 0, os.getpid()))
    with pytest.raises(ProtocolError, match="version"):
        await connect(address, thread._token, Hello(PROTOCOL_VERSION + 1, 0, os.getpid()))
    for worker in (0, 1, 99):  # already there, or never asked for
        link = await connect(address, thread._token, Hello(PROTOCOL_VERSION, worker, os.getpid()))
        assert await asyncio.wait_for(link.receive(), WAIT_S) is None
        assert "no such worker is expected" in link.reason
        await link.close()

    for garbage in (b"\x00\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", codec.encode(Done(1, 1, 0))):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(WAIT_S)
            raw.connect(path)
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            answer = await asyncio.get_running_loop().run_in_executor(None, raw.recv, 100)
            assert answer == b"" or b" 400 " in answer or b" 401 " in answer

    for corrupt in (b"", b"\xc1", os.urandom(200), codec.encode(Done(1, 1, 0))):
        headers = {"Authorization": f"Bearer {thread._token}"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as http,
            http.ws_connect(f"http://localhost{WORKER_PATH}", headers=headers) as ws,
        ):
            await ws.send_bytes(corrupt)
            assert (await ws.receive(WAIT_S)).type is aiohttp.WSMsgType.CLOSE

    assert torch.equal(await (x + x), torch.full((3,), 2.0))


async def test_a_session_that_listens_on_tcp(mesh: DeviceMesh) -> None:
    dtorch.init(listen="127.0.0.1")
    try:
        assert torch.equal(await dtorch.ones(3, device_mesh=mesh), torch.ones(3))
        server = current_session().thread._server
        assert server is not None
        assert server.address.startswith("tcp:127.0.0.1:")
        with pytest.raises(AuthError):
            await connect(server.address, "a wrong token", Hello(PROTOCOL_VERSION, 0, os.getpid()))
    finally:
        dtorch.shutdown()
    with pytest.raises((ValueError, OSError)):
        dtorch.init(listen="127.0.0.1:not-a-port")
