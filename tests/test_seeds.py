"""What is known of random streams: sums of what happened say what all of it says. Pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtorch.runtime.seeds import Seeds
from dtorch.transport.messages import Seed

SAYINGS = st.one_of(
    st.none(),  # a draw
    st.builds(Seed, st.just(1), st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 4)),
    st.builds(Seed, st.just(1), st.integers(0, 9), st.integers(0, 4), st.tuples(st.integers(0, 4))),
)


def legal(events: list[Seed | None]) -> list[Seed | None]:
    """Without what no client says: something of a stream that has ended."""
    ended: set[int] = set()
    kept: list[Seed | None] = []
    for event in events:
        if event is None or (not {event.stream, *event.ended} & ended and event.stream not in event.ended):
            ended.update(() if event is None else event.ended)
            kept.append(event)
    return kept


HISTORIES = st.lists(SAYINGS).map(legal)


def after(events: list[Seed | None], stream: int = 0) -> Seeds:
    found = Seeds(stream)
    for event in events:
        if event is None:
            found.draw()
        else:
            found.mark(event)
    return found


def facts(seeds: Seeds) -> tuple[object, ...]:
    return seeds.stream, seeds.seeds, seeds.drawn


@given(HISTORIES, st.integers(0, 20))
def test_two_sums_make_the_sum_of_both(events: list[Seed | None], cut: int) -> None:
    part = after(events[:cut])
    part.then(after(events[cut:], part.stream))
    whole = after(events)
    assert facts(part) == facts(whole)
    assert part.ended == whole.ended


@given(HISTORIES)
def test_messages_bring_another_worker_to_the_same_place(events: list[Seed | None]) -> None:
    found = after(events)
    told = after([*found.marks(1)])
    assert (told.stream, told.seeds) == (found.stream, found.seeds)
    assert found.alive == {*found.seeds, *found.drawn}


def test_drawing_moves_a_stream_away_from_its_seed() -> None:
    assert facts(after([Seed(1, 5, 1), Seed(1, 6, 2), None])) == (2, {1: 5}, {2})
    assert facts(after([Seed(1, 5, 1), None, Seed(1, 7, 1)])) == (1, {1: 7}, set())
    assert facts(after([Seed(1, 5, 1), None, Seed(1, None, 0, (1,))])) == (0, {}, set())
