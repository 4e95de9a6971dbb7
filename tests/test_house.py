"""The rules of the house: which way imports go, what deciders may know, which names leave by which door."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import dtorch
from dtorch.cli import main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dtorch"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)

MAX_LINES = 600


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DECIDERS = (
    "assemble.py",
    "cluster/ledger.py",
    "cluster/launchers/base.py",
    "cluster/launchers/kubernetes.py",
    "cluster/launchers/slurm.py",
    "cluster/launchers/watch.py",
    "cluster/pool.py",
    "cluster/quotas.py",
    "cluster/refusals.py",
    "cluster/submitted.py",
    "cluster/uploads.py",
    "ops/_call.py",
    "ops/_choose.py",
    "modules/straight.py",
    "modules/tape.py",
    "ops/_rules.py",
    "runtime/awaited.py",
    "runtime/controller.py",
    "runtime/events.py",
    "runtime/layout.py",
    "runtime/lineage.py",
    "runtime/liveness.py",
    "runtime/moves.py",
    "runtime/plan.py",
    "runtime/rewrite/block.py",
    "runtime/rewrite/drop_dead.py",
    "runtime/rewrite/free_early.py",
    "runtime/rewrite/move_once.py",
    "runtime/rewrite/overlap.py",
    "runtime/rewrite/reuse_memory.py",
    "runtime/rewrite/traits.py",
    "runtime/room.py",
    "runtime/recovery.py",
    "runtime/shares.py",
    "runtime/safetensors.py",
    "runtime/slices.py",
    "runtime/slots.py",
    "runtime/template.py",
    "runtime/touching.py",
    "profiling/timeline.py",
    "runtime/windows.py",
    "transport/cluster.py",
    "transport/codec.py",
    "transport/messages.py",
    "transport/numbered.py",
)
"""Plain code that decides. Not ``runtime/recorder.py``: it holds a lock and asks whether an event loop runs."""

SHELL_ONLY = words("""
aiohttp asyncio concurrent http multiprocessing os random select selectors signal socket subprocess threading time
uvloop
""")
"""What a decider may not import: loops, sockets, clocks, processes, threads, the environment."""

PUBLIC = words("""
AuthError ConnectionLostError DTorchError DeviceMesh MeshError OpError Partial PlacementError QuotaError Replicate Shard
Tensor TensorFuture WorkerLostError
auto_redistribute init init_device_mesh manual_seed memory_stats shutdown statistics synchronize synchronize_async
arange empty eye from_numpy from_shards full linspace ones rand randint randn randperm tensor zeros
""")
"""Names that users may rely on at the top of dtorch."""

TENSOR = words("""
__add__ __await__ __bool__ __float__ __getitem__ __len__ __matmul__ __repr__
device device_mesh dtype item item_async numpy placements redistribute redistribute_by_dict redistribute_like shape
to_shards to_torch to_torch_async tolist tolist_async value
""")
"""What a tensor answers to."""

MESH = words("device_type dim_names ndim shape unbind __enter__ __exit__ __eq__ __getitem__ __hash__ __repr__")

LAYERS = words("""
ColumnParallelLinear ColumnParallelLinearWithReplicateInputOutput ColumnParallelLinearWithReplicateOutput
EmbeddingWithReplicateOutput Module ReplicateParallelLinear RowParallelLinear RowParallelLinearWithReplicateOutput
Linear Embedding LayerNorm RMSNorm Sequential functional
""")


def dotted(path: Path) -> str:
    """``dtorch/runtime/plan.py`` -> ``dtorch.runtime.plan``."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a file, also those inside functions and under TYPE_CHECKING."""
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*above, module]).rstrip(".")
            yield node.lineno, module
            for alias in node.names:  # "from dtorch import session" imports a module too
                yield node.lineno, f"{module}.{alias.name}"


def is_below(module: str, floors: tuple[str, ...]) -> bool:
    return any(module == floor or module.startswith(floor + ".") for floor in floors)


@pytest.mark.parametrize(
    ("floor", "allowed"),
    [("transport", ("dtorch.transport",)), ("runtime", ("dtorch.transport", "dtorch.runtime"))],
)
def test_imports_only_go_down(floor: str, allowed: tuple[str, ...]) -> None:
    upwards = [
        f"{dotted(path)}:{line} imports {module}"
        for path in SOURCES
        if path.is_relative_to(PACKAGE / floor)
        for line, module in imports(path)
        if is_below(module, ("dtorch",)) and not is_below(module, allowed)
    ]
    assert upwards == []


