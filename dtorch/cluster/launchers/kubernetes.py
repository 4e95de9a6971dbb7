"""Objects of Kubernetes for a head and its workers. Pure: from what is wanted to plain data, as the API's YAML has it.

    Secret        keys.json (hashes, for the head) and worker-key; made here, or one that is there already
    Service       NAME-head, where clients and workers find the head
    Deployment    NAME-head, one pod
    Service       NAME-worker, headless: gives each worker's pod a name
    StatefulSet   NAME-worker, a pod for each worker, started anew by Kubernetes
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dtorch.cluster.launchers.base import NODE

HEAD_PORT, HEALTH_PORT = 7474, 7475
KEYS_PATH = "/etc/dtorch/keys"
TLS_PATH = "/etc/dtorch/tls"
MAX_NAME = 40  # room for what is put behind, within 63
USER = 10001  # nobody's in particular

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")

Object = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """What is wanted.

    Attributes:
        name: of it all; a DNS label.
        devices: of each worker, one kind: "cpu:4" or "cuda:8".
        image: with dtorch installed.
        secret: name of a Secret with "keys.json" and "worker-key"; made by the manifest from ``keys`` where these are given.
        keys: content of keys.json, and the worker's key.
        tls_secret: name of a Secret with "tls.crt", "tls.key" and "ca.crt", for NAME-head; "" for none.
        memory: of each worker, as Kubernetes writes it, such as "16Gi"; "" leaves it open.
        service: type of the head's service.
        node_selector: labels of nodes where workers may be.
    """

    name: str
    num_workers: int
    devices: str
    image: str
    secret: str
    keys: tuple[str, str] | None = None
    namespace: str = ""
    tls_secret: str = ""
    memory: str = ""
    service: str = "ClusterIP"
    labels: dict[str, str] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    num_threads: int = 1


def parse_device_count(devices: str) -> tuple[str, int]:
    """``"cuda:8"`` -> ``("cuda", 8)``.

    Raises:
        ValueError: it is not one kind and a number; what "all" is can only be said where a worker runs.
    """
    kind, _, count = devices.partition(":")
    if kind not in ("cpu", "cuda") or not count.isdecimal() or not 0 < int(count) <= 4096:
        raise ValueError(f'a manifest takes devices of one kind and number, such as "cuda:8", not {devices!r}')
    return kind, int(count)


def check(wanted: Cluster) -> None:
    """Raises ValueError: a name or an amount is not what Kubernetes takes."""
    names = [("--name", wanted.name, _LABEL, MAX_NAME), ("--secret", wanted.secret, _SUBDOMAIN, 253)]
    names += [("--namespace", wanted.namespace, _LABEL, 63), ("--tls-secret", wanted.tls_secret, _SUBDOMAIN, 253)]
    names += [("--memory", wanted.memory, _QUANTITY, 30), ("--image", wanted.image, _IMAGE, 500)]
    for option, value, form, length in names:
        if option in ("--name", "--secret", "--image") or value:
            _check(option, value, form, length)
    if wanted.num_workers < 1 or wanted.num_threads < 1:
        raise ValueError("--workers and --threads are at least 1")
    if any("," in text for pair in wanted.labels.items() for text in pair):
        raise ValueError("labels hold no commas")
    parse_device_count(wanted.devices)


def _check(option: str, value: str, form: re.Pattern[str], length: int) -> None:
    if not form.fullmatch(value) or len(value) > length:
        raise ValueError(f"{option} {value!r}: Kubernetes takes {form.pattern}, at most {length} characters")


def manifest(wanted: Cluster) -> list[Object]:
    """The objects, in the order in which they are applied.

    Raises:
        ValueError: as of ``check``.
    """
    check(wanted)
    made = [] if wanted.keys is None else [_secret(wanted, *wanted.keys)]
    return [*made, _head_service(wanted), _head(wanted), _worker_service(wanted), _workers(wanted)]


def head_url(wanted: Cluster) -> str:
    """Where the head is for pods of its namespace."""
    return f"{'wss' if wanted.tls_secret else 'ws'}://{wanted.name}-head:{HEAD_PORT}"


def _meta(wanted: Cluster, role: str) -> Object:
    namespace = {"namespace": wanted.namespace} if wanted.namespace else {}
    return {"name": f"{wanted.name}-{role}", **namespace, "labels": _labels(wanted, role)}


def _labels(wanted: Cluster, role: str) -> Object:
    return {
        "app.kubernetes.io/name": "dtorch", "app.kubernetes.io/instance": wanted.name, "app.kubernetes.io/component": role,
    }


def _secret(wanted: Cluster, keys: str, worker_key: str) -> Object:
    meta = {**_meta(wanted, "keys"), "name": wanted.secret}
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque",
        "stringData": {"keys.json": keys, "worker-key": worker_key},
    }


def _head_service(wanted: Cluster) -> Object:
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": _meta(wanted, "head"),
        "spec": {
            "type": wanted.service, "selector": _labels(wanted, "head"),
            "ports": [{"name": "head", "port": HEAD_PORT, "targetPort": "head"}],
        },
    }


def _worker_service(wanted: Cluster) -> Object:
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": _meta(wanted, "worker"),
        "spec": {
            "clusterIP": "None", "selector": _labels(wanted, "worker"), "publishNotReadyAddresses": True,
            "ports": [{"name": "health", "port": HEALTH_PORT, "targetPort": "health"}],
        },
    }


def _head(wanted: Cluster) -> Object:
    arguments = ["head", "--listen", f"0.0.0.0:{HEAD_PORT}", "--keys", f"{KEYS_PATH}/keys.json"]
    volumes = [_from_secret("keys", wanted.secret, ["keys.json"])]
    if wanted.tls_secret:
        arguments += ["--tls-cert", f"{TLS_PATH}/tls.crt", "--tls-key", f"{TLS_PATH}/tls.key"]
        volumes.append(_from_secret("tls", wanted.tls_secret, ["tls.crt", "tls.key"]))
    probe = {"httpGet": {"path": "/healthz", "port": "head", "scheme": "HTTPS" if wanted.tls_secret else "HTTP"}}
    container = {
        **_container("head", wanted.image, arguments),
        "ports": [{"name": "head", "containerPort": HEAD_PORT}],
        **_probes(probe, probe),
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [_mount("keys", KEYS_PATH), *([_mount("tls", TLS_PATH)] if wanted.tls_secret else []), *_MOUNTS],
    }
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": _meta(wanted, "head"),
        "spec": {
            "replicas": 1, "strategy": {"type": "Recreate"}, "selector": {"matchLabels": _labels(wanted, "head")},
            "template": _pod(wanted, "head", container, volumes, {}),
        },
    }


def _workers(wanted: Cluster) -> Object:
    kind, count = parse_device_count(wanted.devices)
    arguments = [
        "worker", "--devices", wanted.devices, "--name", "$(POD_NAME)", "--address", "$(POD_IP)",
        "--labels", f"{NODE}=$(NODE_NAME)", "--health", f"0.0.0.0:{HEALTH_PORT}", "--threads", str(wanted.num_threads),
    ]
    for name, value in wanted.labels.items():
        arguments += ["--labels", literal(f"{name}={value}")]
    for module in wanted.allow:
        arguments += ["--allow", literal(module)]
    for folder in wanted.folders:
        arguments += ["--files", literal(folder)]
    environment = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"), ("NODE_NAME", "spec.nodeName"))
    ]
    key = {"name": wanted.secret, "key": "worker-key"}
    environment += [
        {"name": "DTORCH_HEAD", "value": head_url(wanted)},
        {"name": "DTORCH_API_KEY", "valueFrom": {"secretKeyRef": key}},
    ]
    volumes: list[Object] = []
    if wanted.tls_secret:
        environment.append({"name": "DTORCH_CA_FILE", "value": f"{TLS_PATH}/ca.crt"})
        volumes.append(_from_secret("tls", wanted.tls_secret, ["ca.crt"]))
    limits: Object = {"nvidia.com/gpu": str(count)} if kind == "cuda" else {}
    requests: Object = {"cpu": str(max(count, wanted.num_threads) if kind == "cpu" else count)}
    if wanted.memory:
        limits["memory"] = requests["memory"] = wanted.memory
    container = {
        **_container("worker", wanted.image, arguments),
        "env": [*_ENVIRONMENT, *environment],
        "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
        **_probes(
            {"httpGet": {"path": "/healthz", "port": "health"}}, {"httpGet": {"path": "/readyz", "port": "health"}}
        ),
        "resources": {"requests": requests, **({"limits": limits} if limits else {})},
        "volumeMounts": [*([_mount("tls", TLS_PATH)] if wanted.tls_secret else []), *_MOUNTS],
    }
    selector = {"nodeSelector": dict(wanted.node_selector)} if wanted.node_selector else {}
    return {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": _meta(wanted, "worker"),
        "spec": {
            "serviceName": f"{wanted.name}-worker", "replicas": wanted.num_workers, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(wanted, "worker")},
            "template": _pod(wanted, "worker", container, volumes, selector),
        },
    }


def literal(text: str) -> str:
    """Text that Kubernetes passes on as it is: it puts variables in place of ``$(NAME)``, and ``$`` in place of ``$$``."""
    return text.replace("$", "$$")


# ---- what pods have in common

_ENVIRONMENT = [{"name": "HOME", "value": "/tmp"}]
_MOUNTS = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]


def _container(name: str, image: str, arguments: list[str]) -> Object:
    safe = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    return {
        "name": name, "image": image, "command": ["dtorch"], "args": arguments, "env": list(_ENVIRONMENT),
        "securityContext": safe,
    }


def _probes(alive: Object, ready: Object) -> Object:
    """torch takes a while to load, so the start has its own patience: 150 s."""
    return {
        "startupProbe": {**alive, "periodSeconds": 5, "failureThreshold": 30},
        "livenessProbe": {**alive, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {**ready, "periodSeconds": 5, "timeoutSeconds": 5},
    }


def _pod(wanted: Cluster, role: str, container: Object, volumes: list[Object], more: Object) -> Object:
    shared = [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {
        "metadata": {"labels": _labels(wanted, role)},
        "spec": {
            **more,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # its variables begin with the service's name, as ours do
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": 30,
            "containers": [container],
            "volumes": [*volumes, *shared],
        },
    }


def _from_secret(name: str, secret: str, keys: list[str]) -> Object:
    return {
        "name": name,
        "secret": {"secretName": secret, "defaultMode": 0o440, "items": [{"key": key, "path": key} for key in keys]},
    }


def _mount(name: str, path: str) -> Object:
    return {"name": name, "mountPath": path, "readOnly": True}
