"""The examples' server behind a real client, with tiny random models."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import ClientSession, ClientTimeout, web
from prometheus_client.parser import text_string_to_metric_families

import dtorch
from dtorch.session import current_session

EXAMPLES = Path(__file__).parent.parent / "examples"
VOCABULARY = 50
MAX_LENGTH = 128
WAIT_S = 30.0  # far above what anything takes; only a failing test waits this long


@pytest.fixture(scope="module")
def examples() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import batching
        import llama
        import minilm
        import plain
        import server

        yield SimpleNamespace(
            batching=batching, llama=llama, minilm=minilm, plain=plain.load_llama(), server=server
        )
    finally:
        sys.path.remove(str(EXAMPLES))


class Words:
    def push(self, token: int) -> str:
        return f"<{token}>"

    def flush(self) -> str:
        return "."


def encode(prompt: str) -> list[int]:
    return [int(word) for word in prompt.split()]


def config(module: ModuleType) -> Any:
    return module.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=36, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=3,
        head_size=6, rope_theta=10000.0, norm_eps=1e-5, max_positions=MAX_LENGTH,
    )  # fmt: skip


@pytest.fixture(scope="module")
def twin(examples: SimpleNamespace) -> Any:
    """The model on plain torch."""
    torch.manual_seed(0)
    return examples.plain.Llama(config(examples.plain)).requires_grad_(False)


class Running:
    """A server that runs, and a client of it."""

    def __init__(
        self, server: Any, runner: web.AppRunner, client: ClientSession, url: str, draining: asyncio.Event
    ) -> None:
        self.server, self.runner, self.client, self.url, self.draining = server, runner, client, url, draining
        self.batcher, self.embedder = server.batcher, server.embedder

    def generate(self, prompt: str, count: int) -> Any:
        return self.client.post(f"{self.url}/generate", json={"prompt": prompt, "max_new_tokens": count})

    async def tokens(self, prompt: str, count: int) -> list[int]:
        async with self.generate(prompt, count) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            events = [event async for event in events_of(response)]
        name, last = events[-1]
        assert name == "done"
        assert last["num_tokens"] == len(events) - 1
        assert all(event["text"] == f"<{event['token']}>" for _, event in events[:-1])
        return [event["token"] for _, event in events[:-1]]

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(f"{self.url}{path}") as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any) -> tuple[int, Any, Any]:
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        async with self.client.post(f"{self.url}{path}", data=data) as response:
            return response.status, await response.json(), response.headers

    async def metrics(self) -> dict[str, float]:
        async with self.client.get(f"{self.url}/metrics") as response:
            text = await response.text()
        assert {family.type for family in text_string_to_metric_families(text)} <= {"counter", "gauge", "histogram"}
        lines = text.splitlines()
        samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name.removeprefix("dtorch_server_"): float(value) for name, _, value in samples}


async def events_of(response: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in response.content:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)
            name = ""


@asynccontextmanager
async def running(
    examples: SimpleNamespace, twin: Any, *, gated: bool = False, tp: int = 2, **options: Any
) -> AsyncIterator[Running]:
    mesh = dtorch.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    with mesh:
        with dtorch.nn.skip_init():
            model = examples.llama.Llama(config(examples.llama))
        model.load_state_dict(twin.state_dict())
        dtorch.manual_seed(0)
        encoder = examples.minilm.Encoder(examples.minilm.EncoderConfig(VOCABULARY, 24, 32, 2, 4, 64))
    make = gated_batcher(examples) if gated else examples.batching.Batcher
    batcher = make(model, mesh, options.pop("eos_id", -1), max_length=MAX_LENGTH, **options)
    embedder = examples.batching.Embedder(encoder, mesh, max_batch=4, max_length=32, max_queued=8)
    server = examples.server.Server(current_session(), batcher, encode, Words, embedder, encode)
    application = server.application()
    draining = asyncio.Event()

    async def tell(_: web.Application) -> None:
        draining.set()

    application.on_shutdown.append(tell)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=WAIT_S)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with ClientSession(timeout=ClientTimeout(total=WAIT_S)) as client:
        try:
            yield Running(server, runner, client, f"http://{host}:{port}", draining)
        finally:
            if gated:
                batcher.gate.release_all()
            await runner.cleanup()


class Gate:
    """Lets steps through one by one, or all from now on; tells when one has arrived."""

    def __init__(self) -> None:
        self.arrived = asyncio.Semaphore(0)
        self._allowed = asyncio.Semaphore(0)
        self._open = asyncio.Event()

    async def pass_through(self) -> None:
        self.arrived.release()
        if not self._open.is_set():
            await self._allowed.acquire()

    def release(self) -> None:
        self._allowed.release()

    def release_all(self) -> None:
        self._open.set()
        self._allowed.release()


def gated_batcher(examples: SimpleNamespace) -> Any:
    class Gated(examples.batching.Batcher):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.gate = Gate()

        async def _step(self) -> None:
            await super()._step()
            await self.gate.pass_through()

    return Gated


def expected(examples: SimpleNamespace, twin: Any, prompt: str, count: int) -> list[int]:
    """Greedy decoding on plain torch, of one sequence alone."""
    cache = examples.plain.KVCache()
    ids = torch.tensor([encode(prompt)])
    positions = torch.arange(ids.shape[1])[None]
    tokens = []
    for _ in range(count):
        ids = twin.next_token(ids, positions, cache)
        positions = positions[:, -1:] + 1
        tokens.append(int(ids.item()))
    return tokens


PROMPTS = [("7 3 11", 12), ("5 " * 70, 9), ("1 2", 70), ("9 8 7 6", 1), ("4 " * 64, 20), ("3 1 4 1 5 9", 33)]


@pytest.mark.parametrize("tp", [1, 2])
async def test_concurrent_sequences_are_those_of_each_alone(examples: SimpleNamespace, twin: Any, tp: int) -> None:
    async with running(examples, twin, tp=tp, num_rows=3) as app:
        found = await asyncio.gather(*(app.tokens(prompt, count) for prompt, count in PROMPTS))
        assert found == [expected(examples, twin, prompt, count) for prompt, count in PROMPTS]
        counted = await app.metrics()
        total = sum(count for _, count in PROMPTS)
        assert counted["tokens_total"] == total
        assert counted["steps_total"] < total - len(PROMPTS)  # sequences shared steps
        assert counted['requests_total{path="/generate",status="200"}'] == len(PROMPTS)
        assert counted["first_token_seconds_count"] == counted['first_token_seconds_bucket{le="+Inf"}'] == len(PROMPTS)
        assert counted["running_sequences"] == counted["queued_sequences"] == 0
        assert counted["healthy"] == 1


async def test_a_sequence_ends_at_its_end_token_and_where_there_is_no_room(
    examples: SimpleNamespace, twin: Any
) -> None:
    alone = expected(examples, twin, "7 3 11", 12)
    end = next(token for token in reversed(alone) if token != alone[0])
    async with running(examples, twin, eos_id=end) as app:
        assert await app.tokens("7 3 11", 12) == alone[: alone.index(end)]
    async with running(examples, twin) as app:
        long = "2 " * (MAX_LENGTH - 3)
        assert await app.tokens(long, 50) == expected(examples, twin, long, 3)


async def test_a_client_that_goes_away_leaves_its_row_to_the_next(examples: SimpleNamespace, twin: Any) -> None:
    async with running(examples, twin, gated=True, num_rows=1) as app:
        gate = app.batcher.gate
        response = await app.generate("1 2 3", 100)
        await anext(aiter(events_of(response)))  # the first token is there; no further step may begin
        waiting = asyncio.create_task(app.tokens("7 3 11", 4))
        row = app.batcher.rows[0]
        gone = asyncio.Event()
        close = row.close

        def tell() -> None:
            close()
            gone.set()

        row.close = tell
        response.close()
        await gone.wait()
        gate.release_all()
        assert await waiting == expected(examples, twin, "7 3 11", 4)
        assert row.reason is None
        assert app.batcher.num_tokens == 1 + 4
        assert (await app.metrics())['requests_total{path="/generate",status="499"}'] == 1


async def held() -> tuple[int, int]:
    """Slots that hold tensors, and bytes that the workers hold, once everything is done."""
    await dtorch.synchronize_async()
    stats = await dtorch.memory_stats_async(dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return dtorch.statistics().slots, sum(memory.allocated for memory in stats)


async def test_what_was_held_for_a_client_that_goes_away_is_freed(examples: SimpleNamespace, twin: Any) -> None:
    """The cache belongs to the batch: it stays. All else that a sequence needed goes with it."""
    async with running(examples, twin, gated=True, num_rows=2) as app:
        gate = app.batcher.gate
        gone = [asyncio.Event(), asyncio.Event()]

        async def leave(number: int) -> None:
            """Begin a sequence, and go away when its first token is there."""
            response = await app.generate("1 2 3", 100)
            await anext(aiter(events_of(response)))
            await gate.arrived.acquire()
            (stream,) = (stream for stream in app.batcher.rows if stream is not None and not stream.is_closed)
            close = stream.close

            def tell() -> None:
                close()
                gone[number].set()

            stream.close = tell
            response.close()
            await gone[number].wait()

        await leave(0)
        before = await held()
        gate.release()  # the batch drops the sequence, and waits
        assert not app.batcher.queue
        await leave(1)
        assert await held() == before


async def test_a_full_queue_refuses(examples: SimpleNamespace, twin: Any) -> None:
    async with running(examples, twin, gated=True, num_rows=1, max_queued=1) as app:
        first = asyncio.create_task(app.tokens("1 2", 3))
        await app.batcher.gate.arrived.acquire()  # it has the row
        app.batcher.submit([1], 1)  # and this one the only place to wait
        status, answer, headers = await app.post("/generate", {"prompt": "1"})
        assert (status, answer["error"]["type"], headers["Retry-After"]) == (429, "too_many_requests", "1")
        assert (await app.metrics())["queued_sequences"] == 1
        app.batcher.gate.release_all()
        assert await first == expected(examples, twin, "1 2", 3)
        status, answer, _ = await app.post("/embed", {"texts": ["1"] * 9})
        assert (status, answer["error"]["type"]) == (429, "too_many_requests")


async def test_bad_requests_get_json(examples: SimpleNamespace, twin: Any) -> None:
    async with running(examples, twin) as app:
        for path, body, status, kind in (
            ("/generate", "{", 400, "bad_request"),
            ("/generate", "[]", 400, "bad_request"),
            ("/generate", {}, 400, "bad_request"),
            ("/generate", {"prompt": " "}, 400, "bad_request"),
            ("/generate", {"prompt": "1", "max_new_tokens": 0}, 400, "bad_request"),
            ("/generate", {"prompt": "1", "max_new_tokens": True}, 400, "bad_request"),
            ("/generate", {"prompt": "1 " * MAX_LENGTH}, 413, "prompt_too_long"),
            ("/generate", b"x" * 70_000, 413, "request_entity_too_large"),
            ("/embed", {"texts": []}, 400, "bad_request"),
            ("/embed", {"texts": ["1", 2]}, 400, "bad_request"),
            ("/embed", {"texts": ["1"] * 65}, 413, "too_many_texts"),
            ("/embed", {"texts": ["1 " * 33]}, 413, "text_too_long"),
            ("/nothing", {}, 404, "not_found"),
            ("/health", {}, 405, "method_not_allowed"),
        ):
            found, answer, _ = await app.post(path, body)
            assert (found, answer["error"]["type"]) == (status, kind), (path, body)
            assert answer["error"]["message"]
        assert await app.get("/health") == (200, {"healthy": True})


async def test_texts_that_wait_together_are_embedded_together(examples: SimpleNamespace, twin: Any) -> None:
    texts = ["1 2 3", "4", "5 6 7 8 9 10", "11 12"]
    async with running(examples, twin) as app:
        alone = []
        for text in texts:
            status, answer, _ = await app.post("/embed", {"texts": [text]})
            assert status == 200
            alone.append(answer["vectors"][0])
        torch.testing.assert_close(torch.tensor(alone).norm(dim=-1), torch.ones(len(texts)))
        before = app.embedder.num_runs
        answers = await asyncio.gather(*(app.post("/embed", {"texts": texts[i : i + 2]}) for i in (0, 2)))
        together = [vector for _, answer, _ in answers for vector in answer["vectors"]]
        torch.testing.assert_close(torch.tensor(together), torch.tensor(alone))
        _, answer, _ = await app.post("/embed", {"texts": texts})
        torch.testing.assert_close(torch.tensor(answer["vectors"]), torch.tensor(alone))
        assert app.embedder.num_runs - before <= 3
        assert (await app.metrics())["sentences_total"] == 12


async def test_shutdown_finishes_what_runs(examples: SimpleNamespace, twin: Any) -> None:
    async with running(examples, twin, gated=True) as app:
        running_on = asyncio.create_task(app.tokens("7 3 11", 6))
        await app.batcher.gate.arrived.acquire()
        stopping = asyncio.create_task(app.runner.cleanup())
        await app.draining.wait()
        assert app.server.is_draining
        app.batcher.gate.release_all()
        assert await running_on == expected(examples, twin, "7 3 11", 6)
        await stopping
        with pytest.raises(RuntimeError, match="the server stops"):
            app.batcher.submit([1], 1)


async def test_health_turns_false_when_a_worker_dies(examples: SimpleNamespace, twin: Any) -> None:
    dtorch.init(recover=False)
    try:
        async with running(examples, twin, gated=True) as app:
            response = await app.generate("1 2 3", 100)
            events = events_of(response)
            assert (await anext(events))[0] == ""
            for pid in app.server.session.thread.pids.values():
                os.kill(pid, signal.SIGKILL)
            app.batcher.gate.release_all()
            name, last = [event async for event in events][-1]
            assert (name, last["error"]["type"]) == ("error", "WorkerLostError")
            status, answer = await app.get("/health")
            assert (status, answer["healthy"]) == (503, False)
            assert "WorkerLostError" in answer["reason"]
            status, answer, _ = await app.post("/generate", {"prompt": "1"})
            assert (status, answer["error"]["type"]) == (503, "unavailable")
            assert (await app.metrics())["healthy"] == 0
    finally:
        dtorch.shutdown()


async def test_health_needs_no_request_to_learn_of_a_death(examples: SimpleNamespace, twin: Any) -> None:
    """How long it took is printed, for whoever looks (pytest -s)."""
    dtorch.init(recover=False)
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    try:
        async with running(examples, twin) as app:
            await dtorch.synchronize_async()
            assert await app.get("/health") == (200, {"healthy": True})
            session = app.server.session
            lost = session.lost

            def tell(worker: int, reason: str) -> None:
                lost(worker, reason)
                loop.call_soon_threadsafe(told.set)

            session.lost = tell
            began = time.perf_counter()
            for pid in session.thread.pids.values():
                os.kill(pid, signal.SIGKILL)
            await told.wait()
            status, answer = await app.get("/health")
            print(f"/health was false {1000 * (time.perf_counter() - began):.0f} ms after the kill")
            assert (status, answer["healthy"]) == (503, False)
            assert "SIGKILL" in answer["reason"]
    finally:
        dtorch.shutdown()
