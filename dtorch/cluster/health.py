"""What probes ask a worker: does it run, has it joined its head?

    GET /healthz    200 while the worker's event loop runs
    GET /readyz     200 while it has a place in the pool and a connection, else 503
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def health(listen: str, is_ready: Callable[[], bool]) -> AsyncIterator[str]:
    """Answer at HOST:PORT meanwhile; gives the URL. Port 0 takes a free one. With "" nothing listens.

    Raises:
        OSError: the port is taken.
        ValueError: it is no HOST:PORT.
    """
    if not listen:
        yield ""
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--health takes HOST:PORT, such as 0.0.0.0:7475, not {listen!r}")

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(_: web.Request) -> web.Response:
        has = is_ready()
        return web.Response(text="ok" if has else "no head", status=200 if has else 503)

    app = web.Application()
    app.router.add_get("/healthz", alive)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
