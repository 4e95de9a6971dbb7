"""An op: one row of the op table, and the way a call of it is recorded.

``Op.record`` is the path that every entrance shares. It turns the arguments into a key and finds a ``Signature`` under it
(``_ways.py``); then a call costs one slot and one tuple. The first call under a key goes through ``_define``: shapes on
torch's meta device, placements by the row's rule, a ``Definition`` for the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

import torch

from dtorch import policy
from dtorch.expressions import spoken
from dtorch.frames import source
from dtorch.ops._call import FLAT, Call, R, Result, Rule, TensorArg, flat_tensors, rebuilder, refuse_without_values
from dtorch.ops._choose import Fit, Verify, fit, repair
from dtorch.ops._folding import wanting_gradients
from dtorch.ops._meta import outcome
from dtorch.ops._refusal import placement_error
from dtorch.placement import from_code
from dtorch.runtime.signature import IN_PLACE, MANY, ONE, Signature
from dtorch.runtime.template import LocalShape, NumberRef, TensorRef, freeze
from dtorch.spec import LINKED, Spec
from dtorch.transport.errors import MeshError
from dtorch.transport.messages import Definition, Layout

MAX_SIGNATURES = 65536
"""Signatures kept in one session; past it all caches start afresh."""

_OPEN, _CLOSE, _SLICE, _NAMED = object(), object(), object(), object()
_ATOMS = frozenset(
    {type(None), str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis), complex}
)
_new = object.__new__
__tracebackhide__ = True  # pytest shows the caller's frames, not these


class Op:
    """A row of the op table.

    Attributes:
        name: where workers find the function: "torch.add", "torch.Tensor.add_", "torch.nn.functional.linear".
        fn: that function; run on meta tensors for shapes here and on real ones by workers.
        rule: legal placements on one mesh axis.
        verify: a last check of a fit over all axes at once.
        writes: the tensor input that is written in place and returned.
        numbers: argument positions and names whose numbers vary from call to call; True: all numbers.
        random: draws from the session's generator.
        is_view: the result shares memory with input 0 where it is computed without communication.
        mutates: which inputs a call writes into beside its results without torch saying so; others are found by themselves.
        stand_in: what infers shapes in place of ``fn``, for ops whose shapes depend on values.
        function: the op as a plain function, which is called sooner than this object and binds as a method.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        rule: Rule,
        *,
        verify: Verify | None = None,
        writes: int | None = None,
        numbers: frozenset[int | str] | bool = False,
        random: bool = False,
        is_view: bool = False,
        mutates: Callable[[Call], tuple[int, ...]] | None = None,
        stand_in: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.fn = fn
        self.rule = rule
        self.verify = verify
        self.writes = writes
        self.numbers = numbers
        self.random = random
        self.is_view = is_view
        self.mutates = mutates
        self.stand_in = stand_in
        self.cache: dict[Any, Signature] = {}
        self.ways = Ways(self)
        self.record, self.record_repairing = self.ways.record, self.ways.record_repairing
        self.repairs: dict[Any, Any] = {}  # under the policy: what ``_repaired`` takes; calls with out= that were tried
        self._reads: dict[Any, frozenset[int]] = {}  # see ``_integers.py``
        self.__name__ = self.short_name
        self.__qualname__ = self.short_name
        self.__doc__ = f"Distributed {name}: same arguments and result as torch's. Placements: see docs/ops.md."
        self.function = self.ways.call
        self.function.__name__ = self.function.__qualname__ = self.short_name
        self.function.__doc__ = self.__doc__

    @property
    def short_name(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def is_number(self, where: int | str) -> bool:
        """Whether the argument at this place or of this name is a dynamic number where it is an int or a float."""
        return self.numbers is True or (self.numbers is not False and where in self.numbers)

    def new_cache(self) -> dict[Any, Signature]:
        """A cache for the keys of a function that stands before this op; emptied with the op's own."""
        return self.ways.new_cache()

    def forget(self) -> None:
        """Empty all caches."""
        self.cache.clear()
        self.repairs.clear()
        self.ways.clear()

    # ---- recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.record(args, kwargs, _getframe(1))

    def slowly(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        cache: dict[Any, Signature],
        quick_key: Any,
    ) -> Any:
        """Record a call of any arguments; its signature goes into ``cache``, unless ``quick_key`` is None."""
        __tracebackhide__ = True
        key: list[Any] = []
        ins: list[int] = []
        nums: list[Any] = []
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for name, a in given:
            if type(name) is str:
                if name == "out":
                    return write_out(self, args, kwargs)
                key += _NAMED, name
            t = type(a)
            if t in (int, float):
                key.append(t)
                (nums if self.is_number(name) else key).append(a)
            elif not _key(a, key, ins):
                return self._convert(args, kwargs, frame, cache, quick_key)
        sig = self.cache.get(tuple(key))
        if sig is None:
            done, sig = self._define(args, kwargs, tuple(key), frame)
            if done is not None:
                return done[0]
        sig.has_ints = any(type(number) is int for number in nums)
        sig.is_plain = sig.shape == ONE and not sig.has_ints
        made = self.emit(sig, (*ins, *nums), source(frame), args)
        if sig.mutates:
            tensors = tensors_of((args, kwargs))
            mutated(tensors, sig.mutates)
            return made if sig.itself is None else tensors[sig.itself]
        if sig.links is not None:
            tensors = tensors_of((args, kwargs))
            return attach(self, made, args, kwargs, [None if i is None else tensors[i] for i in sig.links])
        if quick_key is not None:
            cache[quick_key] = sig
        return made

    def emit(self, sig: Signature, ins: Sequence[Any], at: tuple[CodeType | None, int], args: tuple[Any, ...]) -> Any:
        """Put a call of ``sig`` and make its results.

        Args:
            ins: slots of the inputs, then the numbers.
        """
        if sig.has_ints:
            for number in ins:
                if type(number) is int and not -(2**63) <= number < 2**64:
                    raise OverflowError(f"{self.name}: the number {number} does not fit into 64 bits")
        recorder = sig.recorder
        if sig.shape == ONE:
            try:
                slot = sig.take()
            except IndexError:
                slot = recorder.grant()
            sig.put(((sig.id, slot, *ins), *at))
            out = _new(Tensor)
            out._spec = sig.spec
            out._slot = slot
            if recorder.expects_after_put:
                recorder.after_put()
            return out
        if sig.shape == IN_PLACE:
            sig.put(((sig.id, *ins), *at))
            target: Any = tensors_of(args)[self.writes or 0]
            target._spec.session.num_mutations += 1
            if sig.spec is not None:
                target._spec = sig.spec
            recorder.after_put()
            if LIVE:
                wrote(target)
            return target
        outs, slots = [], []
        for spec in sig.specs:
            out = _new(Tensor)
            out._spec = spec
            try:
                out._slot = slot = sig.take()
            except IndexError:
                out._slot = slot = recorder.grant()
            outs.append(out)
            slots.append(slot)
        sig.put(((sig.id, *slots, *ins), *at))
        if recorder.expects_after_put:
            recorder.after_put()
        return sig.finish(outs)

    # ---- what the quick path does not know

    def _convert(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        cache: dict[Any, Signature],
        quick_key: Any,
    ) -> Any:
        """Arguments of foreign types: plain torch tensors become replicated, numpy scalars become numbers."""
        answered = mixed(self, args, kwargs)
        if answered is not None:
            return answered[0]
        if kwargs.get("out") is not None:
            check_out(self, kwargs["out"])
        for name, given in (*enumerate(args), *kwargs.items()):
            refuse_without_values(f"{self.name}: argument {name!r}", given)
        plain = with_integers(self.fn, self._reads, args, kwargs)
        if plain is not None:
            return self.record(*plain, frame)
        spec = next((t._spec for t in tensors_of((args, kwargs)) if type(t) is Tensor), None)
        convert = Conversion(self.name, spec, self.writes is not None)
        args = tuple(convert(a) for a in args)
        kwargs = {k: convert(v) for k, v in kwargs.items()}
        if not convert.has_changed:
            raise TypeError(f"{self.name}: these arguments are not supported: {args!r} {kwargs!r}")
        if quick_key is not None:
            return self.slowly(args, kwargs, frame, cache, quick_key)
        return self.record(args, kwargs, frame)

    def _define(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, frame: FrameType | None = None
    ) -> tuple[tuple[Any] | None, Signature]:
        """First call under ``key``: a signature, or the finished result of a repaired call."""
        __tracebackhide__ = True
        tensors = [t for t in tensors_of((args, kwargs))]
        if not tensors:
            raise TypeError(f"{self.name}: no dtorch tensor among the inputs")
        spec = tensors[0]._spec
        session = spec.session
        for i, other in enumerate(tensors):
            if other._spec.session is not session:
                raise MeshError(f"{self.name}: input {i} belongs to a session that was shut down or is another one")
            if other._spec.mesh != spec.mesh:
                raise MeshError(
                    f"{self.name}: input 0 is on {spec.mesh}, input {i} on {other._spec.mesh}. Bring them together: "
                    f"redistribute(device_mesh=...) one of them"
                )
        if refresh_all(tensors):
            return (self.record(args, kwargs),), None  # type: ignore[return-value]
        plain = with_integers(self.fn, self._reads, args, kwargs)
        if plain is not None:
            return (self.record(*plain, frame),), None  # type: ignore[return-value]
        if key in self.repairs and policy.is_auto():
            return (self._repaired(args, kwargs, tensors, *self.repairs[key]),), None  # type: ignore[return-value]
        call, tree_args, tree_kwargs, finish = self.infer(args, kwargs, tensors)
        sigs = [self.rule(replace(call, axis=axis)) for axis in range(len(call.mesh_shape))]
        if self.writes is not None:
            w = self.writes
            sigs = [[s for s in axis if all(o == s.ins[w] for o in s.outs)] for axis in sigs]
        fixed = frozenset() if self.writes is None else frozenset({self.writes})
        found = fit(call, sigs, self.verify, fixed)
        if found is None or (self.writes is not None and any(o != spec_codes(tensors, self.writes) for o in found.outs)):
            if policy.is_auto():
                wanted = repair(call, sigs, [t._spec.size_bytes for t in tensors], fixed, self.verify)
                if wanted is None and fixed and call.outputs[0].shape == call.tensors[min(fixed)].shape:
                    wanted = ((R,) * len(call.mesh_shape),) * len(tensors)  # written whole, then copied back
                if wanted is not None:
                    self.repairs[key] = wanted, tuple(o.alias for o in call.outputs), call.mutates
                    made = self._repaired(args, kwargs, tensors, *self.repairs[key])
                    return (made,), None  # type: ignore[return-value]
            said = spoken(frame, args, kwargs, Tensor)
            raise placement_error(self.name, call, sigs, tensors, said, self.writes, self.verify)
        if session.num_signatures > MAX_SIGNATURES:
            session.forget_signatures()  # before the new one is made, which would be forgotten too
        grads = wanting_gradients(self.short_name, tensors)
        extra = {"grads": grads} if grads else None
        sig = self.signature(session, spec, call, found, tree_args, tree_kwargs, finish, params=extra)
        if self.writes is None and call.itself is None and any(o.alias is not None for o in call.outputs):
            self._link(sig, call, found, tensors)
        self.cache[key] = sig
        return None, sig

    def _repaired(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Any],
        wanted: tuple[tuple[int, ...], ...],
        aliases: tuple[int | None, ...],
        mutates: tuple[int, ...],
    ) -> Any:
        """Record the call with its inputs moved to the placements that ``repair`` chose."""
        moved = [
            t if t._spec.codes == codes else t.redistribute(placements=[from_code(c) for c in codes])
            for t, codes in zip(tensors, wanted, strict=True)
        ]
        moved_args, moved_kwargs = with_tensors((args, kwargs), iter(moved))
        made = self.record(moved_args, moved_kwargs)
        for i in mutates:
            if moved[i] is not tensors[i]:
                tensors[i].copy_(moved[i].redistribute(tensors[i].placements))
        if mutates and any(made is moved[i] for i in mutates):
            return next(tensors[i] for i in mutates if made is moved[i])
        if self.writes is not None and moved[self.writes] is not tensors[self.writes]:
            return tensors[self.writes].copy_(made)
        if self.writes is None:
            bases = [None if i is None or wanted[i] == tensors[i]._spec.codes else tensors[i] for i in aliases]
            if any(b is not None for b in bases):
                attach(self, made, args, kwargs, bases)
        return made

    def infer(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
    ) -> tuple[Call, tuple[Any, ...], dict[str, Any], Callable[[list[Any]], Any] | None]:
        """Shapes and dtypes of the outputs by torch's own meta functions; raises what torch raises."""
        infos = [
            TensorArg(i, tuple(t._spec.shape), t._spec.dtype, t._spec.codes, t._spec.stride)
            for i, t in enumerate(tensors)
        ]
        index = iter(range(len(tensors)))
        counter = iter(range(1 << 30))

        def walk(value: Any, where: Any, to: Callable[[int, Any], Any]) -> Any:
            if isinstance(value, Tensor):
                return to(next(index), value)
            if isinstance(value, tuple):
                return tuple(walk(v, None, to) for v in value)
            if isinstance(value, list):
                return [walk(v, None, to) for v in value]
            if isinstance(value, slice):
                return slice(walk(value.start, None, to), walk(value.stop, None, to), walk(value.step, None, to))
            return value

        def template(value: Any, where: Any) -> Any:
            if type(value) in (int, float) and (self.numbers is True or (self.numbers and where in self.numbers)):
                return NumberRef(next(counter))
            return walk(value, where, lambda i, _: TensorRef(i))

        tree_args = tuple(template(a, i) for i, a in enumerate(args))
        tree_kwargs = {k: template(v, k) for k, v in kwargs.items()}
        index = iter(range(len(tensors)))
        metas: Sequence[Any] = [t._spec.new_meta() if self.writes == i else t._spec.meta for i, t in enumerate(tensors)]
        meta_args = tuple(_to_meta(walk(a, i, lambda i, _: metas[i])) for i, a in enumerate(args))
        meta_kwargs = {k: _to_meta(walk(v, k, lambda i, _: metas[i])) for k, v in kwargs.items()}
        before = {id(m): m._version for m in metas}
        with torch._C.DisableTorchFunction():  # factories in there are plain torch's, also inside ``with mesh:``
            result, metas = outcome(self.stand_in or self.fn, meta_args, meta_kwargs, metas, self.random)
        mutates = [i for i, m in enumerate(metas) if m._version != before.get(id(m), 0)] if self.writes is None else []
        index = iter(range(len(tensors)))
        call_args = tuple(walk(a, i, lambda i, _: infos[i]) for i, a in enumerate(args))
        call_kwargs = {k: walk(v, k, lambda i, _: infos[i]) for k, v in kwargs.items()}
        finish: Callable[[list[Any]], Any] | None = None
        is_nested = False
        if self.writes is not None:
            written = metas[self.writes]
            outputs: tuple[Result, ...] = (_result(written),)
        elif isinstance(result, torch.Tensor):
            outputs = (_result(result, metas),)
        elif isinstance(result, (tuple, list)):
            flat = flat_tensors(result)
            is_nested = not all(isinstance(r, torch.Tensor) for r in result)
            outputs = tuple(_result(r, metas) for r in flat)
            kind = type(result)
            finish = tuple if kind is tuple else list if kind is list else kind
            if is_nested or hasattr(kind, "_fields"):
                finish = rebuilder(result)
        else:
            raise TypeError(f"{self.name} does not give a tensor")
        mesh = tensors[0]._spec.mesh
        call = Call(
            self.name, call_args, call_kwargs, tuple(infos), outputs, tuple(mesh.shape), mutates=tuple(mutates),
            itself=next((i for i in mutates if result is metas[i]), None), axis_names=mesh.dim_names or (), is_nested=is_nested,
        )  # fmt: skip
        if self.mutates is not None:
            call.mutates = tuple(sorted({*call.mutates, *self.mutates(call)}))
        return call, tree_args, tree_kwargs, finish

    def _link(self, sig: Signature, call: Call, found: Fit, tensors: list[Any]) -> None:
        """Results that torch would make views, but that are copies here, or views of such copies, get a link."""
        real = found.kernel in VIEW_KERNELS
        linked = [
            o.alias if o.alias is not None and (not real or tensors[o.alias]._spec.link) else None
            for o in call.outputs
        ]
        if all(i is None for i in linked):
            return
        finish, one = sig.finish, sig.finish is None
        sig.shape, sig.finish = MANY, (lambda outs: outs[0]) if one else finish
        sig.specs = tuple(
            spec if i is None else spec.session.respec(spec, link=LINKED)
            for spec, i in zip(sig.specs, linked, strict=True)
        )
        sig.links = tuple(linked)

    def signature(
        self,
        session: Any,
        like: Spec,
        call: Call,
        found: Fit,
        tree_args: tuple[Any, ...],
        tree_kwargs: dict[str, Any],
        finish: Callable[[list[Any]], Any] | None,
        inputs: tuple[Layout, ...] | None = None,
        params: dict[str, Any] | None = None,
    ) -> Signature:
        """Define a signature in ``session`` and hand out what the hot path needs of it."""
        specs = tuple(
            session.spec(o.shape, o.stride, o.dtype, like.mesh, codes)
            for o, codes in zip(call.outputs, found.outs, strict=True)
        )
        kernel = "random" if self.random else found.kernel
        args, kwargs = freeze_args(tree_args, tree_kwargs)
        name = FLAT + self.name if call.is_nested else self.name
        extra = dict(params or {})
        if kernel == "view":
            args, kwargs = [["t", 0], freeze(LocalShape(0))], {}
            extra["copy"] = call.outputs[0].alias is None
        if finish is not None and len(call.outputs) == 1 and self.writes is None and not call.is_nested:
            extra["listed"] = True  # a sequence of one result
        if self.random:
            extra["strides"] = [list(t.stride) for t in call.tensors]
        if self.short_name.startswith("as_strided"):
            extra["memory"] = list(call.tensors[0].stride)
        for axis in found.axes:
            extra.update(found.sigs[axis].params)
        extra["axes"] = list(found.axes)
        cuts = {str(i): codes for i, (t, codes) in enumerate(zip(call.tensors, found.ins, strict=True)) if t.codes != codes}
        if cuts:
            extra["cuts"] = cuts  # inputs that each device cuts further for itself
        if self.random:
            extra["random"] = True
        if found.kernel in VIEW_KERNELS and self.writes is None and any(o.alias is not None for o in call.outputs):
            extra["aliases"] = [-1 if o.alias is None else o.alias for o in call.outputs]
        if call.mutates:
            extra["mutates"] = list(call.mutates)
        layouts = inputs if inputs is not None else tuple(
            Layout(like.layout.mesh, t.shape, str(t.dtype)[6:], t.codes) for t in call.tensors
        )
        writes = () if self.writes is None else (self.writes,)

        def build(number: int) -> Definition:
            return Definition(
                number, name, kernel, args, kwargs, layouts, tuple(s.layout for s in specs), writes, extra
            )

        sig = Signature()
        recorder = session.recorder
        sig.id = recorder.define(build)
        sig.take, sig.recorder = recorder.take, recorder
        sig.put = recorder.draw if self.random else recorder.put
        session.know_signature(
            sig.id, self.name, layouts, tuple(s.layout for s in specs), bool(writes), self.random, bool(call.mutates)
        )
        sig.mutates, sig.itself = call.mutates, call.itself
        sig.specs, sig.spec, sig.finish = specs, None, finish
        if self.writes is not None:
            sig.finish, sig.shape = None, IN_PLACE
            if call.outputs[0].shape != call.tensors[self.writes].shape:
                sig.spec = specs[0]
        elif finish is not None:
            sig.shape = MANY
        else:
            sig.shape = ONE
            sig.spec = specs[0]
        return sig


