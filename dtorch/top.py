"""``python -m dtorch top``: live counters of the sessions that run on this machine, in the terminal."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtorch.profiling.timeline import table

NAME = "top"
PATTERN = "dtorch-*"
TIMEOUT_S = 2.0
HEADER = ("worker", "pid", "busy", "ops/s", "batches/s", "to it", "exchanged", "memory", "plans found", "failures")


def folders() -> list[Path]:
    """Private folders of this user's sessions."""
    bases = dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"))
    found = [path for base in bases if os.path.isabs(base) for path in sorted(Path(base).glob(PATTERN))]
    return [path for path in found if path.stat().st_uid == os.getuid() and (path / NAME).is_socket()]


def look(folder: Path) -> dict[str, Any] | None:
    """Counters of the session in a folder; None when it is gone."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(folder / NAME))
            with connection.makefile("rb") as stream:
                line = stream.readline()
    except OSError:
        return None
    found: dict[str, Any] = json.loads(line) if line else {}
    return found or None


def resident_bytes(pid: int) -> int:
    """Memory that a process holds, 0 where the system does not tell."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def lines(now: dict[str, Any], before: dict[str, Any] | None, seconds: float, memory: dict[int, int]) -> list[str]:
    """What is shown of a session.

    Args:
        now, before: two looks, ``seconds`` apart; None: there is no earlier one, so there are no rates yet.
        memory: process id -> bytes.
    """
    rows = []
    for number, worker in now["workers"].items():
        old = (before or now)["workers"].get(number, {})

        def rate(name: str, worker: dict[str, int] = worker, old: dict[str, int] = old) -> float:
            return (worker.get(name, 0) - old.get(name, 0)) / seconds

        batches = worker.get("plan_hits", 0) + worker.get("plan_misses", 0)
        rows.append((
            number, str(worker["pid"]), f"{min(rate('busy_ns') / 1e9, 1.0):.0%}", _number(rate("calls")),
            _number(rate("batches")), f"{_number(rate('sent_bytes'))}B/s", f"{_number(rate('exchanged_bytes'))}B/s",
            f"{_number(memory.get(worker['pid'], 0))}B",
            f"{worker.get('plan_hits', 0) / batches:.0%}" if batches else "", str(worker.get("failures", 0)),
        ))
    title = (
        f"session {now['session']} of process {now['pid']}: {now['batches_in_flight']} batches and "
        f"{_number(now['bytes_in_flight'])}B on their way"
    )
    return [title, *(table(HEADER, rows) if rows else ["  no workers yet"])]


def _number(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.0f}{unit}" if value == int(value) or abs(value) >= 100 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}T"


def main(interval_s: float, num_looks: int) -> int:
    """Look again and again, until interrupted or ``num_looks`` times.

    Returns:
        The exit status: 1 when there was no session at the only look.
    """
    if interval_s <= 0:
        print(f"--interval {interval_s:g} must be above 0", file=sys.stderr)
        return 2
    before: dict[Path, dict[str, Any]] = {}
    last = time.monotonic()
    number = 0
    try:
        while True:
            found = {folder: seen for folder in folders() if (seen := look(folder)) is not None}
            here = time.monotonic()
            _show(found, before, max(here - last, 1e-9))
            before, last = found, here
            number += 1
            if num_looks and number >= num_looks:
                return 0 if found or num_looks > 1 else 1
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


def _show(found: dict[Path, dict[str, Any]], before: dict[Path, dict[str, Any]], seconds: float) -> None:
    out: Sequence[str]
    if found:
        blocks = []
        for folder, seen in found.items():
            memory = {w["pid"]: resident_bytes(w["pid"]) for w in seen["workers"].values()}
            blocks.append("\n".join(lines(seen, before.get(folder), seconds, memory)))
        out = blocks
    else:
        out = ["no session of yours runs on this machine"]
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    print(clear + "\n\n".join(out), flush=True)
