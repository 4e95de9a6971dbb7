"""The torch face of a tensor: a real ``torch.Tensor`` that records through the op table.

Modules that were written for torch ask ``isinstance(x, torch.Tensor)``, keep attributes on their parameters and call
``torch.add(x, y)``. ``TorchTensor`` answers to all of that. It has the true shape, dtype and device and no memory; what
it stands for is a ``dtorch.Tensor``, which it holds. An op with any torch-faced input answers torch-faced.

Foreign code knows no placements, so an op on this face moves its inputs to where it can run, as inside
``dtorch.auto_redistribute()``. Where torch's C++ code would go past the protocol and ask for memory, it meets
``__torch_dispatch__``, which refuses, except that it reads the value of a tensor that is asked for as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from sys import _getframe
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from dtorch import policy
from dtorch.future import TensorFuture
from dtorch.ops import _op
from dtorch.ops._call import has_no_values
from dtorch.ops._methods import _BINARY, _IN_PLACE, _REVERSED, _UNARY, TENSORS, is_operator, operator
from dtorch.ops._nothing import nothing
from dtorch.ops._op import Op
from dtorch.ops._patterns import Entrances, Face
from dtorch.ops._ways import Front
from dtorch.ops.index import sliced
from dtorch.ops.table import METHODS, OPS
from dtorch.runtime.promise import Promise
from dtorch.runtime.signature import Signature
from dtorch.session import current_session
from dtorch.tensor import FRONTS, TORCH, Tensor, device_of, missing
from dtorch.together import are_apart, brought_together
from dtorch.transport.errors import MeshError

if TYPE_CHECKING:
    from dtorch.mesh import DeviceMesh
    from dtorch.placement import Placement

_make = torch.Tensor._make_wrapper_subclass
_auto = policy._auto
_Plain = torch._C.DisableTorchFunctionSubclass
_new = object.__new__
_NESTED = (list, tuple, dict, slice)
Args = tuple[Any, ...]
Named = dict[str, Any]


class TorchTensor(torch.Tensor, TensorFuture):
    """A tensor on a mesh that is a ``torch.Tensor``; ``dtorch.distribute`` and ``faced`` make it.

    It has torch's methods and those of ``dtorch.Tensor``: ``placements``, ``redistribute``, ``value``, ``to_torch``.
    """

    __slots__ = ("_native",)

    _native: Tensor
    _is_param: bool

    if TYPE_CHECKING:  # forwarded to the native tensor
        device_mesh: DeviceMesh
        placements: tuple[Placement, ...]

        def redistribute(self, *args: Any, **kwargs: Any) -> TorchTensor: ...
        def redistribute_by_dict(self, *args: Any, **kwargs: Any) -> TorchTensor: ...

    def __new__(cls, data: Any, **kwargs: Any) -> TorchTensor:
        if isinstance(data, TorchTensor):
            return data
        return faced(data if isinstance(data, Tensor) else Tensor(data, **kwargs))

    def __init__(self, data: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def native(self) -> Tensor:
        """The same tensor as a ``dtorch.Tensor``; the two share everything."""
        return self._native

    def _promise(self, now: bool = True) -> Promise[torch.Tensor]:
        return self._native._promise(now)

    def __iter__(self) -> Iterator[Any]:
        if not self._native._spec.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(_run(METHODS["unbind"], (self, 0), {}, _getframe(1)))

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchTensor:
        made = faced(self._native.__deepcopy__({}))
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_native"})
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._native.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch names nothing
        return repr(self._native)

    @property
    def data(self) -> Any:
        return faced(self._native.detach())

    @data.setter
    def data(self, value: Any) -> None:
        self._native.data = _unwrap(value)

    @property
    def grad(self) -> Any:
        return _wrap(self._native.grad)

    @grad.setter
    def grad(self, value: Any) -> None:
        self._native.grad = _unwrap(value)

    def requires_grad_(self, requires_grad: bool = True) -> TorchTensor:
        self._native.requires_grad_(requires_grad)
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = _records.get(func)
        if record is None:
            return answer(func, args, kwargs or _NONE, _getframe(1))
        return record(args, kwargs or _NONE, _getframe(1))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without its first argument
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _READS.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        shapes = ", ".join(str(list(a.shape)) for a in args if isinstance(a, torch.Tensor))
        raise NotImplementedError(
            f"{func} was called with a tensor that lives on a mesh (shapes {shapes}), in a way that goes past "
            "__torch_function__: by C++ code, autograd.Function, vmap, torch.jit or torch.compile. Fetch the value "
            "with to_torch() for this, or write it with torch's functions"
        )


def faced(tensor: Tensor) -> TorchTensor:
    """The torch face of a ``dtorch.Tensor``. No copy: what is written through one is seen through the other."""
    spec = tensor._spec
    form = spec.face
    if form is None:  # by position: keywords cost a quarter more
        kind = device_of(spec.mesh.device_type)
        form = spec.face = TorchTensor, spec.shape, None, None, None, spec.dtype, torch.strided, kind
    made: TorchTensor = _make(*form)
    made._native = tensor
    return made


def answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
    """What ``func``, a function of torch, gives for arguments with torch faces among them."""
    record = _records.get(func)
    if record is not None:
        return record(args, kwargs, frame)
    op = TORCH.get(func) or _BESIDE.get(func) or _without_row(func)
    front = FRONTS.get(func)
    if front is not None:
        _records[func] = _entrances(front.op, front).record
    elif type(op) is Op and op.writes is None and not op.short_name.endswith("_"):
        _records[func] = _entrances(op).record
    plain = _written(func, args, kwargs)
    if plain is not None:
        return _write_plain(op, plain, args, kwargs)
    return _run(op, args, kwargs, frame)


_NONE: Named = {}
_records: dict[Any, Callable[..., Any]] = {}
"""torch function that writes into none of its arguments -> the quick way through its op."""


# ---- in and out


def _unwrap(value: Any) -> Any:
    """The same tree of arguments with native tensors."""
    kind = type(value)
    if kind is TorchTensor:
        return value._native
    if kind is list:
        return [_unwrap(v) for v in value]
    if kind is tuple:
        return tuple([_unwrap(v) for v in value])
    if kind is dict:
        return {k: _unwrap(v) for k, v in value.items()}
    if kind is slice:
        return slice(_unwrap(value.start), _unwrap(value.stop), _unwrap(value.step))
    return value


def _wrap(value: Any) -> Any:
    """The same result with torch faces."""
    kind = type(value)
    if kind is Tensor:
        return faced(value)
    if isinstance(value, (tuple, list)) and kind is not torch.Size:
        items = [_wrap(v) for v in value]
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    return value


def _entrances(op: Op, front: Front | None = None) -> Entrances:
    """``op.record`` and the like for calls with torch faces, of an op that writes into no argument. What its patterns do not
    know goes through ``_run``, to what stands before the op if something does."""

    def slowly(args: Args, kwargs: Named, frame: FrameType, cache: dict[Any, Signature], key: Any) -> Any:
        if "out" in kwargs:
            plain = _written(None, args, kwargs)
            return _run(op, args, kwargs, frame) if plain is None else _write_plain(op, plain, args, kwargs)
        if front is not None and (key is None or not front.hands_on(args, kwargs)):
            return _run(front.function, args, kwargs, frame)
        return _run(op, args, kwargs, frame) if key is None else _run(op, args, kwargs, frame, cache, key)

    return op.ways.entrances(lambda args, kwargs: op.ways.way(_FACES, args, kwargs, slowly))


def _natives(given: Sequence[Any]) -> list[Any] | None:
    """The native tensors of a list of faces, of native ones and of plain tensors without elements, as caches of keys and values
    begin with them; None for other lists."""
    own: list[Any] = [v._native if type(v) is TorchTensor else v for v in given]
    for at, value in enumerate(own):
        if type(value) is torch.Tensor:
            like = next((v._spec for v in own if type(v) is Tensor), None)
            if like is None or value.numel() or has_no_values(value) or like.session.recorder.is_capturing:
                return None
            own[at] = nothing(like.session, value, like.mesh)
    return own if {*map(type, own)} == {Tensor} else None


_GIVE = """\
form = spec.face
if form is None:
    return given(out)
