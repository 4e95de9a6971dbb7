"""A small process beside a worker that tells the head whether the worker's process runs.

A worker may be too busy to answer: a call holds the interpreter's lock, or a hundred threads want its processors. Nobody
outside can tell that from a worker that is frozen. A process on the same host can: the system tells it the state of the
worker's, it needs a few microseconds four times a second, and whatever the worker executes does not hold it up.

It reads orders, lines of JSON, from its standard input, and sends one endless request:

    POST /v1/attend, Bearer key, the worker's ticket    one byte every ``INTERVAL_S``: the letter of ``/proc/<pid>/stat``,
                                                        "?" where there is no such, ``ENDED`` once the process is gone

This file is run as a program by itself, so that nothing of dtorch or torch is loaded: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time

ATTEND_PATH = "/v1/attend"
TICKET_HEADER = "DTorch-Ticket"
INTERVAL_S = 0.25
ENDED = "X"
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
TIMEOUT_S = 5.0
ENDING_S = 5.0
"""How long a process may take to end, once its files are closed."""
STOP_S = 2.0


class Sentinel:
    """The worker's end. Belongs to one thread.

    Args:
        host, port: of the head.
        key: the worker's.
        has_tls: whether the head speaks TLS.
        ca_file: whom to trust then; "" for the system's authorities.
    """

    def __init__(self, host: str, port: int, key: str, has_tls: bool = False, ca_file: str = "") -> None:
        self._target = {"pid": os.getpid(), "host": host, "port": port, "key": key, "has_tls": has_tls, "ca_file": ca_file}
        self._ticket = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def follow(self, ticket: str) -> None:
        """Tell the head of the worker with this ticket from now on."""
        self.look()
        self._ticket = ticket
        self._order()

    def look(self) -> None:
        """Start the process, if it is not there (any more). The worker does without where none can be started."""
        if self._process is not None and self._process.poll() is None:
            return
        self._drop()
        with contextlib.suppress(OSError):
            # In a session of its own: what is sent to the worker's group is not for it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
            if self._ticket:
                self._order()

    def _order(self) -> None:
        self._write(json.dumps({**self._target, "ticket": self._ticket}).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended: the next look finds out
                os.write(self._process.stdin.fileno(), line)

    def stop(self) -> None:
        """The worker leaves."""
        self._ticket = ""
        self._write(b"stop\n")
        self._drop()

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- the process


class _Beats:
    """The request under way, if there is one."""

    def __init__(self, order: dict[str, object]) -> None:
        self._order = order
        self.pid = int(str(order["pid"]))
        self.socket: socket.socket | None = None
        self._retry_at = self._begun = 0.0
        self._pause_s = FIRST_RETRY_S

    def connect(self) -> None:
        """Begin the request, unless it is too early to try again."""
        if self.socket is not None or time.monotonic() < self._retry_at:
            return
        self._begun = time.monotonic()
        order = self._order
        try:
            made = socket.create_connection((str(order["host"]), int(str(order["port"]))), TIMEOUT_S)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a head that is out of reach is dialled again
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TIMEOUT_S * 1000))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if order["has_tls"]:
                import ssl

                trusted = ssl.create_default_context(cafile=str(order["ca_file"]) or None)
                made = trusted.wrap_socket(made, server_hostname=str(order["host"]))
            self.socket = made
            made.sendall(
                f"POST {ATTEND_PATH} HTTP/1.1\r\nHost: {order['host']}\r\nAuthorization: Bearer {order['key']}\r\n"
                f"{TICKET_HEADER}: {order['ticket']}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            )
        except OSError:
            self._broken()

    def send(self, state: str) -> None:
        if self.socket is not None:
            try:
                self.socket.sendall(f"1\r\n{state}\r\n".encode())
            except OSError:
                self._broken()

    def hear(self) -> None:
        """There is something to read: the head has ended the request, or TLS talks to itself."""
        assert self.socket is not None
        self.socket.setblocking(False)
        try:
            said = self.socket.recv(4096)
        except BlockingIOError:
            said = None
        except OSError as error:
            said = None if type(error).__name__ == "SSLWantReadError" else b""
        self.socket.settimeout(TIMEOUT_S)
        if said is not None:
            self._broken()
        if said and said.split(b" ", 2)[1][:1] == b"4":  # it does not know this ticket or key, and will not
            self._retry_at = float("inf")

    def _broken(self) -> None:
        self.close()
        now = time.monotonic()
        if now - self._begun > LAST_RETRY_S:  # it was good for a while
            self._pause_s = FIRST_RETRY_S
        self._retry_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_RETRY_S)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def state_of(pid: int) -> str:
    """The letter of a process's state; "?" where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b") ")[2][0])
    except (OSError, IndexError):
        return "?"


def _has_ended(parent: int) -> bool:
    """Whether the parent process ends within a moment: its end of a pipe is closed."""
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until:
        if os.getppid() != parent or state_of(parent) in "ZX":
            return True
        time.sleep(0.005)
    return False


def main() -> None:
    """Attend the process that says so until it says "stop" or ends."""
    said = b""
    with contextlib.suppress(OSError):  # to be on time on a machine that is overloaded; few may
        os.nice(-10)
    beats: _Beats | None = None
    while True:
        files: list[int | socket.socket] = [0]
        if beats is not None:
            beats.connect()
            beats.send(state_of(beats.pid))
            if beats.socket is not None:
                files.append(beats.socket)
        ready = select.select(files, (), (), INTERVAL_S)[0]
        if beats is not None and beats.socket in ready:
            beats.hear()
        data = os.read(0, 1 << 16) if 0 in ready else None
        if data == b"" or (beats is not None and os.getppid() != beats.pid):
            if beats is not None and _has_ended(beats.pid):
                beats.connect()
                beats.send(ENDED)
            return
        *lines, said = (said + (data or b"")).split(b"\n")
        for line in lines:
            if beats is not None:
                beats.close()
            if line == b"stop":
                return
            beats = _Beats(json.loads(line))


if __name__ == "__main__":
    main()
