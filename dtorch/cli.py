"""The command line: ``python -m dtorch ops`` lists the op table, ``doctor`` says what works here, ``explain`` what plans do,
``top`` what runs."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata

from dtorch.cluster.commands import add_commands, run_command
from dtorch.top import main as top_main

LIBRARIES = ("torch", "numpy", "aiohttp", "msgspec", "uvloop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the answer is the exit status."""
    parser = argparse.ArgumentParser(prog="dtorch", description="Look at an installation of dtorch, or run a cluster.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    ops = commands.add_parser("ops", help="list the op table")
    ops.add_argument("--missing", action="store_true", help="list torch's ops that have no row instead")
    ops.add_argument("--search", action="store_true", help="list legal signatures that no rule offers (test extra; minutes)")
    ops.add_argument("-k", default="", metavar="NAME", help="with --search: only entries whose names contain NAME")
    doctor = commands.add_parser("doctor", help="versions, devices, data planes and a short self-test")
    doctor.add_argument("--no-test", action="store_true", help="start nothing")
    top = commands.add_parser("top", help="live counters of the sessions that run on this machine")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (%(default)s)")
    top.add_argument("--looks", type=int, default=0, metavar="N", help="end after N looks; 0: when interrupted")
    explain = commands.add_parser(
        "explain", help="what a plan does, before anything runs: placements, communication by layer, memory by device"
    )
    explain.add_argument("target", help="package.module:name or file.py:name (a module, or a function that makes one, or it "
                         "and its inputs), a script (script.py or package.module), or a directory with config.json")
    explain.add_argument("--mesh", help="such as 2x3")
    explain.add_argument("--axes", help="names of the mesh's axes, such as dp,tp (the default for two)")
    explain.add_argument("--plan", default="auto", help='auto, none, or JSON: {"*.q_proj": "colwise"}')
    explain.add_argument("--input", action="append", default=[], metavar="NAME=SHAPE:DTYPE",
                         help="an example input, such as input_ids=1x16:int64; may be repeated")
    explain.add_argument("--device", default="cpu", help="device type of the mesh")
    explain.add_argument("--brief", action="store_true", help="one row for layers that are alike")
    explain.add_argument("arguments", nargs="*", help="arguments of a script, after --")
    add_commands(commands)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")  # a command is a program of its own: its warnings are for who started it
    try:
        status = run_command(chosen)
        if status is not None:
            return status
        if chosen.command == "explain":
            return _explain(chosen)
        if chosen.command == "top":
            return top_main(chosen.interval, chosen.looks)
        if chosen.command == "ops":
            if chosen.search:
                return _search(chosen.k)
            return _missing() if chosen.missing else _ops()
        return _doctor(test=not chosen.no_test)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# ---- ops


def op_rows() -> Iterator[tuple[str, str, str]]:
    """(name, rule, marks) of every op, sorted by name."""
    import dtorch  # noqa: F401  (fills the op table)
    from dtorch.ops.table import OPS

    for name, op in sorted(OPS.items()):
        flags = {"in place": op.writes is not None, "view": op.is_view, "random": op.random}
        yield name, rule_name(op.rule), ", ".join(mark for mark, is_set in flags.items() if is_set)


def rule_name(rule: Callable[..., object]) -> str:
    """The family of a rule: the name of its function, or of the function that made it."""
    qualified = getattr(rule, "__qualname__", type(rule).__name__)
    return str(qualified).split(".")[0].lstrip("_")


def _ops() -> int:
    rows = list(op_rows())
    table(("op", "rule", "kind"), rows)
    print(f"{len(rows)} ops")
    return 0


def _missing() -> int:
    try:
        missing_ops = import_module("dtorch.ops._fallback").missing_ops
    except (ImportError, AttributeError):
        print("this version keeps no list of missing ops", file=sys.stderr)
        return 2
    names = sorted(map(str, missing_ops()))
    for name in names:
        print(name)
    print(f"{len(names)} ops of torch have no row", file=sys.stderr)
    return 0


# ---- explain


def _explain(chosen: argparse.Namespace) -> int:
    from dtorch.forecast.command import UsageError, explain_target

    try:
        found = explain_target(
            chosen.target, chosen.mesh, chosen.axes, chosen.plan, chosen.input, chosen.device, chosen.arguments
        )
    except (UsageError, ValueError, TypeError, FileNotFoundError) as error:
        print(f"dtorch explain: {error}", file=sys.stderr)
        return 2
    print(found.text(brief=chosen.brief))
    return 0


def _search(pattern: str) -> int:
    import dtorch
    from dtorch.proofs.listing import missing_signatures

    num = unexplained = 0
    try:
        for found in missing_signatures(pattern):
            num += 1
            unexplained += found.reason is None
            print(f"{found.op}: {found.signature}  in {found.example}; {found.reason or 'worth a rule'}")
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        dtorch.shutdown()
    print(f"{num} legal signatures that no rule offers, {unexplained} of them without a reason", file=sys.stderr)
    return 0


# ---- doctor


def _doctor(test: bool) -> int:
    import torch
    from torch import distributed

    import dtorch

    print(f"dtorch {dtorch.__version__} on Python {platform.python_version()}, {platform.platform()}")
    table(("library", "version"), [(name, _version(name)) for name in LIBRARIES])
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print(f"devices: cpu with {os.cpu_count()} cores ({torch.get_num_threads()} torch threads), {num_cuda} cuda")
    for index in range(num_cuda):
        print(f"  cuda:{index} {torch.cuda.get_device_name(index)}")
    # What torch was built with; whether workers can really talk is what the self-test shows.
    planes = {
        "in one process": True,
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": distributed.is_available() and distributed.is_nccl_available() and num_cuda > 0,
    }
    print("data planes: " + ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in planes.items()))
    if not test:
        return 0
    modes = ["shared", "per-device"] if planes["gloo"] else ["shared"]
    return int(not all([_self_test(mode) for mode in modes]))


def _self_test(workers: str) -> bool:
    """Run a sharded product on two CPU devices; print how long it took, or what went wrong."""
    import torch

    import dtorch

    started = time.perf_counter()
    try:
        dtorch.init(workers=workers, recover=False)
        mesh = dtorch.DeviceMesh("cpu", [0, 1])
        full = torch.arange(12.0).reshape(4, 3)
        x = dtorch.Tensor(full, device_mesh=mesh, placements=[dtorch.Shard(0)])
        same = torch.equal((x + x).redistribute(placements=[dtorch.Replicate()]).to_torch(), full + full)
        seconds = time.perf_counter() - started
        dtorch.shutdown()
    except Exception as error:
        first, *more = str(error).strip().splitlines() or [""]
        last = f" ... {more[-1].strip()}" if more else ""  # of a worker's last words, which say what went wrong
        print(f"self-test, {workers}: {type(error).__name__}: {first}{last}")
        return False
    print(f"self-test, {workers}: {'ok' if same else 'WRONG RESULT'} in {seconds:.2f} s from start to value")
    return same


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
