"""Launchers: how a session gets its worker processes, and how it learns that one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from typing_extensions import assert_never

from dtorch.runtime import inherit
from dtorch.runtime.events import PRINTED
from dtorch.runtime.forkserver import Command, Config, Exited, Failed, Kill, Report, Spawn, Spawned, Stop, remove_folder
from dtorch.transport.errors import ConnectionLostError, SessionClosedError

_PREFIX = "dtorch-"
_SOCKET_PATH_BYTES = 103  # longest path of a unix socket: 107 on Linux, 103 on macOS
_NAME_BYTES = 32  # what a socket inside the folder may be called
_KILL_WAIT_S = 1.0  # how long a fork server may take to kill its workers before it is killed itself
# sys.path first, so that nothing in the current directory can shadow what is imported next.
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from dtorch.runtime.forkserver import main; main(sys.argv[1])"

OnExit = Callable[[int, str], None]  # (worker, reason)
OnFailure = Callable[[str], None]  # (text)

_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class Launcher(Protocol):
    """Starts and ends the worker processes of one session. Every method but ``start`` belongs to the loop's thread."""

    def start(self) -> None:
        """Begin to prepare whatever workers come from. Returns at once."""

    def attach(self, loop: asyncio.AbstractEventLoop, on_exit: OnExit, on_failure: OnFailure | None = None) -> None:
        """Report through ``loop``, until ``close``.

        Args:
            on_exit: called once for each spawned worker that ends, with a reason such as ``"killed by SIGKILL"``.
            on_failure: called at most once, before ``on_exit`` of the workers concerned, when no worker can be started
                any more; its text says why.
        """

    def spawn(self, worker: int, args: dict[str, Any], env: dict[str, str] | None = None) -> None:
        """Start worker number ``worker``. Returns at once; a failure is reported like an exit."""

    def kill(self, worker: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to a worker. Returns at once; the worker's end is reported like any other."""

    def close(self, timeout_s: float = 2.0) -> None:
        """End all workers: SIGTERM first, SIGKILL for those left after ``timeout_s``. Nothing is reported any more."""


class LocalLauncher:
    """Workers on this machine, forked from one preloaded process (see ``dtorch.runtime.forkserver``).

    The client may end in any way: the fork server sees it, kills the workers and removes ``folder``.

    Args:
        folder: the session's private folder, from ``private_folder``. The launcher owns it, and it is removed at
            the end with all that is in it.
        entry: ``"module:function"``, imported once in the fork server; each worker calls it with its ``args``. The
            import must start no thread and must not initialise CUDA.
    """

    def __init__(self, folder: Path, entry: str = "dtorch.runtime.worker_main:main") -> None:
        self._folder, self._entry = folder, entry
        self._process: subprocess.Popen[bytes] | inherit.Forked | None = None
        self._pidfd: int | None = None  # of the fork server; None where the system has none
        self._lifeline: socket.socket | None = None  # None before start and once the fork server is known to be gone
        self._far_end: socket.socket | None = None  # the fork server's end, only while it is being started
        self._live: set[int] = set()  # workers that were asked for and whose end was not reported
        self._pids: dict[int, int] = {}  # of those, the ones known to have been forked
        self._output = bytearray()  # commands, or the rest of one, that the socket would not take yet
        self._input = b""  # beginning of a report
        self._failure = ""  # why the fork server is gone; "" while it is not
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_exit: OnExit | None = None
        self._on_failure: OnFailure | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._failure.partition("\n")[0] or f"{len(self._live)} workers"
        return f"<LocalLauncher {self._entry} {state}>"

    @property
    def pid(self) -> int | None:
        """Process id of the fork server, None before ``start``."""
        return self._process.pid if self._process is not None else None

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the live workers that the fork server has reported, by number."""
        return dict(self._pids)

    def states(self) -> dict[int, str]:
        """State of each live worker's process, as the letter of ``/proc/<pid>/stat``; none where the system has no such."""
        found = {}
        for worker, pid in self._pids.items():
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    found[worker] = chr(file.read().rpartition(b") ")[2][0])
            except (OSError, IndexError):
                continue
        return found

    def start(self) -> None:
        """Start the fork server and return while it still imports. Any thread may call this.

        Raises:
            ValueError: ``folder`` is not one of ``private_folder``.
            RuntimeError: called twice, or there is no Python to start.
            OSError: the process could not be started.
        """
        if self._process is not None or self._closed:
            raise RuntimeError("a launcher is started once")
        folder = Path(os.path.abspath(self._folder))
        # It will be removed with all that is in it, so make sure that it is ours.
        if not folder.name.startswith(_PREFIX) or folder.is_symlink() or folder.stat().st_mode & 0o077:
            raise ValueError(f"{folder} is not a session's private folder; private_folder() makes one")
        if not sys.executable:
            raise RuntimeError("sys.executable is empty: dtorch does not know which Python to start for its workers")
        near, far = socket.socketpair()
        near, far = _above_stdio(near), _above_stdio(far)
        near.setblocking(False)
        config = Config(far.fileno(), self._entry, str(folder))
        if inherit.may_fork():
            # Not in _launchers yet, so that the child does not let go of its own end.
            self._process = inherit.fork_server(config, far)
            self._lifeline = near
            far.close()
            _launchers.add(self)
            self._open_pidfd()
            return
        _launchers.add(self)
        self._lifeline, self._far_end = near, far
        try:
            # "" is the current directory. What does not exist may be the name of an import hook: keep it as it is.
            path = [os.path.abspath(part) if os.path.exists(part or ".") else part for part in sys.path]
            # Its own session, so that Ctrl-C in a terminal reaches the client alone.
            self._process = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), "-c", _BOOT, msgspec.json.encode(config).decode(), *path],
                stdin=subprocess.DEVNULL,
                pass_fds=(far.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            near.close()
            self._lifeline = None
            raise
        finally:
            far.close()
            self._far_end = None
        self._open_pidfd()

    def _open_pidfd(self) -> None:
        assert self._process is not None
        if sys.platform == "linux":
            # Absent from kernels before 5.3 and from some sandboxes; _wait then does without it.
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self._process.pid)

    def attach(self, loop: asyncio.AbstractEventLoop, on_exit: OnExit, on_failure: OnFailure | None = None) -> None:
        """Report through ``loop``, from now until ``close``. See ``Launcher.attach``."""
        lifeline = self._usable()
        if self._loop is not None:
            raise RuntimeError("a launcher is attached once")
        self._loop, self._on_exit, self._on_failure = loop, on_exit, on_failure
        loop.add_reader(lifeline.fileno(), self._on_readable)
        if self._output:
            loop.add_writer(lifeline.fileno(), self._on_writable)

    def spawn(self, worker: int, args: dict[str, Any], env: dict[str, str] | None = None) -> None:
        """Start a worker: it sets ``env`` and calls the entry function with ``args``.

        Args:
            worker: a number that no live worker has.
            args: JSON values.
            env: variables added to the client's environment. What libraries read while they are loaded
                (``OMP_NUM_THREADS``) has been read before; use ``torch.set_num_threads``.

        Raises:
            ValueError: the number is in use.
            SessionClosedError: the launcher is closed.
            ConnectionLostError: the fork server is gone, as ``on_failure`` has said.
        """
        self._usable()
        if worker in self._live:
            raise ValueError(f"worker {worker} is running; expected the number of none that is")
        message = Spawn(worker, args, env or {})
        self._send(message)
        self._live.add(worker)

    def kill(self, worker: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to a worker; nothing happens if it has ended, or the launcher is closed."""
        if worker in self._live and self._lifeline is not None:
            self._send(Kill(worker, int(sig)))

    def close(self, timeout_s: float = 2.0) -> None:
        """End all workers and the fork server, and wait until they have ended. Later calls do nothing.

        Blocks for ``timeout_s`` and a second more at most; for some milliseconds when all workers obey SIGTERM.

        Args:
            timeout_s: how long workers may take after SIGTERM before they are killed.
        """
        if self._closed:
            return
        self._detach()
        self._closed = True
        if self._process is not None:
            if self._lifeline is not None:
                if not self._live:
                    self._process.kill()  # it has no worker; it may still be importing, for which nobody need wait
                elif not self._output:
                    self._send(Stop())
                    self._wait(timeout_s)
                self._lifeline.close()
                self._lifeline = None
            if not self._wait(_KILL_WAIT_S):
                self._process.kill()  # the kernel kills the workers with it
                self._process.wait()
            self._release()
        self._live.clear()
        self._pids.clear()
        remove_folder(str(self._folder))

    def _usable(self) -> socket.socket:
        if self._closed:
            raise SessionClosedError("the launcher is closed")
        if self._failure:
            raise ConnectionLostError(self._failure)
        if self._lifeline is None:
            raise RuntimeError("the launcher is not started; call start() first")
        return self._lifeline

    def _send(self, command: Command) -> None:
        self._output += msgspec.json.encode(command) + b"\n"
        self._on_writable()
        if self._output and self._loop is not None and self._lifeline is not None and not self._closed:
            self._loop.add_writer(self._lifeline.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        assert self._lifeline is not None
        try:
            while self._output:
                del self._output[: self._lifeline.send(self._output)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._output.clear()  # the fork server is gone: the reader meets the end of file and reports it
        if self._loop is not None and not self._closed:
            self._loop.remove_writer(self._lifeline.fileno())

    def _on_readable(self) -> None:
        assert self._lifeline is not None
        try:
            data = self._lifeline.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._on_lost()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._on_report(_reports.decode(line))

    def _on_report(self, report: Report) -> None:
        match report:
            case Spawned(worker, pid):
                self._pids[worker] = pid
            case Exited(worker, _, code, number, error, words):
                printed = f"{PRINTED}{words}" if words else ""
                self._ended(worker, f"could not be started: {error}" if error else _how(code, number) + printed)
            case Failed(text):
                self._failure = text  # the end of file follows
            case _:
                assert_never(report)

    def _on_lost(self) -> None:
        """The fork server is gone, and the workers with it."""
        assert self._process is not None
        assert self._lifeline is not None
        assert self._loop is not None
        self._detach()
        self._lifeline.close()
        self._lifeline = None
        if not self._wait(_KILL_WAIT_S):
            self._process.kill()
            self._process.wait()
        status = self._process.returncode or 0
        how = _how(None, -status) if status < 0 else f"{_how(status, None)}; see its words on stderr"
        self._failure = self._failure or f"the fork server ended: {how}"
        self._release()
        if self._on_failure is not None:
            self._loop.call_soon(self._tell_failure, self._failure)
        for worker in sorted(self._live):
            self._ended(worker, self._failure)

    def _ended(self, worker: int, reason: str) -> None:
        self._live.discard(worker)
        self._pids.pop(worker, None)
        assert self._loop is not None
        # Not called from here: one callback that raises must not keep the others from being told.
        self._loop.call_soon(self._tell_exit, worker, reason)

    def _tell_exit(self, worker: int, reason: str) -> None:
        if not self._closed and self._on_exit is not None:
            self._on_exit(worker, reason)

    def _tell_failure(self, text: str) -> None:
        if not self._closed and self._on_failure is not None:
            self._on_failure(text)

    def _detach(self) -> None:
        if self._loop is not None and self._lifeline is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._lifeline.fileno())
            self._loop.remove_writer(self._lifeline.fileno())

    def _wait(self, timeout_s: float) -> bool:
        """Wait for the fork server's end and reap it; False when it is still running after ``timeout_s``."""
        assert self._process is not None
        if self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(timeout_s * 1000):
                return False
            self._process.wait()
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _release(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _forget(self) -> None:
        """In a process that the client has forked: let go of the lifeline, and leave everything else to the client."""
        for end in (self._lifeline, self._far_end):
            if end is not None:
                end.close()
        self._lifeline = self._far_end = None
        self._release()
        if self._process is not None and self._process.returncode is None:
            self._process.returncode = 0  # not this process's child, so never to be waited for or warned about
        self._closed = True


_launchers: weakref.WeakSet[LocalLauncher] = weakref.WeakSet()


def _forget_all() -> None:
    for launcher in list(_launchers):
        launcher._forget()


os.register_at_fork(after_in_child=_forget_all)


def _how(code: int | None, number: int | None) -> str:
    if number is None:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def _above_stdio(end: socket.socket) -> socket.socket:
    """Move a socket away from descriptors 0 to 2, which it gets in a client that has closed its stdio."""
    if end.fileno() > 2:
        return end
    moved = socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
    end.close()
    return moved


def _interpreter_flags() -> list[str]:
    """Options of this interpreter that decide where and how modules are found."""
    flags = sys.flags
    found = ["-I"] if flags.isolated else ["-E"] * bool(flags.ignore_environment) + ["-s"] * bool(flags.no_user_site)
    found += ["-S"] * bool(flags.no_site) + ["-B"] * bool(flags.dont_write_bytecode)
    return found + ["-" + "O" * flags.optimize] * bool(flags.optimize)


def private_folder() -> Path:
    """Make the folder of a session: mode 0700, with a path short enough for unix sockets in it.

    It lies in ``XDG_RUNTIME_DIR`` where that can be used, else in the system's folder for temporary files.

    Raises:
        OSError: no folder could be made in any of them.
    """
    error: OSError | None = None
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        length = len(os.fsencode(base)) + len("/") + len(_PREFIX) + 8 + len("/") + _NAME_BYTES
        if not os.path.isabs(base) or length > _SOCKET_PATH_BYTES:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as failed:
            error = failed
    assert error is not None  # "/tmp" is always short enough to be tried
    raise error
