"""`verify`: what it prints is compared with the report that it stands for, its exit codes with
faults in bounds, weights and sizes.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from conftest import BUDGETS, GOLDEN_CHECKPOINT
from crafted import copy, edited
from terminal import Refused, Run, Terminal

from m3compile.config import TINY
from m3compile.errors import ExitCode
from m3compile.weights import init_checkpoint


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


def test_verify_prints_a_row_a_budget(run: Run, golden_artifact: Path) -> None:
    code, out, err = run("verify", golden_artifact, "--checkpoint", GOLDEN_CHECKPOINT)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("float32 on cpu against eager float32 from the checkpoint")
    assert [line.split()[:2] for line in lines if line.startswith("bucket")] == [
        ["bucket", str(budget)] for budget in BUDGETS
    ]
    assert all(line.endswith(" ok") for line in lines if line.startswith(("bucket", "exact")))
    assert "cut " in out
    assert lines[-1].startswith("ok: 6 routes within bounds")
    assert "proves the program, not the conversion" not in out
    assert "verify:" in err


def test_verify_json_is_alone_on_stdout(run: Run, golden_artifact: Path, tmp_path: Path) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    with edited(folder) as manifest:
        manifest["ladder"] = [4]
    code, out, _ = run("verify", folder, "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["passed"], report["reference"]) == (True, "artifact weights")
    assert [row["route"] for row in report["rows"]] == ["bucket", "exact", "cut"]


def test_verify_past_a_bound(run: Run, golden_artifact: Path, tmp_path: Path) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    with edited(folder) as manifest:
        manifest["bounds"]["relative_error"] = 1e-9
        manifest["ladder"] = [4]
    code, out, _ = run("verify", folder)
    assert code == ExitCode.VERIFICATION
    assert "FAILED: 3 of 3 routes out of bounds" in out
    assert "proves the program, not the conversion" in out
    code, out, _ = run("verify", folder, "--json")
    assert code == ExitCode.VERIFICATION
    assert json.loads(out)["passed"] is False


def test_verify_against_another_checkpoint(
    run: Run, refused: Refused, golden_artifact: Path, tmp_path: Path
) -> None:
    """Of the same sizes it differs; of other sizes it cannot be compared."""
    folder = copy(golden_artifact, tmp_path / "a")
    with edited(folder) as manifest:
        manifest["ladder"] = [4]
    init_checkpoint(tmp_path / "same sizes", TINY)
    code, out, _ = run("verify", folder, "--checkpoint", tmp_path / "same sizes")
    assert code == ExitCode.VERIFICATION
    assert "FAILED: 3 of 3 routes out of bounds" in out
    init_checkpoint(tmp_path / "b", msgspec.structs.replace(TINY, output_size=64))
    assert "output_size is 64" in refused(3, "verify", folder, "--checkpoint", tmp_path / "b")


def test_verify_of_what_is_not_there(refused: Refused, golden_artifact: Path) -> None:
    assert "no such artifact folder" in refused(3, "verify", "/no/such/folder")
    line = refused(3, "verify", golden_artifact, "--checkpoint", "/no/such/folder")
    assert "checkpoint /no/such/folder does not exist" in line