def test_deciders_know_no_loop_socket_clock_or_process() -> None:
    found = [
        f"{name}:{line} imports {module}"
        for name in DECIDERS
        for line, module in imports(PACKAGE / name)
        if module.partition(".")[0] in SHELL_ONLY
    ]
    assert found == []


def test_the_recorder_asks_asyncio_for_nothing_but_the_running_loop() -> None:
    tree = ast.parse((PACKAGE / "runtime/recorder.py").read_text("utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncio"
    }
    assert used <= {"_get_running_loop"}


@pytest.mark.parametrize("floor", ["runtime", "transport"])
def test_both_lower_floors_are_one_step_from_the_root(floor: str) -> None:
    link = ROOT / floor
    assert link.is_symlink()
    assert link.readlink() == Path("dtorch", floor)
    assert (link / "__init__.py").is_file()


def test_only_dtorch_is_installed() -> None:
    find = pytest.importorskip("setuptools").find_packages
    include = ["dtorch*"]
    assert f"include = {include}".replace("'", '"') in (ROOT / "pyproject.toml").read_text("utf-8")
    packages = find(str(ROOT), include=include)
    assert {name.partition(".")[0] for name in packages} == {"dtorch"}
    missing = [dotted(path) for path in SOURCES if path.name == "__init__.py" and dotted(path) not in packages]
    assert missing == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_at_the_top(name: str) -> None:
    assert not isinstance(getattr(dtorch, name), ModuleType)


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_answers_to(name: str) -> None:
    assert hasattr(dtorch.Tensor, name)


@pytest.mark.parametrize("name", MESH)
def test_mesh_answers_to(name: str) -> None:
    assert hasattr(dtorch.DeviceMesh("cpu", [0]), name)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_in_nn(name: str) -> None:
    assert getattr(importlib.import_module("dtorch.nn"), name) is not None


def test_each_name_leaves_by_one_door() -> None:
    names = list(dtorch.__all__)
    assert sorted(names) == sorted(set(names))
    assert [name for name in names if isinstance(getattr(dtorch, name), ModuleType)] == []
    assert [name for name in names if name.startswith("_")] == []
    assert set(names) <= set(dir(dtorch))


def test_mesh_and_placement_names_of_distributed_spec_are_the_same_objects() -> None:
    spec = importlib.import_module("dtorch.distributed_spec")
    for name in ("DeviceMesh", "Partial", "Replicate", "Shard"):
        assert getattr(spec, name) is getattr(dtorch, name)


def test_torch_itself_does_not_leave_through_dtorch() -> None:
    public = [name for name in vars(dtorch) if not name.startswith("_")]
    foreign = [
        name
        for name in public
        if isinstance(value := getattr(dtorch, name), ModuleType) and not is_below(value.__name__, ("dtorch",))
    ]
    # "from __future__ import annotations" and "import importlib" leave a name behind; neither is offered.
    assert set(foreign) <= {"importlib"}
    assert not set(foreign) & set(dtorch.__all__)


@pytest.mark.parametrize("path", SOURCES, ids=dotted)
def test_one_idea_a_file(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES
    assert path.stem not in ("common", "helper", "helpers", "misc", "util", "utils")


@pytest.mark.parametrize("path", SOURCES, ids=dotted)
def test_nothing_can_run_code_from_bytes(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    allowed = {
        "written.py": {"compile", "exec"},  # source that dtorch writes itself: roles of arguments, names as literals
        "sources.py": {"compile"},  # to compare with a function's code; never run
    }
    assert not called & {"eval", "exec", "compile", "__import__"} - allowed.get(path.name, set())
    serialisers = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    assert [f"{line}: {module}" for line, module in imports(path) if is_below(module, serialisers)] == []


def test_typed_and_licensed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    assert 'dtorch = "dtorch.cli:main"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_readme_has_the_two_commands_and_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert "pip install -e '.[examples]' && python examples/chat.py \"What is the capital of France?\"" in text
    assert "pip install -e '.[test]' && python -m pytest" in text
    listed = [line.split("`")[1] for line in text.splitlines() if line[:3] in [f"{i}. " for i in range(1, 7)]]
    assert len(listed) == 6
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def test_cli_lists_the_op_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["torch.add", "pointwise"] in rows
    assert any(row[0] == "torch.Tensor.add_" and row[2:] == ["in", "place"] for row in rows)


def test_cli_lists_ops_without_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--missing"]) == 0
    missing = capsys.readouterr().out.split()
    assert "torch.add" not in missing


def test_cli_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-test"]) == 0
    assert "data planes: in one process yes" in capsys.readouterr().out


def test_cli_without_a_command_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "command" in capsys.readouterr().err
