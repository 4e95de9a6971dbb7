"""Checkpoints from one mesh to any other, by standard files that workers write in place."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from tests._scripts import WAIT_S, run, start

st = pytest.importorskip("safetensors.torch")


def mesh_of(*shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape))


def bits(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.contiguous().reshape(-1).view(torch.uint8).tolist()


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "m": torch.randn(7, 5),
        "n": torch.randn(5, 3, 6).bfloat16(),
        "row": torch.randn(1, 17),
        "two": torch.arange(2),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "f8": torch.randn(6, 4).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
    }


PLACED = [
    ((2,), [Shard(0)]), ((3,), [Shard(-1)]), ((5,), [Shard(0)]), ((4,), [Replicate()]), ((2, 2), [Shard(0), Shard(-1)]),
    ((2, 4), [Shard(0), Shard(0)]), ((2, 4), [Shard(0), Replicate()]), ((3, 2), [Replicate(), Shard(-1)]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "placed"), PLACED, ids=str)
def test_any_placement_is_a_file_that_everybody_reads(tmp_path: Path, shape: tuple[int, ...], placed: list[Any]) -> None:
    mesh = mesh_of(*shape)
    tensors = {
        name: dtorch.Tensor(x, device_mesh=mesh, placements=placed if x.ndim else [Replicate()] * mesh.ndim)
        for name, x in samples().items()
    }
    before = sum(c["bytes_written"] for c in dtorch.statistics().workers.values())
    path = dtorch.save_safetensors(tensors, tmp_path / "x.safetensors", metadata={"step": "3"})
    written = sum(c["bytes_written"] for c in dtorch.statistics().workers.values()) - before
    assert written == sum(x.nbytes for x in samples().values())  # copies once, and nothing left out
    theirs = st.load_file(path)
    assert {n: bits(x) for n, x in theirs.items()} == {n: bits(x) for n, x in samples().items()}
    with pytest.importorskip("safetensors").safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["x.safetensors"]
    for other in ((2,), (3,), (4,), (5,), (2, 2)):
        cut = [Shard(0)] * len(other)
        loaded = dtorch.load_safetensors(path, mesh_of(*other), {n: cut for n, x in samples().items() if x.ndim})
        assert {n: bits(x.to_torch()) for n, x in loaded.items()} == {n: bits(x) for n, x in samples().items()}


def test_pieces_cut_from_one_tensor_are_no_jumble(tmp_path: Path) -> None:
    gate, up = torch.randn(10, 3), torch.randn(10, 3)
    x = dtorch.Tensor(torch.cat([gate, up]), device_mesh=mesh_of(8), placements=[Shard(0, 4)])
    path = dtorch.save_safetensors({"x": x, "up": x[10:], "turned": x.t()}, tmp_path / "x.safetensors")
    for n in (1, 2, 4):
        loaded = dtorch.load_safetensors(path, mesh_of(n), {"x": [Shard(0)], "turned": [Shard(0)]})
        assert torch.equal(loaded["x"].to_torch(), torch.cat([gate, up]))
        assert torch.equal(loaded["up"].to_torch(), up)
        assert torch.equal(loaded["turned"].to_torch(), torch.cat([gate, up]).t())


def test_each_worker_writes_its_share(tmp_path: Path) -> None:
    dtorch.init(workers="per-device")
    try:
        mesh = mesh_of(2, 2)
        cut = dtorch.rand(40, 30, device_mesh=mesh, placements=[Shard(1), Shard(0)])
        copies = {f"c{i}": dtorch.rand(100, device_mesh=mesh) for i in range(8)}
        half = dtorch.from_shards([torch.full((8, 2), float(i)) for i in range(4)], device_mesh=mesh,
                                  placements=[Partial(), Partial("max")])
        dtorch.save_safetensors({"cut": cut, "half": half, **copies}, tmp_path / "x.safetensors")
        written = [c["bytes_written"] for c in dtorch.statistics().workers.values()]
        assert sum(written) == cut.nbytes + half.nbytes + 8 * 400
        assert written == [sum(written) / 4] * 4
        theirs = st.load_file(tmp_path / "x.safetensors")
        assert torch.equal(theirs["cut"], cut.to_torch())
        assert torch.equal(theirs["half"], torch.full((8, 2), 4.0))
        again = dtorch.load_safetensors(tmp_path / "x.safetensors", mesh, {"half": [Shard(0), Shard(0)]})["half"]
        assert again.sum().item() == 64
    finally:
        dtorch.shutdown()


def test_a_module_with_tied_weights_and_stages_on_two_meshes(tmp_path: Path) -> None:
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    with first:
        embed = dtorch.nn.Embedding(9, 4)
    with second:
        head = dtorch.nn.Linear(4, 9)
    staged = dtorch.nn.ModuleDict({"embed": embed, "again": embed, "head": head})
    dtorch.save_safetensors(staged, tmp_path / "x.safetensors")
    assert sorted(st.load_file(tmp_path / "x.safetensors")) == ["embed.weight", "head.bias", "head.weight"]
    # pipeline stages -> one tensor-parallel mesh
    layer = torch.nn.Embedding(9, 4)
    plain = torch.nn.ModuleDict({"embed": layer, "again": layer, "head": torch.nn.Linear(4, 9)})
    dtorch.distribute(plain, mesh_of(3), {"embed": "vocab", "head": "colwise"}, weights=tmp_path / "x.safetensors")
    for name, value in staged.state_dict().items():
        assert torch.equal(plain.state_dict()[name].to_torch(), value.to_torch())
    loaded = dtorch.load_safetensors(tmp_path / "x.safetensors", mesh_of(2))
    assert loaded["again.weight"] is loaded["embed.weight"]
    with torch.no_grad():
        theirs = torch.nn.ModuleDict({"embed": layer, "again": layer, "head": torch.nn.Linear(4, 9)})
        theirs["embed"].weight = torch.nn.Parameter(torch.zeros(9, 4))
        theirs["again"] = theirs["embed"]
    st.load_model(theirs, tmp_path / "x.safetensors")
    assert torch.equal(theirs["again"].weight, embed.weight.to_torch())


def test_shards_and_their_index(tmp_path: Path) -> None:
    mesh = mesh_of(3)
    tensors: dict[str, Any] = {n: dtorch.Tensor(x, device_mesh=mesh) for n, x in samples().items()}
    tensors["plain"] = torch.randn(4, 4)
    path = dtorch.save_safetensors(tensors, tmp_path / "out", max_shard_size="0.2KB")
    assert path == tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2

    def check() -> None:
        loaded = dtorch.load_safetensors(tmp_path / "out", mesh_of(2))
        assert {n: bits(x.to_torch()) for n, x in loaded.items()} == {
            n: bits(x.to_torch() if isinstance(x, dtorch.Tensor) else x) for n, x in tensors.items()
        }

    def names() -> list[str]:
        return sorted(f.name for f in (tmp_path / "out").iterdir())

    check()
    old = names()
    tensors["m"] = tensors["m"] + 1
    dtorch.save_safetensors(tensors, tmp_path / "out", max_shard_size=200)  # over itself: other names, old ones gone
    check()
    assert len(names()) == len(old)
    assert set(names()) & set(old) == {"model.safetensors.index.json"}
    dtorch.save_safetensors(tensors, tmp_path / "out", max_shard_size="1GB")
    assert names() == ["model.safetensors"]
    check()
    dtorch.save_safetensors(tensors, tmp_path / "out" / "model.safetensors", max_shard_size=200)
    check()
    assert names() == old
    loaded = dtorch.load_safetensors(tmp_path / "out" / "model.safetensors", mesh)  # by the name that it was saved under
    assert set(loaded) == set(tensors)


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of(2)
    path = tmp_path / "x.safetensors"
    dtorch.save_safetensors({"x": dtorch.ones(3, device_mesh=mesh)}, path)
    before = path.read_bytes()
    bad = dtorch.ones(4, device_mesh=mesh)[torch.tensor([9])]
    with pytest.raises(IndexError):
        dtorch.save_safetensors({"x": dtorch.zeros(3, device_mesh=mesh), "bad": bad}, path)

    def no_room(*facts: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space"):
        dtorch.save_safetensors({"x": dtorch.zeros(3, device_mesh=mesh)}, path)
    monkeypatch.setattr("dtorch.weights.saving._Writer.finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    monkeypatch.setattr("os.posix_fallocate", lambda *facts: None)
    with pytest.raises(KeyboardInterrupt):
        dtorch.save_safetensors({"x": dtorch.zeros(3, device_mesh=mesh)}, path)
    dtorch.synchronize()
    dead = dtorch.ones(3, device_mesh=mesh)
    dtorch.shutdown()
    with pytest.raises(dtorch.SessionClosedError):
        dtorch.save_safetensors({"x": dead}, path)
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["x.safetensors"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    import dtorch
    from safetensors.torch import load_file
    from dtorch.weights.checkpoint import open_checkpoint

    folder = Path("kept")
    folder.mkdir()
    old, new = ({f"x{i}": torch.full((4,), value) for i in range(4)} for value in (1.0, 2.0))

    def save(tensors, size):
        dtorch.save_safetensors(tensors, folder, max_shard_size=size, progress=False)

    def found():
        made = open_checkpoint(folder)
        files = {stored.path for stored in made.tensors.values()}
        values = {name: value for file in files for name, value in load_file(file).items()}
        assert sorted(values) == sorted(old)
        (value,) = {float(x) for tensor in values.values() for x in tensor}
        return value

    def save_and_die(size, at):
        left = at

        def hook(event, args):
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.truncate") and "kept" in str(args[0]):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(hook)
        save(new, size)

    for sizes in ((None, None), (20, 20), (None, 20), (20, None), (20, 40)):
        at, seen = 0, []
        while True:
            for file in folder.iterdir():
                file.unlink()
            save(old, sizes[0])
            pid = os.fork()
            if pid == 0:
                save_and_die(sizes[1], at)
                os._exit(0)
            status = os.waitpid(pid, 0)[1]
            seen.append(found())
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            at += 1
        assert seen == sorted(seen) and seen[0] == 1 and seen[-1] == 2, seen
        assert len(seen) > 4
    print("done")
"""


