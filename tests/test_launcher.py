from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtorch.runtime.launcher import Launcher, LocalLauncher, private_folder
from dtorch.transport.errors import ConnectionLostError, SessionClosedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc")

TESTS = Path(__file__).parent
ENTRY = "_launcher_entry:main"
WAIT_S = 20.0  # far above what anything takes; only a failing test waits this long


class Link:
    """The test's end of one worker's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(WAIT_S)
        self._lines = sock.makefile("r")
        self.facts: dict[str, Any] = json.loads(self._lines.readline())

    def say(self, line: str) -> None:
        self._sock.sendall(line.encode() + b"\n")

    def ask(self, line: str) -> str:
        self.say(line)
        return self.read()

    def read(self) -> str:
        return self._lines.readline().strip()

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


class Gate:
    """Where workers and client programs report. Blocking on purpose: nothing here needs the loop while it waits."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "gate")
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(self.address)
        self._sock.listen()
        self._sock.settimeout(WAIT_S)
        self._links: list[Link] = []

    def accept(self) -> Link:
        link = Link(self._sock.accept()[0])
        self._links.append(link)
        return link

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._sock.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.syspath_prepend(str(TESTS))
    with tempfile.TemporaryDirectory() as folder:
        made = Gate(Path(folder))
        yield made
        made.close()


class Session:
    """A started and attached launcher, and what it has reported."""

    def __init__(self, entry: str = ENTRY) -> None:
        self.folder = private_folder()
        self.launcher = LocalLauncher(self.folder, entry)
        self.exits: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.failures: asyncio.Queue[str] = asyncio.Queue()
        self.launcher.start()
        self.launcher.attach(
            asyncio.get_running_loop(),
            lambda *it: self.exits.put_nowait(it),
            lambda text: self.failures.put_nowait(text),
        )

    async def exit(self) -> tuple[int, str]:
        return await asyncio.wait_for(self.exits.get(), WAIT_S)

    async def failure(self) -> str:
        return await asyncio.wait_for(self.failures.get(), WAIT_S)


@pytest.fixture
async def session(gate: Gate) -> AsyncIterator[Session]:
    made = Session()
    yield made
    made.launcher.close()


@contextlib.contextmanager
def watched(*pids: int) -> Iterator[list[int]]:
    """Descriptors that become readable when the processes end."""
    fds = [os.pidfd_open(pid) for pid in pids]
    yield fds
    for fd in fds:
        os.close(fd)


