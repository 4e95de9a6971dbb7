"""``dtorch.plan_of``: where the parameters of a module are, as a table with pictures."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtorch.face import TorchTensor
from dtorch.inspection import Inspection, inspect
from dtorch.tensor import Tensor
from dtorch.visual import DARK, LIGHT, grid_of

_THEMES = ((LIGHT, "#111"), (DARK, "#eee"))


@dataclass(frozen=True)
class PlacedRow:
    """Parameters, or buffers, that are alike but for the number of their layer.

    Attributes:
        name: with "*" for that number.
        count: how many they are.
        about: the first of them, see ``dtorch.inspect``.
    """

    name: str
    count: int
    about: Inspection

    @property
    def placed(self) -> str:
        """Such as ``tp: Shard(dim=0)``."""
        names = self.about.device_mesh.dim_names or tuple(f"axis {i}" for i in range(len(self.about.placements)))
        return ", ".join(f"{name}: {p}" for name, p in zip(names, self.about.placements, strict=True))


@dataclass(frozen=True, repr=False)
class ModulePlan:
    """Where a module's parameters and buffers are. Prints as a table; in a notebook each one is a small coloured grid of
    which device holds which block, with a bar for the memory of each device.

    Attributes:
        rows: parameters and buffers; those that are alike in every layer are one row.
        bytes_by_device: device, such as "cpu:0", -> bytes of its pieces; tied parameters count once.
    """

    rows: tuple[PlacedRow, ...]
    bytes_by_device: Mapping[str, int]

    def __str__(self) -> str:
        from dtorch.forecast.record import size

        cells = [
            (_named(row), f"{str(row.about.dtype)[6:]}{list(row.about.shape)}", row.placed, _devices(row.about))
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        memory = ", ".join(f"{device} {size(count)}" for device, count in self.bytes_by_device.items())
        return "\n".join([*lines, f"memory: {memory}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from dtorch.forecast.record import size

        body = "".join(
            f"<tr><td>{html.escape(_named(row))}</td><td>{str(row.about.dtype)[6:]}{list(row.about.shape)}</td>"
            f"<td>{html.escape(row.placed)}</td><td>{_small(row.about)}</td></tr>"
            for row in self.rows
        )
        most = max(self.bytes_by_device.values(), default=0) or 1
        bars = "".join(
            f"<tr><th>{html.escape(device)}</th><td><div class='bar dv{_colour(device)}' style='width:{240 * count // most}px'>"
            f"</div></td><td>{size(count)}</td></tr>"
            for device, count in self.bytes_by_device.items()
        )
        head = "<tr><th>parameter</th><th>tensor</th><th>placements</th><th>who holds which block</th></tr>"
        return (
            f"<div class='dtorch-placed'><style>{_STYLE}</style><table>{head}{body}</table>"
            f"<table class='memory'>{bars}</table></div>"
        )


def plan_of(module: Any) -> ModulePlan:
    """Where the parameters and buffers of a module are, whichever way they came onto a mesh. Asks no worker.

    Args:
        module: a torch module that ``dtorch.distribute`` was given, or a ``dtorch.nn.Module``.

    Raises:
        TypeError: it is no module.
        ValueError: nothing of it is on a mesh.
    """
    if not callable(getattr(module, "named_parameters", None)):
        raise TypeError(f"plan_of: expected a module, got {type(module).__name__}")
    found = list(_tensors(module))
    if not found:
        raise ValueError(
            f"plan_of: no parameter of {type(module).__name__} is on a mesh; dtorch.distribute(module, mesh) puts them there"
        )
    groups: dict[Any, list[tuple[str, Inspection]]] = {}
    memory: Counter[str] = Counter()
    for name, tensor in found:
        about = inspect(tensor)
        for piece in about.pieces:
            memory[piece.device] += piece.size_bytes
        alike = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
        key = (alike, about.shape, about.dtype, about.placements, about.device_mesh)
        groups.setdefault(key, []).append((name, about))
    rows = [
        PlacedRow(key[0] if len(same) > 1 else same[0][0], len(same), same[0][1]) for key, same in groups.items()
    ]
    return ModulePlan(tuple(rows), dict(sorted(memory.items(), key=lambda item: (item[0][:-1], _number(item[0])))))


def _tensors(module: Any) -> Iterator[tuple[str, Any]]:
    buffers = getattr(module, "named_buffers", None)
    for name, value in (*module.named_parameters(), *(buffers() if callable(buffers) else ())):
        if isinstance(value, (Tensor, TorchTensor)):
            yield name, value


def _named(row: PlacedRow) -> str:
    return row.name if row.count == 1 else f"{row.name} (x{row.count})"


def _number(device: str) -> int:
    return int(device.rpartition(":")[2])


def _colour(device: str) -> int:
    return _number(device) % len(LIGHT)


def _devices(about: Inspection) -> str:
    return " | ".join(", ".join(cell.text for cell in line) for line in grid_of(about).cells)


def _small(about: Inspection) -> str:
    """A block has the colour of the first device that holds it; what every device holds has none."""
    lines = []
    grid = grid_of(about)
    is_cut = any(p.is_shard() and size > 1 for p, size in zip(about.placements, about.device_mesh.shape, strict=True))
    for line in grid.cells:
        cells = []
        for cell in line:
            who = cell.text.rpartition(":")[2]
            first = re.match(r"\d+", who) if is_cut else None
            colour = f" class='dv{int(first[0]) % len(LIGHT)}'" if first is not None else ""
            cells.append(f"<td{colour}>{html.escape(who)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table class='grid'>{''.join(lines)}</table>"


def _theme(colours: tuple[str, ...], text: str, prefix: str = "") -> str:
    rules = [f"{prefix}.dtorch-placed .dv{i}{{background:{colour};color:{text}}}" for i, colour in enumerate(colours)]
    return "".join(rules)


_STYLE = (
    ".dtorch-placed{font-size:13px}.dtorch-placed table{border-collapse:collapse;margin:6px 0}"
    ".dtorch-placed th{font-weight:normal;opacity:.7;text-align:left!important;padding:2px 8px}"
    ".dtorch-placed td{white-space:nowrap;text-align:left!important;padding:2px 8px;font-family:monospace;background:none}"
    ".dtorch-placed .grid{margin:1px 0}"
    ".dtorch-placed .grid td{border:1px solid rgba(128,128,128,.7);text-align:center!important;min-width:22px;padding:0 6px}"
    ".dtorch-placed .bar{height:12px;border:1px solid rgba(128,128,128,.7)}"
    + _theme(*_THEMES[0])
    + f"@media (prefers-color-scheme: dark){{{_theme(*_THEMES[1])}}}"
    # a notebook's own theme goes before the system's
    + _theme(*_THEMES[0], '[data-jp-theme-light="true"] ')
    + _theme(*_THEMES[1], '[data-jp-theme-light="false"] ')
)
