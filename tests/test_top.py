"""python -m dtorch top: sessions are found, and what is shown is what they do."""

from __future__ import annotations

import pytest

import dtorch
from dtorch import DeviceMesh, top
from dtorch.cli import main
from dtorch.runtime.live import Live
from dtorch.session import current_session


def test_counters_become_rates() -> None:
    live = Live()
    live.done(3, 200_000_000)
    before = live.snapshot({3: 77}, session=1, pid=5, batches_in_flight=0, bytes_in_flight=0)
    live.done(3, 300_000_000)
    live.of(3).sent_bytes += 3_000
    live.of(3).counters = {"calls": 2_500_000, "plan_hits": 3, "plan_misses": 1, "failures": 2}
    now = live.snapshot({3: 77}, session=1, pid=5, batches_in_flight=2, bytes_in_flight=1_500_000)
    title, header, row = top.lines(now, before, 2.0, {77: 64_000_000})
    assert title == "session 1 of process 5: 2 batches and 1.5MB on their way"
    assert header.split()[:3] == ["worker", "pid", "busy"]
    assert row.split() == ["3", "77", "15%", "1.2M", "0.5", "1.5kB/s", "0B/s", "64MB", "75%", "2"]
    assert top.lines({**now, "workers": {}}, None, 1.0, {})[1] == "  no workers yet"


def test_a_running_session_is_found_and_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    x = dtorch.ones(2, device_mesh=DeviceMesh("cpu", [0]))
    (x + x).tolist()
    thread = current_session().thread
    assert thread.folder in top.folders()
    first = top.look(thread.folder)
    dtorch.synchronize()  # the workers have answered the question of the look before
    seen = top.look(thread.folder)
    assert first is not None
    assert seen is not None
    worker = max(seen["workers"].values(), key=lambda w: w.get("calls", 0))
    assert worker["pid"] in thread.pids.values()
    assert worker["calls"] >= 2
    assert worker["busy_ns"] > 0
    assert top.resident_bytes(worker["pid"]) > 0
    assert main(["top", "--looks", "1"]) == 0
    assert f"of process {seen['pid']}" in capsys.readouterr().out


def test_a_session_that_is_gone_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    folder = current_session().thread.folder
    dtorch.shutdown()
    assert folder not in top.folders()
    assert top.look(folder) is None
    assert main(["top", "--interval", "0"]) == 2
    assert "must be above 0" in capsys.readouterr().err
