"""A head and its workers on a thread of this process, with real sockets; clients are sessions of the test's own thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import dtorch
from dtorch.cluster.audit import Audit
from dtorch.cluster.head import Head, Options
from dtorch.cluster.quotas import Limits
from dtorch.cluster.remote import Target
from dtorch.cluster.serve import Offer, PoolWorker, parse_devices
from dtorch.session import Session, using
from dtorch.wiring import Options as SessionOptions

T = TypeVar("T")
PATIENCE_S = 60.0  # an upper bound that only a failing test meets


class Cluster:
    """A head with workers; everything of it runs in the thread of ``loop``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.head = Head(Options(keys=folder / "keys.json", audit=folder / "audit.jsonl", **options))
        self.head.audit.note = self._note  # type: ignore[method-assign]
        self.news = asyncio.Event()
        self.workers: list[PoolWorker] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dtorch-test-head")
        self.worker_key = self.key("pool", "worker")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for _ in range(8):  # transports that were closed or aborted are let go in later rounds
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def start(self) -> None:
        self._thread.start()
        self.run(self.head.start())

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    async def _stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        await self.head.stop()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of a coroutine in the head's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def do(self, action: Callable[[], T]) -> T:
        """The outcome of a function called in the head's thread."""

        async def call() -> T:
            return action()

        return self.run(call())

    def _note(self, event: str, **facts: Any) -> None:
        Audit.note(self.head.audit, event, **facts)
        self.news.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.news.clear()
            await self.news.wait()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so in the head's thread; looks anew after each event of the audit log."""
        self.run(asyncio.wait_for(self._until(is_so), PATIENCE_S))

    def key(self, name: str, role: Any = "client", *, weight: float = 1.0, priority: int = 0, **limits: int) -> str:
        return self.head.keys.create(name, role, weight=weight, priority=priority, limits=Limits(**limits))[1]

    def worker(self, devices: str = "cpu:2", **facts: Any) -> PoolWorker:
        """Start a worker and wait until it has joined."""
        before = len(self.head.workers)
        offer = Offer(self.head.url, self.worker_key, parse_devices(devices), **facts)

        async def start() -> PoolWorker:
            worker = PoolWorker(offer)
            self._tasks.append(asyncio.get_running_loop().create_task(worker.run()))
            return worker

        made = self.run(start())
        self.workers.append(made)
        self.until(lambda: len(self.head.workers) > before)
        return made

    def process(self, devices: str = "cpu:1", *words: str) -> subprocess.Popen[bytes]:
        """Start a worker in a process of its own and wait until it has joined. Killed at the end."""
        command = [sys.executable, "-m", "dtorch", "worker", "--head", self.head.url, "--devices", devices, *words]
        made = subprocess.Popen(command, env={**os.environ, "DTORCH_API_KEY": self.worker_key}, stdout=subprocess.DEVNULL)
        self._processes.append(made)
        self.until(lambda: any(end.pid == made.pid for end in self.head.workers.values()))
        return made

    def process_of(self, session: Session, device: int) -> subprocess.Popen[bytes]:
        """The process that hosts a CPU device of a session."""
        worker, _ = self.do(lambda: self.head.pool.where(session.number, "cpu", device))
        pid = self.head.workers[worker].pid
        return next(process for process in self._processes if process.pid == pid)

    def session(self, key: str, name: str = "") -> Session:
        """A client's session, apart from the default one; close it at the end."""
        return Session(SessionOptions(target=Target(self.head.url, key, name=name)))

    @contextlib.contextmanager
    def client(self, who: str, name: str = "") -> Iterator[Session]:
        """A client's session, in force inside and closed at the end."""
        made = self.session(self.key(who), name)
        with using(made):
            yield made
        made.close()

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def cluster(folder: Path, *devices: str, **options: Any) -> Iterator[Cluster]:
    """A running cluster with one worker for each of ``devices``."""
    made = Cluster(folder, **options)
    made.start()
    try:
        for each in devices:
            made.worker(each)
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def two_and_a_spare(home: Cluster) -> Iterator[Session]:
    """A session of two devices on two workers, processes of their own, and a third one with nothing to do."""
    for _ in range(2):
        home.process()
    with home.client("ann") as made:
        dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]), placements=[dtorch.Shard(0)]).sum().item()
        home.process()
        yield made
