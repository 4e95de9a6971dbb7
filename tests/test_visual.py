"""Tensors and meshes that one can see."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Placement, Replicate, Shard
from dtorch.runtime.promise import Promise
from dtorch.visual import MAX_SHOWN, grid_of, summary


@pytest.fixture
def mesh() -> DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(x: object, file: io.StringIO) -> str:
    dtorch.visualize_sharding(x, file=file)
    return file.getvalue()


def test_inspect_says_where_everything_is(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(5, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
    about = dtorch.inspect(x)
    assert about.shape == (5, 4)
    assert about.stride == (4, 1)
    assert about.placements == (Shard(0), Replicate())
    assert [(p.device, p.coord, p.box, p.shape, p.size_bytes) for p in about.pieces] == [
        ("cpu:0", (0, 0), ((0, 3), (0, 4)), (3, 4), 48),
        ("cpu:1", (0, 1), ((0, 3), (0, 4)), (3, 4), 48),
        ("cpu:2", (1, 0), ((3, 5), (0, 4)), (2, 4), 32),
        ("cpu:3", (1, 1), ((3, 5), (0, 4)), (2, 4), 32),
    ]
    assert about.is_open
    assert not about.is_fetching
    assert "cpu:2 at (1, 0): [3:5, 0:4], 32 bytes" in str(about)
    assert dtorch.inspect(x + 1).slot != about.slot
    with pytest.raises(AttributeError):
        about.slot = 3  # type: ignore[misc]


def test_inspect_says_who_waits(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(3, device_mesh=mesh)
    promise: Promise[torch.Tensor] = Promise()
    x._fetching = (0, promise)
    promise.add_callback(lambda: None)
    about = dtorch.inspect(x)
    assert (about.is_fetching, about.num_waiters) == (True, 1)
    assert "a fetch is under way, 1 waiting" in str(about)
    promise.set_result(torch.zeros(3))
    about = dtorch.inspect(x)
    assert (about.is_fetching, about.num_waiters) == (False, 0)


def test_inspect_of_a_dead_tensor(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(3, device_mesh=mesh)
    dtorch.shutdown()
    assert not dtorch.inspect(x).is_open
    assert "(closed)" in str(dtorch.inspect(x))


def test_only_tensors_are_inspected() -> None:
    with pytest.raises(TypeError, match=r"expected a dtorch\.Tensor, got Tensor"):
        dtorch.inspect(torch.zeros(2))


@pytest.mark.parametrize(
    ("shape", "placements", "cells"),
    [
        ((8, 4), [Shard(0), Replicate()], [["cpu:0,1"], ["cpu:2,3"]]),
        ((8, 4), [Shard(1), Shard(0)], [["cpu:0", "cpu:2"], ["cpu:1", "cpu:3"]]),
        ((4,), [Shard(0), Partial()], [["cpu:0+1", "cpu:2+3"]]),
        ((2, 2), [Partial(), Replicate()], [["cpu:0+2,1+3"]]),
        ((), [Replicate(), Replicate()], [["cpu:0-3"]]),
        ((3, 2), [Shard(0), Shard(0)], [["cpu:0"], ["cpu:1"], ["cpu:2"]]),
        ((2, 3, 8, 8), [Shard(2), Shard(0)], [["cpu:0", "cpu:2"], ["cpu:1", "cpu:3"]]),
        ((0, 2), [Shard(0), Replicate()], [["cpu:0"]]),
    ],
)
def test_which_device_holds_which_block(
    shape: tuple[int, ...], placements: list[Placement], cells: list[list[str]], mesh: DeviceMesh
) -> None:
    x = dtorch.zeros(*shape, device_mesh=mesh, placements=placements)
    assert [[cell.text for cell in row] for row in grid_of(dtorch.inspect(x)).cells] == cells


def test_same_holders_have_the_same_colour(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(4, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    assert len({cell.colour for row in grid_of(dtorch.inspect(x)).cells for cell in row}) == 4


def test_text_in_a_file_and_colours_on_a_terminal(mesh: DeviceMesh) -> None:
    x = dtorch.zeros(8, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    plain = shown(x, io.StringIO())
    assert plain.splitlines() == [
        'float32[8, 4] on [Shard(dim=0), Shard(dim=1)], DeviceMesh("cpu", [[0, 1], [2, 3]], dim_names=("dp", "tp"))',
        "              dim 1 [0:2]   dim 1 [2:4]",
        "            +-------------+-------------+",
        "dim 0 [0:4] |    cpu:0    |    cpu:1    |",
        "            +-------------+-------------+",
        "dim 0 [4:8] |    cpu:2    |    cpu:3    |",
        "            +-------------+-------------+",
    ]


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "\x1b[38;2;17;17;17;48;2;"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, None),
        ({"TERM": "dumb"}, None),
    ],
)
def test_colours_on_a_terminal_that_has_them(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], start: str | None
) -> None:
    for name in ("COLORTERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    x = dtorch.zeros(8, 400, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    plain, coloured = shown(x, io.StringIO()), shown(x, Terminal())
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain  # however narrow the terminal is
    assert coloured.count("\x1b[0m") == coloured.count(start or "\x1b[") == (4 if start else 0)


def test_a_mesh_is_shown_too(mesh: DeviceMesh) -> None:
    assert "dp=1 | cpu:2 | cpu:3 |" in shown(mesh, io.StringIO())
    assert "|  cpu:0   |" in shown(DeviceMesh("cpu", [0]), io.StringIO())


def test_the_middle_of_a_long_grid_is_left_out() -> None:
    mesh = DeviceMesh("cpu", list(range(40)))
    x = dtorch.zeros(40, 1, device_mesh=mesh, placements=[Shard(0)])
    grid = grid_of(dtorch.inspect(x))
    assert len(grid.rows) == MAX_SHOWN
    assert [row[0].text for row in grid.cells][5:8] == ["cpu:5", "...", "cpu:35"]


class Tags(HTMLParser):
    """Counts tags and checks that they close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "td":
            self.cells.append(data)


