"""Sockets that an event loop reads, and for as long as a thread waits for what comes on them, that thread.

A value that a thread waits for would wake two threads, the loop's and then the one that waits; and where both of them and the
worker stay awake for a moment, as they do while it is near, that is one more than a machine with two cores can run. Here the
one that waits reads and handles frames itself, and the loop does not even wake.

Two epolls do it: one has the sockets, the other, which the loop watches, has the first, and is told to look away meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from time import perf_counter

import torch

from dtorch.runtime.shield import LOOK_S, Shield
from dtorch.runtime.spin import SPIN_S, Contention
from dtorch.transport.link import Source

HAS_EAR = hasattr(select, "epoll") and hasattr(os, "eventfd")  # Linux

_num_function_modes, _num_dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


class Ear:
    """Whoever waits may read. Links come and go in the loop's thread.

    Attributes:
        lock: held while frames are read and handled, so that one thread at a time does either.
        contention: whether a thread that waits polls for a moment.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.lock = threading.RLock()
        self._sockets, self._gate = select.epoll(), select.epoll()
        self._nudges = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.register(self._nudges, select.EPOLLIN)
        self._gate.register(self._sockets.fileno(), select.EPOLLIN)
        self._sources: dict[int, Source] = {}  # by the descriptor of our own from which each is read
        self._turn = threading.Lock()  # one thread waits here; the others are woken by it or the loop
        self._waits: int | None = None  # that thread
        self._nudging = threading.Lock()  # held for a moment, inside of any other
        self._closed = False
        self.contention = Contention()
        loop.add_reader(self._gate.fileno(), self._read)

    def add(self, source: Source, fd: int) -> None:
        """Read ``source`` from now on; it does so no more itself."""
        own = os.dup(fd)  # it cannot become another file's while we read
        with self.lock:
            self._sources[own] = source
            self._sockets.register(own, select.EPOLLIN)

    def remove(self, source: Source) -> None:
        """The source reads itself again, or has ended. Nothing happens when that was said before."""
        with self.lock:
            for fd in [fd for fd, other in self._sources.items() if other is source]:
                del self._sources[fd]
                self._sockets.unregister(fd)
                os.close(fd)

    def close(self) -> None:
        """The loop has ended."""
        self._closed = True
        self.nudge()
        with self._turn, self.lock, self._nudging:
            for source in list(self._sources.values()):
                self.remove(source)
            self._gate.close()
            self._sockets.close()
            os.close(self._nudges)

    def _read(self) -> None:
        self._pump(in_loop=True)

    # ---- any thread

    def wait(self, is_done: Callable[[], bool], until_s: float) -> None:
        """Read and handle what comes until ``is_done`` or the time is over. It returns early where another thread waits
        already, or the loop has to go on: then others make it done. Whoever does so calls ``nudge`` afterwards.

        Args:
            until_s: by ``perf_counter``; infinite for ever.
        """
        if asyncio._get_running_loop() is self._loop:
            return
        if self._waits == threading.get_ident():  # a signal's handler, which Python calls in the midst of this thread's wait
            self._gate.modify(self._sockets.fileno(), select.EPOLLIN)
            return
        with Shield(self._wake) as shield:
            if not self._turn.acquire(blocking=False):
                return
            try:
                if self._closed:
                    return
                self._waits = threading.get_ident()
                self._gate.modify(self._sockets.fileno(), 0)
                before = perf_counter()
                is_awake, awake_until = self.contention.may_poll(before), before + SPIN_S
                while not (is_done() or self._closed or shield.was_asked):
                    now = perf_counter()
                    is_awake = is_awake and self.contention.looked(before, now) and now < awake_until
                    if until_s <= now:
                        break
                    before = now
                    if self._sockets.poll(0.0 if is_awake else min(until_s - now, LOOK_S)) and not self._pump_here():
                        break
            finally:
                self._waits = None
                if not self._closed:
                    self._gate.modify(self._sockets.fileno(), select.EPOLLIN)
                self._turn.release()

    def nudge(self) -> None:
        """Whoever waits looks whether it is done."""
        with self._nudging:
            if self._waits not in (None, threading.get_ident()):  # so it is not closed
                self._wake()

    def woken(self, asked_s: float, ran_s: float) -> None:
        """A loop that somebody awaits a value on was woken, and ran so much later: it had a core, or had to wait for one."""
        self.contention.looked(asked_s, ran_s)

    def _wake(self) -> None:
        os.eventfd_write(self._nudges, 1)

    def _pump_here(self) -> bool:
        """``_pump`` in the waiting thread, whose modes (``with mesh:`` is one, ``FakeTensorMode`` or ``inference_mode`` are
        others) are not meant for what is put together of values here."""
        if not (_num_function_modes() or _num_dispatch_modes() or torch.is_inference_mode_enabled()):
            return self._pump(in_loop=False)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.inference_mode(False):
            return self._pump(in_loop=False)

    def _pump(self, in_loop: bool) -> bool:
        """Read what there is; the answer is whether all of it could be handled in this thread."""
        all_here = True
        with self.lock:
            for fd, _ in self._sockets.poll(0):
                source = self._sources.get(fd)
                if source is not None:
                    all_here = source.pump(fd, in_loop) and all_here
                elif fd == self._nudges:
                    os.eventfd_read(fd)
        return all_here
