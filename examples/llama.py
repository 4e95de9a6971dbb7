"""Llama, as one writes it for one device; the device mesh decides where it runs.

Shapes are always the global ones and nothing here asks how many devices there are. What is parallel is said by the
layers' names: a column-parallel linear splits its output features over the mesh axis "tp", a row-parallel one takes
features split like that and adds the devices' parts up; `block` and `groups` say where a split may fall. The layers are
split over pipeline stages, one mesh each; `ENTRY` names the mesh axes over which batch and sequence are split, and the
attention does what a split sequence needs. Parameter names are those of transformers' Llama, so `load_state_dict` takes its
state dict as it is.

    python examples/llama.py --dp 2 --tp 3 --pp 2

compares a tiny model on such a mesh with transformers' (the other axes are --ulysess-cp and --ring-cp).

Shape suffixes: B batch, T tokens of this call, L slots of the cache, N query heads, K key/value heads, H head size,
D hidden size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import dtorch
from dtorch import nn

F = nn.functional

Stage = Any  # a dtorch.DeviceMesh or a nullcontext; plain.py has no meshes
"""Where a pipeline stage is made and runs: its mesh, or `nullcontext()` for the mesh in force."""

ENTRY = {"dp": dtorch.Shard(0), "ulysess_cp": dtorch.Shard(1), "ring_cp": dtorch.Shard(1)}
"""How what has shape [B, T, ...] is split, by the names of mesh axes. Names that a mesh lacks, and other axes, say nothing."""

WHOLE = {"ulysess_cp": dtorch.Replicate(), "ring_cp": dtorch.Replicate()}
"""The sequence whole."""


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, config: Any) -> LlamaConfig:
        """The same model as a `transformers.LlamaConfig` describes.

        Raises:
            ValueError: the config asks for a rotary embedding or an activation that is not here.
        """
        rope_type = config.rope_parameters.get("rope_type", "default")
        if rope_type != "default":
            raise ValueError(f"rope_type {rope_type!r} is not supported, only 'default' is")
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only 'silu' is")
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_dim or config.hidden_size // config.num_attention_heads,
            rope_theta=config.rope_parameters["rope_theta"],
            norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )


class KVCache:
    """Keys, values and positions of the tokens so far, one slot a token, updated in place.

    The tensors grow by whole buckets, and where the next token goes is itself a tensor: the ops of one decoding step
    are the same as those of the step before, whatever the position. Make it where factories use the model's mesh
    (inside `with mesh:`), and call the model there.
    """

    BUCKET = 64
    UNUSED = 2**30  # the position of an empty slot: later than any query, so no query sees it

    def __init__(self) -> None:
        self.length = 0  # slots in use
        self.capacity = 0  # slots there are, a multiple of BUCKET
        self.next_slot = dtorch.zeros(1, dtype=dtorch.int64)  # == length, on the devices
        self.slots = self.next_slot  # where the tokens of the current call go; shape [T]
        self.positions_BL: dtorch.Tensor | None = None
        self.k_BKLH: list[dtorch.Tensor] = []  # one a layer
        self.v_BKLH: list[dtorch.Tensor] = []
        self.later: list[KVCache] = []  # those of the pipeline stages after the first

    def of(self, stage: int) -> KVCache:
        """The cache of one pipeline stage; ask for it where factories use the mesh of that stage."""
        if stage == 0:
            return self
        if stage > len(self.later):
            self.later.append(KVCache())
            self.later[-1].BUCKET = self.BUCKET
        return self.later[stage - 1]

    def begin(self, positions_BT: dtorch.Tensor) -> dtorch.Tensor:
        """Make room for T more tokens. Returns the position of every slot, shape [B, L]."""
        num_tokens = positions_BT.shape[1]
        self.slots = self.next_slot + dtorch.arange(num_tokens)
        self.next_slot = self.next_slot + num_tokens
        self.length += num_tokens
        self.capacity = max(self.capacity, -(-self.length // self.BUCKET) * self.BUCKET)
        if self.positions_BL is None:
            self.positions_BL = F.pad(positions_BT, (0, self.capacity - num_tokens), value=self.UNUSED)
        else:
            missing = self.capacity - self.positions_BL.shape[1]
            if missing:
                self.positions_BL = F.pad(self.positions_BL, (0, missing), value=self.UNUSED)
            self.positions_BL.index_copy_(1, self.slots, positions_BT)
        return self.positions_BL

    def update(self, layer: int, k_BKTH: dtorch.Tensor, v_BKTH: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor]:
        """Store one layer's keys and values of the current call. Returns those of every slot."""
        if layer == len(self.k_BKLH):
            self.k_BKLH.append(self._grown(k_BKTH))
            self.v_BKLH.append(self._grown(v_BKTH))
        else:
            with dtorch.auto_redistribute():  # tokens that are split are written by whoever has their slots
                self.k_BKLH[layer] = self._grown(self.k_BKLH[layer]).index_copy_(2, self.slots, k_BKTH)
                self.v_BKLH[layer] = self._grown(self.v_BKLH[layer]).index_copy_(2, self.slots, v_BKTH)
        return self.k_BKLH[layer], self.v_BKLH[layer]

    def _grown(self, x_BKLH: dtorch.Tensor) -> dtorch.Tensor:
        missing = self.capacity - x_BKLH.shape[2]
        return F.pad(x_BKLH, (0, 0, 0, missing)) if missing else x_BKLH


