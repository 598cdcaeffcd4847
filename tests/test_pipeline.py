"""A build, with the golden program in the place of export and compiler: what is published is
compared with the config and the checkpoint; what is refused, with an untouched folder.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from conftest import GOLDEN_CHECKPOINT
from fake_compiler import (
    STAGES,
    Stages,
    checkpoint_with,
    config,
    nothing_is_left,
    use_golden_program,
)
from safetensors.torch import load_file

import m3compile
from m3compile import pipeline
from m3compile.artifact import check_files, read_manifest
from m3compile.buckets import default_ladder
from m3compile.build.aoti import compile_package, require_compiler
from m3compile.config import BOUNDS, TINY, BuildConfig
from m3compile.errors import (
    BuildError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    OperationError,
    RequestError,
)
from m3compile.pipeline import build
from m3compile.verify import verify_encoder
from m3compile.weights import init_checkpoint


@pytest.fixture
def compiles(golden_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is in the list is called where the compiler would be; `verifies` verifies after all."""
    return use_golden_program(golden_artifact, monkeypatch)


@pytest.fixture
def verifies(compiles: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "verify_encoder", verify_encoder)


# What a build makes.


def test_what_is_published(verifies: None, tmp_path: Path) -> None:
    progress = Stages()
    report = build(config(tmp_path / "a", budgets=(4, 32)), progress)
    assert progress.begun == STAGES
    assert list(report.seconds) == STAGES
    assert report.path == tmp_path / "a"
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(report.path)) == [
        "encoder.pt2", "manifest.json", "verify.json", "weights.safetensors",
    ]  # fmt: skip
    manifest = read_manifest(report.path)
    check_files(report.path, manifest)
    assert manifest == report.manifest
    assert (manifest.ladder, manifest.max_segments, manifest.dtype) == ((4, 32), 32, "float32")
    assert manifest.tower == TINY
    assert manifest.bounds == BOUNDS["float32"]
    assert manifest.times is None
    verification = json.loads((report.path / "verify.json").read_text())
    assert verification["passed"]
    assert verification["reference"] == "checkpoint"
    assert verification["summary"] == report.verification.summary
    # Read by other accounts than the one that built it.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in report.path.iterdir()}
    assert len(modes) == 1
    with m3compile.load(report.path) as encoder:
        assert encoder.ladder == (4, 32)


def test_every_default_is_filled_in(compiles: object, tmp_path: Path) -> None:
    stored = build(config(tmp_path / "a", dtype=None, budgets=None)).manifest.build
    assert (stored.dtype, stored.device, stored.budgets) == ("float32", "cpu", default_ladder())
    assert stored.specialize == ()
    resolved = pipeline.resolve(BuildConfig(device="cpu"))
    assert resolved.budgets == default_ladder()
    assert (resolved.out, resolved.dtype) == (os.path.join("exported", "tiny"), "float32")
    named = pipeline.resolve(BuildConfig(device="cpu", checkpoint="/some/where/M3/"))
    assert named.out == os.path.join("exported", "M3")


def test_weights_are_stored_once_and_as_they_are(compiles: object, tmp_path: Path) -> None:
    report = build(config(tmp_path / "a"))
    stored = load_file(report.path / "weights.safetensors")
    assert {
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in stored.items()
    } == {(spec.name, spec.dtype, spec.shape) for spec in report.manifest.weights}
    size = sum(tensor.nbytes for tensor in stored.values())
    assert size < (report.path / "weights.safetensors").stat().st_size < size + 10_000
    assert all(tensor.isfinite().all() for tensor in stored.values())


def test_provenance_of_a_checkpoint(compiles: object, tmp_path: Path) -> None:
    source = build(config(tmp_path / "a")).manifest.provenance
    assert (source.weights, source.checkpoint) == ("checkpoint", str(GOLDEN_CHECKPOINT.resolve()))
    assert source.checkpoint_files == {
        f"model-0000{index}-of-00004.safetensors": (
            GOLDEN_CHECKPOINT / f"model-0000{index}-of-00004.safetensors"
        )
        .stat()
        .st_size
        for index in (1, 2, 3)
    }
    assert source.torch == torch.__version__


def test_random_weights_are_told_from_others(compiles: object, tmp_path: Path) -> None:
    given = init_checkpoint(tmp_path / "random", TINY, seed=7)
    source = build(config(tmp_path / "a", checkpoint=str(given))).manifest.provenance
    assert (source.weights, source.checkpoint) == ("random", str(given))
    source = build(config(tmp_path / "b", checkpoint=None)).manifest.provenance
    assert (source.weights, source.checkpoint) == ("random", None)


