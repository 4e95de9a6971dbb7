"""The fork server: one small process that has already imported the workers' code, and forks each worker from it.

A worker made this way costs a fork, not an ``import torch``. The server is single-threaded and holds one socket to the
client, the *lifeline*. Invariants:

* The lifeline is open in exactly two processes, the client and the fork server. Its end of file therefore means that
  the client is gone, however it went; the server then kills every worker, removes the session's folder and exits.
* A worker asks the kernel for SIGKILL when the fork server dies, so nothing outlives both.
* Nothing here starts a thread, an OpenMP team or CUDA, or changes a thread setting: a fork would copy it broken.
  Libraries that read variables such as ``OMP_NUM_THREADS`` when they are loaded have done so before the fork; a
  worker changes its thread count with ``torch.set_num_threads``.

This file also holds the vocabulary of the lifeline: one JSON message a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, cast

import msgspec
from typing_extensions import assert_never

from dtorch.runtime.words import Words

# ---- vocabulary -----------------------------------------------------------------------------------------------------


class Config(msgspec.Struct, frozen=True):
    """What the fork server is told on its command line."""

    lifeline: int  # file descriptor of the server's end of the lifeline
    entry: str  # "module:function" that each worker calls
    folder: str  # the session's private folder; the server removes it when it ends


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Fork a worker that sets ``env`` and calls the entry function with ``args``."""

    worker: int  # number that the client chose; free again once Exited was sent
    args: dict[str, Any]  # JSON values only
    env: dict[str, str] = {}


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Send a signal to a worker; nothing happens if it has ended already."""

    worker: int
    signal: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Send SIGTERM to all workers, and end once they have ended."""


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    worker: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A worker ended. Exactly one of ``code``, ``signal`` and ``error`` is set."""

    worker: int
    pid: int  # 0 when the fork itself failed
    code: int | None = None
    signal: int | None = None
    error: str = ""  # why there was no process at all
    words: str = ""  # what it printed last


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The fork server cannot go on: it kills its workers and ends."""

    text: str


Command = Spawn | Kill | Stop
Report = Spawned | Exited | Failed

_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)

# ---- processes ------------------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_HANDLED = (signal.SIGCHLD, signal.SIGTERM)
_FLUSH_FAILED = 120  # the exit code that Python itself uses when it cannot flush stdout

Entry = Callable[[dict[str, Any]], object]


