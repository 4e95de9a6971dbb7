"""dtorch/mesh.py"""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from typing import Any, cast

import numpy as np
import pytest

from dtorch import mesh as mesh_module
from dtorch.mesh import DeviceMesh, current_mesh, init_device_mesh
from dtorch.transport.errors import DTorchError, MeshError

CUBE = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))


def test_facts() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], dim_names=("dp", "tp"))
    assert (mesh.ndim, mesh.shape, mesh.device_type, mesh.devices) == (2, (2, 2), "cpu", (0, 1, 2, 3))
    assert mesh.dim_names == mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.mesh == [[0, 1], [2, 3]]
    assert (mesh.size(), mesh.size(0), mesh.size("tp"), mesh.size(-1)) == (4, 2, 2, 2)
    assert mesh.coords() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (mesh.axis("dp"), mesh.axis("tp"), mesh.axis(-1)) == (0, 1, 1)
    assert mesh.key == ("cpu", (0, 1, 2, 3), (2, 2))


def test_ids_in_every_form() -> None:
    two = DeviceMesh("cpu", [[4, 5], [6, 7]])
    assert DeviceMesh("cpu", np.array([[4, 5], [6, 7]])) == two
    assert DeviceMesh("cpu", ((4, 5), range(6, 8))) == two
    assert DeviceMesh("cpu", [np.arange(4, 6).tolist(), [np.int64(6), 7]]) == two
    assert DeviceMesh("cuda") == DeviceMesh("cuda", 0) == DeviceMesh("cuda", [0])
    assert DeviceMesh("cuda", 3).devices == (3,)
    assert DeviceMesh("cuda", np.array(3)).shape == (1,)
    assert DeviceMesh("cpu", [[[0]]]).shape == (1, 1, 1)


def test_ids_in_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    assert DeviceMesh("cpu", torch.arange(4).view(2, 2)) == DeviceMesh("cpu", [[0, 1], [2, 3]])


def test_equal_by_value() -> None:
    a, b = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",)), DeviceMesh("cpu", [0, 1], dim_names=["x"])
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b}) == 1
    for other in (
        DeviceMesh("cuda", [0, 1], dim_names=("x",)),
        DeviceMesh("cpu", [1, 0], dim_names=("x",)),
        DeviceMesh("cpu", [0, 1]),
        DeviceMesh("cpu", [[0, 1]], dim_names=("x", "y")),
        "mesh",
    ):
        assert a != other


def test_repr_can_be_evaluated() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], dim_names=("dp", "tp"))
    assert repr(mesh) == 'DeviceMesh("cpu", [[0, 1], [2, 3]], dim_names=("dp", "tp"))'
    assert repr(DeviceMesh("cuda")) == 'DeviceMesh("cuda", [0])'
    for each in (mesh, CUBE, DeviceMesh("cpu", [[[0, 1]]]), CUBE["tp"]):
        assert eval(repr(each)) == each


def test_survives_pickling_and_copying() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    mesh["b", "c"].merge("bc")
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert again["a", "bc"].shape == (2, 4)
    assert copy.deepcopy(mesh) == copy.copy(mesh) == mesh
    assert pickle.loads(pickle.dumps(DeviceMesh("cpu", [0, 1]))) == DeviceMesh("cpu", [0, 1])