made = make(*form)
made._native = out
return made"""


def _run(
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frame: FrameType | None,
    cache: dict[Any, Signature] | None = None,
    key: Any = None,
) -> Any:
    """Call ``op`` on the native tensors, with placements repaired where need be, and answer in kind.

    Args:
        cache: of an op: where its signature is to be found next time, under ``key``.
    """
    own = [a._native if type(a) is TorchTensor else _unwrap(a) if type(a) in _NESTED else a for a in args]
    named = {k: _unwrap(v) for k, v in kwargs.items()} if kwargs else kwargs
    try:
        if type(op) is Op:
            if cache is None:
                result = op.record_repairing(tuple(own), named, frame)
            else:
                result = op.ways.slowly_repairing(tuple(own), named, frame or _getframe(1), cache, key)
            if op.writes is None and type(result) is Tensor and "out" not in kwargs:
                return faced(result)
        else:
            token = None if _auto.get() else _auto.set(True)
            try:
                result = op(*own, **named)
            finally:
                if token is not None:
                    _auto.reset(token)
    except MeshError:
        if not are_apart((own, named)):
            raise
        writes = getattr(op, "writes", None) is not None or _is_write(op)
        here, there = brought_together(tuple(own), named, writes)
        with policy.auto_redistribute():
            result = op(*here, **there)
    if type(result) is not Tensor:
        return _wrap(result)
    for i, native in enumerate(own):
        if native is result:  # written in place, or nothing to do: the face that the argument has
            return args[i]
    if kwargs:
        for name, native in named.items():
            if native is result:
                return kwargs[name]
    return faced(result)


def _mixed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """For ops that were given native tensors and torch faces together: the answer has the torch face."""
    if next(_faces((args, kwargs)), None) is None:
        return None
    return (_run(op, args, kwargs, None),)


_op.mixed = _mixed


_FACES = Face(TorchTensor, "._native", _natives, tuple(_GIVE.splitlines()), _wrap, {"make": _make})


# ---- plain tensors that are written into


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The plain tensor that a call would write into, if any."""
    target = kwargs["out"] if "out" in kwargs else args[0] if args and _is_write(func) else None
    return target if isinstance(target, torch.Tensor) and type(target) is not TorchTensor else None


