"""Tensors and meshes that one can see: a coloured grid of which device holds which block, as text and as HTML."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO

import torch

from dtorch.inspection import Inspection, inspect, native
from dtorch.mesh import DeviceMesh
from dtorch.runtime.layout import Interval, coords

MAX_SHOWN = 12
"""Rows, and columns, of a grid; of longer ones the middle is left out."""

_INK = "#111111"
LIGHT = ("#bfe3ff", "#c9f0c4", "#ffe0a8", "#ffd0cf", "#e3d0ff", "#c2f2f0", "#f6f3b4", "#dcdfe4")
DARK = ("#1f4e75", "#2a5d33", "#6f4f12", "#743535", "#523a80", "#1c5b5a", "#5c5a1b", "#454b55")


@dataclass(frozen=True)
class Cell:
    """A block of the grid.

    Attributes:
        text: who holds it: "cpu:0,1" for copies, "cpu:0+1" for summands; "" for what is left out.
        colour: number of the colour; blocks with the same holders have the same.
    """

    text: str
    colour: int


@dataclass(frozen=True)
class Grid:
    """Cells with a label for each row and column."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]


_GAP = Cell("...", -1)


def grid_of(about: Inspection) -> Grid:
    """Which device holds which block. Rows and columns are the sharded dims, or the last two where fewer are."""
    num_dims = len(about.shape)
    sharded = sorted({p.dim for p in about.placements if p.is_shard()})  # type: ignore[attr-defined]
    others = [dim for dim in reversed(range(num_dims)) if dim not in sharded]
    drawn = sorted((sharded + others)[:2])
    pieces = [piece for piece in about.pieces if piece.size_bytes] or about.pieces[:1]
    down = sorted({piece.box[drawn[0]] for piece in pieces}) if len(drawn) == 2 else [(0, 1)]
    across = sorted({piece.box[drawn[-1]] for piece in pieces}) if drawn else [(0, 1)]
    pending = [axis for axis, p in enumerate(about.placements) if p.is_partial()]
    held: dict[tuple[Interval, Interval], dict[Any, list[int]]] = {}
    for piece in pieces:
        at = (piece.box[drawn[0]] if len(drawn) == 2 else (0, 1), piece.box[drawn[-1]] if drawn else (0, 1))
        same = tuple(c for axis, c in enumerate(piece.coord) if axis not in pending)
        held.setdefault(at, {}).setdefault(same, []).append(int(piece.device.partition(":")[2]))
    colours: dict[str, int] = {}
    cells = []
    for row in down:
        line = []
        for column in across:
            text = f"{about.device_mesh.device_type}:{_holders(list(held[row, column].values()))}"
            line.append(Cell(text, colours.setdefault(text, len(colours) % len(LIGHT))))
        cells.append(tuple(line))
    rows = tuple(_span(drawn[0], cut) for cut in down) if len(drawn) == 2 else ("",)
    columns = tuple(_span(drawn[-1], cut) for cut in across) if drawn else ("",)
    return _shortened(Grid(rows, columns, tuple(cells)))


def mesh_grid(mesh: DeviceMesh) -> Grid:
    """The devices of a mesh; the last axis goes from left to right, all others downwards."""
    names = mesh.dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    width = mesh.shape[-1]
    leading = coords(tuple(mesh.shape[:-1]))
    rows = tuple(", ".join(f"{name}={at}" for name, at in zip(names, coord, strict=False)) for coord in leading)
    columns = tuple(f"{names[-1]}={at}" for at in range(width))
    cells = tuple(
        tuple(
            Cell(f"{mesh.device_type}:{device}", (row * width + column) % len(LIGHT))
            for column, device in enumerate(mesh.devices[row * width : (row + 1) * width])
        )
        for row in range(len(leading))
    )
    return _shortened(Grid(rows, columns, cells))


def _span(dim: int, cut: Interval) -> str:
    return f"dim {dim} [{cut[0]}:{cut[1]}]"


