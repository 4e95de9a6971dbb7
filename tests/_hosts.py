"""Hosts on this machine: network namespaces, joined by a bridge in a namespace of its own. The machine's own network is left
as it is, and everything goes with the processes that hold the namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

TOOLS = ("ip", "unshare", "nsenter")


class Hosts:
    """``number`` hosts; host i has the address 10.77.0.(i + 1) and no way to anything else."""

    def __init__(self, number: int, stack: ExitStack) -> None:
        self._bridge = _hold(stack)
        self.run_in(self._bridge, "ip", "link", "add", "br0", "type", "bridge")
        self.run_in(self._bridge, "ip", "link", "set", "br0", "up")
        self.addresses = [f"10.77.0.{host + 1}" for host in range(number)]
        self._hosts = [_hold(stack) for _ in range(number)]
        for host, pid in enumerate(self._hosts):
            near = f"veth{host}"
            self.run_in(
                self._bridge, "ip", "link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", str(pid)
            )
            self.run_in(self._bridge, "ip", "link", "set", near, "master", "br0", "up")
            self.run_in(pid, "ip", "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            self.run_in(pid, "ip", "link", "set", "eth0", "up")
            self.run_in(pid, "ip", "link", "set", "lo", "up")

    @staticmethod
    def run_in(pid: int, *words: str) -> None:
        subprocess.run([*_enter(pid), *words], check=True, capture_output=True, text=True)

    def start(self, host: int, *words: str, **options: Any) -> subprocess.Popen[str]:
        """A program on a host."""
        return subprocess.Popen([*_enter(self._hosts[host]), *words], text=True, **options)


def _enter(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net"]


def _hold(stack: ExitStack) -> int:
    """A process that holds a new network namespace until its input ends."""
    process = stack.enter_context(
        subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    if process.stdout.readline() != b"\n":
        raise PermissionError("network namespaces cannot be made here")
    return process.pid


@contextmanager
def hosts(number: int) -> Iterator[Hosts | None]:
    """Hosts, or None where this user or machine cannot have network namespaces."""
    with ExitStack() as stack:
        made = None
        if os.geteuid() == 0 and all(map(shutil.which, TOOLS)):
            try:
                made = Hosts(number, stack)
            except (PermissionError, subprocess.CalledProcessError):
                made = None
        yield made
