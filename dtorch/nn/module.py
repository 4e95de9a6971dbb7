"""dtorch.nn.Module: torch's Module, whose parameters and buffers may be dtorch tensors.

A parameter is a dtorch.Tensor that carries the mark ``_is_param``; ``Parameter(...)`` makes one, and so does
``torch.nn.Parameter`` of a dtorch tensor; ``torch.nn.Buffer`` makes a buffer. Torch's Module would take none of them, as it
asks for ``torch.Tensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from sys import _getframe
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as _torch

from dtorch.creation import target_mesh, tensor
from dtorch.mesh import DeviceMesh, current_mesh
from dtorch.session import current_session
from dtorch.tensor import Tensor, on_mark

_skipping: ContextVar[bool] = ContextVar("dtorch_skip_init", default=False)
_backward_hooks = _torch._global_backward_hooks
_backward_pre_hooks = _torch._global_backward_pre_hooks
_forward_hooks = _torch._global_forward_hooks
_forward_pre_hooks = _torch._global_forward_pre_hooks


watchers: list[Callable[[Any, bool], None]] = []
"""Called with a module before (True) and after (False) its call, ``redistribute_input`` and ``_output`` included; while
somebody explains or measures what modules do."""


STRAIGHT: dict[Callable[..., Any], tuple[str, ...]] = {}
"""Methods of our own modules whose calls depend on the specs of their inputs alone -> the attributes that they read
(``modules/binding.py`` finds that out for others)."""


def _nothing(module: Any, num_calls: int) -> Callable[..., Any] | None:
    return None


straighten = _nothing
"""Called with a module and how often it was called before: what plays its call, or None. It notes what is to be done the next
time as the module's ``_straight``. ``modules/replay.py`` puts its own here."""


class _IsParameter(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, Tensor):
            return instance._is_param
        return isinstance(instance, torch.nn.Parameter)


class Parameter(metaclass=_IsParameter):
    """Makes a dtorch.Tensor that a Module counts among its parameters.

    Args:
        data: dtorch tensor; a plain torch tensor goes to the mesh in force.
        requires_grad: whether it wants a gradient.
    """

    def __new__(cls, data: Any, requires_grad: bool = True) -> Any:
        full = data if isinstance(data, Tensor) else tensor(data)
        made = full.detach()
        made._spec = made._spec.session.respec(made._spec, requires_grad=requires_grad, is_param=True)
        _adopt_maker(_getframe(1))
        return made


@contextmanager
def skip_init() -> Iterator[None]:
    """Inside, layers leave their parameters as memory happens to be: for models whose weights are loaded next.

    Belongs to the running task.
    """
    token = _skipping.set(True)
    try:
        yield
    finally:
        _skipping.reset(token)


def is_init_skipped() -> bool:
    """Whether a ``skip_init`` block is open here."""
    return _skipping.get()


def layer_mesh(device_mesh: DeviceMesh | None, device: Any, name: str) -> DeviceMesh:
    """The mesh in force while torch's constructor of a layer runs; a device kind is then left to the factories."""
    if device_mesh is None and device is not None:
        return current_mesh() or DeviceMesh("cpu", [0])
    return target_mesh(device_mesh, device, name)


def _is_hooked(members: dict[str, Any]) -> Any:
    """Whether torch's way of calling a module is needed, from the module's ``__dict__``."""
    return (
        members["_forward_hooks"]
        or members["_forward_pre_hooks"]
        or members["_backward_hooks"]
        or members["_backward_pre_hooks"]
        or _forward_hooks
        or _forward_pre_hooks
        or _backward_hooks
        or _backward_pre_hooks
        or "_compiled_call_impl" in members
    )


