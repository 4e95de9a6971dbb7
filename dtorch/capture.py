"""``dtorch.compile``: record a function once per input specs, replay it as one message.

The first call runs the function and keeps what it records out of the program order: those calls become a program, which
workers store. That call and all later ones are then a single recorded call. Tensors that the function uses without being
given them (parameters, caches, constants) are captured by reference: a replay sees what they hold by then.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from sys import _getframe
from typing import Any

import msgspec
import torch

from dtorch import policy
from dtorch.frames import source
from dtorch.mesh import current_mesh
from dtorch.ops._op import _key as tree_key
from dtorch.runtime.recorder import Captured, CaptureError, Recorder, Signature, locate
from dtorch.session import Session, current_session
from dtorch.spec import Spec
from dtorch.tensor import Tensor
from dtorch.transport.messages import Definition, Program

MAX_PROGRAMS = 64
"""Programs kept for one function; the one not used for longest goes first."""
WARN_AFTER = 8
"""Recordings of one function after which a warning says what keeps changing."""

_new = object.__new__
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Recorded:
    """A program of one function for one kind of input."""

    sig: Signature
    tree: Any  # what the function returned, with _Output, _Input and tensors in the leaves
    specs: tuple[Spec, ...]  # of the outputs
    writes: bool  # replays change tensors that exist already


@dataclass(frozen=True)
class _Output:
    index: int


@dataclass(frozen=True)
class _Input:
    index: int


class Compiled:
    """A function (or module) whose calls replay. Made by :func:`compile`.

    Attributes:
        num_recordings: how often it was recorded, that is, met inputs of a new kind.
        num_replays: calls served by a program, the recording ones included.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._programs: OrderedDict[Any, _Recorded] = OrderedDict()
        self._lock = threading.RLock()
        self._modules = tuple(fn.modules()) if isinstance(fn, torch.nn.Module) else ()
        self._last_key: Any = None
        self.num_recordings = 0
        self.num_replays = 0
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return f"<compiled {getattr(self._fn, '__name__', type(self._fn).__name__)}, {len(self._programs)} programs>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fn"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key: list[Any] = []
        ins: list[int] = []
        if not tree_key(args, key, ins) or (kwargs and not tree_key(tuple(sorted(kwargs.items())), key, ins)):
            raise TypeError("a compiled function takes dtorch tensors, numbers, strings and nestings of them")
        session = current_session()
        key.append((session.number, session.epoch))
        key.append(current_mesh())
        key.append(policy.is_auto())
        if self._modules:
            key.append(tuple([m.training for m in self._modules]))
        if session.recorder.is_capturing or session.recorder.is_sync:
            return self._fn(*args, **kwargs)  # part of an outer program; or op by op, for debugging
        frozen = tuple(key)
        recorded = self._programs.get(frozen)
        if recorded is None:
            with self._lock:
                return self._record(session, frozen, ins, args, kwargs)
        self.num_replays += 1
        if len(self._programs) > 1:
            self._programs.move_to_end(frozen)
        sig = recorded.sig
        slots = []
        outs = []
        take = sig.take
        for spec in recorded.specs:
            out = _new(Tensor)
            out._spec = spec
            try:
                out._slot = take()
            except IndexError:
                out._slot = sig.recorder.grant()
            slots.append(out._slot)
            outs.append(out)
        sig.put(((sig.id, *slots, *ins), *source(_getframe(1))))
        if recorded.writes:
            session.num_mutations += 1
        if not outs:
            sig.recorder.after_put()
        tree = recorded.tree
        if type(tree) is _Output:
            return outs[0]
        return _fill(tree, outs, (args, tuple(v for _, v in sorted(kwargs.items()))))

    def reset(self) -> None:
        """Forget all programs: the next calls record again. Needed after a parameter was replaced by another tensor."""
        with self._lock:
            self._programs.clear()

    # ---- recording

    def _record(
        self, session: Session, key: Any, ins: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorder = session.recorder
        self._warn_of_changes(key)
        at = source(_getframe(2))
        recorder.begin_capture()
        try:
            result = self._fn(*args, **kwargs)
        except BaseException as error:
            captured = recorder.end_capture()
            if isinstance(error, CaptureError):
                raise self._explained(error) from None
            raise
        captured = recorder.end_capture()
        inputs = [*_tensors(args), *_tensors(tuple(v for _, v in sorted(kwargs.items())))]
        returned = _tensors(result)
        made = _Maker(session, captured, ins, inputs, returned)
        sig, pins, positions, writes = made.build()
        specs = tuple(t._spec for t in made.outputs)
        recorded = _Recorded(sig, _template(result, positions, inputs), specs, writes)
        self._programs[key] = recorded
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        weakref.finalize(recorded, _unpin, weakref.ref(recorder), pins)
        recorder.put(((sig.id, *[t._slot for t in made.outputs], *ins), *at))
        if writes:
            session.num_mutations += 1
        recorder.after_put()
        self.num_recordings += 1
        self.num_replays += 1
        return result

    def _explained(self, error: CaptureError) -> CaptureError:
        trace = error.__traceback__
        where = ""
        while trace is not None:
            code = trace.tb_frame.f_code
            found = source(trace.tb_frame)
            if found[0] is code:
                place = locate(code, trace.tb_lasti)
                where = f" at {place[0]}:{place[1]}" if place is not None else ""
            trace = trace.tb_next
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        return CaptureError(
            f"{name} cannot be compiled: {error}{where}. A replay runs without the client, so nothing in it may depend on a "
            "value: keep the value a tensor (torch.where instead of if), or compile the parts before and after the read"
        )

    def _warn_of_changes(self, key: Any) -> None:
        last, self._last_key = self._last_key, key
        if self.num_recordings + 1 == WARN_AFTER and last is not None:
            changed = [f"{a} -> {b}" for a, b in zip(last, key, strict=False) if a is not b and a != b][:3]
            warnings.warn(
                f"{self!r} was recorded {WARN_AFTER} times because its inputs keep changing, lately {'; '.join(changed)}. "
                "Numbers that vary belong in tensors, and lengths in a few buckets",
                RuntimeWarning,
                stacklevel=4,
            )


class _Maker:
    """Turns a capture into a program: slots become registers."""

    def __init__(
        self, session: Session, captured: Captured, ins: list[int], inputs: list[Tensor], returned: list[Tensor]
    ) -> None:
        self._session = session
        self._captured = captured
        self._ins = ins
        self._inputs = inputs
        self._returned = returned
        self.outputs: list[Tensor] = []

    def build(self) -> tuple[Signature, tuple[int, ...], dict[int, int], bool]:
        """The program's signature, slots to keep while it lives, id of a returned tensor -> output, whether it writes."""
        session, recorder = self._session, self._session.recorder
        registers: dict[int, int] = {}
        produced: dict[int, int] = {}  # slot -> mesh
        external: list[int] = []
        meshes: set[int] = set()
        writes = random = False
        calls = []
        for register, slot in enumerate(dict.fromkeys(self._ins)):
            registers[slot] = register
        chunk = self._captured.chunk
        for call in chunk[::3]:
            facts = session.signature_facts(call[0])
            num_outs = 0 if facts.writes else len(facts.outputs)
            slots = call[1 : 1 + num_outs + len(facts.inputs)]
            meshes.update(layout.mesh for layout in (*facts.inputs, *facts.outputs))
            writes, random = writes or facts.writes, random or facts.random
            for position, slot in enumerate(slots):
                if position < num_outs:
                    registers[slot] = len(registers) if slot not in registers else registers[slot]
                    produced[slot] = facts.outputs[position].mesh
                elif slot not in registers:
                    registers[slot] = len(registers)
                    external.append(slot)
            calls.append((call[0], *[registers[s] for s in slots], *call[1 + len(slots) :]))
        positions: dict[int, int] = {}
        for tensor in self._returned:
            if tensor._slot in produced and id(tensor) not in positions:
                positions[id(tensor)] = len(self.outputs)
                self.outputs.append(tensor)
        given = {t._slot for t in self.outputs}
        kept = [slot for slot in produced if slot not in self._captured.dead and slot not in given]
        lasting = given | set(kept)
        dying: dict[int, list[int]] = {}
        for slot, mesh in produced.items():
            if slot not in lasting:
                dying.setdefault(mesh, []).append(registers[slot])
        body = _encode((calls, [(mesh, sorted(names)) for mesh, names in dying.items()]))
        out_layouts = tuple(t._spec.layout for t in self.outputs)
        in_layouts = tuple(t._spec.layout for t in self._inputs)
        extra = {"random": True} if random else {}

        def define(number: int) -> Definition:
            return Definition(number, "dtorch.program", "program", [], {}, in_layouts, out_layouts, (), extra)

        sig = session.define(define, tuple(t._spec for t in self.outputs), "dtorch.compile", in_layouts, random)
        recorder.add_program(
            Program(
                sig.id,
                tuple(sorted(meshes)),
                body,
                len(registers),
                tuple(registers[slot] for slot in self._ins),
                tuple(registers[t._slot] for t in self.outputs),
                tuple((registers[slot], slot) for slot in external),
                tuple((registers[slot], slot) for slot in kept),
            )
        )
        session.program_lines[sig.id] = chunk
        pins = (*external, *kept)
        recorder.pin(pins)
        return sig, pins, positions, writes or bool(kept)


def _unpin(recorder: weakref.ref[Recorder], pins: tuple[int, ...]) -> None:
    alive = recorder()
    if alive is not None:
        alive.unpin(pins)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for v in tree.values() for t in _tensors(v)]
    if isinstance(tree, (list, tuple)):
        return [t for v in tree for t in _tensors(v)]
    return []