def test_html_of_a_tensor(mesh: DeviceMesh) -> None:
    x = dtorch.Tensor(torch.tensor([1.0, 2.0, 6.0, float("nan")]), device_mesh=mesh, placements=[Shard(0), Replicate()])
    for page in (x._repr_html_(), dtorch.TorchTensor(x)._repr_html_()):  # type: ignore[attr-defined]
        tags = Tags()
        tags.feed(page)
        assert tags.open == []
        assert tags.cells == ["cpu:0,1", "cpu:2,3"]
        assert "min 1, max 6, mean 3, 1 NaN" in page
        assert "prefers-color-scheme: dark" in page
        assert "tensor([1., 2., 6., nan])" in page


def test_html_of_a_mesh(mesh: DeviceMesh) -> None:
    tags = Tags()
    tags.feed(mesh._repr_html_())
    assert tags.open == []
    assert tags.cells == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def test_summaries_of_odd_values() -> None:
    assert summary(torch.tensor(1.0)) == summary(torch.ones(2, dtype=torch.bool)) == ""
    assert summary(torch.full((2,), float("inf"))) == "2 infinite"
    assert summary(torch.tensor([1, 3])) == "min 1, max 3, mean 2"


def test_the_plan_of_a_module_shows_who_holds_what(mesh: DeviceMesh) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.Linear(4, 6, bias=False))
    dtorch.distribute(model, mesh, {"0": "colwise", "1": "colwise", "2": "rowwise"})
    plan = dtorch.plan_of(model)
    assert [(row.name, row.count) for row in plan.rows] == [
        ("*.weight", 2), ("*.bias", 2), ("2.weight", 1), ("2.bias", 1), ("3.weight", 1)
    ]  # fmt: skip
    assert plan.rows[0].placed == "dp: Replicate(), tp: Shard(dim=0)"
    held = 2 * (8 + 2) * 4 + (8 + 4) * 4 + 24 * 4
    assert plan.bytes_by_device == {f"cpu:{i}": held for i in range(4)}
    assert "*.weight (x2)  float32[4, 4]" in str(plan)
    assert "cpu:0,2 | cpu:1,3" in str(plan)
    page = plan._repr_html_()
    HTMLParser().feed(page)
    assert page.count("class='grid'") == 5
    assert page.count("class='bar") == 4
    assert "prefers-color-scheme: dark" in page
    with pytest.raises(ValueError, match=r"no parameter of Linear is on a mesh; dtorch\.distribute"):
        dtorch.plan_of(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a module, got int"):
        dtorch.plan_of(3)


def test_the_plan_of_a_native_module(mesh: DeviceMesh) -> None:
    with mesh:
        layer = dtorch.nn.ColumnParallelLinear(4, 6)
    assert dtorch.plan_of(layer).rows[0].about.placements == layer.weight.placements
