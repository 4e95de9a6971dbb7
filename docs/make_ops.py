"""Writes docs/ops.md: for each op, the placements it accepts on one mesh axis and the communication that needs.

    python docs/make_ops.py

Each entry of torch's operator database is called once, on replicated tensors of a mesh of three devices, and what its rule
offers for that call is written down. Needs the test extra.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dtorch  # noqa: E402
from dtorch.ops import _op  # noqa: E402
from dtorch.ops._call import Call, Sig  # noqa: E402
from dtorch.placement import from_code  # noqa: E402
from dtorch.proofs.listing import missing_signatures  # noqa: E402
from dtorch.runtime.kernels import KERNELS  # noqa: E402
from tests._op_db import OUT_OF_SCOPE  # noqa: E402

HEAD = """# What each op accepts

Made by `python docs/make_ops.py` from one call of each entry of torch's operator database on three devices; do not edit.
Inputs that are all replicated are always accepted, and so is a replicated input where a shard is wanted: each device cuts
its own. S(d) is Shard(d), R Replicate, P(op) Partial. The last column says what travels when the op runs: nothing, or what
its kernel exchanges; pending results (P) are reduced when they are redistributed or fetched. Other arguments, shapes and
dims can change what a call accepts; `PlacementError` lists it for the call at hand.

| op | accepted beside all R, inputs -> outputs | communication |
|---|---|---|
"""

LEFT_HEAD = """
## Legal, but not offered

`python -m dtorch ops --search` looks for signatures that would need no communication and that no rule offers, by trying every
combination of placements with torch's own functions on the pieces. What it finds, and why it is left:

"""


def short(code: int) -> str:
    placement = from_code(code)
    if placement.is_shard():
        return f"S({code % 64})" if code < 64 else f"S({code % 64}, block={code // 64 + 1})"
    return "R" if placement.is_replicate() else f"P({placement.reduce_op})"  # type: ignore[attr-defined]


def line(sig: Sig) -> str:
    return f"{', '.join(map(short, sig.ins))} -> {', '.join(map(short, sig.outs))}"


def main() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    seen: dict[str, dict[str, str]] = {}
    fit = _op.fit

    def noted(call: Call, sigs: Any, *rest: Any) -> Any:
        rows = seen.setdefault(call.name, {})
        for sig in sigs[0]:
            rows.setdefault(line(sig), sig.kernel)
        return fit(call, sigs, *rest)

    _op.fit = noted
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return dtorch.Tensor(value.detach(), device_mesh=mesh) if value.layout == torch.strided else value
        if isinstance(value, (list, tuple)):
            return type(value)(put(v) for v in value)
        return value

    warnings.simplefilter("ignore")
    for entry in op_db:
        if torch.float32 not in entry.dtypes:
            continue
        try:
            sample = max(
                (s for s, _ in zip(entry.sample_inputs("cpu", torch.float32), range(4), strict=False)),
                key=lambda s: s.input.ndim if isinstance(s.input, torch.Tensor) else 0,
            )
            entry.op(put(sample.input), *put(sample.args), **{k: put(v) for k, v in sample.kwargs.items()})
        except Exception as error:  # not every entry is an op of ours; those that are were noted before they could fail
            print(f"{entry.name}: {type(error).__name__}", file=sys.stderr)
    dtorch.shutdown()
    with (ROOT / "docs" / "ops.md").open("w") as out:
        out.write(HEAD)
        for name in sorted(seen):
            rows = seen[name]
            kernels = sorted({k for k in rows.values() if k in KERNELS and KERNELS[k].communicates})
            shown = [*rows][:12]
            accepted = "<br>".join(shown) + ("<br>..." if len(rows) > len(shown) else "")
            out.write(f"| `{name}` | {accepted or 'only all R'} | {', '.join(kernels) or 'none'} |\n")
        out.write("\n## Refused\n\nEntries of the database that are left out on purpose.\n\n")
        for name, reason in sorted(OUT_OF_SCOPE.items()):
            out.write(f"* `{name}`: {reason}\n")
        out.write(LEFT_HEAD)
        for reason, found in sorted(left().items()):
            out.write(f"* {reason}: {', '.join(f'`{name}`' for name in found)}\n")


def left() -> dict[str, list[str]]:
    """Functions with legal signatures that no rule offers, by the reason for which they are left."""
    by_reason: dict[str, set[str]] = {}
    for found in missing_signatures():
        by_reason.setdefault(found.reason or "worth a rule, which nobody has written yet", set()).add(found.op)
    dtorch.shutdown()
    return {reason: sorted(names) for reason, names in by_reason.items()}


if __name__ == "__main__":
    main()