def _template(tree: Any, positions: dict[int, int], inputs: list[Tensor]) -> Any:
    """The returned tree with places in it for what a replay makes; other leaves are returned as they are."""
    if isinstance(tree, Tensor):
        if id(tree) in positions:
            return _Output(positions[id(tree)])
        at = next((i for i, t in enumerate(inputs) if t is tree), None)
        return tree if at is None else _Input(at)
    if isinstance(tree, dict):
        return {k: _template(v, positions, inputs) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_template(v, positions, inputs) for v in tree]
    if isinstance(tree, tuple):
        items = [_template(v, positions, inputs) for v in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def _fill(tree: Any, outs: list[Tensor], inputs: Any) -> Any:
    if type(tree) is _Output:
        return outs[tree.index]
    if type(tree) is _Input:
        return _tensors(inputs)[tree.index]
    if isinstance(tree, dict):
        return {k: _fill(v, outs, inputs) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_fill(v, outs, inputs) for v in tree]
    if isinstance(tree, tuple):
        items = [_fill(v, outs, inputs) for v in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def compile(fn: Callable[..., Any]) -> Compiled:
    """Record ``fn`` once per kind of input; later calls send one message and workers replay what was recorded.

    A kind is: the specs of tensor arguments, the values of all others, the mesh and policy in force, and train or eval of a
    module's parts. Outputs are fresh tensors. Parameters and caches are used by reference; ops in place on them happen at
    each replay, random ops draw on. At most 64 kinds are kept.

    Args:
        fn: a function or module. It takes dtorch tensors, numbers, strings, and lists and tuples of them.

    Raises:
        CaptureError: at the first call, when the function reads a value; says where.
    """
    return Compiled(fn)
