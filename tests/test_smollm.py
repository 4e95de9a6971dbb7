"""SmolLM2-135M's real weights: 9 heads, 3 key/value heads, over any number of devices and stages, the same tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # what transformers warns about is not ours

EXAMPLES = Path(__file__).parent.parent / "examples"
NUM_TOKENS = 4
SCHEMES = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 5, 1), (2, 2, 1), (3, 4, 1), (1, 2, 2)]


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Any, Any, Any]]:
    """llama.py, the model's config and its weights."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import llama
        import smollm

        try:
            config, state_dict, _ = smollm.load(progress=False)
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
        yield llama, llama.LlamaConfig.from_hf(config), state_dict
    finally:
        sys.path.remove(str(EXAMPLES))


IDS = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is"


@pytest.fixture(scope="module")
def expected(loaded: tuple[Any, Any, Any]) -> list[int]:
    """The tokens on plain torch, and no near ties among them."""
    import plain

    module = plain.load_llama()
    model = module.Llama(loaded[1])
    model.load_state_dict(loaded[2], assign=True)
    ids = IDS
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = model(ids)[0, -1]
            first, second = logits.topk(2).values.tolist()
            assert first - second > 0.01
            ids = torch.cat((ids, logits.argmax().reshape(1, 1)), 1)
    return ids[0, IDS.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", SCHEMES, ids=lambda sizes: "pp{} tp{} ring{}".format(*sizes))
def test_the_same_greedy_tokens(loaded: tuple[Any, Any, Any], expected: list[int], sizes: tuple[int, ...]) -> None:
    llama, config, state_dict = loaded
    stages = dtorch.init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "tp", "ring_cp")).unbind("pp")
    with dtorch.nn.skip_init():
        model = llama.Llama(config, stages)
    model.load_state_dict(state_dict)
    with stages[0]:
        ids, positions = dtorch.tensor(IDS), dtorch.arange(IDS.shape[1])[None]
        cache = llama.KVCache()
    made = []
    for _ in range(NUM_TOKENS):
        ids, positions = model.next_token(ids, positions, cache), positions[:, -1:] + 1
        made.append(ids)
    assert [int(token.item()) for token in made] == expected
