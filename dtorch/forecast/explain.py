"""``dtorch.explain``: what a plan does, before anything runs.

The module is copied without its values and its forward is recorded in a session that has no workers (``dry.py``). What the
recorded calls would send, and hold, follows from their definitions (``traffic.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dtorch.face import TorchTensor, faced
from dtorch.forecast.dry import DrySession, NoValuesError
from dtorch.forecast.record import CommunicationRow, DeviceRow, Explanation, ParameterRow
from dtorch.forecast.traffic import Meter, held, peak_bytes
from dtorch.frames import INSIDE, source
from dtorch.lines import place as line_place
from dtorch.mesh import DeviceMesh
from dtorch.modules.distribute import distribute
from dtorch.nn.module import watchers
from dtorch.placement import Placement, normalize
from dtorch.runtime.plan import Step, steps_of
from dtorch.runtime.positions import locate
from dtorch.session import using
from dtorch.spec import contiguous_stride
from dtorch.tensor import Tensor
from dtorch.weights.pretrained import empty_init

Make = Callable[[], Any]


def explain(
    module: torch.nn.Module | Make,
    device_mesh: DeviceMesh | None = None,
    plan: Any = "auto",
    inputs: Any = None,
) -> Explanation:
    """What ``distribute(module, device_mesh, plan)`` would do: placements of parameters, what each layer sends in a forward,
    and the memory of each device. Starts no worker, allocates no weights, and leaves the module as it is.

    Args:
        module: a torch module (its parameters may be on the meta device), one that is on a mesh already, or a
            ``dtorch.nn.Module``; or a function that makes one, or (module, inputs).
        device_mesh: for a module that is on a mesh already: left out. The devices need not exist.
        plan: as for ``distribute``.
        inputs: example arguments of the forward: a tensor, a tuple or a dict of them; only their shapes and dtypes count. The
            module's own ``dummy_inputs`` by default; without any, parameters only are explained.

    Returns:
        A record that prints as tables; in a notebook it shows them.

    Raises:
        ValueError, MeshError: what ``distribute`` raises for the plan; or no mesh was given to a plain module.
    """
    session = DrySession()
    try:
        with using(session), _watching(session) as watched:
            if not isinstance(module, torch.nn.Module):
                made = _made(module)
                module, inputs = made if isinstance(made, tuple) else (made, inputs)
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"explain: the function made a {type(module).__name__}, not a torch.nn.Module")
            placed = _on_mesh(_without_values(module, session), device_mesh, plan, session)
            watched.clear()
            watched.attach(placed)
            start = session.recorder.position
            note = _forward(placed, inputs)
        return summary(session, watched, [placed], start, note)
    finally:
        session.close()


def explain_script(run: Callable[[], Any]) -> Explanation:
    """Record what a script does, until it ends or reads a value."""
    session = DrySession()
    note = ""
    try:
        with using(session), _watching(session) as watched:
            watched.attach_all()
            try:
                run()
            except NoValuesError as error:
                note = _where(error)
            except SystemExit:
                note = "The script called sys.exit()."
        return summary(session, watched, watched.roots, 0, note)
    finally:
        session.close()


def _made(make: Any) -> Any:
    if not callable(make):
        raise TypeError(f"explain: expected a torch.nn.Module or a function that makes one, got {type(make).__name__}")
    with empty_init():
        return make()


# ---- the module


def _without_values(module: torch.nn.Module, session: DrySession) -> torch.nn.Module:
    """A copy of the module whose tensors have no memory: on the meta device, or in the session."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for members in (part._parameters, part._buffers):
            for value in members.values():
                if value is not None and id(value) not in memo:
                    memo[id(value)] = _empty(value, session)
    return copy.deepcopy(module, memo)


def _empty(value: Any, session: DrySession) -> Any:
    native = value.native if isinstance(value, TorchTensor) else value
    if isinstance(native, Tensor):
        own = native._spec
        made = session.placed(
            session.spec(own.shape, own.stride, own.dtype, own.mesh, own.codes, own.is_param, own.requires_grad)
        )
        return made if native is value else _like(faced(made), value)
    meta = value.detach().to("meta")
    if isinstance(value, torch.nn.Parameter):
        meta = torch.nn.Parameter(meta, requires_grad=value.requires_grad)
    return _like(meta, value)


