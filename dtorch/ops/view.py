"""Ops that look at the same elements under another shape."""

from __future__ import annotations

from dtorch.ops._rules import regroup, same_cuts
from dtorch.ops.table import row

row("view", regroup, verify=same_cuts, is_view=True, in_place=False, places="torch.Tensor")
row("reshape flatten ravel unflatten", regroup, verify=same_cuts, is_view=True, in_place=False)
