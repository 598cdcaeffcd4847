"""`build`: the config that its flags and files make is compared with the manifest; what it refuses
with the exit codes of the contract and an untouched folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOLDEN_CHECKPOINT
from fake_compiler import use_golden_program
from safetensors.torch import load_file, save_file
from terminal import Refused, Run, Terminal

import m3compile
from m3compile import pipeline
from m3compile.artifact import read_manifest
from m3compile.buckets import default_ladder
from m3compile.config import TINY, BuildConfig
from m3compile.errors import BuildError, VerificationError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in a folder of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


@pytest.fixture
def compiles(golden_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return use_golden_program(golden_artifact, monkeypatch)


def built(out: str) -> BuildConfig:
    return read_manifest(Path(out)).build


def yaml_file(name: str, **keys: Any) -> str:
    # JSON is YAML.
    Path(name).write_text(json.dumps(keys))
    return name


# What is built.


def test_build_alone(compiles: object, run: Run) -> None:
    code, out, err = run("build")
    assert code == 0
    assert "No checkpoint given: building the tiny encoder with random weights" in err
    assert out.startswith("Built exported/tiny in ")
    assert "its embeddings mean nothing" in out
    assert "38 budgets from 64 to 4096 tokens, weights 3.6 MB" in out
    manifest = read_manifest(Path("exported/tiny"))
    assert manifest.tower == TINY
    assert manifest.provenance.weights == "random"
    assert manifest.provenance.checkpoint is None
    assert (manifest.ladder, manifest.max_segments) == (default_ladder(), 128)
    assert (manifest.build.device, manifest.build.dtype) == ("cpu", "float32")
    for stage in ("read checkpoint", "export", "compile", "write weights", "load", "verify"):
        assert f"  {stage} ...\n" in err
        assert f"  {stage}: 0." in err or f"  {stage}: " in err


def test_a_checkpoint_gives_its_name(compiles: object, run: Run) -> None:
    code, out, err = run("build", GOLDEN_CHECKPOINT)
    assert code == 0
    assert out.startswith("Built exported/tiny-m3 in ")
    assert "mean nothing" not in out
    assert "No checkpoint given" not in err
    assert built("exported/tiny-m3").checkpoint == str(GOLDEN_CHECKPOINT)


def test_random_weights_are_told(compiles: object, run: Run) -> None:
    assert run("init-checkpoint", "mine")[0] == 0
    code, out, _ = run("build", "mine")
    assert code == 0
    assert "its embeddings mean nothing" in out
    code, out, _ = run("inspect", "exported/mine")
    assert code == 0
    path = os.path.abspath("mine")
    assert f"weights from    {path} (random numbers: its embeddings mean nothing)\n" in out


def test_flags(compiles: object, run: Run) -> None:
    words = ("--out", "a/b", "--device", "cpu", "--dtype", "float32", "--budgets", "8, 64,100")
    words += ("--max-items", "7", "--attention", "TORCH_SDPA", "--engine", "aoti")
    code, _, err = run("build", GOLDEN_CHECKPOINT, *words)
    assert code == 0, err
    found = built("a/b")
    assert (found.budgets, found.max_items, found.attention) == ((8, 64, 100), 7, "TORCH_SDPA")
    assert read_manifest(Path("a/b")).ladder == (8, 64, 100)


@pytest.mark.parametrize("max_items", [1, 2, 9])
def test_max_items_hold_when_it_is_served(compiles: object, run: Run, max_items: int) -> None:
    assert run("build", "--max-items", max_items)[0] == 0
    with m3compile.load("exported/tiny") as encoder:
        assert encoder.max_segments == max_items


def test_build_yaml_is_taken(compiles: object, run: Run) -> None:
    yaml_file("build.yaml", checkpoint=str(GOLDEN_CHECKPOINT), budgets=[32], out="x")
    code, out, err = run("build")
    assert code == 0
    assert "config: build.yaml" in err
    assert out.startswith("Built x in ")
    assert built("x").budgets == (32,)


def test_flags_win_over_build_yaml(compiles: object, run: Run) -> None:
    yaml_file("build.yaml", checkpoint="/no/such", budgets=[32], out="x", max_items=3)
    code, _, _ = run("build", GOLDEN_CHECKPOINT, "--out", "y", "--budgets", "64")
    assert code == 0
    assert (built("y").budgets, built("y").max_items) == ((64,), 3)


def test_a_bad_flag_is_not_blamed_on_build_yaml(refused: Refused) -> None:
    yaml_file("build.yaml", budgets=[32])
    for words, says in (
        (("--budgets", "256,64"), "flags: budgets has 64 after 256"),
        (("--attention", "NOPE"), "flags: attention is 'NOPE'"),
    ):
        line = refused(2, "build", *words)
        assert says in line
        assert "build.yaml" not in line
    yaml_file("build.yaml", budgets=[64, 32])
    assert "build.yaml: budgets has 32 after 64" in refused(2, "build", "--attention", "auto")


def test_another_config_than_build_yaml(compiles: object, run: Run) -> None:
    yaml_file("build.yaml", nonsense=1)
    yaml_file("other.yaml", budgets=[48])
    code, _, err = run("build", "--config", "other.yaml")
    assert code == 0
    assert "build.yaml" not in err
    assert built("exported/tiny").budgets == (48,)


def test_force(compiles: object, run: Run, refused: Refused) -> None:
    assert run("build", "--budgets", "32")[0] == 0
    line = refused(2, "build", "--budgets", "48")
    assert "exported/tiny exists; pass --force to replace it, or choose another --out" in line
    assert built("exported/tiny").budgets == (32,)
    assert run("build", "--budgets", "48", "--force")[0] == 0
    assert built("exported/tiny").budgets == (48,)
    assert os.listdir("exported") == ["tiny"]


def test_warnings_are_printed(compiles: object, run: Run) -> None:
    shutil.copytree(GOLDEN_CHECKPOINT, "checkpoint")
    Path("checkpoint/model.safetensors").write_bytes(b"stray")
    code, _, err = run("build", "checkpoint")
    assert code == 0
    assert "warning: checkpoint/model.safetensors was not read" in err


# What is refused.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budgets", "64,64"), "64 after 64"),
        (("--budgets", "256,64"), "64 after 256"),
        (("--budgets", "0"), "budgets has 0"),
        (("--budgets", "-64"), "budgets has -64"),
        (("--budgets", "16385"), "16385"),
        (("--budgets", ""), "--budgets has ''; allowed: whole numbers"),
        (("--budgets", "64,,128"), "--budgets has ''"),
        (("--budgets", "64.5"), "--budgets has '64.5'"),
        (("--max-items", "0"), "max_items is 0"),
        (("--max-items", "many"), "--max-items has 'many'"),
        (("--fp8-max-error", "0"), "fp8_max_error is 0.0; allowed: a number between 0 and 1"),
        (("--fp8-min-cosine", "most"), "--fp8-min-cosine has 'most'"),
        (("--fp8-min-cosine", "0.5"), "fp8_min_cosine is 0.5 without linear_dtype"),
        (("--device", "tpu"), "device is 'tpu'; allowed: cuda, cpu"),
        (("--dtype", "float16"), "dtype is 'float16'; allowed: float32, bfloat16"),
        (("--engine", "onnx"), "engine is 'onnx'"),
        (("--attention", "FLASHINFER"), "it reads max_seqlen on the host"),
        (("--attention", "FLASH"), "attention is 'FLASH'; allowed: auto"),
        (("--attention", "FLASH_ATTN", "--device", "cpu"), "does not run on cpu; use auto"),
        (("--config", "gone.yaml"), "gone.yaml does not exist"),
        (("--out", ""), "out is ''"),
        (("a", "b"), "unexpected extra argument"),
    ],
)
def test_flags_that_are_wrong(refused: Refused, words: tuple[str, ...], says: str) -> None:
    assert says in refused(2, "build", "--device", "cpu", *words)
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("budget: [64]", "unknown key 'budget' = [64]; allowed: checkpoint"),
        ("budgets: 64", "budgets is 64"),
        ("budgets: [64, 64]", "64 after 64"),
        ("attention_dtype: fp8", "attention_dtype is 'fp8' without fp8_scales"),
        ("[1", "not valid YAML"),
        ("- 1", "holds a list"),
        ("out: a\nout: b", "given twice"),
        ("attention: FLASHINFER\ndevice: cpu", "use auto or TORCH_SDPA"),
    ],
)
def test_build_yaml_that_is_wrong(refused: Refused, text: str, says: str) -> None:
    Path("build.yaml").write_text(text)
    assert says in refused(2, "build")
    assert os.listdir() == ["build.yaml"]


def test_build_yaml_that_cannot_be_read(refused: Refused) -> None:
    """A build of the tiny encoder in its place would be a surprise."""
    Path("build.yaml").symlink_to("gone")
    assert "build.yaml does not exist" in refused(2, "build")
    Path("build.yaml").unlink()
    Path("build.yaml").mkdir()
    assert "build.yaml cannot be read" in refused(2, "build")


def test_no_gpu(compiles: object, refused: Refused) -> None:
    line = refused(4, "build", "--device", "cuda")
    assert "this machine has no usable CUDA device; use --device cpu" in line


def test_no_compiler(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    line = refused(4, "build", "--device", "cpu")
    assert "no C++ compiler: /nonexistent/c++ is not on the PATH; install g++, or set CXX" in line
    assert os.listdir() == []


def test_a_compiler_that_fails(compiles: list[Callable[[], object]], refused: Refused) -> None:
    def fail() -> None:
        raise BuildError("AOTInductor failed: it did not like it")

    compiles.append(fail)
    assert "it did not like it" in refused(4, "build")
    assert os.listdir("exported") == []


def test_a_verification_that_fails(compiles: list[Callable[[], object]], refused: Refused) -> None:
    def fail() -> None:
        raise VerificationError("the compiled program differs from eager")

    compiles.append(fail)
    assert "differs from eager" in refused(1, "build")
    assert os.listdir("exported") == []


def test_a_checkpoint_that_is_not_there(refused: Refused) -> None:
    assert "gone does not exist" in refused(3, "build", "gone", "--device", "cpu")
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: config["vision_config"].update(hidden_act="gelu_tanh"), "hidden_act"),
        (lambda config: config["vision_config"].update(rope_mode="2d"), "rope_mode"),
        (lambda config: config["vision_config"].update(num_attention_heads=3), "hidden_size"),
        (lambda config: config["vision_config"].update(hidden_size="160"), "hidden_size is '160'"),
        (lambda config: config["vision_config"].update(surprise=1), "surprise"),
        (lambda config: config.pop("text_config"), "text_config is missing"),
    ],
)
def test_a_config_that_is_wrong(
    refused: Refused, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    shutil.copytree(GOLDEN_CHECKPOINT, "checkpoint")
    config = json.loads(Path("checkpoint/config.json").read_text())
    change(config)
    Path("checkpoint/config.json").write_text(json.dumps(config))
    line = refused(3, "build", "checkpoint", "--device", "cpu")
    assert "checkpoint/config.json: " in line
    assert says in line
    assert os.listdir() == ["checkpoint"]


def test_weights_that_are_not_finite(refused: Refused) -> None:
    shutil.copytree(GOLDEN_CHECKPOINT, "checkpoint")
    shard = Path("checkpoint/model-00001-of-00004.safetensors")
    tensors = load_file(shard)
    name = next(name for name in tensors if "vision" in name)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, shard)
    line = refused(3, "build", "checkpoint", "--device", "cpu")
    assert name in line
    assert "not finite" in line


def test_the_pipeline_is_reached_by_the_command_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags that were not given stay undecided until the machine is known."""
    seen: list[BuildConfig] = []

    def stop(config: BuildConfig, progress: object) -> None:
        seen.append(config)
        raise BuildError("stop")

    monkeypatch.setattr(pipeline, "build", stop)
    assert run("build")[0] == 4
    assert seen == [BuildConfig()]