def test_the_image_processors_settings_come_along(compiles: object, tmp_path: Path) -> None:
    given = init_checkpoint(tmp_path / "random", TINY)
    report = build(config(tmp_path / "a", checkpoint=str(given)))
    name = "preprocessor_config.json"
    assert (report.path / name).read_bytes() == (given / name).read_bytes()
    assert name in report.manifest.files


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('{"patch_size": 16}', "patch_size is 16; allowed: 14"),
        ('{"temporal_patch_size": 1}', "temporal_patch_size is 1; allowed: 2"),
        ('{"merge_size": 4}', "merge_size is 4; allowed: 2"),
        ('{"do_resize": false}', "do_resize is False"),
        ("[]", "preprocessor_config.json"),
        ("{", "preprocessor_config.json"),
    ],
)
def test_settings_that_encode_could_not_honour(tmp_path: Path, settings: str, says: str) -> None:
    given = checkpoint_with(tmp_path / "checkpoint", lambda document: None)
    (given / "preprocessor_config.json").write_text(settings)
    progress = Stages()
    with pytest.raises(CheckpointError, match=says), nothing_is_left(tmp_path):
        build(config(tmp_path / "a", checkpoint=str(given)), progress)
    assert progress.begun == ["read checkpoint"]


def test_warnings_of_the_checkpoint_are_passed_on(compiles: object, tmp_path: Path) -> None:
    given = checkpoint_with(tmp_path / "checkpoint", lambda document: None)
    shutil.copy(given / "model-00001-of-00004.safetensors", given / "model.safetensors")
    (warning,) = build(config(tmp_path / "a", checkpoint=str(given))).warnings
    assert "model.safetensors was not read" in warning


# What it refuses before any work.


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"attention": "FLASHINFER"}, ConfigError, "reads max_seqlen on the host"),
        ({"attention": "FLASH_ATTN"}, ConfigError, "does not run on cpu"),
        ({"attention_dtype": "bfloat16"}, ConfigError, "attention_dtype is 'bfloat16'"),
        ({"attention_dtype": "fp8"}, ConfigError, "attention_dtype is 'fp8' without fp8_scales"),
        ({"fp8_scales": "x"}, ConfigError, "fp8_scales is 'x' without attention_dtype"),
        ({"fp8_inputs": "x"}, ConfigError, "fp8_inputs is 'x' without linear_dtype"),
        ({"linear_dtype": "bfloat16"}, ConfigError, "linear_dtype is 'bfloat16'"),
        ({"specialize": (16,)}, ConfigError, "specialize"),
    ],
)
def test_refused_before_any_work(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    progress = Stages()
    with pytest.raises(error, match=says), nothing_is_left(tmp_path):
        build(config(tmp_path / "a", **options), progress)
    assert progress.begun == []


def test_no_gpu_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OperationError, match="no usable CUDA device; use --device cpu"):
        build(config(tmp_path / "a", device="cuda"))
    assert pipeline.resolve(BuildConfig()).device == "cpu"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    progress = Stages()
    with pytest.raises(BuildError, match=r"/nonexistent/c\+\+ is not on the PATH"):
        build(config(tmp_path / "a"), progress)
    assert progress.begun == []
    assert not os.listdir(tmp_path)


def test_what_the_compiler_complains_of_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    complaint = "x.cpp:3:10: fatal error: omp.h: No such file or directory"
    for message, says in (
        (f"C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\nnote: 1\n{complaint}", complaint),
        ("it broke\nat length", r"AOTInductor failed: it broke$"),
        ("", r"AOTInductor failed: RuntimeError$"),
    ):

        def fail(*args: object, text: str = message, **options: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
        with pytest.raises(BuildError, match=says):
            compile_package(None, tmp_path / "x.pt2")  # type: ignore[arg-type]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("compiler", ["", "  ", "g++ -O1"])
def test_compilers_that_are_there(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "g++" else None)
    require_compiler()


def test_an_existing_artifact_is_refused_before_any_work(
    golden_artifact: Path, tmp_path: Path
) -> None:
    shutil.copytree(golden_artifact, tmp_path / "a")
    progress = Stages()
    with pytest.raises(RequestError, match="a exists; pass --force"), nothing_is_left(tmp_path):
        build(config(tmp_path / "a"), progress)
    assert progress.begun == []


@pytest.mark.parametrize("force", [False, True])
def test_another_folder_is_refused_before_any_work(tmp_path: Path, force: bool) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/thesis.txt").write_text("mine")
    progress = Stages()
    with pytest.raises(RequestError, match="is not an artifact"), nothing_is_left(tmp_path):
        build(config(tmp_path / "a", force=force), progress)
    assert progress.begun == []


def test_a_parent_that_cannot_be_written_to(compiles: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    progress = Stages()
    with pytest.raises(OperationError, match="cannot write to"), nothing_is_left(tmp_path):
        build(config(tmp_path / "file/a"), progress)
    assert "export" not in progress.begun


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="gone does not exist"):
        build(config(tmp_path / "a", checkpoint=str(tmp_path / "gone")))
    assert not os.listdir(tmp_path)
