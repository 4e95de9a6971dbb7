"""Every Python block of the documentation runs, page by page, and prints what the page says."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch.creation import __all__ as FACTORIES

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """(line, code, what it prints) of each Python block; None where the page does not say."""
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    found = []
    for at, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        printed = None
        if at + 1 < len(fences) and fences[at + 1][1] == "text" and not text[fence.end() : fences[at + 1].start()].strip():
            printed = fences[at + 1][2]
        found.append((text.count("\n", 0, fence.start()) + 2, fence[2], printed))
    return found


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    loop = asyncio.new_event_loop()
    try:
        for line, code, wanted in blocks(page):
            tree = compile("\n" * (line - 1) + code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                made = eval(tree, names)
                if inspect.iscoroutine(made):
                    loop.run_until_complete(made)
            if wanted is not None:
                assert printed.getvalue().strip() == wanted.strip(), f"{page.name}:{line}"
        dtorch.synchronize()
    finally:
        loop.close()


@pytest.mark.parametrize("path", sorted((ROOT / "dtorch").rglob("*.py")), ids=lambda path: path.stem)
def test_docstrings_are_markdown(path: Path) -> None:
    """As the site shows them: a role of another markup would be shown as it is written."""
    assert not re.search(r":(?:class|func|meth|mod|attr|exc):`", path.read_text("utf-8"))


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in config]
    assert not missing, missing


def test_public_functions_tell_of_each_of_their_arguments() -> None:
    untold = {}
    for name in dtorch.__all__:
        made = getattr(dtorch, name)
        if inspect.isfunction(made) and name not in FACTORIES and not made.__module__.startswith("dtorch.ops"):
            arguments = set(inspect.signature(made).parameters) - {"args", "kwargs"}
            untold[name] = {argument for argument in arguments if argument not in (made.__doc__ or "")}
    assert not any(untold.values()), {name: found for name, found in untold.items() if found}


def test_every_public_name_is_in_the_reference_with_a_docstring() -> None:
    """Ops have a page of their own; so do factories, which are torch's."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    listed = set(re.findall(r"^::: dtorch\.(\S+)$", reference, re.M))
    missing = []
    for name in dtorch.__all__:
        made = getattr(dtorch, name)
        if name in FACTORIES or isinstance(made, (torch.dtype, torch.layout)):
            continue
        module = getattr(made, "__module__", "").removeprefix("dtorch.")
        if (f"{module}.{name}" not in listed and module not in listed) or not (made.__doc__ or "").strip():
            missing.append(f"{module}.{name}")
    assert not missing, missing
