"""The suite's options and its last check: nothing of dtorch is left when the tests are over."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        choices=("shared", "per-device"),
        help="run with one process for all CPU devices, or with one process each (DTORCH_WORKERS)",
    )
    parser.addoption("--op-db-meshes", default="3,2,2x2", help="meshes for test_op_db.py, by default taken in turns")
    parser.addoption("--op-db-full", action="store_true", help="every sample of every dtype in test_op_db.py")


def pytest_configure(config: pytest.Config) -> None:
    mode = config.getoption("--workers")
    if mode:
        os.environ["DTORCH_WORKERS"] = mode


@pytest.fixture(scope="session")
def workers() -> str:
    """How this run places CPU devices: "shared" or "per-device"."""
    return os.environ.get("DTORCH_WORKERS") or "shared"


def children() -> list[int]:
    """Process ids of the children of this process, zombies included."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def descriptors() -> Counter[str]:
    """Open descriptors by what they are: "socket", "memfd", "eventpoll" and so on."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the descriptor that lists the others
            continue
        for kind in ("socket:", "/memfd:dtorch", "anon_inode:[eventpoll]", "anon_inode:[pidfd]"):
            if target.startswith(kind):
                kinds[kind] += 1
    return kinds


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, mine = descriptors(), set(children())
    yield
    import dtorch

    dtorch.shutdown()
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("dtorch")]
    assert not threads, f"threads that are left: {threads}"
    left = [pid for pid in children() if pid not in mine]
    assert not left, f"processes that are left: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in left]}"
    more = descriptors() - before
    assert not more, f"descriptors that are left: {dict(more)}"
