"""The examples that show foreign models, as a newcomer runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests._scripts import ROOT, WAIT_S, environment

EXAMPLES = ROOT / "examples"


def example(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options], cwd=folder, env=environment(HF_HUB_OFFLINE="1"), text=True,
        capture_output=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


def test_embed_ranks_as_torch_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = example(tmp_path, "embed.py", "How do I get fit?", "--dp", "2", "--tp", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    _, _, _, first, *_, last = done.stdout.splitlines()
    ours, theirs, sentence = first.split(maxsplit=2)
    assert sentence == "Regular exercise keeps the heart healthy."
    assert (float(ours), float(theirs)) == pytest.approx((0.325145, 0.325145), abs=2e-5)
    assert last.startswith("the same ranking; values differ by ")
    assert float(last.split()[-3]) < 1e-5


def test_diffuse_writes_an_image(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    done = example(tmp_path, "diffuse.py", "a red fox", "--steps", "6", "--size", "16", "--plain", "--cache", "0.4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "StableDiffusion3Pipeline on 4 devices: dp=2, tp=2" in done.stdout
    assert "of 6 steps skipped, PSNR" in done.stdout
    assert (tmp_path / "image.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_help_and_bad_options(tmp_path: Path) -> None:
    assert "--tp" in example(tmp_path, "embed.py", "--help").stdout
    assert "'none' is not a whole number of at least 1" in example(tmp_path, "diffuse.py", "--tp", "none").stderr
