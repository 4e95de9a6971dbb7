"""Ctrl-C is put off to the end of what must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from dtorch.runtime.shield import Shield


@pytest.fixture
def python_handles() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_inside_is_raised_at_the_end(python_handles: None) -> None:
    done: list[int] = []

    def shielded() -> None:
        with Shield():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
            signal.raise_signal(signal.SIGINT)
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_nests(python_handles: None) -> None:
    done: list[int] = []

    def shielded() -> None:
        with Shield():
            with Shield():
                signal.raise_signal(signal.SIGINT)
            done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert done == [1]


def test_an_error_inside_comes_out_and_interrupts_are_raised_again(python_handles: None) -> None:
    with pytest.raises(ValueError, match="this"), Shield():
        raise ValueError("this")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_blocks_inside_is_woken(python_handles: None) -> None:
    woken: list[bool] = []
    asked: list[bool] = []

    def shielded() -> None:
        with Shield(lambda: woken.append(True)) as shield:
            asked.append(shield.was_asked)
            signal.raise_signal(signal.SIGINT)
            asked.append(shield.was_asked)

    with pytest.raises(KeyboardInterrupt):
        shielded()
    assert (woken, asked) == ([True], [False, True])


def test_where_the_program_handles_interrupts_itself_nothing_changes() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Shield():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_let_alone(python_handles: None) -> None:
    found: list[Callable[..., object] | int | None] = []

    def other() -> None:
        with Shield():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_thread_that_threading_takes_for_the_main_one(python_handles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python is embedded, or ``threading`` was imported by another thread first."""
    done: list[int] = []

    def other() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading, "main_thread", threading.current_thread)
            with Shield():
                done.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
