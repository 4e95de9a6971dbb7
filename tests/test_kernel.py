"""A notebook's kernel: cells that are interrupted while they wait, run again, or lose their kernel."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager, start_new_async_kernel

from tests.test_notebooks import wait_for_end

WAIT_S = 120.0  # far above what anything takes; only a failing test waits this long

SETUP = """
import json, os, signal
import torch, dtorch
from dtorch import Shard
mesh = dtorch.DeviceMesh("cpu", [0, 1])
x = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)])
def twice(tensor):
    return tensor + tensor
print((await twice(x)).tolist())
"""
PIDS = "print(json.dumps(list(dtorch.current_session().thread.pids.values())))"
BUSY = "big = dtorch.ones(1200, 1200, device_mesh=mesh)\nfor _ in range(60): big = big @ big * 1e-4\n"
"""Work for a few seconds, before whatever follows is done. (Workers that are stopped would count as lost.)"""


class Kernel:
    """A kernel and a client of it, on an event loop of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        started = start_new_async_kernel(kernel_name="python3", stderr=subprocess.DEVNULL)
        self.manager: AsyncKernelManager
        self.client: AsyncKernelClient
        self.manager, self.client = self.loop.run_until_complete(started)

    def close(self) -> None:
        self.client.stop_channels()
        self.loop.run_until_complete(self.manager.shutdown_kernel(now=True))
        self.loop.close()

    def run(self, code: str, heard: Callable[[], None] = lambda: None) -> tuple[str, str]:
        """What a cell printed, and the text of its error or ""."""
        printed, failed = [], ""

        def hook(message: dict[str, Any]) -> None:
            nonlocal failed
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
                if "waiting" in content["text"]:
                    heard()
            elif message["msg_type"] == "error":
                failed = "\n".join([f"{content['ename']}: {content['evalue']}", *content["traceback"]])

        self.loop.run_until_complete(self.client.execute_interactive(code, output_hook=hook, timeout=WAIT_S))
        return "".join(printed), failed

    def good(self, code: str) -> str:
        printed, failed = self.run(code)
        assert not failed, failed
        return printed.strip()

    def pids(self) -> list[int]:
        found: list[int] = json.loads(self.good(PIDS))
        assert found
        return found


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    try:
        made.good(SETUP)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("wait", ["(x * 3).to_torch()", "dtorch.synchronize()"])
def test_a_cell_interrupted_while_it_waits_ends_and_the_next_one_works(kernel: Kernel, wait: str) -> None:
    """Of cells that block. One that awaits is ended by ipykernel itself, when anything wakes its event loop."""

    def interrupt() -> None:
        assert kernel.manager.provisioner is not None
        os.kill(kernel.manager.provisioner.pid, signal.SIGINT)

    _, failed = kernel.run(f"{BUSY}print('waiting', flush=True)\n{wait}", interrupt)
    assert failed.startswith(("KeyboardInterrupt", "CancelledError")), failed
    assert kernel.good("print((await (x * 3)).tolist())") == "[3.0, 3.0, 3.0, 3.0]"


def test_cells_run_again_and_functions_of_cells_change(kernel: Kernel) -> None:
    before = kernel.pids()
    for _ in range(2):
        assert kernel.good(SETUP) == "[2.0, 2.0, 2.0, 2.0]"
    kernel.good("def twice(tensor):\n    return tensor * 20")
    assert kernel.good("print((await twice(x)).tolist())") == "[20.0, 20.0, 20.0, 20.0]"
    assert kernel.pids() == before


def test_errors_name_the_cell_and_hide_our_frames(kernel: Kernel) -> None:
    _, failed = kernel.run("y = dtorch.arange(4, device_mesh=mesh)\nz = y[dtorch.tensor([9], device_mesh=mesh)]\nawait z")
    assert "  at Cell In[" in failed
    assert "z = y[dtorch.tensor([9], device_mesh=mesh)]" in failed
    assert "ipykernel_" not in failed
    a = "a = dtorch.ones(4, 4, device_mesh=mesh, placements=[Shard(0)])\n"
    b = "b = dtorch.ones(4, 4, device_mesh=mesh, placements=[Shard(1)])\n"
    _, failed = kernel.run(f"{a}{b}torch.add(a, b)")
    assert "This would be legal: torch.add(a, b.redistribute(placements=[Shard(dim=0)]))" in failed
    assert "_ways.py" not in failed
    assert "skipping hidden" in failed
    printed, _ = kernel.run("print((x + 1).item() if False else (x + 1).tolist())")
    assert "await x.tolist_async()" in printed
    assert "ipykernel_" not in printed


def test_seeds_of_one_cell_hold_in_the_next(kernel: Kernel) -> None:
    kernel.good("dtorch.manual_seed(3)\nawait x")
    numbers = kernel.good("print((await dtorch.rand(4, device_mesh=mesh)).tolist())")
    assert numbers == kernel.good("torch.manual_seed(3)\nprint(torch.rand(4).tolist())")


def test_a_kernel_that_restarts_or_dies_leaves_no_worker(kernel: Kernel) -> None:
    for now in (False, True):
        pids = kernel.pids()
        kernel.loop.run_until_complete(kernel.manager.restart_kernel(now=now))
        kernel.loop.run_until_complete(kernel.client.wait_for_ready(timeout=WAIT_S))
        for pid in pids:
            wait_for_end(pid)
        if not now:
            kernel.good(SETUP)
