"""``with dtorch.session(...)`` and ``async with dtorch.session(...)``: a session for one block."""

from __future__ import annotations

import asyncio
import atexit
import os
import weakref
from contextlib import AbstractContextManager
from typing import Any

from dtorch.session import Session, using
from dtorch.wiring import Options, chosen_options

_open: weakref.WeakSet[Session] = weakref.WeakSet()


class session:
    """A session of its own for a block: workers start with it and end with it.

        async with dtorch.session(workers="per-device") as session:
            ...

    Inside, it is the session in use for the running task and the tasks that it starts; elsewhere the default one stays as it
    is. So two tasks may each have one. The end waits for what was recorded, and raises the error of an op that nobody
    awaited; after an exception it does not wait. ``async with`` never blocks the event loop.

    Args:
        options: those of ``dtorch.init``; or ``url`` and the others of ``dtorch.connect``, for the workers of a head, which
            is also what DTORCH_HEAD gives.

    Raises:
        ValueError: an option has a value that it cannot have.
        RuntimeError: the block is entered a second time.
    """

    def __init__(self, **options: Any) -> None:
        self._options = _resolved(options)
        self._session: Session | None = None
        self._scope: AbstractContextManager[None] | None = None

    def __enter__(self) -> Session:
        self._check_new()
        return self._enter(Session(self._options))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        made = self._leave()
        try:
            if error is None and made.is_open:
                made.synchronize().result()
        finally:
            made.close()

    async def __aenter__(self) -> Session:
        self._check_new()
        starting = asyncio.ensure_future(asyncio.to_thread(Session, self._options))
        try:
            return self._enter(await asyncio.shield(starting))
        except asyncio.CancelledError:
            await asyncio.to_thread((await starting).close)
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        made = self._leave()
        try:
            if error is None and made.is_open:
                await made.synchronize()
        finally:
            await asyncio.to_thread(made.close)

    def _check_new(self) -> None:
        if self._session is not None:
            raise RuntimeError("this dtorch.session(...) was entered already; make another one")

    def _enter(self, made: Session) -> Session:
        self._session = made
        _open.add(made)
        self._scope = using(made)
        self._scope.__enter__()
        return made

    def _leave(self) -> Session:
        if self._scope is None or self._session is None:
            raise RuntimeError("this dtorch.session(...) was not entered")
        self._scope.__exit__(None, None, None)
        self._scope = None
        return self._session


def _resolved(options: dict[str, Any]) -> Options:
    if "url" in options or "api_key" in options or os.environ.get("DTORCH_HEAD"):
        from dtorch.cluster.client import cluster_options

        return cluster_options(**options)
    return chosen_options(**options)


def _at_exit() -> None:
    for made in list(_open):
        made.close()


def _after_fork_in_child() -> None:
    for made in list(_open):
        made.recorder.abandon("the session belongs to the parent process; a forked child starts its own")
    _open.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
