"""A profile as a picture: one lane for the client, the controller, and each device's streams, as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

from dtorch.profiling.timeline import Event, row_key

WIDTH, ROW, LABEL = 860, 16, 190
MAX_BARS = 1500
"""Bars drawn in one row; neighbours that a pixel cannot tell apart are drawn as one anyway."""

_KINDS = {
    "record": "a", "send": "a", "wait": "i", "await": "i", "wait for room": "i",
    "compute": "c", "communication": "x", "copy": "y",
}  # fmt: skip
"""What a bar's colour says: a: client and controller at work, i: waiting, c: compute, x: communication, y: copies."""
_LEGEND = (("a", "recording, control"), ("i", "waiting"), ("c", "compute"), ("x", "communication"), ("y", "copies"))
_LIGHT = {"a": "#7b8fd4", "i": "#d9d9d9", "c": "#57a773", "x": "#e08e45", "y": "#a678c2"}
_DARK = {"a": "#93a5ea", "i": "#555", "c": "#6cc48b", "x": "#f0a45c", "y": "#c298de"}
_SHOWN = frozenset({"record", "send", "wait", "await", "compute", "communication", "copy"})


def lanes_svg(events: Sequence[Event], duration_us: float) -> str:
    """The events as an SVG drawing, ``duration_us`` wide; a bar's title tells op, time and line."""
    rows: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.kind in _SHOWN or event.lane == "controller":
            rows.setdefault((event.lane, event.row), []).append(event)
    lines = sorted(rows, key=row_key)
    height = ROW * (len(lines) + 1) + 26
    scale = WIDTH / max(duration_us, 1e-9)
    body = []
    for number, line in enumerate(lines):
        y = number * ROW + 4
        label = html.escape(" ".join(dict.fromkeys(line)))
        body.append(f'<text x="{LABEL - 6}" y="{y + ROW - 6}" text-anchor="end">{label}</text>')
        body += [_bar(bar, y, scale) for bar in _merged(rows[line], 1 / scale)]
    y = len(lines) * ROW + 18
    body.append(f'<text x="{LABEL}" y="{y}">0</text>')
    body.append(f'<text x="{LABEL + WIDTH}" y="{y}" text-anchor="end">{duration_us / 1e3:.2f} ms</text>')
    x = LABEL
    for colour, what in _LEGEND:
        body.append(f'<rect class="k{colour}" x="{x}" y="{y + 6}" width="10" height="10"/>')
        body.append(f'<text x="{x + 14}" y="{y + 15}">{what}</text>')
        x += 30 + 6 * len(what)
    return (
        f'<svg class="dtorch-lanes" viewBox="0 0 {LABEL + WIDTH + 8} {height + 8}" width="100%" role="img" '
        f'aria-label="timeline"><style>{_STYLE}</style>{"".join(body)}</svg>'
    )


def _merged(events: list[Event], pixel_us: float) -> list[tuple[float, float, str, str]]:
    """(start, end, colour, title) of what can be told apart at this width, longest kept where there is too much."""
    bars: list[tuple[float, float, str, str]] = []
    for event in sorted(events, key=lambda e: e.start_us):
        colour = _KINDS.get(event.kind, "a")
        if bars and bars[-1][2] == colour and event.end_us - bars[-1][0] < pixel_us:
            bars[-1] = (bars[-1][0], max(event.end_us, bars[-1][1]), colour, bars[-1][3])
            continue
        where = f", {event.line.rpartition('/')[2]}" if event.line else ""
        bars.append((event.start_us, event.end_us, colour, f"{event.name}: {event.duration_us:.1f} us{where}"))
    if len(bars) > MAX_BARS:
        bars = sorted(sorted(bars, key=lambda b: b[0] - b[1])[:MAX_BARS])
    return bars


def _bar(bar: tuple[float, float, str, str], y: int, scale: float) -> str:
    start, end, colour, title = bar
    x, width = LABEL + start * scale, max((end - start) * scale, 0.6)
    return (
        f'<rect class="k{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _rules(colours: dict[str, str], text: str, prefix: str = "") -> str:
    fills = "".join(f"{prefix}.dtorch-lanes .k{kind}{{fill:{colour}}}" for kind, colour in colours.items())
    return f"{fills}{prefix}.dtorch-lanes text{{fill:{text}}}"


_STYLE = (
    ".dtorch-lanes text{font:11px sans-serif}"
    + _rules(_LIGHT, "#333")
    + f"@media (prefers-color-scheme: dark){{{_rules(_DARK, '#ddd')}}}"
    + _rules(_LIGHT, "#333", '[data-jp-theme-light="true"] ')
    + _rules(_DARK, "#ddd", '[data-jp-theme-light="false"] ')
)
