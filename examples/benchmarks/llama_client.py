"""What a model's forward costs the client: python examples/benchmarks/llama_client.py [--json FILE]

A Llama of 2 layers, so small that kernels do not count: llama.py on dtorch (one device), the same captured with
dtorch.compile, and transformers' own model after `distribute`, recorded and captured, each beside the same file or model
executed by plain torch. What is measured is the time until the client's thread has its result's future.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples, add_clock_option, alternate, per_op_us

import dtorch

sys.path.insert(0, str(Path(__file__).parents[1]))
import llama
import plain

NUM_TOKENS = 4
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64,
)


def hf_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


def forwards() -> dict[str, Callable[[], Any]]:
    """Name -> a forward of the tiny model."""
    hf = hf_model()
    state = hf.state_dict()
    ids, positions = torch.arange(NUM_TOKENS)[None] % 64, torch.arange(NUM_TOKENS)[None]

    twin_file = plain.load_llama()
    twin = twin_file.Llama(twin_file.LlamaConfig.from_hf(hf.config))
    twin.load_state_dict(state)

    mesh = dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with mesh:
        native = llama.Llama(llama.LlamaConfig.from_hf(hf.config))
        native.load_state_dict(state)
    whole = [dtorch.Replicate()]
    on_mesh = [dtorch.Tensor(t, device_mesh=mesh, placements=whole) for t in (ids, positions)]
    captured = dtorch.compile(native)

    faced_model = dtorch.distribute(hf_model(), mesh, "auto")
    faced_ids = dtorch.TorchTensor(on_mesh[0]) if not isinstance(on_mesh[0], torch.Tensor) else on_mesh[0]
    logits = dtorch.compile(lambda ids: faced_model(input_ids=ids).logits)

    def on(run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            with mesh:
                return run()

        return call

    return {
        "torch, llama.py": torch.no_grad()(lambda: twin(ids, positions)),
        "native": on(lambda: native(*on_mesh)),
        "native, captured": on(lambda: captured(*on_mesh)),
        "torch, transformers": torch.no_grad()(lambda: hf(input_ids=ids).logits),
        "face": torch.no_grad()(lambda: faced_model(input_ids=faced_ids).logits),
        "face, captured": torch.no_grad()(lambda: logits(faced_ids)),
    }


BESIDE = {"native": "torch, llama.py", "native, captured": "torch, llama.py", "face": "torch, transformers",
          "face, captured": "torch, transformers"}


def repeated(forward: Callable[[], Any], num: int) -> None:
    for _ in range(num):
        forward()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a model's forward costs the client.")
    add_json_option(parser)
    add_clock_option(parser)
    parser.add_argument("--repetitions", type=int, default=9, help="of each rival (%(default)s)")
    parser.add_argument("--forwards", type=int, default=20, help="in a repetition (%(default)s)")
    args = parser.parse_args()
    out = table_output(args.json)
    dtorch.init(workers="shared")
    facts = print_machine(out)
    found = forwards()
    expected = {"native": found["torch, llama.py"](), "face": found["torch, transformers"]()}
    for name, forward in found.items():
        if name in BESIDE:  # the right thing is measured
            value = forward().to_torch()
            torch.testing.assert_close(value, expected[name.partition(",")[0]].detach())
    rivals = {
        name: partial(
            per_op_us, partial(repeated, forward), args.forwards,
            None if name.startswith("torch") else dtorch.synchronize, args.clock,
        )
        for name, forward in found.items()
    }
    samples: dict[str, Samples] = alternate(rivals, args.repetitions, num_warmups=3)
    rows = []
    for name, twin in BESIDE.items():
        row = Row(f"forward, {name}", "us", samples[name].median, f"best {samples[name].best:.0f} us")
        row.others["torch"] = samples[twin].median
        row.samples = {"dtorch": samples[name], "torch": samples[twin]}
        rows.append(row)
    dtorch.shutdown()
    print_table(rows, {}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
