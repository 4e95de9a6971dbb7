"""The part of the command line that starts machines: up, manifest."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import msgspec.yaml

from dtorch.cluster.launchers.base import WorkerSpec
from dtorch.cluster.launchers.ray import PLACEMENTS, RayOptions, resources_for


def add_up(commands: Any) -> None:
    """Add ``dtorch up``."""
    up = commands.add_parser(
        "up", help="start workers by an engine, with a head of their own or for one that runs",
        epilog="A program after -- is run with the cluster, and all ends with it: dtorch up --workers 2 -- python train.py",
    )
    up.add_argument("--on", choices=("local", "ray"), default="local", help="the engine (local: processes of this machine)")
    up.add_argument("--workers", type=int, default=1, metavar="N", help="how many (1)")
    _add_offer(up)
    up.add_argument("--name", default="", help="of the workers, with a number behind; a random one by default")
    up.add_argument("--head", default="", metavar="URL", help="start workers for this head, and none of our own (DTORCH_HEAD)")
    up.add_argument("--key", default="", help="with --head: a key of the role worker; better given as DTORCH_API_KEY")
    up.add_argument("--ca", default="", metavar="FILE", help="authority of the head's certificate (DTORCH_CA_FILE)")
    own = up.add_argument_group("a head of its own")
    own.add_argument("--listen", default="", metavar="HOST:PORT", help="127.0.0.1:7474, with Ray 0.0.0.0:7474")
    own.add_argument("--advertise", default="", metavar="HOST", help="its name for others, if not that of --listen")
    own.add_argument("--keys", type=Path, metavar="FILE", help="file of keys (a temporary one)")
    own.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM")
    own.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    ray = up.add_argument_group("Ray")
    ray.add_argument("--address", default="", help="of a Ray cluster (RAY_ADDRESS; one that runs here; or a new one)")
    ray.add_argument("--resources", default="", metavar="JSON", help='of each worker, such as {"CPU": 2, "rack_a": 1}')
    ray.add_argument("--placement", choices=PLACEMENTS, help="make a placement group of this strategy")
    up.add_argument("program", nargs="*", help="after --: run it with DTORCH_HEAD and DTORCH_API_KEY set")


def _add_offer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", default="cpu:1", help='of each worker, such as "cpu:4" or "cuda:1" (cpu:1)')
    parser.add_argument("--labels", action="append", default=[], metavar="NAME=VALUE", help="facts about the workers")
    parser.add_argument("--allow", action="append", default=[], metavar="MODULE", help="import ops of users from it")
    parser.add_argument("--files", action="append", default=[], metavar="FOLDER", help="let sessions read and write in it")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch, in each worker (1)")


def parse_labels(given: list[str]) -> dict[str, str]:
    """``["rack=a,zone=b", "x=y"]`` -> names and values.

    Raises:
        ValueError: one is no NAME=VALUE.
    """
    labels = {}
    for label in (part for each in given for part in each.split(",")):
        name, equals, value = label.partition("=")
        if not equals or not name:
            raise ValueError(f"--labels takes NAME=VALUE, not {label!r}")
        labels[name] = value
    return labels


def parse_resources(text: str) -> dict[str, float]:
    """JSON of Ray's resources: names and amounts.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = msgspec.json.decode(text, type=dict[str, float])
    except msgspec.MsgspecError as error:
        raise ValueError(f'--resources takes names and amounts as JSON, such as {{"CPU": 2}}, not {text!r}: {error}') from None
    wrong = [name for name, amount in found.items() if not name or not 0 <= amount < float("inf")]
    if wrong:
        raise ValueError(f"--resources takes amounts of at least 0; see {wrong[0]!r}")
    return found


