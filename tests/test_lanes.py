"""A profile's picture: a row for each lane, bars where and as wide as events were."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from dtorch.profiling.lanes import LABEL, WIDTH, lanes_svg
from dtorch.profiling.timeline import Event

EVENTS = [
    Event("worker 0", "cpu:10 compute", "compute", "torch.add", 50.0, 25.0, line="a.py:3"),
    Event("worker 0", "cpu:2 compute", "compute", "a<b>", 0.0, 50.0),
    Event("client", "MainThread", "record", "record", 0.0, 10.0),
    Event("client", "MainThread", "await", "await", 10.0, 90.0),
    Event("worker 0", "cpu:2 compute", "free", "free", 50.0, 1.0),
]


def bars(svg: str) -> list[tuple[str, float, float, str]]:
    """(colour class, start, end, title) of the bars, as shares of the width."""
    found = []
    for rect in ET.fromstring(svg).iter("rect"):
        title = rect.find("title")
        if title is not None:
            start = (float(rect.attrib["x"]) - LABEL) / WIDTH
            found.append((rect.attrib["class"], start, start + float(rect.attrib["width"]) / WIDTH, title.text or ""))
    return found


def test_rows_stand_in_the_order_of_a_trace_and_bars_where_events_were() -> None:
    svg = lanes_svg(EVENTS, 100.0)
    labels = re.findall(r'text-anchor="end">([^<]*)</text>', svg)
    assert labels == ["client MainThread", "worker 0 cpu:2 compute", "worker 0 cpu:10 compute", "0.10 ms"]
    assert [(kind, round(start, 3), round(end, 3), title) for kind, start, end, title in bars(svg)] == [
        ("ka", 0.0, 0.1, "record: 10.0 us"),
        ("ki", 0.1, 1.0, "await: 90.0 us"),
        ("kc", 0.0, 0.5, "a<b>: 50.0 us"),
        ("kc", 0.5, 0.75, "torch.add: 25.0 us, a.py:3"),
    ]


def test_what_a_pixel_cannot_tell_apart_is_one_bar() -> None:
    crowd = [Event("worker 0", "cpu:0 compute", "compute", "torch.add", i / 100, 0.01) for i in range(100_00)]
    assert 0 < len(bars(lanes_svg(crowd, 100.0))) <= 2 * WIDTH


def test_nothing_noted_is_a_picture_too() -> None:
    assert bars(lanes_svg([], 0.0)) == []
