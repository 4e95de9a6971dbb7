"""Weights from files onto meshes: whose bytes, under which names, and what is said when they do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.runtime.files import FileAccess
from dtorch.runtime.kernels.file import read_box, write_box
from dtorch.weights.progress import Progress

st = pytest.importorskip("safetensors.torch")

MESHES = [(2,), (3,), (5,), (2, 2)]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape))


def bits(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.contiguous().reshape(-1).view(torch.uint8).tolist()


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "up.weight": torch.randn(7, 5),
        "up.bias": torch.randn(7),
        "down.weight": torch.randn(10, 3, 4).bfloat16(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "one_row": torch.randn(1, 17),
        "f8": torch.randn(6, 4).to(torch.float8_e4m3fn),
        "f8b": torch.randn(3).to(torch.float8_e5m2),
        "ids": torch.arange(5),
        "flags": torch.tensor([True, False, True]),
        "waves": torch.randn(3, dtype=torch.complex64),
        "wide": torch.randn(4, 2500),
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "x.safetensors"
    st.save_file(samples(), path)
    return path


@pytest.fixture
def per_device() -> Iterator[None]:
    dtorch.init(workers="per-device")
    yield
    dtorch.shutdown()


# ---- reading


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("dim", [0, -1, None])
def test_every_dtype_on_any_mesh_has_the_bits_of_the_file(file: Path, shape: tuple[int, ...], dim: int | None) -> None:
    mesh = mesh_of(shape)
    plan = None if dim is None else {n: [Shard(dim)] * mesh.ndim for n, x in samples().items() if x.ndim}
    loaded = dtorch.load_safetensors(file, mesh, plan)
    for name, x in samples().items():
        assert bits(loaded[name].to_torch()) == bits(x)
    if dim is not None:
        assert loaded["up.weight"].placements == tuple([Shard(dim % 2)] * mesh.ndim)


def test_workers_read_their_share(file: Path, per_device: None) -> None:
    mesh = mesh_of((2, 2))
    x = samples()["wide"]
    loaded = dtorch.load_safetensors(file, mesh, {"wide": [Shard(1), Replicate()]}, names=["wide"])["wide"]
    assert bits(loaded.to_torch()) == bits(x)
    read = [c["bytes_read"] for c in dtorch.statistics().workers.values()]
    assert read == [x.nbytes // 2] * 4


def test_devices_of_one_worker_with_the_same_piece_read_it_once(file: Path) -> None:
    dtorch.init(workers="shared")
    loaded = dtorch.load_safetensors(file, mesh_of((4,)), None, names=["wide"])["wide"]
    pieces = loaded.to_shards()
    loaded.zero_()
    dtorch.synchronize()
    assert all(bits(p) == bits(samples()["wide"]) for p in pieces)
    (counters,) = dtorch.statistics().workers.values()
    assert counters["bytes_read"] == samples()["wide"].nbytes


def test_floats_are_converted_on_the_way_and_integers_are_not(file: Path) -> None:
    loaded = dtorch.load_safetensors(file, mesh_of((2,)), {"up": "colwise"}, dtype=torch.float16)
    assert bits(loaded["up.weight"].to_torch()) == bits(samples()["up.weight"].half())
    assert bits(loaded["down.weight"].to_torch()) == bits(samples()["down.weight"].half())
    assert loaded["ids"].dtype == torch.int64


def test_a_plan_of_styles_goes_by_names(file: Path) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loaded = dtorch.load_safetensors(file, mesh, {"up": "colwise/2", "wide": "rowwise:dp", "ids": [Shard(0), Shard(0)]})
    assert loaded["up.weight"].placements == (Replicate(), Shard(0))
    assert loaded["up.bias"].placements == (Replicate(), Shard(0))
    assert loaded["wide"].placements == (Shard(1), Replicate())
    assert loaded["ids"].placements == (Shard(0), Shard(0))
    assert bits(loaded["wide"].to_torch()) == bits(samples()["wide"])


def test_an_index_and_a_directory(tmp_path: Path) -> None:
    x = samples()
    names = list(x)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for name, own in files.items():
        st.save_file({n: x[n] for n in own}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: f for f, own in files.items() for n in own}}))
    for path in (index, tmp_path, str(tmp_path)):
        loaded = dtorch.load_safetensors(path, mesh_of((3,)))
        assert {n: bits(v.to_torch()) for n, v in loaded.items()} == {n: bits(v) for n, v in x.items()}


def test_what_is_not_there_is_named(file: Path, tmp_path: Path) -> None:
    mesh = mesh_of((2,))
    with pytest.raises(FileNotFoundError, match=r"y.safetensors.*beside it are x.safetensors"):
        dtorch.load_safetensors(file.parent / "y.safetensors", mesh)
    with pytest.raises(FileNotFoundError, match="nothing"):
        dtorch.load_safetensors(tmp_path, mesh)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is another format"):
        dtorch.load_safetensors(tmp_path, mesh)
    with pytest.raises(ValueError, match=r"'up.wait'.*near it are 'up.weight'"):
        dtorch.load_safetensors(file, mesh, names=["up.wait"])
    with pytest.raises(ValueError, match=r"'upp' matches no .*'up"):
        dtorch.load_safetensors(file, mesh, {"upp": "colwise"})
    with pytest.raises(ValueError, match=r"'upp' matches no .*'up"):
        dtorch.load_safetensors(file, mesh, {"upp": [Shard(0)]})
    with pytest.raises(ValueError, match="no summands"):
        dtorch.load_safetensors(file, mesh, {"up": [dtorch.Partial()]})
    with pytest.raises(TypeError, match="DeviceMesh"):
        dtorch.load_safetensors(file, "cpu")  # type: ignore[arg-type]
    (tmp_path / "bad.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"nonsense")
    with pytest.raises(ValueError, match=r"bad.safetensors.*no JSON object"):
        dtorch.load_safetensors(tmp_path / "bad.safetensors", mesh)
    (tmp_path / "bad.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        dtorch.load_safetensors(tmp_path / "bad.safetensors.index.json", mesh)
    (tmp_path / "other.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"gone.safetensors"):
        dtorch.load_safetensors(tmp_path / "other.safetensors.index.json", mesh)


def test_a_file_that_a_worker_does_not_find_is_an_error_of_the_value(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    st.save_file({"x": torch.ones(3)}, path)
    mesh = mesh_of((2,))
    dtorch.load_safetensors(path, mesh)["x"].to_torch()
    from dtorch.session import current_session
    from dtorch.weights.checkpoint import open_checkpoint
    from dtorch.weights.reading import Reader

    reader = Reader(open_checkpoint(path), current_session())
    path.unlink()
    lost = reader.read(reader.checkpoint.tensors["x"], mesh, (0,))
    with pytest.raises(FileNotFoundError, match=r"not on host .*under the same path") as caught:
        lost.to_torch()
    assert isinstance(caught.value, dtorch.OpError)
    st.save_file({"x": torch.ones(4)}, path)
    changed = reader.read(reader.checkpoint.tensors["x"], mesh, (0,))
    with pytest.raises(OSError, match="another file"):
        changed.to_torch()


def test_only_the_folders_of_a_session_may_be_touched(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_bytes(b"12345678")
    (tmp_path / "inner").write_bytes(b"12345678")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "inner")
    files = FileAccess.within([str(tmp_path / "in")], {})
    got = read_box(files, str(tmp_path / "in" / "x"), 8, 0, (8,), ((2, 4),), torch.uint8)
    assert got.tolist() == [51, 52]
    assert files.counters["bytes_read"] == 2
    for path in ("inner", "in/../inner", "in/link"):
        with pytest.raises(PermissionError, match="outside of the folders"):
            read_box(files, str(tmp_path / path), 8, 0, (8,), ((2, 4),), torch.uint8)
        with pytest.raises(PermissionError, match="outside of the folders"):
            write_box(files, str(tmp_path / path), 0, (8,), ((2, 4),), torch.zeros(2, dtype=torch.uint8))


# ---- into modules


def saved(module: torch.nn.Module, path: Path) -> Path:
    st.save_file({n: x.contiguous() for n, x in module.state_dict().items()}, path)
    return path


def test_into_a_native_module_and_into_a_distributed_one(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)).double()
    path = saved(plain, tmp_path / "m.safetensors")
    mesh = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    with mesh:
        native = dtorch.nn.Sequential(dtorch.nn.Linear(5, 7), dtorch.nn.BatchNorm1d(7), dtorch.nn.Linear(7, 3))
    torched = dtorch.distribute(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)),
        mesh, {"0": "colwise", "2": "rowwise"},
    )
    for module in (native, torched):
        before = module[0].weight
        keys = dtorch.load_into(module, path)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert module[0].weight is before
        for name, value in module.state_dict().items():
            assert bits(value.to_torch()) == bits(plain.state_dict()[name].to(value.dtype))
    assert torched[0].weight.placements == (Shard(0),)


def test_names_and_shapes_that_differ_are_reported_as_torch_does(tmp_path: Path) -> None:
    path = saved(torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "c": torch.nn.Linear(2, 2)}), tmp_path / "m.safetensors")

    def make() -> torch.nn.Module:
        return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(2, 2)})

    with pytest.raises(RuntimeError) as theirs:
        make().load_state_dict(st.load_file(path))
    module = dtorch.distribute(make(), mesh_of((2,)), None)
    with pytest.raises(RuntimeError) as ours:
        dtorch.load_into(module, path)

    def parts(error: BaseException) -> list[Any]:  # the order of names within a line is that of the file
        return [sorted(line.replace(".", " ").replace(",", " ").split()) for line in sorted(str(error).splitlines())]

    assert parts(ours.value) == parts(theirs.value)
    with pytest.raises(RuntimeError, match=r"a.bias.*\[4\].*\[5\]"):
        dtorch.load_into(module, path, strict=False)
    del module["a"]
    keys = dtorch.load_into(module, path, strict=False)
    assert sorted(keys.missing_keys) == ["b.bias", "b.weight"]
    assert "c.weight" in keys.unexpected_keys


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * self.scale)


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_found_under_either_name_and_stays_tied(tmp_path: Path, kept: str) -> None:
    torch.manual_seed(2)
    plain = Tied()
    st.save_file({kept: plain.embed.weight.detach()}, tmp_path / "m.safetensors")
    mesh = dtorch.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    with dtorch.empty_init():
        module = Tied()
    assert module.head.weight.is_meta
    assert not module.scale.is_meta
    dtorch.distribute(module, mesh, {"embed": "vocab"}, weights=tmp_path)
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.placements == (Shard(0),)
    ids = torch.tensor([[0, 9, 4]])
    torch.testing.assert_close(module(ids).to_torch(), plain(ids))


def test_what_has_no_values_is_named(tmp_path: Path) -> None:
    st.save_file({"head.weight": torch.zeros(10, 4)}, tmp_path / "m.safetensors")
    mesh = mesh_of((2,))
    with torch.device("meta"):
        module = Tied()
    with pytest.raises(ValueError, match=r"'scale' is on the meta device.*empty_init"):
        dtorch.distribute(module, mesh, None, weights=tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="give weights="):
        dtorch.distribute(module, mesh, None)
    st.save_file({"other": torch.zeros(10, 4)}, tmp_path / "m.safetensors")
    with dtorch.empty_init():
        module = Tied()
    with pytest.raises(RuntimeError, match=r'Unexpected.*"other"[\s\S]*Missing.*"embed.weight"'):
        dtorch.distribute(module, mesh, None, weights=tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match=r"torch.nn.Module"):
        dtorch.load_into({}, tmp_path)  # type: ignore[arg-type]


def test_empty_init_belongs_to_its_block() -> None:
    with dtorch.empty_init():
        assert torch.nn.Linear(2, 2).weight.is_meta
    assert not torch.nn.Linear(2, 2).weight.is_meta


# ---- the bar


class Bar:
    def __init__(self) -> None:
        self.counts: list[int] = []
        self.closed = False

    def update(self, count: int) -> None:
        self.counts.append(count)

    def close(self) -> None:
        self.closed = True


def test_a_bar_is_for_long_work_that_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Bar()
    monkeypatch.setattr("dtorch.weights.progress._bar", lambda total, title: bar)
    with Progress(1 << 40, "x") as quiet:  # standard error is no terminal here
        quiet.add(1 << 30)
    assert bar.counts == []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for total, wanted in ((1000, True), (1 << 40, False)):
        with Progress(total, "x", wanted) as quiet:
            quiet.add(1 << 30)
    assert bar.counts == []
    with Progress(1 << 40, "x") as shown:
        shown.add(1 << 30)
        shown.add(5)
    assert bar.counts == [1 << 30, 5]
    assert bar.closed

    async def inside() -> None:
        with Progress(1 << 40, "x") as quiet:
            quiet.add(1 << 30)

    asyncio.run(inside())
    assert bar.counts == [1 << 30, 5]
