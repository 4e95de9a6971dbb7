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
