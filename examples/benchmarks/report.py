"""Figures as a table and as JSON, the same for every benchmark here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from timing import Samples

import dtorch


@dataclass
class Row:
    """One figure. ``others`` has a value, or text in its place, by the name of who reached it."""

    name: str
    unit: str
    dtorch: float | None
    note: str = ""
    others: dict[str, float] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """dtorch against plain torch, medians."""
        return self.dtorch / self.others["torch"] if self.dtorch is not None and "torch" in self.others else None

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "unit": self.unit, "dtorch": self.dtorch, **self.others}
        if self.note:
            found["note"] = self.note
        if self.ratio is not None:
            found["ratio_of_medians"] = self.ratio
        if "torch" in self.samples and "dtorch" in self.samples:
            found["ratio_of_best"] = self.samples["dtorch"].best / self.samples["torch"].best
        found["samples"] = {name: samples.record() for name, samples in self.samples.items()}
        return found


def compared(name: str, unit: str, samples: dict[str, Samples]) -> Row:
    """A row of the medians; the rival called "torch" is plain torch."""
    others = {who: found.median for who, found in samples.items() if who != "dtorch"}
    return Row(name, unit, samples["dtorch"].median, others=others, samples=samples)


def print_table(rows: Sequence[Row], outcome: Mapping[str, str], out: TextIO) -> None:
    names = [name for name, how in outcome.items() if how == "measured"]
    cells = [["figure", "unit", "dtorch", "torch", "ratio", *names, ""]]
    for row in rows:
        values = [row.dtorch, row.others.get("torch"), row.ratio, *(row.others.get(name) for name in names)]
        cells.append([row.name, row.unit, *("-" if v is None else f"{v:.2f}" for v in values), row.note])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        text = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text[2:-1] = [cell.rjust(width) for cell, width in zip(line[2:-1], widths[2:-1], strict=True)]
        print("  ".join(text).rstrip(), file=out)
    for name, how in outcome.items():
        if how != "measured":
            print(f"{name}: {how}", file=out)


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dtorch": dtorch.__version__,
    }


def print_machine(out: TextIO) -> dict[str, Any]:
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), file=out, flush=True)
    return facts


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the figures and all samples; - for standard output")


def table_output(json_file: str | None) -> TextIO:
    """Where tables go: not where the JSON goes."""
    return sys.stderr if json_file == "-" else sys.stdout


def write_json(
    json_file: str | None, facts: Mapping[str, Any], rows: Sequence[Row], outcome: Mapping[str, str] | None = None
) -> None:
    if not json_file:
        return
    found = {"machine": facts, "rows": [row.record() for row in rows], "peers": outcome or {}}
    text = json.dumps(found, indent=1)
    if json_file == "-":
        print(text)
        return
    with open(json_file, "w", encoding="utf-8") as file:
        file.write(text + "\n")
