"""An inference server that embeds dtorch: python examples/server.py --tp 2 --port 8080

    POST /generate  {"prompt": "...", "max_new_tokens": 64}    server-sent events, token by token
    POST /embed     {"texts": ["...", "..."]}                  {"vectors": [[...], ...]}
    GET  /health    200 {"healthy": true}, or 503 with the reason
    GET  /metrics   in Prometheus' text form

SmolLM2-135M-Instruct generates and all-MiniLM-L6-v2 embeds. Concurrent requests share the batches of `batching.py`. One
thread and one event loop serve everything: ops are recorded in passing and values are awaited, so a request waits for
no other's. When a client goes away its sequence leaves the batch; on SIGTERM the server takes no more requests and
finishes those that run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web
from batching import Batcher, Busy, Embedder

import dtorch
from dtorch.session import Session

logger = logging.getLogger("dtorch.examples.server")

MAX_BODY_BYTES = 64 * 1024
MAX_TEXTS = 64
FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of times to the first token."""


class Words(Protocol):
    """Turns the tokens of one sequence into text, as they come."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class Server:
    """State of the application: the batches, and what /metrics counts.

    Args:
        session: that the models live in; /health watches it.
        batcher: generates.
        encode: a prompt's tokens.
        words: makes what turns one sequence's tokens into text.
        embedder: None: there is no /embed.
        encode_text: tokens of a text for the embedder.
    """

    def __init__(
        self,
        session: Session,
        batcher: Batcher,
        encode: Callable[[str], list[int]],
        words: Callable[[], Words],
        embedder: Embedder | None = None,
        encode_text: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.session, self.batcher, self.encode, self.words = session, batcher, encode, words
        self.embedder, self.encode_text = embedder, encode_text
        self.is_draining = False
        self.num_requests: Counter[tuple[str, int]] = Counter()
        self.first_token_s: list[float] = [0.0] * (len(FIRST_TOKEN_S) + 1)
        self.first_token_sum_s = 0.0

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self.generate)
        if self.embedder is not None:
            app.router.add_post("/embed", self.embed)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._drain)
        app.on_cleanup.append(self._stop)
        return app

    # ---- life

    async def _start(self, app: web.Application) -> None:
        self.batcher.start()
        if self.embedder is not None:
            self.embedder.start()

    async def _drain(self, app: web.Application) -> None:
        self.is_draining = True  # aiohttp waits for the requests that run, after this

    async def _stop(self, app: web.Application) -> None:
        await self.batcher.stop()
        if self.embedder is not None:
            await self.embedder.stop()

    def trouble(self) -> str:
        """Why nothing can be computed; "" when all is well."""
        for part in (self.batcher, self.embedder):
            if part is not None and part.failure is not None:
                return f"{type(part.failure).__name__}: {part.failure}"
        try:
            self.session.check_open()
        except dtorch.DTorchError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    # ---- requests

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Every failure becomes JSON, and every answer is counted."""
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        try:
            if request.method == "POST" and self.is_draining:
                raise Refusal(503, "shutting_down", "the server finishes its last requests")
            response = await handler(request)
        except Refusal as refusal:
            response = refusal.response()
        except Busy as error:
            response = Refusal(429, "too_many_requests", str(error), retry_after_s=1).response()
        except web.HTTPException as error:
            kind = error.reason.lower().replace(" ", "_")
            response = Refusal(error.status, kind, error.text or error.reason).response()
            response.headers.update({k: v for k, v in error.headers.items() if k == "Allow"})
        except asyncio.CancelledError:
            self.num_requests[path, 499] += 1  # the client went away
            raise
        except Exception as error:
            if self.trouble():
                response = Refusal(503, "unavailable", self.trouble()).response()
            else:
                logger.exception("%s %s failed", request.method, request.path)
                response = Refusal(500, "internal_error", f"{type(error).__name__}: {error}").response()
        self.num_requests[path, response.status] += 1
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        fields = await read(request)
        prompt, count = fields.get("prompt"), fields.get("max_new_tokens", 64)
        if not isinstance(prompt, str) or not prompt.strip():
            raise Refusal(400, "bad_request", '"prompt" must be a text that is not empty')
        if type(count) is not int or count < 1:
            raise Refusal(400, "bad_request", '"max_new_tokens" must be a whole number of at least 1')
        tokens = self.encode(prompt)
        if len(tokens) >= self.batcher.max_length:
            limit = self.batcher.max_length - 1
            raise Refusal(413, "prompt_too_long", f"the prompt has {len(tokens)} tokens, at most {limit} are possible")
        begin = time.perf_counter()
        stream = self.batcher.submit(tokens, count)
        try:
            return await self._send(request, stream, begin)
        finally:
            stream.close()

    async def _send(self, request: web.Request, stream: Any, begin: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        words = self.words()
        num_tokens = 0
        try:
            # A failure before the first token still becomes a status of its own.
            async for token in stream:
                if not num_tokens:
                    self._count_first(time.perf_counter() - begin)
                    await response.prepare(request)
                num_tokens += 1
                await response.write(event({"token": token, "text": words.push(token)}))
            if not response.prepared:  # it said nothing
                await response.prepare(request)
            last = {"text": words.flush(), "reason": stream.reason, "num_tokens": num_tokens}
            await response.write(event(last, "done"))
            await response.write_eof()
        except ConnectionResetError:
            raise asyncio.CancelledError from None
        except Exception as error:
            if not response.prepared:
                raise
            logger.warning("a stream broke off: %s", error)
            await response.write(event({"error": {"type": type(error).__name__, "message": str(error)}}, "error"))
            await response.write_eof()
        return response

    async def embed(self, request: web.Request) -> web.StreamResponse:
        assert self.embedder is not None
        assert self.encode_text is not None
        texts = (await read(request)).get("texts")
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise Refusal(400, "bad_request", '"texts" must be a list of texts that are not empty')
        if len(texts) > MAX_TEXTS:
            raise Refusal(413, "too_many_texts", f"{len(texts)} texts, at most {MAX_TEXTS} are possible")
        tokens = [self.encode_text(text) for text in texts]
        longest, limit = max(map(len, tokens)), self.embedder.max_length
        if longest > limit:
            raise Refusal(413, "text_too_long", f"a text has {longest} tokens, at most {limit} are possible")
        return web.json_response({"vectors": await self.embedder.embed(tokens)})

    async def health(self, request: web.Request) -> web.StreamResponse:
        reason = "the server shuts down" if self.is_draining else self.trouble()
        if reason:
            return web.json_response({"healthy": False, "reason": reason}, status=503)
        return web.json_response({"healthy": True})

    # ---- metrics

    def _count_first(self, seconds: float) -> None:
        self.first_token_sum_s += seconds
        for index, bound in enumerate((*FIRST_TOKEN_S, float("inf"))):
            if seconds <= bound:
                self.first_token_s[index] += 1

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        batcher = self.batcher
        lines: list[str] = []

        def family(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
            lines.extend((f"# HELP dtorch_server_{name} {text}", f"# TYPE dtorch_server_{name} {kind}"))
            lines.extend(f"dtorch_server_{name}{labels} {value:g}" for labels, value in samples)

        family(
            "requests_total", "counter", "Answers by path and status; 499: the client went away.",
            *((f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.num_requests.items())),
        )  # fmt: skip
        family("healthy", "gauge", "Whether the workers are there.", ("", float(not self.trouble())))
        family("running_sequences", "gauge", "Sequences in the batch.", ("", batcher.num_running))
        family("queued_sequences", "gauge", "Sequences that wait for a row.", ("", len(batcher.queue)))
        family("tokens_total", "counter", "Tokens generated.", ("", batcher.num_tokens))
        family("steps_total", "counter", "Decoding steps.", ("", batcher.num_steps))
        family("busy_seconds_total", "counter", "Time spent in steps.", ("", batcher.busy_s))
        if self.embedder is not None:
            family("sentences_total", "counter", "Sentences embedded.", ("", self.embedder.num_sentences))
            family("embed_runs_total", "counter", "Batches of sentences.", ("", self.embedder.num_runs))
        bounds = (*(f"{bound:g}" for bound in FIRST_TOKEN_S), "+Inf")
        family(
            "first_token_seconds", "histogram", "From a request to its first token.",
            *((f'_bucket{{le="{bound}"}}', n) for bound, n in zip(bounds, self.first_token_s, strict=True)),
            ("_sum", self.first_token_sum_s),
            ("_count", self.first_token_s[-1]),
        )  # fmt: skip
        return web.Response(
            text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, kind: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.retry_after_s = status, kind, message, retry_after_s

    def response(self) -> web.StreamResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        error = {"type": self.kind, "message": self.message}
        return web.json_response({"error": error}, status=self.status, headers=headers)


async def read(request: web.Request) -> dict[str, Any]:
    """The body, a JSON object."""
    try:
        fields = json.loads(await request.read())  # larger than client_max_size: HTTPRequestEntityTooLarge
    except ValueError as error:
        raise Refusal(400, "bad_request", f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refusal(400, "bad_request", "the body must be a JSON object")
    return fields


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    return f"{f'event: {name}' + chr(10) if name else ''}data: {json.dumps(data)}\n\n".encode()


async def load(args: argparse.Namespace) -> web.Application:
    """The application with real weights, all shapes met."""
    import chat
    import llama
    import minilm
    import smollm

    session = dtorch.init()
    mesh = dtorch.init_device_mesh(args.device, (args.tp,), mesh_dim_names=("tp",))
    hf_config, state_dict, tokenizer = smollm.load()
    with mesh, dtorch.nn.skip_init():
        model = llama.Llama(llama.LlamaConfig.from_hf(hf_config))
        model.load_state_dict(state_dict)
    batcher = Batcher(model, mesh, tokenizer.eos_token_id, args.rows, args.max_length, args.max_queued)
    config, encoder_state, encoder_tokenizer = minilm.load()
    with mesh, dtorch.nn.skip_init():
        encoder = minilm.Encoder(config)
        encoder.load_state_dict(encoder_state)
    await batcher.warm_up()
    server = Server(
        session,
        batcher,
        lambda prompt: chat.encode(tokenizer, [prompt])[0][0],
        lambda: chat.Detokenizer(tokenizer),
        Embedder(encoder, mesh),
        lambda text: list(encoder_tokenizer.encode(text).ids),
    )
    return server.application()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve SmolLM2 and MiniLM on a device mesh.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--device", default="cpu", help="device type of the mesh (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="devices that share each layer (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="sequences that run at once (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--max-queued", type=int, default=32, help="sequences that may wait (default: %(default)s)")
    args = parser.parse_args()
    # Handlers are cancelled when their client goes away; on SIGTERM requests that run have a minute to finish.
    web.run_app(load(args), host=args.host, port=args.port, handler_cancellation=True, shutdown_timeout=60.0)


if __name__ == "__main__":
    main()
