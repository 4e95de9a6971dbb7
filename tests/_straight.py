"""Changes that straight modules must notice, of a block with the parts ``up``, ``act`` and ``down``; and what counts plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtorch.session import current_session


def played(run: Callable[[], Any]) -> tuple[Any, int]:
    """The value, and how many calls of modules were played for it."""
    before = current_session().num_played
    made = run()
    return made.to_torch(), current_session().num_played - before


def written(block: Any) -> None:
    block.norm.weight.mul_(3)


def eps(block: Any) -> None:
    block.norm.eps = 0.25


def hook(block: Any) -> None:
    block.up.register_forward_hook(lambda module, args, out: out * 2)


def pre_hook_outside(block: Any) -> None:
    block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def no_bias(block: Any) -> None:
    block.down.bias = None


def own_forward(block: Any) -> None:
    block.act.forward = torch.abs


def double_and_back(block: Any) -> None:
    block.double()
    block.float()
