"""Timing that survives a busy machine: repetitions of rivals alternate, and ratios are taken within one run."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Samples:
    """Times of one thing, each of a whole repetition divided by its number of ops.

    Attributes:
        values: in the unit of the figure, in the order they were taken.
    """

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return min(self.values)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.values)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)]

    def record(self) -> dict[str, Any]:
        return {"median": self.median, "best": self.best, "samples": self.values}


def per_op_us(
    body: Callable[[int], Any],
    num: int,
    after: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Microseconds an op of ``body(num)``; ``after`` runs outside of the measured time.

    Args:
        clock: ``time.thread_time`` counts what this thread computes, and not its waiting for a core that others use.
    """
    start = clock()
    kept = body(num)  # what it returns dies outside of the measured time
    took = clock() - start
    if after is not None:
        after()
    del kept
    return took / num * 1e6


def alternate(
    rivals: Mapping[str, Callable[[], float]], num_repetitions: int, num_warmups: int = 1
) -> dict[str, Samples]:
    """One value of each rival in turn, ``num_repetitions`` times, after ``num_warmups`` rounds that do not count."""
    found = {name: Samples() for name in rivals}
    for repetition in range(num_warmups + num_repetitions):
        for name, measure in rivals.items():
            value = measure()
            if repetition >= num_warmups:
                found[name].values.append(value)
    return found


def process_s(command: Sequence[str], env: dict[str, str] | None = None) -> float:
    """Seconds from start to end of a whole process, which must succeed."""
    start = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False)
    took = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return took


def add_clock_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processor-time", action="store_const", const=time.thread_time, default=time.perf_counter, dest="clock",
        help="count what the client's thread computes, for a machine that others use as well",
    )  # fmt: skip


@dataclass
class Peer:
    """Another system, measured by a script of this folder in a process of its own.

    Attributes:
        command: prints one JSON object, figure -> value, as its last line.
        needs: the module that must be importable.
    """

    name: str
    python: str
    script: str
    needs: str
    before: tuple[str, ...] = ()

    def is_installed(self) -> bool:
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({self.needs!r}) is None)"
        try:
            return subprocess.run([self.python, "-c", probe], capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def figures(self, timeout_s: float = 300.0) -> dict[str, float] | str:
        """Figure -> value, or why there are none."""
        if not self.is_installed():
            return "not installed"
        command = [self.python, *self.before, str(HERE / self.script)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no figures within {timeout_s:g} s"
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return f"failed: {tail[:200]}"
        found: dict[str, float] = json.loads(lines[-1])
        return found


def torchrun(num_processes: int) -> tuple[str, ...]:
    """Arguments of Python that start a script in this many gloo processes."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes))


def peers(jax_python: str, monarch_python: str) -> list[Peer]:
    return [
        Peer("DTensor", sys.executable, "peer_dtensor.py", "torch", torchrun(2)),
        Peer("JAX", jax_python, "peer_jax.py", "jax"),
        Peer("Monarch", monarch_python, "peer_monarch.py", "monarch"),
    ]
