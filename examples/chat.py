"""Ask a language model: python examples/chat.py "What is the capital of France?"

SmolLM2-135M-Instruct answers, tensor-parallel over `--tp` devices. Several prompts (`--prompt-file`, one a line) go
through as one batch, which `--dp` splits over further devices.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any

AHEAD = 2  # decoding steps that are issued before the token of an earlier one is waited for


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask SmolLM2-135M-Instruct, tensor-parallel on a device mesh.")
    parser.add_argument("prompt", nargs="?", help="the question")
    parser.add_argument("--prompt-file", type=Path, help="ask every line of this file, in one batch")
    parser.add_argument("--tp", type=positive, default=3, help="devices that share each layer (default: %(default)s)")
    parser.add_argument("--dp", type=positive, default=1, help="groups of --tp devices that share the prompts (1)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="at most so long an answer (%(default)s)")
    parser.add_argument("--device", default="cpu", help="device type of the mesh (default: %(default)s)")
    # run on plain torch, without dtorch: for comparison
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    if (args.prompt is None) == (args.prompt_file is None):
        parser.error("give either a prompt or --prompt-file")
    if args.prompt_file is None:
        args.prompts = [args.prompt]
    else:
        try:
            args.prompts = [line for line in args.prompt_file.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"cannot read --prompt-file: {error}")
    if not any(prompt.strip() for prompt in args.prompts):
        parser.error("the prompt is empty" if args.prompt_file is None else f"{args.prompt_file} has no prompt")
    if args.dp > len(args.prompts):
        parser.error(f"--dp {args.dp} is more than there are prompts ({len(args.prompts)})")
    return args


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


class Detokenizer:
    """Turns token ids into text as they come; a character whose bytes span several tokens appears once complete."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # first id of the window that is decoded: some already printed ones, for context
        self.printed = 0  # ids before this one are printed

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none."""
        self.ids.append(token)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):  # bytes of a character are still missing
            return ""
        self.start, self.printed = self.printed, len(self.ids)
        return text

    def flush(self) -> str:
        """What is left: the bytes of a character that never became whole."""
        text = self._new_text()
        self.start = self.printed = len(self.ids)
        return text

    def _new_text(self) -> str:
        known = self._decode(self.ids[self.start : self.printed])
        return self._decode(self.ids[self.start :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def encode(tokenizer: Any, prompts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and positions of the prompts as chat messages, padded on the left to one length.

    The template puts its system message before each: "You are a helpful AI assistant named SmolLM, trained by Hugging
    Face".
    """
    rows: list[list[int]] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]
    length = max(map(len, rows))
    ids = [[tokenizer.pad_token_id] * (length - len(row)) + row for row in rows]
    positions = [list(range(len(row) - length, len(row))) for row in rows]
    return ids, positions


async def generate(
    model: Any, ids: Any, positions: Any, cache: Any, max_new_tokens: int, ahead: int
) -> AsyncGenerator[list[int], None]:
    """Greedy decoding: yields the next token of every sequence, step by step.

    A step takes its tokens from the step before as a tensor, so `ahead` further steps are on their way before this
    side has seen a value.
    """
    pending: deque[Any] = deque()
    for _ in range(max_new_tokens):
        ids = model.next_token(ids, positions, cache)
        positions = positions[:, -1:] + 1
        pending.append(ids)
        if len(pending) > ahead:
            yield await read(pending.popleft())
    while pending:
        yield await read(pending.popleft())


async def read(tokens: Any) -> list[int]:
    """The values of a [B, 1] tensor of dtorch, or of plain torch."""
    rows = await tokens.tolist_async() if hasattr(tokens, "tolist_async") else tokens.tolist()
    return [row[0] for row in rows]


async def answer(args: argparse.Namespace, dtorch: ModuleType, llama: ModuleType) -> None:
    import smollm
    import torch

    hf_config, state_dict, tokenizer = smollm.load()
    config = llama.LlamaConfig.from_hf(hf_config)
    ids, positions = encode(tokenizer, args.prompts)
    if len(ids[0]) + args.max_new_tokens > config.max_positions:
        raise SystemExit(
            f"chat.py: the longest prompt has {len(ids[0])} tokens; with --max-new-tokens {args.max_new_tokens} "
            f"that is more than the model's {config.max_positions}"
        )

    mesh = dtorch.init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    with mesh, torch.no_grad():
        with dtorch.nn.skip_init():
            model = llama.Llama(config)
        model.load_state_dict(state_dict)
        by_prompt = [dtorch.Shard(0), dtorch.Replicate()]
        steps = generate(
            model,
            dtorch.Tensor(torch.tensor(ids), device_mesh=mesh, placements=by_prompt),
            dtorch.Tensor(torch.tensor(positions), device_mesh=mesh, placements=by_prompt),
            llama.KVCache(),
            args.max_new_tokens,
            ahead=0 if args.plain else AHEAD,
        )
        streaming = len(args.prompts) == 1
        texts = [Detokenizer(tokenizer) for _ in args.prompts]
        pieces: list[list[str]] = [[] for _ in args.prompts]
        running = set(range(len(args.prompts)))
        async with aclosing(steps):
            async for tokens in steps:
                for sequence in sorted(running):
                    if tokens[sequence] == tokenizer.eos_token_id:
                        running.remove(sequence)
                    else:
                        pieces[sequence].append(texts[sequence].push(tokens[sequence]))
                        if streaming:
                            print(pieces[sequence][-1], end="", flush=True)
                if not running:
                    break
    if streaming:
        print(texts[0].flush())
    else:
        for prompt, text, parts in zip(args.prompts, texts, pieces, strict=True):
            print(f"> {prompt}\n{''.join(parts)}{text.flush()}\n")


async def main() -> None:
    args = parse_arguments()
    if args.plain:
        import plain

        await answer(args, plain, plain.load_llama())
    else:
        dtorch = importlib.import_module("dtorch")
        dtorch.init()  # the workers start while the weights are read
        await answer(args, dtorch, importlib.import_module("llama"))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
