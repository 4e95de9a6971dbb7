"""A head and workers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timing import HERE

from dtorch.cluster.keys import KeyFile

DTORCH = [sys.executable, "-m", "dtorch"]
PATIENCE_S = 120.0


class Home:
    """A head that runs.

    Attributes:
        url, key: for clients.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._audit = folder / "audit.jsonl"
        keys = KeyFile(folder / "keys.json")
        self.key, self._worker_key = keys.create("benchmark")[1], keys.create("pool", "worker")[1]
        _, line = self._start(
            [*DTORCH, "head", "--listen", "127.0.0.1:0", "--keys", str(keys.path), "--audit", str(self._audit)], {}
        )
        self.url = line.split()[2].rstrip(",")

    def _start(self, command: list[str], more: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
        """A process that has said its first line. SIGTERM at the end."""
        process = subprocess.Popen(command, env={**os.environ, **more}, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait)
        self._stack.callback(process.send_signal, signal.SIGTERM)
        self._stack.callback(process.send_signal, signal.SIGCONT)  # it may be stopped
        return process, process.stdout.readline()

    def worker(self, *words: str) -> subprocess.Popen[str]:
        """A worker that has joined. Modules beside this file can be allowed."""
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        more = {"DTORCH_API_KEY": self._worker_key, "PYTHONPATH": path}
        return self._start([*DTORCH, "worker", "--head", self.url, *words], more)[0]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of the audit log."""
        entries = [json.loads(line) for line in self._audit.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [entry for entry in entries if entry["event"] == kind]

    def wait_left(self, name: str) -> dict[str, Any]:
        """Until the head has given up the worker of that name."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for entry in self.events("worker left"):
                if entry["worker"] == name:
                    return entry
            time.sleep(0.02)
        raise TimeoutError(f"worker {name} is still there after {PATIENCE_S:g} s")


@contextlib.contextmanager
def own_head() -> Iterator[Home]:
    """A head without workers; all ends with it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        yield Home(Path(folder), stack)
