"""Load on the server of examples/server.py, and on the same server over plain torch with a thread executor:

    python examples/benchmarks/serve.py --clients 8 --seconds 30 --json out.json

Each client sends one request after the other, half of them /generate (read to the last token) and half /embed. Servers,
weights and clients live in one process; the two servers run one after the other, so their ratio is that of one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import ClientError, ClientSession, ClientTimeout, web

sys.path.append(str(Path(__file__).parents[1]))
PROMPTS = ("What is the capital of France?", "Name three colours.", "Write one line about the sea.", "What is 2 + 3?")


@dataclass
class Load:
    """What the clients saw. Times are in seconds."""

    generate_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    embed_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        times = {"generate": self.generate_s, "first_token": self.first_token_s, "embed": self.embed_s, "health": self.health_s}
        return {
            "seconds": round(self.seconds, 2),
            "errors": dict(self.errors),
            "tokens_per_s": round(self.num_tokens / self.seconds, 1),
            "requests": {"generate": len(self.generate_s), "embed": len(self.embed_s), "health": len(self.health_s)},
            "latency_ms": {
                name: {f"p{q}": round(1000 * quantile(values, q / 100), 1) for q in (50, 95, 99)}
                for name, values in times.items()
                if values
            },
        }


def quantile(values: list[float], q: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


async def client(number: int, http: ClientSession, url: str, until: float, tokens: int, load: Load) -> None:
    turn = number
    while time.perf_counter() < until:
        begin = time.perf_counter()
        prompt = PROMPTS[turn % len(PROMPTS)]
        try:
            if turn % 2:
                async with http.post(f"{url}/embed", json={"texts": [prompt]}) as response:
                    await response.read()
                    if response.status != 200:
                        load.errors[f"/embed {response.status}"] += 1
                    load.embed_s.append(time.perf_counter() - begin)
            else:
                await generate(http, url, prompt, tokens, load, begin)
        except (ClientError, asyncio.TimeoutError) as error:
            load.errors[type(error).__name__] += 1
        turn += 1


async def generate(http: ClientSession, url: str, prompt: str, tokens: int, load: Load, begin: float) -> None:
    async with http.post(f"{url}/generate", json={"prompt": prompt, "max_new_tokens": tokens}) as response:
        if response.status != 200:
            load.errors[f"/generate {response.status}"] += 1
            return
        is_done = False
        first = True
        async for line in response.content:
            if line.startswith(b"event: error"):
                load.errors["event: error"] += 1
            is_done = is_done or line.startswith(b"event: done")
            if line.startswith(b"data: ") and not is_done:
                if first:
                    load.first_token_s.append(time.perf_counter() - begin)
                    first = False
                load.num_tokens += 1
        if not is_done:
            load.errors["a stream without end"] += 1
        load.generate_s.append(time.perf_counter() - begin)


async def watch_health(http: ClientSession, url: str, load: Load) -> None:
    while True:
        begin = time.perf_counter()
        async with http.get(f"{url}/health") as response:
            await response.read()
            if response.status != 200:
                load.errors[f"/health {response.status}"] += 1
        load.health_s.append(time.perf_counter() - begin)
        await asyncio.sleep(0.1)


async def put_under_load(app: web.Application, args: argparse.Namespace) -> dict[str, Any]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with ClientSession(timeout=ClientTimeout(total=300)) as http:
            await asyncio.gather(*(client(i, http, url, time.perf_counter() + 0.01, 2, Load()) for i in range(2)))  # warm
            load = Load()
            begin = time.perf_counter()
            health = asyncio.create_task(watch_health(http, url, load))
            until = begin + args.seconds
            await asyncio.gather(*(client(i, http, url, until, args.tokens, load) for i in range(args.clients)))
            load.seconds = time.perf_counter() - begin
            health.cancel()
            return load.summary()
    finally:
        await runner.cleanup()


# ---- the same server on plain torch


class PlainBatcher:
    """What `server.Server` needs of a batcher: each sequence is decoded alone, steps run in a thread executor."""

    failure = None

    def __init__(self, model: Any, cache: Any, eos_id: int, executor: ThreadPoolExecutor, max_length: int) -> None:
        self.model, self.cache, self.eos_id, self.executor, self.max_length = model, cache, eos_id, executor, max_length
        self.num_tokens = self.num_steps = self.num_running = 0
        self.busy_s = 0.0
        self.queue: list[Any] = []

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def submit(self, prompt: list[int], max_new_tokens: int) -> PlainStream:
        return PlainStream(self, prompt, max_new_tokens)


class PlainStream:
    reason = "length"

    def __init__(self, batcher: PlainBatcher, prompt: list[int], count: int) -> None:
        self.batcher, self.left = batcher, count
        self.cache, self.ids = batcher.cache(), torch.tensor([prompt])
        self.positions = torch.arange(len(prompt))[None]

    def close(self) -> None:
        self.left = 0

    def __aiter__(self) -> PlainStream:
        return self

    async def __anext__(self) -> int:
        if not self.left:
            raise StopAsyncIteration
        token: int = await asyncio.get_running_loop().run_in_executor(self.batcher.executor, self._step)
        self.left -= 1
        if token == self.batcher.eos_id:
            self.left, self.reason = 0, "stop"
            raise StopAsyncIteration
        self.batcher.num_tokens += 1
        return token

    @torch.inference_mode()
    def _step(self) -> int:
        self.ids = self.batcher.model.next_token(self.ids, self.positions, self.cache)
        self.positions = self.positions[:, -1:] + 1
        return int(self.ids.item())


class PlainEmbedder:
    """The encoder of minilm.py on plain torch, one request at a time in a thread executor."""

    failure = None
    max_length = 256
    num_sentences = num_runs = 0

    def __init__(self, model: Any, executor: ThreadPoolExecutor) -> None:
        self.model, self.executor = model, executor

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def embed(self, sentences: list[list[int]]) -> list[list[float]]:
        return await asyncio.get_running_loop().run_in_executor(self.executor, self._run, sentences)

    @torch.inference_mode()
    def _run(self, sentences: list[list[int]]) -> list[list[float]]:
        length = max(map(len, sentences))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in sentences])
        mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in sentences])
        vectors: list[list[float]] = self.model(ids, mask).tolist()
        return vectors


class NoSession:
    def check_open(self) -> None: ...


def plain_application(threads: int) -> web.Application:
    import chat
    import plain
    import server
    import smollm

    hf_config, state_dict, tokenizer = smollm.load(progress=False)
    llama = plain.load_llama()
    model = llama.Llama(llama.LlamaConfig.from_hf(hf_config)).requires_grad_(False)
    model.load_state_dict(state_dict)
    embedder, encode = plain_encoder()
    executor = ThreadPoolExecutor(threads)
    return server.Server(
        NoSession(),  # type: ignore[arg-type]  # there are no workers to watch
        PlainBatcher(model, llama.KVCache, tokenizer.eos_token_id, executor, 512),  # type: ignore[arg-type]
        lambda prompt: chat.encode(tokenizer, [prompt])[0][0],
        lambda: chat.Detokenizer(tokenizer),
        PlainEmbedder(embedder, executor),  # type: ignore[arg-type]
        encode,
    ).application()


def plain_encoder() -> tuple[Any, Any]:
    import minilm
    from transformers import BertModel

    tokenizer = minilm.load()[2]
    theirs = BertModel.from_pretrained(minilm.find(), add_pooling_layer=False).eval()

    def embed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = theirs(ids, mask.long()).last_hidden_state
        wide = mask[..., None].to(states.dtype)
        return torch.nn.functional.normalize((states * wide).sum(1) / wide.sum(1), dim=-1)

    return embed, lambda text: list(tokenizer.encode(text).ids)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Latency and throughput of the server under load.")
    parser.add_argument("--clients", type=int, default=8, help="that send at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load, for each server (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="asked for by a request (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="devices that share each layer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of the plain server's executor (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    import server

    options = argparse.Namespace(device="cpu", tp=args.tp, rows=args.clients, max_length=128, max_queued=64)
    found = {"dtorch": await put_under_load(await server.load(options), args)}
    print("dtorch", json.dumps(found["dtorch"], indent=1))
    found["plain torch"] = await put_under_load(plain_application(args.threads), args)
    print("plain torch", json.dumps(found["plain torch"], indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps({"options": {k: str(v) for k, v in vars(args).items()}, **found}, indent=1))
    if any(one["errors"] for one in found.values()):
        raise SystemExit("there were errors")


if __name__ == "__main__":
    asyncio.run(main())
