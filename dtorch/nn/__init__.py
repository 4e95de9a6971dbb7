"""``torch.nn`` for dtorch tensors.

Every layer of torch is here under its name, made of torch's own class (``module.py``); ``parallel.py`` adds layers
that split their weights over a mesh, ``functional.py`` and ``init.py`` are torch's namesakes.
"""

from __future__ import annotations

from typing import Any

import torch as _torch

from dtorch.nn import functional as functional
from dtorch.nn import init as init
from dtorch.nn import layers as _layers  # noqa: F401  (registers the quick forwards)
from dtorch.nn.module import Module as Module
from dtorch.nn.module import Parameter as Parameter
from dtorch.nn.module import functional_call as functional_call
from dtorch.nn.module import layer as _layer
from dtorch.nn.module import skip_init as skip_init
from dtorch.nn.moe import MixtureOfExperts as MixtureOfExperts
from dtorch.nn.parallel import (
    ColumnParallelLinear as ColumnParallelLinear,
)
from dtorch.nn.parallel import (
    ColumnParallelLinearWithReplicateInputOutput as ColumnParallelLinearWithReplicateInputOutput,
)
from dtorch.nn.parallel import (
    ColumnParallelLinearWithReplicateOutput as ColumnParallelLinearWithReplicateOutput,
)
from dtorch.nn.parallel import (
    EmbeddingWithReplicateOutput as EmbeddingWithReplicateOutput,
)
from dtorch.nn.parallel import (
    ReplicateParallelLinear as ReplicateParallelLinear,
)
from dtorch.nn.parallel import (
    RowParallelLinear as RowParallelLinear,
)
from dtorch.nn.parallel import (
    RowParallelLinearWithReplicateOutput as RowParallelLinearWithReplicateOutput,
)


def __getattr__(name: str) -> Any:
    found = getattr(_torch.nn, name)
    if isinstance(found, type) and issubclass(found, _torch.nn.Module):
        found = _layer(found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for name in dir(_torch.nn) if not name.startswith("_"))})