def test_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        CUBE.shape = (1,)
    with pytest.raises(AttributeError, match="immutable"):
        del CUBE.shape
    assert not hasattr(CUBE, "__dict__")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DeviceMesh("cpu", [0, 1, 0]), r"each device id once, got \[0\] more than once"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "nested lists of equal lengths"),
        (lambda: DeviceMesh("cpu", [0, [1]]), "nested lists of equal lengths"),
        (lambda: DeviceMesh("cpu", [0, -1]), "at least 0, got -1"),
        (lambda: DeviceMesh("cpu", []), "at least one device"),
        (lambda: DeviceMesh("cpu", [[], []]), "at least one device"),
        (lambda: DeviceMesh("cpu", [0.0]), "ids as ints, got 0.0 of type float"),
        (lambda: DeviceMesh("cpu", [True]), "ids as ints, got True"),
        (lambda: DeviceMesh("cpu", "01"), "ids as ints, got '01'"),
        (lambda: DeviceMesh("cpu", [0, 1], dim_names=("a", "b")), "Expected 1 names, .* got 2"),
        (lambda: DeviceMesh("cpu", [[0, 1]], dim_names=("a", "a")), "a different name"),
        (lambda: DeviceMesh("cpu", [0], dim_names=cast(Any, (3,))), "as strings"),
        (lambda: DeviceMesh("cpu", [0], dim_names=("a",), mesh_dim_names=("b",)), "give one"),
        (lambda: DeviceMesh("tpu"), "type out of 'cpu', 'cuda', got 'tpu'"),
        (lambda: DeviceMesh("cuda:1"), r"give ids apart from the type"),
        (lambda: init_device_mesh("cpu", (2, 0)), "sizes of at least 1"),
        (lambda: init_device_mesh("cpu", ()), "sizes of at least 1"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("a", "b")), "Expected 1 names"),
        (lambda: CUBE["ep"], "axis out of 'pp', 'dp', 'tp', got 'ep'"),
        (lambda: CUBE["dp", "dp"], "each mesh axis once"),
        (lambda: CUBE[cast(Any, 0)], r"use unbind\(axis\)"),
        (lambda: CUBE[()], "Expected names of mesh axes"),
        (lambda: CUBE.axis("ep"), "axis out of"),
        (lambda: CUBE.axis(3), "axis from -3 to 2, got 3"),
        (lambda: CUBE.axis(cast(Any, 1.0)), "index or name"),
        (lambda: CUBE.unbind("ep"), "axis out of"),
        (lambda: DeviceMesh("cpu", [0, 1])["x"], "a mesh with names"),
        (lambda: DeviceMesh("cpu", [0, 1]).merge(), "a name for the merged axis"),
        (lambda: CUBE["dp", "tp"].merge("pp"), "got 'pp', which already means pp"),
    ],
)
def test_nonsense_is_refused_in_words(make: Any, text: str) -> None:
    with pytest.raises(MeshError, match=text) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DTorchError)


def test_further_device_kinds_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "device_kinds", {"cpu", "cuda", "xpu"})
    assert DeviceMesh("xpu").device_type == "xpu"


def test_init_device_mesh() -> None:
    assert init_device_mesh("cpu", (2, 2)) == DeviceMesh("cpu", [[0, 1], [2, 3]])
    assert init_device_mesh("cuda", (3,), mesh_dim_names=("x",)) == DeviceMesh("cuda", [0, 1, 2], dim_names=("x",))


def test_unbind() -> None:
    first, second = CUBE.unbind("pp")
    assert first == DeviceMesh("cpu", [[0, 1], [2, 3], [4, 5]], dim_names=("dp", "tp"))
    assert second == DeviceMesh("cpu", [[6, 7], [8, 9], [10, 11]], dim_names=("dp", "tp"))
    assert [m.mesh for m in CUBE.unbind(-1)] == [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]]
    assert CUBE.unbind(1) == CUBE.unbind("dp")
    assert DeviceMesh("cpu", [5, 7], dim_names=("x",)).unbind("x") == [DeviceMesh("cpu", 5), DeviceMesh("cpu", 7)]
    assert [m.dim_names for m in DeviceMesh("cpu", [[0, 1]]).unbind(0)] == [None]


def test_slicing_by_name() -> None:
    assert CUBE["tp"] == DeviceMesh("cpu", [0, 1], dim_names=("tp",))
    assert CUBE["pp"].devices == (0, 6)
    assert CUBE["pp", "tp"] == DeviceMesh("cpu", [[0, 1], [6, 7]], dim_names=("pp", "tp"))
    assert CUBE["tp", "pp"].mesh == [[0, 6], [1, 7]]
    assert CUBE["pp", "dp", "tp"] is CUBE
    assert CUBE["pp", "tp"]["tp"] == CUBE["tp"]
    assert CUBE.unbind("pp")[1]["tp"].devices == (6, 7)
    with pytest.raises(TypeError):
        iter(cast(Any, CUBE))


def test_merged_axes_of_size_one() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1, 1), mesh_dim_names=("d1", "d2", "d3", "d4"))
    mesh["d2", "d3"].merge("d23")
    assert mesh["d1", "d23", "d4"].shape == (1, 1, 1)
    assert mesh["d1", "d23", "d4"].dim_names == ("d1", "d23", "d4")


