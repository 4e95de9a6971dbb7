"""What ``dtorch manifest`` writes: against the schemas of Kubernetes, and as Slurm's shell would run it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import msgspec.yaml
import pytest
import yaml

from dtorch.cli import main
from dtorch.cluster.keys import KeyFile
from dtorch.cluster.launchers import kubernetes, slurm

K8S_VERSIONS = ("1.29", kubernetes_validate.latest_version())


def k8s(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["manifest", "k8s", "--image", "registry.example/dtorch:1", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def by_kind(objects: list[dict[str, Any]], kind: str, role: str) -> dict[str, Any]:
    (found,) = [
        each for each in objects
        if each["kind"] == kind and each["metadata"]["labels"]["app.kubernetes.io/component"] == role
    ]
    return found


@pytest.mark.parametrize("version", K8S_VERSIONS)
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--devices", "cuda:8", "--workers", "16", "--memory", "64Gi", "--namespace", "ml", "--service", "LoadBalancer"),
        ("--secret", "mine", "--tls-secret", "tls", "--labels", "rack=a,zone=$(POD_IP)", "--node-selector", "pool=gpu"),
        ("--name", "a-b", "--allow", "ops.mine", "--files", "/data/with space", "--threads", "4", "--devices", "cpu:2"),
    ],
    ids=" ".join,
)
def test_objects_fit_the_schemas_of_kubernetes(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], version: str
) -> None:
    objects = k8s(capsys, *words)
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    kinds = [each["kind"] for each in objects]
    assert kinds == [*([] if "--secret" in words else ["Secret"]), "Service", "Deployment", "Service", "StatefulSet"]
    for kind, role in (("Deployment", "head"), ("StatefulSet", "worker")):
        spec = by_kind(objects, kind, role)["spec"]
        wanted = spec["selector"]["matchLabels"].items()
        assert wanted <= spec["template"]["metadata"]["labels"].items()
        service = by_kind(objects, "Service", role)
        assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    workers = by_kind(objects, "StatefulSet", "worker")
    assert workers["spec"]["serviceName"] == by_kind(objects, "Service", "worker")["metadata"]["name"]
    assert by_kind(objects, "Service", "worker")["spec"]["clusterIP"] == "None"


def test_a_schema_that_is_not_met_is_noticed() -> None:
    wanted = kubernetes.Cluster("x", 2, "cpu:1", "image", "keys")
    broken = kubernetes.manifest(wanted)[-1]
    broken["spec"]["replicas"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, K8S_VERSIONS[-1], strict=True)


def test_workers_of_kubernetes_get_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    objects = k8s(
        capsys, "--secret", "mine", "--tls-secret", "tls", "--devices", "cuda:4", "--labels", "odd=$(POD_IP)",
        "--workers", "3",
    )
    spec = by_kind(objects, "StatefulSet", "worker")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {each["name"]: each for each in container["env"]}
    assert spec["replicas"] == 3
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert environment["DTORCH_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "worker-key"}
    assert environment["DTORCH_HEAD"]["value"] == "wss://dtorch-head:7474"
    assert environment["DTORCH_CA_FILE"]["value"] == "/etc/dtorch/tls/ca.crt"
    assert "odd=$$(POD_IP)" in container["args"]  # Kubernetes makes it $(POD_IP) again
    head = by_kind(objects, "Deployment", "head")["spec"]["template"]["spec"]["containers"][0]
    assert head["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "head", "scheme": "HTTPS"}


def test_new_keys_are_in_the_secret_as_hashes_and_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", "k8s", "--image", "x"]) == 0
    out, err = capsys.readouterr()
    secret = next(iter(yaml.safe_load_all(out)))
    (tmp_path / "keys.json").write_text(secret["stringData"]["keys.json"])
    file = KeyFile(tmp_path / "keys.json")
    client_key = err.rpartition("DTORCH_API_KEY=")[2].strip()
    assert file.verify(secret["stringData"]["worker-key"]).role == "worker"
    assert file.verify(client_key).role == "client"
    assert client_key not in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("k8s", "--image", "x", "--name", "Big"), "--name 'Big'"),
        (("k8s", "--image", "x", "--name", "a\nkind: Pod"), "--name"),
        (("k8s", "--image", "x y"), "--image"),
        (("k8s", "--image", "x", "--secret", "a_b"), "--secret 'a_b'"),
        (("k8s", "--image", "x", "--namespace", "a.b"), "--namespace"),
        (("k8s", "--image", "x", "--memory", "lots"), "--memory 'lots'"),
        (("k8s", "--image", "x", "--devices", "cuda:all"), "one kind and number"),
        (("k8s", "--image", "x", "--workers", "0"), "at least 1"),
        (("k8s", "--image", "x", "--labels", "nothing"), "NAME=VALUE"),
        (("slurm", "--name", "a b"), "--name 'a b'"),
        (("slurm", "--partition", "x\n#SBATCH --uid=0"), "--partition"),
        (("slurm", "--time", "soon"), "--time 'soon'"),
        (("slurm", "--devices", "cpu:1,cuda:1"), "one kind and number"),
        (("slurm", "--port", "70000"), "--port"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, tuple) else "",
)
def test_what_an_engine_would_not_take_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    assert main(["manifest", *words]) == 1
    out, err = capsys.readouterr()
    assert text in err
    assert out == ""


# ---- Slurm

SBATCH_OPTIONS = {
    "job-name": r"\S+", "nodes": r"\d+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+", "gpus-per-node": r"\d+",
    "partition": r"\S+", "account": r"\S+", "time": r"[\d:-]+", "mem": r"\d+[KMGT]?", "output": r"\S+",
}
"""Of ``man sbatch``, with what their values look like."""

NASTY = "it's $(touch /tmp/nasty) `x` \\ \"q\" @USE@"


@pytest.mark.parametrize("command", [(), ("python", "-c", NASTY)], ids=["held", "program"])
def test_scripts_of_slurm_parse(command: tuple[str, ...]) -> None:
    text = slurm.script(
        slurm.Job(
            "job", 3, "cuda:8", "gpu,big", "acme", "1-12:00:00", "64G", setup=("module load torch",), command=command,
            labels={"odd": NASTY}, folders=(NASTY,), num_threads=2,
        )
    )
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(options)] == options  # sbatch reads none after the first command
    found = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in options)
    for name, value in found.items():
        assert re.fullmatch(SBATCH_OPTIONS[name], value), name
    assert found["cpus-per-task"] == "16"
    assert found["gpus-per-node"] == "8"
    assert lines.index("module load torch") > lines.index(options[-1])
    assert shlex.quote(f"odd={NASTY}") in text
    if command:
        assert shlex.join(command) in text


STAND_INS = {
    # Runs a step here, once for each task, as if on hosts of its own; tasks hear of the job's end.
    "srun": """\
