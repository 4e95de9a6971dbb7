"""Runs entries of torch's own operator database on distributed tensors and compares with plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard
from tests._sharding import _sample, mesh_of

OUT_OF_SCOPE = {
    "sparse.mm.reduce": "takes sparse tensors; dtorch tensors are strided",
    "sparse.sampled_addmm": "takes sparse tensors; dtorch tensors are strided",
    "to_sparse": "gives a sparse tensor; dtorch tensors are strided",
    "torch._scaled_mm": "float8 matrix products of one kind of GPU, private to torch",
    "torch._scaled_mm_v2": "float8 matrix products of one kind of GPU, private to torch",
    "torch.ops.aten._flash_attention_forward": "a CUDA kernel behind scaled_dot_product_attention, without a CPU one",
    "torch.ops.aten._efficient_attention_forward": "as the one above",
}
"""Entries that are refused on purpose, with the reason."""

UNINITIALIZED = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
        "resize_as_",
    }
)
"""Their values are whatever was in memory: only shape and dtype are compared."""

SHAKY = frozenset({"linalg.lstsq"})
"""Plain torch's own bits vary from call to call (LAPACK's gelsy), so values are compared as close."""

NO_STRIDES = frozenset({"svd_lowrank", "pca_lowrank", "nn.functional.conv1d"})
"""Torch promises no strides, and has others on the meta device than on the CPU."""

WIDER = {"linalg.multi_dot": (1e-4, 1e-5)}
"""Tolerances (atol, rtol) of sums of products with large terms that cancel, whose order placements change."""

MAX_MESSAGE = 300


class Wrong(AssertionError):
    """A value, shape or dtype that is not torch's."""


class Refused(Exception):
    """A call that torch allows and dtorch does not."""


@dataclass
class Findings:
    """What was met while an entry ran.

    Attributes:
        ran: comparisons that came out right.
        placement_errors: combinations that were refused without ``auto_redistribute`` (and right with it).
        errors, same_words: wrong calls that raised torch's type of exception, and those of them in torch's words.
        claims: runs of signatures that rules claim.
        wrong, refused: what each failing call was, and how it failed.
    """

    ran: int = 0
    placement_errors: int = 0
    errors: int = 0
    same_words: int = 0
    claims: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def note(self, error: BaseException, what: str) -> None:
        text = f"{what}: {type(error).__name__}: {error}"[:MAX_MESSAGE]
        (self.wrong if isinstance(error, Wrong) else self.refused).append(text)

    def add(self, other: Findings) -> None:
        self.ran += other.ran
        self.placement_errors += other.placement_errors
        self.errors += other.errors
        self.same_words += other.same_words
        self.claims += other.claims
        self.wrong += other.wrong
        self.refused += other.refused


@lru_cache(maxsize=1)
def entries() -> dict[str, Any]:
    """All entries of the database, by name and variant."""
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    # It looks for a unittest on the stack, through all source files, each time samples are asked for.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    database.wrapper_set_seed = _seeded
    found: dict[str, Any] = {}
    for op in database.op_db:
        found[f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name] = op
    return found