def all_end(fds: list[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    return all(select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0] for fd in fds)


def running(fd: int) -> bool:
    return not select.select([fd], [], [], 0)[0]


# ---- workers --------------------------------------------------------------------------------------------------------


async def test_workers_run_the_entry_with_their_args_and_env(session: Session, gate: Gate) -> None:
    launcher: Launcher = session.launcher
    for worker in range(3):
        launcher.spawn(worker, {"address": gate.address, "n": [worker, None]}, {"DTORCH_TEST_MARK": f"m{worker}"})
    facts = sorted((gate.accept().facts for _ in range(3)), key=lambda each: str(each["mark"]))
    for worker, each in enumerate(facts):
        assert each["args"]["n"] == [worker, None]
        assert each["mark"] == f"m{worker}"
        assert each["parent"] == session.launcher.pid
        assert each["session"] == each["pid"]
        assert each["ignores_sigint"]
        assert each["sockets"] == 1  # its own connection: neither the lifeline nor the server's wake-up pair
    assert os.getsid(session.launcher.pid or 0) != os.getsid(0)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("exit 3", "exited with code 3; it printed last: words left in the buffer"),
        ("exit 0", "exited with code 0"),
        ("return", "exited with code 0"),
        ("raise oops", "exited with code 1; it printed last: words left in the buffer\nTraceback"),
    ],
)
async def test_a_workers_exit_is_reported(
    gate: Gate, order: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    session = Session()  # started here, to inherit the stdio that capfd watches
    session.launcher.spawn(5, {"address": gate.address})
    link = gate.accept()
    link.say("say words left in the buffer")
    link.say(order)
    worker, how = await session.exit()
    assert (worker, how[: len(reason)]) == (5, reason)
    assert ("; it printed" in reason) == ("; it printed" in how)
    session.launcher.close()
    out, err = capfd.readouterr()
    assert out == "words left in the buffer\n"
    assert ("ValueError: oops" in err) == (order == "raise oops")


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_signal_ends_one_worker_and_no_other(session: Session, gate: Gate, sig: signal.Signals) -> None:
    for worker in range(2):
        session.launcher.spawn(worker, {"address": gate.address, "worker": worker})
    links = {link.facts["args"]["worker"]: link for link in (gate.accept(), gate.accept())}
    session.launcher.kill(1, sig)
    worker, how = await session.exit()
    assert (worker, how.partition("; it printed last: Fatal Python error: ")[0]) == (1, f"killed by {sig.name}")
    assert links[0].ask("ping") == "pong"
    assert session.launcher.pids == {0: links[0].facts["pid"]}


async def test_a_foreign_kill_is_reported_and_the_number_can_be_used_again(session: Session, gate: Gate) -> None:
    session.launcher.spawn(0, {"address": gate.address})
    os.kill(gate.accept().facts["pid"], signal.SIGKILL)
    assert await session.exit() == (0, "killed by SIGKILL")
    session.launcher.kill(0)  # it has ended: nothing happens
    session.launcher.spawn(0, {"address": gate.address})
    assert gate.accept().ask("ping") == "pong"


async def test_what_a_worker_started_ends_with_it(session: Session, gate: Gate) -> None:
    session.launcher.spawn(0, {"address": gate.address})
    link = gate.accept()
    with watched(int(link.ask("child"))) as fds:
        os.kill(link.facts["pid"], signal.SIGKILL)
        assert all_end(fds, 2.0)


async def test_large_args_queue_while_the_server_is_busy(session: Session, gate: Gate) -> None:
    text = "x" * 3_000_000
    session.launcher.spawn(0, {"address": gate.address, "text": text})
    session.launcher.spawn(1, {"address": gate.address, "text": ""})
    links = await asyncio.gather(*(asyncio.to_thread(gate.accept) for _ in range(2)))
    assert sorted(len(link.facts["args"]["text"]) for link in links) == [0, len(text)]


async def test_misuse_is_refused(session: Session, gate: Gate) -> None:
    session.launcher.spawn(0, {"address": gate.address})
    with pytest.raises(ValueError, match="worker 0 is running"):
        session.launcher.spawn(0, {})
    with pytest.raises(RuntimeError, match="attached once"):
        session.launcher.attach(asyncio.get_running_loop(), lambda *_: None)
    with pytest.raises(RuntimeError, match="started once"):
        session.launcher.start()
    session.launcher.close()
    with pytest.raises(SessionClosedError):
        session.launcher.spawn(1, {})


# ---- the fork server fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("no_such_module_at_all:main", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("_launcher_entry:nothing", "has no attribute 'nothing'"),
        ("_launcher_entry:not_a_function", "expected a function"),
        ("_launcher_entry", "'module:function'"),
    ],
)
async def test_an_entry_that_cannot_be_loaded_is_an_error_not_a_hang(gate: Gate, entry: str, words: str) -> None:
    session = Session(entry)
    session.launcher.spawn(0, {})
    session.launcher.spawn(1, {})
    text = await session.failure()
    assert words in text
    assert [await session.exit(), await session.exit()] == [(0, text), (1, text)]
    with pytest.raises(ConnectionLostError, match="could not be loaded"):
        session.launcher.spawn(2, {})
    session.launcher.close()
    assert not session.folder.exists()


async def test_an_entry_module_that_starts_a_thread_is_refused(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded_entry.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='tick', daemon=True).start()\n"
        "def main(args): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    session = Session("threaded_entry:main")
    assert "started threads" in await session.failure()
    session.launcher.close()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
async def test_the_fork_servers_end_ends_and_reports_all_workers(
    session: Session, gate: Gate, sig: signal.Signals
) -> None:
    for worker in range(3):
        session.launcher.spawn(worker, {"address": gate.address})
    pids = [gate.accept().facts["pid"] for _ in range(3)]
    assert session.launcher.pid is not None
    with watched(*pids) as fds:
        os.kill(session.launcher.pid, sig)
        assert all_end(fds, 2.0)
    text = await session.failure()
    assert text.startswith("the fork server")
    assert sig.name in text
    if sig == signal.SIGKILL:
        assert [await session.exit() for _ in range(3)] == [(worker, text) for worker in range(3)]
    session.launcher.close()
    assert not session.folder.exists()


# ---- the client ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaf", [False, True])
async def test_close_leaves_no_process_and_no_folder(session: Session, gate: Gate, deaf: bool) -> None:
    for worker in range(3):
        session.launcher.spawn(worker, {"address": gate.address})
    links = [gate.accept() for _ in range(3)]
    if deaf:
        assert links[0].ask("deaf") == "pong"
    assert session.launcher.pid is not None
    with watched(session.launcher.pid, *(link.facts["pid"] for link in links)) as fds:
        session.launcher.close(0.2 if deaf else WAIT_S)
        assert not any(map(running, fds))
    with pytest.raises(ChildProcessError):
        os.waitpid(session.launcher.pid, os.WNOHANG)  # noqa: ASYNC222 - does not block; reaped, so no zombie
    assert not session.folder.exists()
    session.launcher.close()
    assert session.exits.empty()


async def test_close_before_start_and_without_workers(gate: Gate) -> None:
    folder = private_folder()
    LocalLauncher(folder, ENTRY).close()
    assert not folder.exists()
    session = Session()
    session.launcher.close()
    assert not session.folder.exists()


