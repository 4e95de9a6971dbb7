"""Functions for patterns of argument types: what is written, and that it does what the slow path does."""

from __future__ import annotations

import ast
from itertools import product
from typing import Any

import pytest
import torch

from dtorch.face import _FACES
from dtorch.ops._patterns import source_of, way_of
from dtorch.ops._ways import NATIVES
from dtorch.runtime.signature import IN_PLACE, ONE, Signature

KINDS = "TNIFSQL"


class Ref:
    """Stands for a tensor: a spec and a slot."""

    def __init__(self, spec: str, slot: int) -> None:
        self._spec, self._slot = spec, slot


class Calls:
    """An op whose slow path is a list."""

    def __init__(self, roles: str, names: tuple[str, ...] = ()) -> None:
        self.sig = Signature()
        self.sig.id, self.sig.shape, self.sig.spec = 7, ONE, None
        self.put: list[Any] = []
        self.slots = [42]
        self.sig.put, self.sig.take = self.put.extend, self.slots.pop
        self.cache: dict[Any, Signature] = {}
        self.slow: list[Any] = []
        self.emitted: list[Any] = []
        self.way = way_of(roles, names, NATIVES, self.cache, self.slowly, self.emit)

    def slowly(self, args: Any, kwargs: Any, frame: Any, cache: Any, key: Any) -> str:
        self.slow.append(key)
        if key is not None:
            cache[key] = self.sig
        return "slow"

    def emit(self, sig: Signature, ins: Any, at: Any, args: Any) -> str:
        self.emitted.append(ins)
        return "emitted"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import sys

        return self.way(args, kwargs, sys._getframe(1))


def test_what_is_written_for_two_tensors() -> None:
    assert source_of("TT", (), NATIVES) == """\
def way(args, kwargs, frame):
    a0, a1, = args
    sig = known((a0._spec, a1._spec))
    if sig is None:
        return slowly(args, kwargs, frame, cache, (a0._spec, a1._spec))
    if sig.shape:
        return given(emit(sig, (a0._slot, a1._slot), source(frame), args))
    try:
        slot = sig.take()
    except IndexError:
        return given(emit(sig, (a0._slot, a1._slot), source(frame), args))
    code = frame.f_code
    if inside(code.co_filename) is False:
        sig.put(((sig.id, slot, a0._slot, a1._slot), code, frame.f_lasti))
    else:
        sig.put(((sig.id, slot, a0._slot, a1._slot), *source(frame)))
    out = new(Tensor)
    out._spec = spec = sig.spec
    out._slot = slot
    return out
"""


@pytest.mark.parametrize("face", [NATIVES, _FACES], ids=["native", "torch"])
def test_every_pattern_of_up_to_four_arguments_is_a_function(face: Any) -> None:
    for num in range(1, 5):
        for roles in map("".join, product(KINDS, repeat=num)):
            if roles.count("L") <= 1:
                for num_named in {0, num // 2, num}:
                    ast.parse(source_of(roles, tuple("abcd"[:num_named]), face))


def test_a_known_call_takes_a_slot_and_notes_the_line() -> None:
    calls = Calls("TTS")
    a, b = Ref("A", 1), Ref("B", 2)
    assert calls(a, b, 0) == "slow"
    made = calls(a, b, 0)
    (call, code, _) = calls.put
    assert call == (7, 42, 1, 2)
    assert code is test_a_known_call_takes_a_slot_and_notes_the_line.__code__
    assert made._slot == 42
    assert calls.slow == [("A", "B", 0)]
    del made._spec  # it was never a tensor


def test_what_is_not_one_new_tensor_is_emitted_and_so_is_a_call_without_a_slot() -> None:
    calls = Calls("TF")
    a = Ref("A", 1)
    calls(a, 2.0)
    calls.slots.clear()
    assert calls(a, 3.0) == "emitted"
    calls.sig.shape = IN_PLACE
    assert calls(a, 4.0) == "emitted"
    assert calls.emitted == [(1, 3.0), (1, 4.0)]
    assert calls.slow == ["A"]  # numbers are no part of the key


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_numbers_too_large_for_a_message_are_left_to_the_slow_path(number: int) -> None:
    calls = Calls("TI")
    a = Ref("A", 1)
    calls(a, 1)
    assert calls(a, number) == "emitted"
    assert calls.put == []


def test_sequences_are_part_of_the_key_with_the_types_of_their_items_and_cannot_be_mistaken_for_each_other() -> None:
    calls = Calls("TQQ")
    a = Ref("A", 1)
    keys = set()
    for given in [((1, 2), (3,)), ((1,), (2, 3)), ((1, 2, 3), ()), ((True, 2), (3,)), ((1.0, 2), (3,)), ([1, 2], [3])]:
        calls.cache.clear()
        calls(a, *given)
        keys.add(calls.slow[-1])
    assert len(keys) == 5  # a list is as good as a tuple
    calls(a, (1, Ref("B", 2)), (3,))
    assert calls.slow[-1] is None  # a tensor where none was


def test_arguments_by_name_are_found_in_any_number() -> None:
    calls = Calls("TSS", ("dim", "keepdim"))
    a = Ref("A", 1)
    calls(a, dim=1, keepdim=True)
    assert calls.slow == [("A", 1, True)]


def test_both_zeros_and_both_kinds_of_one_are_told_apart_where_it_matters() -> None:
    import dtorch

    with dtorch.DeviceMesh("cpu", [0]):
        x = dtorch.ones(2, 2)
        assert torch.equal((x * 1).to_torch(), torch.ones(2, 2))
        assert (x.sum(1, True).shape, x.sum(1, False).shape) == ((2, 1), (2,))
        assert x.to(torch.int64).add(1).dtype is torch.int64
        assert x.to(torch.int64).add(1.0).dtype is torch.float32
