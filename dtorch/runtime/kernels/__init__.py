"""Kernels: how a definition's work is done on one device.

A kernel is a builder: given the ``Site`` (definition, mesh, coordinate, device) it returns what runs on every call: a plain
function of the call's local tensors and numbers, or, when it communicates, a generator function that yields requests
(``comm.py``). Builders run once per signature and device, so geometry is worked out there.

Files here register with ``@kernel``; the executor finds them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import Any, TypeVar

import torch

from dtorch.runtime.comm import Place, Request
from dtorch.runtime.files import FileAccess
from dtorch.runtime.layout import Box, box
from dtorch.runtime.moves import Placed, placed
from dtorch.runtime.template import Filler, bind, dtype_of
from dtorch.transport.errors import ProtocolError
from dtorch.transport.messages import Definition, Layout, MeshInfo

Steps = Generator[Request, Any, Any]


@dataclass
class Site:
    """Where an instance of a kernel runs.

    Attributes:
        fn: the op's function, from the op table.
        mesh: mesh of the outputs (of the first input when there are none).
        coord: coordinate in ``mesh``; None when the place is in the source mesh only.
        place: (device kind, id) as the user wrote it.
        device: the torch device that stands for it.
        files: which files the session may touch here.
    """

    definition: Definition
    fn: Callable[..., Any]
    meshes: dict[int, MeshInfo]
    mesh: MeshInfo
    coord: tuple[int, ...] | None
    place: Place
    device: torch.device
    files: FileAccess = field(default_factory=FileAccess)

    @property
    def params(self) -> dict[str, Any]:
        return self.definition.params

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes on which this kernel's signature was chosen."""
        return tuple(self.params.get("axes", ()))

    def box(self, layout: Layout) -> Box:
        """The part of a tensor that this device holds."""
        mesh = self.meshes[layout.mesh]
        coord = self.coord
        assert coord is not None
        return box(tuple(layout.shape), tuple(layout.codes), tuple(mesh.shape), coord)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box(layout))

    def placed(self, layout: Layout) -> Placed:
        return placed(self.meshes[layout.mesh], layout)

    def filler(self) -> Filler:
        shapes = [self.local_shape(o) for o in self.definition.outputs] if self.coord is not None else []
        return Filler(self.device, shapes)

    def bound(self, fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """``fn`` (the op's function by default) of the call's tensors and numbers, constants in place."""
        d = self.definition
        return bind(fn or self.fn, d.args, d.kwargs, self.filler(), len(d.inputs), num_numbers(d))

    def dtype(self, layout: Layout) -> torch.dtype:
        return dtype_of(layout.dtype)


def num_numbers(definition: Definition) -> int:
    """How many dynamic numbers a call carries."""

    def deep(node: Any) -> int:
        if isinstance(node, list):
            if node and node[0] == "n":
                return 1
            return sum(deep(v) for v in node)
        return 0

    return sum(deep(a) for a in definition.args) + sum(deep(a) for a in definition.kwargs.values())


Alone = Callable[[Definition, dict[int, MeshInfo]], Callable[[Site], Callable[..., Any]] | None]


@dataclass(frozen=True)
class Kernel:
    """How a definition's work is done.

    Attributes:
        communicates: what ``build`` makes is a generator function.
        alone: given a definition and its meshes, a builder of plain functions for when every device finds all it needs on
            itself; None otherwise.
    """

    name: str
    build: Callable[[Site], Callable[..., Any]]
    communicates: bool
    alone: Alone | None = None


KERNELS: dict[str, Kernel] = {}
Build = TypeVar("Build", bound=Callable[[Site], Callable[..., Any]])


def kernel(name: str, communicates: bool = False, alone: Alone | None = None) -> Callable[[Build], Build]:
    """Register a builder under ``name``; see ``Kernel``."""

    def register(build: Build) -> Build:
        KERNELS[name] = Kernel(name, build, communicates, alone)
        return build

    return register


def find(name: str) -> Kernel:
    try:
        return KERNELS[name]
    except KeyError:
        raise ProtocolError(f"unknown kernel {name!r}") from None


_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def with_all_keys(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with autograd's dispatch keys in force.

    Without them torch resolves the conjugate bit before it takes a composite op apart, which is other kernels and so
    other bits than where the bit goes down to BLAS.
    """
    include, exclude = _KEYS

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ForceDispatchKeyGuard(include, exclude):
            return fn(*args, **kwargs)

    return call


def with_gradients(fn: Callable[..., Any], wanting: frozenset[int]) -> Callable[..., Any]:
    """``fn`` with some of its tensors, counted in order, as ones that require a gradient: torch chooses kernels by that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        seen = count()
        made: dict[int, torch.Tensor] = {}  # what is one tensor stays one

        own = [_marked(value, wanting, seen, made) for value in args]
        named = {key: _marked(value, wanting, seen, made) for key, value in kwargs.items()}
        return fn(*own, **named)

    return call


def _marked(value: Any, wanting: frozenset[int], seen: Iterator[int], made: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_marked(part, wanting, seen, made) for part in value]
    if not isinstance(value, torch.Tensor) or next(seen) not in wanting:
        return value
    if id(value) not in made:
        made[id(value)] = value.detach().requires_grad_()
    return made[id(value)]


def with_memory(fn: Callable[..., Any], stride: tuple[int, ...]) -> Callable[..., Any]:
    """``fn``, which looks at the memory of its first tensor, for tensors that another device or a gather may have laid out
    otherwise: it gets memory of its own then, with the strides that the client was told."""

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel() and any(n > 1 and have != want for n, have, want in zip(x.shape, x.stride(), stride, strict=True)):
            once = x
            for dim, step in enumerate(stride):
                once = once.narrow(dim, 0, 1) if step == 0 else once
            made = torch.empty_strided(once.shape, stride, dtype=x.dtype, device=x.device).copy_(once)
            x.set_(made.untyped_storage(), 0, x.shape, stride)
        return fn(x, *args, **kwargs)

    return call


@kernel("local")
def local(site: Site) -> Callable[..., Any]:
    """The op on local pieces."""
    call = site.bound()
    return (lambda *values: call(*values)[0]) if site.params.get("listed") else call


@kernel("view")
def view(site: Site) -> Callable[..., Any]:
    """A regrouping of dims to the local shape of the output. Where the whole would be copied, the piece is copied too."""
    sizes = site.local_shape(site.definition.outputs[0])
    if not site.params.get("copy"):
        return lambda x: x.reshape(sizes)

    def run(x: torch.Tensor) -> torch.Tensor:
        made = x.reshape(sizes)
        return made.clone() if made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else made

    return run


_FILES = "attention data experts file gathered index loss norm random redistribute reduce remap shape sort window conv resample"
for _file in _FILES.split():
    import_module(f"{__name__}.{_file}")  # it registers its kernels
