"""Every entrance to an op: functions of torch and its namespaces and methods reach the same row, or the fallback that
``python -m dtorch ops --missing`` lists, or are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import get_overridable_functions

import dtorch
from dtorch.ops import _fallback
from dtorch.ops._op import Op
from dtorch.tensor import TORCH

PLACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
}


def functions() -> Iterator[tuple[str, str, Any]]:
    """(place, name, function) of all that torch lets others override, by the public names."""
    known = {id(fn) for fns in get_overridable_functions().values() for fn in fns}
    for place, holder in PLACES.items():
        for name in dir(holder):
            fn = getattr(holder, name, None)
            if not name.startswith("_") and callable(fn) and not isinstance(fn, type) and id(fn) in known:
                yield place, name, fn


ALL = list(functions())


def test_there_are_as_many_as_torch_has() -> None:
    assert len(ALL) > 1000
    assert {place for place, _, _ in ALL} == set(PLACES)


@pytest.mark.parametrize("place", PLACES)
def test_each_has_a_row_or_the_fallback_or_is_refused_by_name(place: str) -> None:
    generic = _fallback.generic_names()
    missing = set(_fallback.missing_ops())
    lost = []
    for where, name, fn in ALL:
        if where != place or fn in TORCH:
            continue
        full = f"{place}.{name}"
        if full in generic:
            assert full in missing, f"{full} runs on replicated tensors and is not listed"
            continue
        if hasattr(dtorch.Tensor, name) and place == "torch.Tensor":
            continue
        if _fallback._allowed(name, place):
            lost.append(full)
    assert lost == []


def test_forms_of_one_name_share_a_rule() -> None:
    rules: dict[str, dict[str, Any]] = {}
    for place, name, fn in ALL:
        op = TORCH.get(fn)
        if isinstance(op, Op):
            rules.setdefault(name.rstrip("_"), {})[f"{place}.{name}"] = op.rule
    rules.pop("unfold")  # F.unfold takes patches of images, Tensor.unfold is a view
    differ = {
        name: sorted(forms) for name, forms in rules.items()
        if len({getattr(rule, "__qualname__", str(rule)) for rule in forms.values()}) > 1
    }
    assert differ == {}


def test_no_row_is_listed_as_missing() -> None:
    listed = set(_fallback.missing_ops())
    with_row = {f"{place}.{name}" for place, name, fn in ALL if isinstance(TORCH.get(fn), Op) and f"{place}.{name}" in listed}
    # the fallback makes an op of a function when it is first called, under one of its names; it stays on the list
    short = {name.rpartition(".")[2] for name in listed}
    functions = {f"{place}.{name}": fn for place, name, fn in ALL}
    assert {name for name in with_row if TORCH[functions[name]].name.rpartition(".")[2] not in short} == set()
