"""Which files a session's work may touch on this worker, and how many bytes of them it has moved."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class FileAccess:
    """The rights of one session on one worker.

    Attributes:
        folders: files in these folders, and below, may be read and written; None: whatever the worker's user may.
        counters: gets "bytes_read" and "bytes_written".
    """

    folders: tuple[str, ...] | None = None
    counters: dict[str, int] = field(default_factory=lambda: {"bytes_read": 0, "bytes_written": 0})

    @staticmethod
    def within(folders: Sequence[str] | None, counters: dict[str, int]) -> FileAccess:
        """Access to ``folders`` (links in their paths are followed now); counts go to ``counters``."""
        counters.update(bytes_read=0, bytes_written=0)
        return FileAccess(None if folders is None else tuple(os.path.realpath(f) for f in folders), counters)

    def open(self, path: str, flags: int) -> int:
        """Open a file that the client named; the answer is a descriptor.

        Raises:
            PermissionError: it lies outside of ``folders``.
            FileNotFoundError: it is not on this host.
        """
        real = os.path.realpath(path)
        if self.folders is not None and not any(_is_below(real, folder) for folder in self.folders):
            raise PermissionError(
                f"{path!r} lies outside of the folders that this session may use: {', '.join(self.folders) or 'none'}"
            )
        try:
            return os.open(real, flags | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path!r} is not on host {socket.gethostname()!r}: workers read and write files themselves, so it must be "
                "there, under the same path (copy it, or use a folder that all hosts share)"
            ) from None


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
