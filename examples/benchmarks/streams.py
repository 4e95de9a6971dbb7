"""Bytes between hosts: python examples/benchmarks/streams.py [--json FILE]

Over loopback sockets, in GB/s, a process for each end, rivals alternating:

* a link as clients, heads and workers have it, whose parts the other end puts together, beside a plain socket that a program of
  a few lines writes and another one reads into the same memory again and again;
* an upload and a fetch of a session through a head, beside two plain sockets with a process of a few lines between them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from aiohttp import web
from report import Row, add_json_option, print_machine, print_table, table_output, write_json
from timing import Samples, alternate

import dtorch
from dtorch.cluster.keys import KeyFile
from dtorch.cluster.streams import SessionStreams, memory
from dtorch.runtime.pages import KEPT_BYTES, keep_pages
from dtorch.runtime.shell import new_loop
from dtorch.runtime.turns import Turns
from dtorch.transport import codec
from dtorch.transport.cluster import PART_BYTES, Part
from dtorch.transport.dial import dial
from dtorch.transport.durable import DurableLink
from dtorch.transport.link import WebSocketLink
from dtorch.transport.wire import take_over

MIB = 2**20
MAX_BYTES = 16 * MIB

# ---- other ends, in processes of their own; each prints its port


def sink(size: int) -> None:
    """Read so many bytes again and again, and say so each time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        plain, _ = server.accept()
    view = memoryview(bytearray(size))
    with plain:
        done = 0
        while num := plain.recv_into(view[done:]):
            done = (done + num) % size
            if not done:
                plain.sendall(b"x")


