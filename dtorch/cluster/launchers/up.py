"""``dtorch up``: a head, workers that an engine starts, and maybe a program that uses them; all end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from dtorch.cluster.keys import KeyFile
from dtorch.cluster.launchers.base import LAUNCH, NODE, SLOT, Incarnation, Launcher, WorkerSpec
from dtorch.cluster.launchers.local import TIED, LocalLauncher
from dtorch.cluster.launchers.ray import RayLauncher, RayOptions
from dtorch.cluster.launchers.watch import Watch
from dtorch.transport.dial import address_of, split_address
from dtorch.transport.errors import LaunchError

LOOK_S = 0.5
"""Between two looks at what the head lists."""
HINT_S = 15.0
"""Workers that have not joined by then are talked about."""
ASK_S = 5.0
STOP_S = 5.0
ANY_HOST = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True)
class Up:
    """What ``dtorch up`` was asked for.

    Attributes:
        workers: without ``launch``, ``head`` and ``key`` where a head of our own is to be started.
        ray: how to use Ray; None for processes of this machine.
        listen: HOST:PORT of a head of our own; "" for the usual one.
        advertise: the host's name for workers and clients, when it is another one than it listens to.
        keys: file of keys of a head of our own; a temporary one by default.
        command: a program to run with DTORCH_HEAD and DTORCH_API_KEY set; all ends with it.
    """

    workers: WorkerSpec
    num_workers: int
    ray: RayOptions | None = None
    listen: str = ""
    advertise: str = ""
    keys: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    command: tuple[str, ...] = ()


async def up(asked: Up, say: Callable[[str], None]) -> int:
    """Run it all until SIGINT or SIGTERM, or the program's end; the answer is the exit status.

    Raises:
        LaunchError: the head or the workers cannot be started.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    launcher: LocalLauncher | RayLauncher = LocalLauncher() if asked.ray is None else RayLauncher(asked.ray)
    try:
        async with contextlib.AsyncExitStack() as stack:
            ours = await launcher.connect() if isinstance(launcher, RayLauncher) else ""
            spec, own = asked.workers, None
            spec = msgspec.structs.replace(spec, launch=spec.launch or f"up-{secrets.token_hex(3)}")
            if not spec.head:
                own = await stack.enter_async_context(_head(asked, ours))
                spec = msgspec.structs.replace(spec, head=own.url, key=own.worker_key)
            stack.push_async_callback(launcher.stop)  # before the head
            pool = await stack.enter_async_context(Pool(spec))
            key = own.client_key if own else ""
            await launcher.start(spec, asked.num_workers)
            shown = "" if asked.command else key
            jobs: list[Coroutine[Any, Any, object]] = [
                _watch(pool, launcher, spec, asked.num_workers, say, shown), stop.wait(),
            ]
            if own:
                jobs.append(own.watch())
            if asked.command:
                jobs.append(_program(asked.command, spec, key, pool.complete))
            status = await _first(jobs)
            return status if asked.command and type(status) is int else 0
    finally:
        await launcher.stop()


