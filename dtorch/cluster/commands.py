"""The cluster's part of the command line: head, worker, status, sessions, usage, drain, keys; the rest is in launching."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from dtorch.cluster.launching import add_manifest, add_up, parse_labels, run_manifest, run_up
from dtorch.transport.errors import DTorchError

DEFAULT_LISTEN = "127.0.0.1:7474"
TIMEOUT_S = 30.0


def add_commands(commands: Any) -> None:
    """Add the cluster's commands to the command line's."""
    _add_head(commands)
    _add_worker(commands)
    for name, text in (("status", "show a head's workers"), ("sessions", "show a head's sessions")):
        _add_asking(commands.add_parser(name, help=text))
    drain = commands.add_parser("drain", help="let a worker finish what it has and leave")
    drain.add_argument("worker", help="its name or number")
    _add_asking(drain)
    usage = commands.add_parser("usage", help="show what was used: device seconds, bytes, ops")
    usage.add_argument("--tenant", default="", metavar="NAME", help="of this one alone")
    usage.add_argument("--sessions", action="store_true", help="by session, with those that have ended")
    _add_asking(usage)
    _add_keys(commands)
    add_up(commands)
    add_manifest(commands)


def run_command(chosen: argparse.Namespace) -> int | None:
    """Run a command of ``add_commands``; None when it is another one. The answer is the exit status."""
    runs = {
        "head": _head, "worker": _worker, "status": _status, "sessions": _sessions, "drain": _drain, "keys": _keys,
        "usage": _usage,
        "up": run_up, "manifest": run_manifest,
    }
    run = runs.get(chosen.command)
    if run is None:
        return None
    try:
        return run(chosen)
    except (DTorchError, OSError, ValueError) as error:
        print(f"dtorch {chosen.command}: {error}", file=sys.stderr)
        return 1


# ---- head


def _add_head(commands: Any) -> None:
    head = commands.add_parser("head", help="run the head of a cluster")
    head.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"where ({DEFAULT_LISTEN})")
    head.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM")
    head.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    _add_key_file(head)
    head.add_argument("--audit", type=Path, metavar="FILE", help="append an audit log, a JSON object a line")
    head.add_argument(
        "--grace", type=float, default=3.0, metavar="S", help="a client without a connection for S seconds is gone (3)"
    )
    head.add_argument("--usage", type=Path, metavar="FILE", help="keep what was used, a JSON object a line")
    head.add_argument("--open-metrics", action="store_true", help="/metrics needs no key")
    head.add_argument("--worker-grace", type=float, default=0.8, metavar="S", help="the same of a worker (0.8)")
    head.add_argument(
        "--silent", type=float, default=3.0, metavar="S", help="a worker whose host says nothing for S seconds is lost (3)"
    )
    head.add_argument(
        "--replace", type=float, default=30.0, metavar="S",
        help="a session that has lost the last worker that could serve it waits S seconds for another one to join (30)",
    )
    head.add_argument(
        "--remember", type=float, default=64.0, metavar="MIB",
        help="of the data that a session's client sent, kept to get over the loss of a worker (64)",
    )


def _head(chosen: argparse.Namespace) -> int:
    from dtorch.cluster.head import HEAD_KEEPS_BYTES, Head, Options
    from dtorch.runtime.pages import keep_pages

    keep_pages(HEAD_KEEPS_BYTES)
    host, _, port = chosen.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--listen takes HOST:PORT, such as {DEFAULT_LISTEN}, not {chosen.listen!r}")
    if (chosen.tls_cert is None) != (chosen.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    options = Options(
        host.strip("[]"), int(port), chosen.tls_cert, chosen.tls_key, chosen.keys, chosen.audit, chosen.grace,
        chosen.worker_grace, chosen.silent, chosen.usage, chosen.open_metrics,
        int(chosen.remember * (1 << 20)), chosen.replace,
    )

    async def serve() -> None:
        head = Head(options)
        await head.start()
        print(f"head at {head.url}, keys in {options.keys}", flush=True)
        if not head.keys.entries():
            print("there are no keys yet: dtorch keys create NAME --role worker|client|admin", flush=True)
        if options.tls_cert is None and options.host not in ("127.0.0.1", "::1", "localhost"):
            print("without --tls-cert, keys and data can be read on their way", file=sys.stderr, flush=True)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await head.stop()

    _run(serve())
    return 0


# ---- worker


def _add_worker(commands: Any) -> None:
    worker = commands.add_parser("worker", help="offer devices of this machine to a head")
    _add_asking(worker, prints=False)
    worker.add_argument("--devices", default="cpu:1", help='such as "cpu:4" or "cuda:all" (cpu:1)')
    worker.add_argument(
        "--labels", action="append", default=[], metavar="NAME=VALUE", help="facts about this worker; may be repeated"
    )
    worker.add_argument("--name", default="", help="for people; the head gives one otherwise")
    worker.add_argument("--address", default="", help="of this host for other workers, when they see another one")
    worker.add_argument(
        "--allow", action="append", default=[], metavar="MODULE", help="import ops of users from it; may be repeated"
    )
    worker.add_argument(
        "--files", action="append", default=[], metavar="FOLDER", help="let sessions read and write in it; may be repeated"
    )
    worker.add_argument(
        "--memory", type=float, default=0.0, metavar="GIB", help="of this process: an op that would take more fails"
        " (90%% of this machine's; without GPUs only)"
    )
    worker.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    worker.add_argument(
        "--health", default="", metavar="HOST:PORT",
        help="answer probes: /healthz, and /readyz once it has joined; several GPUs take as many ports from there on",
    )


def _worker(chosen: argparse.Namespace) -> int:
    from dtorch.cluster.serve import Offer, parse_devices, serve

    labels = parse_labels(chosen.labels)
    if chosen.threads < 1:
        raise ValueError(f"--threads is at least 1, not {chosen.threads}")
    devices = parse_devices(chosen.devices)
    if sum(kind == "cuda" for kind, _ in devices) > 1 or len({kind for kind, _ in devices}) > 1:
        return _one_process_each(chosen, devices)
    url, key, ca_file = _target(chosen)
    offer = Offer(
        url, key, devices, chosen.name, labels, chosen.address, tuple(chosen.allow), tuple(chosen.files),
        chosen.threads, _memory_bytes(chosen.memory, devices), ca_file,
    )
    _run(serve(offer, lambda text: print(text, flush=True), chosen.health))
    return 0


def _memory_bytes(gib: float, devices: tuple[tuple[str, int], ...]) -> int:
    if gib < 0:
        raise ValueError(f"--memory is a number above 0, not {gib:g}")
    if gib or any(kind == "cuda" for kind, _ in devices):
        return int(gib * (1 << 30))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 9 // 10


def _one_process_each(chosen: argparse.Namespace, devices: tuple[tuple[str, int], ...]) -> int:
    """A process for all CPU devices and one for each GPU, as each GPU wants one of its own. Those that die start anew."""
    from dtorch.cluster.launchers.local import Processes, spawn

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in visible.split(",") if name]
    num_cpu = sum(kind == "cpu" for kind, _ in devices)
    plans: list[tuple[str, dict[str, str]]] = [(f"cpu:{num_cpu}", {})] if num_cpu else []
    for kind, index in devices:
        if kind == "cuda":
            plans.append(("cuda:1", {"CUDA_VISIBLE_DEVICES": names[index] if names else str(index)}))
    arguments = list(sys.argv[1:]) if sys.argv[1:2] == ["worker"] else []
    if not arguments:
        raise ValueError("several kinds of devices, or several GPUs, can be offered by 'dtorch worker' only")
    host, _, port = chosen.health.rpartition(":")

    async def spawn_one(slot: int) -> asyncio.subprocess.Process:
        plan, more = plans[slot]
        probed = ["--health", f"{host}:{int(port) + slot}"] if host and port.isdecimal() else []
        return await spawn([*arguments, "--devices", plan, *probed], more)

    async def keep() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        processes = Processes()
        try:
            await processes.keep(len(plans), spawn_one)
            await processes.wait_all(stop)
        finally:
            await processes.stop()

    _run(keep())
    return 0


# ---- asking a head


def _add_asking(parser: argparse.ArgumentParser, prints: bool = True) -> None:
    parser.add_argument("--head", default="", metavar="URL", help="such as wss://host:port (DTORCH_HEAD)")
    parser.add_argument("--key", default="", help="API key; better given as DTORCH_API_KEY, which others cannot see")
    parser.add_argument("--ca", default="", metavar="FILE", help="authority of the head's certificate (DTORCH_CA_FILE)")
    if prints:
        parser.add_argument("--json", action="store_true", help="print what the head says, as JSON")


def _target(chosen: argparse.Namespace) -> tuple[str, str, str]:
    """URL, key, and file of the authority that is trusted ("" for the system's)."""
    url = chosen.head or os.environ.get("DTORCH_HEAD", "")
    key = chosen.key or os.environ.get("DTORCH_API_KEY", "")
    if not url:
        raise ValueError("which head? Give --head wss://host:port, or set DTORCH_HEAD")
    if not key:
        raise ValueError("an API key is needed: set DTORCH_API_KEY; 'dtorch keys create' on the head makes one")
    return url, key, chosen.ca or os.environ.get("DTORCH_CA_FILE", "")


def _ask(chosen: argparse.Namespace, method: str, path: str) -> Any:
    from dtorch.transport.dial import address_of, split_address, trust

    url, key, ca_file = _target(chosen)
    kind, host, port = split_address(address_of(url))
    connection = (
        http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=trust(ca_file))
        if kind == "tls"
        else http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    )
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        body = answer.read()
    except http.client.HTTPException as error:
        raise ValueError(f"{url} is no dtorch head: {error!r}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"{url} answered with status {answer.status}: {body.decode(errors='replace').strip()}")
    return msgspec.json.decode(body)


def _status(chosen: argparse.Namespace) -> int:
    facts = _ask(chosen, "GET", "/v1/status")
    if chosen.json:
        return _print_json(facts)
    devices = ", ".join(f"{count} {kind}" for kind, count in sorted(facts["devices"].items())) or "no devices"
    print(f"{facts['url']}: {devices}, {facts['num_sessions']} sessions, up since {_when(facts['since'])}")
    rows = [
        (
            str(worker["number"]), worker["name"], worker["state"], _short(worker["devices"]), worker["address"],
            str(len(worker["sessions"])), ",".join(f"{k}={v}" for k, v in sorted(worker["labels"].items())),
        )
        for worker in facts["workers"]
    ]
    _table(("number", "worker", "state", "devices", "address", "sessions", "labels"), rows)
    return 0


def _sessions(chosen: argparse.Namespace) -> int:
    facts = _ask(chosen, "GET", "/v1/sessions")
    if chosen.json:
        return _print_json(facts)
    rows = [
        (
            str(each["number"]), each["tenant"], each["name"], each["state"], str(each["devices"]),
            str(each["held_bytes"]), str(each["ops_in_flight"]), _when(each["since"]),
        )
        for each in facts
    ]
    _table(("number", "tenant", "name", "state", "devices", "bytes", "ops in flight", "since"), rows)
    return 0


def _drain(chosen: argparse.Namespace) -> int:
    facts = _ask(chosen, "POST", f"/v1/drain/{chosen.worker}")
    if chosen.json:
        return _print_json(facts)
    waits, moves = (", ".join(map(str, facts[f"{what}_sessions"])) for what in ("waits_for", "moves"))
    if waits:
        print(f"{facts['worker']} leaves once these sessions have ended: {waits}; there is nowhere else for them")
    else:
        print(f"{facts['worker']} leaves " + (f"once these sessions have moved: {moves}" if moves else "now"))
    return 0


def _usage(chosen: argparse.Namespace) -> int:
    if chosen.sessions:
        facts = _ask(chosen, "GET", "/api/v1/sessions?ended=1") + _ask(chosen, "GET", "/api/v1/sessions")
        facts = [each for each in facts if chosen.tenant in ("", each["tenant"])]
    else:
        facts = _ask(chosen, "GET", f"/api/v1/usage?{urlencode({'tenant': chosen.tenant})}")
    if chosen.json:
        return _print_json(facts)
    about = ("session", "tenant", "name") if chosen.sessions else ("tenant",)
    keys = [{"session": "number"}.get(name, name) for name in about]
    rows = [
        (
            *(str(each[key]) for key in keys), f"{each['device_seconds']:.3f}", f"{each['byte_seconds']:.4g}",
            *(str(each[f"{name}_bytes"]) for name in ("held", "uploaded", "fetched", "exchanged")),
            str(each["num_ops"]), ",".join(f"{op}={count}" for op, count in list(each["ops"].items())[:3]),
        )
        for each in facts
    ]
    _table((*about, "device s", "byte s", "held", "uploaded", "fetched", "exchanged", "ops", "most"), rows)
    return 0


# ---- keys


def _add_key_file(parser: argparse.ArgumentParser) -> None:
    from dtorch.cluster.keys import default_path

    parser.add_argument("--keys", type=Path, default=default_path(), metavar="FILE", help=f"file of keys ({default_path()})")


def _add_keys(commands: Any) -> None:
    from dtorch.cluster.keys import ROLES

    keys = commands.add_parser("keys", help="make, list and take back API keys, on the head's machine")
    actions = keys.add_subparsers(dest="action", required=True, metavar="action")
    create = actions.add_parser("create", help="make a key and show it, once")
    create.add_argument("name", help="of whoever is served; keys of one name share its quota and its part of devices")
    create.add_argument("--role", choices=ROLES, default="client")
    create.add_argument("--weight", type=float, default=1.0, help="part of a device against others who wait for it (1)")
    create.add_argument("--priority", type=int, default=0, help="higher ones go first, always (0)")
    for name, what in (
        ("devices", "devices"), ("bytes", "bytes held by tensors"), ("ops", "ops in flight"), ("sessions", "sessions"),
    ):
        create.add_argument(f"--max-{name}", type=int, default=0, metavar="N", help=f"quota: {what} (0: no limit)")
    _add_key_file(create)
    _add_key_file(actions.add_parser("list", help="list keys"))
    revoke = actions.add_parser("revoke", help="take keys back; their sessions end")
    revoke.add_argument("which", help="the id of a key, or the name of all of its keys")
    _add_key_file(revoke)


def _keys(chosen: argparse.Namespace) -> int:
    from dtorch.cluster.keys import KeyFile
    from dtorch.cluster.quotas import Limits

    file = KeyFile(chosen.keys)
    if chosen.action == "create":
        limits = Limits(chosen.max_devices, chosen.max_bytes, chosen.max_ops, chosen.max_sessions)
        entry, key = file.create(
            chosen.name, chosen.role, weight=chosen.weight, priority=chosen.priority, limits=limits
        )
        print(f"key {entry.id} for {entry.name} ({entry.role}); it is shown this once:", file=sys.stderr)
        print(key)
    elif chosen.action == "list":
        rows = [
            (key.id, key.name, key.role, f"{key.weight:g}", str(key.priority), _limits(key.limits), _when(key.created))
            for key in file.entries()
        ]
        _table(("id", "name", "role", "weight", "priority", "limits", "made"), rows)
    else:
        gone = file.revoke(chosen.which)
        if not gone:
            raise ValueError(f"no key has the id or the name {chosen.which!r}")
        print(f"revoked: {', '.join(f'{key.id} ({key.name})' for key in gone)}")
    return 0


def _limits(limits: Any) -> str:
    facts = {name: value for name, value in msgspec.structs.asdict(limits).items() if value}
    return ",".join(f"{name.removeprefix('max_')}={value}" for name, value in facts.items()) or "none"


# ---- words


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not made for this system
        asyncio.run(work)
    else:
        uvloop.run(work)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _short(devices: list[str]) -> str:
    kinds: dict[str, int] = {}
    for device in devices:
        kind = device.partition(":")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    return ",".join(f"{kind}:{count}" for kind, count in kinds.items())


def _print_json(facts: Any) -> int:
    print(msgspec.json.format(msgspec.json.encode(facts)).decode())
    return 0


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from dtorch.cli import table

    table(header, rows)
