"""What a head shows: metrics, JSON, the command, and its page in a headless browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _browser import BROWSER, browse, browser, save
from _cluster import Cluster, cluster
from prometheus_client.parser import text_string_to_metric_families

import dtorch
from dtorch.cli import main
from dtorch.session import Session, using


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("sight")
    with cluster(folder, "cpu:2", "cpu:1", usage=folder / "usage.jsonl") as made:
        yield made


@pytest.fixture(scope="module")
def admin(home: Cluster) -> str:
    return home.key("root", "admin")


@pytest.fixture
def session(home: Cluster) -> Iterator[Session]:
    with home.client("ann", "laptop") as made:
        yield made


def get(home: Cluster, path: str, key: str = "") -> tuple[int, str]:
    _, _, address = home.head.url.partition("://")
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def told(home: Cluster, path: str, key: str) -> Any:
    status, body = get(home, path, key)
    assert status == 200, body
    return json.loads(body)


def report(home: Cluster) -> None:
    """Let every worker report now, and wait until the head has heard it."""
    for worker in home.workers:
        number = worker._number
        if number not in home.head.workers:
            continue
        before = home.do(lambda n=number: home.head.workers[n].link.received)  # type: ignore[misc]
        home.do(worker.report)
        home.run(_received(home, number, before))


async def _received(home: Cluster, number: int, before: int) -> None:
    await until(lambda: home.head.workers[number].link.received > before)


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop go round until something is so."""
    while not is_so():  # noqa: ASYNC110  (what is waited for has no event; each round takes in what has come)
        await asyncio.sleep(0)