def test_whoever_is_killed_while_saving_leaves_the_old_or_the_new_whole(tmp_path: Path) -> None:
    """At every opening, naming and removing of a file, from one file or several to one or several."""
    assert run(tmp_path, KILLED).split() == ["done"]


def test_a_client_that_is_killed_while_workers_write_leaves_the_old(tmp_path: Path) -> None:
    code = """
        import os, signal
        import dtorch
        from dtorch.weights import saving

        mesh = dtorch.DeviceMesh("cpu", [0, 1])
        x = {"x": dtorch.ones(100_000, device_mesh=mesh, placements=[dtorch.Shard(0)])}
        dtorch.save_safetensors(x, "x.safetensors", progress=False)

        def die(self):
            dtorch.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

        saving._Writer.finish = die
        dtorch.save_safetensors({"x": x["x"] * 2}, "x.safetensors", progress=False)
    """
    process = start(tmp_path, code)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    assert torch.equal(st.load_file(tmp_path / "x.safetensors")["x"], torch.ones(100_000))
    left = [f for f in tmp_path.iterdir() if f.suffix == ".tmp"]
    assert len(left) == 1  # hidden, and of no reader's concern
    assert left[0].name.startswith(".x.")


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    x = dtorch.ones(3, device_mesh=mesh_of(2))
    with pytest.raises(ValueError, match=r"'x' is torch.complex128"):
        dtorch.save_safetensors({"x": x.to(torch.complex128)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="'x' is on the meta device"):
        dtorch.save_safetensors({"x": torch.empty(2, device="meta")}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="got 'x': int"):
        dtorch.save_safetensors({"x": 3}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"a .safetensors file or a directory"):
        dtorch.save_safetensors({"x": x}, tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match="no directory"):
        dtorch.save_safetensors({"x": x}, tmp_path / "gone" / "x.safetensors")
    with pytest.raises(ValueError, match="'5XB'"):
        dtorch.save_safetensors({"x": x}, tmp_path, max_shard_size="5XB")
    assert list(tmp_path.iterdir()) == []
