"""Groups of workers that exchange tensors directly with each other, without the controller.

Everything that dtorch moves between workers is one ``exchange``: an all-to-all of whatever each member has for each
other. All members call it, in the same order; that order is the controller's program order.

A message from one member to another is laid out by ``MessageLayout``: tensors at aligned offsets, then one status byte,
which tells the receiver whether the sender's inputs were good. A member without inputs (an op failed before) takes part
all the same, with garbage of the right size, so nobody waits for it in vain and those who depend on it learn of the
failure with the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed
from torch._C._distributed_c10d import Store  # torch.distributed re-exports it in a way that type checkers miss

from .errors import ConnectionLostError
from .forming import Formed

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of one tensor

LOOPBACK = "127.0.0.1"
DIRECT_BYTES = 1 << 20
"""Messages from this size on are sent tensor by tensor from where they lie; smaller ones are packed into one buffer."""

_ALIGN = 64


class UnderWay(Protocol):
    """An exchange that has begun. Its tensors must not be written before it is over."""

    def wait(self) -> tuple[dict[int, list[torch.Tensor]], bool]:
        """The outcome, as of ``Group.exchange``. Called once."""
        ...


class Group(Protocol):
    """Workers that can exchange tensors.

    Attributes:
        members: worker numbers, in rank order.
        takes_cuda: tensors on GPUs go through as they are; otherwise only tensors in host memory do.
    """

    members: tuple[int, ...]
    takes_cuda: bool

    def exchange(
        self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool
    ) -> tuple[dict[int, list[torch.Tensor]], bool]:
        """Give ``sends[worker]`` to each worker and get theirs for this one. Every member calls it, in one order.

        Args:
            sends: tensors by receiving worker, never this one. Absent workers and empty lists: no message.
            receives: shape and dtype of what comes, by sending worker; must agree with what that worker sends.
            ok: False tells the receivers that the content is garbage; the sizes must be right all the same.

        Returns:
            The received tensors, laid out as ``receives``, and whether all of them are good. Small tensors of one
            message may share a storage; nothing else has it.

        Raises:
            ConnectionLostError: a member is gone or did not take part in time. The group is of no use any more.
        """
        ...

    def start(self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool) -> UnderWay:
        """Begin an exchange and do not wait for it. Exchanges are begun in one order by all members."""
        ...

    def close(self) -> None:
        """Leave the group. The other members' next exchange with this one fails."""
        ...

    def abort(self) -> None:
        """End an exchange that is under way, and all later ones, with ConnectionLostError. Any thread may call this."""
        ...


class MessageLayout(NamedTuple):
    """Where the tensors of one message lie."""

    starts: tuple[int, ...]  # byte offset of each tensor, aligned
    sizes: tuple[int, ...]  # bytes of each tensor
    size_bytes: int  # of the message: tensors, padding, and the status in the last byte

    @property
    def direct(self) -> bool:
        return self.size_bytes >= DIRECT_BYTES


