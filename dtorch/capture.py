"""``dtorch.compile``: record a function once per input specs, replay it as one message.

The first call runs the function and keeps what it records out of the program order: those calls become a program, which
workers store. That call and all later ones are then a single recorded call. Tensors that the function uses without being
given them (parameters, caches, constants) are captured by reference: a replay sees what they hold by then.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from sys import _getframe
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from dtorch import policy
from dtorch.arguments import (
    Holder,
    changes,
    facts,
    facts_of_names,
    key_of,
    key_of_names,
    modules_of,
    names_of,
    refuse,
    tensors_in,
)
from dtorch.face import TorchTensor, faced
from dtorch.frames import source
from dtorch.lines import place as line_place
from dtorch.mesh import current_mesh
from dtorch.modules.around import Enter
from dtorch.ops import _alias
from dtorch.runtime.positions import locate
from dtorch.runtime.recorder import Captured, CaptureError, Recorder
from dtorch.runtime.signature import Signature
from dtorch.session import Session, current_session
from dtorch.spec import OWN, STALE, Spec
from dtorch.tensor import Tensor
from dtorch.transport.messages import Definition, Program

MAX_PROGRAMS = 64
"""Programs kept for one function; the one not used for longest goes first."""
SETTLE_WITHIN = 3
"""Recordings of a function that leaves tensors behind in which what it reads must come to be the same."""
WARN_AFTER = 8
"""Recordings of one function after which a warning says what keeps changing."""

_new = object.__new__
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Recorded:
    """A program of one function for one kind of input."""

    sig: Signature
    specs: tuple[Spec, ...]  # of the outputs
    finish: Callable[[list[Tensor], Any], Any]  # the outputs and the arguments -> what the function returns
    writes: bool  # replays change tensors that exist already


@dataclass
class _Unsettled:
    """A kind of call that leaves tensors behind, which the next call may find: it is recorded until that makes no difference.

    Attributes:
        recorded: the latest program; None once it was given up, as each call reads what the one before has left.
        looks: the program itself, and the slots that it uses without being given them.
    """

    recorded: _Recorded | None
    looks: Any
    times: int


class Compiled:
    """A function (or module) whose calls replay. Made by ``compile``.

    Attributes:
        num_recordings: how often it was recorded, that is, met inputs of a new kind.
        num_replays: calls served by a program, the recording ones included.
    """

    def __init__(self, fn: Callable[..., Any], fuse: bool = False) -> None:
        self._fn = fn
        self._fuse = fuse
        self._run = _driven(fn) if inspect.iscoroutinefunction(fn) else fn
        self._programs: OrderedDict[Any, _Recorded] = OrderedDict()
        self._lock = threading.RLock()
        self._modules = modules_of(fn)
        self._names: tuple[Holder, ...] | None = None
        self._unsettled: dict[Any, _Unsettled] = {}
        self._enter = _entrance(fn)
        self._last: dict[str, str] | None = None  # what the recording before depended on
        self.num_recordings = 0
        self.num_replays = 0
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return f"<compiled {self._name}, {len(self._programs)} programs>"

    @property
    def _name(self) -> str:
        return str(getattr(self._fn, "__name__", type(self._fn).__name__))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fn"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key: list[Any] = []
        ins: list[int] = []
        if not key_of(args, key, ins) or (kwargs and not key_of(kwargs, key, ins)):
            if self._enter is None or not isinstance(self._fn, torch.nn.Module):
                raise refuse(self._fn, args, kwargs)
            args, kwargs = self._enter.place(self._fn, args, kwargs)
            key, ins = [], []
            if not key_of(args, key, ins) or not key_of(kwargs, key, ins):
                raise refuse(self._fn, args, kwargs)
        session = current_session()
        recorder = session.recorder
        key.append((session.serial, session.epoch))
        key.append(current_mesh())
        key.append(policy.is_auto())
        if self._modules:
            key.append(tuple([m.training for m in self._modules]))
        names = self._names
        if names is None:
            names = self._names = names_of(self._fn)  # now, that all it refers to is there
        if names:
            key_of_names(names, key)
        if recorder.is_capturing or recorder.is_sync:
            return self._run(*args, **kwargs)  # part of an outer program; or op by op, for debugging
        frozen = tuple(key)
        recorded = self._programs.get(frozen)
        if recorded is None:
            with self._lock:
                before = self._unsettled.get(frozen)
                if before is not None and before.recorded is None:
                    return self._run(*args, **kwargs)
                return self._record(session, frozen, args, kwargs)
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
                out._slot = recorder.grant()
            slots.append(out._slot)
            outs.append(out)
        sig.put(((sig.id, *slots, *ins), *source(_getframe(1))))
        if recorded.writes:
            _wrote(session)
        if not outs or recorder.expects_after_put:
            recorder.after_put()
        return recorded.finish(outs, (args, kwargs))

    def reset(self) -> None:
        """Forget all programs: the next calls record again. Needed after a parameter was replaced by another tensor."""
        with self._lock:
            self._programs.clear()
            self._unsettled.clear()

    # ---- recording

    def _record(self, session: Session, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = session.recorder
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        if _alias.refresh_all(inputs):
            return Compiled.__call__(self, *args, **kwargs)  # the specs are others now
        ins = [t._slot for t in inputs]
        self._warn_of_changes(args, kwargs)
        at = source(_getframe(2))
        linked = set(_alias.LIVE)
        recorder.begin_capture()
        try:
            with _tracing():
                result = self._run(*args, **kwargs)
            leaves, tree = pytree.tree_flatten(result)
            _check_leaves(leaves)
            natives = [leaf._native if type(leaf) is TorchTensor else leaf for leaf in leaves]
            for tensor in natives:
                if type(tensor) is Tensor and tensor._spec.link != OWN and id(tensor) not in linked:
                    _alias.cut_loose(tensor)
        except BaseException as error:
            recorder.end_capture()
            if isinstance(error, CaptureError):
                raise self._explained(error) from None
            raise
        captured = recorder.end_capture()
        made = _Maker(session, captured, ins, inputs, [t for t in natives if type(t) is Tensor], self._fuse)
        sig, pins, positions, writes = made.build()
        specs = tuple(session.respec(t._spec, link=OWN) for t in made.outputs)
        recorded = _Recorded(sig, specs, _finisher(leaves, natives, tree, positions, inputs), writes)
        self._keep(key, recorded, made)
        weakref.finalize(recorded, _unpin, weakref.ref(recorder), pins)
        sig.put(((sig.id, *[t._slot for t in made.outputs], *ins), *at))
        if writes:
            session.num_mutations += 1
        recorder.after_put()
        self.num_recordings += 1
        self.num_replays += 1
        session.num_programs += 1
        return result

    def _keep(self, key: Any, recorded: _Recorded, made: _Maker) -> None:
        before = self._unsettled.pop(key, None)
        if made.kept and (before is None or before.looks != made.looks):
            times = 1 if before is None else before.times + 1
            self._unsettled[key] = now = _Unsettled(recorded, made.looks, times)
            if times > SETTLE_WITHIN:
                now.recorded = None
                warnings.warn(
                    f"{self._name} reads tensors that the call before has put in place of others, which a replay cannot: "
                    "it runs as if it were not compiled. Write such state in place (state.copy_(new)), or take it as an "
                    "argument and return it",
                    RuntimeWarning,
                    stacklevel=4,
                )
            if len(self._unsettled) > MAX_PROGRAMS:
                self._unsettled.pop(next(iter(self._unsettled)))
            return
        self._programs[key] = recorded
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)

    def _explained(self, error: CaptureError) -> CaptureError:
        trace = error.__traceback__
        where = ""
        while trace is not None:
            code = trace.tb_frame.f_code
            found = source(trace.tb_frame)
            if found[0] is code:
                place = locate(code, trace.tb_lasti)
                where = f" at {line_place(*place)}" if place is not None else ""
            trace = trace.tb_next
        return CaptureError(
            f"{self._name} cannot be compiled: {error}{where}. A replay runs without the client, so nothing in it may depend "
            "on a value: keep the value a tensor (torch.where instead of if), or compile the parts before and after the read"
        )

    def _warn_of_changes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        around = {
            "the mesh in force": current_mesh(),
            "auto_redistribute": policy.is_auto(),
            "train or eval": [m.training for m in self._modules],
        }
        last = self._last
        self._last = {**facts(self._fn, args, kwargs, around), **facts_of_names(self._names or ())}
        number = self.num_recordings + 1
        if last is None or number < WARN_AFTER or number & (number - 1):
            return
        changed = "; ".join(changes(last, self._last)[:3]) or "the session"
        warnings.warn(
            f"{self._name} was recorded {number} times because its inputs keep changing, lately {changed}. "
            "Numbers that vary belong in tensors, and lengths in a few buckets",
            RuntimeWarning,
            stacklevel=4,
        )


class CompiledCoroutine(Compiled):
    """A compiled coroutine function: awaiting a call gives what the function returns."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def _driven(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function as a plain one: it may await what is there, and nothing that it would have to wait for."""

    def run(*args: Any, **kwargs: Any) -> Any:
        running = fn(*args, **kwargs)
        try:
            running.send(None)
        except StopIteration as stop:
            return stop.value
        running.close()
        raise CaptureError("it waits for something inside, such as a value")

    return run