async def _first(jobs: Sequence[Coroutine[Any, Any, object]]) -> object:
    """The outcome of what ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- the workers


class Pool:
    """What a head says of the workers of one launch."""

    def __init__(self, spec: WorkerSpec) -> None:
        kind, host, port = split_address(address_of(spec.head))
        host = f"[{host}]" if ":" in host else host
        self._url = f"{'https' if kind == 'tls' else 'http'}://{host}:{port}/v1/status"
        self._spec = spec
        self._http: aiohttp.ClientSession
        self.complete = asyncio.Event()

    async def __aenter__(self) -> Pool:
        trust = ssl.create_default_context(cafile=self._spec.ca_file or None)
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._spec.key}"}, connector=aiohttp.TCPConnector(ssl=trust),
            timeout=aiohttp.ClientTimeout(ASK_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def listed(self) -> list[Incarnation] | None:
        """Its workers of this launch; None when it does not answer now.

        Raises:
            LaunchError: it answers, but not to us.
        """
        try:
            async with self._http.get(self._url) as answer:
                if answer.status != 200:
                    raise LaunchError(f"{self._spec.head} answers with status {answer.status}: {await answer.text()}")
                facts: dict[str, Any] = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return None
        return list(incarnations(facts, self._spec.launch))


def incarnations(facts: dict[str, Any], launch: str) -> Sequence[Incarnation]:
    """The workers of a launch among those of ``/v1/status``."""
    return [
        Incarnation(int(worker["labels"][SLOT]), worker["pid"], worker["labels"].get(NODE, ""))
        for worker in facts["workers"]
        if worker["labels"].get(LAUNCH) == launch
    ]


async def _watch(
    pool: Pool, launcher: Launcher, spec: WorkerSpec, num_workers: int, say: Callable[[str], None], key: str
) -> None:
    """Tell when the workers are there, have those killed that the head has given up; until none is left."""
    loop = asyncio.get_running_loop()
    watch, started = Watch(), loop.time()
    left: set[int] = set()  # workers that have ended for good
    known: dict[int, Incarnation] = {}  # slot -> what the head listed last
    hinted = False
    ended = asyncio.ensure_future(launcher.wait_ended())
    try:
        while len(left) < num_workers:
            await asyncio.wait((ended,), timeout=LOOK_S)
            if ended.done():
                gone = ended.result()
                ended = asyncio.ensure_future(launcher.wait_ended())
                left.add(gone.slot)
                watch.forget(gone.slot)
                say(f"worker {spec.name(gone.slot)} has ended: {gone.error or 'it left the pool'}")
                if gone.error and not pool.complete.is_set():
                    raise LaunchError(f"worker {spec.name(gone.slot)} cannot be started: {gone.error}")
                continue
            listed = await pool.listed()
            if listed is None:
                watch.blind()
                continue
            for which in watch.look(loop.time(), [each for each in listed if each.slot not in left]):
                say(f"the head has given up worker {spec.name(which.slot)}; its process {which.pid} is killed")
                await launcher.kill(which)
            for each in listed:
                if known.setdefault(each.slot, each) != each:
                    say(f"worker {spec.name(each.slot)} runs again, as process {each.pid}")
                    known[each.slot] = each
            joined = {each.slot for each in listed}
            if not pool.complete.is_set() and len(joined) >= num_workers:
                pool.complete.set()
                _tell(spec, num_workers, key, say)
            elif not pool.complete.is_set() and not hinted and loop.time() - started > HINT_S:
                hinted = True
                say(f"{len(joined)} of {num_workers} workers have joined; waiting for the others")
    finally:
        ended.cancel()


def _tell(spec: WorkerSpec, num_workers: int, key: str, say: Callable[[str], None]) -> None:
    say(f"{spec.head} has {num_workers} workers of {spec.devices} from here")
    if key:
        ca = f" DTORCH_CA_FILE={spec.ca_file}" if spec.ca_file else ""
        say(f"    export DTORCH_HEAD={spec.head} DTORCH_API_KEY={key}{ca}")
        say("and programs with dtorch use them; Ctrl-C here ends them")


async def _program(command: Sequence[str], spec: WorkerSpec, key: str, complete: asyncio.Event) -> int:
    await complete.wait()
    more = {"DTORCH_HEAD": spec.head, "DTORCH_API_KEY": key, **({"DTORCH_CA_FILE": spec.ca_file} if spec.ca_file else {})}
    try:
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **more})
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be run: {error}") from error
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
        if process.returncode is None:
            process.kill()
        raise
    return status if status >= 0 else 128 - status  # as shells say that a signal ended it


# ---- a head of our own


class Own(NamedTuple):
    """A head of our own, with a key for workers and one for clients."""

    url: str
    worker_key: str
    client_key: str
    process: asyncio.subprocess.Process

    async def watch(self) -> None:
        """Raises LaunchError when it ends."""
        raise LaunchError(f"the head has ended, with exit status {await self.process.wait()}")


@contextlib.asynccontextmanager
async def _head(asked: Up, ours: str) -> AsyncIterator[Own]:
    """A head in a process of its own, and keys that end with it.

    Args:
        ours: this machine's address where the workers are; "" when they are on this machine.
    """
    listen = asked.listen or ("0.0.0.0:7474" if ours else "127.0.0.1:7474")
    with tempfile.TemporaryDirectory(prefix="dtorch-up-") as folder:
        file = KeyFile(asked.keys or Path(folder) / "keys.json")
        made = [file.create("up", "worker"), file.create("up", "client")]
        try:
            tls = ["--tls-cert", str(asked.tls_cert), "--tls-key", str(asked.tls_key)] if asked.tls_cert else []
            process = await asyncio.create_subprocess_exec(
                *TIED, "head", "--listen", listen, "--keys", str(file.path), *tls,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            )
            assert process.stdout is not None
            try:
                said = (await process.stdout.readline()).decode()
                found = re.match(r"head at (\S+), keys in ", said)
                if found is None:
                    anywhere = f"{listen.rpartition(':')[0]}:0"
                    raise LaunchError(f"no head could be started at {listen}; --listen {anywhere} takes a free port")
                yield Own(reachable(found[1], asked.advertise, ours), made[0][1], made[1][1], process)
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.wait()
        finally:
            for entry, _ in made:
                file.revoke(entry.id)


def reachable(url: str, advertised: str, ours: str) -> str:
    """The URL by which others find a head that says it listens at ``url``.

    Args:
        advertised: the host's name, if somebody has given one.
        ours: this machine's name for a head that listens everywhere; its own by default.
    """
    kind, listens, port = split_address(address_of(url))
    host = advertised or (listens if listens not in ANY_HOST else ours or socket.gethostname())
    return f"{'wss' if kind == 'tls' else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}"


def main(asked: Up) -> int:
    """Run ``up`` on a loop of its own."""
    return asyncio.run(up(asked, lambda text: print(text, file=sys.stderr if asked.command else sys.stdout, flush=True)))
