"""``dtorch up`` as a process of its own, and what its head says meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from typing import Any

from dtorch.cluster.remote import Target
from dtorch.session import Session
from dtorch.wiring import Options

PATIENCE_S = 120.0  # an upper bound that only a failing test meets


class Up:
    """A cluster that ``dtorch up`` has started; ``end`` is a user's Ctrl-C."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dtorch", "up", "--listen", "127.0.0.1:0", *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"export DTORCH_HEAD=(\S+) DTORCH_API_KEY=(\S+)", self.wait_said("export DTORCH_HEAD"))
        assert found is not None
        self.url, self.key = found[1], found[2]

    def wait_said(self, what: str) -> str:
        """The next line that holds that."""
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        said = []
        try:
            for line in self.process.stdout:
                if what in line:
                    return line
                said.append(line)
        finally:
            timer.cancel()
        raise AssertionError(f"{what!r} was not said: {said}")

    def session(self) -> Session:
        """A client's session, apart from the default one; close it at the end."""
        return Session(Options(target=Target(self.url, self.key)))

    def workers(self) -> list[dict[str, Any]]:
        """What the head lists, in order of their slots."""
        url = self.url.replace("ws", "http", 1) + "/v1/status"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            found = json.load(answer)["workers"]
        return sorted(found, key=lambda worker: int(worker["labels"]["slot"]))

    def environment(self) -> dict[str, str]:
        return {**os.environ, "DTORCH_HEAD": self.url, "DTORCH_API_KEY": self.key}

    def end(self) -> str:
        """End it all; the answer is what it has said since it was up. A second time does nothing."""
        assert self.process.stdout is not None
        if self.process.stdout.closed:
            return ""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        with self.process:
            said = self.process.stdout.read()
        return said
