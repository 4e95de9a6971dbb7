"""A worker for tests/test_launcher.py: it reports to a unix socket and then does what it reads there."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
from typing import Any


def _sockets() -> int:
    """How many sockets this process holds open, stdio aside."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def facts(args: dict[str, Any]) -> dict[str, Any]:
    return {
        "args": args,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "mark": os.environ.get("DTORCH_TEST_MARK"),
        "ignores_sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "sockets": _sockets(),
        "torch": "torch" in sys.modules,
    }


def main(args: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(args["address"])
        link.sendall(json.dumps(facts(args)).encode() + b"\n")
        with link.makefile("r") as lines:
            for line in lines:
                word, _, rest = line.strip().partition(" ")
                match word:
                    case "ping":
                        link.sendall(b"pong\n")
                    case "say":
                        sys.stdout.write(rest + "\n")  # left in the buffer, for the exit to flush
                    case "exit":
                        sys.exit(int(rest))
                    case "raise":
                        raise ValueError(rest)
                    case "return":
                        return
                    case "deaf":
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)
                        link.sendall(b"pong\n")
                    case "child":
                        if (child := os.fork()) == 0:
                            signal.pause()
                        link.sendall(f"{child}\n".encode())


not_a_function = 3
