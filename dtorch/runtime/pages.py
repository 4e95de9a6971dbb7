"""Memory that a worker has freed stays its own: the first touch of fresh pages costs more than most ops on them.

glibc gives large blocks back to the system at once, and takes new, empty pages for the next tensor. A worker makes and frees
tensors of the same sizes all the time, so it keeps up to ``KEPT_BYTES`` that are free, as torch's allocator does on GPUs.
"""

from __future__ import annotations

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

KEPT_BYTES = 512 * 1024 * 1024
"""Free memory that a worker keeps at most at the end of its heap; blocks above this come from the system and go back to it."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h


def keep_pages(size_bytes: int = KEPT_BYTES) -> bool:
    """Let this process keep what it frees. To be called before it starts the thread that makes tensors.

    Args:
        size_bytes: so much at most.

    Returns:
        Whether the system's allocator took it: glibc's does.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # One arena for all threads: those of further ones cannot hold blocks of more than 64 MiB.
    wishes = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, size_bytes), (_TRIM_THRESHOLD, size_bytes))
    taken = [bool(libc.mallopt(name, value)) for name, value in wishes]
    logger.debug("mallopt took %s", taken)
    return all(taken)