def _seeded(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for the database's own wrapper of ops that draw: seeds torch and dtorch alike."""
    torch.manual_seed(42)
    if leaves((args, kwargs), dtorch.Tensor) or not leaves((args, kwargs)):
        dtorch.manual_seed(42)
    return reach(fn)(*args, **kwargs)


def reach(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``; a method of torch.Tensor written in C wants a torch.Tensor, so it is called as a method instead."""
    if not isinstance(fn, (MethodDescriptorType, WrapperDescriptorType)):
        return fn
    name = fn.__name__

    def call_method(first: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(first, name)(*args, **kwargs)

    return call_method


def samples(op: Any, dtype: torch.dtype) -> list[Any]:
    """The entry's samples, the same each time."""
    torch.manual_seed(7)
    return list(op.sample_inputs("cpu", dtype, requires_grad=False))


def dtypes_of(op: Any) -> list[torch.dtype]:
    """The dtypes to run besides float32 that torch's CPU functions support."""
    wanted = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    have = op.supported_dtypes("cpu")
    return [dtype for dtype in wanted if dtype in have]


# ---- trees of arguments and results


def tree_map(tree: Any, fn: Callable[[Any], Any], kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """``tree`` with ``fn`` of every leaf of type ``kind``; named tuples stay what they are."""
    if isinstance(tree, kind):
        return fn(tree)
    if isinstance(tree, dict):
        return {k: tree_map(v, fn, kind) for k, v in tree.items()}
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, (list, tuple)):
        made = [tree_map(v, fn, kind) for v in tree]
        if isinstance(tree, list):
            return made
        return tuple(made)
    if isinstance(tree, slice):
        return slice(*(tree_map(v, fn, kind) for v in (tree.start, tree.stop, tree.step)))
    return tree


def leaves(tree: Any, kind: type | tuple[type, ...] = torch.Tensor) -> list[Any]:
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    tree_map(tree, keep, kind)
    return found


def fresh(tree: Any) -> Any:
    """Copies of all tensors, contiguous; one tensor that occurs twice is one copy."""
    known: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in known:
            plain = t.detach().resolve_conj().resolve_neg()
            known[id(t)] = plain.clone(memory_format=torch.contiguous_format)
        return known[id(t)]

    return tree_map(tree, copy)


def arguments(sample: Any) -> tuple[Any, ...]:
    return (sample.input, tuple(sample.args), dict(sample.kwargs))


def is_plain(tree: Any) -> bool:
    """Whether all tensors are strided ones with values."""
    return all(
        t.layout == torch.strided and not t.is_nested and not t.is_quantized and t.device.type == "cpu" for t in leaves(tree)
    )


# ---- comparison


def values(result: Any) -> Any:
    """The result with plain tensors in place of dtorch's."""
    for tensor in leaves(result, dtorch.Tensor):
        tensor.to_torch_async()
    return tree_map(result, lambda t: t.to_torch(), dtorch.Tensor)


def same_kind(got: Any, want: Any) -> None:
    if isinstance(want, (list, tuple)) and not isinstance(want, torch.Size):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            raise Wrong(f"{got!r} has not the structure of torch's result, {type(want).__name__} of {len(want)}")
        if isinstance(got, list) != isinstance(want, list):
            raise Wrong(f"a {type(got).__name__}, not a {type(want).__name__}")
        names = getattr(type(want), "_fields", None) or getattr(type(want), "n_fields", None)
        if names is not None and type(got) is not type(want):
            raise Wrong(f"a {type(got).__name__}, not a {type(want).__name__}")
        for a, b in zip(got, want, strict=True):
            same_kind(a, b)
    elif isinstance(want, torch.Tensor):
        if not isinstance(got, dtorch.Tensor):
            raise Wrong(f"a {type(got).__name__}, not a dtorch.Tensor")
        if tuple(got.shape) != tuple(want.shape):
            raise Wrong(f"shape {tuple(got.shape)}, not {tuple(want.shape)}")
        if got.dtype != want.dtype:
            raise Wrong(f"{got.dtype}, not {want.dtype}")


def same_strides(got: Any, want: Any) -> None:
    """Of dims that hold more than one element; the others' strides address nothing."""
    for g, w in zip(leaves(got, dtorch.Tensor), leaves(want), strict=True):
        steps = [(a, b) for a, b, size in zip(g.stride(), w.stride(), w.shape, strict=True) if size > 1]
        if w.numel() and any(a != b for a, b in steps):
            raise Wrong(f"strides {g.stride()}, not {w.stride()}")


def equal(got: Any, want: Any) -> None:
    """Bit for bit, NaN equal to NaN."""
    if isinstance(want, torch.Tensor):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Wrong(f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}")
        if want.layout != torch.strided:
            raise Refused(f"torch gives a tensor of layout {want.layout}")
        if not torch.equal(_no_nan(got), _no_nan(want)):
            raise Wrong(f"{_short(got)} is not {_short(want)}")
    elif isinstance(want, dict):
        for key in want:
            equal(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        for a, b in zip(got, want, strict=True):
            equal(a, b)
    elif got != want and not (got != got and want != want):
        raise Wrong(f"{got!r} is not {want!r}")


def close(got: Any, want: Any, near: tuple[float, float] | None) -> None:
    if isinstance(want, torch.Tensor):
        try:
            named = {} if near is None or not (want.is_floating_point() or want.is_complex()) else {
                "atol": near[0], "rtol": near[1]
            }
            torch.testing.assert_close(got, want, equal_nan=True, **named)
        except AssertionError as error:
            raise Wrong(" ".join(str(error).split())) from error
    elif isinstance(want, dict):
        for key in want:
            close(got[key], want[key], near)
    elif isinstance(want, (list, tuple)):
        for a, b in zip(got, want, strict=True):
            close(a, b, near)
    elif isinstance(want, (float, complex)):
        close(torch.tensor(got), torch.tensor(want), near)
    elif got != want:
        raise Wrong(f"{got!r} is not {want!r}")


def close_enough(got: Any, want: Any) -> None:
    close(got, want, (1e-4, 1e-4))


def _no_nan(t: torch.Tensor) -> torch.Tensor:
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    if not t.is_floating_point():
        return t
    return torch.where(t.isnan(), torch.full_like(t, 1.5e4), t)


def _short(t: torch.Tensor) -> str:
    return " ".join(repr(t).split())[:100]


def tolerance(op: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """The widest (atol, rtol) that the entry itself asks for; None: ``assert_close``'s own."""
    from torch.testing._internal.common_device_type import toleranceOverride

    found: list[tuple[float, float]] = [WIDER[op.name]] if op.name in WIDER else []
    for info in op.decorators:
        for decorator in getattr(info, "decorators", [info]):
            if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
                found.append(tuple(decorator.d[dtype]))
    base = {torch.float32: (1e-5, 1.3e-6), torch.complex64: (1e-5, 1.3e-6)}.get(dtype)
    if not found or base is None:
        return base
    return max(base[0], *(f[0] for f in found)), max(base[1], *(f[1] for f in found))


# ---- running


@dataclass
class Expected:
    """What plain torch does with a sample."""

    given: Any  # the arguments, untouched
    after: Any  # the arguments after the call
    result: Any
    error: BaseException | None
    draws: bool
    writes: bool


def expected_of(fn: Callable[..., Any], given: Any, copy: Callable[[Any], Any] = fresh) -> Expected:
    """Run plain torch, and see whether it draws random numbers and writes into its arguments."""
    after = copy(given)
    before = [t._version for t in leaves(after)]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            result, error = call(fn, after), None
    except Exception as raised:
        result, error = None, raised
    draws = not torch.equal(state, torch.get_rng_state())
    writes = [t._version for t in leaves(after)] != before
    return Expected(given, after, result, error, draws, writes)


def call(fn: Callable[..., Any], given: Any) -> Any:
    first, args, kwargs = given
    return fn(first, *args, **kwargs)


def turned(given: Any) -> Any:
    """The arguments with each matrix (and stack of them) laid out the other way round in memory."""
    return tree_map(given, lambda t: t.mT.contiguous().mT if t.ndim >= 2 else t)


def place_turned(given: Any, mesh: DeviceMesh) -> Any:
    """The same on a mesh: transposed views of tensors that were distributed transposed."""
    whole = [Replicate()] * len(mesh.shape)

    def put(t: torch.Tensor) -> Any:
        if t.ndim < 2:
            return dtorch.tensor(t, device_mesh=mesh, placements=whole)
        return dtorch.tensor(t.mT.contiguous(), device_mesh=mesh, placements=whole).mT

    return tree_map(given, put)


def check_turned(op: Any, name: str, limit: int = 3) -> Findings:
    """Inputs that are transposed views: torch's values, and its strides."""
    found = Findings()
    fn, dtype = reach(op.op), next(iter(dtypes_of(op)), None)
    if dtype is None or op.name in UNINITIALIZED:
        return found
    for number, given in smallest(op, dtype, limit):
        given = fresh(given)
        if all(t.ndim < 2 for t in leaves(given)):
            continue
        expected = expected_of(fn, turned(given), copy=turned)
        if expected.error is not None or expected.draws or op.name in SHAKY:
            continue
        try:
            result = call(fn, place_turned(given, mesh_of(1)))
            if leaves(expected.result):
                same_kind(result, expected.result)
                if op.name not in NO_STRIDES:
                    same_strides(result, expected.result)
            close(values(result), expected.result, tolerance(op, dtype))
            found.ran += 1
        except Exception as error:
            found.note(error, f"{name} sample {number} transposed {describe(given)}")
    return found


def place(given: Any, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    """The arguments on a mesh, tensors in order under ``placements``."""
    known: dict[int, Any] = {}
    left = iter(placements)

    def put(t: torch.Tensor) -> Any:
        where = next(left)
        if id(t) not in known:
            known[id(t)] = distribute(t, mesh, where)
        return known[id(t)]

    return tree_map(given, put)


def distribute(t: torch.Tensor, mesh: DeviceMesh, where: Sequence[Any]) -> dtorch.Tensor:
    """``t`` under ``where``; pending sums are pieces of both signs, none of them zero, whose sum in order is exact."""
    partial = [axis for axis, p in enumerate(where) if p.is_partial()]
    whole = [Replicate() if p.is_partial() else p for p in where]
    made = dtorch.tensor(t, device_mesh=mesh, placements=whole)
    if not partial:
        return made
    shape = tuple(mesh.shape)
    num = 1
    for axis in partial:
        num *= shape[axis]
    factors = {1: [1], 2: [-1, 2], 3: [2, -2, 1], 4: [2, -2, 2, -1]}[num]
    pieces = []
    for position, piece in enumerate(made.to_shards()):
        coord, rest = [], position
        for size in reversed(shape):
            coord.insert(0, rest % size)
            rest //= size
        which = 0
        for axis in partial:
            which = which * shape[axis] + coord[axis]
        pieces.append(piece * factors[which])
    return dtorch.from_shards(pieces, device_mesh=mesh, placements=list(where))


def run(fn: Callable[..., Any], expected: Expected, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[Any, Any]:
    """Record the call; the arguments and the result."""
    given = place(fresh(expected.given), mesh, placements)
    if expected.draws:
        dtorch.manual_seed(11)
    with nullcontext() if placements else mesh:
        return given, call(fn, given)


def check_single(
    op: Any, name: str, dtype: torch.dtype, fn: Callable[..., Any] | None = None, limit: int | None = None
) -> Findings:
    """Every sample (``limit`` of them, spread) on one device: torch's bits, types, aliases and errors."""
    found = Findings()
    fn = reach(fn or op.op)
    mesh = mesh_of(1)
    near = op.name in UNINITIALIZED
    seen_views = 0
    drawn = list(enumerate(samples(op, dtype)))
    step = 1 if limit is None else max(1, -(-len(drawn) // limit))
    for number, sample in drawn[::step]:
        what = f"{name} {str(dtype)[6:]} sample {number}"
        given = arguments(sample)
        if not is_plain(given):
            continue
        given = fresh(given)
        expected = expected_of(fn, given)
        placements = [(Replicate(),)] * len(leaves(given))
        try:
            if expected.error is not None:
                must_raise(fn, expected, mesh, placements)
            else:
                made, result = run(fn, expected, mesh, placements)
                if leaves(expected.result) or leaves(result, dtorch.Tensor):
                    same_kind(result, expected.result)
                    if op.name not in NO_STRIDES:
                        same_strides(result, expected.result)
                if not near:
                    same = close_enough if op.name in SHAKY else equal
                    same(values(result), expected.result)
                if expected.writes and not near:
                    equal(values(made), expected.after)
                if seen_views < 3 and not near:
                    seen_views += check_alias(made, result, expected)
            found.ran += 1
        except Exception as error:
            found.note(error, f"{what} {describe(given)}")
    return found


def describe(given: Any) -> str:
    text = repr(tree_map(given, lambda t: Shown(t)))
    return text[:120]


class Shown:
    """A tensor in a message."""

    def __init__(self, t: torch.Tensor) -> None:
        self.text = f"{str(t.dtype)[6:]}{list(t.shape)}"

    def __repr__(self) -> str:
        return self.text


def must_raise(fn: Callable[..., Any], expected: Expected, mesh: DeviceMesh, placements: Sequence[Any]) -> bool:
    """The call raises an exception of torch's type; the answer is whether it says what torch says too."""
    try:
        _, result = run(fn, expected, mesh, placements)
        values(result)
    except Exception as error:
        if not isinstance(error, type(expected.error)):
            raise Wrong(f"{type(error).__name__}: {error}, not {type(expected.error).__name__}: {expected.error}") from error
        return words(expected.error) in words(error)
    raise Wrong(f"no error, torch raises {type(expected.error).__name__}: {expected.error}")


def words(error: BaseException | None) -> str:
    """The first line of what an error says, without the numbers of a memory address or the like."""
    return str(error).strip().split("\n")[0][:80]


def check_alias(made: Any, result: Any, expected: Expected) -> bool:
    """A write through a result that torch makes a view shows in the arguments; whether there was one."""
    inputs = leaves(expected.after)
    storages = {t.untyped_storage()._cdata for t in inputs if t.numel()}
    pairs = zip(leaves(result, dtorch.Tensor), leaves(expected.result), strict=True)
    wrote = False
    for got, want in pairs:
        if want.untyped_storage()._cdata not in storages or not want.numel():
            continue
        try:
            want.zero_()
        except RuntimeError:  # torch refuses as well: elements shown more than once
            continue
        got.zero_()
        wrote = True
    if wrote:
        equal(values(made), expected.after)
    return wrote


def check_sharded(
    op: Any, name: str, shapes: Sequence[tuple[int, ...]], *, max_samples: int = 3, limit: int = 12,
    dtype: torch.dtype | None = None, fn: Callable[..., Any] | None = None,
) -> Findings:
    """The smallest samples under combinations of placements, each as it is or, if refused, under the policy.

    Args:
        shapes: of meshes; the samples take turns.
    """
    found = Findings()
    fn = reach(fn or op.op)
    dtype = dtype or next((d for d in dtypes_of(op)), None)
    if dtype is None:
        return found
    near = tolerance(op, dtype)
    for turn, (number, given) in enumerate(smallest(op, dtype, max_samples)):
        given = fresh(given)
        expected = expected_of(fn, given)
        if expected.error is not None:
            continue
        shape = shapes[turn % len(shapes)]
        mesh = mesh_of(*shape)
        for placements in combinations(given, len(shape), limit):
            what = f"{name} {str(dtype)[6:]} sample {number} mesh {shape} {placements} {describe(given)}"
            try:
                try:
                    made, result = run(fn, expected, mesh, placements)
                except PlacementError:
                    with dtorch.auto_redistribute():
                        made, result = run(fn, expected, mesh, placements)
                    found.placement_errors += 1
                if leaves(expected.result) or leaves(result, dtorch.Tensor):
                    same_kind(result, expected.result)
                if op.name not in UNINITIALIZED:
                    close(values(result), expected.result, near)
                    if expected.writes:
                        close(values(made), expected.after, near)
                found.ran += 1
            except Exception as error:
                found.note(error, what)
    return found


def smallest(op: Any, dtype: torch.dtype, number: int) -> Iterator[tuple[int, Any]]:
    """The samples with the fewest elements that still have something to cut, largest number of dims first."""
    ranked = []
    for index, sample in enumerate(samples(op, dtype)):
        given = arguments(sample)
        if not is_plain(given):
            continue
        tensors = leaves(given)
        size = sum(t.numel() for t in tensors)
        empty = any(t.numel() == 0 for t in tensors)
        flat = all(t.ndim == 0 for t in tensors)
        ranked.append((empty or flat, size > 4000, index % 2, size, index, given))
    ranked.sort(key=lambda entry: entry[:5])
    for entry in islice(ranked, number):
        yield entry[4], entry[5]


def combinations(given: Any, num_axes: int, limit: int) -> list[tuple[Any, ...]]:
    """Placements of all tensors: one tuple a tensor, each of ``num_axes`` placements."""
    tensors = leaves(given)
    if not tensors:
        return [()]
    choices = []
    for t in tensors:
        each: list[Any] = [Replicate(), *(Shard(d) for d in range(t.ndim))]
        if num_axes == 1:
            choices.append([(p,) for p in each])
        else:
            choices.append([(a, b) for a in each for b in each])
    found = list(_sample(choices, limit, []))
    for group in ([i] for i in range(len(tensors))) if len(tensors) < 4 else ():
        found += _pending(tensors, group, num_axes)
    if len(tensors) > 1:
        found += _pending(tensors, range(len(tensors)), num_axes)
    return found


def _pending(tensors: Sequence[torch.Tensor], group: Sequence[int], num_axes: int) -> list[tuple[Any, ...]]:
    if any(not tensors[i].is_floating_point() or not bool(tensors[i].isfinite().all()) for i in group):
        return []
    whole = (Replicate(),) * num_axes
    summed = (*whole[1:], Partial())
    return [tuple(summed if i in group else whole for i in range(len(tensors)))]


def check_out(op: Any, name: str, shape: tuple[int, ...]) -> Findings:
    """``out=``, of the right shape and empty: it holds the result and is what comes back."""
    found = Findings()
    fn, dtype = reach(op.op), next(iter(dtypes_of(op)), None)
    if dtype is None:
        return found
    mesh = mesh_of(*shape)
    for number, given in smallest(op, dtype, 1):
        given = fresh(given)
        expected = expected_of(fn, given)
        wanted = leaves(expected.result)
        if expected.error is not None or not wanted or not _writes_out(fn, given, wanted):
            continue
        for empty, where in ((False, Replicate()), (True, Replicate()), (False, Shard(0))):
            targets = [
                dtorch.tensor(
                    torch.empty(0, dtype=t.dtype) if empty else torch.zeros_like(t), device_mesh=mesh,
                    placements=[where if t.ndim else Replicate()],
                )
                for t in wanted
            ]
            try:
                first, args, kwargs = place(fresh(given), mesh, [(Replicate(),)] * len(leaves(given)))
                if expected.draws:
                    dtorch.manual_seed(11)
                with warnings.catch_warnings(), dtorch.auto_redistribute(), nullcontext() if leaves(given) else mesh:
                    warnings.simplefilter("ignore")
                    made = fn(first, *args, **kwargs, out=targets[0] if len(targets) == 1 else tuple(targets))
                if any(a is not b for a, b in zip(leaves(made, dtorch.Tensor), targets, strict=True)):
                    raise Wrong("what comes back is not what was given as out")
                if op.name not in UNINITIALIZED:
                    close([t.to_torch() for t in targets], wanted, tolerance(op, dtype))
                found.ran += 1
            except Exception as error:
                found.note(error, f"{name} sample {number} out= {'empty' if empty else where} {describe(given)}")
    return found


def _writes_out(fn: Callable[..., Any], given: Any, wanted: list[torch.Tensor]) -> bool:
    """Whether torch itself takes ``out=`` in this form."""
    first, args, kwargs = fresh(given)
    outs = [torch.zeros_like(t) for t in wanted]
    try:
        fn(first, *args, **kwargs, out=outs[0] if len(outs) == 1 else tuple(outs))
    except Exception:
        return False
    return True


def check_errors(op: Any, name: str) -> Findings:
    """Wrong calls of the entry: where torch raises, so does dtorch, the same type of exception."""
    found = Findings()
    if op.error_inputs_func is None:
        return found
    mesh = mesh_of(1)
    for number, wrong in enumerate(op.error_inputs("cpu")):
        given = arguments(wrong.sample_input)
        if not is_plain(given):
            continue
        given = fresh(given)
        expected = expected_of(reach(op.op), given)
        if expected.error is None:
            continue
        placements = [(Replicate(),)] * len(leaves(given))
        try:
            found.same_words += must_raise(reach(op.op), expected, mesh, placements)
            found.errors += 1
            found.ran += 1
        except Exception as error:
            found.note(error, f"{name} error {number} {describe(given)}")
    return found