@lru_cache(maxsize=4096)
def message_layout(specs: tuple[Spec, ...]) -> MessageLayout:
    """The layout of a message with these tensors; of 0 bytes if there are none."""
    starts, sizes, end = [], [], 0
    for shape, dtype in specs:
        size = math.prod(shape) * dtype.itemsize
        starts.append(end)
        sizes.append(size)
        end += -(-size // _ALIGN) * _ALIGN
    return MessageLayout(tuple(starts), tuple(sizes), end + _ALIGN if specs else 0)


def pack(tensors: Sequence[torch.Tensor], layout: MessageLayout, ok: bool, into: torch.Tensor) -> None:
    """Write a message into ``into``, a uint8 tensor of ``layout.size_bytes``."""
    for tensor, start, size in zip(tensors, layout.starts, layout.sizes, strict=True):
        if size:
            into[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    into[-1] = int(ok)


def unpack(buffer: torch.Tensor, specs: Sequence[Spec], layout: MessageLayout) -> list[torch.Tensor]:
    """The tensors of a message, as views of ``buffer``."""
    return [
        buffer[start : start + size].view(dtype).view(shape) if size else buffer.new_empty(shape, dtype=dtype)
        for (shape, dtype), start, size in zip(specs, layout.starts, layout.sizes, strict=True)
    ]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a uint8 vector; of another tensor, that of a contiguous copy."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may come with any stride


def _specs(tensors: Sequence[torch.Tensor]) -> tuple[Spec, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _as_specs(specs: Sequence[Spec]) -> tuple[Spec, ...]:
    return tuple((tuple(shape), dtype) for shape, dtype in specs)


class _Members:
    """What both kinds of group share: who is in it."""

    def __init__(self, me: int, members: Sequence[int]) -> None:
        self.members = tuple(members)
        if len(set(self.members)) != len(self.members) or me not in self.members:
            raise ValueError(f"worker {me} must be one of the members, which must be distinct: {self.members}")
        self.me = me
        self._rank = {worker: rank for rank, worker in enumerate(self.members)}

    def _check_peers(self, *peers: dict[int, Any]) -> None:
        for worker in {worker for each in peers for worker in each}:
            if worker == self.me or worker not in self._rank:
                raise ValueError(f"worker {self.me} cannot exchange with worker {worker} among {self.members}")


class GlooGroup(_Members):
    """A group over gloo, for CPU tensors.

    Making one waits for the other members; it cannot deadlock when all members make their groups in the same order.

    Args:
        store: reachable by all members, with a prefix of the group's own; kept as long as the group.
        me: this worker's number.
        members: all numbers in the group, in the same order everywhere.
        timeout_s: for making the group and for each exchange.
        hostname: of the interface to use. Loopback serves one host; None takes what the host's name resolves to.
        stopped: asked from time to time while the group is made; True ends that with ConnectionLostError.
    """

    takes_cuda = False

    def __init__(
        self,
        store: Store,
        me: int,
        members: Sequence[int],
        timeout_s: float,
        hostname: str | None = LOOPBACK,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(me, members)
        self._store = store  # C++ calls back into it: see SessionStore
        self.timeout = timedelta(seconds=timeout_s)
        self._aborted = False
        self._formed: Formed | None = None
        if len(self.members) > 1:
            self._formed = Formed(store, self._rank[me], len(self.members), hostname or "", timeout_s, stopped)

    def exchange(
        self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool
    ) -> tuple[dict[int, list[torch.Tensor]], bool]:
        return self.start(sends, receives, ok).wait()

    def start(self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool) -> _GlooUnderWay:
        self._check_peers(sends, receives)
        incoming = {worker: _Incoming(_as_specs(specs)) for worker, specs in receives.items()}
        works: list[Any] = []
        parts: list[torch.Tensor] = []  # keeps what is being sent alive
        try:
            # Post everything, then wait: no order among the peers can deadlock. Messages of one pair keep their order.
            for worker, message in incoming.items():
                works += [self._group().recv([part], self._rank[worker], 0) for part in message.parts]
            for worker, tensors in sends.items():
                for part in _outgoing(tensors, ok):
                    parts.append(part)
                    works.append(self._group().send([part], self._rank[worker], 0))
        except RuntimeError as error:
            raise ConnectionLostError(f"worker {self.me} lost a member of {self.members}: {error}") from error
        return _GlooUnderWay(self, works, parts, incoming)

    def _group(self) -> Any:
        if self._formed is None or self._aborted:
            raise ConnectionLostError(f"the group {self.members} is closed")
        return self._formed.pg

    def close(self) -> None:
        formed, self._formed = self._formed, None
        if formed is not None:
            formed.close()

    def abort(self) -> None:
        self._aborted = True
        formed = self._formed
        if formed is not None:
            formed.cut()


class _GlooUnderWay:
    def __init__(
        self, group: GlooGroup, works: list[Any], parts: list[torch.Tensor], incoming: dict[int, _Incoming]
    ) -> None:
        self._group, self._works, self._parts, self._incoming = group, works, parts, incoming

    def wait(self) -> tuple[dict[int, list[torch.Tensor]], bool]:
        group = self._group
        try:
            for work in self._works:
                work.wait(group.timeout)
        except RuntimeError as error:
            raise ConnectionLostError(f"worker {group.me} lost a member of {group.members}: {error}") from error
        self._parts.clear()
        good = all([message.ok() for message in self._incoming.values()])
        return {worker: message.tensors() for worker, message in self._incoming.items()}, good


def _outgoing(tensors: list[torch.Tensor], ok: bool) -> list[torch.Tensor]:
    """The uint8 vectors that make up a message, in order; the same cut as ``_Incoming`` makes."""
    layout = message_layout(_specs(tensors))
    if layout.size_bytes == 0:
        return []
    if layout.direct:
        return [flat_bytes(t) for t in tensors if t.numel()] + [torch.tensor([ok], dtype=torch.uint8)]
    buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
    pack(tensors, layout, ok, buffer)
    return [buffer]


class _Incoming:
    """A message on its way in: ``parts`` are to be filled in order."""

    def __init__(self, specs: tuple[Spec, ...]) -> None:
        self._specs = specs
        self._layout = layout = message_layout(specs)
        self._whole: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []
        if layout.direct:
            self._whole = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
            self.parts = [flat_bytes(tensor) for tensor in self._whole if tensor.numel()]
            self.parts.append(torch.zeros(1, dtype=torch.uint8))
        elif layout.size_bytes:
            self.parts = [torch.empty(layout.size_bytes, dtype=torch.uint8)]

    def ok(self) -> bool:
        return not self.parts or bool(self.parts[-1][-1])

    def tensors(self) -> list[torch.Tensor]:
        if self._layout.direct or not self.parts:
            return self._whole
        return unpack(self.parts[0], self._specs, self._layout)


class NcclGroup(_Members):
    """A group over NCCL, for CUDA tensors. Needs GPUs, one a member, to be run and tested.

    One grouped send and receive per exchange, from one packed buffer into another. To learn the status bytes the host
    waits for the exchange; NCCL offers nothing cheaper.

    Args:
        store: as of ``GlooGroup``.
        me: this worker's number.
        members: all numbers in the group, in the same order everywhere.
        timeout_s: after which NCCL's watchdog gives an exchange up.
        device: this worker's GPU; the current one by default.
    """

    takes_cuda = True

    def __init__(
        self,
        store: Store,
        me: int,
        members: Sequence[int],
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(me, members)
        if not distributed.is_nccl_available():
            raise ValueError("this build of torch has no NCCL")
        self._store = store
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._pg: Any = distributed.ProcessGroupNCCL(store, self._rank[me], len(self.members), options)

    def exchange(
        self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool
    ) -> tuple[dict[int, list[torch.Tensor]], bool]:
        return self.start(sends, receives, ok).wait()

    def start(self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[Spec]], ok: bool) -> _NcclUnderWay:
        self._check_peers(sends, receives)
        if self._pg is None:
            raise ConnectionLostError(f"the group {self.members} is closed")
        none = message_layout(())
        out_layouts = [message_layout(_specs(sends[w])) if w in sends else none for w in self.members]
        in_layouts = [message_layout(_as_specs(receives[w])) if w in receives else none for w in self.members]
        out_splits = [layout.size_bytes for layout in out_layouts]
        in_splits = [layout.size_bytes for layout in in_layouts]
        out = torch.empty(sum(out_splits), dtype=torch.uint8, device=self._device)
        into = torch.empty(sum(in_splits), dtype=torch.uint8, device=self._device)
        for worker, layout, piece in zip(self.members, out_layouts, torch.split(out, out_splits), strict=True):
            if layout.size_bytes:
                pack(sends[worker], layout, ok, piece)
        work = None
        if sum(out_splits) + sum(in_splits):
            try:
                work = self._pg.alltoall_base(into, out, in_splits, out_splits)
            except RuntimeError as error:
                raise ConnectionLostError(f"worker {self.me} lost a member of {self.members}: {error}") from error
        pieces = dict(zip(self.members, torch.split(into, in_splits), strict=True))
        specs = {worker: _as_specs(given) for worker, given in receives.items()}
        layouts = dict(zip(self.members, in_layouts, strict=True))
        return _NcclUnderWay(self, work, out, pieces, specs, layouts)

    def close(self) -> None:
        if self._pg is not None:
            self._pg.abort()
            self._pg = None

    def abort(self) -> None:
        group = self._pg
        if group is not None:
            group.abort()


class _NcclUnderWay:
    def __init__(
        self, group: NcclGroup, work: Any, out: torch.Tensor, pieces: dict[int, torch.Tensor],
        specs: dict[int, tuple[Spec, ...]], layouts: dict[int, MessageLayout],
    ) -> None:
        self._group, self._work, self._out, self._pieces = group, work, out, pieces
        self._specs, self._layouts = specs, layouts

    def wait(self) -> tuple[dict[int, list[torch.Tensor]], bool]:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise ConnectionLostError(
                    f"worker {self._group.me} lost a member of {self._group.members}: {error}"
                ) from error
        got = {w: unpack(self._pieces[w], specs, self._layouts[w]) for w, specs in self._specs.items()}
        statuses = [self._pieces[w][-1] for w in self._specs if self._layouts[w].size_bytes]
        return got, bool(torch.stack(statuses).all()) if statuses else True


def make_group(
    kind: str,
    store: Store,
    me: int,
    members: Sequence[int],
    timeout_s: float,
    hostname: str | None = LOOPBACK,
    stopped: Callable[[], bool] = lambda: False,
) -> Group:
    """A group of ``kind`` "gloo" or "nccl". Waits for the other members; all make their groups in the same order."""
    if kind == "gloo":
        return GlooGroup(store, me, members, timeout_s, hostname, stopped)
    if kind == "nccl":
        return NcclGroup(store, me, members, timeout_s)
    raise ValueError(f'a group is of kind "gloo" or "nccl", not {kind!r}')