class Rope(nn.Module):
    """The rotary embedding's cosines and sines for given positions, shape [B, 1, T, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        exponents = dtorch.arange(0, config.head_size, 2, dtype=dtorch.float32) / config.head_size
        self.register_buffer("frequencies", 1.0 / config.rope_theta**exponents, persistent=False)

    def forward(self, positions_BT: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor]:
        angles = positions_BT[:, None, :, None].to(dtorch.float32) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return dtorch.cat((cos, cos), dim=-1), dtorch.cat((-sin, sin), dim=-1)


def rotate(x: dtorch.Tensor, cos: dtorch.Tensor, sin: dtorch.Tensor) -> dtorch.Tensor:
    """Turn each pair (x[i], x[i + H/2]) by its angle; the first half of `sin` carries the minus sign."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + dtorch.cat((second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        # Split between key/value heads, each with the query heads that use it; where there are more devices than those,
        # between query heads, and every device has all keys and values.
        hidden, bias = config.hidden_size, config.attention_bias
        block, groups = config.head_size, config.num_kv_heads
        self.q_proj = nn.ColumnParallelLinear(hidden, q_size, bias=bias, block=block, groups=groups)
        self.k_proj = nn.ColumnParallelLinear(hidden, kv_size, bias=bias, block=block, groups=groups)
        self.v_proj = nn.ColumnParallelLinear(hidden, kv_size, bias=bias, block=block, groups=groups)
        self.o_proj = nn.RowParallelLinearWithReplicateOutput(q_size, hidden, bias=bias, block=block, groups=groups)

    def forward(
        self,
        x_BTD: dtorch.Tensor,
        rope: tuple[dtorch.Tensor, dtorch.Tensor],
        mask: dtorch.Tensor | None,
        cache: KVCache | None,
    ) -> dtorch.Tensor:
        b, t, _ = x_BTD.shape
        q_BNTH = self.q_proj(x_BTD).view(b, t, self.num_heads, self.head_size).transpose(1, 2)
        k_BKTH = self.k_proj(x_BTD).view(b, t, self.num_kv_heads, self.head_size).transpose(1, 2)
        v_BKTH = self.v_proj(x_BTD).view(b, t, self.num_kv_heads, self.head_size).transpose(1, 2)
        q, k, v = rotate(q_BNTH, *rope), rotate(k_BKTH, *rope), v_BKTH
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        out_BNTH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out_BNTH.transpose(1, 2).reshape(b, t, self.num_heads * self.head_size))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.ColumnParallelLinear(hidden, inner, bias=bias)
        self.up_proj = nn.ColumnParallelLinear(hidden, inner, bias=bias)
        self.down_proj = nn.RowParallelLinearWithReplicateOutput(inner, hidden, bias=bias)

    def forward(self, x_BTD: dtorch.Tensor) -> dtorch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BTD: dtorch.Tensor,
        rope: tuple[dtorch.Tensor, dtorch.Tensor],
        mask: dtorch.Tensor | None,
        cache: KVCache | None,
    ) -> dtorch.Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope, mask, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


