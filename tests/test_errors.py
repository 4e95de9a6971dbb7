"""Errors that lead home: the user's statement, in the user's words, and the call that would be legal."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import dtorch
from dtorch import PlacementError, Replicate, Shard
from dtorch.expressions import spoken
from dtorch.lines import extent, line_at, place

MESH = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
in_words = pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions know no columns before Python 3.11")


@pytest.fixture(scope="module")
def rows() -> dtorch.Tensor:
    return dtorch.rand(4, 4, device_mesh=MESH, placements=[Shard(0)])


@pytest.fixture(scope="module")
def columns() -> dtorch.Tensor:
    return dtorch.rand(4, 4, device_mesh=MESH, placements=[Shard(1)])


def test_an_op_that_fails_shows_the_whole_statement_and_the_mesh() -> None:
    x = dtorch.arange(4, device_mesh=MESH)
    index = dtorch.tensor([1, 9], device_mesh=MESH)
    picked = torch.index_select(
        x,
        0, index)
    with pytest.raises(IndexError) as failed:
        (picked + 1).to_torch()
    error: Any = failed.value
    assert error.location.startswith(f"{__file__}:")
    assert error.source == "picked = torch.index_select(\n    x,\n    0, index)"
    assert error.mesh == str(MESH)
    lines = str(error).splitlines()
    assert lines[1:5] == [f"  at {error.location}", "     picked = torch.index_select(", "         x,", "         0, index)"]
    assert lines[5] == f"  in torch.index_select on worker 0 cpu:0 of {MESH}"
    assert lines[6:8] == ["  input 0: int64[4] on [Replicate()]", "  input 1: int64[2] on [Replicate()]"]
    if sys.version_info >= (3, 11):
        assert "Traceback on worker 0" in error.__notes__[0]


@in_words
def test_a_placement_error_says_the_call_that_is_legal(rows: dtorch.Tensor, columns: dtorch.Tensor) -> None:
    class Holder:
        weight = rows

    holder, fixes = Holder(), []
    calls: list[Any] = [
        lambda: rows @ columns,
        lambda: holder.weight.matmul(columns + 1),
        lambda: torch.cat([rows, columns], dim=0),
        lambda: torch.add(input=columns, other=rows * 2, alpha=2),
        lambda: torch.linalg.svd(rows),
        lambda: torch.nn.functional.cross_entropy(rows, columns),
    ]
    for call in calls:
        with pytest.raises(PlacementError) as refused:
            call()
        error = refused.value
        assert error.fix in str(error)
        assert error.location.startswith(f"{__file__}:")
        assert error.mesh == str(MESH)
        assert str(error).count("The nearest legal signature") == 1
        names = {"rows": rows, "columns": columns, "holder": holder, "torch": torch, "Shard": Shard, "Replicate": Replicate}
        made = eval(error.fix, names)  # it is as legal as it says
        assert made is not None
        fixes.append(error.fix)
    assert fixes[0] == "rows @ columns.redistribute(placements=[Replicate()])"
    assert fixes[1] == "holder.weight.matmul((columns + 1).redistribute(placements=[Replicate()]))"
    assert fixes[2] == "torch.cat([rows.redistribute(placements=[Shard(dim=1)]), columns], dim=0)"
    assert fixes[3].startswith("torch.add(input=columns.redistribute(")
    assert fixes[4] == "torch.linalg.svd(rows.redistribute(placements=[Replicate()]))"


@in_words
def test_inputs_of_a_call_deeper_down_are_known_by_name_or_number(rows: dtorch.Tensor, columns: dtorch.Tensor) -> None:
    def library(a: Any, b: Any) -> Any:
        return a @ b

    names = {"__file__": torch.__file__.replace("__init__", "inside"), "library": None}
    source = "def library(a, b):\n    return a @ b\n"
    exec(compile(source, names["__file__"], "exec"), names)  # type: ignore[arg-type]  # code that counts as torch's own
    inside: Any = names["library"]
    with pytest.raises(PlacementError) as refused:
        inside(rows, columns)
    assert refused.value.fix == "inside(rows, columns.redistribute(placements=[Replicate()]))"
    assert refused.value.source == "inside(rows, columns)"
    with pytest.raises(PlacementError) as refused:
        inside(rows, columns.clone())
    assert refused.value.fix == "input1.redistribute(placements=[Replicate()])"


def test_the_nearest_signature_is_that_of_the_axis_that_does_not_fit() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dtorch.rand(4, 4, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    y = dtorch.rand(4, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    with pytest.raises(PlacementError, match="nearest legal signature on mesh axis 'tp': ") as refused:
        x + y
    assert refused.value.legal[0] in [f"(Shard(dim={d}), Shard(dim={d})) -> Shard(dim={d})" for d in (0, 1)]


def test_where_a_statement_ends() -> None:
    assert extent(["f(a,\n", "  b)\n", "g()\n"]) == 2
    assert extent(["if x @ y:\n", "    pass\n"]) == 1
    assert extent(["  b)\n", "g()\n"]) == 1
    assert extent(["f('(')  # (\n", "g()\n"]) == 1
    assert extent(["f(\n"] * 3) == 3
    assert extent([]) == 0
    assert line_at(None) == ("", "")
    assert line_at(("no such file", 3)) == ("no such file:3", "")
    assert place("a.py", 3) == "a.py:3"


def test_an_expression_without_source_has_no_words() -> None:
    names: dict[str, Any] = {"sys": sys}
    exec(compile("frame = sys._getframe()", "<made up>", "exec"), names)
    said = spoken(names["frame"], (1, MESH), {}, dtorch.DeviceMesh)
    assert said.text == ""
    assert said.spans == (None,)
    assert spoken(None, (), {}, dtorch.DeviceMesh).spans == ()


def test_the_errors_survive_a_copy(rows: dtorch.Tensor, columns: dtorch.Tensor) -> None:
    with pytest.raises(PlacementError) as refused:
        rows + columns
    error = refused.value
    assert str(type(error)(*error.args)) == str(error)
