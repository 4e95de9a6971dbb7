"""Runs the search over torch's operator database: what could run piece by piece and does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import dtorch
from dtorch.ops._call import Sig
from dtorch.proofs.cases import cases_of, entries
from dtorch.proofs.claims import line
from dtorch.proofs.left import reason_for
from dtorch.proofs.search import search
from dtorch.runtime.layout import is_partial


@dataclass(frozen=True)
class Found:
    """A legal signature that no rule offers.

    Attributes:
        op: name in the op table.
        signature: "Shard(dim=0) -> Shard(dim=0)".
        example: a call that it was found with.
        reason: why it is left; None when nobody has said.
    """

    op: str
    signature: str
    example: str
    reason: str | None


def missing_signatures(pattern: str = "", num_samples: int = 4) -> Iterator[Found]:
    """What the search finds for entries of the database whose names contain ``pattern``, each signature of an op once.

    Raises:
        LookupError: no entry has such a name.
    """
    chosen = {name: entry for name, entry in entries().items() if pattern in name}
    if not chosen:
        raise LookupError(f"torch's operator database has no entry whose name contains {pattern!r}")
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    seen: set[tuple[str, Sig | str]] = set()
    for entry in chosen.values():
        for case in cases_of(entry, mesh, num_samples):
            if (case.op.name, str(case)) in seen:
                continue
            seen.add((case.op.name, str(case)))
            with torch.no_grad():
                found = search(case)
            for sig in found:
                if (case.op.name, sig) not in seen:
                    seen.add((case.op.name, sig))
                    pending = any(map(is_partial, sig.ins))
                    yield Found(case.op.name, line(sig), str(case), reason_for(case.op.name, pending))
