"""Members of a group exchange tensors of every kind, and learn which of them are garbage.

The members are processes that run this file as a script: ``test_groups.py ADDRESS TOKEN SCENE ME MEMBER...``
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from dtorch.transport import forming, groups  # noqa: E402  the path has to be set first
from dtorch.transport.errors import ConnectionLostError  # noqa: E402
from dtorch.transport.groups import GlooGroup, Group, make_group, message_layout, pack, unpack  # noqa: E402
from dtorch.transport.link import Link  # noqa: E402
from dtorch.transport.messages import Hello  # noqa: E402
from dtorch.transport.server import Server  # noqa: E402
from dtorch.transport.store import SessionStore, StoreService  # noqa: E402

TOKEN = "s3cret"
TIMEOUT_S = 30.0


def specimens(seed: int) -> list[torch.Tensor]:
    """Tensors of every awkward kind; the same for the same seed."""
    g = torch.Generator().manual_seed(seed)
    real = torch.randn(5, 7, generator=g)
    return [
        real,
        real.t(),
        real[::2, 1:6:3],
        real.bfloat16(),
        real > 0,
        torch.complex(real, -real).conj(),
        torch.complex(real, -real).conj().imag,
        torch.tensor(seed),
        torch.empty(0, 3, dtype=torch.float16),
        torch.empty(0),
        torch.randint(0, 99, (3,), generator=g, dtype=torch.uint8),
        torch.randn(3, dtype=torch.float64, generator=g).expand(2, 3),
    ]


def large(seed: int) -> list[torch.Tensor]:
    """A message above the size from which tensors are sent one by one."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(600, 700, generator=g).t(), torch.empty(0), torch.tensor(seed), torch.ones(3, dtype=torch.bool)]


def specs(tensors: list[torch.Tensor]) -> list[groups.Spec]:
    return [(tuple(t.shape), t.dtype) for t in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


# ---- scenes, played by every member


def _everything(group: Group, me: int) -> None:
    others = [w for w in group.members if w != me]
    for make in (specimens, large):
        sends = {w: make(100 * me + w) for w in others}
        wanted = {w: make(100 * w + me) for w in others}
        for _ in range(3):
            got, ok = group.exchange(sends, {w: specs(t) for w, t in wanted.items()}, True)
            assert ok
            assert got.keys() == wanted.keys()
            for w in others:
                assert same(got[w], wanted[w])
                got[w][0].add_(1)  # what was received is the receiver's own
    assert group.exchange({}, {}, False) == ({}, True)
    assert group.exchange({w: [] for w in others}, {w: [] for w in others}, False) == ({w: [] for w in others}, True)
    # one way round the ring, and only a zero-size tensor, which still carries a status
    at = group.members.index(me)
    after, before = group.members[(at + 1) % len(group.members)], group.members[at - 1]
    got, ok = group.exchange({after: [torch.empty(0)]}, {before: [((0,), torch.float32)]}, True)
    assert ok
    assert got[before][0].shape == (0,)


def _poison(group: Group, me: int) -> None:
    bad = group.members[-1]
    others = [w for w in group.members if w != me]
    for size in (3, 1_000_000, 0):  # packed, direct, status alone
        spec: list[groups.Spec] = [((size,), torch.float32)]
        sends = {w: [torch.full((size,), float(me))] for w in others}
        got, ok = group.exchange(sends, {w: spec for w in others}, me != bad)
        assert ok == (me == bad)  # all but the bad one heard garbage
        for w in others:
            assert got[w][0].shape == (size,)
            assert w == bad or bool((got[w][0] == w).all())
        # the next exchange is good again, and only some take part with data
        first = group.members[0]
        got, ok = group.exchange(
            {first: [torch.tensor(me)]} if me == bad else {}, {bad: [((), torch.int64)]} if me == first else {}, True
        )
        assert ok
        assert me != first or int(got[bad][0]) == bad


def _leave(group: Group, me: int) -> None:
    one: list[groups.Spec] = [((1,), torch.float32)]
    if me == group.members[-1]:
        return  # the process ends
    with pytest.raises(ConnectionLostError, match=f"worker {me} lost a member"):
        group.exchange({}, {group.members[-1]: one}, True)


SCENES: dict[str, Callable[[Group, int], None]] = {"everything": _everything, "poison": _poison, "leave": _leave}


def play(address: str, token: str, scenes: str, me: int, members: list[int]) -> None:
    torch.set_num_threads(1)
    for name in scenes.split(","):  # a group for each scene, made in the same order everywhere
        store = SessionStore(address, token, f"{name}/")
        group = make_group("gloo", store, me, members, TIMEOUT_S)
        SCENES[name](group, me)
        if name != "leave":
            group.exchange(
                {w: [torch.tensor(0)] for w in members if w != me},
                {w: [((), torch.int64)] for w in members if w != me},
                True,
            )
        group.close()
        store.close()


# ---- tests


async def _no_links(end: Link, hello: Hello) -> None:
    raise AssertionError("no worker is expected here")


@pytest.mark.parametrize(("scenes", "members"), [("everything,poison,leave", (0, 1)), ("everything,poison", (4, 0, 9))])
async def test_members_in_processes_of_their_own(scenes: str, members: tuple[int, ...]) -> None:
    service = StoreService()
    with tempfile.TemporaryDirectory(prefix="dt") as folder:
        server = await Server.start(
            path=str(Path(folder) / "s"), token=TOKEN, on_link=_no_links, routes=service.routes()
        )
        numbers = [str(w) for w in members]
        children = [
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, server.address, TOKEN, scenes, w, *numbers,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )
            for w in numbers
        ]  # fmt: skip
        try:
            outputs = await asyncio.wait_for(asyncio.gather(*(c.communicate() for c in children)), 60)
        finally:
            for child in children:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
            service.close()
            await server.stop()
        for child, (output, _) in zip(children, outputs, strict=True):
            assert child.returncode == 0, output.decode()


