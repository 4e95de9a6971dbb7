"""``torch.nn.init`` for dtorch tensors: the same functions, the same numbers from the same seed.

Most of them are made of tensor methods and work as they are. Those that ask for ``__torch_function__`` get their form
here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from torch.nn import init as _torch

from dtorch.nn.module import is_init_skipped
from dtorch.ops.table import composite
from dtorch.tensor import Tensor


def _no_generator(generator: Any) -> None:
    if generator is not None:
        raise ValueError("generator= is not supported; dtorch.manual_seed seeds what is drawn from")


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Tensor:
    """Fill with draws from the uniform distribution on [a, b)."""
    _no_generator(generator)
    return tensor.uniform_(a, b)  # type: ignore[no-any-return]


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Tensor:
    """Fill with draws from the normal distribution."""
    _no_generator(generator)
    return tensor.normal_(mean, std)  # type: ignore[no-any-return]


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill with ``val``."""
    return tensor.fill_(val)  # type: ignore[no-any-return]


def kaiming_uniform_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None
) -> Tensor:
    """Fill with uniform draws whose bound follows from the number of inputs or outputs of a unit (He et al., 2015)."""
    _no_generator(generator)
    if 0 in tensor.shape:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=2)
        return tensor
    fan = _torch._calculate_correct_fan(tensor, mode)  # type: ignore[arg-type]
    std = _torch.calculate_gain(nonlinearity, a) / math.sqrt(fan)  # type: ignore[arg-type]
    bound = math.sqrt(3.0) * std
    return tensor.uniform_(-bound, bound)  # type: ignore[no-any-return]


def _unless_skipped(ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's layers inside torch's layers come here with their parameters; see ``skip_init``."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if is_init_skipped() else ours(tensor, *args, **kwargs)

    return call


for _ours in (uniform_, normal_, constant_, kaiming_uniform_):
    composite(getattr(_torch, _ours.__name__))(_unless_skipped(_ours))


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)
