"""The one true build beside the golden artifact's: in bfloat16, by the command line, in an empty
folder. Its artifact is held to the bounds of bfloat16, against the checkpoint that it was made of.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crafted import change_weights, copy
from terminal import Refused, Run, Terminal

import m3compile
from m3compile.artifact import read_manifest
from m3compile.config import BOUNDS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The artifact of a build without a checkpoint, and what the command printed."""
    folder = tmp_path_factory.mktemp("bfloat16")
    words = ["build", "--device", "cpu", "--dtype", "bfloat16", "--budgets", "16,96", "--max-items"]
    result = subprocess.run(
        [sys.executable, "-m", "m3compile", *words, "8"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert os.listdir(folder / "exported") == ["tiny"]
    return folder / "exported/tiny", result.stdout


def test_a_build_in_bfloat16(bfloat16: tuple[Path, str]) -> None:
    path, printed = bfloat16
    assert printed.startswith("Built exported/tiny in ")
    assert "cpu, bfloat16, attention TORCH_SDPA" in printed
    manifest = read_manifest(path)
    assert (manifest.dtype, manifest.bounds) == ("bfloat16", BOUNDS["bfloat16"])
    assert (manifest.ladder, manifest.max_segments) == ((16, 96), 8)
    dtypes = {spec.name: spec.dtype for spec in manifest.weights}
    assert dtypes.pop("inverse_frequency") == "float32"
    assert set(dtypes.values()) == {"bfloat16"}


def test_bfloat16_holds_its_bounds(bfloat16: tuple[Path, str], run: Run, tmp_path: Path) -> None:
    # What a build without a checkpoint makes for itself.
    assert run("init-checkpoint", tmp_path / "same")[0] == 0
    code, out, _ = run("verify", bfloat16[0], "--checkpoint", tmp_path / "same", "--json")
    report = json.loads(out)
    assert code == 0
    for row in report["rows"]:
        assert row["passed"]
        assert 1e-4 < row["eager_error"] < 0.05
        assert row["max_error"] <= 1.25 * row["eager_error"]
        assert row["min_cosine"] >= 0.999


def test_bfloat16_in_and_out(bfloat16: tuple[Path, str]) -> None:
    pixel_values = torch.randn(32, 1176)
    with m3compile.load(bfloat16[0]) as encoder:
        first, second = encoder.encode(pixel_values, [[1, 4, 4], [1, 4, 4]])
        again = encoder.encode(pixel_values.to(torch.bfloat16), [[1, 4, 4], [1, 4, 4]])
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])


def test_weights_of_another_dtype_are_told(
    bfloat16: tuple[Path, str], refused: Refused, tmp_path: Path
) -> None:
    """The artifact of bfloat16 with the weights of float32, as a hand might mix them."""
    folder = copy(bfloat16[0], tmp_path / "mixed")
    change_weights(
        folder, lambda tensors: tensors.update({k: v.float() for k, v in tensors.items()})
    )
    line = refused(3, "verify", folder)
    assert "found float32" in line
    assert "expected bfloat16" in line
