"""What is billed: sums from events with virtual times, their file, and how busy workers were."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.cluster import ledger as ledger_module
from dtorch.cluster import meter as meter_module
from dtorch.cluster.ledger import OTHERS, Ledger, Line, Totals
from dtorch.cluster.meter import Meter, Traffic, size
from dtorch.transport.cluster import DeviceLoad, Load, SentBytes, Use


def test_bytes_held_are_counted_over_time_on_every_worker() -> None:
    ledger = Ledger()
    ledger.open(10.0, 1, "ann")
    ledger.hold(11.0, 1, worker=1, size_bytes=100)
    ledger.hold(12.0, 1, worker=2, size_bytes=50)  # 100 for 1 s
    ledger.hold(14.0, 1, worker=1, size_bytes=0)  # 150 for 2 s
    ledger.advance(15.0)  # 50 for 1 s
    assert ledger.tenants["ann"].byte_s == 450.0
    assert ledger.held_bytes() == {"ann": 50}
    ledger.lose(16.0, worker=2)  # 50 for 1 s, and then it is gone
    ledger.advance(100.0)
    assert ledger.tenants["ann"].byte_s == ledger.sessions[1].totals.byte_s == 500.0
    ledger.hold(101.0, 1, worker=1, size_bytes=10)
    ledger.close(103.0, 1)
    ledger.hold(103.5, 1, worker=1, size_bytes=10)  # a report that comes late
    ledger.advance(200.0)
    assert ledger.tenants["ann"].byte_s == 520.0


def test_work_done_again_is_not_billed() -> None:
    ledger = Ledger()
    ledger.open(0.0, 1, "ann")
    ledger.use(1, Totals(device_s=2.0, ops={"torch.add": 3}))
    ledger.use(1, Totals(repeated_s=5.0, repeated_ops=7))
    used = ledger.tenants["ann"]
    assert (used.device_s, used.repeated_s, used.num_ops, used.repeated_ops) == (2.0, 5.0, 3, 7)


def test_the_last_reports_come_after_a_session_has_ended() -> None:
    ledger = Ledger()
    ledger.open(0.0, 1, "ann")
    for worker in (1, 2):
        ledger.enter(1, worker)
    ledger.close(1.0, 1)
    ledger.use(1, Totals(device_s=1.0))
    ledger.settle(1, 1)
    assert ledger.sessions[1].reporting == {2}
    ledger.lose(2.0, 2)
    assert ledger.sessions[1].reporting == set()
    assert ledger.tenants["ann"].device_s == 1.0
    ledger.use(9, Totals(device_s=1.0))  # a session that nobody knows
    assert ledger.sum().device_s == 1.0


def test_time_that_goes_back_counts_nothing() -> None:
    ledger = Ledger()
    ledger.open(10.0, 1, "ann")
    ledger.hold(10.0, 1, 1, 5)
    ledger.advance(4.0)
    ledger.advance(12.0)
    assert ledger.tenants["ann"].byte_s == 10.0


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ENDED", 3)
    monkeypatch.setattr(ledger_module, "MAX_OPS", 2)
    monkeypatch.setattr(ledger_module, "MAX_TENANTS", 2)
    ledger = Ledger()
    for number in range(10):
        ledger.open(0.0, number, f"tenant {number}")
        ledger.use(number, Totals(ops={f"op {number}": 1, "b": 1, "c": 1, "d": 1}))
        ledger.close(1.0, number)
    assert len(ledger.sessions) == 3
    assert set(ledger.tenants) == {"tenant 0", "tenant 1", OTHERS}
    assert len(ledger.tenants[OTHERS].ops) <= 3
    assert ledger.sum().num_ops == 40  # whatever it is told as, nothing is left out
    assert sum(line.used.num_ops for line in ledger.lines(2.0)) == 40  # those forgotten meanwhile too


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["use", "hold", "lose", "close", "write"]), st.integers(0, 2), st.integers(0, 9))))
def test_what_is_written_adds_up_to_what_was_used(events: list[tuple[str, int, int]]) -> None:
    ledger, written = Ledger(), []
    for session in range(3):
        ledger.open(0.0, session, "ann" if session else "ben")
    for now, (kind, session, number) in enumerate(events):
        if kind == "use":
            ledger.use(session, Totals(device_s=number * 0.25, ops={f"op{number % 2}": number}))
        elif kind == "hold":
            ledger.hold(now, session, number % 2, number)
        elif kind == "lose":
            ledger.lose(now, number % 2)
        elif kind == "close":
            ledger.close(now, session)
        else:
            written += ledger.lines(now)
    written += ledger.lines(len(events))
    assert ledger.lines(len(events)) == []
    again = Ledger()
    again.restore(msgspec.json.decode(msgspec.json.encode(written), type=list[Line]))
    for name, used in ledger.tenants.items():
        assert again.tenants.get(name, Totals()) == used
    assert sum(entry.totals.device_s for entry in ledger.sessions.values()) == ledger.sum().device_s


def test_use_outlives_the_head_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "usage.jsonl"
    for _ in range(2):
        meter = Meter(path)
        meter.opened(1, "ann", "laptop")
        meter.joined(7)
        meter.loaded(7, Load(5, 4, 3, (), (Use(1, 2_000_000_000, 0, 8, {"torch.add": 2}),)))
        meter.ended(1, "SessionClosedError", "")
        meter.close()
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as file:
        file.write(b'{"at": 1.0, "ten')  # the head was killed as it wrote
    for _ in range(2):
        meter = Meter(path)
        assert meter.ledger.tenants["ann"].device_s == 4.0
        assert meter.ledger.tenants["ann"].ops == {"torch.add": 4}
        meter.close()
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1, does not tell what was used"):
        Meter(path)


def load(clock_s: float, busy_s: float, *uses: Use) -> Load:
    return Load(int(clock_s * 1e9), int(busy_s * 1e9), 1000, (DeviceLoad("cpu", 0, 10, 100),), uses)


def test_how_busy_a_worker_is_comes_from_its_own_clock() -> None:
    meter = Meter()
    meter.joined(1)
    meter.loaded(1, load(100.0, 50.0))
    meter.loaded(1, load(101.0, 50.25))
    assert meter.loads[1].share == 0.25
    meter.loaded(1, load(101.01, 50.26))  # a session has ended: too short to tell from
    assert meter.loads[1].share == 0.25
    meter.loaded(1, load(102.0, 51.25))
    assert meter.loads[1].share == 1.0
    assert meter.busy_s == pytest.approx(51.25)
    meter.loaded(2, load(1.0, 1.0))  # nobody knows it
    assert meter.busy_s == pytest.approx(51.25)


def test_lines_that_send_are_told_by_step() -> None:
    meter = Meter()
    meter.opened(1, "ann", "")
    meter.joined(1)
    meter.stepped(1)
    sent = SentBytes("dtorch.redistribute", "gathers", "train.py:12", 2, 40_000_000)
    for _ in range(4):
        meter.stepped(1)
        meter.loaded(1, load(1, 1, Use(1, 0, sent=(sent,))))
    (line,) = meter.traffic.values()
    assert line.num_calls == 8
    assert line.hint == "gathers 32 MB per step here"
    assert meter.ledger.tenants["ann"].exchanged_bytes == 160_000_000
    meter.ended(1, "ProtocolError", "it sent garbage")
    assert meter.traffic == {}
    assert [(t.kind, t.tenant, t.text) for t in meter.troubles] == [("session", "ann", "ProtocolError: it sent garbage")]


def test_lines_that_send_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "MAX_SOURCES", 5)
    meter = Meter()
    meter.opened(1, "ann", "")
    meter.joined(1)
    for number in range(20):
        meter.loaded(1, load(1, 1, Use(1, 0, ops={"x" * 1000: 1}, sent=(SentBytes("op", "sends", f"a.py:{number}", 1, 1),))))
    assert [line.where for line in meter.traffic.values()] == [f"a.py:{number}" for number in range(15, 20)]
    assert meter.ledger.tenants["ann"].ops == {OTHERS: 20}


def test_only_a_worker_that_goes_unasked_is_a_failure() -> None:
    meter = Meter()
    for number in (1, 2):
        meter.joined(number)
    meter.gone(1, "a", "it left the pool", asked=True)
    assert (meter.num_lost, list(meter.troubles)) == (0, [])
    meter.gone(2, "b", "its connection closed", asked=False)
    assert (meter.num_lost, sum(meter.detection_counts), list(meter.lost)) == (1, 1, ["b"])
    assert meter.troubles[0].worker == "b"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (40e6, "40 MB"), (1.234e9, "1.23 GB"), (5e15, "5000 TB")],
)
def test_sizes_for_people(number: float, text: str) -> None:
    assert size(number) == text
    assert Traffic(1, "t", "op", "gathers", "a.py:1", 0, 1, int(number), 1).hint.startswith("gathers")
