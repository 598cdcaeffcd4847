"""Builds that fail in any stage and in any way, with the golden program in the place of export and
compiler: what is there afterwards is compared with what was there before.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._inductor
from fake_compiler import (
    STAGES,
    Stages,
    checkpoint_with,
    config,
    nothing_is_left,
    use_golden_program,
)

import m3compile
from m3compile import pipeline
from m3compile.artifact import read_manifest
from m3compile.config import TINY, Bounds
from m3compile.errors import (
    BuildError,
    ExitCode,
    M3CompileError,
    RequestError,
    VerificationError,
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


def throw(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


# What fails on the way.


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("thrown", "caught"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device"), (BuildError, OSError)),
        (MemoryError(), MemoryError),
        (BuildError("the compiler failed"), BuildError),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_in_any_stage_leaves_nothing(
    compiles: object,
    golden_artifact: Path,
    tmp_path: Path,
    stage: str,
    thrown: BaseException,
    caught: type[BaseException],
    force: bool,
) -> None:
    if force:
        shutil.copytree(golden_artifact, tmp_path / "a")
    progress = Stages(stage, throw(thrown))
    with pytest.raises(caught), nothing_is_left(tmp_path):
        build(config(tmp_path / "a", force=force), progress)
    assert progress.begun[-1] == stage


def test_an_error_of_the_system_becomes_one_of_ours(compiles: object, tmp_path: Path) -> None:
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory.\nTried everything")
    for thrown, says in (
        (OSError(28, "No space left on device"), "cannot write to .*No space left on device"),
        (out_of_memory, r"out of device memory: CUDA out of memory\.$"),
    ):
        with pytest.raises(BuildError, match=says) as caught:
            build(config(tmp_path / "a"), Stages("compile", throw(thrown)))
        assert caught.value.exit_code == ExitCode.FAILED


def test_a_full_disk(compiles: list[Callable[[], object]], tmp_path: Path) -> None:
    """As far as a limit of the size of files is one: the weights are larger, the program is not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 2_500_000
    progress = Stages(
        "write weights", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    )
    try:
        with pytest.raises(BuildError, match=r"cannot write to .*too large"):
            build(config(tmp_path / "a"), progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.listdir(tmp_path)


def test_another_build_was_faster(
    compiles: list[Callable[[], object]], golden_artifact: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a"
    compiles.append(lambda: shutil.copytree(golden_artifact, out))
    with pytest.raises(RequestError, match="a exists; pass --force"):
        build(config(out))
    assert read_manifest(out) == read_manifest(golden_artifact)
    assert os.listdir(tmp_path) == ["a"]


def test_force_replaces_what_another_build_made(
    compiles: list[Callable[[], object]], golden_artifact: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a"
    compiles.append(lambda: shutil.copytree(golden_artifact, out))
    build(config(out, force=True))
    assert read_manifest(out).ladder == (32,)
    assert os.listdir(tmp_path) == ["a"]


# What its own verification finds.


def test_bounds_that_cannot_be_held(
    verifies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pipeline, m3compile.verify.judge):
        monkeypatch.setattr(module, "BOUNDS", {"float32": Bounds(relative_error=1e-12)})
    with pytest.raises(VerificationError, match=r"differs from eager.*allowed 1e-12") as caught:
        build(config(tmp_path / "a"))
    assert caught.value.exit_code == ExitCode.VERIFICATION
    assert not os.listdir(tmp_path)


def test_a_program_that_computes_something_else(verifies: None, tmp_path: Path) -> None:
    """The program has an epsilon inside that is not the checkpoint's."""
    given = checkpoint_with(
        tmp_path / "checkpoint",
        lambda document: document["vision_config"].update(layer_norm_eps=1e-3),
    )
    progress = Stages()
    with pytest.raises(VerificationError, match="nothing was published"), nothing_is_left(tmp_path):
        build(config(tmp_path / "a", checkpoint=str(given)), progress)
    assert progress.begun == STAGES


def test_weights_that_another_program_wants(compiles: object, tmp_path: Path) -> None:
    def one_layer_less(document: dict[str, Any]) -> None:
        document["vision_config"]["num_hidden_layers"] = 2

    small = msgspec.structs.replace(TINY, num_hidden_layers=2)
    given = init_checkpoint(tmp_path / "checkpoint", small)
    with pytest.raises(M3CompileError, match=r"layers\.2\."), nothing_is_left(tmp_path):
        build(config(tmp_path / "a", checkpoint=str(given)))


# Interrupted from outside.

SLOW_BUILD = """
import sys, time
from m3compile import pipeline
from m3compile.cli.app import main
pipeline.export_tower = lambda *args: None
def compile_package(exported, package):
    package.write_text("half")
    print("compiling", flush=True)
    time.sleep(60)
pipeline.compile_package = compile_package
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, "build", "--out", tmp_path / "out/a", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        # A background job of a shell ignores interrupts; this one must not inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    assert len(os.listdir(tmp_path / "out")) == 1
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in said
    assert os.listdir(tmp_path / "out") == []
    assert os.listdir(scratch) == []
