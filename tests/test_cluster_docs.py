"""The tutorial of docs/cluster.md, command by command, in real processes and with TLS."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch.cluster.remote import Target
from dtorch.session import Session, using
from dtorch.transport.dial import trust
from dtorch.wiring import Options

PAGE = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text("utf-8")
PRELUDE = f'set -e\ndtorch() {{ {sys.executable} -m dtorch "$@"; }}\npython() {{ {sys.executable} "$@"; }}\n'


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Terminal:
    """Runs blocks of the page in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.running: list[subprocess.Popen[str]] = []
        root = str(Path(__file__).parent.parent)
        drop = ("DTORCH_HEAD", "DTORCH_API_KEY", "DTORCH_CA_FILE")
        self.env = {name: value for name, value in os.environ.items() if name not in drop}
        self.env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])

    def blocks(self, language: str) -> list[str]:
        found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        return [block.replace("7474", str(self.port)) for block in found]

    def run(self, block: str) -> str:
        done = subprocess.run(
            ["bash", "-c", PRELUDE + block], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, block: str, says: str) -> None:
        """Leave a command running once it has said something."""
        command = PRELUDE + block.replace(" dtorch ", f" exec {sys.executable} -m dtorch ", 1)
        if block.startswith("dtorch "):
            command = PRELUDE + f"exec {sys.executable} -m " + block
        # "NAME=value exec command" does not pass the variable on, so it is exported first.
        command = re.sub(r"^(DTORCH_API_KEY=\S+ \S+) exec", r"export \1; exec", command, flags=re.MULTILINE)
        process = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True)
        self.running.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(says):
                return
        raise AssertionError(f"{block} ended with status {process.wait()}")

    def stop(self) -> list[int]:
        for process in reversed(self.running):
            process.terminate()
        codes = [process.wait(30) for process in self.running]
        for process in self.running:
            assert process.stdout is not None
            process.stdout.close()
        return codes


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    made = Terminal(tmp_path_factory.mktemp("tutorial"))
    keys, head, left, right, _ = made.blocks("sh")
    made.run(keys)
    try:
        made.start(head, "head at wss://")
        made.start(left, "worker ")
        made.start(right, "worker ")
        yield made
    finally:
        codes = made.stop()
    assert codes == [0, 0, 0]


def test_the_commands_of_the_page_work(terminal: Terminal) -> None:
    (program,) = terminal.blocks("python")
    (terminal.folder / "program.py").write_text(program)
    shown = terminal.run(terminal.blocks("sh")[-1])
    assert "Partial" in shown
    assert "torch.Size([6])" in shown
    assert "4 cpu, 0 sessions" in shown
    assert "rack=a" in shown
    assert "rack=b" in shown
    assert '"event":"session opened"' in (terminal.folder / "audit.jsonl").read_text()


def test_each_session_draws_from_generators_of_its_own(terminal: Terminal) -> None:
    key = (terminal.folder / "alice.key").read_text().strip()
    tls = trust(terminal.folder / "cert.pem")
    target = Target(f"wss://127.0.0.1:{terminal.port}", key, tls)
    sessions = [Session(Options(target=target)) for _ in range(2)]
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])
    drawn: list[list[torch.Tensor]] = [[], []]
    try:
        for session in sessions:
            with using(session):
                dtorch.manual_seed(5)
        for _ in range(3):
            for session, got in zip(sessions, drawn, strict=True):
                with using(session):
                    got.append(dtorch.rand(4, 5, device_mesh=mesh, placements=[dtorch.Shard(0)]).to_torch())
        torch.manual_seed(5)
        plain = [torch.rand(4, 5) for _ in range(3)]
        for got in drawn:
            assert all(map(torch.equal, got, plain))
    finally:
        for session in sessions:
            session.close()


def test_tasks_of_a_client_have_seeds_of_their_own(terminal: Terminal) -> None:
    key = (terminal.folder / "alice.key").read_text().strip()
    tls = trust(terminal.folder / "cert.pem")
    session = Session(Options(target=Target(f"wss://127.0.0.1:{terminal.port}", key, tls)))

    async def task(seed: int, mine: asyncio.Event, others: asyncio.Event) -> list[list[float]]:
        made = []
        for k in range(3):
            await mine.wait()
            mine.clear()
            if not k:
                dtorch.manual_seed(seed)
            made.append(dtorch.rand(3, device_mesh=dtorch.DeviceMesh("cpu", [0, 1, 2])))
            others.set()
        return [await x.tolist_async() for x in made]

    async def main() -> list[list[list[float]]]:
        one, other = asyncio.Event(), asyncio.Event()
        one.set()
        return await asyncio.gather(task(1, one, other), task(2, other, one))

    try:
        with using(session):
            found = asyncio.run(main())
    finally:
        session.close()
    for seed, drawn in enumerate(found, 1):
        torch.manual_seed(seed)
        assert drawn == [torch.rand(3).tolist() for _ in range(3)]
