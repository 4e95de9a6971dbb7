"""A worker's process in a cluster: ``dtorch worker --head ... --devices ...``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import assert_never

from dtorch import creation
from dtorch.cluster import streams
from dtorch.cluster.health import health
from dtorch.cluster.lodger import Lodger
from dtorch.cluster.pool import Device
from dtorch.cluster.sentinel import Sentinel
from dtorch.ops import custom, table
from dtorch.ops._call import FLAT
from dtorch.runtime.kernels.threads import take_num_threads
from dtorch.runtime.pages import KEPT_BYTES, keep_pages
from dtorch.runtime.spending import Spending
from dtorch.runtime.turns import Turns
from dtorch.transport import cluster, codec
from dtorch.transport.cluster import DeviceLoad, Enlist, Enlisted, Load, Retire, ToPoolWorker, Use
from dtorch.transport.codec import Frame
from dtorch.transport.dial import address_of, dial, keep_alive, split_address, trust
from dtorch.transport.durable import DurableLink
from dtorch.transport.errors import ConnectionLostError, ProtocolError
from dtorch.transport.link import Link
from dtorch.transport.messages import (
    PROTOCOL_VERSION,
    Allow,
    AskHeld,
    AskRandomState,
    AskSnapshots,
    AskStatistics,
    AskTrace,
    Batch,
    Define,
    Forget,
    FromWorker,
    Halt,
    RandomState,
    Redo,
    Regroup,
    Resume,
    Seed,
    StartTrace,
    Stop,
)

if TYPE_CHECKING:
    from dtorch.transport.groups import Group

logger = logging.getLogger(__name__)

WORKER_PATH = "/v1/worker"
GROUP_TIMEOUT_S = 1800.0
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 5.0
JOIN_S = 1.0
RETIRE_S = 10.0
"""How long a worker that is told to end may wait for its sessions to go elsewhere."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BEAT_S = 1.0
"""Between two reports of what was used."""

assert creation.FACTORIES  # imported for what it adds to the op table


@dataclass(frozen=True)
class Offer:
    """What a worker brings to a pool.

    Attributes:
        head: URL of the head.
        key: an API key of the role "worker".
        devices: as of ``parse_devices``.
        name: for people; the head gives one when it is empty.
        labels: facts such as ``{"rack": "a"}``, for people and for placing.
        address: of this host for other workers; the one that the connection to the head has, when left out.
        allow: modules from which ops of users may be imported, with their submodules; no others are.
        folders: where sessions may read and write files of this host, with what is below.
        num_threads: of torch, for each session.
        memory_bytes: that this process may take in all, so that an op that wants too much fails instead of the process;
            0 for no limit. Does not count what is on GPUs.
        ca_file: of the authority of the head's certificate, PEM; "" for the system's.
    """

    head: str
    key: str
    devices: tuple[Device, ...]
    name: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    address: str = ""
    allow: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    num_threads: int = 1
    memory_bytes: int = 0
    ca_file: str = ""


def parse_devices(text: str) -> tuple[Device, ...]:
    """``"cpu:4"`` -> cpu 0 to 3; ``"cuda:all"`` -> every GPU here; several, separated by commas.

    Raises:
        ValueError: it names no devices, or some that are not here.
    """
    found: list[Device] = []
    for part in text.split(","):
        kind, _, count = part.strip().partition(":")
        if kind not in ("cpu", "cuda") or not (count == "all" or (count.isdecimal() and 0 < int(count) <= 4096)):
            raise ValueError(f'devices are given like "cpu:4" or "cuda:all", not {part!r}')
        have = torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1
        number = have if count == "all" else int(count)
        if (kind == "cuda" and number > have) or number == 0:
            raise ValueError(f"{part!r}: this machine has {have} {kind} devices")
        if any(device[0] == kind for device in found):
            raise ValueError(f"{text!r} names {kind} devices twice")
        found += [(kind, index) for index in range(number)]
    return tuple(found)


