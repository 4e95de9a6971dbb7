"""Workers as actors of Ray: one each, placed by resources or a placement group, started anew by Ray when they die.

The actor's process is the worker. Ray moves no tensor and no op: workers talk with the head and with each other as always.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from dtorch.cluster.launchers.base import NODE, Ended, Incarnation, WorkerSpec
from dtorch.transport.errors import AuthError, LaunchError, ProtocolError

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
STOP_S = 5.0


@dataclass(frozen=True)
class RayOptions:
    """How to use Ray.

    Attributes:
        address: of a Ray cluster, as ``ray.init`` takes it. RAY_ADDRESS, a cluster that runs on this machine, or else a new
            one of this machine alone, when left out.
        resources: of each worker, by Ray's names: CPU, GPU, memory (bytes) and those of the cluster's own.
        placement: strategy of a placement group with a bundle for each worker; without, Ray places each by its resources.
    """

    address: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: Placement | None = None


def resources_for(devices: str) -> dict[str, float]:
    """What Ray reserves for a worker of these devices: ``"cpu:4"`` -> ``{"CPU": 4}``, ``"cuda:1"`` -> ``{"CPU": 1, "GPU": 1}``.

    Raises:
        ValueError: an actor is one process, and these devices want several, or how many there are is not known here.
    """
    kind, _, count = devices.strip().partition(":")
    if kind not in ("cpu", "cuda") or not count.isdecimal() or int(count) < 1:
        raise ValueError(f'workers of Ray offer devices of one kind and number, such as "cpu:4" or "cuda:1", not {devices!r}')
    if kind == "cpu":
        return {"CPU": float(count)}
    if int(count) > 1:
        raise ValueError(f'each GPU wants a process of its own: for {devices!r} ask for {count} workers with "cuda:1" each')
    return {"CPU": 1.0, "GPU": 1.0}


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Resources by Ray's names -> arguments of ``Actor.options``."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        **({"memory": int(resources["memory"])} if "memory" in resources else {}),
        **({"resources": own} if own else {}),
    }


class RayWorker:
    """The actor. Each process of it joins the head anew."""

    def __init__(self, spec: bytes, slot: int) -> None:
        self._spec, self._slot = msgspec.json.decode(spec, type=WorkerSpec), slot
        self._outcome: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Any = None
        threading.Thread(target=self._run, name="dtorch-worker", daemon=True).start()

    def _run(self) -> None:
        from dtorch.runtime.shell import new_loop

        self._loop = new_loop()
        try:
            self._loop.run_until_complete(self._serve())
        except (AuthError, ProtocolError, OSError, ValueError) as error:  # another start would end alike
            self._outcome.set_result(f"{type(error).__name__}: {error}")
        except BaseException:
            os.abort()  # Ray starts this actor anew
        else:
            self._outcome.set_result("")

    async def _serve(self) -> None:
        from dtorch.cluster.serve import Offer, PoolWorker, beside, parse_devices
        from dtorch.runtime.kernels.threads import take_num_threads

        spec = self._spec
        node = import_module("ray").get_runtime_context().get_node_id()
        take_num_threads(spec.num_threads)
        offer = Offer(
            spec.head, spec.key, parse_devices(spec.devices), spec.name(self._slot),
            {**spec.labels_of(self._slot), NODE: node}, allow=spec.allow, folders=spec.folders,
            num_threads=spec.num_threads, ca_file=spec.ca_file,
        )
        self._worker = PoolWorker(offer, sentinel=beside(offer))
        await self._worker.run()

    async def wait(self) -> str:
        """Until this worker has left the pool; the answer is what went wrong, or ""."""
        return await asyncio.wrap_future(self._outcome)

    async def leave(self) -> None:
        """Leave the pool."""
        if self._loop is not None and self._worker is not None:
            self._loop.call_soon_threadsafe(self._worker.stop)


def kill_process(pid: int) -> None:
    """Runs on the node of a worker that does not answer."""
    with contextlib.suppress(OSError):
        if b"RayWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():  # not one that has got its number since
            os.kill(pid, signal.SIGKILL)


class RayLauncher:
    """Starts actors of Ray. All calls that block are made by one thread."""

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._ray: Any = None
        self._actors: list[Any] = []
        self._group: Any = None
        self._ended: asyncio.Queue[Ended] = asyncio.Queue()
        self._waits: list[asyncio.Task[None]] = []
        self._thread = ThreadPoolExecutor(1, "dtorch-ray")
        self._stopped = False

    async def _do(self, action: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)

    async def connect(self) -> str:
        """Join the Ray cluster; the answer is this machine's address in it.

        Raises:
            LaunchError: Ray is not installed, there is no cluster at that address, or it never could place a worker.
        """
        return str(await self._do(self._connect))

    def _connect(self) -> str:
        if self._ray is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                ray = import_module("ray")
            except ModuleNotFoundError:
                raise LaunchError("Ray is not installed here: pip install 'dtorch[ray]'") from None
            about: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
            try:
                ray.init(self._options.address or os.environ.get("RAY_ADDRESS") or "auto", **about)
            except ConnectionError as error:
                if self._options.address or os.environ.get("RAY_ADDRESS"):
                    raise LaunchError(f"no Ray cluster answers: {error}") from error
                ray.init("local", include_dashboard=False, object_store_memory=100 * 1024 * 1024, **about)
            self._ray = ray
            self._check(self._options.resources)
        return str(self._ray.util.get_node_ip_address())

    async def start(self, spec: WorkerSpec, num_workers: int) -> None:
        await self._do(self._start, spec, num_workers)
        loop = asyncio.get_running_loop()
        self._waits = [loop.create_task(self._wait(slot)) for slot in range(num_workers)]

    def _start(self, spec: WorkerSpec, num_workers: int) -> None:
        self._connect()
        ray, placement = self._ray, self._options.placement
        resources = dict(self._options.resources) or resources_for(spec.devices)
        more: dict[str, Any] = {}
        if placement is not None:
            placing = import_module("ray.util.placement_group")
            strategies = import_module("ray.util.scheduling_strategies")
            self._group = placing.placement_group([resources] * num_workers, strategy=placement)
        # A worker is restarted however often it dies; what it was asked meanwhile is asked again.
        remote = ray.remote(RayWorker)
        encoded = msgspec.json.encode(spec)
        for slot in range(num_workers):
            if self._group is not None:
                more["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=slot
                )
            actor = remote.options(
                max_restarts=-1, max_task_retries=-1, **actor_options(resources), **more
            )
            self._actors.append(actor.remote(encoded, slot))

    def _check(self, resources: Mapping[str, float]) -> None:
        """Resources that no node has at all are told at once: Ray would wait for them in silence."""
        have = self._ray.cluster_resources()
        unknown = sorted(name for name, amount in resources.items() if amount > have.get(name, 0))
        if unknown:
            shown = ", ".join(f"{name}: {amount:g}" for name, amount in sorted(have.items()) if not name.startswith("node:"))
            raise LaunchError(f"a worker asks for {_words(resources)}, and the whole Ray cluster has {shown}")

    async def _wait(self, slot: int) -> None:
        try:
            error = await asyncio.wrap_future(self._actors[slot].wait.remote().future())
        except Exception as lost:
            error = f"Ray has given it up: {lost}"
        self._ended.put_nowait(Ended(slot, error))
        with contextlib.suppress(Exception):  # it may be gone already
            await self._do(self._ray.kill, self._actors[slot])

    async def kill(self, which: Incarnation) -> None:
        await self._do(self._kill, which)

    def _kill(self, which: Incarnation) -> None:
        strategies = import_module("ray.util.scheduling_strategies")
        where = strategies.NodeAffinitySchedulingStrategy(which.node, soft=False)
        task = self._ray.remote(kill_process).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        with contextlib.suppress(Exception):  # the whole node may be gone, and Ray knows then
            self._ray.get(task.remote(which.pid), timeout=30)

    async def wait_ended(self) -> Ended:
        return await self._ended.get()

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._ray is None:
            self._thread.shutdown(wait=False)
            return
        for actor in self._actors:
            actor.leave.options(max_task_retries=0).remote()
        if self._waits:
            _, late = await asyncio.wait(self._waits, timeout=STOP_S)
            for task in late:
                task.cancel()
        await self._do(self._stop)
        self._thread.shutdown()

    def _stop(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._group is not None:
            import_module("ray.util.placement_group").remove_placement_group(self._group)
        self._ray.shutdown()


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