def run_up(chosen: argparse.Namespace) -> int:
    """``dtorch up``."""
    from dtorch.cluster.launchers import up

    if chosen.workers < 1 or chosen.threads < 1:
        raise ValueError("--workers and --threads are at least 1")
    url = chosen.head or ("" if chosen.listen else os.environ.get("DTORCH_HEAD", ""))
    key = chosen.key or os.environ.get("DTORCH_API_KEY", "")
    if url and (chosen.listen or chosen.advertise or chosen.keys or chosen.tls_cert or chosen.tls_key):
        raise ValueError(f"--head {url} is not ours to configure: leave --listen, --advertise, --keys and --tls-... out")
    if url and chosen.program:
        raise ValueError("a program is run with a head of its own; with --head, start the program beside")
    if url and not key:
        raise ValueError(f"workers for {url} need a key: set DTORCH_API_KEY; 'dtorch keys create' on the head makes one")
    if (chosen.tls_cert is None) != (chosen.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if chosen.on != "ray" and (chosen.resources or chosen.placement or chosen.address):
        raise ValueError("--resources, --placement and --address are for --on ray")
    ray = None
    if chosen.on == "ray":
        least = resources_for(chosen.devices)
        ray = RayOptions(chosen.address, parse_resources(chosen.resources) if chosen.resources else least, chosen.placement)
    spec = WorkerSpec(
        chosen.name, url, key if url else "", chosen.devices, parse_labels(chosen.labels), tuple(chosen.allow),
        tuple(chosen.files), chosen.threads, chosen.ca or os.environ.get("DTORCH_CA_FILE", ""),
    )
    return up.main(
        up.Up(
            spec, chosen.workers, ray, chosen.listen, chosen.advertise, chosen.keys, chosen.tls_cert, chosen.tls_key,
            tuple(chosen.program),
        )
    )


# ---- manifest


def add_manifest(commands: Any) -> None:
    """Add ``dtorch manifest``."""
    manifest = commands.add_parser("manifest", help="write what an engine reads to start a cluster: k8s, slurm")
    engines = manifest.add_subparsers(dest="engine", required=True, metavar="engine")
    k8s = engines.add_parser("k8s", help="objects of Kubernetes, for kubectl apply -f -")
    k8s.add_argument("--image", required=True, help="container image with dtorch")
    k8s.add_argument(
        "--secret", default="", metavar="NAME",
        help='a Secret that is there, with "keys.json" and "worker-key"; without, one with new keys is part of the output',
    )
    k8s.add_argument("--namespace", default="", help="(kubectl's)")
    k8s.add_argument("--tls-secret", default="", metavar="NAME", help='a Secret with "tls.crt", "tls.key" and "ca.crt"')
    k8s.add_argument(
        "--service", choices=("ClusterIP", "NodePort", "LoadBalancer"), default="ClusterIP", help="of the head (ClusterIP)"
    )
    k8s.add_argument("--node-selector", action="append", default=[], metavar="NAME=VALUE", help="nodes for the workers")
    slurm = engines.add_parser("slurm", help="a script for sbatch")
    slurm.add_argument("--partition", default="")
    slurm.add_argument("--account", default="")
    slurm.add_argument("--time", default="", help="limit, such as 2:00:00")
    slurm.add_argument("--port", type=int, default=0, help="of the head (by the job's number)")
    slurm.add_argument("--setup", action="append", default=[], metavar="LINE", help="of shell, before all; may be repeated")
    slurm.add_argument("program", nargs="*", help="after --: run it on the first node; the job ends with it")
    for parser in (k8s, slurm):
        parser.add_argument("--name", default="dtorch", help="of it all (dtorch)")
        parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many; with Slurm, nodes (2)")
        parser.add_argument("--memory", default="", help="of each worker, such as 16Gi (Slurm: 16G)")
        _add_offer(parser)


def run_manifest(chosen: argparse.Namespace) -> int:
    """``dtorch manifest``."""
    print(_slurm(chosen) if chosen.engine == "slurm" else _k8s(chosen), end="")
    return 0


def _slurm(chosen: argparse.Namespace) -> str:
    from dtorch.cluster.launchers import slurm

    return slurm.script(
        slurm.Job(
            chosen.name, chosen.workers, chosen.devices, chosen.partition, chosen.account, chosen.time, chosen.memory,
            chosen.port, tuple(chosen.setup), tuple(chosen.program), parse_labels(chosen.labels), tuple(chosen.allow),
            tuple(chosen.files), chosen.threads,
        )
    )


def _k8s(chosen: argparse.Namespace) -> str:
    from dtorch.cluster.launchers import kubernetes

    wanted = kubernetes.Cluster(
        chosen.name, chosen.workers, chosen.devices, chosen.image, chosen.secret or f"{chosen.name}-keys", None,
        chosen.namespace, chosen.tls_secret, chosen.memory, chosen.service, parse_labels(chosen.labels),
        parse_labels(chosen.node_selector), tuple(chosen.allow), tuple(chosen.files), chosen.threads,
    )
    kubernetes.check(wanted)
    if not chosen.secret:
        wanted = replace(wanted, keys=_new_keys(kubernetes.head_url(wanted)))
    try:
        return "---\n".join(msgspec.yaml.encode(each).decode() for each in kubernetes.manifest(wanted))
    except ImportError:
        raise ValueError("YAML is written by PyYAML: pip install pyyaml") from None


def _new_keys(url: str) -> tuple[str, str]:
    """keys.json and a worker's key; a client's key is told on standard error."""
    from dtorch.cluster.keys import KeyFile

    with tempfile.TemporaryDirectory(prefix="dtorch-keys-") as folder:
        file = KeyFile(Path(folder) / "keys.json")
        worker_key, client_key = file.create("pool", "worker")[1], file.create("clients", "client")[1]
        print(f"for clients, shown this once: export DTORCH_HEAD={url} DTORCH_API_KEY={client_key}", file=sys.stderr)
        return file.path.read_text(), worker_key