CLIENT = textwrap.dedent(
    """
    import json, sys
    address, num_workers, fork, path = json.loads(sys.argv[1])
    sys.path[:0] = path
    import asyncio, os, signal, socket
    from dtorch.runtime.launcher import LocalLauncher, private_folder

    folder = private_folder()
    launcher = LocalLauncher(folder, "_launcher_entry:main")
    launcher.start()
    child = 0
    if fork:
        child = os.fork()
        if child == 0:
            signal.pause()
    for worker in range(num_workers):
        launcher.spawn(worker, {"address": address, "client": ""})
    gate = socket.socket(socket.AF_UNIX)
    gate.connect(address)

    def tell(fact):
        gate.sendall(json.dumps(fact).encode() + b"\\n")

    async def serve():
        loop = asyncio.get_running_loop()
        launcher.attach(loop, lambda *it: tell({"exit": it}))
        loop.add_signal_handler(signal.SIGINT, tell, "interrupted")
        tell({"folder": str(folder), "server": launcher.pid, "child": child})
        await loop.create_future()

    asyncio.run(serve())
    """
)


class ClientProgram:
    """A script of its own, without a ``__main__`` guard, that holds a launcher with three workers."""

    def __init__(
        self, gate: Gate, folder: Path, *, flags: tuple[str, ...] = (), fork: bool = False, closed: str = ""
    ) -> None:
        script = folder / "client.py"
        script.write_text(CLIENT)
        config = json.dumps([gate.address, 3, fork, [str(TESTS.parent), str(TESTS)]])
        command = [sys.executable, *flags, str(script), config]
        self.process = subprocess.Popen(["sh", "-c", f'exec "$0" "$@" {closed}', *command], start_new_session=True)
        links = [gate.accept() for _ in range(4)]
        self.link = next(link for link in links if "server" in link.facts)
        self.workers = [link for link in links if link is not self.link]
        self.folder = Path(self.link.facts["folder"])
        self.pids: list[int] = [self.link.facts["server"], *(link.facts["pid"] for link in self.workers)]

    def __enter__(self) -> ClientProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize(
    ("flags", "closed"),
    [((), ""), (("-I",), ""), ((), "<&-"), ((), "<&- >&- 2>&-")],
    ids=["plain", "isolated", "stdin closed", "stdio closed"],
)
def test_kill_9_of_the_client_ends_everything(gate: Gate, tmp_path: Path, flags: tuple[str, ...], closed: str) -> None:
    with ClientProgram(gate, tmp_path, flags=flags, closed=closed) as client, watched(*client.pids) as fds:
        assert client.folder.exists()
        assert all(link.facts["sockets"] == 1 for link in client.workers)
        client.process.kill()
        assert all_end(fds, 2.0)
        assert not client.folder.exists()


def test_a_forked_child_of_the_client_does_not_hold_the_lifeline(gate: Gate, tmp_path: Path) -> None:
    with ClientProgram(gate, tmp_path, fork=True) as client, watched(client.link.facts["child"]) as child:
        with watched(*client.pids) as fds:
            client.process.kill()
            assert all_end(fds, 2.0)
        assert running(child[0])
        assert not client.folder.exists()
        signal.pidfd_send_signal(child[0], signal.SIGKILL)


async def test_a_forked_child_cannot_close_the_session(session: Session, gate: Gate) -> None:
    session.launcher.spawn(0, {"address": gate.address})
    link = gate.accept()
    child = os.fork()
    if child == 0:
        try:
            session.launcher.close()
        finally:
            os._exit(7 if session.folder.exists() else 8)
    with watched(child) as fds:
        assert all_end(fds, WAIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7  # noqa: ASYNC222 - has ended
    assert link.ask("ping") == "pong"


def test_ctrl_c_belongs_to_the_client(gate: Gate, tmp_path: Path) -> None:
    with ClientProgram(gate, tmp_path) as client, watched(*client.pids) as fds:
        os.killpg(client.process.pid, signal.SIGINT)
        assert json.loads(client.link.read()) == "interrupted"
        for pid in client.pids:
            os.kill(pid, signal.SIGINT)
        assert [link.ask("ping") for link in client.workers] == ["pong"] * 3
        assert all(map(running, fds))
        client.process.kill()
        assert all_end(fds, 2.0)


# ---- the folder -----------------------------------------------------------------------------------------------------


def test_the_private_folder_is_private_and_prefers_the_runtime_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        folder = private_folder()
        assert folder.parent == Path(base)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("bad", ["", "relative", "/nonexistent/dir", "/tmp/" + "x" * 80])
def test_an_unusable_runtime_dir_is_passed_over(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", bad)
    folder = private_folder()
    assert folder.parent in (Path(tempfile.gettempdir()), Path("/tmp"))
    folder.rmdir()


def test_a_folder_that_is_not_private_is_refused_and_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="private folder"):
        LocalLauncher(tmp_path, ENTRY).start()
    assert tmp_path.exists()
