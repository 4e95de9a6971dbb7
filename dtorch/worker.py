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
from dtorch.runtime.pages import keep_pages
from dtorch.runtime.rewrite import RULES
from dtorch.runtime.spin import Spinner
from dtorch.runtime.worker import Worker
from dtorch.transport import codec
from dtorch.transport.dial import connect
from dtorch.transport.errors import ConnectionLostError
from dtorch.transport.messages import PROTOCOL_VERSION, Failure, FromWorker, Hello

if TYPE_CHECKING:
    from dtorch.transport.groups import Group

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
    outcome: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(args, outcome), name="dtorch-worker")
    thread.start()
    thread.join()
    if outcome:
        raise outcome[0]


def _run(args: dict[str, Any], outcome: list[BaseException]) -> None:
    try:
        torch.set_num_threads(int(args["num_threads"]))
        device = torch.device(dict(args["virtual"]).get(args["kind"], args["kind"]))
        if device.type == "cuda":
            torch.cuda.set_device(int(args["device"]) if device.index is None else device.index)
        torch.seed()
        warnings.simplefilter("ignore")  # the client has met torch's warnings while it worked out shapes
        try:
            import uvloop
        except ImportError:  # not made for this system
            asyncio.run(_serve(args))
        else:
            uvloop.run(_serve(args))
    except BaseException as error:
        outcome.append(error)


async def _serve(args: dict[str, Any]) -> None:
    number = int(args["worker"])
    address, token = str(args["address"]), str(args["token"])
    link = await connect(address, token, Hello(PROTOCOL_VERSION, number, os.getpid()))
    send_frame, encode = link.send_nowait, codec.encode

    def send(message: FromWorker) -> None:
        send_frame(encode(message))

    def group(members: tuple[int, ...], kind: str) -> Group:
        # torch.distributed takes a while to import, and one worker alone never needs it
        from dtorch.transport.groups import make_group
        from dtorch.transport.store import SessionStore

        name = f"{kind}-{'-'.join(map(str, members))}"
        store = SessionStore(address, token, name)
        return make_group(kind, store, number, members, GROUP_TIMEOUT_S)

    executor = partial(Executor, folders=args.get("folders"), rules=tuple(args.get("rules", RULES)))
    worker = Worker(number, dict(args["virtual"]), table.resolve, group, send, custom.allow, executor=executor)
    receive, decode, handle = link.receive, codec.decode_to_worker, worker.handle
    spinner = Spinner(asyncio.get_running_loop())
    # Below autograd: ops run as under no_grad, without its book-keeping, and make ordinary tensors.
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        try:
            while not worker.stopped and (frame := await receive()) is not None:
                handle(decode(frame))
                spinner.touch()
        except Exception as error:
            # Not a call's failure: this process is of no use any more. The controller, if it is there, passes on why.
            with contextlib.suppress(ConnectionLostError):
                send(Failure(0, 0, -1, -1, 0, "", type(error).__name__, str(error), traceback.format_exc()))
            await link.close("it failed")
            sys.exit(1)
    await link.close()