@contextmanager
def _tracing() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true inside: what asks for it leaves out what depends on values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _entrance(fn: Any) -> Enter | None:
    """What puts plain tensors on the mesh of a module that ``distribute`` has been given."""
    if not isinstance(fn, torch.nn.Module):
        return None
    return next((hook for hook in fn._forward_pre_hooks.values() if isinstance(hook, Enter)), None)


def _wrote(session: Session) -> None:
    """A replay has written into tensors: values fetched before are old, and so are copies that stand for views."""
    session.num_mutations += 1
    for reference in list(_alias.LIVE.values()):
        tensor = reference()
        if tensor is not None and tensor._spec.session is session:
            tensor._spec = session.respec(tensor._spec, link=STALE)


def _check_leaves(leaves: list[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and type(leaf) is not TorchTensor:
            continue  # a plain one is a constant
        inside = vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, (Tensor, torch.Tensor)) else {}
        if any(isinstance(t, (Tensor, TorchTensor)) for t in pytree.tree_leaves(list(inside.values()))):
            raise CaptureError(
                f"it returns a {type(leaf).__name__} with tensors inside, which a replay cannot renew: return the tensors"
            )


def _finisher(
    leaves: list[Any], natives: list[Any], tree: Any, positions: dict[int, int], inputs: list[Tensor]
) -> Callable[[list[Tensor], Any], Any]:
    """What makes a replay's result of its outputs: each tensor is an output, an argument given back, or the same as ever."""
    places = [positions.get(id(t), -1) for t in natives]
    if len(leaves) == 1 and type(leaves[0]) is Tensor and tree.is_leaf() and places[0] >= 0:
        return lambda outs, _: outs[0]
    if tree.type is tuple and all(type(t) is Tensor for t in leaves) and places == list(range(len(leaves))):
        return lambda outs, _: tuple(outs)
    given = [next((i for i, x in enumerate(inputs) if x is t), -1) for t in natives]
    faces = [type(leaf) is TorchTensor for leaf in leaves]

    def finish(outs: list[Tensor], arguments: Any) -> Any:
        mine = [*tensors_in(arguments[0]), *tensors_in(arguments[1])] if max(given, default=-1) >= 0 else []
        found = []
        for leaf, place, at, is_face in zip(leaves, places, given, faces, strict=True):
            if place >= 0:
                found.append(faced(outs[place]) if is_face else outs[place])
            elif at >= 0:
                found.append(faced(mine[at]) if is_face else mine[at])
            else:
                found.append(leaf)
        return pytree.tree_unflatten(found, tree)

    return finish


class _Maker:
    """Turns a capture into a program: slots become registers."""

    def __init__(
        self, session: Session, captured: Captured, ins: list[int], inputs: list[Tensor], returned: list[Tensor], fuse: bool
    ) -> None:
        self._session = session
        self._captured = captured
        self._ins = ins
        self._inputs = inputs
        self._returned = returned
        self._fuse = fuse
        self.outputs: list[Tensor] = []
        self.kept: list[int] = []  # slots of what was made and is held elsewhere than in the outputs
        self.looks: Any = None  # what tells this program from others

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
            writes, random = writes or facts.writes or facts.mutates, random or facts.random
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
        kept = self.kept = [slot for slot in produced if slot not in self._captured.dead and slot not in given]
        lasting = given | set(kept)
        dying: dict[int, list[int]] = {}
        for slot, mesh in produced.items():
            if slot not in lasting:
                dying.setdefault(mesh, []).append(registers[slot])
        body = _encode((calls, [(mesh, sorted(names)) for mesh, names in dying.items()]))
        self.looks = body, tuple(external)
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
                self._fuse,
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


def compile(fn: Callable[..., Any] | None = None, *, fuse: bool = False) -> Any:
    """Record ``fn`` once per kind of input; later calls send one message and workers replay what was recorded.

    A kind is: the specs of tensor arguments, the values of all others, the mesh and policy in force, train or eval of the
    modules that the function is, closes over or names, and which tensors, numbers and strings the variables hold that it closes
    over or names (globals, and attributes of the object whose method it is). What lies deeper, such as in a list, is looked at
    while recording only. Outputs are fresh tensors. Parameters and caches are used by reference; ops in place on them happen
    at each replay, random ops draw on. A function that leaves tensors behind (in a list, an attribute) is recorded anew until
    what it reads stays the same; where each call reads what the one before left, it is not replayed, which a warning says. At
    most 64 kinds are kept; a warning names the argument that keeps changing. Use it as ``@dtorch.compile``,
    ``@dtorch.compile(fuse=True)`` or ``dtorch.compile(model)``.

    Args:
        fn: a function or module, also one that ``distribute`` was given. It takes tensors of either face, numbers, strings,
            and lists, tuples and dicts of them; a distributed module takes plain tensors too. A coroutine function may await
            nothing that it would have to wait for.
        fuse: workers run the program's local parts as torch.compile makes them of it (on CUDA devices as CUDA graphs):
            results are equal within rounding, not bit for bit. The first replay takes seconds. Without a C++ compiler
            workers on CPU run the program as it is, which a warning says.

    Raises:
        CaptureError: at the first call, when the function reads a value; says where, and the way out.
        TypeError: an argument is something that a program cannot take.
    """
    if fn is None:
        return functools.partial(compile, fuse=fuse)
    if not callable(fn):
        raise TypeError(f"compile takes a function or a module, not a {type(fn).__name__}")
    if fuse and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        warnings.warn(
            "compile(fuse=True): there is no C++ compiler here (g++), which torch.compile needs on CPU: what workers of this "
            "machine replay is not fused. Install one, or leave fuse out",
            RuntimeWarning,
            stacklevel=2,
        )
    return (CompiledCoroutine if inspect.iscoroutinefunction(fn) else Compiled)(fn, fuse)
