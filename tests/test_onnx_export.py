"""`export-onnx`: what it writes, replaces, checks and says.

Compared with: the exit codes of the contract; the files that lay there before; and for `--check`,
eager, on models that were made wrong on purpose.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers import run_fresh
from onnx_support import SMALL, golden_onnx, small_model, small_state
from safetensors.torch import load_file, save_file
from terminal import Refused, Run, Terminal

import m3compile.onnx
from m3compile.artifact import WEIGHTS, list_files, read_manifest, write_manifest
from m3compile.errors import OperationError
from m3compile.onnx_build import files, translations
from m3compile.onnx_build.files import replacing, weights_file, write_model
from m3compile.onnx_check import CheckReport, check_file
from m3compile.onnx_export import OnnxCheckError, export_onnx
from m3compile.onnx_format import CHECK_BOUNDS, DTYPES
from m3compile.weights import init_checkpoint


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, random weights; its embeddings are far from those of `small_model`."""
    folder = tmp_path_factory.mktemp("checkpoints") / "small"
    init_checkpoint(folder, SMALL)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the command ---


def test_export_and_check(run: Run, small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "encoder.onnx"
    code, text, err = run("export-onnx", small_checkpoint, "--out", out, "--check")
    assert code == 0, err
    lines = text.splitlines()
    assert lines[0].startswith("float32 in ONNX Runtime ")
    verdicts = [line for line in lines if line.endswith((" ok", " FAILED"))]
    assert len(verdicts) == 8
    assert not any(line.endswith("FAILED") for line in verdicts)
    assert any(line.startswith("ok: 8 mixes within bounds, largest error ") for line in lines)
    assert f"Wrote {out} (" in text
    assert "opset 20" in text
    assert "its embeddings mean nothing" in text
    assert "check:" in err
    assert names(tmp_path) == ["encoder.onnx"]
    metadata = m3compile.onnx.load(out).metadata
    assert (metadata.source, metadata.weights) == ("checkpoint small", "random")
    assert metadata.config == SMALL


def test_half_precision_is_held_against_eager(
    run: Run, small_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "encoder.onnx"
    words = ("--dtype", "float16", "--opset", 18, "--external-data", "--check")
    code, text, err = run("export-onnx", small_checkpoint, "--out", out, *words)
    assert code == 0, err
    assert text.splitlines()[0].startswith("float16 in ONNX Runtime ")
    # The column of eager's own error is filled.
    assert not any(" - " in line for line in text.splitlines() if line.endswith(" ok"))
    assert names(tmp_path) == ["encoder.onnx", "encoder.onnx.data"]
    assert f"{out}.data (" in text


def test_a_dtype_that_the_runtime_lacks(
    refused: Refused, small_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "encoder.onnx"
    words = ("--dtype", "bfloat16", "--check")
    line = refused(2, "export-onnx", small_checkpoint, "--out", out, *words)
    assert "a bfloat16 file cannot be checked here: ONNX Runtime " in line
    assert "has no kernel for its Gemm" in line
    assert "without --check" in line
    assert names(tmp_path) == []


def test_an_artifact_is_as_good_as_its_checkpoint(
    run: Run, golden_artifact: Path, tmp_path: Path
) -> None:
    out = tmp_path / "encoder.onnx"
    code, text, err = run("export-onnx", golden_artifact, "--out", out)
    assert code == 0, err
    assert "rounded" not in text
    pixels = np.random.default_rng(0).standard_normal((40, 1176), np.float32)
    first, second = (
        m3compile.onnx.load(path).encode(pixels, [[1, 4, 4], [1, 4, 6]])
        for path in (out, golden_onnx())
    )
    for got, expected in zip(first, second, strict=True):
        np.testing.assert_array_equal(got, expected)


def rounded_artifact(golden_artifact: Path, folder: Path, scale: float) -> Path:
    """Manifest and bfloat16 weights, one tensor scaled, as built for a GPU that is not here."""
    folder.mkdir()
    state = {
        name: tensor if name == "inverse_frequency" else tensor.to(torch.bfloat16)
        for name, tensor in load_file(golden_artifact / WEIGHTS).items()
    }
    state["merger.fc2.weight"] *= scale
    save_file(state, folder / WEIGHTS)
    manifest = read_manifest(golden_artifact)
    document = msgspec.to_builtins(manifest)
    document["dtype"] = document["build"]["dtype"] = "bfloat16"
    document["requirements"] |= {"device": "cuda", "gpu_arch": "sm_90", "cuda": "13.0"}
    document["build"]["device"] = "cuda"
    for spec in (*document["inputs"][:1], *document["outputs"][:1], *document["weights"]):
        if spec["name"] != "inverse_frequency":
            spec["dtype"] = "bfloat16"
    for name in manifest.programs:
        (folder / name).write_bytes(b"not for this machine")
    document["files"] = msgspec.to_builtins(list_files(folder))
    write_manifest(folder, msgspec.convert(document, type(manifest)))
    return folder


def test_an_artifact_of_another_machine(
    run: Run, refused: Refused, golden_artifact: Path, tmp_path: Path
) -> None:
    """No code is loaded, so no machine is asked; that the weights were rounded is said."""
    folder = rounded_artifact(golden_artifact, tmp_path / "m3", scale=1.0)
    out = tmp_path / "encoder.onnx"
    code, text, err = run("export-onnx", folder, "--out", out)
    assert code == 0, err
    assert "weights had been rounded to bfloat16" in text
    assert m3compile.onnx.load(out).metadata.weights_dtype == "bfloat16"


def test_weights_beyond_half_precision(
    refused: Refused, golden_artifact: Path, tmp_path: Path
) -> None:
    folder = rounded_artifact(golden_artifact, tmp_path / "m3", scale=1e7)
    out = tmp_path / "encoder.onnx"
    line = refused(2, "export-onnx", folder, "--out", out, "--dtype", "float16")
    assert "merger.fc2.weight reaches " in line
    assert "torch.float16" in line
    assert not out.exists()


def test_sources_that_are_none(refused: Refused, golden_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "encoder.onnx"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "neither a checkpoint" in refused(3, "export-onnx", empty, "--out", out)
    assert "does not exist" in refused(3, "export-onnx", tmp_path / "no", "--out", out)
    (empty / "manifest.json").write_text("{}")
    assert "format_version" in refused(3, "export-onnx", empty, "--out", out)
    assert names(tmp_path) == ["empty"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--out", "no-such-folder/a.onnx"), "its folder does not exist"),
        (("--out", "."), "a folder; expected the name of a file"),
        (("--out", "a" * 250), "at most 200 bytes"),
        (("--out", "taken.onnx"), "and weights may go there"),
        (("--out", "a.onnx", "--opset", "17"), "17 is not in the range"),
        (("--out", "a.onnx", "--dtype", "float64"), "is not one of"),
        ((), "--out"),
    ],
)
def test_requests_that_are_refused(
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    found: str,
) -> None:
    """Before the checkpoint is looked at: there is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.onnx.data").mkdir()
    assert found in refused(2, "export-onnx", "no-such-checkpoint", *words)


def test_a_library_call_is_refused_like_a_command(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'int8'; allowed: float32"):
        export_onnx(small_checkpoint, tmp_path / "a.onnx", dtype="int8")
    with pytest.raises(ValueError, match="opset is 99; allowed: 18 to 25"):
        export_onnx(small_checkpoint, tmp_path / "a.onnx", opset=99)


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_packages(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda wanted: None if wanted == name else object()
    )
    line = refused(2, "export-onnx", "no-such", "--out", tmp_path / "a.onnx", "--check")
    assert f"export-onnx needs {name}: pip install 'm3compile[onnx]'" in line


# --- the check ---


def unbounded(q: Any, k: Any, v: Any, cu_seqlens: Any, *rest: Any, **others: Any) -> Any:
    """Attention of all rows with all rows, which is right for one image alone."""
    op = translations.op
    rows = op.Cast(op.Shape(q, start=0, end=1), to=6)
    bounds = op.Concat(op.Constant(value_ints=[0]), op.Cast(rows, to=7), axis=0)
    return translations.segment_attention(q, k, v, op.Cast(bounds, to=6))


def tanh_gelu(self: Any, approximate: str = "none") -> Any:
    op = translations.op
    cubed = self + 0.044715 * op.Mul(self, op.Mul(self, self))
    return 0.5 * self * (1.0 + op.Tanh(0.7978845608 * cubed))


WRONG = {
    "attention across items": (torch.ops.m3compile.varlen_attention.default, unbounded),
    "tanh GELU": (torch.ops.aten.gelu.default, tanh_gelu),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_not_written(
    run: Run, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setitem(translations.TRANSLATIONS, *WRONG[fault])
    out = tmp_path / "encoder.onnx"
    out.write_bytes(b"what was there")
    code, text, err = run("export-onnx", small_checkpoint, "--out", out, "--check")
    assert code == 1
    verdicts = [line for line in text.splitlines() if line.endswith((" ok", " FAILED"))]
    assert len(verdicts) == 8
    alone, together = verdicts[0], verdicts[1]
    assert together.endswith("FAILED")
    assert alone.endswith("ok") is (fault == "attention across items")
    assert err.splitlines()[-1].startswith("error: the file differs from eager, nothing was writ")
    assert out.read_bytes() == b"what was there"
    assert names(tmp_path) == ["encoder.onnx"]


def test_the_check_holds_the_weights_too(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    write_model(small_model(), path, external=False)
    assert check_file(path, SMALL, small_state(), None).passed
    other = {**small_state(), "layers.0.fc1.bias": small_state()["layers.0.fc1.bias"] + 0.05}
    report = check_file(path, SMALL, other, None)
    assert not report.passed
    assert not any(row.passed for row in report.rows)
    assert "has error " in report.summary


def test_a_file_that_hides_nan_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.onnx"
    write_model(small_model(), path, external=False)
    encode = m3compile.onnx.OnnxEncoder.run

    def hiding(self: Any, pixel_values: Any, segments: Any) -> Any:
        return np.nan_to_num(encode(self, pixel_values, segments))

    monkeypatch.setattr(m3compile.onnx.OnnxEncoder, "run", hiding)
    report: CheckReport = check_file(path, SMALL, small_state(), None)
    assert [row.mix for row in report.rows if not row.passed] == ["beside NaN"]
    assert "did not come back as NaN" in report.summary
    assert OnnxCheckError(report).exit_code == 1


def test_every_dtype_has_bounds() -> None:
    assert set(CHECK_BOUNDS) == set(DTYPES)
    assert CHECK_BOUNDS["float32"].relative_error == 1e-4


# --- files ---


def write(out: Path, *, external: bool) -> None:
    with replacing(out) as path:
        write_model(small_model(), path, external=external)


@pytest.mark.parametrize("before", [None, False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_file_is_replaced_with_its_weights(
    tmp_path: Path, before: bool | None, after: bool
) -> None:
    out = tmp_path / "encoder.onnx"
    if before is not None:
        write(out, external=before)
    write(out, external=after)
    assert names(tmp_path) == ["encoder.onnx", *(["encoder.onnx.data"] if after else [])]
    result = m3compile.onnx.load(out).encode(np.ones((16, 1176)), [[1, 4, 4]])
    assert np.isfinite(result).all()


def test_a_data_file_of_somebody_else_stays(tmp_path: Path) -> None:
    out = tmp_path / "encoder.onnx"
    out.write_bytes(b"not a model")
    weights_file(out).write_bytes(b"mine")
    write(out, external=False)
    assert weights_file(out).read_bytes() == b"mine"


def test_weights_that_do_not_fit_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_INSIDE", 100_000)
    write(tmp_path / "encoder.onnx", external=False)
    assert names(tmp_path) == ["encoder.onnx", "encoder.onnx.data"]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_failed_rename_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool, failing: int
) -> None:
    out = tmp_path / "encoder.onnx"
    write(out, external=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []
    rename = Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    if failing == 3 and not external:
        write(out, external=external)
        return
    with pytest.raises(OperationError, match="Input/output error"):
        write(out, external=external)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_that_the_checker_refuses(tmp_path: Path) -> None:
    import onnx_ir as ir

    model = small_model().clone()
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    with pytest.raises(OperationError, match=r"the checker of onnx .* refuses"):
        write_model(model, tmp_path / "a.onnx", external=False)


def test_the_command_line_imports_none_of_it() -> None:
    code = "import sys, m3compile.cli.app; print(*sys.modules)"
    loaded = set(run_fresh(code).split())
    assert "m3compile.cli.export_onnx" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "onnx", "onnxscript", "onnxruntime"})
