"""Every entry of torch's own operator database, on one device and on meshes, against plain torch.

``python -m pytest tests/test_op_db.py -k name`` runs one op, ``-k sharded`` a part. By default an entry's samples on one
device are at most 12 of its first dtype, mostly float32, and 2 of each other, and the sharded ones take turns on meshes of 3,
2 and 2x2 devices. ``--op-db-meshes 3,2x2`` runs each of them on each of the meshes named, and ``--op-db-full`` takes every
sample of every dtype. The totals are printed at the end.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

import dtorch
from dtorch.proofs.cases import cases_of
from dtorch.proofs.claims import prove
from tests import _op_db
from tests._op_db import OUT_OF_SCOPE, Findings

TIMEOUT_S = 120.0
"""Far above what an entry takes; a hang fails its test instead of stopping the run."""

MANY, FEW = 12, 2
"""Samples of an entry's first dtype and of each other, unless all are asked for."""

RESHAPES = frozenset({"as_strided", "as_strided.partial_views"})
"""In place they give a tensor another shape over the same memory. On one device that works; for a sharded tensor there is no
such memory, and the call is refused with PlacementError."""

MESHES = "3,2,2x2"

NAMES = sorted(_op_db.entries())


class Totals:
    """Collects what the tests find, and prints it when the run is over."""

    def __init__(self) -> None:
        self.found: dict[str, Findings] = {}

    def take(self, name: str, found: Findings) -> None:
        """Count the findings of one test, which fails when something was wrong or refused."""
        self.found.setdefault(name, Findings()).add(found)
        if not found.wrong and not found.refused:
            return
        if name in OUT_OF_SCOPE and not found.wrong:
            pytest.skip(OUT_OF_SCOPE[name])
        pytest.fail("\n".join([*found.wrong[:5], *found.refused[:5]]), pytrace=False)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        wrong = sorted(n for n, f in self.found.items() if f.wrong)
        refused = sorted(n for n, f in self.found.items() if f.refused and not f.wrong)
        untried = sorted(n for n, f in self.found.items() if not (f.ran or f.wrong or f.refused))
        right = len(self.found) - len(wrong) - len(refused) - len(untried)
        ran = sum(f.ran for f in self.found.values())
        gathered = sum(f.placement_errors for f in self.found.values())
        errors = sum(f.errors for f in self.found.values())
        same = sum(f.same_words for f in self.found.values())
        claims = sum(f.claims for f in self.found.values())
        say = terminalreporter.write_line
        terminalreporter.section("torch's operator database")
        say(f"ops: {right} all right, {len(wrong)} wrong somewhere, {len(refused)} refused, {len(untried)} untried")
        say(f"comparisons: {ran} right, of which {gathered} needed auto_redistribute")
        say(f"wrong calls: {errors} raised torch's type of exception, {same} of them in torch's words")
        say(f"runs of signatures that rules claim: {claims} right")
        for label, names in (("wrong somewhere", wrong), ("refused", refused), ("untried, no CPU sample", untried)):
            if names:
                say(f"{label}: {', '.join(names)}")


@pytest.fixture(scope="module")
def totals(request: pytest.FixtureRequest) -> Totals:
    made = Totals()
    request.config.pluginmanager.register(made, "op-db-totals")
    return made


@pytest.fixture(autouse=True)
def _guard() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise TimeoutError(f"not done after {TIMEOUT_S:.0f} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", NAMES)
def test_one_device(name: str, totals: Totals, request: pytest.FixtureRequest) -> None:
    """Bits, dtypes, shapes, structure, aliases, writes into arguments, and errors."""
    op = _op_db.entries()[name]
    full = request.config.getoption("--op-db-full")
    found = Findings()
    for number, dtype in enumerate(_op_db.dtypes_of(op)):
        found.add(_op_db.check_single(op, name, dtype, limit=None if full else FEW if number else MANY))
    found.add(_op_db.check_errors(op, name))
    found.add(_op_db.check_turned(op, name))
    totals.take(name, found)


@pytest.mark.parametrize("name", [n for n in NAMES if _op_db.entries()[n].supports_out])
def test_out(name: str, totals: Totals) -> None:
    found = _op_db.check_out(_op_db.entries()[name], name, (2,))
    if name not in OUT_OF_SCOPE:
        totals.take(name, found)


@pytest.mark.parametrize("name", [n for n in NAMES if _op_db.entries()[n].inplace_variant])
def test_in_place_on_one_device(name: str, totals: Totals) -> None:
    op = _op_db.entries()[name]
    found = Findings()
    for dtype in _op_db.dtypes_of(op)[:1]:
        found.add(_op_db.check_single(op, name, dtype, fn=op.inplace_variant))
    totals.take(name, found)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "meshes" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--op-db-meshes")
        meshes = [chosen.split(",")] if chosen == MESHES else [[mesh] for mesh in chosen.split(",")]
        metafunc.parametrize("meshes", meshes, ids="-".join)


def shapes_of(meshes: list[str]) -> list[tuple[int, ...]]:
    return [tuple(map(int, mesh.split("x"))) for mesh in meshes]


@pytest.mark.parametrize("name", NAMES)
def test_sharded(name: str, meshes: list[str], totals: Totals) -> None:
    """Combinations of placements: as they are, or refused and then right under ``auto_redistribute``."""
    totals.take(name, _op_db.check_sharded(_op_db.entries()[name], name, shapes_of(meshes)))


@pytest.mark.parametrize("name", [n for n in NAMES if _op_db.entries()[n].inplace_variant])
def test_in_place_sharded(name: str, meshes: list[str], totals: Totals) -> None:
    op = _op_db.entries()[name]
    found = _op_db.check_sharded(op, name, shapes_of(meshes), max_samples=2, limit=8, fn=op.inplace_variant)
    if name in RESHAPES:
        assert not found.wrong
        return
    totals.take(name, found)


@pytest.mark.parametrize("name", NAMES)
def test_claims(name: str, totals: Totals, proven: set[str], request: pytest.FixtureRequest) -> None:
    """Every signature that the rules of the ops inside claim gives torch's result, also with ties, NaN and empty pieces."""
    found = Findings()
    num_samples = 4 if request.config.getoption("--op-db-full") else 2
    with torch.no_grad():
        for case in cases_of(_op_db.entries()[name], _op_db.mesh_of(2), num_samples):
            if str(case) in proven:
                continue
            proven.add(str(case))
            verdict = prove(case)
            found.claims += verdict.right
            found.wrong += verdict.false
    with suppress(dtorch.OpError):  # of samples that only some placement or memory of their inputs makes valid
        dtorch.synchronize()
    totals.take(name, found)


@pytest.fixture(scope="module")
def proven() -> set[str]:
    """Calls that were proven as part of another entry."""
    return set()


@pytest.mark.parametrize("name", sorted(OUT_OF_SCOPE))
def test_out_of_scope_is_refused(name: str) -> None:
    """What is left out still is, so the list stays true."""
    op = _op_db.entries()[name]
    dtype = next(iter(_op_db.dtypes_of(op) or op.supported_dtypes("cpu")), None)
    if dtype is None:
        pytest.skip("no CPU kernel")
    found = _op_db.check_single(op, name, dtype, limit=2)
    assert not found.wrong, found.wrong
    assert not found.ran, f"{name} works now: take it off the list"
