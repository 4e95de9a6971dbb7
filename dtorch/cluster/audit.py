"""The audit log: who came, who was refused, what was changed; one JSON object a line, never a key and never data."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec


class Audit:
    """Appends events to a file of mode 0600, or forgets them.

    Args:
        path: None for no log.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "ab", buffering=0)

    def note(self, event: str, **facts: Any) -> None:
        """Write an event. Facts are JSON values; long texts are cut."""
        if self._file is None:
            return
        cut = {name: value[:500] if isinstance(value, str) else value for name, value in facts.items()}
        self._file.write(msgspec.json.encode({"at": round(time.time(), 3), "event": event, **cut}) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
