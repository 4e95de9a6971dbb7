"""Polling in place of sleeping: only while nobody else wants the core."""

from __future__ import annotations

from dtorch.runtime.spin import GAP_S, LONGEST_PAUSE_S, PAUSE_S, WELL_S, Contention

US = 1e-6


def test_it_polls_as_long_as_it_is_let() -> None:
    contention = Contention()
    now = 5.0
    for _ in range(1000):
        assert contention.may_poll(now)
        assert contention.looked(now, now + 3 * US)
        now += 3 * US
    assert contention.looked(now, now + GAP_S / 2)


def test_after_a_gap_it_pauses_and_twice_as_long_when_it_comes_again() -> None:
    contention = Contention()
    now, pauses = 5.0, []
    for _ in range(9):
        assert contention.may_poll(now)
        assert not contention.looked(now, now + 2 * GAP_S)
        now += 2 * GAP_S
        assert not contention.may_poll(now)
        assert not contention.may_poll(now + PAUSE_S / 2)
        pause = next(p for p in (PAUSE_S * 2**k for k in range(20)) if contention.may_poll(now + p + US))
        pauses.append(round(pause / PAUSE_S))
        now += pause + US
    assert pauses == [1, 2, 4, 8, 16, 16, 16, 16, 16]
    assert PAUSE_S * 16 == LONGEST_PAUSE_S


def test_after_a_while_without_gaps_the_next_pause_is_short_again() -> None:
    contention = Contention()
    now = 5.0
    for _ in range(4):
        contention.looked(now, now + 2 * GAP_S)
        now += LONGEST_PAUSE_S + US
        assert contention.may_poll(now)
    now += WELL_S + LONGEST_PAUSE_S
    assert not contention.looked(now - 2 * GAP_S, now)
    assert not contention.may_poll(now + PAUSE_S / 2)
    assert contention.may_poll(now + PAUSE_S + US)
