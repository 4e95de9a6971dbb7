"""Heads with certificates: only those that are trusted are spoken to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _cluster import PATIENCE_S, Cluster, cluster

import dtorch
from dtorch.session import using
from dtorch.transport.errors import AuthError


def certificate(folder: Path, name: str) -> Path:
    """A self-signed one for 127.0.0.1, NAME.pem, and its key, NAME.key."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / f"{name}.pem"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Cluster]:
    cert = certificate(tmp_path, "head")
    with cluster(tmp_path, tls_cert=cert, tls_key=cert.with_suffix(".key")) as made:
        heard = made.head._vigil._on_sign

        def noted(number: int) -> None:
            heard(number)
            made.news.set()

        made.head._vigil._on_sign = noted
        yield made


def test_a_client_refuses_a_certificate_that_it_does_not_trust_and_takes_one_of_its_authority(
    home: Cluster, tmp_path: Path
) -> None:
    key, other = home.key("ann"), certificate(tmp_path, "other")
    for wrong in (None, other):
        with pytest.raises(AuthError, match=r"certificate of tls:127\.0\.0\.1:\d+ is not trusted here.*ca_file"):
            dtorch.connect(home.head.url, key, ca_file=wrong)
    home.worker("cpu:1", ca_file=str(tmp_path / "head.pem"))
    session = dtorch.connect(home.head.url, key, ca_file=tmp_path / "head.pem")
    with contextlib.ExitStack() as stack:
        stack.callback(dtorch.shutdown)
        with using(session):
            mesh = dtorch.DeviceMesh("cpu", [0])
            assert (dtorch.ones(3, device_mesh=mesh) + 1).sum().item() == 6.0
            data = torch.arange(20 << 20, dtype=torch.int32)
            x = dtorch.Tensor(data, device_mesh=mesh)
            kept, data[:] = data.clone(), 0
            assert torch.equal(x.to_torch(), kept)
    assert not any(event["event"] == "key refused" for event in home.audit())  # no key was ever said


def test_so_do_a_worker_and_what_is_beside_it(home: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dtorch", "worker", "--head", home.head.url, "--devices", "cpu:1", "--ca"]
    env = {**os.environ, "DTORCH_API_KEY": home.worker_key}
    other = str(certificate(tmp_path, "other"))
    refused = subprocess.run([*command, other], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert refused.returncode == 1
    assert "is not trusted here" in refused.stderr
    assert "--ca FILE" in refused.stderr
    assert not home.head.workers
    worker = subprocess.Popen([*command, str(tmp_path / "head.pem")], env=env, stdout=subprocess.DEVNULL)
    try:
        home.until(lambda: any(home.head._vigil._attended[number] for number in home.head.workers))
        worker.kill()
        home.until(lambda: not home.head.workers)
        assert home.audit()[-1]["reason"] == "its process has ended"
    finally:
        worker.kill()
        worker.wait()
