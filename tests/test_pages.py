"""Workers keep the pages that they free."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
from dtorch.runtime.pages import keep_pages
import torch

assert keep_pages()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(24 * 2**20)  # 96 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = []
thread = threading.Thread(target=lambda: found.extend(faults() for _ in range(24)))
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep pages")
def test_a_tensor_takes_the_pages_of_the_one_before_in_any_thread() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, *later = map(int, done.stdout.split())
    assert first > 10
    # Something small may come to lie in a block that was freed, and the next one is fresh. Each is where pages are not kept.
    assert sum(count < first / 10 for count in later) >= len(later) / 2, later
