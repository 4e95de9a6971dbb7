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


# ---- a plain tensor first


LATER: dict[str, Any] = {
    "type_as": lambda p, d: p.type_as(d),
    "to": lambda p, d: p.to(d),
    "expand_as": lambda p, d: p[:1].expand_as(d),
    "view_as": lambda p, d: p.view_as(d),
    "reshape_as": lambda p, d: p.reshape_as(d),
    "broadcast_tensors": lambda p, d: torch.broadcast_tensors(p, d)[0],
    "select_scatter": lambda p, d: p.select_scatter(d[0], 0, 1),
    "slice_scatter": lambda p, d: p.slice_scatter(d[:1], 0, 0, 1),
    "as_strided_scatter": lambda p, d: torch.as_strided_scatter(p, d[0, :2], (2,), (1,)),
    "narrow": lambda p, d: p.narrow(0, d.long()[0, 0], 1),
    "where": lambda p, d: p.where(d > 2, 0.0),
    "add": lambda p, d: p + d,
    "__setitem__": lambda p, d: (q := p.clone()).__setitem__(0, d[1]) or q,
    "copy_": lambda p, d: p.clone().copy_(d),
}


@pytest.mark.parametrize("faced", [False, True])
@pytest.mark.parametrize("name", LATER)
def test_a_plain_tensor_may_come_first(name: str, faced: bool) -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    later = dtorch.tensor(plain + 1, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
    made = LATER[name](plain.clone(), dtorch.TorchTensor(later) if faced else later)
    want = LATER[name](plain, plain + 1)
    assert torch.equal(made if type(made) is torch.Tensor else made.to_torch(), want)
