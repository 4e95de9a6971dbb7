"""What ``dtorch.explain`` found out: a record, as text and as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement


@dataclass(frozen=True)
class ParameterRow:
    """A parameter or buffer.

    Attributes:
        placements: one a mesh axis.
        bytes_per_device: that the device with the largest piece holds.
        tied_to: the name under which it is counted, if another one; else "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[Placement, ...]
    device_mesh: DeviceMesh
    bytes_per_device: int
    tied_to: str = ""


@dataclass(frozen=True)
class CommunicationRow:
    """What a layer sends in one forward, by op and kind.

    Attributes:
        layer: name of the module; file and line for calls outside of any.
        op: that was called; "redistribute" for a change of placements.
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "send".
        calls: how many.
        bytes_per_device: that the busiest device sends in all of them; None where it depends on values.
    """

    layer: str
    op: str
    kind: str
    calls: int
    bytes_per_device: int | None


@dataclass(frozen=True)
class DeviceRow:
    """Memory of one device.

    Attributes:
        activation_bytes: the most that results of the forward's calls hold at once, beside what torch's kernels need within
            a call; None when no forward was recorded.
    """

    device: str
    parameter_bytes: int
    activation_bytes: int | None


@dataclass(frozen=True)
class Explanation:
    """A plan, before anything runs. Prints as tables.

    Attributes:
        note: what is missing, and why; "" when nothing is.
    """

    parameters: tuple[ParameterRow, ...]
    communication: tuple[CommunicationRow, ...]
    devices: tuple[DeviceRow, ...]
    note: str = ""

    def tables(self, brief: bool = False) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """(title, header, rows) of each table.

        Args:
            brief: one row for layers that differ in their number only.
        """
        several = len({row.device_mesh for row in self.parameters}) > 1
        parameters: list[tuple[str, ...]] = [
            (
                row.name, f"{row.dtype}{list(row.shape)}", _placed(row, several),
                f"(tied to {row.tied_to})" if row.tied_to else size(row.bytes_per_device),
            )
            for row in self.parameters
        ]  # fmt: skip
        layers: list[tuple[str, ...]] = [
            (row.layer, row.op, row.kind, str(row.calls), "?" if row.bytes_per_device is None else size(row.bytes_per_device))
            for row in self.communication
        ]
        devices: list[tuple[str, ...]] = [
            (
                row.device, size(row.parameter_bytes), "?" if row.activation_bytes is None else size(row.activation_bytes),
                size(row.parameter_bytes + (row.activation_bytes or 0)),
            )
            for row in self.devices
        ]  # fmt: skip
        if brief:
            parameters, layers = _brief(parameters), _brief(layers)
        return [
            ("Parameters", ("name", "tensor", "placements", "bytes per device"), parameters),
            ("Communication in one forward", ("layer", "op", "kind", "calls", "bytes per device"), layers),
            ("Memory", ("device", "parameters", "activations, peak", "together"), devices),
        ]

    def text(self, brief: bool = False) -> str:
        parts = []
        for title, header, rows in self.tables(brief):
            parts.append(f"{title}\n{_table(header, rows)}" if rows else f"{title}\n  none")
        return "\n\n".join([*parts, *([self.note] if self.note else [])])

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = []
        for title, header, rows in self.tables(brief=len(self.parameters) > 60):
            head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
            body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            parts.append(f"<details open><summary>{html.escape(title)}</summary><table><tr>{head}</tr>{body}</table></details>")
        note = f"<div>{html.escape(self.note)}</div>" if self.note else ""
        return f'<div class="dtorch-plan"><style>{_STYLE}</style>{"".join(parts)}{note}</div>'


def size(count: int) -> str:
    """1536 -> "1.5 KiB"; exact below 1024."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.4g} {unit}"
    return f"{value / 1024:.4g} TiB"


def _placed(row: ParameterRow, with_devices: bool) -> str:
    names = row.device_mesh.dim_names
    parts = list(map(str, row.placements))
    if names is not None:
        parts = [f"{name}: {part}" for name, part in zip(names, parts, strict=True)]
    where = f" on {row.device_mesh.device_type}:{','.join(map(str, row.device_mesh.devices))}" if with_devices else ""
    return ", ".join(parts) + where


def _brief(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for all that are alike but for numbers in their names."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row[0]), *row[1:]), []).append(row)
    return [
        (f"{key[0]} (x{len(same)})", *key[1:]) if len(same) > 1 else same[0] for key, same in groups.items()
    ]


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return "\n".join("  " + line for line in lines)


_STYLE = (
    ".dtorch-plan{font-size:13px}.dtorch-plan table{border-collapse:collapse;margin:4px 0 10px}"
    ".dtorch-plan th,.dtorch-plan td{border:1px solid rgba(128,128,128,.4);padding:2px 8px;text-align:left}"
    ".dtorch-plan th{font-weight:normal;opacity:.7}.dtorch-plan td{font-family:monospace}"
    ".dtorch-plan summary{font-weight:bold;cursor:pointer}"
)
"""Borders half transparent and no colours of its own: right on light and on dark pages."""
