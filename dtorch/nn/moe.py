"""A layer of experts, of which each token visits a few.

The experts are split over the mesh axis "ep", and each expert's inner features over "tp"; on other axes, and where the mesh
has neither, every device has copies. Tokens may be split over any axis: those that "ep" splits travel to their experts and
back; those it does not are answered everywhere by the experts that are there, and the answers added up.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtorch.creation import empty, target_mesh
from dtorch.mesh import DeviceMesh
from dtorch.nn import init
from dtorch.nn.module import Module, Parameter, is_init_skipped
from dtorch.ops.moe import mixture_of_experts
from dtorch.ops.redistribute import redistribute
from dtorch.ops.table import FUNCTIONAL
from dtorch.placement import Placement, Replicate, Shard
from dtorch.tensor import Tensor

AXIS, INNER_AXIS = "ep", "tp"


class MixtureOfExperts(Module):
    """Router and experts: ``sum over the chosen e of score[e] * down[e](act(gate[e](x)) * up[e](x))``.

    The scores are the softmax of the router's logits over all experts (in float32), of which the ``top_k`` largest count,
    as in Mixtral (Jiang et al., 2024). No token is dropped and none is padded.

    Shapes: input and result (..., hidden_size). Parameters: ``router`` (num_experts, hidden_size), ``gate_proj`` and
    ``up_proj`` (num_experts, intermediate_size, hidden_size), ``down_proj`` (num_experts, hidden_size, intermediate_size).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        activation: str = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """
        Args:
            top_k: experts that each token visits.
            normalize: scale the scores of the chosen experts so that they add up to 1.
            activation: as ``mixture_of_experts`` names them.
            device_mesh: mesh of the parameters; the mesh in force, or one CPU device, by default.

        Raises:
            ValueError: there are fewer experts than ``top_k``.
        """
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k}: a token visits between 1 and all {num_experts} experts")
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.top_k, self.normalize, self.activation = top_k, normalize, activation
        mesh = target_mesh(device_mesh, device, type(self).__name__)
        self._names = mesh.dim_names or ()

        def parameter(*shape: int, inner: int | None = None) -> Any:
            where = {AXIS: Shard(0)} | ({INNER_AXIS: Shard(inner)} if inner is not None else {})
            placements: list[Placement] = [where.get(name, Replicate()) for name in self._names]
            return Parameter(empty(shape, dtype=dtype, device_mesh=mesh, placements=placements or [Replicate()] * mesh.ndim))

        self.router = Parameter(empty((num_experts, hidden_size), dtype=dtype, device_mesh=mesh))
        self.gate_proj = parameter(num_experts, intermediate_size, hidden_size, inner=1)
        self.up_proj = parameter(num_experts, intermediate_size, hidden_size, inner=1)
        self.down_proj = parameter(num_experts, hidden_size, intermediate_size, inner=2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear``: uniform within 1 / sqrt(inputs)."""
        if is_init_skipped():
            return
        for weight in (self.router, self.gate_proj, self.up_proj, self.down_proj):
            bound = 1 / math.sqrt(max(weight.shape[-1], 1))
            init.uniform_(weight, -bound, bound)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their scores, both (..., top_k)."""
        logits = FUNCTIONAL["linear"](x, self.router)
        scores, indices = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.normalize:
            scores = scores / scores.sum(-1, keepdim=True)
        return indices, scores.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        indices, scores = self.route(x)
        out: Tensor = mixture_of_experts(
            x, indices, scores, self.up_proj, self.down_proj, self.gate_proj, activation=self.activation
        )
        summed = [Replicate() if p.is_partial() else p for p in out.placements]
        return out if tuple(summed) == out.placements else redistribute(out, summed)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, top_k={self.top_k}"
        )
