"""What a process printed last: kept by whoever forked it, for when it dies.

Text that Python prints is noted on its way, and so is the stack of a crash (``faulthandler``). It all goes to the terminal as
ever; nobody waits for anybody.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
from typing import Any

KEPT_BYTES = 2048
CRASH_LINES = 8
FULL_BYTES = 1 << 20
"""Above this the file is begun anew with what is kept."""


class Words:
    """Made before a fork: the child calls ``note_here``, the parent ``last`` and ``close``."""

    def __init__(self) -> None:
        self._fd = _nameless_file()
        self._crash = _nameless_file()

    def note_here(self) -> None:
        """From here on, what this process prints is noted."""
        sys.stdout, sys.stderr = (stream and _Noting(stream, self) for stream in (sys.stdout, sys.stderr))
        faulthandler.enable(self._crash, all_threads=False)

    def note(self, text: str) -> None:
        os.write(self._fd, text.encode("utf-8", "backslashreplace"))
        if self._size() > FULL_BYTES:
            kept = self._tail()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, kept, 0)
            os.lseek(self._fd, len(kept), os.SEEK_SET)

    def last(self) -> str:
        """The last lines, and of a crash the calls next to it; "" when nothing was printed."""
        kept = self._tail()
        text = kept.decode("utf-8", "replace")
        if len(kept) == KEPT_BYTES:
            text = text.partition("\n")[2] or text  # the first line may have lost its beginning
        crash = os.pread(self._crash, KEPT_BYTES, 0).decode("utf-8", "replace").splitlines()[:CRASH_LINES]
        return "\n".join([text.strip(), *crash]).strip()

    def _tail(self) -> bytes:
        return os.pread(self._fd, KEPT_BYTES, max(self._size() - KEPT_BYTES, 0))

    def _size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._crash)


def _nameless_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("dtorch-words")
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


class _Noting:
    """A text stream that also notes what is written."""

    def __init__(self, stream: Any, words: Words) -> None:
        self._stream, self._words = stream, words

    def write(self, text: str) -> int:
        self._words.note(text)
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