class Module(torch.nn.Module):
    """``torch.nn.Module`` for dtorch tensors.

    ``redistribute_input(*args)`` and ``redistribute_output(out)`` run right before and after ``forward``: methods
    that a subclass defines, or callables that are set on one module. The first gets forward's positional arguments
    and returns what replaces them (a tuple, or the one value); the second returns what replaces the result. Torch's
    hooks run inside of the two: a forward hook sees the same values as the caller, under the placements that forward
    gave them.
    """

    redistribute_input: Callable[..., Any] | None = None
    redistribute_output: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        places = cls.redistribute_input is not None or cls.redistribute_output is not None
        if places and cls.__call__ is Module.__call__:
            cls.__call__ = Module._call_placed  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What torch does around a forward costs several times as much as all of this, so it runs where it is wanted.
        # Members are read from __dict__, since every attribute of a class with __getattr__ is slow.
        members = self.__dict__
        way = members.get("_straight", 0)
        if way is not None:
            if type(way) is int:
                way = straighten(self, way)
            if way is not None:
                return way(*args, **kwargs)
        if (  # _is_hooked, which a call more would make dear here
            members["_forward_hooks"]
            or members["_forward_pre_hooks"]
            or members["_backward_hooks"]
            or members["_backward_pre_hooks"]
            or _forward_hooks
            or _forward_pre_hooks
            or _backward_hooks
            or _backward_pre_hooks
            or "_compiled_call_impl" in members
            or "redistribute_output" in members
            or "redistribute_input" in members
        ):
            return self._call_placed(*args, **kwargs)
        return self.forward(*args, **kwargs) if kwargs else self.forward(*args)

    def _own_call(self, *args: Any, **kwargs: Any) -> Any:
        """A call by the module's own code."""
        members = self.__dict__
        if _is_hooked(members) or "redistribute_output" in members or "redistribute_input" in members:
            return self._call_placed(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def _call_placed(self, *args: Any, **kwargs: Any) -> Any:
        if not watchers:
            return self._placed(args, kwargs)
        for watch in watchers:
            watch(self, True)
        try:
            return self._placed(args, kwargs)
        finally:
            for watch in watchers:
                watch(self, False)

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.redistribute_input is not None:
            placed = self.redistribute_input(*args)
            args = placed if isinstance(placed, tuple) else (placed,)
        call = super().__call__ if _is_hooked(self.__dict__) else self.forward
        out = call(*args, **kwargs)
        return out if self.redistribute_output is None else self.redistribute_output(out)

    def __getstate__(self) -> Any:
        state = super().__getstate__()  # type: ignore[no-untyped-call]  # torch has no types here
        state.pop("_straight", None)
        return state

    # ---- members

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__
        if "_modules" in members:
            found = members["_modules"]
            if name in found:
                return found[name]
            found = members["_parameters"]
            if name in found:
                return found[name]
            found = members["_buffers"]
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if value._is_param:
                self._set_parameter(name, value)
                return
            if value._is_buffer and name not in self.__dict__.get("_parameters", ()):
                self._set_buffer(name, value)
                return
        elif isinstance(value, torch.nn.Module):
            adopt(value)
        super().__setattr__(name, value)

    def _set_parameter(self, name: str, value: Tensor) -> None:
        if "_parameters" not in self.__dict__:
            raise AttributeError("cannot assign parameters before Module.__init__() call")
        self.__dict__.pop(name, None)
        self._buffers.pop(name, None)
        self._modules.pop(name, None)
        self._non_persistent_buffers_set.discard(name)
        self.register_parameter(name, value)

    def _set_buffer(self, name: str, value: Tensor) -> None:
        self.__dict__.pop(name, None)
        self.__dict__.get("_modules", {}).pop(name, None)
        self.register_buffer(name, value, value.persistent)  # type: ignore[arg-type]

    def register_parameter(self, name: str, param: Any) -> None:
        """As torch's; takes dtorch parameters too."""
        super().register_parameter(name, None)  # checks the name
        if not isinstance(param, Tensor):
            super().register_parameter(name, param)
            return
        if not param._is_param:
            del self._parameters[name]
            raise TypeError(
                f"cannot assign a dtorch.Tensor as parameter {name!r}: wrap it in dtorch.nn.Parameter (or give None)"
            )
        for hook in _torch._global_parameter_registration_hooks.values():
            changed = hook(self, name, param)
            param = param if changed is None else changed
        self._parameters[name] = param

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        if module is not None:
            adopt(module)
        super().add_module(name, module)

    # ---- conversions

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's; ``to(mesh)`` or ``to(device_mesh=mesh)`` moves dtorch parameters and buffers to another mesh."""
        mesh = kwargs.pop("device_mesh", None)
        if mesh is None and args and isinstance(args[0], DeviceMesh):
            mesh, args = args[0], args[1:]
        if mesh is not None:
            self._apply(lambda t: t.redistribute(device_mesh=mesh) if isinstance(t, Tensor) else t)
        return super().to(*args, **kwargs) if args or kwargs or mesh is None else self

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        params: dict[str, Any] = self._parameters
        own = {name: p for name, p in params.items() if isinstance(p, Tensor)}
        others = {name: p for name, p in params.items() if name not in own}
        self.__dict__["_parameters"] = others
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        finally:
            self.__dict__["_parameters"] = {name: own.get(name, others.get(name)) for name in params}
            refresh = self.__dict__.get("_flat_weights") and getattr(self, "_init_flat_weights", None)
            if refresh:  # recurrent layers keep a list of their parameters, made while these were away
                refresh()
        for param in own.values():
            _become(param, fn(param))
            if param.grad is not None:
                param.grad = fn(param.grad)
        return self

    # ---- state

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As torch's. Full tensors are split on their way, as each parameter is placed: nobody holds a whole copy."""
        assign = local_metadata.get("assign_to_params_buffers", False)
        given: dict[str, Any] = {}
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            value = state_dict.get(prefix + name)
            if isinstance(own, Tensor) and isinstance(value, (torch.Tensor, Tensor)) and own.shape == value.shape:
                given[prefix + name] = value
                state_dict[prefix + name] = _placed_like(own, value, assign)
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            state_dict.update(given)


def _placed_like(own: Tensor, value: Any, assign: bool) -> Tensor:
    """``value`` on the mesh of ``own``, cut as ``own`` is."""
    if isinstance(value, Tensor):
        placed = value.redistribute(device_mesh=own.device_mesh, placements=own.placements)
    else:
        placed = current_session().upload(value, own.device_mesh, own.placements)
    if assign and own._is_param:
        placed = Parameter(placed, own.requires_grad)
    return placed


def _become(param: Tensor, value: Any) -> None:
    """Let a parameter keep its identity and take another tensor's value, dtype and place."""
    if value is param:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"a dtorch parameter cannot become a {type(value).__name__}")
    session = value._spec.session
    spec = session.respec(value._spec, requires_grad=param.requires_grad, is_param=param._is_param)
    if value._is_param or value.requires_grad:
        value = value.detach()
    param._spec, value._spec = spec, param._spec
    param._slot, value._slot = value._slot, param._slot
    session.num_mutations += 1  # fetches of the old value answer for it no more