def test_merged_axes_are_row_major_and_merging_twice_changes_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 3, 2), mesh_dim_names=("d1", "d2", "d3", "d4"))
    merged = mesh["d2", "d3"].merge("d23")
    assert merged == DeviceMesh("cpu", [0, 2, 4, 6, 8, 10], dim_names=("d23",))
    assert mesh["d2", "d3"].merge("d23") == mesh["d2", "d3"].flatten("d23") == mesh["d23"] == merged
    assert merged.merge("d23") is merged
    three = mesh["d1", "d23", "d4"]
    assert three.mesh == np.arange(24).reshape(2, 6, 2).tolist()
    assert mesh.shape == (2, 2, 3, 2)  # the mesh itself stays
    # merging what was merged
    assert three["d1", "d23"].merge("d123").devices == tuple(range(0, 24, 2))
    assert mesh["d123"] == three["d123"]
    assert mesh["d4", "d123"].shape == (2, 12)
    # a name is known to everything sliced from the mesh, where its axes are
    assert mesh.unbind("d1")[1]["d23", "d4"].mesh == np.arange(12, 24).reshape(6, 2).tolist()
    with pytest.raises(MeshError, match="out of 'd1', got 'd23'"):
        mesh["d1"]["d23"]
    with pytest.raises(MeshError, match="got 'd2'"):
        three["d2"]
    with pytest.raises(MeshError, match="share an axis"):
        mesh["d23", "d3"]
    with pytest.raises(MeshError, match="already means d2, d3"):
        mesh["d3", "d4"].merge("d23")
    with pytest.raises(MeshError, match=r"'d4', 'd23', 'd123', got 'zz'"):
        mesh["zz"]


def test_merging_names_itself_and_needs_no_names() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.flatten().dim_names == ("dp_tp",)
    assert mesh["dp_tp"].devices == (0, 1, 2, 3)
    assert DeviceMesh("cpu", [[0, 1], [2, 3]]).merge("all") == DeviceMesh("cpu", range(4), dim_names=("all",))


def test_two_meshes_do_not_share_merged_names() -> None:
    a, b = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y")) for _ in range(2))
    a.merge("xy")
    assert a == b
    with pytest.raises(MeshError):
        b["xy"]


# ---- the default mesh

A, B = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])


def test_blocks_nest() -> None:
    assert current_mesh() is None
    with A as entered:
        assert entered is A
        assert current_mesh() is A
        with B:
            assert current_mesh() is B
            with A:  # the same object again
                assert current_mesh() is A
            assert current_mesh() is B
        assert current_mesh() is A
    assert current_mesh() is None


def test_a_block_ends_on_errors_too() -> None:
    with pytest.raises(ZeroDivisionError), A:
        _ = 1 / 0
    assert current_mesh() is None


async def _use(mesh: DeviceMesh, mine: asyncio.Event, other: asyncio.Event) -> list[DeviceMesh | None]:
    seen = [current_mesh()]
    with mesh:
        mine.set()
        await other.wait()  # 1. both tasks are inside their blocks
        seen.append(current_mesh())
        await asyncio.sleep(0)
        with B:
            await asyncio.sleep(0)
            seen.append(current_mesh())
        seen.append(current_mesh())
    seen.append(current_mesh())  # 2. one task has left, the other may be inside
    return seen


def test_interleaved_tasks_do_not_see_each_other() -> None:
    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        c = DeviceMesh("cpu", [7])
        with c:  # tasks start with their creator's mesh
            tasks = [
                asyncio.create_task(_use(mesh, *events))
                for mesh, events in ((A, (first, second)), (B, (second, first)), (A, (first, second)))
            ]
        assert current_mesh() is None
        found = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert found == [[c, A, B, A, c], [c, B, B, B, c], [c, A, B, A, c]]
        assert current_mesh() is None

    asyncio.run(main())


def test_threads_start_without_a_mesh() -> None:
    seen: list[DeviceMesh | None] = []
    with A:
        thread = threading.Thread(target=lambda: seen.append(current_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_closing_a_generator_elsewhere_leaves_other_blocks_alone() -> None:
    def inside() -> Any:
        with A:
            yield

    generator = inside()
    next(generator)
    with B:
        generator.close()
        assert current_mesh() is B
    assert current_mesh() is None


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(
        mesh_module, "on_enter", [lambda mesh: log.append((mesh, current_mesh())), lambda mesh: log.append("second")]
    )
    monkeypatch.setattr(mesh_module, "on_exit", [lambda: log.append(current_mesh()), lambda: log.append("last")])
    with A, B:
        log.append("body")
    assert log == [(A, A), "second", (B, B), "second", "body", "last", B, "last", A]


def test_a_hook_that_raises_does_not_leave_the_mesh_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("hook")

    monkeypatch.setattr(mesh_module, "on_enter", [fail])
    with pytest.raises(RuntimeError, match="hook"), A:
        pass
    assert current_mesh() is None
    monkeypatch.setattr(mesh_module, "on_enter", [])
    monkeypatch.setattr(mesh_module, "on_exit", [fail])
    with pytest.raises(RuntimeError, match="hook"), A:
        pass
    assert current_mesh() is None
