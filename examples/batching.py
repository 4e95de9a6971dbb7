"""Batches out of concurrent requests: `Batcher` for sequences that are generated, `Embedder` for sentences.

Sequences join and leave one running batch between two decoding steps. That batch has a fixed number of rows, and row r
keeps the key and value of its token at position p in slot `r * max_length + p` of one flat cache. So a step is the same
ops whatever the rows hold, only their numbers differ, and nothing has to be moved when a sequence ends: the next one in
its row overwrites a slot before any query sees it.

Shape suffixes as in llama.py; S slots of the flat cache.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import torch

import dtorch

BUCKET = 64
"""The cache is read, and prompts are padded, in multiples of this many tokens: few different shapes."""
SMALL_BUCKET = 16
"""Prompts shorter than a bucket are padded to multiples of this: most of the time to a first token is their run."""


class Busy(Exception):
    """As many sequences are waiting as may."""


class Stream(AsyncIterator[int]):
    """The tokens of one sequence, as they come. Made by `Batcher.submit`.

    Attributes:
        reason: "stop" (the model ended it) or "length" once it is over; None before.
    """

    def __init__(self, prompt: list[int], max_new_tokens: int) -> None:
        self.prompt = prompt
        self.left = max_new_tokens
        self.position = len(prompt)  # of the newest token
        self.newest = 0
        self.reason: str | None = None
        self.is_closed = False
        self._arrived: asyncio.Queue[int | Exception | None] = asyncio.Queue()

    def close(self) -> None:
        """Nobody reads on: the batch drops it before its next step."""
        self.is_closed = True

    def put(self, token: int, eos_id: int, max_length: int) -> None:
        """The batch's side: one more token."""
        if token == eos_id:
            self._end("stop")
            return
        self.newest = token
        self.left -= 1
        self._arrived.put_nowait(token)
        if self.left == 0 or self.position + 1 >= max_length:
            self._end("length")

    def fail(self, error: Exception) -> None:
        self._arrived.put_nowait(error)
        self.is_closed = True

    def _end(self, reason: str) -> None:
        self.reason = reason
        self._arrived.put_nowait(None)

    async def __anext__(self) -> int:
        token = await self._arrived.get()
        if token is None:
            raise StopAsyncIteration
        if isinstance(token, Exception):
            raise token
        return token