def work(num_steps: int = 5) -> None:
    """Gathers 4000 bytes to two other devices a step."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])
    x = dtorch.Tensor(torch.ones(3000), device_mesh=mesh, placements=[dtorch.Shard(0)])
    for _ in range(num_steps):
        y = (x + 1).redistribute(placements=[dtorch.Replicate()])
        assert y.sum().item() == 6000.0


def test_device_time_adds_up_to_what_workers_were_busy(home: Cluster) -> None:
    sessions = [home.session(home.key(name)) for name in ("left", "right")]
    for _ in range(2):
        for each in sessions:
            with using(each):
                x = dtorch.Tensor(torch.ones(200, 200), device_mesh=dtorch.DeviceMesh("cpu", [0, 1, 2]))
                for _ in range(50):
                    x = (x @ x).clamp(-1, 1)
                assert x.sum().item() > 0
    numbers = [each.number for each in sessions]
    for each in sessions:
        each.close()
    home.until(lambda: not home.head.sessions)
    home.run(_settled(home, numbers))
    meter = home.head.meter
    billed = meter.ledger.sum().device_s
    busy = sum(worker._turns.occupied_ns() for worker in home.workers) * 1e-9
    assert billed == pytest.approx(busy, rel=0.01)
    assert meter.busy_s == pytest.approx(busy, rel=0.01)
    for number in numbers:
        used = meter.ledger.sessions[number].totals
        assert used.ops["torch.matmul"] == 100  # once a call, not once a worker
        assert used.ops["torch.clamp"] == 100
        assert used.device_s > 0


async def _settled(home: Cluster, numbers: list[int]) -> None:
    """Until the workers have told the last of these sessions."""
    await until(lambda: not any(home.head.meter.ledger.sessions[number].reporting for number in numbers))


def test_bytes_that_are_held_and_that_move(home: Cluster, session: Session) -> None:
    data = torch.ones(1000, 1000)
    x = dtorch.Tensor(data, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]), placements=[dtorch.Shard(0)])
    small = dtorch.Tensor(torch.ones(10), device_mesh=x.device_mesh, placements=[dtorch.Replicate()])
    assert torch.equal(x.to_torch(), data)
    assert small.sum().item() == 10.0
    report(home)
    entry = home.head.meter.ledger.sessions[session.number]
    assert entry.totals.uploaded_bytes == 4_000_000 + 40
    assert entry.totals.fetched_bytes >= 4_000_000
    assert 4_000_000 <= entry.held_bytes < 4_010_000
    del x
    dtorch.synchronize()
    report(home)  # which asks the session's thread to count anew, where it has not since its last batch
    dtorch.synchronize()
    report(home)
    assert entry.held_bytes < 10_000
    assert entry.totals.byte_s > 0


def test_compiled_functions_count_what_is_inside(home: Cluster, session: Session) -> None:
    x = dtorch.Tensor(torch.ones(4), device_mesh=dtorch.DeviceMesh("cpu", [0]))
    run = dtorch.compile(lambda t: (t + 1) * 2)
    for _ in range(3):
        assert run(x).sum().item() == 16.0
    report(home)
    ops = home.head.meter.ledger.sessions[session.number].totals.ops
    assert ops["torch.add"] == ops["torch.mul"] == ops["torch.sum"] == 3


def test_metrics_for_prometheus(home: Cluster, session: Session, admin: str) -> None:
    work()
    odd = home.session(home.key('o"dd\\name'))
    report(home)
    status, text = get(home, "/metrics", admin)
    assert status == 200
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert set(sample.labels) <= {"tenant", "worker", "le"}
            samples[sample.name, tuple(sample.labels.values())] = sample.value
    assert samples["dtorch_worker_up", ("worker-1",)] == 1.0
    assert samples["dtorch_device_seconds_total", ("ann",)] > 0
    assert samples["dtorch_ops_total", ("ann",)] >= 15
    assert samples["dtorch_exchanged_bytes_total", ("ann",)] >= 5 * 2 * 12_000
    assert samples["dtorch_device_seconds_total", ('o"dd\\name',)] == 0.0
    assert samples["dtorch_sessions", ()] == 2.0
    assert samples["dtorch_recomputed_ops_total", ()] == 0.0
    assert samples["dtorch_failure_detection_seconds_count", ()] == 0.0
    odd.close()


def test_who_may_see_what(home: Cluster, session: Session, admin: str, tmp_path: Path) -> None:
    work(1)
    ben = home.key("ben")
    for path in ("/metrics", "/api/v1/overview", "/api/v1/devices", "/api/v1/failures"):
        assert get(home, path)[0] == 401
        assert get(home, path, ben)[0] == 403
        assert get(home, path, admin)[0] == 200
    for name in ("ops", "sessions", "usage"):
        assert get(home, f"/api/v1/{name}")[0] == 401
        assert get(home, f"/api/v1/{name}", home.worker_key)[0] == 403
    assert told(home, "/api/v1/sessions", ben) == told(home, "/api/v1/usage", ben) == []
    assert told(home, "/api/v1/ops", ben) == {"calls": [], "traffic": []}
    assert {each["tenant"] for each in told(home, "/api/v1/usage", home.key("ann"))} == {"ann"}
    assert {each["tenant"] for each in told(home, "/api/v1/usage", admin)} >= {"ann"}
    assert get(home, "/")[0] == 200  # it holds nothing of anybody
    with cluster(tmp_path, open_metrics=True) as other:
        assert get(other, "/metrics")[0] == 200
        assert get(other, "/api/v1/overview")[0] == 401


def test_the_api_tells_devices_sessions_ops_and_failures(home: Cluster, session: Session, admin: str) -> None:
    work()
    index = dtorch.Tensor(torch.tensor([9]), device_mesh=dtorch.DeviceMesh("cpu", [0]))
    with pytest.raises(IndexError):
        dtorch.zeros(3, device_mesh=index.device_mesh)[index].to_torch()
    report(home)
    devices = told(home, "/api/v1/devices", admin)
    assert [f"{d['worker']} {d['device']}" for d in devices] == ["worker-1 cpu:0", "worker-1 cpu:1", "worker-2 cpu:0"]
    assert all(d["state"] == "up" and d["sessions"] == [session.number] and d["capacity_bytes"] > 1e9 for d in devices)
    (mine,) = told(home, "/api/v1/sessions", admin)
    assert (mine["tenant"], mine["name"], mine["devices"], mine["state"]) == ("ann", "laptop", 3, "connected")
    ops = told(home, "/api/v1/ops", admin)
    assert {"torch.add", "torch.sum"} <= {each["op"] for each in ops["calls"]}
    (line,) = ops["traffic"]
    assert line["where"].startswith("test_sight.py:")
    assert line["num_calls"] == 5
    assert line["sent_bytes"] == 5 * 2 * 12_000  # each device's third to the two others
    assert line["hint"].startswith("gathers ")
    assert line["hint"].endswith(" kB per step here")
    failure = told(home, "/api/v1/failures", admin)[0]
    assert (failure["kind"], failure["tenant"]) == ("op", "ann")
    assert "IndexError" in failure["text"]
    overview = told(home, "/api/v1/overview", admin)
    assert (overview["num_workers"], overview["num_sessions"]) == (2, 1)


def test_the_command_shows_what_was_used(home: Cluster, admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = home.session(home.key("carl"), "desk")
    with using(done):
        work(1)
    done.close()
    home.until(lambda: done.number not in home.head.sessions)
    home.run(_settled(home, [done.number]))
    asking = ["--head", home.head.url, "--key", admin]
    assert main(["usage", "--tenant", "carl", *asking]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["tenant", "device"]
    assert row.split()[0] == "carl"
    assert main(["usage", "--sessions", "--tenant", "carl", "--json", *asking]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["number"], facts["name"]) == (done.number, "desk")
    assert facts["closed"] >= facts["opened"]
    home.do(home.head.meter.write)
    lines = [json.loads(line) for line in (home.folder / "usage.jsonl").read_text().splitlines()]
    assert sum(line["used"]["device_s"] for line in lines if line["tenant"] == "carl") == facts["device_seconds"]


def test_a_lost_worker_is_a_failure_with_its_time(tmp_path: Path) -> None:
    with cluster(tmp_path, "cpu:1", "cpu:1", worker_grace_s=0.05) as home:
        admin = home.key("root", "admin")
        worker = home.workers[0]

        def vanish() -> None:
            worker._stopped = True  # it does not join again
            link = worker._link
            assert link is not None
            link._dial = None
            link._link.abort()

        home.do(vanish)
        home.until(lambda: len(home.head.workers) == 1)
        (failure,) = told(home, "/api/v1/failures", admin)
        assert (failure["kind"], failure["worker"]) == ("worker", "worker-1")
        assert failure["silent_s"] >= 0
        text = get(home, "/metrics", admin)[1]
        assert 'dtorch_worker_up{worker="worker-1"} 0.0' in text
        assert "dtorch_failure_detection_seconds_count 1.0" in text
        assert "dtorch_workers_lost_total 1.0" in text


# ---- the page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_dashboard_in_a_browser(tmp_path: Path) -> None:
    with cluster(tmp_path, "cpu:2", "cpu:1") as home, browser(tmp_path / "profile") as devtools:
        session, admin = home.session(home.key("ann"), "laptop"), home.key("root", "admin")
        with using(session):
            _browse(home, admin, devtools)
        session.close()


def _browse(home: Cluster, admin: str, devtools: str) -> None:
    work()
    evil = home.session(home.key("<b>mallory</b>"), "<img src=x onerror=document.title='owned'>")
    index = dtorch.Tensor(torch.tensor([9]), device_mesh=dtorch.DeviceMesh("cpu", [0]))
    with pytest.raises(IndexError):
        dtorch.zeros(3, device_mesh=index.device_mesh)[index].to_torch()
    report(home)
    for _ in range(3):  # two rates make a line, and each lies between two ticks; the head's own may not have come yet
        home.do(home.head.meter.tick)
    asyncio.run(look(home, admin, evil, devtools))


async def look(home: Cluster, admin: str, evil: Session, devtools: str) -> None:
    url = home.head.url.replace("ws://", "http://")
    enter = "document.getElementById('key').value = '{}'; document.getElementById('form').requestSubmit()"
    async with browse(devtools, url) as page:
        await page.until("!document.getElementById('login').classList.contains('hidden')")
        await page.run(enter.format("wrong"))
        await page.until("document.getElementById('fault').innerText.includes('not known')")
        await page.run(enter.format(admin))
        await page.until("!document.getElementById('page').classList.contains('hidden')")
        assert await page.text("n-workers") == "2"
        assert await page.text("n-sessions") == "2"
        assert "worker-2" in await page.text("devices")
        sessions = await page.text("sessions")
        assert "laptop" in sessions
        assert "<img src=x" in sessions  # as text
        assert await page.run("document.title") == "dtorch head"
        traffic = await page.text("traffic")
        assert "test_sight.py:" in traffic
        assert "per step here" in traffic
        assert "torch.add" in await page.text("ops")
        assert "IndexError" in await page.text("failures")
        assert await page.run("document.querySelectorAll('#plot polyline').length") == 1
        assert await page.run("sessionStorage.getItem('dtorch-key')") == admin
        assert admin not in await page.run("location.href + document.documentElement.outerHTML")
        for name, background in (("dark", "rgb(18, 21, 27)"), ("light", "rgb(246, 247, 249)")):
            media = [{"name": "prefers-color-scheme", "value": name}]
            await page.do("Emulation.setEmulatedMedia", features=media)
            assert await page.run("getComputedStyle(document.body).backgroundColor") == background
            if "DTORCH_SCREENSHOTS" in os.environ:
                shot = await page.do("Page.captureScreenshot", captureBeyondViewport=True)
                save(name, shot["data"])
        await asyncio.to_thread(evil.close)
        await page.until("document.getElementById('n-sessions').innerText === '1'")  # it goes on looking
        await page.run("document.getElementById('forget').click()")
        await page.until("!document.getElementById('login').classList.contains('hidden')")
        assert await page.run("sessionStorage.getItem('dtorch-key')") is None
