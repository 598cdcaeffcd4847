"""`encode`: what it writes is compared with `Encoder.encode` on the same rows; what it refuses with
the exit codes of the contract, and with what the output's folder held before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOLDENS
from crafted import copy, edited, redigest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from terminal import Refused, Run, Terminal

import m3compile
from m3compile.config import PreprocessConfig
from m3compile.images import load_images

IMAGES = [GOLDENS / "images" / name for name in ("tiny.png", "gray.png", "wide.png")]
PREPROCESSOR = "preprocessor_config.json"
GRIDS = [[1, 4, 4], [3, 2, 6], [1, 8, 8]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


@pytest.fixture(scope="module")
def encoder(golden_artifact: Path) -> m3compile.Encoder:
    return m3compile.load(golden_artifact)


def rows_file(path: Path, grids: Any = GRIDS, **changes: Any) -> Path:
    """A safetensors file with a batch; `changes` replace its tensors, or drop them (None)."""
    grid_thw = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    generator = torch.Generator().manual_seed(0)
    pixel_values = torch.randn(int(grid_thw.prod(1).sum()), 1176, generator=generator)
    tensors = {"pixel_values": pixel_values, "grid_thw": grid_thw, **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


def assert_written(output: Path, expected: list[torch.Tensor]) -> None:
    found = load_file(output)
    assert sorted(found) == ["embeddings", "token_counts"]
    assert found["token_counts"].dtype == torch.int64
    assert found["token_counts"].tolist() == [len(rows) for rows in expected]
    assert found["embeddings"].dtype == expected[0].dtype
    assert torch.equal(found["embeddings"], torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grid_dtype", [torch.int64, torch.int32])
def test_rows(
    run: Run,
    encoder: m3compile.Encoder,
    golden_artifact: Path,
    tmp_path: Path,
    dtype: torch.dtype,
    grid_dtype: torch.dtype,
) -> None:
    pixel_values = load_file(rows_file(tmp_path / "in.safetensors"))["pixel_values"].to(dtype)
    grid_thw = torch.tensor(GRIDS, dtype=grid_dtype)
    given = rows_file(tmp_path / "in.safetensors", pixel_values=pixel_values, grid_thw=grid_thw)
    output = tmp_path / "out.safetensors"
    code, out, _ = run("encode", golden_artifact, "--input", given, "--output", output)
    assert (code, out) == (0, f"Wrote {output}: 3 items, 29 tokens of 96\n")
    assert_written(output, encoder.encode(pixel_values, grid_thw))
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "out.safetensors"]
    with safe_open(output, framework="pt") as file:
        metadata = file.metadata()
    assert metadata == {"artifact": str(golden_artifact), "inputs": json.dumps([str(given)])}


@pytest.mark.parametrize(
    "words",
    [
        ["--input", *IMAGES],
        [*(word for image in IMAGES for word in ("--input", image))],
        ["--input", *IMAGES[:2], "--input", IMAGES[2]],
        [f"--input={IMAGES[0]}", *IMAGES[1:]],
        ["--input", IMAGES[0], "--device", "cpu", "--input", *IMAGES[1:]],
    ],
)
@pytest.mark.parametrize("artifact_first", [True, False])
def test_images(
    run: Run,
    encoder: m3compile.Encoder,
    golden_artifact: Path,
    tmp_path: Path,
    words: list[object],
    artifact_first: bool,
) -> None:
    output = tmp_path / "out.safetensors"
    options = [*words, "--output", output]
    line = [golden_artifact, *options] if artifact_first else [*options, golden_artifact]
    if not artifact_first:
        # An option that takes one value ends the list of images.
        line = [*words, "--output", output, golden_artifact]
    assert run("encode", *line)[0] == 0
    assert_written(output, encoder.encode(*load_images(IMAGES, PreprocessConfig())))


def test_no_items(run: Run, golden_artifact: Path, tmp_path: Path) -> None:
    given, output = rows_file(tmp_path / "in.safetensors", []), tmp_path / "out.safetensors"
    code, out, _ = run("encode", golden_artifact, "--input", given, "--output", output)
    assert (code, out) == (0, f"Wrote {output}: 0 items, 0 tokens of 96\n")
    found = load_file(output)
    assert found["embeddings"].shape == (0, 96)
    assert found["embeddings"].dtype == torch.float32
    assert found["token_counts"].tolist() == []


def test_items_that_are_not_finite_are_told(
    run: Run, golden_artifact: Path, tmp_path: Path
) -> None:
    pixel_values = torch.ones(32, 1176)
    pixel_values[3, 5] = float("inf")
    given = rows_file(
        tmp_path / "in.safetensors", [[1, 4, 4], [1, 4, 4]], pixel_values=pixel_values
    )
    output = tmp_path / "out.safetensors"
    code, out, err = run("encode", golden_artifact, "--input", given, "--output", output)
    assert (code, out) == (0, f"Wrote {output}: 2 items, 8 tokens of 96\n")
    assert "warning: 1 items had non-finite pixels and are NaN" in err
    found = load_file(output)["embeddings"]
    assert found[:4].isnan().all()
    assert found[4:].isfinite().all()


# Settings of the image processor that come with the artifact.


def with_settings(artifact: Path, folder: Path, text: str, *, listed: bool = True) -> Path:
    copy(artifact, folder)
    (folder / PREPROCESSOR).write_text(text)
    if listed:
        with edited(folder) as manifest:
            manifest["files"][PREPROCESSOR] = {}
        redigest(folder)
    return folder


SMALLER = '{"min_pixels": 3136, "max_pixels": 12544, "image_mean": [0.5, 0.5, 0.5]}'


def test_the_artifacts_settings_are_honoured(
    run: Run, encoder: m3compile.Encoder, golden_artifact: Path, tmp_path: Path
) -> None:
    folder = with_settings(golden_artifact, tmp_path / "a", SMALLER)
    output = tmp_path / "out.safetensors"
    assert run("encode", folder, "--input", *IMAGES, "--output", output)[0] == 0
    settings = PreprocessConfig(min_pixels=3136, max_pixels=12544, mean=(0.5, 0.5, 0.5))
    rows, grids = load_images(IMAGES, settings)
    assert grids.tolist() != load_images(IMAGES, PreprocessConfig())[1].tolist()
    assert_written(output, encoder.encode(rows, grids))


def test_settings_that_are_not_the_artifacts_are_ignored(
    run: Run, encoder: m3compile.Encoder, golden_artifact: Path, tmp_path: Path
) -> None:
    folder = with_settings(golden_artifact, tmp_path / "a", SMALLER, listed=False)
    output = tmp_path / "out.safetensors"
    assert run("encode", folder, "--input", *IMAGES, "--output", output)[0] == 0
    assert_written(output, encoder.encode(*load_images(IMAGES, PreprocessConfig())))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ('{"do_resize": false}', "do_resize is False; allowed: true"),
        ('{"rescale_factor": 0}', "rescale_factor is 0"),
        ('{"patch_size": 16}', "patch_size is 16; allowed: 14"),
        ('{"temporal_patch_size": 1}', "temporal_patch_size is 1; allowed: 2"),
    ],
)
def test_settings_that_cannot_be_honoured(
    refused: Refused, golden_artifact: Path, tmp_path: Path, text: str, says: str
) -> None:
    folder = with_settings(golden_artifact, tmp_path / "a", text)
    line = refused(3, "encode", folder, "--input", IMAGES[0], "--output", tmp_path / "out")
    assert f"{folder / PREPROCESSOR}: " in line
    assert says in line


# Requests that are wrong.


def refuse_rows(refused: Refused, artifact: Path, given: Path) -> str:
    line = refused(2, "encode", artifact, "--input", given, "--output", given.parent / "out")
    assert sorted(os.listdir(given.parent)) == [given.name]
    return line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pixel_values": None}, "pixel_values is missing; found ['grid_thw']"),
        ({"grid_thw": None}, "grid_thw is missing; found ['pixel_values']"),
        ({"pixel_values": torch.zeros(91, 1176)}, "91 rows, expected 116"),
        ({"pixel_values": torch.zeros(116, 1175)}, "(116, 1175), expected (rows, 1176)"),
        ({"pixel_values": torch.zeros(116, 1176, dtype=torch.uint8)}, "expected a float dtype"),
        ({"pixel_values": torch.zeros(116, 3, 392)}, "(116, 3, 392)"),
        ({"grid_thw": torch.tensor([[1.0, 4, 4]])}, "float32, expected integers"),
        ({"grid_thw": torch.tensor([1, 4, 4])}, "(3,), expected (num_items, 3)"),
        ({"grid_thw": torch.tensor([[1, 3, 4]])}, "item 0: grid is [1, 3, 4]"),
        ({"grid_thw": torch.tensor([[1, 4, 4], [1, -2, 4]])}, "item 1: grid is [1, -2, 4]"),
        ({"grid_thw": torch.tensor([[True, True, True]])}, "bool, expected integers"),
    ],
)
def test_rows_that_are_no_batch(
    refused: Refused, golden_artifact: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    given = rows_file(tmp_path / "in.safetensors", **changes)
    assert says in refuse_rows(refused, golden_artifact, given)


@pytest.mark.parametrize("data", [b"", b"hello", b"\xff" * 100, b"\2" + bytes(7) + b"{}"])
@pytest.mark.parametrize("name", ["in.safetensors", "in.SAFETENSORS", "in.png", "in"])
def test_files_that_are_neither(
    refused: Refused, golden_artifact: Path, tmp_path: Path, data: bytes, name: str
) -> None:
    (tmp_path / name).write_bytes(data)
    line = refuse_rows(refused, golden_artifact, tmp_path / name)
    assert str(tmp_path / name) in line


def test_a_truncated_image(refused: Refused, golden_artifact: Path, tmp_path: Path) -> None:
    data = (GOLDENS / "images/large.jpg").read_bytes()
    (tmp_path / "in.jpg").write_bytes(data[: len(data) // 2])
    assert "damaged or truncated" in refuse_rows(refused, golden_artifact, tmp_path / "in.jpg")


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (["in.safetensors", "tiny.png"], "one safetensors file, or image files"),
        (["tiny.png", "in.safetensors"], "one safetensors file, or image files"),
        (["in.safetensors", "in.safetensors"], "one safetensors file, or image files"),
        (["gone.png"], "gone.png: no such file"),
        (["tiny.png", "gone.png"], "gone.png: no such file"),
        (["folder"], "folder: no such file"),
    ],
)
def test_inputs_that_do_not_go_together(
    refused: Refused, golden_artifact: Path, tmp_path: Path, inputs: list[str], says: str
) -> None:
    rows_file(tmp_path / "in.safetensors")
    (tmp_path / "tiny.png").write_bytes(IMAGES[0].read_bytes())
    (tmp_path / "folder").mkdir()
    before = sorted(os.listdir(tmp_path))
    paths = [tmp_path / name for name in inputs]
    line = refused(2, "encode", golden_artifact, "--input", *paths, "--output", tmp_path / "out")
    assert says in line
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--output", "gone/out"), "its folder does not exist"),
        (("--output", "."), "a folder; expected the name of a file"),
        (("--output", "out", "--device", "tpu"), "tpu"),
        (("--output", "out", "--input"), "--input"),
    ],
)
def test_options_that_are_wrong(
    refused: Refused,
    golden_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(2, "encode", golden_artifact, "--input", IMAGES[0], *words)
    assert os.listdir(tmp_path) == []


# What is not there, does not fit, or fails.


def test_no_artifact(refused: Refused, tmp_path: Path) -> None:
    line = refused(
        3, "encode", tmp_path / "gone", "--input", IMAGES[0], "--output", tmp_path / "out"
    )
    assert "no such artifact folder" in line


def test_another_device(refused: Refused, golden_artifact: Path, tmp_path: Path) -> None:
    words = ("--input", IMAGES[0], "--output", tmp_path / "out", "--device", "cuda")
    line = refused(3, "encode", golden_artifact, *words)
    assert "built for device cpu, asked to run on cuda" in line


def test_an_output_that_cannot_be_written(refused: Refused, golden_artifact: Path) -> None:
    words = ("--input", IMAGES[0], "--output", "/proc/self/out")
    assert "cannot write /proc/self/out" in refused(4, "encode", golden_artifact, *words)


def test_a_failure_leaves_the_old_output(
    refused: Refused, golden_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    output.write_text("old")
    real: Callable[..., int] = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        real(path, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    line = refused(4, "encode", golden_artifact, "--input", IMAGES[0], "--output", output)
    assert line == f"error: cannot write {output}: No space left on device"
    assert output.read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]
