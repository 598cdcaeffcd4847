"""The Python scripts under tools/: a program file with and without weights in it, on the golden
artifact and on crafted archives; README's results against files that were written here.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import first_result
import update_readme

README = f"before\n{update_readme.BEGIN}\nold\n{update_readme.END}\nafter\n"


def test_the_golden_program_holds_no_weights(golden_artifact: Path) -> None:
    assert first_result.weights_in_program(golden_artifact) == []


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("part", [slice(0, 100), slice(450, 550), slice(900, 1000)])
def test_a_part_of_a_weight_is_found(tmp_path: Path, compression: int, part: slice) -> None:
    weights = {"a": torch.randn(1000), "b": torch.randn(1000), "zero": torch.zeros(1000)}
    save_file(weights, tmp_path / first_result.WEIGHTS)
    with zipfile.ZipFile(tmp_path / "encoder.pt2", "w", compression) as archive:
        archive.writestr("code", bytes(10_000) + weights["b"][part].numpy().tobytes())
    assert first_result.weights_in_program(tmp_path) == ["b"]


def test_first_result_reports_both_faults(
    golden_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_result.main([str(golden_artifact), "--limit", "0"]) == 1
    assert "allowed 0.00 s" in capsys.readouterr().err
    assert first_result.main([str(golden_artifact), "--limit", "1e9"]) == 0


def test_results_of_no_files(tmp_path: Path) -> None:
    assert update_readme.render(tmp_path) == update_readme.NO_RESULTS


def test_results_become_a_table_with_their_circumstances(tmp_path: Path) -> None:
    document = {
        "title": "replay",
        "circumstances": {"device": "H200", "driver": None, "clean": True},
        "rows": [{"tokens": 4096, "ms": 1.23456}, {"tokens": 64, "ms": None, "note": "a|b"}],
        "traffic_rows": [{"runner": "ours", "calls/s": 12345.6}],
    }
    (tmp_path / "b.json").write_text(json.dumps(document), encoding="utf-8")
    assert update_readme.render(tmp_path) == (
        "**replay** (device H200; clean yes)\n\n"
        "| tokens | ms | note |\n| --- | ---: | ---: |\n"
        "| 4,096 | 1.23 | - |\n| 64 | - | a\\|b |\n\n"
        "| runner | calls/s |\n| --- | ---: |\n| ours | 12,346 |"
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"rows": []}',
        '{"rows": [1]}',
        '{"rows": 1}',
        '{"rows": [{"a": 1}], "traffic_rows": 1}',
    ],
)
def test_another_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"odd\.json"):
        update_readme.render(tmp_path)


def test_only_what_is_between_the_markers_changes() -> None:
    new = update_readme.updated(README, "new")
    assert new == README.replace("old", "new")
    assert update_readme.updated(new, "new") == new


@pytest.mark.parametrize(
    "readme",
    ["", update_readme.BEGIN, f"{update_readme.END}{update_readme.BEGIN}", README + README],
)
def test_missing_or_repeated_markers_are_refused(readme: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md"):
        update_readme.updated(readme, "new")
