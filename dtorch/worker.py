"""Entry of a worker process: the op table joined to the runtime's worker, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dtorch import creation
from dtorch.ops import custom, table
from dtorch.runtime.executor import Executor
from dtorch.runtime.kernels.threads import take_num_threads
from dtorch.runtime.pages import keep_pages
from dtorch.runtime.rewrite import RULES
from dtorch.runtime.spin import Spinner
from dtorch.runtime.worker import Worker
from dtorch.transport import codec
from dtorch.transport.codec import Frame
from dtorch.transport.dial import connect
from dtorch.transport.errors import ConnectionLostError, DTorchError
from dtorch.transport.link import Link
from dtorch.transport.messages import PROTOCOL_VERSION, Failure, FromWorker, Halt, Hello, Ping, Pong

if TYPE_CHECKING:
    from dtorch.transport.groups import Group

HANG_UP_S = 0.2
"""How long the end of a worker may wait for the goodbye of its heartbeat's link."""
GROUP_TIMEOUT_S = 1800.0
"""A collective's last resort; a lost worker is noticed by the controller long before."""


assert creation.FACTORIES  # imported for what it adds to the op table


def main(args: dict[str, Any]) -> None:
    """Serve until told to stop or the controller is gone.

    Args:
        args: worker (its number), address and token of the controller, virtual (kind -> kind), num_threads (of torch); perhaps
            folders (where sessions may read and write files) and rules (names of those that rewrite plans).
    """
    if os.environ.get("DTORCH_KEEP_PAGES", "1") != "0":
        keep_pages()
    # In a thread of its own: the main thread may have been forked from a user's, with its modes of torch in force.
    life = _Life(args)
    thread = threading.Thread(target=_run, args=(args, life), name="dtorch-worker")
    thread.start()
    try:
        asyncio.run(life.beat())
    except DTorchError as error:  # no second link: go on without
        sys.stderr.write(f"dtorch: worker {args['worker']} has no heartbeat: {error}\n")
    thread.join()
    if life.outcome is not None:
        raise life.outcome


class _Life:
    """What the two threads of a worker share: one executes, the main thread answers what must not wait.

    Attributes:
        worker: None until the other thread has made it.
        outcome: why the other thread has ended, if it was not told to.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        self._args = args
        self.worker: Worker | None = None
        self.outcome: BaseException | None = None
        self._over = False
        self._beating: asyncio.Task[Any] | None = None

    def end(self) -> None:
        """The other thread has ended."""
        self._over = True
        beating = self._beating
        if beating is not None:
            with contextlib.suppress(RuntimeError):  # its loop was closed just now
                beating.get_loop().call_soon_threadsafe(beating.cancel)

    async def beat(self) -> None:
        """Answer heartbeats, and halt sessions, until the other thread has ended or the controller is gone."""
        self._beating = asyncio.current_task()
        if self._over:
            return
        hello = Hello(PROTOCOL_VERSION, int(self._args["worker"]), os.getpid(), True)
        with contextlib.suppress(asyncio.CancelledError):
            link = await connect(str(self._args["address"]), str(self._args["token"]), hello)
            try:
                await self._answer(link)
            finally:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(link.close(), HANG_UP_S)

    async def _answer(self, link: Link) -> None:
        while (frame := await link.receive()) is not None:
            match codec.decode_to_worker(frame):
                case Ping(number):
                    with contextlib.suppress(ConnectionLostError):
                        link.send_nowait(codec.encode(Pong(number)))
                case Halt(session, epoch) if self.worker is not None:
                    self.worker.halt(session, epoch)


def _run(args: dict[str, Any], life: _Life) -> None:
    try:
        take_num_threads(int(args["num_threads"]))
        device = torch.device(dict(args["virtual"]).get(args["kind"], args["kind"]))
        if device.type == "cuda":
            torch.cuda.set_device(int(args["device"]) if device.index is None else device.index)
        torch.seed()
        warnings.simplefilter("ignore")  # the client has met torch's warnings while it worked out shapes
        try:
            import uvloop
        except ImportError:  # not made for this system
            asyncio.run(_serve(args, life))
        else:
            uvloop.run(_serve(args, life))
    except BaseException as error:
        life.outcome = error
    finally:
        life.end()


async def _serve(args: dict[str, Any], life: _Life) -> None:
    number = int(args["worker"])
    address, token = str(args["address"]), str(args["token"])
    link = await connect(address, token, Hello(PROTOCOL_VERSION, number, os.getpid()))
    send_frame, encode = link.send_nowait, codec.encode

    def send(message: FromWorker) -> None:
        send_frame(encode(message))

    def group(members: tuple[int, ...], kind: str, epoch: int = 0) -> Group:
        # torch.distributed takes a while to import, and one worker alone never needs it
        from dtorch.transport.groups import make_group
        from dtorch.transport.store import SessionStore

        name = f"{epoch}-{kind}-{'-'.join(map(str, members))}"
        def stopped() -> bool:
            return worker.is_halting(link.session)

        store = SessionStore(address, token, name, stopped=stopped)
        return make_group(kind, store, number, members, GROUP_TIMEOUT_S, stopped=stopped)

    executor = partial(Executor, folders=args.get("folders"), rules=tuple(args.get("rules", RULES)))
    worker = Worker(number, dict(args["virtual"]), table.resolve, group, send, custom.allow, executor=executor)
    life.worker = worker
    decode, handle = codec.decode_to_worker, worker.handle
    touch = Spinner(asyncio.get_running_loop()).touch

    def hear(frame: Frame) -> bool:
        handle(decode(frame))
        touch()
        return not worker.stopped

    # Below autograd: ops run as under no_grad, without its book-keeping, and make ordinary tensors.
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        try:
            await link.hear(hear)
        except Exception as error:
            # Not a call's failure: this process is of no use any more. The controller, if it is there, passes on why.
            with contextlib.suppress(ConnectionLostError):
                send(Failure(0, 0, -1, -1, 0, "", type(error).__name__, str(error), traceback.format_exc()))
            await link.close("it failed")
            sys.exit(1)
    await link.close()
