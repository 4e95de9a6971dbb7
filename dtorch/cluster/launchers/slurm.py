"""A batch script of Slurm for a head and its workers. Pure: from what is wanted to the script's text.

The head runs on the first node of the allocation, a worker on each. Keys are made when the job starts, in a folder that only
its user can read, and are gone when it ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from shlex import quote

from dtorch.cluster.launchers.base import NODE
from dtorch.cluster.launchers.kubernetes import parse_device_count

_FORMS = {
    "--name": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
    "--partition": re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]*"),
    "--account": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
    "--time": re.compile(r"(\d+-)?\d+(:\d+){0,2}"),
    "--memory": re.compile(r"\d+[KMGT]?"),
}


@dataclass(frozen=True)
class Job:
    """What is wanted.

    Attributes:
        num_workers: one a node.
        devices: of each worker, one kind: "cpu:4" or "cuda:8".
        time: limit of the job as Slurm writes it, such as "2:00:00"; "" for the partition's.
        memory: of each node, such as "64G"; "" for the partition's.
        port: of the head; 0 takes one by the job's number.
        setup: lines of shell before anything else, such as "module load ..." or "source .../activate".
        command: a program to run with DTORCH_HEAD and DTORCH_API_KEY set; the job ends with it. Without, the cluster runs
            until the job is cancelled, and a file says how to use it.
    """

    name: str
    num_workers: int
    devices: str
    partition: str = ""
    account: str = ""
    time: str = ""
    memory: str = ""
    port: int = 0
    setup: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    num_threads: int = 1


def check(wanted: Job) -> None:
    """Raises ValueError: a name or an amount is not what Slurm takes."""
    values = {
        "--name": wanted.name, "--partition": wanted.partition, "--account": wanted.account, "--time": wanted.time,
        "--memory": wanted.memory,
    }
    for option, value in values.items():
        if (value or option == "--name") and not _FORMS[option].fullmatch(value):
            raise ValueError(f"{option} {value!r}: Slurm takes {_FORMS[option].pattern}")
    if wanted.num_workers < 1 or wanted.num_threads < 1:
        raise ValueError("--workers and --threads are at least 1")
    if not 0 <= wanted.port < 65536:
        raise ValueError(f"--port is 0 to 65535, not {wanted.port}")
    parse_device_count(wanted.devices)
    words = (*wanted.setup, *wanted.command, *wanted.allow, *wanted.folders, *wanted.labels, *wanted.labels.values())
    if any("\0" in word for word in words):
        raise ValueError("words of a shell hold no NUL")


def options(wanted: Job) -> list[str]:
    """Of sbatch."""
    kind, count = parse_device_count(wanted.devices)
    num_cpus = max(count, wanted.num_threads) if kind == "cpu" else count * wanted.num_threads
    found = [
        f"--job-name={wanted.name}", f"--nodes={wanted.num_workers}", "--ntasks-per-node=1", f"--cpus-per-task={num_cpus}",
    ]
    found += [f"--gpus-per-node={count}"] if kind == "cuda" else []
    given = [("partition", wanted.partition), ("account", wanted.account), ("time", wanted.time), ("mem", wanted.memory)]
    return found + [f"--{name}={value}" for name, value in given if value] + [f"--output={wanted.name}-%j.log"]


def script(wanted: Job) -> str:
    """The script's text.

    Raises:
        ValueError: as of ``check``.
    """
    check(wanted)
    kind, count = parse_device_count(wanted.devices)
    offer = ["--devices", wanted.devices, "--threads", str(wanted.num_threads)]
    for name, value in wanted.labels.items():
        offer += ["--labels", f"{name}={value}"]
    for module in wanted.allow:
        offer += ["--allow", module]
    for folder in wanted.folders:
        offer += ["--files", folder]
    parts = {
        "@OPTIONS@": "\n".join(f"#SBATCH {option}" for option in options(wanted)),
        "@SETUP@": "".join(line + "\n" for line in wanted.setup),
        "@PORT@": str(wanted.port) if wanted.port else "$((20000 + SLURM_JOB_ID % 20000))",
        "@WORKERS@": str(wanted.num_workers),
        "@DEVICES@": f"{kind} {count * wanted.num_workers}",
        "@NODE@": NODE,
        "@OFFER@": " ".join(map(quote, offer)),
        "@USE@": _USE.replace("@COMMAND@", " ".join(map(quote, wanted.command))) if wanted.command else _HOLD,
    }
    # One pass, so that nothing that a user gives is taken for a mark.
    return re.sub(r"@[A-Z]+@", lambda mark: parts[mark[0]], _SCRIPT)


_SCRIPT = """\
#!/bin/bash
@OPTIONS@
#
# A dtorch cluster: sbatch THIS_FILE. The head runs on the first node, a worker on each.
set -euo pipefail
@SETUP@
umask 077
folder="${SLURM_SUBMIT_DIR:-$PWD}/.dtorch-$SLURM_JOB_ID"
mkdir -p "$folder"
trap 'rm -rf "$folder"; kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'exit 143' TERM INT

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\\n'*}
port=@PORT@
export DTORCH_HEAD="ws://$head_node:$port"
worker_key=$(dtorch keys create "job-$SLURM_JOB_ID" --role worker --keys "$folder/keys.json")
client_key=$(dtorch keys create "job-$SLURM_JOB_ID" --role client --keys "$folder/keys.json")

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head_node" \\
    dtorch head --listen "0.0.0.0:$port" --keys "$folder/keys.json" &
head=$!

# A worker that dies is started anew; one that leaves, as after "dtorch drain", is not.
export DTORCH_API_KEY="$worker_key"
srun --overlap --nodes=@WORKERS@ --ntasks=@WORKERS@ --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c '
    until dtorch worker --name "$SLURMD_NODENAME" --labels "@NODE@=$SLURMD_NODENAME" "$@"; do sleep 2; done
' worker @OFFER@ &

export DTORCH_API_KEY="$client_key"
until python3 - @DEVICES@ <<'PYTHON'
import json, os, sys, urllib.request
url = os.environ["DTORCH_HEAD"].replace("ws", "http", 1) + "/v1/status"
asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + os.environ["DTORCH_API_KEY"]})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    sys.exit(json.load(opener.open(asked, timeout=5))["devices"].get(sys.argv[1], 0) < int(sys.argv[2]))
except OSError:
    sys.exit(1)
PYTHON
do
    kill -0 "$head" 2>/dev/null || { echo "the head has ended" >&2; exit 1; }
    sleep 1
done

@USE@"""

_USE = """\
# The program runs on this node, which is the first.
status=0
@COMMAND@ || status=$?
exit "$status"
"""

_HOLD = """\
printf 'export DTORCH_HEAD=%s DTORCH_API_KEY=%s\\n' "$DTORCH_HEAD" "$client_key" > "$folder/use.sh"
echo "the cluster is up: source $folder/use.sh"
wait "$head"
"""
