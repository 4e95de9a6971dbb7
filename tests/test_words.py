"""What a process printed last."""

from __future__ import annotations

import faulthandler
import io
import sys

import pytest

from dtorch.runtime import words
from dtorch.runtime.words import KEPT_BYTES, Words


def test_the_last_lines_are_kept_whole() -> None:
    made = Words()
    assert made.last() == ""
    made.note("one\n")
    made.note("two\n")
    assert made.last() == "one\ntwo"
    for number in range(1000):
        made.note(f"line {number} \u00e4\ud800\n")
    last = made.last().splitlines()
    assert last[-1] == "line 999 \u00e4\\ud800"
    assert last[0].startswith("line ")
    assert sum(len(line.encode()) + 1 for line in last) <= KEPT_BYTES
    made.close()


def test_a_long_life_takes_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "FULL_BYTES", 10 * KEPT_BYTES)
    made = Words()
    for number in range(10_000):
        made.note(f"{number}\n")
    assert made.last().endswith("9998\n9999")
    assert made._size() <= 10 * KEPT_BYTES + KEPT_BYTES
    made.close()


def test_streams_are_as_they_were_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    out, made = io.StringIO(), Words()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(faulthandler, "enable", lambda *_, **__: None)  # this process has not forked
    made.note_here()
    print("hello", 1)
    assert sys.stderr is None
    assert out.getvalue() == "hello 1\n"
    assert made.last() == "hello 1"
    assert not sys.stdout.isatty()
    made.close()