@lru_cache(maxsize=4096)
def _is_write(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name.strip("_") in _IN_PLACE
    return name.endswith("_") and not name.startswith("_")


def _write_plain(op: Callable[..., Any], plain: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let ``op`` write into a copy on the mesh, fetch it, and write it into the plain tensor: that one is this process'
    own, and whoever holds it looks there."""
    mesh = next(_faces((args, kwargs))).device_mesh
    copy = faced(current_session().upload(plain.detach(), mesh, None))
    swap = {id(plain): copy}
    own = tuple(swap.get(id(a), a) for a in args)
    named = {k: swap.get(id(v), v) for k, v in kwargs.items()}
    _run(op, own, named, _getframe(2))
    with torch.no_grad():
        plain.copy_(copy.to_torch())
    return plain


def _faces(tree: Any) -> Iterator[TorchTensor]:
    if type(tree) is TorchTensor:
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _faces(value)
    elif isinstance(tree, dict):
        yield from _faces(list(tree.values()))


# ---- torch functions without a row


@lru_cache(maxsize=4096)
def _without_row(func: Callable[..., Any]) -> Callable[..., Any]:
    """What to call on native tensors for a torch function that is not in the table: an attribute, a method, or an op
    on replicated tensors."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name)
    own = getattr(Tensor, name, None)
    if own is not None and getattr(torch.Tensor, name, None) is func and isinstance(own, FunctionType):
        return own
    if isinstance(own, FunctionType) and getattr(torch, name, None) is func:
        return own  # torch.is_floating_point and its like

    def call(*args: Any, **kwargs: Any) -> Any:
        return missing(func, args, kwargs)

    return call


def _attribute(func: Any, kind: str) -> Callable[..., Any]:
    """An attribute of torch.Tensor: the native tensor's of that name, or what is there without one."""
    name = getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__

    def get(native: Tensor, *args: Any) -> Any:
        if kind != "__get__":
            raise NotImplementedError(f"the attribute {name!r} of a tensor on a mesh cannot be set")
        if hasattr(Tensor, name):
            return getattr(native, name)
        with _Plain():
            return func(faced(native))

    return get


def _copy(tensor: TorchTensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> TorchTensor:
    return faced(tensor.native.clone() if dtype is None else tensor.native.to(dtype, copy=True))


def _again(tensor: TorchTensor, *args: Any) -> TorchTensor:
    return faced(tensor.native.detach())


_READS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: lambda tensor, *_: tensor.item(),
    torch.ops.aten.item.default: lambda tensor, *_: tensor.item(),
    torch.ops.aten._to_copy.default: _copy,
    torch.ops.aten.clone.default: _copy,
    torch.ops.aten.detach.default: _again,
    torch.ops.aten.lift_fresh.default: _again,
}
"""Ops that C++ code asks for past the protocol and that can be answered: a symbol where torch wants a number, and
``torch.tensor(symbol)``."""


def _no_shallow_copy(*args: Any) -> bool:
    """A module's ``to(...)`` then makes new parameters, rather than exchange the memory of what has none."""
    return False


_BESIDE: dict[Any, Callable[..., Any]] = {torch._has_compatible_shallow_copy_type: _no_shallow_copy}
"""Torch functions that mean something else for tensors without memory of their own."""


# ---- methods: Python's, since torch's own go through C++ to the protocol, at twice the cost

_OWN_NAMES = """
__new__ __init__ __del__ __module__ __qualname__ __doc__ __slots__ __weakref__ __dict__ __init_subclass__
__torch_function__ __getattr__ __getattribute__ __setattr__ __class__ __abstractmethods__ __annotations__
__match_args__ __static_attributes__ __firstlineno__ __annotate__ __annotate_func__ __annotations_cache__
"""
_OWN = frozenset(_OWN_NAMES.split())
"""What makes a class what it is, and is not forwarded."""


_FACTS = frozenset({"shape", "dtype", "device", "ndim", "device_mesh", "placements"})
"""Properties that are read often, give no tensors and are not set."""


def _op_method(op: Callable[..., Any], name: str) -> Callable[..., Any]:
    if type(op) is Op and op.writes is None:
        call = _entrances(op).call
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            return _run(op, args, kwargs, _getframe(1))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = op.__doc__
    return call


def _binary(op: Op, name: str) -> Callable[..., Any]:
    """An operator of two faces, or of a face and a number; as ``ops/_methods.py`` has it for native tensors."""
    cache = op.cache

    def call(self: TorchTensor, other: Any) -> Any:
        native = self._native
        kind = type(other)
        try:
            if kind is TorchTensor:
                own = other._native
                sig = cache[native._spec, own._spec]
                slot = sig.take()
                frame = _getframe(1)
                sig.put(((sig.id, slot, native._slot, own._slot), frame.f_code, frame.f_lasti))
            elif kind is float or (kind is int and -(2**63) <= other < 2**63):
                sig = cache[native._spec, kind]
                slot = sig.take()
                frame = _getframe(1)
                sig.put(((sig.id, slot, native._slot, other), frame.f_code, frame.f_lasti))
            else:
                sig = None
        except (KeyError, IndexError):  # not met before, or no slot at hand
            sig = None
        if sig is None:
            try:
                return _run(op, (self, other), {}, _getframe(1))
            except TypeError:
                if isinstance(other, TENSORS):
                    raise
                return NotImplemented
        made = _new(Tensor)
        made._spec = sig.spec
        made._slot = slot
        return faced(made)

    call.__name__ = call.__qualname__ = name
    return call


def _forward(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def call(self: TorchTensor, *args: Any, **kwargs: Any) -> Any:
        return _run(function, (self, *args), kwargs, None)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


def _forward_property(name: str, own: property) -> property:
    read = own.fget
    assert read is not None, name
    if name in _FACTS:
        return property(attrgetter(f"_native.{name}"), doc=own.__doc__)

    def get(self: TorchTensor) -> Any:
        return _wrap(read(self._native))

    def put(self: TorchTensor, value: Any) -> None:
        own.__set__(self._native, _unwrap(value))

    return property(get, put if own.fset is not None else None, doc=own.__doc__)


def _getitem(args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
    """``x[index]``; no method of the class, which ``torch.tensor([x, y])`` would take for a sequence then."""
    first, index = args
    made = sliced(first._native, index, _slice_slowly, frame or _getframe(1)) if type(first) is TorchTensor else None
    return _run(METHODS["__getitem__"], args, {}, frame) if made is None else faced(made)


_slice_slowly = OPS["torch.Tensor.__getitem__"].ways.slowly_repairing
_records[torch.Tensor.__getitem__] = _getitem


def _to(self: TorchTensor, *args: Any, **kwargs: Any) -> Any:
    if not kwargs and len(args) == 1 and args[0] is self._native._spec.dtype:
        return self
    return _run(METHODS["to"], (self, *args), kwargs, _getframe(1))


def _attach() -> None:
    TorchTensor.to = _to  # type: ignore[method-assign,assignment]
    taken = {*TorchTensor.__dict__, "__getitem__"}
    for name, op in METHODS.items():
        if name not in taken and name not in ("size", "dim"):
            setattr(TorchTensor, name, operator(partial(_run, op), name) if is_operator(name) else _op_method(op, name))
            taken.add(name)
    for table in (_BINARY, _REVERSED, _UNARY):
        for name, target in table.items():
            found = OPS.get(f"torch.{target}")
            if found is not None:
                made = _op_method(found, f"__{name}__") if table is _UNARY else _binary(found, f"__{name}__")
                setattr(TorchTensor, f"__{name}__", made)
                taken.add(f"__{name}__")
    for name, target in _IN_PLACE.items():
        if target in METHODS:
            setattr(TorchTensor, f"__{name}__", operator(partial(_run, METHODS[target]), f"__{name}__"))
            taken.add(f"__{name}__")
    for name, value in Tensor.__dict__.items():
        if name in taken or name in _OWN or name == "_is_param":
            continue
        if isinstance(value, property):
            setattr(TorchTensor, name, _forward_property(name, value))
        elif isinstance(value, FunctionType) and name not in TensorFuture.__dict__:
            setattr(TorchTensor, name, _forward(name))


_attach()
