"""A plan before anything runs: the same placements, bytes and memory as when it runs, and nothing is touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.cli import main
from dtorch.forecast.command import UsageError, inputs_of, mesh_of, plan_of
from tests._untimed import untimed

MESH = dtorch.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


class Block(torch.nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 24)
        self.up = torch.nn.Linear(24, 30)
        self.down = torch.nn.Linear(30, 24)
        self.head = torch.nn.Linear(24, 50, bias=False)
        self.register_buffer("scale", torch.ones(24))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        return self.head(x + self.down(self.up(x).relu())).softmax(-1)


PLAN = {"embed": "vocab", "up": "colwise", "down": "rowwise", "head": "colwise"}
IDS = torch.zeros(4, 7, dtype=torch.long)


def test_a_forward_sends_and_holds_what_was_said() -> None:
    ids = torch.arange(40 * 50).reshape(40, 50) % 50
    said = dtorch.explain(Block(), MESH, PLAN, ids)
    assert said.note == ""
    dtorch.init(workers="per-device")
    try:
        module = dtorch.distribute(Block(), MESH, PLAN)
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            row = next(r for r in said.parameters if r.name == name)
            assert (row.shape, row.placements) == (tuple(value.shape), value.placements)
        dtorch.memory_stats(MESH)
        module(ids).to_torch()
        dtorch.synchronize()
        before = dtorch.memory_stats(MESH, reset_peak=True)
        with untimed(), dtorch.profile() as prof:
            out = module(ids)
        for row, old, new in zip(said.devices, before, dtorch.memory_stats(MESH), strict=True):
            assert row.device == old.device
            assert row.parameter_bytes <= old.allocated
            assert row.activation_bytes is not None
            assert row.activation_bytes == pytest.approx(new.peak - old.allocated, rel=0.1)
        sent: dict[str, int] = {}
        for event in prof.events:
            if event.kind == "communication":
                sent[event.row] = sent.get(event.row, 0) + event.bytes
        assert sum(r.bytes_per_device or 0 for r in said.communication) == max(sent.values())
        del out
    finally:
        dtorch.shutdown()


def test_layers_are_named_and_their_communication_is_of_its_kind() -> None:
    said = dtorch.explain(Block(tied=True), MESH, PLAN, IDS)
    assert [(r.layer, r.op, r.kind) for r in said.communication] == [
        ("embed", "redistribute", "all-reduce"), ("down", "redistribute", "all-reduce"), ("Block", "softmax", "all-reduce"),
        ("Block", "redistribute", "all-gather"),
    ]  # fmt: skip
    assert said.communication[1].bytes_per_device == 2 * (2 * 7 * 24 * 4)  # to each of the two others
    tied = {r.name: r.tied_to for r in said.parameters}
    assert tied["head.weight"] == "embed.weight"
    assert said.devices[0].parameter_bytes == (17 * 24 + 10 * 24 + 10 + 24 * 10 + 24 + 24) * 4


def test_nothing_is_started_made_or_changed() -> None:
    sessions = sys.modules["dtorch.session"]
    before = sessions._session
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(1 << 20, 1 << 20), torch.nn.Linear(1 << 20, 1 << 20))
    params = list(module.parameters())
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    said = dtorch.explain(module, DeviceMesh("cuda", list(range(8))), "auto", torch.empty(2, 1 << 20, device="meta"))
    assert sum(r.bytes_per_device for r in said.parameters) > 1 << 40
    assert sessions._session is before
    assert all(a is b for a, b in zip(params, module.parameters(), strict=True))
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks
    assert not module._forward_hooks
    dtorch.distribute(Block(), MESH, PLAN)  # and the same again, for real


def test_what_is_on_a_mesh_already_is_explained_where_it_is() -> None:
    module = dtorch.distribute(Block(), MESH, PLAN)
    assert dtorch.explain(module, inputs=IDS) == dtorch.explain(Block(), MESH, PLAN, IDS)
    assert module.up.weight.to_torch().shape == (30, 24)

    def make() -> Any:
        with MESH["tp"]:
            up, down = dtorch.nn.ColumnParallelLinear(4, 6), dtorch.nn.RowParallelLinearWithReplicateOutput(6, 4)
            net = dtorch.nn.Sequential(up, down)
            return net, (dtorch.rand(2, 4),)

    said = dtorch.explain(make)
    assert [(r.layer, r.kind) for r in said.communication] == [("1", "all-reduce")]
    assert said.parameters[2].placements == (Shard(1),)
    assert said.parameters[3].placements == (Partial(),)
    assert [d.device for d in said.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    native = make()[0]
    assert dtorch.explain(native, inputs=torch.zeros(2, 4)).parameters == said.parameters


def test_stages_on_two_meshes_send() -> None:
    class Staged(dtorch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, devices in (("first", [0, 1]), ("second", [2, 3])):
                with DeviceMesh("cpu", devices):
                    setattr(self, name, dtorch.nn.Linear(4, 4))

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x).redistribute(device_mesh=self.second.weight.device_mesh))

    def make() -> Any:
        return Staged(), dtorch.rand(3, 4, device_mesh=DeviceMesh("cpu", [0, 1]))

    said = dtorch.explain(make)
    assert [(r.layer, r.kind, r.bytes_per_device) for r in said.communication] == [("Staged", "send", 48)]
    assert "on cpu:2,3" in str(said)


def test_what_depends_on_values_is_not_made_up() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return y * 2 if y.sum() > 0 else y

    said = dtorch.explain(Reads(), MESH, {"a": "rowwise"}, torch.ones(2, 4))
    assert f"{Path(__file__).name}:" in said.note
    assert "a value is read" in said.note
    assert said.communication
    Reads.dummy_inputs = {"y": torch.ones(2, 4)}  # type: ignore[attr-defined]
    assert "TypeError" in dtorch.explain(Reads(), MESH, None).note
    del Reads.dummy_inputs  # type: ignore[attr-defined]
    said = dtorch.explain(Reads(), MESH, None)
    assert "No inputs" in said.note
    assert said.devices[0].activation_bytes is None
    assert "?" in str(said)


@pytest.mark.parametrize("written", [False, True])
def test_checks_of_what_was_given_are_answered(written: bool) -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            both = torch.stack([mask, mask.roll(1)])
            view = both[0]
            if written:
                both[1, 2] = 0
            if view[1:].all():
                return x
            return self.a(x) * int(view.sum())

    said = dtorch.explain(Masked(), MESH, {"a": "rowwise"}, (torch.ones(2, 4), torch.tensor([1, 1, 0, 1, 1, 1])))
    if written:  # into memory that the view looks at
        assert "a value is read" in said.note
    else:
        assert said.note == ""
        assert [r.layer for r in said.communication] == ["a"]
    said = dtorch.explain(Masked(), MESH, {"a": "rowwise"}, (torch.ones(2, 4), torch.ones(6, dtype=torch.int64)))
    assert said.communication == ()


def test_a_compiled_function_is_shown_call_by_call() -> None:
    class Outer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return dtorch.compile(lambda a: (a + 1).redistribute([Replicate(), Replicate()]))(x.native)

    said = dtorch.explain(lambda: (Outer(), torch.ones(4, 4)), MESH, None)
    assert [r.kind for r in said.communication] == ["all-gather"]


def test_errors_are_those_of_distribute_and_leave_nothing_behind() -> None:
    with pytest.raises(ValueError, match=r"'upp' matches no .*'up'"):
        dtorch.explain(Block(), MESH, {"upp": "colwise"})
    with pytest.raises(dtorch.MeshError, match="lacks"):
        dtorch.explain(Block(), MESH, {"up": "colwise:ep"})
    with pytest.raises(ValueError, match="device_mesh"):
        dtorch.explain(Block())
    with pytest.raises(TypeError, match="int"):
        dtorch.explain(3, MESH)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="made a int"):
        dtorch.explain(lambda: 3, MESH)
    with pytest.raises(RuntimeError, match="shapes"):
        dtorch.explain(torch.nn.Linear(3, 4), MESH, None, torch.ones(2, 5))
    x = dtorch.ones(3, device_mesh=MESH)
    assert (x + 1).sum().item() == 6


def test_the_record_prints_as_tables_and_as_html() -> None:
    said = dtorch.explain(torch.nn.ModuleList(Block() for _ in range(3)), MESH, {"*.up": "colwise"})
    text = str(said)
    assert "2.up.weight" in text
    assert "dp: Replicate(), tp: Shard(dim=0)" in text
    brief = said.text(brief=True)
    assert "*.up.weight (x3)" in brief or "0.up.weight" in brief
    page = said._repr_html_()
    assert "<table>" in page
    assert len(page) < 20_000
    assert "color:" not in page.split("</style>")[0]  # the page's own, light or dark


# ---- the command line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(
        "import torch, dtorch\n"
        "from dtorch import Replicate, Shard\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))\n"
        "class Sub:\n    inner = net\n"
        "number = 3\n"
        "def make(): return net, torch.ones(2, 4)\n"
        "def script():\n"
        "    mesh = dtorch.DeviceMesh('cpu', [0, 1])\n"
        "    dtorch.init(workers='per-device')\n"
        "    model = dtorch.distribute(net, mesh, {'0': 'colwise', '1': 'rowwise'})\n"
        "    y = dtorch.rand(4, 4, device_mesh=mesh, placements=[Shard(0)]).redistribute([Replicate()])\n"
        "    print(model(y))\n"
        "    raise AssertionError('there was a value')\n"
        "if __name__ == '__main__': script()\n"
    )
    return path


def test_modules_functions_and_scripts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.dumps({"0": "colwise", "1": "rowwise"})
    assert main(["explain", f"{file}:make", "--mesh", "2x3", "--plan", plan]) == 0
    made = capsys.readouterr().out
    assert "all-reduce" in made
    assert main(["explain", f"{file}:Sub.inner", "--mesh", "2x3", "--plan", plan, "--input", "2x4"]) == 0
    assert capsys.readouterr().out == made
    assert main(["explain", str(file)]) == 0
    script = capsys.readouterr().out
    assert "nets.py:12  redistribute  all-gather" in script
    assert "all-reduce" in script
    assert "nets.py:13, where a value is read" in script
    (file.parent / "only.py").write_text("import torch\nnet = torch.nn.Linear(4, 8)\n")
    assert main(["explain", str(file.parent / "only.py"), "--mesh", "2", "--plan", '{"net": "colwise"}']) == 2
    assert "matches no" in capsys.readouterr().err
    assert main(["explain", str(file.parent / "only.py"), "--mesh", "2", "--plan", '{"weight": "colwise"}']) == 0
    assert "Shard(dim=0)" in capsys.readouterr().out
    assert main(["explain", "this"]) == 0  # a module, run as a script
    assert main(["explain", "torch.nn:Identity", "--mesh", "2", "--brief"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{file}:maek", "--mesh", "2"], "'make'"),
        (["{file}:number", "--mesh", "2"], "a int"),
        (["{file}:net"], "device_mesh"),
        (["{folder}", "--mesh", "2"], "config.json"),
        (["no.such.module:x", "--mesh", "2"], "no module"),
        (["gone.py"], "no such file"),
        (["nothing"], "package.module:name"),
        (["{file}:net", "--mesh", "2x"], "2x3"),
    ],
)
def test_words_that_make_no_sense(file: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["explain", *(w.format(file=file, folder=file.parent) for w in words)]) == 2
    assert said in capsys.readouterr().err


def test_near_names_are_found_without_importing_what_they_stand_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packages such as transformers load each name when it is asked for."""
    (tmp_path / "lazy.py").write_text(
        "def __dir__(): return ['LlamaModel', 'Llama4Model', 'Broken']\n"
        "def __getattr__(name):\n"
        "    if name == 'LlamaModl' or name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    raise AssertionError('imported ' + name)\n"
    )
    assert main(["explain", f"{tmp_path / 'lazy.py'}:LlamaModl", "--mesh", "2"]) == 2
    said = capsys.readouterr().err
    assert "has no 'LlamaModl'" in said
    assert "'LlamaModel'" in said


def test_words() -> None:
    assert mesh_of("2x3").dim_names == ("dp", "tp")
    assert mesh_of("2x1x3x4", "a,b,c,d").shape == (2, 1, 3, 4)
    assert plan_of("none") is None
    named = inputs_of(["a=2x3:int64", "b=:bool"])
    assert (named["a"].shape, named["b"].dtype, named["b"].ndim) == ((2, 3), torch.bool, 0)
    assert [x.shape for x in inputs_of(["2x3", "4"])] == [(2, 3), (4,)]
    assert inputs_of([]) is None
    for wrong in ("2y3", "a=2x3:int65", "a=:float"):
        with pytest.raises(UsageError, match="int64") if wrong != "a=:float" else pytest.raises(AssertionError):
            inputs_of([wrong])
            raise AssertionError
    with pytest.raises(UsageError, match="name"):
        inputs_of(["a=2", "3"])
    with pytest.raises(UsageError, match="--axes"):
        mesh_of("2x3", "dp")
    with pytest.raises(UsageError, match="colwise"):
        plan_of("automatic")


def test_a_directory_of_transformers_without_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path), "--mesh", "2x2", "--brief"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.self_attn.o_proj (x2)" in out
    assert out.count("all-reduce") == 3