def test_layout_packs_and_unpacks_everything() -> None:
    tensors = specimens(1)
    layout = message_layout(tuple(specs(tensors)))
    assert all(start % 64 == 0 for start in layout.starts)
    buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
    for ok in (True, False):
        pack(tensors, layout, ok, buffer)
        assert bool(buffer[-1]) == ok
        assert same(unpack(buffer, specs(tensors), layout), tensors)
    assert message_layout(()).size_bytes == 0
    assert message_layout((((0,), torch.float32),)).size_bytes > 0


def test_a_group_of_one_needs_no_one() -> None:
    group = GlooGroup(HashStore(), 3, [3], 1.0)
    assert group.exchange({}, {}, True) == ({}, True)
    with pytest.raises(ValueError, match="cannot exchange with worker 3"):
        group.exchange({3: [torch.ones(1)]}, {}, True)
    group.close()


def test_wrong_members_are_told() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="must be one of the members"):
        GlooGroup(store, 1, [2, 3], 1.0)
    with pytest.raises(ValueError, match="distinct"):
        GlooGroup(store, 1, [1, 1], 1.0)
    with pytest.raises(ValueError, match="not 'mpi'"):
        make_group("mpi", store, 0, [0], 1.0)


def test_missing_members_are_a_lost_connection() -> None:
    with pytest.raises(ConnectionLostError, match="could not form a group"):
        GlooGroup(HashStore(), 0, [0, 1], 0.05)


def two_groups() -> list[list[GlooGroup]]:
    """Two groups of workers 0 and 1, all four ends made in this process at the same time."""
    store, made = HashStore(), [[GlooGroup(HashStore(), 9, [9], 1.0)] * 2 for _ in range(2)]

    def make(group: int, me: int) -> None:
        made[group][me] = GlooGroup(distributed.PrefixStore(str(group), store), me, [0, 1], TIMEOUT_S)

    threads = [threading.Thread(target=make, args=(group, me)) for group in (0, 1) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="connections are found in /proc")
def test_a_group_that_is_aborted_leaves_others_of_the_process_alone() -> None:
    wanted: list[groups.Spec] = [((3,), torch.float32)]
    for _ in range(5):
        doomed, other = two_groups()
        waiting = doomed[0].start({}, {1: wanted}, True)
        doomed[0].abort()
        with pytest.raises(ConnectionLostError):
            waiting.wait()
        with pytest.raises(ConnectionLostError):  # and so does its peer
            doomed[1].exchange({}, {0: wanted}, True)
        sent = other[1].start({0: [torch.ones(3)]}, {}, True)
        got, good = other[0].exchange({}, {1: wanted}, True)
        sent.wait()
        assert good
        assert torch.equal(got[1][0], torch.ones(3))
        for group in (*doomed, *other):
            group.close()
            group.abort()  # too late to do anything


def test_a_group_whose_members_go_away_while_it_is_made_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forming, "CONNECT_S", 1.0)
    store = HashStore()
    store.set("at/1", "127.0.0.1|1")  # it has shown up, and does not connect
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) == 2

    with pytest.raises(ConnectionLostError, match="is gone"):
        GlooGroup(store, 0, [0, 1], TIMEOUT_S, stopped=stopped)
    for thread in list(forming._left_behind):
        thread.join()
    assert not forming.is_forming()


@pytest.mark.skipif(distributed.is_nccl_available(), reason="tells what a build without NCCL says")
def test_nccl_is_missed_with_words() -> None:
    with pytest.raises(ValueError, match="no NCCL"):
        make_group("nccl", HashStore(), 0, [0], 1.0)


if __name__ == "__main__":
    play(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), [int(w) for w in sys.argv[5:]])
    sys.stdout.flush()
    os._exit(0)  # no time for interpreters to say goodbye: the leaving member is simply gone