def relay(target: int) -> None:
    """Pass on what comes, and what comes back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        near, _ = server.accept()
    view = memoryview(bytearray(PART_BYTES))
    with near, socket.create_connection(("127.0.0.1", target)) as far:
        other = {near: far, far: near}
        while True:
            for ready in select.select([near, far], [], [])[0]:
                num = ready.recv_into(view)
                if not num:
                    return
                other[ready].sendall(view[:num])


async def receiver(size: int) -> None:
    """Put streams of so many bytes together as a worker does, and say so each time."""

    async def accept(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(compress=False)
        await ws.prepare(request)
        opened = WebSocketLink(ws)
        await opened.receive()
        link = take_over(opened, MAX_BYTES)
        link.send_nowait(b"welcome")
        durable, streams = DurableLink(link, 0.0), SessionStreams(1, Turns(), lambda part: None, 0)

        def land(frame: bytes, size_bytes: int) -> memoryview | None:
            part = codec.decode_from_client(frame)
            return streams.land(part, size_bytes) if isinstance(part, Part) else None

        durable.land = land
        while (frame := await durable.receive()) is not None:
            part = codec.decode_from_client(frame)
            assert isinstance(part, Part)
            streams.put(part)
            if part.offset + PART_BYTES >= size:
                streams.take(part.stream, size)
                durable.send_nowait(b"x")
        await durable.close()
        return ws

    app = web.Application()
    app.router.add_get("/", accept)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


# ---- this end


@contextlib.contextmanager
def running(*command: str, **more: str) -> Iterator[str]:
    """A process; the first line that it prints."""
    process = subprocess.Popen(command, env={**os.environ, **more}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def end(name: str, number: int) -> contextlib.AbstractContextManager[str]:
    return running(sys.executable, __file__, "--end", name, str(number))


def rate(work: Callable[[], object], size: int) -> float:
    """GB/s."""
    start = time.perf_counter()
    kept = work()
    took = time.perf_counter() - start
    del kept
    return size / took / 1e9


@contextlib.contextmanager
def plain(port: int, size: int) -> Iterator[Callable[[], float]]:
    data = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as connection:

        def send() -> None:
            connection.sendall(data)
            connection.recv(1)

        yield lambda: rate(send, size)


class Sender:
    """This end of a link to ``receiver``."""

    def __init__(self, port: int, size: int) -> None:
        self._loop = new_loop()
        self._size = size
        self._data = torch.zeros(size, dtype=torch.uint8).numpy().data
        link, _ = self._loop.run_until_complete(dial(f"tcp:127.0.0.1:{port}", "/", "t", b"hello", past_aiohttp=True))
        self._link = DurableLink(link, 0.0)
        self._stream = 0

    def __call__(self) -> float:
        return rate(lambda: self._loop.run_until_complete(self._send()), self._size)

    async def _send(self) -> None:
        self._stream += 1
        answer = asyncio.ensure_future(self._link.receive())
        for start in range(0, self._size, PART_BYTES):
            await self._link.wait_below(self._link.pace.window_bytes)
            part = Part(1, self._stream, start, self._size, 1, (), self._data[start : start + PART_BYTES])
            self._link.send_nowait(*codec.encode_part(part))
        await answer

    def close(self) -> None:
        self._loop.run_until_complete(self._link.close())
        self._loop.close()


def links(size: int, repetitions: int) -> dict[str, Samples]:
    with end("sink", size) as there, plain(int(there), size) as send, end("receiver", size) as port:
        sender = Sender(int(port), size)
        try:
            return alternate({"dtorch": sender, "socket": send}, repetitions)
        finally:
            sender.close()


def sessions(size: int, repetitions: int) -> tuple[dict[str, Samples], dict[str, Samples]]:
    dt = (sys.executable, "-m", "dtorch")
    with (
        tempfile.TemporaryDirectory() as folder,
        end("sink", size) as there,
        end("relay", int(there)) as between,
        plain(int(between), size) as send,
    ):
        keys = KeyFile(Path(folder, "keys.json"))
        client, worker = keys.create("benchmark")[1], keys.create("pool", "worker")[1]
        with running(*dt, "head", "--listen", "127.0.0.1:0", "--keys", str(keys.path)) as said:
            url = said.split()[2].rstrip(",")
            with running(*dt, "worker", "--head", url, DTORCH_API_KEY=worker):
                dtorch.connect(url, client)
                try:
                    mesh = dtorch.DeviceMesh("cpu", [0])
                    whole = torch.zeros(size // 4)
                    x = dtorch.Tensor(whole, device_mesh=mesh)

                    def upload() -> object:
                        made = dtorch.Tensor(whole, device_mesh=mesh)
                        dtorch.synchronize()
                        return made

                    found = alternate(
                        {"upload": lambda: rate(upload, size), "fetch": lambda: rate(x.to_torch, size), "socket": send},
                        repetitions,
                    )
                finally:
                    dtorch.shutdown()
    peer = found["socket"]
    return {"dtorch": found["upload"], "socket": peer}, {"dtorch": found["fetch"], "socket": peer}


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes between hosts.")
    add_json_option(parser)
    parser.add_argument("--mib", type=int, default=256, help="size of a value (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each (%(default)s)")
    parser.add_argument("--end", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.end is not None:
        name, number = args.end[0], int(args.end[1])
        if name == "receiver":
            keep_pages()
            memory.keep(KEPT_BYTES)
            new_loop().run_until_complete(receiver(number))
        else:
            {"sink": sink, "relay": relay}[name](number)
        return
    out = table_output(args.json)
    facts = print_machine(out)
    size = args.mib * MIB
    upload, fetch = sessions(size, args.repetitions)
    rows = []
    for name, samples in (
        ("a link", links(size, args.repetitions)), ("upload through a head", upload), ("fetch through a head", fetch)
    ):
        ours, peer = samples["dtorch"], samples["socket"]
        note = f"{ours.median / peer.median:.2f} of the socket's; best {max(ours.values):.2f} and {max(peer.values):.2f}"
        rows.append(Row(f"{name}, {args.mib} MiB", "GB/s", ours.median, note, {"socket": peer.median}, samples))
    print_table(rows, {"socket": "measured"}, out)
    write_json(args.json, facts, rows)


if __name__ == "__main__":
    main()
