"""`docs/onnx.md` against the code: its examples run on an exported file, its flags are those of the
command, and its measured table is that of `bench/onnx-cpu.json`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from onnx_support import golden_onnx

from m3compile.cli.app import app
from m3compile.onnx_format import DTYPES, OPSETS, OnnxMetadata

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import update_readme

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/onnx.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(blocks("python")) == 2
    for text in blocks("python"):
        assert '"encoder.onnx"' in text
        exec(text.replace('"encoder.onnx"', repr(str(golden_onnx()))), {})
        assert capsys.readouterr().out == "[(256, 96), (384, 96)]\n"


def test_the_command_line_parses() -> None:
    (line,) = (line for line in blocks("sh")[0].splitlines() if "export-onnx" in line)
    app.commands["export-onnx"].make_context("export-onnx", shlex.split(line)[4:])


def test_every_flag_is_told() -> None:
    flags = {flag for option in app.commands["export-onnx"].params for flag in option.opts}
    told = set(re.findall(r"^\| `(--[\w-]+)", TEXT, re.MULTILINE))
    assert told == {flag for flag in flags if flag.startswith("--")}
    assert f"{OPSETS[0]} to {OPSETS[-1]}" in TEXT
    for name in (*DTYPES, *OnnxMetadata.__struct_fields__):
        assert f"`{name}`" in TEXT, name


def test_the_table_is_what_was_measured() -> None:
    path = ROOT / "bench/onnx-cpu.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    rendered = update_readme._table(document["rows"])
    assert rendered in TEXT