def assign_layers_to_stages(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage: neighbours together, and as many in each as in the others, or one more."""
    cuts = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def move(x: dtorch.Tensor, stage: Stage) -> dtorch.Tensor:
    """`x` where `stage` runs, placed on each axis of that mesh as it is on the axis of the same name."""
    return x if isinstance(stage, nullcontext) else x.redistribute_by_dict(stage)


def enter(x_BT: dtorch.Tensor, stage: Stage) -> dtorch.Tensor:
    """An input of the model where its first stage runs, split as `ENTRY` says."""
    return x_BT if isinstance(stage, nullcontext) else x_BT.redistribute_by_dict(stage, ENTRY, "replicate")


def leave(x: dtorch.Tensor, stage: Stage, like: dtorch.Tensor) -> dtorch.Tensor:
    """A result of the model on the mesh of its last stage, placed by name as `like`, an input of the model, came."""
    if isinstance(stage, nullcontext):
        return x
    came = dict(zip(like.device_mesh.dim_names or (), like.placements, strict=False))
    return x.redistribute_by_dict(stage, came, "replicate")


def whole(x_BT: dtorch.Tensor, stage: Stage) -> dtorch.Tensor:
    return x_BT if isinstance(stage, nullcontext) else x_BT.redistribute_by_dict(placements_dict=WHOLE)


class Decoder(nn.Module):
    """Everything but the head: token ids to hidden states."""

    def __init__(self, config: LlamaConfig, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.stages = stages
        self.assigned = assign_layers_to_stages(config.num_layers, len(stages))
        layers: list[Layer] = []
        with stages[0]:
            self.embed_tokens = nn.EmbeddingWithReplicateOutput(config.vocab_size, config.hidden_size)
            self.rope = Rope(config)
        for stage, own in zip(stages, self.assigned, strict=True):
            with stage:
                layers += [Layer(config, layer - own.start) for layer in own]
        self.layers = nn.ModuleList(layers)
        with stages[-1]:
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self, ids_BT: dtorch.Tensor, positions_BT: dtorch.Tensor | None, cache: KVCache | None
    ) -> dtorch.Tensor:
        mask = None
        with self.stages[0]:
            x_BTD = self.embed_tokens(enter(ids_BT, self.stages[0]))
            at_BT = dtorch.arange(ids_BT.shape[1])[None] if positions_BT is None else enter(positions_BT, self.stages[0])
            cos, sin = self.rope(at_BT)
        for number, (stage, own) in enumerate(zip(self.stages, self.assigned, strict=True)):
            with stage:
                x_BTD, at_BT = move(x_BTD, stage), move(at_BT, stage)
                cos, sin = move(cos, stage), move(sin, stage)
                past = None if cache is None else cache.of(number)
                if positions_BT is not None:
                    keys_BT = whole(at_BT, stage)
                    mask = causal_mask(at_BT, keys_BT if past is None else past.begin(keys_BT))
                for layer in own:
                    x_BTD = self.layers[layer](x_BTD, (cos, sin), mask, past)
        with self.stages[-1]:
            return self.norm(x_BTD)


def causal_mask(queries_BT: dtorch.Tensor, keys_BL: dtorch.Tensor) -> dtorch.Tensor:
    """Which key each query sees, from their positions; shape [B, 1, T, L].

    A token sees the tokens up to itself, and not the padding. Padding (positions below 0) sees earlier padding and
    itself, which no one reads: a row that sees nothing would be 0/0.
    """
    queries, keys = queries_BT[:, None, :, None], keys_BL[:, None, None, :]
    return (keys <= queries) & ((keys < 0) == (queries < 0))


class Llama(nn.Module):
    """A causal language model.

    The head has a parameter of its own even when its values are the embedding's: each is split as suits its use. The
    state dict of a model with tied embeddings therefore names both, as transformers' `state_dict()` does.

    Args:
        stages: the meshes of the pipeline stages, such as `mesh.unbind("pp")`, with named axes; inputs are then split as
            `ENTRY` says, and results are placed as the ids came. By default all is on the mesh in force, and inputs
            are taken as they are placed.
    """

    def __init__(self, config: LlamaConfig, stages: Sequence[Stage] = (nullcontext(),)) -> None:
        super().__init__()
        self.config = config
        self.last = stages[-1]
        self.model = Decoder(config, stages)
        with self.last:
            self.lm_head = nn.ColumnParallelLinearWithReplicateOutput(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, ids_BT: dtorch.Tensor, positions_BT: dtorch.Tensor | None = None, cache: KVCache | None = None
    ) -> dtorch.Tensor:
        """The logits of every token's successor, shape [B, T, vocabulary], on the mesh of the last stage.

        Args:
            ids_BT: token ids.
            positions_BT: each token's position in its sequence, from 0. Padding goes on the left and has the
                positions -1, -2, ... leftwards. None: no padding and no cache.
            cache: the tokens before these; None when there are none and none will follow.
        """
        if cache is not None and positions_BT is None:
            raise ValueError("with a cache, say the tokens' positions")
        with self.last:
            return leave(self.lm_head(self.model(ids_BT, positions_BT, cache)), self.last, ids_BT)

    def next_token(self, ids_BT: dtorch.Tensor, positions_BT: dtorch.Tensor, cache: KVCache) -> dtorch.Tensor:
        """The likeliest token after each sequence, shape [B, 1]: what `ids_BT` is in the next step."""
        with self.last:
            x_B1D = self.model(ids_BT, positions_BT, cache)[:, -1:]
            return leave(self.lm_head(x_B1D).argmax(dim=-1), self.last, ids_BT)


AXES = ("dp", "tp", "pp", "ulysess_cp", "ring_cp")


def main() -> None:
    """Compare a tiny random model, on a mesh of the sizes asked for, with transformers'."""
    parser = argparse.ArgumentParser(description="A tiny Llama on a mesh, beside transformers' on one device.")
    for axis in AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, default=1, help=f"size of the mesh axis {axis!r}")
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--length", type=int, default=29, help="tokens of each sequence (default: %(default)s)")
    args = parser.parse_args()
    sizes = tuple(getattr(args, axis) for axis in AXES)
    if min(*sizes, args.batch, args.length) < 1:
        parser.error("sizes are at least 1")

    import torch
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = TheirConfig(
        vocab_size=53, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=max(args.length, 64),
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(config.vocab_size, (args.batch, args.length))

    mesh = dtorch.init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    with nn.skip_init():
        model = Llama(LlamaConfig.from_hf(config), mesh.unbind("pp"))
    model.load_state_dict(theirs.state_dict())
    logits = model(dtorch.Tensor(ids, device_mesh=mesh)).to_torch()
    error = (logits - theirs(ids).logits).abs().max().item()
    print(f"{mesh.size()} devices: {', '.join(f'{a} {n}' for a, n in zip(AXES, sizes, strict=True))}")
    print(f"the logits differ from transformers' by at most {error:.1e}")
    if not error < 1e-4:
        raise SystemExit("that is too much")


if __name__ == "__main__":
    main()