def _holders(groups: list[list[int]]) -> str:
    """ "0,1" for copies, "0-7" for many, "0+1" for summands, "0+1,2+3" for copies of these."""
    if any(len(group) > 1 for group in groups):
        return ",".join("+".join(map(str, group)) for group in groups)
    devices = sorted(group[0] for group in groups)
    runs = [[d for _, d in run] for _, run in groupby(enumerate(devices), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _shortened(grid: Grid) -> Grid:
    rows, columns = _picked(len(grid.rows)), _picked(len(grid.columns))
    return Grid(
        tuple("..." if i is None else grid.rows[i] for i in rows),
        tuple("..." if i is None else grid.columns[i] for i in columns),
        tuple(tuple(_GAP if i is None or j is None else grid.cells[i][j] for j in columns) for i in rows),
    )


def _picked(count: int) -> list[int | None]:
    """Indices to show; None stands for those left out."""
    if count <= MAX_SHOWN:
        return list(range(count))
    half = MAX_SHOWN // 2
    return [*range(half), None, *range(count - half + 1, count)]


# ---- text


def grid_text(grid: Grid) -> str:
    """The grid in ASCII."""
    return "".join(text for text, _ in _pieces(grid))


def _pieces(grid: Grid) -> Iterator[tuple[str, int]]:
    """The grid in ASCII, piece by piece, with the number of the colour behind it; -1 for none."""
    left = max(map(len, grid.rows))
    texts = [[cell.text for cell in line] for line in grid.cells]
    widths = [
        max(len(label), *(len(line[j]) for line in texts)) + 2 for j, label in enumerate(grid.columns)
    ]
    rule = " " * left + " +" + "+".join("-" * width for width in widths) + "+"
    if any(grid.columns):
        labels = [label.center(width) for label, width in zip(grid.columns, widths, strict=True)]
        yield f"{' ' * left}  {' '.join(labels)}".rstrip() + "\n", -1
    yield rule, -1
    for label, line in zip(grid.rows, grid.cells, strict=True):
        yield f"\n{label.ljust(left)} |", -1
        for cell, width in zip(line, widths, strict=True):
            yield cell.text.center(width), cell.colour
            yield "|", -1
        yield f"\n{rule}", -1


def visualize_sharding(x: Any, *, file: TextIO | None = None) -> None:
    """Print which device holds which block of a tensor, or the devices of a mesh. Waits for no value.

    Rows and columns are the sharded dims. "cpu:0,1" hold copies, "cpu:0+1" summands. In colour on a terminal, unless NO_COLOR
    is set.

    Args:
        x: a tensor on a mesh, or a DeviceMesh.
        file: where to; standard output when left out.

    Raises:
        TypeError: it is neither.
    """
    stream = sys.stdout if file is None else file
    if isinstance(x, DeviceMesh):
        title, grid = repr(x), mesh_grid(x)
    else:
        about = inspect(x)
        title, grid = _title(about), grid_of(about)
    if stream.isatty():
        _print_in_colour(stream, title, grid)
    else:
        stream.write(f"{title}\n{grid_text(grid)}\n")


def _print_in_colour(stream: TextIO, title: str, grid: Grid) -> None:
    """As many colours as the terminal has; none where NO_COLOR or TERM=dumb says so. Blocks have dark text on a light ground,
    which can be read in terminals of either theme."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    styles = [Style(color=_INK, bgcolor=colour) for colour in LIGHT]
    shown = Text(f"{title}\n")
    for text, colour in _pieces(grid):
        shown.append(text, styles[colour] if colour >= 0 else None)
    Console(file=stream).print(shown, soft_wrap=True)


def _title(about: Inspection) -> str:
    return str(about).partition("\n")[0]


# ---- HTML


def tensor_html(x: Any) -> str:
    """A tensor for a notebook: what and where it is, and its values, summarised. Waits for the value."""
    tensor = native(x)
    about = inspect(tensor)
    value = tensor.to_torch()
    return _page(
        f"<b>dtorch.Tensor</b> {html.escape(_title(about))}",
        grid_of(about),
        f"<div>{html.escape(summary(value))}</div><pre>{html.escape(str(value))}</pre>",
    )


def mesh_html(mesh: DeviceMesh) -> str:
    """A mesh for a notebook."""
    return _page(f"<b>DeviceMesh</b> {html.escape(repr(mesh)[10:])}", mesh_grid(mesh), "")


def summary(value: torch.Tensor) -> str:
    """Range and mean of a tensor's values, and how many are not finite."""
    if value.numel() < 2 or value.is_complex() or value.dtype == torch.bool:
        return ""
    wide = value.to(torch.float64)
    finite = wide[wide.isfinite()]
    parts = []
    if finite.numel():
        parts = [f"min {finite.min().item():.4g}", f"max {finite.max().item():.4g}", f"mean {finite.mean().item():.4g}"]
    for name, count in (("NaN", int(wide.isnan().sum())), ("infinite", int(wide.isinf().sum()))):
        if count:
            parts.append(f"{count} {name}")
    return ", ".join(parts)


def _page(title: str, grid: Grid, below: str) -> str:
    head = "".join(f"<th>{html.escape(label)}</th>" for label in grid.columns)
    body = "".join(
        f"<tr><th>{html.escape(label)}</th>"
        + "".join(f'<td class="dt{cell.colour}">{html.escape(cell.text)}</td>' for cell in line)
        + "</tr>"
        for label, line in zip(grid.rows, grid.cells, strict=True)
    )
    return (
        f'<div class="dtorch-view"><style>{_STYLE}</style><div>{title}</div>'
        f"<table><tr><th></th>{head}</tr>{body}</table>{below}</div>"
    )


def _rules(colours: Sequence[str], text: str, prefix: str = "") -> str:
    rules = [f"{prefix}.dtorch-view td{{color:{text}}}"]
    rules += [f"{prefix}.dtorch-view td.dt{i}{{background:{colour}}}" for i, colour in enumerate(colours)]
    return "".join(rules)


_STYLE = (
    ".dtorch-view{font-size:13px}"
    ".dtorch-view table{border-collapse:collapse;margin:6px 0}"
    ".dtorch-view th{font-weight:normal;opacity:.7;padding:2px 8px;text-align:center}"
    ".dtorch-view td{border:1px solid rgba(128,128,128,.6);padding:4px 12px;text-align:center;font-family:monospace}"
    ".dtorch-view pre{margin:4px 0}"
    + _rules(LIGHT, "#111")
    + f"@media (prefers-color-scheme: dark){{{_rules(DARK, '#eee')}}}"
    # a notebook's own theme goes before the system's
    + _rules(LIGHT, "#111", '[data-jp-theme-light="true"] ')
    + _rules(DARK, "#eee", '[data-jp-theme-light="false"] ')
)

