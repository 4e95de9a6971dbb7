"""``dtorch.check_finite``: find the op that first gives NaN or Inf, by running op by op and looking at each result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from dtorch.failures import SignatureFacts, describe
from dtorch.lines import line_at
from dtorch.mesh import DeviceMesh
from dtorch.ops.table import OPS
from dtorch.runtime.positions import locate
from dtorch.runtime.template import dtype_of
from dtorch.session import Session, current_session
from dtorch.spec import contiguous_stride
from dtorch.tensor import Tensor
from dtorch.transport.errors import NonFiniteError
from dtorch.transport.messages import Layout

_asked: ContextVar[bool | None] = ContextVar("dtorch_check_finite", default=None)
"""Whether the running task checks its ops: None: no; True: NaN and Inf; False: only NaN."""

_watches: dict[int, _Watch] = {}
_guard = threading.Lock()


class _Watch:
    """Runs a session op by op while anybody checks; one a session.

    The recorder calls ``after_op`` after every call that it records, as it does for ``DTORCH_SYNC=1``. Of tasks that do
    not check, the calls are only sent.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._num_users = 0
        self._before: Callable[[], None] | None = None  # what the recorder would call without this

    def enter(self) -> None:
        recorder = self._session.recorder
        if recorder.is_capturing:
            raise RuntimeError("check_finite() cannot start inside a function that is being compiled; put it around")
        recorder.flush()
        if not self._num_users:
            self._before = recorder.follow(self.after_op)
        self._num_users += 1

    def leave(self) -> bool:
        """Whether nobody is left."""
        self._num_users -= 1
        if self._num_users == 0:
            self._session.recorder.follow(self._before)
        return self._num_users == 0

    def after_op(self) -> None:
        recorder = self._session.recorder
        infinite = _asked.get()
        if infinite is None or self._session.thread.is_own_thread():
            if self._before is not None:
                self._before()
            else:
                recorder.flush()
                recorder._outlet.wait_for_room()
            return
        chunk = recorder._buffer[:]
        recorder.flush()
        for call, code, offset in zip(chunk[::3], chunk[1::3], chunk[2::3], strict=True):
            facts = self._session.signature_facts(call[0])
            if facts.op.rpartition(".")[2].removeprefix("new_").startswith("empty"):
                continue  # memory as it happens to be
            for slot, layout in _outputs(call, facts):
                value = self._value(slot, layout)
                if value is None:
                    continue
                num_nan = int(value.isnan().sum())
                num_inf = int(value.isinf().sum()) if infinite else 0
                if num_nan or num_inf:
                    raise NonFiniteError(
                        facts.op,
                        *line_at(locate(code, offset)),
                        [describe(one) for one in facts.inputs],
                        describe(layout),
                        num_nan,
                        num_inf,
                    )

    def _value(self, slot: int, layout: Layout) -> torch.Tensor | None:
        """What is in a slot; None where it cannot be NaN. Raises what the op failed with."""
        dtype = dtype_of(layout.dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            return None
        kind, devices, shape = next(key for key, (number, _) in self._session._meshes.items() if number == layout.mesh)
        mesh = DeviceMesh(kind, torch.tensor(devices).view(shape))
        stride = contiguous_stride(layout.shape)
        stand_in = object.__new__(Tensor)
        stand_in._spec = self._session.spec(layout.shape, stride, dtype, mesh, layout.codes)
        stand_in._slot = slot
        try:
            value = self._session.fetch(stand_in).result()
        finally:
            del stand_in._spec  # so that its end does not free the slot, which is another tensor's
        return value.to(torch.float32) if dtype.is_floating_point and dtype.itemsize == 1 else value


def _outputs(call: tuple[Any, ...], facts: SignatureFacts) -> Iterator[tuple[int, Layout]]:
    """Slot and layout of what a call makes or writes."""
    if facts.writes:
        written = getattr(OPS.get(facts.op), "writes", None) or 0
        if facts.outputs:
            yield call[1 + written], facts.outputs[0]
        return
    yield from zip(call[1:], facts.outputs, strict=False)


@contextmanager
def check_finite(inf: bool = True) -> Iterator[None]:
    """Inside, the first op whose result has NaN or Inf raises at its own line. For debugging.

    Belongs to the running task, and to the session that runs when it is entered; compiled functions run op by op.
    Uploads and factories count as ops; ``empty`` does not. The cost: every op is sent alone, and its whole result is
    fetched and looked at before the next op is recorded; that is a round trip (about 0.1 ms) and a copy of the result
    per op, and on a running event loop it blocks the loop meanwhile.

    Args:
        inf: False lets infinite values pass, as masks of ``-inf`` use them.

    Raises:
        NonFiniteError: from the op, with the user's line, op, shapes and placements.
        OpError: from an op that fails.
    """
    session = current_session()
    with _guard:
        watch = _watches.get(session.serial)
        if watch is None:
            watch = _Watch(session)
        watch.enter()
        _watches[session.serial] = watch
    token = _asked.set(inf)
    try:
        yield
    finally:
        _asked.reset(token)
        with _guard:
            if watch.leave():
                del _watches[session.serial]
