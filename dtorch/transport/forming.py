"""Making a gloo group: nobody is waited for in vain, and its connections are known, to be cut when it must end.

Gloo can neither be stopped while it connects to somebody who is gone, nor later in an exchange. So members meet in the store
first, where waiting can end; then gloo connects in a thread of its own, which is left behind when the others are gone. Each
group has a listening socket of its own: the connections that were accepted there, and those that go to the other members', are
the group's, whatever other groups this process makes at the same time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import Store  # torch.distributed re-exports it in a way that type checkers miss

from .errors import ConnectionLostError

CONNECT_S = 30.0
"""How long members who have all met may take to connect."""
LOOK_S = 0.1
"""Between two looks whether to go on waiting for gloo."""

_listening = threading.Lock()  # held while a socket is made, to tell which one it is
_left_behind: set[threading.Thread] = set()


class Formed:
    """A gloo group of two members or more.

    Args:
        timeout_s: for meeting the others.
        stopped: asked from time to time; True ends the making with ConnectionLostError.

    Attributes:
        pg: torch's group, a ``ProcessGroupGloo``.

    Raises:
        ConnectionLostError: the others did not show up, or it was stopped.
    """

    def __init__(
        self, store: Store, rank: int, num: int, hostname: str, timeout_s: float, stopped: Callable[[], bool]
    ) -> None:
        self._lock = threading.Lock()
        self._own = ""
        self._others: set[str] = set()
        gloo: Any = distributed.ProcessGroupGloo  # its stubs lack _Options
        options = gloo._Options()
        options._timeout = timedelta(seconds=min(timeout_s, CONNECT_S))
        with _listening:
            before = {(fd, _name(each)) for fd, each in _sockets(listening=True)}
            options._devices = [gloo.create_device(hostname=hostname)]
            after = {(fd, _name(each)) for fd, each in _sockets(listening=True)}
            self._own = next((name for _, name in after - before), "")
        try:
            store.set(f"at/{rank}", self._own or "?")
            keys = [f"at/{other}" for other in range(num) if other != rank]
            store.wait(keys, timedelta(seconds=timeout_s))
            self._others = {store.get(key).decode() for key in keys}
            self.pg: Any = _connected(lambda: gloo(store, rank, num, options), stopped)
        except RuntimeError as error:
            raise ConnectionLostError(f"{num} workers could not form a group: {error}") from error

    def close(self) -> None:
        with self._lock:  # from here on others may have its addresses
            self._own, self._others = "", set()
            self.pg = None

    def cut(self) -> None:
        """End its connections: gloo finds that its peers are gone. Any thread may call this."""
        with self._lock:
            for _, connection in _sockets(listening=False):
                with contextlib.suppress(OSError):
                    if self._own and (_name(connection) == self._own or _name(connection, True) in self._others):
                        connection.shutdown(socket.SHUT_RDWR)


def _connected(make: Callable[[], Any], stopped: Callable[[], bool]) -> Any:
    made: list[Any] = []
    over = threading.Event()

    def connect() -> None:
        try:
            made.append(make())
        except Exception as error:
            made.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=connect, name="dtorch-gloo", daemon=True)
    thread.start()
    while not over.wait(LOOK_S):
        if stopped():
            _left_behind.add(thread)
            raise ConnectionLostError("somebody who was waited for is gone")
    thread.join()
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def is_forming() -> bool:
    """Whether gloo still connects somewhere, in vain. The interpreter cannot end a thread inside of C++ without harm."""
    _left_behind.difference_update([thread for thread in _left_behind if not thread.is_alive()])
    return bool(_left_behind)


def _sockets(listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets of this process, as (descriptor, copy of it); none where the system does not tell."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                accepts = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                )
                if copy.family in (socket.AF_INET, socket.AF_INET6) and bool(accepts) == listening:
                    yield int(name), copy


def _name(connection: socket.socket, of_peer: bool = False) -> str:
    """``host|port`` of one end of a connection. Raises OSError: it has none."""
    name = connection.getpeername() if of_peer else connection.getsockname()
    return f"{name[0]}|{name[1]}"