def _like(made: Any, value: Any) -> Any:
    made.__dict__.update({name: fact for name, fact in value.__dict__.items() if name != "_native"})
    return made


class _NoValues:
    """A source of values for ``distribute`` that has none."""

    def __init__(self, session: DrySession) -> None:
        self._session = session

    def __enter__(self) -> _NoValues:
        return self

    def __exit__(self, *facts: Any) -> None:
        """Nothing was opened."""

    def place(self, name: str, value: torch.Tensor, mesh: DeviceMesh, where: Sequence[Placement] | None) -> Tensor:
        codes = (-1,) * mesh.ndim if where is None else tuple(p.code for p in normalize(where, value.ndim, mesh))
        shape = tuple(value.shape)
        return self._session.placed(self._session.spec(shape, contiguous_stride(shape), value.dtype, mesh, codes))


def _on_mesh(module: torch.nn.Module, mesh: DeviceMesh | None, plan: Any, session: DrySession) -> torch.nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    if any(isinstance(t, (Tensor, TorchTensor)) for t in tensors):
        return module
    if mesh is None:
        raise ValueError("explain: the module is plain, so device_mesh must say where it would go")
    return distribute(module, mesh, plan, weights=_NoValues(session))


def _forward(module: torch.nn.Module, inputs: Any) -> str:
    """Call the module; the answer says why calls are missing, "" when none is."""
    is_own = inputs is None
    if is_own:
        inputs = getattr(module, "dummy_inputs", None)
    if inputs is None:
        return "No inputs were given, so the forward was not recorded: parameters only."
    args, kwargs = (), {}
    if isinstance(inputs, Mapping):
        kwargs = {name: _example(value) for name, value in inputs.items()}
    else:
        args = tuple(map(_example, inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    except NoValuesError as error:
        return _where(error)
    except Exception as error:
        if not is_own:
            raise
        return f"The module does not take its own dummy_inputs ({type(error).__name__}: {error}): give inputs to see the rest."
    return ""


def _example(value: Any) -> Any:
    """Something with values: foreign code may look at what it is given."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) and value.is_meta else value


def _where(error: BaseException) -> str:
    trace, place = error.__traceback__, None
    while trace is not None:
        found = source(trace.tb_frame)
        if found[0] is trace.tb_frame.f_code and not INSIDE.get(found[0].co_filename, True):
            place = locate(found[0], trace.tb_lasti)
        trace = trace.tb_next
    at = f" at {line_place(*place)}" if place is not None else ""
    return f"Recording ended{at}, where a value is read; what follows is not shown."


# ---- which module a call belongs to


class _Watched:
    """Calls of modules: who was entered and left after how many recorded calls.

    Attributes:
        roots: modules that were called from outside of any module.
        moves: (position, name of the module that is running from there on).
    """

    def __init__(self, session: DrySession) -> None:
        self._session = session
        self.roots: list[torch.nn.Module] = []
        self.names: dict[int, str] = {}
        self.moves: list[tuple[int, str]] = []
        self.handles: list[Any] = []
        self._running: list[str] = []

    def clear(self) -> None:
        self.roots.clear()
        self.names.clear()
        self.moves.clear()

    def note(self, module: torch.nn.Module, enters: bool) -> None:
        if enters:
            if not self._running and id(module) not in self.names:
                self._learn(module)
            self._running.append(self.names.get(id(module), type(module).__name__))
        elif self._running:
            self._running.pop()
        self.moves.append((self._session.recorder.position, self._running[-1] if self._running else ""))

    def attach(self, module: torch.nn.Module) -> None:
        """Watch a module and its parts: the hooks that they have by now run inside."""
        for part in module.modules():
            self.handles.append(part.register_forward_pre_hook(self._enter, prepend=True))
            self.handles.append(part.register_forward_hook(self._leave, always_call=True))

    def attach_all(self) -> None:
        """Watch all modules of the process."""
        self.handles.append(register_module_forward_pre_hook(self._enter))
        self.handles.append(register_module_forward_hook(self._leave, always_call=True))

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self.note(module, True)

    def _leave(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self.note(module, False)

    def _learn(self, root: torch.nn.Module) -> None:
        prefix = "" if not self.roots else f"[{len(self.roots)}]."
        self.roots.append(root)
        for name, part in root.named_modules():
            self.names.setdefault(id(part), f"{prefix}{name}" if name else f"{prefix}{type(root).__name__}")


@contextmanager
def _watching(session: DrySession) -> Iterator[_Watched]:
    watched = _Watched(session)
    watchers.append(watched.note)
    try:
        yield watched
    finally:
        watchers.remove(watched.note)
        for handle in watched.handles:
            handle.remove()


# ---- the record


def summary(
    session: DrySession, watched: _Watched, roots: Sequence[torch.nn.Module], start: int, note: str
) -> Explanation:
    """The record of what was recorded from call ``start`` on; memory is that from the first call of a module on."""
    lines, definitions, meshes = session.recorded()
    steps = list(enumerate(steps_of([call for call, _, _ in lines], definitions)))[start:]
    rows, sizes = _parameters(roots, session)
    first = watched.moves[0][0] if watched.moves else start
    peaks = peak_bytes([(at, step) for at, step in steps if at >= first], session.recorder.deaths, meshes)
    places = {(mesh.kind, device): None for mesh in meshes.values() for device in mesh.devices}
    ran = bool(steps)
    devices = tuple(
        DeviceRow(f"{kind}:{number}", sizes.get((kind, number), 0), peaks.get((kind, number), 0) if ran else None)
        for kind, number in sorted(places)
    )
    return Explanation(rows, _communication(steps, lines, watched, Meter(meshes)), devices, note)


def _parameters(roots: Sequence[torch.nn.Module], session: DrySession) -> tuple[tuple[ParameterRow, ...], dict[Any, int]]:
    rows: list[ParameterRow] = []
    sizes: dict[Any, int] = {}
    seen: dict[int, str] = {}
    for number, root in enumerate(roots):
        prefix = f"[{number}]." if number else ""
        named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        for name, value in named:
            native: Any = value.native if isinstance(value, TorchTensor) else value
            if not isinstance(native, Tensor):
                continue
            spec = native._spec
            tied = seen.setdefault(id(value), prefix + name)
            here = held(spec.layout, session.mesh_info(spec.mesh))
            if tied == prefix + name:
                for place, size in here.items():
                    sizes[place] = sizes.get(place, 0) + size
            rows.append(
                ParameterRow(
                    prefix + name, tuple(spec.shape), str(spec.dtype)[6:], spec.placements, spec.mesh,
                    max(here.values()), "" if tied == prefix + name else tied,
                )
            )
    return tuple(rows), sizes


def _communication(
    steps: Sequence[tuple[int, Step]], lines: Sequence[Any], watched: _Watched, meter: Meter
) -> tuple[CommunicationRow, ...]:
    found: dict[tuple[str, str, str], list[int | None]] = {}
    moves, at, layer = watched.moves, 0, ""
    for position, step in steps:
        while at < len(moves) and moves[at][0] <= position:
            layer, at = moves[at][1], at + 1
        traffic = meter.traffic(step)
        if traffic is None:
            continue
        who = layer
        if not who:
            place = locate(lines[position][1], lines[position][2])
            who = f"{place[0].rpartition('/')[2]}:{place[1]}" if place is not None else ""
        op = step.definition.op.rsplit(".", 1)[-1]
        found.setdefault((who, op, traffic.kind), []).append(traffic.bytes_per_device)
    return tuple(
        CommunicationRow(layer, op, kind, len(counts), None if None in counts else sum(c for c in counts if c is not None))
        for (layer, op, kind), counts in found.items()
    )
