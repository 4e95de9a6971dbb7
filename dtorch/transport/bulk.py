"""Large values between processes of one user on one host: shared memory without a name.

The owner of a ``Segment`` makes an anonymous memory file and tells others ``SharedBlob(pid, fd, offset, size)``; they
open ``/proc/<pid>/fd/<fd>``, which the kernel allows to the same user only. Nothing is in /dev/shm or in any folder, so
a process that is killed leaves nothing behind. Systems without ``memfd_create`` pass the session's private folder
instead; there a segment is a file of that folder until it is closed, and removing the folder with the session removes
what a killed process left.

Making and first touching pages costs four times what copying the bytes does, so owners reuse segments
(``SegmentPool``) and readers keep a few mappings open.

A mapping lives as long as any tensor on it. ``close`` never unmaps under a tensor.

A reader may make the pages a tensor's memory (``adopt_blob``). Meanwhile it holds a lock on the file, which the kernel lets go
with the memory, also of a reader that is killed; owners use no segment again that is locked.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs

from .errors import ConnectionLostError, ProtocolError
from .kept import LEAST_BYTES, size_class
from .messages import SharedBlob

_NAME = "dtorch"
_PAGE = mmap.PAGESIZE
_MAX_OPEN_MAPPINGS = 16
_MAX_IDLE_SEGMENTS = 128  # each takes two descriptors
_MAX_ADOPTED = 128
_ALIGN = 64
OWN_SEGMENT_BYTES = 1024 * 1024
"""Pieces of this size and more have segments of their own when several are leased at once."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise, Linux 5.14
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

    def is_adopted(self) -> bool:
        """Whether the pages are the memory of a reader's tensor (``adopt_blob``)."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

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
    blob: Any  # SharedBlob; StreamBlob where streams take its place, between hosts


class PoolStatistics(NamedTuple):
    created: int  # segments made so far
    reused: int  # leases served from an idle segment
    leased_bytes: int
    idle_bytes: int  # not leased; readers may have adopted some of it


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

    def lease(self, size_bytes: int, fill: bool = False) -> Lease:
        """Shared memory for ``size_bytes`` bytes, with whatever content it had; to ``fill`` it at once, give it pages now."""
        with self._lock:
            if self._closed:
                raise ValueError("the pool is closed")
            self._collect()
            fitting = [s for s in self._idle if size_bytes <= s.size_bytes <= 2 * max(size_bytes, LEAST_BYTES)]
            fitting.sort(key=lambda s: s.size_bytes)
            found = next((s for s in fitting if not s.is_adopted()), None)
            if found is not None:
                segment = found
                self._idle.remove(segment)
                self._reused += 1
            else:
                segment = Segment(size_class(size_bytes), self._folder)
                self._created += 1
            self._leased_bytes += segment.size_bytes
        # torch holds this view for as long as the storage lives, so its end is the end of the lease.
        view = memoryview(segment.map)[: max(size_bytes, 1)]
        weakref.finalize(view, self._returned.append, segment).atexit = False
        tensor = torch.frombuffer(view, dtype=torch.uint8)[:size_bytes]
        if fill and found is None:
            _populate(tensor, _POPULATE_WRITE)
        return Lease(tensor, segment.blob(0, size_bytes))

    def lease_many(self, sizes_bytes: Sequence[int], give: bool = False) -> list[Lease]:
        """Shared memory to be filled at once, one piece after the other.

        Args:
            give: each piece will be told to one reader only, who may keep it and write.
        """
        if min(sizes_bytes) >= OWN_SEGMENT_BYTES:
            leases = [self.lease(size, fill=True) for size in sizes_bytes]
            return [Lease(tensor, structs.replace(blob, given=give)) for tensor, blob in leases]
        starts = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes_bytes), initial=0))
        tensor, blob = self.lease(starts[-1], fill=True)
        return [
            Lease(tensor[start : start + size], SharedBlob(blob.pid, blob.fd, start, size))
            for start, size in zip(starts, sizes_bytes, strict=False)
        ]

    def filled(self, parts: Sequence[torch.Tensor], give: bool = False, lend: bool = False) -> list[Lease]:
        """The bytes of tensors, row-major, for workers to read. Nothing is lent: arguments are those of ``RemotePool``."""
        leases = self.lease_many([part.nbytes for part in parts], give)
        for part, lease in zip(parts, leases, strict=True):
            lease.tensor.view(part.dtype).view(part.shape).copy_(part)
        return leases

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
        while idle > limit or len(self._idle) > _MAX_IDLE_SEGMENTS:
            segment = self._idle.pop(0)
            idle -= segment.size_bytes
            segment.close()


_mappings: OrderedDict[tuple[int, int, int, int], mmap.mmap] = OrderedDict()  # (pid, fd, device, inode), oldest first
_mappings_lock = threading.Lock()


def open_blob(blob: SharedBlob, folder: Path | None = None, fill: bool = False) -> torch.Tensor:
    """The bytes of another process's (or this one's) segment, as a writable uint8 tensor on the shared pages.

    Args:
        blob: as told by the owner; it is checked, not believed.
        folder: the owner's folder, where segments are named.
        fill: all of it will be written now.

    Raises:
        ConnectionLostError: the owner is gone or has closed the segment.
        ProtocolError: the blob names something else than bytes of a segment.
    """
    path, status = _look_at(blob, folder)
    if blob.size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapping, is_new = _mapping(blob, path, status, folder)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=blob.size_bytes, offset=blob.offset)
    if fill and is_new:
        _populate(tensor, _POPULATE_WRITE)
    return tensor


_adopted: set[int] = set()  # numbers of adopted blobs; added to by whoever adopts, discarded by finalizers
_adoptions = count(1)


def adopt_blob(blob: SharedBlob, folder: Path | None = None) -> torch.Tensor | None:
    """The bytes of a segment as memory of the caller's own, which its owner does not use again while a tensor is on it.

    A blob that is given is adopted as it is. Of one that others read too, pages are copied when they are written.

    Returns:
        A uint8 tensor; None when too many are adopted already, or where memory would not be aligned as torch's.

    Raises:
        As ``open_blob``.
    """
    if len(_adopted) >= _MAX_ADOPTED or blob.offset % _ALIGN or not blob.size_bytes:
        return None
    path, status = _look_at(blob, folder)
    lock = _open(blob, path, status)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if blob.given:
            memory, start = _mapping(blob, path, status, folder)[0], blob.offset
        else:
            first = blob.offset // _PAGE * _PAGE
            start = blob.offset - first
            memory = mmap.mmap(
                lock, start + blob.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=first
            )
        view = memoryview(memory)[start : start + blob.size_bytes]  # torch holds it for as long as the storage lives
    except BaseException as error:
        os.close(lock)
        if isinstance(error, OSError):
            raise ConnectionLostError(f"segment {blob.fd} of process {blob.pid} cannot be adopted: {error}") from error
        raise
    number = next(_adoptions)
    _adopted.add(number)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    if not blob.given:
        os.close(lock)  # the private mapping keeps the file open, and with it the lock
        _populate(tensor, _POPULATE_READ)
    weakref.finalize(view, _let_go, number, lock if blob.given else None).atexit = False
    return tensor


def _let_go(number: int, lock: int | None) -> None:
    _adopted.discard(number)
    if lock is not None:
        os.close(lock)


def _populate(tensor: torch.Tensor, advice: int) -> None:
    """Map the pages of a tensor in one go, which costs a third of touching them one by one. Where it fails nothing is lost."""
    start = tensor.data_ptr() // _PAGE * _PAGE
    size = tensor.data_ptr() + tensor.numel() - start
    if size >= LEAST_BYTES and HAS_ANONYMOUS:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def _look_at(blob: SharedBlob, folder: Path | None) -> tuple[str, os.stat_result]:
    """Where a blob's segment can be opened, after checks of what the blob says."""
    if blob.pid <= 0 or blob.fd < 0 or blob.offset < 0 or blob.size_bytes < 0:
        raise ProtocolError(f"{blob} names no bytes")
    path = f"/proc/{blob.pid}/fd/{blob.fd}" if folder is None else str(_named_path(folder, blob.pid, blob.fd))
    try:
        if folder is None and not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise ProtocolError(f"{blob} is not a segment")
        status = os.stat(path)
    except OSError as error:
        raise _not_held(blob, error) from error
    if blob.offset + blob.size_bytes > status.st_size:
        raise ProtocolError(f"{blob} reaches beyond the segment's {status.st_size} bytes")
    return path, status