def functional_call(module: torch.nn.Module, members: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``torch.func.functional_call``: call ``module`` with other parameters and buffers, which it has for this call
    only.

    Args:
        members: full name -> tensor; or several such dicts.
        args: one argument, or a tuple of them.

    Raises:
        AttributeError: the module has no parameter or buffer of a name.
    """
    every = {k: v for part in members for k, v in part.items()} if isinstance(members, (tuple, list)) else members
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, value in every.items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            home: Any = owner._parameters if last in owner._parameters else owner._buffers
            if last not in home:
                raise AttributeError(f"{type(owner).__name__} has no parameter or buffer {last!r}")
            replaced.append((home, last, home[last]))
            home[last] = value
        return module(*(args if isinstance(args, tuple) else (args,)), **(kwargs or {}))
    finally:
        for home, last, value in reversed(replaced):
            home[last] = value


# ---- torch's layers


_layers: dict[type[torch.nn.Module], type[Module]] = {torch.nn.Module: Module}


def layer(torch_class: type[torch.nn.Module]) -> type[Module]:
    """Torch's layer with this Module's ways: ``dtorch.nn.Linear`` is ``layer(torch.nn.Linear)``."""
    if issubclass(torch_class, Module):
        return torch_class
    made = _layers.get(torch_class)
    if made is None:
        made = _layers[torch_class] = _mixed(torch_class)
    return made


def _mixed(torch_class: type[torch.nn.Module]) -> type[Module]:

    def __init__(self: Any, *args: Any, device_mesh: DeviceMesh | None = None, **kwargs: Any) -> None:
        with layer_mesh(device_mesh, kwargs.get("device"), torch_class.__name__):
            torch_class.__init__(self, *args, **kwargs)

    __init__.__doc__ = torch_class.__init__.__doc__
    members: dict[str, Any] = {
        "__init__": __init__,
        "__module__": "dtorch.nn",
        "__qualname__": torch_class.__name__,
        "__doc__": torch_class.__doc__,
    }
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(torch_class, name, None)
        if reset is not None:
            members[name] = _unless_skipped(reset)
    forward = FORWARD.get(torch_class)
    if forward is not None:
        members["forward"] = forward
    return type(torch_class.__name__, (Module, torch_class), members)


FORWARD: dict[type[torch.nn.Module], Callable[..., Any]] = {}
"""Forwards that go to the op table without torch's functions between; see ``layers.py``."""


def _unless_skipped(reset: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any) -> None:
        if not _skipping.get():
            reset(self)

    call.__name__ = call.__qualname__ = reset.__name__
    call.__doc__ = reset.__doc__
    return call


def adopt(module: torch.nn.Module) -> None:
    """Give a torch module that was made inside ``with mesh:`` this Module's ways.

    Torch's own layers make others inside (an attention's output projection); under a mesh those hold dtorch tensors,
    which torch's Module did not count as parameters.
    """
    if isinstance(module, Module):
        return
    for child in module.children():
        adopt(child)
    strays = {
        name: v for name, v in module.__dict__.items() if isinstance(v, Tensor) and (v._is_param or v._is_buffer)
    }
    if strays:
        module.__class__ = layer(type(module))
        for name, value in strays.items():
            setattr(module, name, value)


_MAX_FRAMES = 8  # between a module's method and what makes a parameter for it
_MARKING = frozenset({torch.nn.Parameter.__new__.__code__, torch.nn.Buffer.__new__.__code__})


def _adopt_torch(frame: FrameType) -> None:
    if frame.f_code in _MARKING and frame.f_back is not None:
        _adopt_maker(frame.f_back)


def _adopt_maker(frame: FrameType) -> None:
    """Give a torch module in whose method a parameter or buffer is made this Module's ways, before it is given that.

    Torch's and other people's modules make these in ``__init__``, or in what that calls: under ``with mesh:`` they are dtorch
    tensors, which torch's Module would take for plain attributes.
    """
    at: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if at is None:
            return
        code = at.f_code
        owner = at.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, torch.nn.Module):
            if not isinstance(owner, Module):
                owner.__class__ = layer(type(owner))
            return
        at = at.f_back


on_mark.append(_adopt_torch)
