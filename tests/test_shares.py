"""Sharing a device: who goes next, and the turns that threads take."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.runtime.shares import BURST_S, Shares
from dtorch.runtime.turns import SLICE_NS, Dropped, Turns


def served(shares: Shares, always: dict[int, float], seconds: float) -> dict[int, float]:
    """Seconds that each session got, when all of ``always`` (session -> length of its ops) are always waiting."""
    got = dict.fromkeys(always, 0.0)
    for session in always:
        shares.wait(session)
    while sum(got.values()) < seconds:
        session = shares.next()
        assert session is not None
        shares.rest(session)
        shares.begin(session)
        shares.serve(session, always[session])
        got[session] += always[session]
        shares.wait(session)
    for session in always:
        shares.rest(session)
    return got


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 10.0), st.floats(2e-3, 0.02), st.integers(1, 3)), min_size=2, max_size=6
    )
)
def test_busy_tenants_are_served_by_weight(tenants: list[tuple[float, float, int]]) -> None:
    shares, always, owner = Shares(), {}, {}
    for tenant, (weight, op_s, num_sessions) in enumerate(tenants):
        for _ in range(num_sessions):
            session = len(always)
            shares.add(session, str(tenant), weight)
            always[session], owner[session] = op_s, tenant
    got = served(shares, always, 4.0)
    by_tenant = [sum(s for session, s in got.items() if owner[session] == t) for t in range(len(tenants))]
    parts = [s / weight for s, (weight, _, _) in zip(by_tenant, tenants, strict=True)]
    # No two are further apart than one op of each, by weight.
    slack = 2 * max(op_s / weight for weight, op_s, _ in tenants)
    assert max(parts) - min(parts) <= slack + 1e-6


def test_two_equal_tenants_get_alike_however_long_their_ops_are() -> None:
    shares = Shares()
    shares.add(1, "a")
    shares.add(2, "b")
    got = served(shares, {1: 0.03, 2: 0.001}, 10.0)
    assert 0.9 <= got[1] / got[2] <= 1.1


def test_sessions_of_a_tenant_share_its_part() -> None:
    shares = Shares()
    shares.add(1, "a")
    shares.add(2, "b")
    shares.add(3, "b")
    got = served(shares, {1: 0.001, 2: 0.001, 3: 0.004}, 12.0)
    assert got[1] == pytest.approx(6.0, abs=0.05)
    assert got[2] == pytest.approx(got[3], abs=0.05)


def test_an_idle_share_is_lent_and_not_owed() -> None:
    shares = Shares()
    shares.add(1, "a")
    shares.add(2, "b")
    assert served(shares, {1: 0.01}, 5.0)[1] >= 5.0
    got = served(shares, {1: 0.01, 2: 0.01}, 2.0)
    assert got[2] - got[1] <= BURST_S + 0.021


def test_a_higher_priority_goes_first_always() -> None:
    shares = Shares()
    shares.add(1, "a", priority=0)
    shares.add(2, "b", priority=3)
    shares.serve(2, 100.0)
    shares.wait(1)
    shares.wait(2)
    assert shares.next() == 2
    shares.rest(2)
    assert shares.next() == 1
    shares.rest(1)
    assert shares.next() is None
    assert shares.num_waiting == 0


def test_what_is_gone_is_forgotten() -> None:
    shares = Shares()
    for session in range(100):
        shares.add(session, f"t{session % 7}", priority=session % 3)
        shares.wait(session)
    for session in range(100):
        shares.remove(session)
    assert (shares._priorities, shares._tenants, shares._keys) == ({}, {}, {})
    with pytest.raises(ValueError, match="above 0"):
        shares.add(1, "a", weight=0.0)


# ---- turns


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def waiting(turns: Turns, session: int) -> threading.Thread:
    """A thread that waits for the turn and gives it up at once."""

    def run() -> None:
        turns.take(session)
        turns.give(session)

    thread = threading.Thread(target=run)
    thread.start()
    while session not in turns._gates:
        os.sched_yield()
    return thread


def test_backlogged_tenants_are_charged_the_time_that_they_had_the_turn() -> None:
    """Virtual time, which only the one that has the turn spends: ops of 30 ms and of 1 ms, in equal shares."""
    clock, until_ns = Clock(), 10 * 10**9
    turns = Turns(now_ns=clock)
    sizes_ns = {1: 30_000_000, 2: 1_000_000}

    def work(session: int, size_ns: int) -> None:
        turns.take(session)
        while clock.now_ns < until_ns:
            clock.now_ns += size_ns
            turns.step(session)
        turns.give(session)

    for session in (*sizes_ns, 3):
        turns.add(session, f"tenant {session}", 1.0, 0)
    turns.take(3)  # until both wait
    threads = [threading.Thread(target=work, args=item) for item in sizes_ns.items()]
    for thread in threads:
        thread.start()
    while len(turns._gates) < len(sizes_ns):
        os.sched_yield()
    turns.give(3)
    for thread in threads:
        thread.join()
    got = [turns.spent_ns(session) for session in sizes_ns]
    assert sum(got) == clock.now_ns
    assert 0.9 <= got[0] / got[1] <= 1.1


def test_the_turn_changes_hands_when_a_slice_is_over() -> None:
    clock, changes = Clock(), []
    turns = Turns(lambda last, this: changes.append((last, this)), now_ns=clock)
    turns.add(1, "a", 1.0, 0)
    turns.add(2, "b", 1.0, 0)
    turns.take(1)
    clock.now_ns = 10 * SLICE_NS  # alone, it goes on as long as it likes
    turns.step(1)
    other = waiting(turns, 2)
    clock.now_ns += SLICE_NS - 1
    turns.step(1)
    assert changes == [(None, 1)]
    clock.now_ns += 2
    turns.step(1)  # comes back when the other one has given its turn up
    assert changes == [(None, 1), (1, 2), (2, 1)]
    other.join()
    turns.give(1)
    assert turns.busy_ns == {1: 11 * SLICE_NS + 1, 2: 0}


def test_a_higher_priority_does_not_wait_for_a_slice() -> None:
    changes: list[int] = []
    turns = Turns(lambda _, this: changes.append(this), now_ns=Clock())
    turns.add(1, "a", 1.0, 0)
    turns.add(2, "b", 1.0, 1)
    turns.take(1)
    other = waiting(turns, 2)
    turns.step(1)
    assert changes == [1, 2, 1]
    other.join()
    turns.give(1)


def test_a_session_that_is_dropped_ends_at_its_next_step() -> None:
    turns = Turns(now_ns=Clock())
    turns.add(1, "a", 1.0, 0)
    turns.take(1)
    turns.drop(1)
    with pytest.raises(Dropped):
        turns.step(1)
    turns.give(1)
    with pytest.raises(Dropped):
        turns.take(1)
    turns.remove(1)
    turns.drop(1)  # nothing is left of it
    assert turns.busy_ns == {}


def test_released_lets_the_others_go_on() -> None:
    turns = Turns(now_ns=Clock())
    turns.add(1, "a", 1.0, 0)
    turns.add(2, "b", 1.0, 0)
    turns.take(1)
    with turns.released(1), turns.released(1):
        turns.take(2)
        turns.give(2)
    turns.give(1)