def _not_held(blob: SharedBlob, error: OSError) -> ConnectionLostError:
    return ConnectionLostError(f"process {blob.pid} does not hold segment {blob.fd} any more: {error}")


def _open(blob: SharedBlob, path: str, status: os.stat_result) -> int:
    try:
        fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise _not_held(blob, error) from error
    opened = os.fstat(fd)
    if (opened.st_dev, opened.st_ino) != (status.st_dev, status.st_ino):  # closed and replaced between the two looks
        os.close(fd)
        raise ProtocolError(f"{blob} changed while it was opened")
    return fd


def _mapping(
    blob: SharedBlob, path: str, status: os.stat_result, folder: Path | None
) -> tuple[mmap.mmap, bool]:
    """The mapping of a blob's segment, and whether it was made just now."""
    key = (blob.pid, blob.fd, status.st_dev, status.st_ino)
    with _mappings_lock:
        found = _mappings.get(key)
        if found is not None:
            _mappings.move_to_end(key)
            return found, False
        fd = _open(blob, path, status)
        try:
            made = mmap.mmap(fd, status.st_size)
        except OSError as error:
            raise _not_held(blob, error) from error
        finally:
            os.close(fd)
        if folder is None:
            _drop_dead()
        while len(_mappings) >= _MAX_OPEN_MAPPINGS:
            _mappings.popitem(last=False)
        _mappings[key] = made
        return made, True


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
