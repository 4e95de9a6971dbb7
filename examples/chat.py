"""Ask a language model: python examples/chat.py "What is the capital of France?"

SmolLM2-135M-Instruct answers, tensor-parallel over `--tp` devices, its layers in `--pp` stages of such. Several prompts
(`--prompt-file`, one a line) go through as one batch, which `--dp` splits over further devices. The model is the one of
llama.py or, with `--hf`, that of transformers as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
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
    parser.add_argument("--pp", type=positive, default=1, help="stages of --dp x --tp devices that share the layers (1)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="at most so long an answer (%(default)s)")
    parser.add_argument("--device", default="cpu", help="device type of the mesh (default: %(default)s)")
    parser.add_argument("--hf", action="store_true", help="use the model of transformers instead of llama.py's")
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
    if args.pp > 1 and (args.hf or args.plain):
        parser.error("--pp goes with the model of llama.py")
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


class Answers:
    """Shows the answers: a single one as it comes, several at the end."""

    def __init__(self, tokenizer: Any, prompts: list[str]) -> None:
        self.eos = tokenizer.eos_token_id
        self.prompts = prompts
        self.streaming = len(prompts) == 1
        self.texts = [Detokenizer(tokenizer) for _ in prompts]
        self.pieces: list[list[str]] = [[] for _ in prompts]
        self.running = set(range(len(prompts)))

    def push(self, tokens: list[int]) -> bool:
        """Take every answer's next token; whether any answer goes on."""
        for sequence in sorted(self.running):
            if tokens[sequence] == self.eos:
                self.running.remove(sequence)
            else:
                self.pieces[sequence].append(self.texts[sequence].push(tokens[sequence]))
                if self.streaming:
                    print(self.pieces[sequence][-1], end="", flush=True)
        return bool(self.running)

    def finish(self) -> None:
        if self.streaming:
            print(self.texts[0].flush())
            return
        for prompt, text, parts in zip(self.prompts, self.texts, self.pieces, strict=True):
            print(f"> {prompt}\n{''.join(parts)}{text.flush()}\n")


class Streamer:
    """What transformers' `generate` gives the tokens to."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.is_prompt = True  # the first that comes

    def put(self, tokens: Any) -> None:
        if not self.is_prompt:
            self.answers.push(tokens.tolist())
        self.is_prompt = False

    def end(self) -> None:
        self.answers.finish()


async def answer(args: argparse.Namespace, dtorch: ModuleType, llama: ModuleType | None) -> None:
    import smollm
    import torch

    hf_config, state_dict, tokenizer = smollm.load()
    ids, positions = encode(tokenizer, args.prompts)
    if len(ids[0]) + args.max_new_tokens > hf_config.max_position_embeddings:
        raise SystemExit(
            f"chat.py: the longest prompt has {len(ids[0])} tokens; with --max-new-tokens {args.max_new_tokens} "
            f"that is more than the model's {hf_config.max_position_embeddings}"
        )

    answers = Answers(tokenizer, args.prompts)
    mesh = dtorch.init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    stages: list[Any] = [nullcontext()]
    if args.pp > 1:
        sizes = (args.pp, args.dp, args.tp)
        stages = dtorch.init_device_mesh(args.device, sizes, mesh_dim_names=("pp", "dp", "tp")).unbind("pp")
        mesh = stages[0]
    if llama is None:
        model = dtorch.distribute(load_hf(hf_config, state_dict), mesh, "auto")
        await asyncio.to_thread(  # it asks for every token, which would stop this loop
            model.generate,
            torch.tensor(ids),
            attention_mask=(torch.tensor(positions) >= 0).long(),
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            streamer=Streamer(answers),
        )
        return
    config = llama.LlamaConfig.from_hf(hf_config)
    with mesh, torch.no_grad():
        with dtorch.nn.skip_init():
            model = llama.Llama(config, stages)
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
        async with aclosing(steps):
            async for tokens in steps:
                if not answers.push(tokens):
                    break
    answers.finish()


def load_hf(config: Any, state_dict: dict[str, Any]) -> Any:
    """transformers' model with these weights. They are already here, so no initial ones are drawn."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tied = state_dict["lm_head.weight"] is state_dict["model.embed_tokens.weight"]
    full = LlamaConfig(**vars(config), tie_word_embeddings=tied)
    return LlamaForCausalLM.from_pretrained(None, config=full, state_dict=state_dict).eval()


async def main() -> None:
    args = parse_arguments()
    if args.plain:
        import plain

        await answer(args, plain, plain.load_llama())
    else:
        dtorch = importlib.import_module("dtorch")
        dtorch.init()  # the workers start while the weights are read
        await answer(args, dtorch, None if args.hf else importlib.import_module("llama"))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
