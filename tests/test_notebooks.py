"""The notebooks run in a real kernel, print what is committed, and leave no worker behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

# In a process of its own: the client's sockets live as long as the process.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
probe = "list(dtorch.current_session().thread.pids.values())"
book.cells.append(nbformat.v4.new_code_cell(probe, id="probe"))
NotebookClient(book, timeout=300, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def outputs(cell: dict[str, Any]) -> list[str]:
    """What a cell printed, whatever the pieces in which it came, and what it showed; as text."""
    printed, shown = "", []
    for out in cell.get("outputs", []):
        text = out.get("text") or out.get("data", {}).get("text/plain", "")
        text = text if isinstance(text, str) else "".join(text)
        if out["output_type"] == "stream":
            printed += text
        else:
            shown.append(text)
    return [printed, *shown]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / path.name
    done = subprocess.run([sys.executable, "-c", RUN, str(path), str(target)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    committed, fresh = json.loads(path.read_text())["cells"], json.loads(target.read_text())["cells"]
    assert len(fresh) == len(committed) + 1
    for ours, theirs in zip(fresh, committed, strict=False):
        if "varies" not in theirs["metadata"].get("tags", ()):  # times, which no two runs share
            assert outputs(ours) == outputs(theirs), ours["source"]
    _, pids = outputs(fresh[-1])
    for pid in json.loads(pids):
        wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    """The kernel has ended; its worker then ends too, without being asked."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    ended = poller.poll(10_000)
    os.close(handle)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        pytest.fail(f"worker {pid} outlived its kernel")


# A kernel, cell by cell: a child of this script, which reports what each cell printed or raised.
KERNEL = """
import json, sys
from jupyter_client.manager import start_new_kernel

kernel, client = start_new_kernel(kernel_name="python3")
answers = []
for step in json.loads(sys.argv[1]):
    if step == "restart":
        client.stop_channels()
        kernel.restart_kernel(now=False)
        client = kernel.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=300)
        continue
    printed = []

    def hook(message):
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed.append(content["text"])
            if "interrupt me" in content["text"]:
                kernel.interrupt_kernel()
        elif message["msg_type"] == "error":
            printed.append(content["ename"])

    client.execute_interactive(step, allow_stdin=False, timeout=300, output_hook=hook)
    answers.append("".join(printed))
print(json.dumps(answers))
client.stop_channels()
kernel.shutdown_kernel()
"""

BEGIN = """
import asyncio, os, signal, torch, dtorch
mesh = dtorch.DeviceMesh("cpu", [0, 1])
"""
WORKERS = "print([*dtorch.current_session().thread.pids.values()])"


def in_a_kernel(*steps: str) -> list[str]:
    script = [sys.executable, "-c", KERNEL, json.dumps(steps)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return [answer.strip() for answer in answers]


def test_the_cells_of_a_notebook_are_one_task_for_seeds() -> None:
    other = """
async def other():
    dtorch.manual_seed(7)
    return await dtorch.rand(3, device_mesh=mesh)
c = await asyncio.create_task(other())
"""
    answers = in_a_kernel(
        BEGIN,
        "dtorch.manual_seed(4)\nawait asyncio.sleep(0)",
        "a = await dtorch.rand(3, device_mesh=mesh)",
        other,
        "b = dtorch.rand(3, device_mesh=mesh).to_torch()",
        "torch.manual_seed(4)\nprint(torch.equal(a, torch.rand(3)), torch.equal(b, torch.rand(3)))",
        "torch.manual_seed(7)\nprint(torch.equal(c, torch.rand(3)))",
    )
    assert answers[-2:] == ["True True", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd")
def test_a_cell_interrupted_in_a_wait_and_a_kernel_that_starts_afresh() -> None:
    """The worker is stopped, so that both cells, one that awaits and one that blocks, certainly wait when they are
    interrupted; it is not lost meanwhile."""
    hold = """
x = dtorch.ones(2, device_mesh=mesh)
await x
thread = dtorch.current_session().thread
thread._pulse._states = lambda: dict.fromkeys(thread.pids, "S")
(pid,) = thread.pids.values()
os.kill(pid, signal.SIGSTOP)
y = x + 1
"""
    wait, block = "print('interrupt me', flush=True)\nawait y", "print('interrupt me', flush=True)\ny.to_torch()"
    let_go = "os.kill(pid, signal.SIGCONT)"
    answers = in_a_kernel(
        BEGIN, WORKERS, hold, wait, block, let_go, "print((await y).tolist(), y.tolist())", WORKERS,
        "restart", BEGIN, "print((await (dtorch.ones(2, device_mesh=mesh) + 1)).tolist())", WORKERS,
    )  # fmt: skip
    names = [answer.removeprefix("interrupt me").strip() for answer in answers]
    assert names[3] in ("KeyboardInterrupt", "CancelledError")
    assert names[4] == "KeyboardInterrupt"
    assert names[6] == "[2.0, 2.0] [2.0, 2.0]"
    assert names[9] == "[2.0, 2.0]"
    for pid in {*json.loads(answers[7]), *json.loads(answers[10])}:
        wait_for_end(pid)