def _unmixed(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    return None


mixed: Callable[[Op, tuple[Any, ...], dict[str, Any]], tuple[Any] | None] = _unmixed
"""Answers calls that were given torch-faced tensors among others; ``face.py`` puts its own here."""


def spec_codes(tensors: list[Any], index: int) -> tuple[int, ...]:
    codes: tuple[int, ...] = tensors[index]._spec.codes
    return codes


def freeze_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [freeze(a) for a in args], {k: freeze(v) for k, v in kwargs.items()}


def _result(meta: torch.Tensor, inputs: Sequence[torch.Tensor] = ()) -> Result:
    memory = meta.untyped_storage()._cdata
    alias = next((i for i, t in enumerate(inputs) if t.untyped_storage()._cdata == memory), None)
    return Result(tuple(meta.shape), tuple(meta.stride()), meta.dtype, alias)


def _to_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value


def _key(value: Any, key: list[Any], ins: list[int]) -> bool:
    """Append a nested or rare argument to ``key``; False when its type must be converted first."""
    t = type(value)
    if t is Tensor:
        key.append(value._spec)
        ins.append(value._slot)
    elif t in (int, float, bool):
        key.append(t)
        key.append(value)
    elif t in _ATOMS:
        key.append(value)
    elif t is list or t is tuple or t is torch.Size:
        key.append(_OPEN)
        key.append(tuple if t is torch.Size else t)
        for item in value:
            if not _key(item, key, ins):
                return False
        key.append(_CLOSE)
    elif t is slice:
        key.append(_SLICE)
        return _key(value.start, key, ins) and _key(value.stop, key, ins) and _key(value.step, key, ins)
    else:
        return False
    return True


from dtorch.ops._alias import LIVE, VIEW_KERNELS, attach, mutated, refresh_all, wrote  # noqa: E402
from dtorch.ops._convert import Conversion  # noqa: E402
from dtorch.ops._integers import with_integers  # noqa: E402
from dtorch.ops._out import check_out, write_out  # noqa: E402
from dtorch.ops._tree import tensors_of, with_tensors  # noqa: E402
from dtorch.ops._ways import Ways  # noqa: E402
from dtorch.tensor import Tensor  # noqa: E402  (the two refer to each other: methods are ops, results are tensors)
