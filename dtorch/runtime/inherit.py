"""Becoming the fork server by forking the client, which has imported everything already.

Forking a process that has threads is unsafe: locks that they hold stay locked for ever in the child. So a client is forked
only while it has no thread but the ones that importing torch made (numpy's, which know about forks), has not started CUDA,
and is small, for the child keeps what it shares. Every other client gets a fork server of its own making (``launcher``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from typing import NoReturn

import msgspec
import torch

from dtorch.runtime import forkserver

MAX_RESIDENT_BYTES = 1 << 30
"""A client that holds more memory than this is not forked: what it frees later would stay with the child."""

_FLAGS = "DTORCH_FORK"  # 0 in the environment: never fork the client


def _num_threads() -> int | None:
    """Threads of this process, Python's and others; None where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


_threads_at_import = _num_threads()


def may_fork() -> bool:
    """Whether this process can safely become two."""
    if os.environ.get(_FLAGS, "") == "0" or _threads_at_import is None or not hasattr(os, "fork"):
        return False
    if threading.active_count() != 1 or threading.current_thread() is not threading.main_thread():
        return False
    if (_num_threads() or 1 << 30) > _threads_at_import or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident <= MAX_RESIDENT_BYTES


class Forked:
    """The child, with as much of ``subprocess.Popen`` as a launcher needs.

    Attributes:
        returncode: None while it was not waited for; -N when signal N killed it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if timeout is not None:
                done = threading.Event()
                waiter = threading.Thread(target=self._wait_then, args=(done,), daemon=True)
                waiter.start()
                if not done.wait(timeout):
                    raise subprocess.TimeoutExpired("dtorch fork server", timeout)
            else:
                self._reap()
        assert self.returncode is not None
        return self.returncode

    def _wait_then(self, done: threading.Event) -> None:
        self._reap()
        done.set()

    def _reap(self) -> None:
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # the client reaps all its children, or ignores SIGCHLD
            self.returncode = 0
        else:
            self.returncode = os.waitstatus_to_exitcode(status)


def fork_server(config: forkserver.Config, lifeline: socket.socket) -> Forked:
    """Fork; the child serves ``config`` and never returns."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python counts numpy's thread too
        pid = os.fork()
    if pid == 0:
        _become_server(config, lifeline)
    return Forked(pid)


def _become_server(config: forkserver.Config, lifeline: socket.socket) -> NoReturn:
    """In the child: let go of everything that was the client's, then serve."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP) and callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        sys.settrace(None)
        sys.setprofile(None)
        asyncio._set_running_loop(None)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        kept = lifeline.fileno()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != kept:
                with contextlib.suppress(OSError):  # the listing's own descriptor is gone already
                    os.close(int(name))
        lifeline.detach()
        forkserver.main(msgspec.json.encode(config).decode())
    finally:
        os._exit(code)
