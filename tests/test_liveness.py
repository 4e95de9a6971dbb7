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


def attest(machine: Watch, start: float, stop: float, state: str, gap: float = INTERVAL_S, heard: bool = False) -> list[Dead]:
    """Somebody beside worker 1 tells the state of its process every ``gap``; tick every interval."""
    dead: list[Dead] = []
    now, due = start, start
    while now < stop:
        if now >= due:
            machine.attested(1, now, state)
            due = now + gap
        if heard:
            machine.heard(1, now)
        dead += machine.tick(now, {})
        now += INTERVAL_S
    return dead


def test_a_busy_worker_elsewhere_is_never_suspected_while_somebody_beside_it_sees_it_run() -> None:
    machine = watch()
    assert run(machine, 0.0, 5.0, {}, heard=True) == []
    for state in "RSD?":
        assert attest(machine, 5.0, 605.0, state) == []


def test_a_worker_elsewhere_that_is_seen_to_be_stopped_is_frozen() -> None:
    machine = watch()
    assert attest(machine, 0.0, 10.0, "S", heard=True) == []
    (dead,) = attest(machine, 10.0, 12.0, "T")
    assert FROZEN_S <= dead.silent_s < 2.0
    assert "stopped" in dead.reason


def test_one_that_is_stopped_for_moments_and_answers_between_them_is_not() -> None:
    machine = watch()
    assert attest(machine, 0.0, 60.0, "T", heard=True) == []  # only ever looked at while it is stopped
    assert attest(machine, 60.0, 60.6, "T") == []
    assert attest(machine, 60.6, 90.0, "S") == []


def test_a_process_that_was_not_looked_at_for_long_may_have_run_meanwhile() -> None:
    machine = watch()
    assert attest(machine, 0.0, 5.0, "S", gap=0.25) == []
    assert attest(machine, 5.0, 60.0, "T", gap=1.25) == []


def test_silence_counts_again_when_nobody_beside_a_worker_is_heard_either() -> None:
    machine = watch()
    assert attest(machine, 0.0, 10.0, "S") == []
    assert run(machine, 10.0, 11.25, {}, heard=False) == []
    (dead,) = run(machine, 11.25, 15.0, {}, heard=False)
    assert FLOOR_S <= dead.silent_s < 2.25


def test_a_floor_of_its_own_holds_until_somebody_is_beside_a_worker() -> None:
    machine = Watch()
    machine.join(1, 0.0, 10.0)
    assert run(machine, 0.0, 9.9, {}, heard=False) == []
    machine.attested(1, 9.9, "S", 3.0)
    assert run(machine, 10.0, 12.8, {}, heard=False) == []
    assert run(machine, 12.8, 20.0, {}, heard=False) != []


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
