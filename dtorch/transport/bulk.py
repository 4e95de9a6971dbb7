"""Large values between processes of one user on one host: shared memory without a name.

The owner of a ``Segment`` makes an anonymous memory file and tells others ``SharedBlob(pid, fd, offset, size)``; they
open ``/proc/<pid>/fd/<fd>``, which the kernel allows to the same user only. Nothing is in /dev/shm or in any folder, so
a process that is killed leaves nothing behind. Systems without ``memfd_create`` pass the session's private folder
instead; there a segment is a file of that folder until it is closed, and removing the folder with the session removes
what a killed process left.

Making and first touching pages costs four times what copying the bytes does, so owners reuse segments
(``SegmentPool``) and readers keep a few mappings open.

A mapping lives as long as any tensor on it. ``close`` never unmaps under a tensor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from pathlib import Path
from typing import NamedTuple

import torch

from .errors import ConnectionLostError, ProtocolError
from .messages import SharedBlob, StreamBlob

_NAME = "dtorch"
_PAGE = mmap.PAGESIZE
_MAX_OPEN_MAPPINGS = 16
_MIN_SEGMENT_BYTES = 64 * 1024
HAS_ANONYMOUS = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Segment:
    """Shared memory that this process owns.

    Args:
        size_bytes: at least this much; rounded up to whole pages. Untouched pages cost nothing.
        folder: private folder for a named segment, where the system has no anonymous ones.

    Attributes:
        size_bytes: the usable size.
        buffer: all of it, as a writable uint8 tensor.
    """

    def __init__(self, size_bytes: int, folder: Path | None = None) -> None:
        self.size_bytes = max(1, -(-size_bytes // _PAGE)) * _PAGE
        self._path: Path | None = None
        if folder is None:
            if not HAS_ANONYMOUS:
                raise ValueError("this system has no anonymous shared memory: pass a private folder")
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            fd, self._path = _named_file(folder)
        self._fd = fd
        self._close = weakref.finalize(self, _close_segment, fd, self._path)
        os.ftruncate(fd, self.size_bytes)
        if folder is None:  # a size that cannot change: no reader can be made to touch pages that are gone
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.map: mmap.mmap = mmap.mmap(fd, self.size_bytes)
        self.buffer: torch.Tensor = torch.frombuffer(self.map, dtype=torch.uint8)

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def blob(self, offset: int = 0, size_bytes: int | None = None) -> SharedBlob:
        """Name a piece of the segment for another process.

        Raises:
            ValueError: the piece is not inside, or the segment is closed.
        """
        size = self.size_bytes - offset if size_bytes is None else size_bytes
        if self.closed:
            raise ValueError("the segment is closed")
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size} are not inside a segment of {self.size_bytes}")
        return SharedBlob(os.getpid(), self._fd, offset, size)

    def close(self) -> None:
        """Let no one else open it. Tensors on it stay valid; the last of them, in any process, frees the memory."""
        if self._close.alive:
            self._close()
            del self.map, self.buffer


def _named_file(folder: Path) -> tuple[int, Path]:
    draft = folder / f"{os.getpid()}-{threading.get_ident()}.new"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    path = _named_path(folder, os.getpid(), fd)  # only the descriptor's number makes the name known to readers
    os.replace(draft, path)
    return fd, path


def _named_path(folder: Path, pid: int, fd: int) -> Path:
    return folder / f"{pid}-{fd}.seg"


def _close_segment(fd: int, path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
    os.close(fd)


class Lease(NamedTuple):
    """A piece of a pooled segment. It returns to the pool when no tensor shares the storage of ``tensor`` any more.

    Whoever has told ``blob`` to another process must keep a tensor until that process is done with it.
    """

    tensor: torch.Tensor  # uint8, exactly the size asked for
    blob: SharedBlob | StreamBlob  # shared memory, or what takes its place between hosts


class PoolStatistics(NamedTuple):
    created: int  # segments made so far
    reused: int  # leases served from an idle segment
    leased_bytes: int
    idle_bytes: int


class SegmentPool:
    """Leases shared memory and reuses it, since the first touch of a page is what costs. Any thread may call.

    Args:
        max_idle_bytes: segments above this total are closed, the longest idle first.
        folder: see ``Segment``.
    """

    def __init__(self, max_idle_bytes: int = 1 << 30, folder: Path | None = None) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._folder = folder
        self._lock = threading.Lock()
        self._idle: list[Segment] = []  # the longest idle first
        # Filled by finalizers, which may run inside any line of any thread: an append is all they may do, no lock.
        self._returned: deque[Segment] = deque()
        self._leased_bytes = 0
        self._created = 0
        self._reused = 0
        self._closed = False

    def lease(self, size_bytes: int) -> Lease:
        """Shared memory for ``size_bytes`` bytes, with whatever content it had."""
        with self._lock:
            if self._closed:
                raise ValueError("the pool is closed")
            self._collect()
            fitting = [s for s in self._idle if size_bytes <= s.size_bytes <= 2 * max(size_bytes, _MIN_SEGMENT_BYTES)]
            if fitting:
                segment = min(fitting, key=lambda s: s.size_bytes)
                self._idle.remove(segment)
                self._reused += 1
            else:
                segment = Segment(_size_class(size_bytes), self._folder)
                self._created += 1
            self._leased_bytes += segment.size_bytes
        # torch holds this view for as long as the storage lives, so its end is the end of the lease.
        view = memoryview(segment.map)[: max(size_bytes, 1)]
        weakref.finalize(view, self._returned.append, segment).atexit = False
        return Lease(torch.frombuffer(view, dtype=torch.uint8)[:size_bytes], segment.blob(0, size_bytes))

    def statistics(self) -> PoolStatistics:
        with self._lock:
            self._collect()
            idle = sum(segment.size_bytes for segment in self._idle)
            return PoolStatistics(self._created, self._reused, self._leased_bytes, idle)

    def close(self) -> None:
        """Close what is idle. Leased memory stays valid until its tensors are gone."""
        with self._lock:
            self._closed = True
            self._collect()

    def _collect(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            self._leased_bytes -= segment.size_bytes
            self._idle.append(segment)
        limit = 0 if self._closed else self._max_idle_bytes
        idle = sum(segment.size_bytes for segment in self._idle)
        while idle > limit:
            segment = self._idle.pop(0)
            idle -= segment.size_bytes
            segment.close()


def _size_class(size_bytes: int) -> int:
    """The next of four steps per power of two, so that slightly different sizes meet in one class."""
    size = max(size_bytes, _MIN_SEGMENT_BYTES)
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return -(-size // step) * step


_mappings: OrderedDict[tuple[int, int, int, int], mmap.mmap] = OrderedDict()  # (pid, fd, device, inode), oldest first
_mappings_lock = threading.Lock()


def open_blob(blob: SharedBlob, folder: Path | None = None) -> torch.Tensor:
    """The bytes of another process's (or this one's) segment, as a writable uint8 tensor on the shared pages.

    Args:
        blob: as told by the owner; it is checked, not believed.
        folder: the owner's folder, where segments are named.

    Raises:
        ConnectionLostError: the owner is gone or has closed the segment.
        ProtocolError: the blob names something else than bytes of a segment.
    """
    if blob.pid <= 0 or blob.fd < 0 or blob.offset < 0 or blob.size_bytes < 0:
        raise ProtocolError(f"{blob} names no bytes")
    path = f"/proc/{blob.pid}/fd/{blob.fd}" if folder is None else str(_named_path(folder, blob.pid, blob.fd))
    try:
        if folder is None and not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise ProtocolError(f"{blob} is not a segment")
        status = os.stat(path)
        if blob.offset + blob.size_bytes > status.st_size:
            raise ProtocolError(f"{blob} reaches beyond the segment's {status.st_size} bytes")
        mapping = _mapping(blob, path, status, folder)
    except OSError as error:
        raise ConnectionLostError(f"process {blob.pid} does not hold segment {blob.fd} any more: {error}") from error
    if blob.size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=blob.size_bytes, offset=blob.offset)


def _mapping(blob: SharedBlob, path: str, status: os.stat_result, folder: Path | None) -> mmap.mmap:
    key = (blob.pid, blob.fd, status.st_dev, status.st_ino)
    with _mappings_lock:
        found = _mappings.get(key)
        if found is not None:
            _mappings.move_to_end(key)
            return found
        fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            opened = os.fstat(fd)
            if (opened.st_dev, opened.st_ino) != key[2:]:  # closed and replaced between the two looks
                raise ProtocolError(f"{blob} changed while it was opened")
            made = mmap.mmap(fd, opened.st_size)
        finally:
            os.close(fd)
        if folder is None:
            _drop_dead()
        while len(_mappings) >= _MAX_OPEN_MAPPINGS:
            _mappings.popitem(last=False)
        _mappings[key] = made
        return made


def _drop_dead() -> None:
    """Forget mappings whose owner has closed them, so that the memory can be freed. The lock is held."""
    for key in list(_mappings):
        try:
            status = os.stat(f"/proc/{key[0]}/fd/{key[1]}")
        except OSError:
            del _mappings[key]
        else:
            if (status.st_dev, status.st_ino) != key[2:]:
                del _mappings[key]


def forget_blobs(pid: int | None = None) -> None:
    """Let go of open mappings, of one owner or of all. Tensors on them stay valid."""
    with _mappings_lock:
        for key in list(_mappings):
            if pid is None or key[0] == pid:
                del _mappings[key]