class PoolWorker:
    """One worker of a pool; belongs to its event loop's thread.

    Args:
        say: told of what people should know, as text.
        sentinel: tells the head whether this process runs; without one the head knows what it hears from the worker itself.

    Raises:
        OSError: the file of the authority cannot be read.
    """

    def __init__(
        self, offer: Offer, say: Callable[[str], None] = lambda _: None, sentinel: Sentinel | None = None
    ) -> None:
        self._offer = offer
        self._say = say
        self._sentinel = sentinel
        self._address = address_of(offer.head)
        self._tls = trust(offer.ca_file)
        self._link: DurableLink | None = None
        self._number = 0
        self._ticket = ""
        self._grace_s = 0.0
        self._host = offer.address
        self._lodgers: dict[int, Lodger] = {}
        self._ending: list[Lodger] = []  # dropped, and perhaps not done yet
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # random generators of idle sessions
        self._has_cuda = any(kind == "cuda" for kind, _ in offer.devices)
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(self._change, self._settle)
        self._stopped = False
        self._leaving: asyncio.TimerHandle | None = None  # then: the end of the wait for sessions to go

    async def run(self) -> None:
        """Serve until told to stop.

        Raises:
            AuthError: the head does not accept the key.
            ProtocolError: the head refused this worker.
        """
        if self._sentinel is not None:
            self._sentinel.look()  # it starts while this worker joins
        try:
            await self._run()
        finally:
            if self._leaving is not None:
                self._leaving.cancel()
            if self._sentinel is not None:
                self._sentinel.stop()

    async def _run(self) -> None:
        pause_s = FIRST_RETRY_S
        while not self._stopped:
            try:
                link = await self._join()
            except ConnectionLostError as error:
                if pause_s == FIRST_RETRY_S:
                    self._say(f"no head at {self._offer.head} yet: {error}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_RETRY_S)
                continue
            pause_s = FIRST_RETRY_S
            self._say(f"worker {self._number} of {self._offer.head}")
            beating = self._loop.create_task(self._beat())
            try:
                await self._serve(link)
            finally:
                beating.cancel()
                self._drop_all()
                await link.close()
            if self._leaving is not None:
                self._stopped = True
            elif not self._stopped:
                self._say(f"lost the head ({link.reason or 'the connection closed'}); joining again")

    @property
    def joined(self) -> bool:
        """Has it a place in the pool, and a connection?"""
        return self._link is not None and not self._link.closed and self._link.connected

    def stop(self) -> None:
        """Leave the pool once sessions have gone elsewhere, as far as they can; called again, or after a while, at once."""
        link = self._link
        if self._leaving is None and self._lodgers and link is not None and not link.closed:
            self._leaving = self._loop.call_later(RETIRE_S, self._leave)
            link.send_nowait(codec.encode(Retire()))
        else:
            self._leave()

    def _leave(self) -> None:
        self._stopped = True
        link = self._link
        if link is not None and not link.closed:
            link.send_nowait(codec.encode(Retire()))
            self._loop.create_task(link.finish())

    async def _join(self) -> DurableLink:
        self._ticket = ""
        link, _ = await self._dial(0)
        self._link = DurableLink(link, self._grace_s, self._dial)
        self._link.land = self._land
        if self._sentinel is not None:
            self._sentinel.follow(self._ticket)
        return self._link

    async def _dial(self, received: int) -> tuple[Link, int]:
        offer = self._offer
        hello = Enlist(
            PROTOCOL_VERSION, os.getpid(), offer.devices, offer.name, offer.labels, self._ticket, received
        )
        link, frame = await dial(self._address, WORKER_PATH, offer.key, codec.encode(hello), self._tls, past_aiohttp=True)
        try:
            answer = codec.decode_to_pool_worker(frame)
            if not isinstance(answer, Enlisted) or answer.version != PROTOCOL_VERSION:
                raise ProtocolError(f"expected Enlisted of version {PROTOCOL_VERSION}, got {answer!r:.100}")
        except BaseException:
            await link.close()
            raise
        keep_alive(link)
        self._number, self._ticket, self._grace_s = answer.worker, answer.ticket, answer.grace_s
        if not offer.address:
            self._host = _own_host(link)
        return link, answer.received

    async def _serve(self, link: DurableLink) -> None:
        try:
            while not self._stopped and (frame := await link.receive()) is not None:
                self._handle(codec.decode_to_pool_worker(frame))
        except ProtocolError as error:
            logger.warning("the head sent what cannot be right: %s", error)

    def _handle(self, message: ToPoolWorker) -> None:
        match message:
            case cluster.Part():
                lodger = self._lodgers.get(message.session)
                if lodger is not None:
                    try:
                        lodger.streams.put(message)
                    except Exception as error:  # such as no memory for it
                        lodger.fault(error)
            case (
                Batch() | Define() | Forget() | Seed() | Allow() | AskStatistics() | AskRandomState() | RandomState()
                | StartTrace() | AskTrace() | AskHeld() | AskSnapshots() | Regroup() | Redo() | Resume()
            ):
                lodger = self._lodgers.get(message.session)
                if lodger is not None:
                    lodger.put(message)
            case Halt(session, epoch):
                lodger = self._lodgers.get(session)
                if lodger is not None:
                    lodger.halt(epoch)
            case cluster.Credit(session, size_bytes):
                if session in self._lodgers:
                    self._lodgers[session].streams.credit(size_bytes)
            case cluster.Open():
                self._lodgers[message.session] = Lodger(
                    message, self._number, self._turns, self._resolve, self._make_group, self._send,
                    self._offer.folders, self._settle_account,
                )
            case cluster.Drop(session):
                lodger = self._lodgers.pop(session, None)
                if lodger is not None:
                    self._end(lodger)
                self._states.pop(session, None)
            case Stop():
                self._stopped = True
            case Enlisted():
                raise ProtocolError("a worker is enlisted once a connection")
            case _:
                assert_never(message)

    def _land(self, frame: bytes, size_bytes: int) -> memoryview | None:
        part = codec.decode_to_pool_worker(frame)
        lodger = self._lodgers.get(part.session) if isinstance(part, cluster.Part) else None
        return lodger.streams.land(part, size_bytes) if lodger is not None and isinstance(part, cluster.Part) else None

    def _drop_all(self) -> None:
        lodgers = list(self._lodgers.values())
        self._lodgers.clear()
        self._states.clear()
        for lodger in lodgers:
            self._end(lodger)
        for lodger in self._ending:
            lodger.join(JOIN_S)
        self._ending = [lodger for lodger in self._ending if lodger.alive]

    def _end(self, lodger: Lodger) -> None:
        lodger.drop()
        self._ending = [each for each in self._ending if each.alive]
        self._ending.append(lodger)

    @property
    def is_clear(self) -> bool:
        """Whether no thread of a session is left: one may be held up by what it waits for."""
        forming = sys.modules.get("dtorch.transport.forming")
        return not self._ending and not (forming is not None and forming.is_forming())

    # ---- what is used

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.report()
            if self._sentinel is not None:
                self._sentinel.look()

    def report(self) -> None:
        """Tell the head what was used since the last time."""
        lodgers = list(self._lodgers.values())
        uses = tuple(lodger.spending.report() for lodger in lodgers if lodger.spending.is_news)
        self._send_now(codec.encode(self._load(uses)))
        for lodger in lodgers:
            lodger.look()  # for the next report

    def _settle_account(self, spending: Spending) -> None:
        """A session has ended here, says its thread."""
        self._send(self._load((spending.report(over=True),)))

    def _load(self, uses: tuple[Use, ...]) -> Load:
        held: dict[Device, int] = dict.fromkeys(self._offer.devices, 0)
        for lodger in list(self._lodgers.values()):
            for device, size in lodger.spending.held.items():
                held[device] = held.get(device, 0) + size
        devices = tuple(DeviceLoad(*device, size, _capacity(device[0], device[1])) for device, size in held.items())
        return Load(time.perf_counter_ns(), self._turns.occupied_ns(), _process_bytes(), devices, uses)

    # ---- for the sessions' threads

    def _send(self, message: FromWorker | Load | cluster.Part) -> None:
        pieces = codec.encode_part(message) if isinstance(message, cluster.Part) else (codec.encode(message),)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._send_now, *pieces)

    def _send_now(self, *pieces: Frame) -> None:
        if self._link is not None and not self._link.closed:
            self._link.send_nowait(*pieces)

    def _resolve(self, name: str) -> Callable[..., Any]:
        """The function of an op. Ops of users only come from the modules that whoever runs this worker allows."""
        bare = name.removeprefix(FLAT)
        if bare.startswith(custom.PREFIX):
            module = bare[len(custom.PREFIX) :].partition(":")[0]
            if not any(module == allowed or module.startswith(allowed + ".") for allowed in self._offer.allow):
                return _not_allowed(module)
            custom.allow([bare])
        return table.resolve(name)

    def _make_group(
        self, session: int, members: tuple[int, ...], kind: str, epoch: int, halting: Callable[[], bool]
    ) -> Group:
        # torch.distributed takes a while to import, and one worker alone never needs it
        from dtorch.transport.groups import make_group
        from dtorch.transport.store import SessionStore

        name = f"{session}/{epoch}-{kind}-{'-'.join(map(str, members))}"
        store = SessionStore(self._address, self._offer.key, name, tls=self._tls, stopped=halting)
        return make_group(kind, store, self._number, members, GROUP_TIMEOUT_S, self._host, halting)

    def _change(self, last: int | None, session: int) -> None:
        """Each session draws from generators of its own: those of the last one are kept, this one's put in place."""
        if last in self._lodgers:
            kept = torch.cuda.get_rng_state() if self._has_cuda else None
            self._states[last] = (torch.get_rng_state(), kept)
        mine = self._states.pop(session, None)
        if mine is not None:
            torch.set_rng_state(mine[0])
            if mine[1] is not None:
                torch.cuda.set_rng_state(mine[1])

    def _settle(self) -> None:
        if self._has_cuda:
            torch.cuda.synchronize()


