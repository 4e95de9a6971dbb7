"""Who counts as lost, in virtual time."""

from __future__ import annotations

from dtorch.runtime.liveness import FLOOR_S, FROZEN_S, INTERVAL_S, Dead, Watch


def watch(worker: int = 1) -> Watch:
    made = Watch()
    made.join(worker, 0.0)
    return made


def run(machine: Watch, start: float, stop: float, states: dict[int, str], heard: bool, gap: float = INTERVAL_S) -> list[Dead]:
    """Tick every interval; worker 1 is heard every ``gap`` or not at all."""
    dead: list[Dead] = []
    now, due = start, start
    while now < stop:
        if heard and now >= due:
            machine.heard(1, now)
            due = now + gap
        dead += machine.tick(now, states)
        now += INTERVAL_S
    return dead


def test_a_stopped_process_is_found_within_two_seconds() -> None:
    machine = watch()
    assert run(machine, 0.0, 10.0, {1: "S"}, heard=True) == []
    (dead,) = run(machine, 10.0, 12.0, {1: "T"}, heard=False)
    assert dead.worker == 1
    assert FROZEN_S <= dead.silent_s < 2.0
    assert "stopped" in dead.reason
    assert run(machine, 12.0, 20.0, {1: "T"}, heard=False) == []  # once


def test_a_busy_process_is_never_suspected_however_long_it_is_silent() -> None:
    machine = watch()
    assert run(machine, 0.0, 5.0, {1: "S"}, heard=True) == []
    for state in "RSD":
        assert run(machine, 5.0, 605.0, {1: state}, heard=False) == []


def test_a_process_that_is_stopped_for_a_moment_is_not_lost() -> None:
    machine = watch()
    assert run(machine, 0.0, 1.0, {1: "S"}, heard=True) == []
    assert run(machine, 1.0, 1.6, {1: "T"}, heard=False) == []
    assert run(machine, 1.6, 5.0, {1: "S"}, heard=True) == []


def test_a_debugger_may_hold_a_worker() -> None:
    assert run(watch(), 0.0, 60.0, {1: "t"}, heard=False) == []


def test_silence_counts_only_where_the_system_does_not_tell() -> None:
    machine = watch()
    assert run(machine, 0.0, 10.0, {}, heard=True) == []
    (dead,) = run(machine, 10.0, 12.0, {}, heard=False)
    assert FLOOR_S <= dead.silent_s < 2.0


def test_a_worker_elsewhere_that_is_slow_gets_more_time() -> None:
    machine = watch()
    for round_ in range(40):  # a loaded host: answers come late, and unevenly
        gap = 0.25 if round_ % 2 else 1.25
        assert run(machine, round_ * 2.0, round_ * 2.0 + 2.0, {}, heard=True, gap=gap) == []
    assert machine.phi(1, FLOOR_S) < 8
    assert run(machine, 80.0, 81.9, {}, heard=False) == []  # on a quiet host, long over
    assert run(machine, 81.9, 100.0, {}, heard=False) != []


def test_time_for_which_this_process_was_held_up_counts_for_nobody() -> None:
    machine = watch()
    assert run(machine, 0.0, 5.0, {}, heard=True) == []
    assert machine.tick(500.0, {}) == []  # stopped itself, or the machine was asleep
    assert run(machine, 500.25, 501.0, {}, heard=True) == []
    assert run(machine, 501.0, 504.0, {}, heard=False) != []


def test_a_worker_that_has_left_is_not_missed() -> None:
    machine = watch()
    machine.leave(1)
    machine.heard(1, 1.0)
    assert machine.workers == ()
    assert run(machine, 0.0, 60.0, {1: "T"}, heard=False) == []
