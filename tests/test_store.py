"""The session's store behaves as torch's own, over a unix socket and TCP, from several threads."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from dtorch.transport import dial
from dtorch.transport.errors import AuthError, ConnectionLostError
from dtorch.transport.link import Link
from dtorch.transport.messages import Hello
from dtorch.transport.server import Server
from dtorch.transport.store import STORE_PATH, SessionStore, StoreService, StoreState

TOKEN = "s3cret"
SHORT = timedelta(seconds=0.01)


async def _no_links(end: Link, hello: Hello) -> None:
    raise AssertionError("no worker is expected here")


@asynccontextmanager
async def serving(kind: str = "unix") -> AsyncIterator[Server]:
    service = StoreService()
    with tempfile.TemporaryDirectory(prefix="dt") as folder:
        path, host = (str(Path(folder) / "s"), None) if kind == "unix" else (None, "127.0.0.1")
        server = await Server.start(path=path, host=host, token=TOKEN, on_link=_no_links, routes=service.routes())
        try:
            yield server
        finally:
            service.close()
            await server.stop()


def test_state_is_plain_logic() -> None:
    state = StoreState()
    assert state.get("a") is None
    state.set("a", b"1")
    assert state.get("a") == b"1"
    assert state.check([])
    assert state.check(["a"])
    assert not state.check(["a", "b"])
    assert state.add("n", 5) == 5
    assert state.add("n", -2) == 3
    assert state.get("n") == b"3"
    state.set("text", b"x")
    with pytest.raises(ValueError, match="invalid literal"):
        state.add("text", 1)
    assert state.compare_set("new", b"no", b"v") == b"no"
    assert state.compare_set("new", b"", b"v") == b"v"
    assert state.compare_set("new", b"no", b"w") == b"v"
    assert state.compare_set("new", b"v", b"w") == b"w"
    assert state.delete("a")
    assert not state.delete("a")
    assert state.num_keys() == 3
    state.set("g1/a", b"")
    state.set("g1/b", b"")
    assert state.delete_prefix("g1/") == 2
    assert state.num_keys() == 3


def _use(address: str) -> None:
    store = SessionStore(address, TOKEN, "p/")
    store.set("k", b"\x00\xff")
    store.set("t", "text")
    assert store.get("k") == b"\x00\xff"
    assert store.get("t") == b"text"
    assert store.add("n", 2) == 2
    assert store.add("n", 3) == 5
    assert store.check(["k", "n"])
    assert not store.check(["k", "none"])
    store.wait(["k", "n"])
    assert store.compare_set("c", "", "first") == b"first"
    assert store.num_keys() == 4
    assert SessionStore(address, TOKEN).get("p/k") == b"\x00\xff"
    inner = store.with_prefix("q/")
    inner.set("k", b"inner")
    assert store.get("q/k") == b"inner"
    assert inner.delete_key("k")
    assert not inner.delete_key("k")
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    for call in (lambda: store.get("none"), lambda: store.wait(["k", "none"]), lambda: inner.wait(["z"], SHORT)):
        with pytest.raises(distributed.DistStoreError, match="in the store after"):
            call()
    with pytest.raises(ValueError, match="invalid literal"):
        store.add("t", 1)
    wrapped = PrefixStore("w", store)  # C++ that calls the Python methods
    wrapped.set("k", "v")
    assert wrapped.get("k") == b"v"
    assert wrapped.add("n", 4) == 4
    assert store.get("w/k") == b"v"
    store.close()
    assert store.get("k") == b"\x00\xff"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_store_keeps_the_meaning_of_torch(kind: str) -> None:
    async with serving(kind) as server:
        await asyncio.to_thread(_use, server.address)


@pytest.mark.parametrize("operation", ["get", "wait"])
async def test_a_waiting_thread_is_woken_by_another_on_the_same_store(operation: str) -> None:
    async with serving() as server:
        store = SessionStore(server.address, TOKEN)
        got: list[object] = []

        def wait() -> None:
            if operation == "wait":
                store.wait(["early", "late"])
            got.append(store.get("late"))

        thread = threading.Thread(target=wait)
        thread.start()
        await asyncio.to_thread(store.set, "early", b"0")
        assert got == []
        await asyncio.to_thread(store.set, "late", b"1")
        await asyncio.to_thread(thread.join)
        assert got == [b"1"]


async def test_closing_the_service_frees_who_waits() -> None:
    async with serving() as server:
        service = StoreService()
        waiter = asyncio.ensure_future(service._wait_keys(["never"], 1000))
        await asyncio.sleep(0)  # one turn of the loop: let it start
        service.close()
        assert await asyncio.wait_for(waiter, 20) is False
        assert server.address


async def test_wrong_token_and_lost_server() -> None:
    async with serving() as server:
        with pytest.raises(AuthError):
            await asyncio.to_thread(SessionStore(server.address, "wrong").get, "k")
    with pytest.raises(ConnectionLostError):
        await asyncio.to_thread(SessionStore(server.address, TOKEN).get, "k")


async def test_foreign_requests_are_refused() -> None:
    async with serving("tcp") as server:
        _, url = dial._target(server.address)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for operation, body, status in (("set", b"\xc1", 400), ("set", b"\x80", 400), ("eval", b"\x80", 404)):
                async with session.post(url + STORE_PATH + operation, data=body) as answer:
                    assert answer.status == status