import os, signal, subprocess, sys
words, options = sys.argv[1:], {}
while words[0].startswith("--"):
    name, _, value = words.pop(0)[2:].partition("=")
    options[name] = value
nodes = os.environ["STAND_IN_NODES"].split(",")
chosen = [options["nodelist"]] if "nodelist" in options else nodes[: int(options["nodes"])]
assert len(chosen) == int(options["ntasks"]), (chosen, options)
steps = [
    subprocess.Popen(words, env={**os.environ, "SLURMD_NODENAME": node}, start_new_session=True, stdin=subprocess.DEVNULL)
    for node in chosen
]
def end(*_):
    for step in steps:
        os.killpg(step.pid, signal.SIGTERM)
signal.signal(signal.SIGTERM, end)
sys.exit(max(step.wait() for step in steps))
""",
    "scontrol": """\
import os, sys
assert sys.argv[1:] == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
print(os.environ["STAND_IN_NODES"].replace(",", chr(10)))
""",
    "dtorch": "import sys\nfrom dtorch.cli import main\nsys.exit(main())\n",
}


def test_a_script_of_slurm_makes_a_cluster_and_runs_the_program(tmp_path: Path) -> None:
    """With stand-ins for srun and scontrol, and two names of this machine for nodes."""
    program = (
        "import torch, dtorch\n"
        "x = dtorch.Tensor(torch.arange(12.0).reshape(4, 3), device_mesh=dtorch.DeviceMesh('cpu', [0, 1]),\n"
        "                  placements=[dtorch.Shard(0)])\n"
        "print((x.T @ x).to_torch().sum().item(), len(dtorch.statistics().workers), flush=True)\n"
        "dtorch.shutdown()\n"
        "raise SystemExit(7)\n"
    )
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, source in STAND_INS.items():
        (binaries / name).write_text(f"#!{sys.executable}\n{source}")
        (binaries / name).chmod(0o755)
    (binaries / "python").symlink_to(sys.executable)
    port = free_port()
    text = slurm.script(
        slurm.Job("job", 2, "cpu:1", port=port, command=(sys.executable, "-c", program), labels={"odd": NASTY})
    )
    (tmp_path / "job.sh").write_text(text)
    environment = {
        **os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node[1-2]", "STAND_IN_NODES": "localhost,127.0.0.1",
    }
    ran = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=240,
        check=False,
    )
    assert ran.returncode == 7, ran.stderr
    assert "1494.0 2" in ran.stdout
    assert not (tmp_path / ".dtorch-41").exists()  # keys are gone with the job


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_json_is_yaml_too() -> None:
    """The objects are plain data: nothing that only one of the two can say."""
    objects = kubernetes.manifest(kubernetes.Cluster("x", 2, "cpu:1", "image", "keys"))
    assert [msgspec.yaml.decode(msgspec.yaml.encode(each)) for each in objects] == json.loads(json.dumps(objects))