class Batcher:
    """One model and its running batch. Greedy decoding.

    Args:
        model: a `llama.Llama`, on `mesh`.
        eos_id: token that ends a sequence.
        num_rows: sequences that run at once.
        max_length: tokens of a sequence at most, prompt included; a multiple of 64.
        max_queued: sequences that may wait for a row.
    """

    def __init__(
        self,
        model: Any,
        mesh: dtorch.DeviceMesh,
        eos_id: int,
        num_rows: int = 8,
        max_length: int = 512,
        max_queued: int = 32,
    ) -> None:
        if max_length % BUCKET or max_length > model.config.max_positions:
            raise ValueError(f"max_length {max_length} must be a multiple of {BUCKET}, at most what the model has")
        self.model, self.mesh, self.eos_id = model, mesh, eos_id
        self.num_rows, self.max_length, self.max_queued = num_rows, max_length, max_queued
        self.rows: list[Stream | None] = [None] * num_rows
        self.queue: deque[Stream] = deque()
        self.failure: Exception | None = None
        self.num_tokens = 0
        self.num_steps = 0
        self.busy_s = 0.0
        self.keys_SKH: list[dtorch.Tensor] = []  # one a layer
        self.values_SKH: list[dtorch.Tensor] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def submit(self, prompt: list[int], max_new_tokens: int) -> Stream:
        """Queue a sequence.

        Raises:
            ValueError: the prompt leaves no room for a token, or is empty.
            Busy: the queue is full.
        """
        if not 0 < len(prompt) < self.max_length:
            raise ValueError(f"the prompt has {len(prompt)} tokens, from 1 to {self.max_length - 1} are possible")
        if self.failure is not None:
            raise self.failure
        self.queue = deque(stream for stream in self.queue if not stream.is_closed)
        if len(self.queue) >= self.max_queued:
            raise Busy(f"{len(self.queue)} sequences are waiting already")
        stream = Stream(prompt, max_new_tokens)
        self.queue.append(stream)
        self._wake.set()
        return stream

    @property
    def num_running(self) -> int:
        return sum(stream is not None for stream in self.rows)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End at once; `submit`ted streams that are not over fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(RuntimeError("the server stops"))

    async def warm_up(self) -> None:
        """Meet every shape once, before the first request: signatures are made in passing, which takes a moment."""
        with self.mesh, torch.no_grad():
            for length in range(SMALL_BUCKET, BUCKET, SMALL_BUCKET):
                await (await self._prefill([0] * length, 0))
            for length in range(BUCKET, self.max_length + 1, BUCKET):
                await (await self._prefill([0] * (length - 1), 0))
                await (await self._decode(length))

    # ---- the running batch

    async def _run(self) -> None:
        try:
            with self.mesh, torch.no_grad():
                while True:
                    self._wake.clear()
                    self._drop_finished()
                    if not self.num_running and not self.queue:
                        await self._wake.wait()
                        continue
                    begin = time.perf_counter()
                    await self._step()
                    self.busy_s += time.perf_counter() - begin
        except Exception as error:  # handed to everyone who waits, now and later
            self._fail(error)

    def _drop_finished(self) -> None:
        for row, stream in enumerate(self.rows):
            if stream is not None and (stream.is_closed or stream.reason is not None):
                self.rows[row] = None

    async def _step(self) -> None:
        """One token for every row, and the first one for those that join. Each is given as soon as it is there."""
        arriving: list[asyncio.Task[None]] = []
        running = [(row, stream) for row, stream in enumerate(self.rows) if stream is not None]
        try:
            if running:
                tokens = await self._decode(1 + max(stream.position for _, stream in running))
                arriving.append(asyncio.create_task(self._give_all(running, tokens)))
            # Rows that join are filled after the step, in which an idle row overwrites its own first slot.
            for row, stream in enumerate(self.rows):
                while stream is None and self.queue:
                    candidate = self.queue.popleft()
                    if not candidate.is_closed:
                        self.rows[row] = stream = candidate
                        tokens = await self._prefill(candidate.prompt, row)
                        arriving.append(asyncio.create_task(self._give_first(stream, tokens)))
            await asyncio.gather(*arriving)
        finally:
            for task in arriving:
                task.cancel()
            await asyncio.gather(*arriving, return_exceptions=True)

    async def _give_all(self, running: list[tuple[int, Stream]], tokens: dtorch.Tensor) -> None:
        numbers = await tokens.tolist_async()
        for row, stream in running:
            stream.position += 1
            self._give(stream, numbers[row][0])
        self.num_steps += 1

    async def _give_first(self, stream: Stream, tokens: dtorch.Tensor) -> None:
        ((token,),) = await tokens.tolist_async()
        self._give(stream, token)

    def _give(self, stream: Stream, token: int) -> None:
        if not stream.is_closed:
            stream.put(token, self.eos_id, self.max_length)
            self.num_tokens += 1

    async def _prefill(self, prompt: list[int], row: int) -> dtorch.Tensor:
        """Run a prompt and keep its keys and values in `row`; the first token, shape [1, 1].

        Padding stands on the right, where no token of the prompt sees it; what it leaves in the cache is overwritten.
        """
        bucket = BUCKET if len(prompt) > BUCKET - SMALL_BUCKET else SMALL_BUCKET
        length = -(-len(prompt) // bucket) * bucket
        ids = upload(self.mesh, [prompt + [0] * (length - len(prompt))])
        positions = upload(self.mesh, [list(range(length))])
        x_BTD = await self._run_layers(ids, positions, _Prefill(self, row * self.max_length))
        return self.model.lm_head(x_BTD[:, len(prompt) - 1 : len(prompt)]).argmax(dim=-1)  # type: ignore[no-any-return]

    async def _decode(self, length: int) -> dtorch.Tensor:
        """The next token of every row, shape [B, 1], from `length` slots of each."""
        ids = upload(self.mesh, [[0 if stream is None else stream.newest] for stream in self.rows])
        places = [0 if stream is None else stream.position for stream in self.rows]
        slots = upload(self.mesh, [row * self.max_length + place for row, place in enumerate(places)])
        cache = _Decode(self, slots, -(-length // BUCKET) * BUCKET)
        x_BTD = await self._run_layers(ids, upload(self.mesh, [[place] for place in places]), cache)
        return self.model.lm_head(x_BTD).argmax(dim=-1)  # type: ignore[no-any-return]

    async def _run_layers(
        self, ids: dtorch.Tensor, positions: dtorch.Tensor, cache: _Prefill | _Decode
    ) -> dtorch.Tensor:
        """Record the layers in another thread: some milliseconds in which the loop serves others."""

        def record() -> dtorch.Tensor:
            with torch.no_grad():  # a thread's own, while the mesh comes with the task's context
                return self.model.model(ids, positions, cache)  # type: ignore[no-any-return]

        return await asyncio.to_thread(record)

    def layer(self, layer: int, like_BKTH: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor]:
        """The flat cache of one layer; made, placed like `like_BKTH`, when there is none."""
        if layer == len(self.keys_SKH):
            _, num_heads, _, head_size = like_BKTH.shape
            for cache in (self.keys_SKH, self.values_SKH):
                shape = (self.num_rows * self.max_length, num_heads, head_size)
                cache.append(
                    dtorch.zeros(*shape, dtype=like_BKTH.dtype, device_mesh=self.mesh, placements=like_BKTH.placements)
                )
        return self.keys_SKH[layer], self.values_SKH[layer]

    def _fail(self, error: Exception) -> None:
        self.failure = error
        for stream in (*self.rows, *self.queue):
            if stream is not None and stream.reason is None:
                stream.fail(error)
        self.rows = [None] * self.num_rows
        self.queue.clear()


class Embedder:
    """Sentences that wait together are embedded together.

    Args:
        model: a `minilm.Encoder`, on `mesh`.
        max_batch: sentences of one run.
        max_length: tokens of a sentence at most.
        max_queued: sentences that may wait.
    """

    def __init__(
        self, model: Any, mesh: dtorch.DeviceMesh, max_batch: int = 16, max_length: int = 256, max_queued: int = 256
    ) -> None:
        self.model, self.mesh = model, mesh
        self.max_batch, self.max_length, self.max_queued = max_batch, max_length, max_queued
        self.queue: deque[tuple[list[int], asyncio.Future[list[float]]]] = deque()
        self.failure: Exception | None = None
        self.num_sentences = 0
        self.num_runs = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def embed(self, sentences: list[list[int]]) -> list[list[float]]:
        """Their vectors. A caller that gives up takes its sentences out of the queue.

        Raises:
            Busy: too many sentences wait.
        """
        if self.failure is not None:
            raise self.failure
        self.queue = deque(entry for entry in self.queue if not entry[1].done())
        if len(self.queue) + len(sentences) > self.max_queued:
            raise Busy(f"{len(self.queue)} sentences are waiting already")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[list[float]]] = [loop.create_future() for _ in sentences]
        self.queue.extend(zip(sentences, futures, strict=True))
        self._wake.set()
        return await asyncio.gather(*futures)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End at once; who still waits is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(RuntimeError("the server stops"), [])

    async def _run(self) -> None:
        batch: list[tuple[list[int], asyncio.Future[list[float]]]] = []
        try:
            with self.mesh, torch.no_grad():
                while True:
                    self._wake.clear()
                    batch = []
                    while self.queue and len(batch) < self.max_batch:
                        entry = self.queue.popleft()
                        if not entry[1].done():
                            batch.append(entry)
                    if batch:
                        await self._embed(batch)
                    else:
                        await self._wake.wait()
        except Exception as error:  # handed to everyone who waits, now and later
            self._fail(error, batch)

    async def _embed(self, batch: list[tuple[list[int], asyncio.Future[list[float]]]]) -> None:
        num_rows = 1 << (len(batch) - 1).bit_length()  # few different shapes
        length = -(-max(len(ids) for ids, _ in batch) // 32) * 32
        rows = [ids for ids, _ in batch] + [[0]] * (num_rows - len(batch))
        ids = upload(self.mesh, [row + [0] * (length - len(row)) for row in rows])
        mask = upload(self.mesh, [[True] * len(row) + [False] * (length - len(row)) for row in rows])
        vectors = await self.model(ids, mask).tolist_async()
        self.num_runs += 1
        for (_, future), vector in zip(batch, vectors, strict=False):
            if not future.done():
                future.set_result(vector)
                self.num_sentences += 1

    def _fail(self, error: Exception, batch: list[tuple[list[int], asyncio.Future[list[float]]]]) -> None:
        self.failure = error
        for _, future in (*batch, *self.queue):
            if not future.done():
                future.set_exception(error)
        self.queue.clear()


def upload(mesh: dtorch.DeviceMesh, numbers: list[Any]) -> dtorch.Tensor:
    """Nested lists of integers or truth values as a tensor, whole on each device."""
    return dtorch.Tensor(torch.tensor(numbers), device_mesh=mesh, placements=[dtorch.Replicate()] * mesh.ndim)


class _OneStage:
    """A cache of a model without pipeline stages."""

    def of(self, stage: int) -> _OneStage:
        assert stage == 0, "a model in pipeline stages is not batched here"
        return self


class _Prefill(_OneStage):
    """Stands for a cache in a prompt's run: its tokens see each other only, and are kept."""

    def __init__(self, batcher: Batcher, start: int) -> None:
        self.batcher, self.start = batcher, start

    def begin(self, positions_BT: dtorch.Tensor) -> dtorch.Tensor:
        return positions_BT

    def update(self, layer: int, k_BKTH: dtorch.Tensor, v_BKTH: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor]:
        stop = self.start + k_BKTH.shape[2]
        for cache_SKH, new_BKTH in zip(self.batcher.layer(layer, k_BKTH), (k_BKTH, v_BKTH), strict=True):
            cache_SKH[self.start : stop] = new_BKTH[0].transpose(0, 1)
        return k_BKTH, v_BKTH


class _Decode(_OneStage):
    """Stands for a cache in a step: writes one slot a row, and reads `length` slots of each."""

    def __init__(self, batcher: Batcher, slots_B: dtorch.Tensor, length: int) -> None:
        self.batcher, self.slots_B, self.length = batcher, slots_B, length

    def begin(self, positions_BT: dtorch.Tensor) -> dtorch.Tensor:
        return dtorch.arange(self.length)[None]  # type: ignore[no-any-return]

    def update(self, layer: int, k_BKTH: dtorch.Tensor, v_BKTH: dtorch.Tensor) -> tuple[dtorch.Tensor, dtorch.Tensor]:
        keys_SKH, values_SKH = self.batcher.layer(layer, k_BKTH)
        return self._write(keys_SKH, k_BKTH), self._write(values_SKH, v_BKTH)

    def _write(self, cache_SKH: dtorch.Tensor, new_BKTH: dtorch.Tensor) -> dtorch.Tensor:
        cache_SKH.index_copy_(0, self.slots_B, new_BKTH[:, :, 0])
        rows = cache_SKH.view(self.batcher.num_rows, self.batcher.max_length, *cache_SKH.shape[1:])
        return rows[:, : self.length].transpose(1, 2)  # type: ignore[no-any-return]