def _not_allowed(module: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(f"this worker imports nothing from {module}; it was not started with --allow {module}")

    return refuse


def _capacity(kind: str, number: int) -> int:
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(number)[1])
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def _process_bytes() -> int:
    """Memory that this process has, not counting what is swapped out; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def _own_host(link: Link) -> str:
    name = link.get_extra_info("sockname")
    return str(name[0]) if isinstance(name, tuple) else ""


def beside(offer: Offer) -> Sentinel:
    """What goes beside the only worker of this process."""
    kind, host, port = split_address(address_of(offer.head))
    return Sentinel(host, port, offer.key, kind == "tls", offer.ca_file)


async def serve(offer: Offer, say: Callable[[str], None], listen: str = "") -> None:
    """Run a worker until it is told to stop, by its head or by SIGINT or SIGTERM. Raises as ``PoolWorker.run``.

    Args:
        listen: HOST:PORT that answers probes, see ``health.py``; "" for none.
    """
    take_num_threads(offer.num_threads)
    if os.environ.get("DTORCH_KEEP_PAGES") != "0":
        keep_pages()
        streams.memory.keep(0 if offer.memory_bytes else KEPT_BYTES)
    if offer.memory_bytes:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (offer.memory_bytes, most))
    worker = PoolWorker(offer, say, beside(offer))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.stop)
    async with health(listen, lambda: worker.joined):
        await worker.run()
    if not worker.is_clear:
        # A thread that the interpreter stops inside of C++ would abort the process.
        os._exit(0)