def _prctl(option: int, value: Any) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _set_name(name: str) -> None:
    """Name the process in ``ps`` and ``top`` (15 bytes at most)."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def _die_with(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when ``parent`` ends, or end now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _kill_group(pid: int, *, leader: bool) -> None:
    """SIGKILL a worker that was not reaped yet, with everything it started that stayed in its process group."""
    if leader:
        os.kill(pid, signal.SIGKILL)
    # No such group: the worker was killed before it could make its own.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def load_entry(entry: str) -> Entry:
    """Import ``"module:function"`` and return the function.

    Raises:
        ValueError: the text has another form.
        TypeError: the name is not a function.
    """
    module, _, name = entry.partition(":")
    if not module or not name:
        raise ValueError(f"an entry is written 'module:function', got {entry!r}")
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise TypeError(f"{entry!r} is a {type(found).__name__}; expected a function")
    return cast(Entry, found)


class ForkServer:
    """Serves the commands of one client until the lifeline ends.

    Attributes:
        _pids: workers that run or that nobody has reaped yet, by number. Only ``_spawn`` adds, only ``_reap`` and
            ``_destroy`` remove; so a pid in here is never one that the system has given to another process.
        _wake_r, _wake_w: the pair through which Python's signal handler wakes the selector.
    """

    def __init__(self, lifeline: socket.socket) -> None:
        self._lifeline = lifeline
        self._pids: dict[int, int] = {}
        self._words: dict[int, Words] = {}  # of the same workers
        self._input = bytearray()
        self._stopping = False
        self._pid = os.getpid()
        self._entry: Entry | None = None
        self._wake_r, self._wake_w = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def run(self, entry: str) -> int:
        """Load ``entry``, then serve. Returns the exit code of the process; no worker is left when it does."""
        for end in (self._wake_r, self._wake_w):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_w.fileno(), warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, lambda *_: None)  # the byte on the wake-up socket is what counts
        try:
            try:
                self._preload(entry)
            except BaseException:
                text = f"the workers' entry {entry!r} could not be loaded:\n{traceback.format_exc()}"
                raise _StopServing(text) from None
            self._selector.register(self._lifeline, selectors.EVENT_READ, self._on_lifeline)
            self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_signal)
            while not (self._stopping and not self._pids):
                for key, _ in self._selector.select():
                    key.data()
        except _StopServing as stop:
            return self._fail(stop.text)
        except BaseException:
            return self._fail(f"the fork server failed:\n{traceback.format_exc()}")
        finally:
            self._destroy()
        return 0

    def _preload(self, entry: str) -> None:
        gc.disable()
        self._entry = load_entry(entry)
        others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        if others:
            raise RuntimeError(f"importing it started threads, which a fork does not copy: {', '.join(others)}")
        gc.collect()
        gc.freeze()  # workers then share these pages for good: their collector never touches them

    def _fail(self, text: str) -> int:
        """Tell the client why the server ends. An empty text means that the client is gone."""
        if not text:
            return 0
        try:
            self._report(Failed(text))
        except _StopServing:
            sys.stderr.write(f"dtorch fork server: {text}\n")
        return 1

    def _report(self, report: Report) -> None:
        try:
            self._lifeline.sendall(msgspec.json.encode(report) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            raise _StopServing("") from None

    def _on_lifeline(self) -> None:
        try:
            data = self._lifeline.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise _StopServing("")
        self._input += data
        *lines, rest = bytes(self._input).split(b"\n")
        self._input[:] = rest
        for line in lines:
            self._obey(_commands.decode(line))

    def _on_signal(self) -> None:
        numbers = self._wake_r.recv(4096)
        if signal.SIGTERM in numbers:
            raise _StopServing("the fork server was ended by SIGTERM")
        self._reap()

    def _obey(self, command: Command) -> None:
        match command:
            case Spawn():
                self._spawn(command)
            case Kill(worker, number):
                if worker in self._pids:
                    os.kill(self._pids[worker], number)
            case Stop():
                self._stopping = True
                for pid in self._pids.values():
                    os.kill(pid, signal.SIGTERM)
            case _:
                assert_never(command)

    def _spawn(self, command: Spawn) -> None:
        if self._stopping or command.worker in self._pids:
            why = "the session is closing" if self._stopping else "a worker of this number is running"
            self._report(Exited(command.worker, 0, error=why))
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # Blocked across the fork: a signal meant for the child must not reach the parent's wake-up socket through it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        words = Words()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(command, words)
        except OSError as error:
            words.close()
            self._report(Exited(command.worker, 0, error=f"fork failed: {error}"))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        self._pids[command.worker], self._words[command.worker] = pid, words
        self._report(Spawned(command.worker, pid))

    def _become_worker(self, command: Spawn, words: Words) -> NoReturn:
        """Runs in the child only, and never returns into the server's loop."""
        code: int = 1
        try:
            _die_with(self._pid)
            signal.set_wakeup_fd(-1)
            for number in _HANDLED:
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for end in (self._lifeline, self._wake_r, self._wake_w):
                end.close()
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            _set_name(f"dtorch-worker{command.worker}")
            os.environ.update(command.env)
            words.note_here()
            for others in self._words.values():
                others.close()
            gc.enable()
            assert self._entry is not None
            self._entry(command.args)
            code = 0
        except SystemExit as stop:
            code = _exit_code(stop)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None:
                        stream.flush()
            except (OSError, ValueError):
                code = code or _FLUSH_FAILED
            finally:
                os._exit(code)

    def _reap(self) -> None:
        """Report every worker that has ended."""
        workers = {pid: worker for worker, pid in self._pids.items()}
        while True:
            try:
                # Looked at first and reaped after its group was killed, so that its pid cannot be reused in between.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            worker = workers.get(pid)
            if worker is None:  # something that the preloaded module started
                os.waitpid(pid, 0)
                continue
            _kill_group(pid, leader=False)
            os.waitpid(pid, 0)
            del self._pids[worker]
            words = self._words.pop(worker)
            last = words.last()
            words.close()
            if ended.si_code == os.CLD_EXITED:
                self._report(Exited(worker, pid, code=ended.si_status, words=last if ended.si_status else ""))
            else:
                self._report(Exited(worker, pid, signal=ended.si_status, words=last))

    def _destroy(self) -> None:
        """Kill and reap every worker."""
        for pid in self._pids.values():
            _kill_group(pid, leader=True)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        self._pids.clear()


class _StopServing(Exception):
    """Leaves the server's loop. ``text`` is for the client; "" when the client is gone."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def remove_folder(folder: str) -> None:
    """Remove the session's folder; another process may be removing it at the same time."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        sys.stderr.write(f"dtorch: could not remove the session's folder {folder}\n")


def main(config_json: str) -> NoReturn:
    """Be the fork server of the client that holds the other end of the lifeline."""
    config = msgspec.json.decode(config_json, type=Config)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started us may have blocked anything
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # a client with closed stdio must not make later files stdio
        os.set_inheritable(fd, True)
    os.close(fd)
    os.set_inheritable(config.lifeline, False)
    sys.argv[:] = ["dtorch-forkserver"]
    _set_name("dtorch-forksrv")
    code = 1
    try:
        code = ForkServer(socket.socket(fileno=config.lifeline)).run(config.entry)
    finally:
        remove_folder(config.folder)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
