"""`calibrate`: what it records is compared with a computation by hand, from forward hooks on the
eager tower that runs a whole batch at once, padding with it, and with rotation in complex numbers;
what it writes with what is read back; what it refuses with the item that the message must name.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOLDEN_CHECKPOINT, GOLDENS
from helpers import Grid, golden_cases, random_rows, segment_table, segments_of_item, split_rows
from safetensors.torch import save_file
from terminal import Refused, Run, Terminal
from torch import Tensor

from m3compile import calibrate as calibration
from m3compile.calibrate import CalibrationReport, Source, calibrate
from m3compile.config import TINY, PreprocessConfig
from m3compile.config.scales import LayerScales, linear_names, read_scales
from m3compile.errors import InputError, RequestError
from m3compile.images import load_images
from m3compile.tower import Tower
from m3compile.weights import Checkpoint, init_checkpoint, open_checkpoint

NUM_LAYERS = 3
MIX: list[Grid] = [(1, 4, 4), (9, 2, 6), (1, 8, 8), (2, 4, 8)]
IMAGES = [GOLDENS / "images" / name for name in ("tiny.png", "gray.png")]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(GOLDEN_CHECKPOINT)


def source(rows: Tensor, grids: Sequence[Grid], name: str = "rows") -> Source:
    return Source(name, lambda: (rows, torch.tensor(grids).reshape(-1, 3)))


def items(rows: Tensor, grids: Sequence[Grid]) -> list[Source]:
    """Every item as a source of its own."""
    return [
        source(part, [grid], f"item {index}")
        for index, (part, grid) in enumerate(zip(split_rows(rows, grids), grids, strict=True))
    ]


def amax_of(report: CalibrationReport) -> dict[str, float]:
    return {record.name: record.amax for record in report.recorded}


# By hand.


def positions(segment: Grid) -> Tensor:
    """(rows, 3) time, height and width, in the order of rows: frames, then 2 by 2 blocks."""
    t, h, w = segment
    return torch.tensor(
        [
            (frame, 2 * block_row + row, 2 * block_column + column)
            for frame in range(t)
            for block_row in range(h // 2)
            for block_column in range(w // 2)
            for row in range(2)
            for column in range(2)
        ]
    )


def rotated(heads: Tensor, segments: Sequence[Grid], inverse_frequency: Tensor) -> Tensor:
    """q or k (rows, heads, D) after rotation, in float64."""
    where = torch.cat([positions(segment) for segment in segments]).double()
    angles = (where[:, :, None] * inverse_frequency.double()).flatten(1)[:, None]
    half = angles.shape[2]
    first, second, rest = heads.double().tensor_split([half, 2 * half], 2)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, rest), 2)


@torch.no_grad()
def by_hand(tower: Tower, rows: Tensor, grids: Sequence[Grid]) -> dict[str, float]:
    """Largest absolute values over one run of the whole batch, with 8 rows of padding."""
    segments = [segment for grid in grids for segment in segments_of_item(grid)]
    padded = torch.cat((rows, torch.full((8, rows.shape[1]), 1e4)))
    inputs: dict[str, Tensor] = {}
    fused: list[Tensor] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: object, given: tuple[Tensor, ...], output: Tensor) -> None:
            real = len(rows) // (4 if name.startswith("merger") else 1)
            inputs[name] = given[0][:real]
            if name.endswith(".qkv"):
                fused.append(output[:real])

        return hook

    linears = {name: m for name, m in tower.named_modules() if isinstance(m, torch.nn.Linear)}
    handles = [module.register_forward_hook(keep(name)) for name, module in linears.items()]
    try:
        tower(padded, segment_table(segments))
    finally:
        for handle in handles:
            handle.remove()
    values = {name: float(given.abs().max()) for name, given in inputs.items()}
    for index, qkv in enumerate(fused):
        for part, heads in zip("qkv", qkv.chunk(3, 1), strict=True):
            heads = heads.unflatten(1, (tower.config.num_attention_heads, -1))
            if part != "v":
                heads = rotated(heads, segments, tower.inverse_frequency)
            values[f"layers.{index}.attention.{part}"] = float(heads.abs().max())
    return values


@pytest.mark.parametrize("grids", [[(1, 4, 4)], [(9, 2, 6)], MIX])
def test_against_a_computation_by_hand(
    checkpoint: Checkpoint, eager_tower: Tower, grids: list[Grid]
) -> None:
    rows = random_rows(grids)
    report = calibrate(checkpoint, [source(rows, grids)])
    assert amax_of(report) == pytest.approx(by_hand(eager_tower, rows, grids), rel=1e-5)
    assert (report.items, report.tokens) == (len(grids), len(rows) // 4)


def test_golden_cases_together(checkpoint: Checkpoint, eager_tower: Tower) -> None:
    cases = [golden_cases()[name] for name in sorted(golden_cases())]
    cases = [case for case in cases if case.pixel_values.isfinite().all()]
    report = calibrate(checkpoint, [source(case.pixel_values, case.grids) for case in cases])
    each = [by_hand(eager_tower, case.pixel_values, case.grids) for case in cases]
    expected = {name: max(values[name] for values in each) for name in each[0]}
    assert len(cases) > 5
    assert amax_of(report) == pytest.approx(expected, rel=1e-5)
    assert report.items == sum(len(case.grids) for case in cases)


def test_the_comparison_sees_rotation(
    checkpoint: Checkpoint, eager_tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(MIX)
    found = amax_of(calibrate(checkpoint, [source(rows, MIX)]))
    monkeypatch.setattr(sys.modules[__name__], "rotated", lambda heads, *_: heads)
    unrotated = by_hand(eager_tower, rows, MIX)
    differ = {name for name in found if found[name] != pytest.approx(unrotated[name], rel=1e-5)}
    assert differ <= {f"layers.{i}.attention.{part}" for i in range(NUM_LAYERS) for part in "qk"}
    assert len(differ) >= NUM_LAYERS


def test_every_linear_is_seen(checkpoint: Checkpoint, eager_tower: Tower) -> None:
    linears = [n for n, m in eager_tower.named_modules() if isinstance(m, torch.nn.Linear)]
    scales = calibrate(checkpoint, [source(random_rows(MIX), MIX)]).scales
    assert sorted(scales.linears) == sorted(linears)
    assert list(scales.linears) == list(linear_names(NUM_LAYERS))
    assert len(scales.attention) == NUM_LAYERS


@pytest.mark.parametrize("margin", [1.0, 1.5, 4.0])
def test_margin(checkpoint: Checkpoint, margin: float) -> None:
    report = calibrate(checkpoint, [source(random_rows(MIX), MIX)], margin=margin)
    amax = amax_of(report)
    parts = (amax[f"layers.1.attention.{part}"] * margin / 448 for part in "qkv")
    assert report.scales.attention[1] == LayerScales(*parts)
    assert report.scales.linears["merger.fc2"] == amax["merger.fc2"] * margin / 448


def test_batches_and_their_order_do_not_matter(checkpoint: Checkpoint) -> None:
    rows = random_rows(MIX)
    together = calibrate(checkpoint, [source(rows, MIX)])
    apart = calibrate(checkpoint, items(rows, MIX))
    reversed_ = calibrate(checkpoint, items(rows, MIX)[::-1])
    twice = calibrate(checkpoint, [source(rows, MIX), *items(rows, MIX)])
    assert together.scales == apart.scales == reversed_.scales == twice.scales
    ratios = [[r.ratio for r in report.recorded] for report in (apart, reversed_, twice)]
    for found in ratios:
        assert found == pytest.approx([record.ratio for record in together.recorded], rel=1e-6)


def test_frames_of_a_clip_count_where_segments_end(checkpoint: Checkpoint) -> None:
    """A clip of 9 frames is segments of 4, 4 and 1; each counts, and knows no other."""
    rows = random_rows([(9, 2, 6)])
    parts = [(4, 2, 6), (4, 2, 6), (1, 2, 6)]
    clip = calibrate(checkpoint, [source(rows, [(9, 2, 6)])])
    assert clip.scales == calibrate(checkpoint, [source(rows, parts)]).scales
    assert (clip.items, clip.tokens) == (1, 27)


def test_in_bfloat16(checkpoint: Checkpoint) -> None:
    given = [source(random_rows(MIX), MIX)]
    exact, rounded = calibrate(checkpoint, given), calibrate(checkpoint, given, dtype="bfloat16")
    assert rounded.scales != exact.scales
    assert amax_of(rounded) == pytest.approx(amax_of(exact), rel=0.03)


# What stands out, and what is refused.


def change_weights(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], None]
) -> None:
    real = calibration.load_module_state

    def load(*arguments: Any) -> dict[str, Tensor]:
        state = real(*arguments)
        change(state)
        return state

    monkeypatch.setattr(calibration, "load_module_state", load)


def test_an_outlier_channel_stands_out(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [source(random_rows(MIX), MIX)]
    assert calibrate(checkpoint, given).unusual == []
    change_weights(monkeypatch, lambda state: state["layers.1.norm1.weight"][7].mul_(500))
    assert calibrate(checkpoint, given).unusual[0].name == "layers.1.qkv"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_an_item_that_is_not_finite(checkpoint: Checkpoint, value: float) -> None:
    rows = random_rows(MIX)
    rows[16 + 100, 5] = value
    with pytest.raises(InputError, match="second: item 1 has pixels that are not finite"):
        calibrate(checkpoint, [source(random_rows(MIX), MIX), source(rows, MIX, "second")])


def test_values_that_overflow_inside(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_weights(monkeypatch, lambda state: state["layers.0.fc1.weight"].mul_(1e38))
    with pytest.raises(RequestError, match=r"layers\.0\.fc2 is not finite in float32"):
        calibrate(checkpoint, [source(random_rows(MIX), MIX)])


def test_items_of_zeros(checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match="patch_embed is zero throughout"):
        calibrate(checkpoint, [source(torch.zeros(16, 1176), [(1, 4, 4)])])


@pytest.mark.parametrize("sources", [[], [source(torch.zeros(0, 1176), [])]])
def test_no_items(checkpoint: Checkpoint, sources: list[Source]) -> None:
    with pytest.raises(RequestError, match="hold no items"):
        calibrate(checkpoint, sources)


def test_a_margin_that_leaves_no_scale(checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match=r"the scale of patch_embed is .*with margin 1e\+300"):
        calibrate(checkpoint, [source(random_rows(MIX), MIX)], margin=1e300)


@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_pixels_of_next_to_nothing(checkpoint: Checkpoint, size: float) -> None:
    rows = random_rows(MIX) * size
    with pytest.raises(RequestError, match="patch_embed is zero throughout"):
        calibrate(checkpoint, [source(rows, MIX)])


@pytest.mark.parametrize("margin", [0.99, 0.0, -1.5, math.nan, math.inf])
def test_margins_that_are_refused(checkpoint: Checkpoint, margin: float) -> None:
    with pytest.raises(RequestError, match="margin is"):
        calibrate(checkpoint, [], margin=margin)


@pytest.mark.parametrize(
    ("rows", "grids", "says"),
    [
        (torch.zeros(15, 1176), [(1, 4, 4)], "15 rows, expected 16"),
        (torch.zeros(16, 1176), [(1, 3, 4)], "item 0: grid is"),
        (
            torch.zeros(1, 1176).expand(66_064, -1),
            [(1, 4, 4), (1, 258, 256)],
            "item 1: a segment has 16512 tokens; allowed: at most 16384",
        ),
    ],
)
def test_batches_that_are_none(
    checkpoint: Checkpoint, rows: Tensor, grids: list[Grid], says: str
) -> None:
    with pytest.raises(InputError, match=f"^rows: .*{says}"):
        calibrate(checkpoint, [source(rows, grids)])


# The command.


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Terminal(capsys).run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Terminal(capsys).refused


def rows_file(path: Path, rows: Tensor, grids: Sequence[Grid]) -> Path:
    save_file({"pixel_values": rows.contiguous(), "grid_thw": torch.tensor(grids)}, path)
    return path


CPU = ("--device", "cpu")


def test_rows_in_several_files(run: Run, checkpoint: Checkpoint, tmp_path: Path) -> None:
    rows = random_rows(MIX)
    parts = split_rows(rows, MIX)
    first = rows_file(tmp_path / "a.safetensors", torch.cat(parts[:3]), MIX[:3])
    second = rows_file(tmp_path / "b.safetensors", parts[3], MIX[3:])
    out = tmp_path / "scales.json"
    code, text, err = run(
        "calibrate", GOLDEN_CHECKPOINT, "--input", first, second, "--out", out, *CPU
    )
    assert (code, text.splitlines()[0]) == (0, "4 items, 63 tokens, float32 on cpu, margin 1.5")
    assert text.splitlines()[-1] == f"Wrote {out}"
    assert "calibrate:" in err
    expected = calibrate(checkpoint, [source(rows, MIX)])
    assert read_scales(out, NUM_LAYERS) == expected.scales
    about = json.loads(out.read_text())["m3compile"]
    assert (about["items"], about["tokens"], about["margin"]) == (4, 63, 1.5)
    smallest = min(layer.q for layer in expected.scales.attention)
    line = next(line for line in text.splitlines() if line.startswith("attention.q"))
    assert line.split()[1] == f"{smallest:.3e}"


def test_images_by_the_checkpoints_settings(
    run: Run, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN_CHECKPOINT, folder)
    settings = {"min_pixels": 3136, "max_pixels": 12544, "image_mean": [0.5, 0.5, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    rows, grids = load_images(
        IMAGES, PreprocessConfig(min_pixels=3136, max_pixels=12544, mean=(0.5, 0.5, 0.5))
    )
    out = tmp_path / "scales.json"
    line = (folder, "--input", *IMAGES, "--margin", "2", "--out", out, "--json", *CPU)
    code, text, _ = run("calibrate", *line)
    summary = json.loads(text)
    expected = calibrate(checkpoint, [Source("images", lambda: (rows, grids))], margin=2)
    assert code == 0
    assert read_scales(out, NUM_LAYERS) == expected.scales
    assert (summary["items"], summary["tokens"]) == (2, len(rows) // 4)
    assert {record["name"]: record["amax"] for record in summary["recorded"]} == amax_of(expected)
    ends = summary["kinds"]["attention.k"]
    scales = [layer.k for layer in expected.scales.attention]
    assert ends["smallest"]["scale"] == min(scales)
    assert ends["largest"]["scale"] == max(scales)
    assert summary["unusual"] == []


def test_random_weights_are_told(run: Run, tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "random", TINY)
    line = ("--input", IMAGES[0], "--out", tmp_path / "scales.json", *CPU)
    code, text, _ = run("calibrate", tmp_path / "random", *line)
    assert code == 0
    assert text.endswith("The weights are random: these scales mean nothing.\n")
    about = json.loads((tmp_path / "scales.json").read_text())["m3compile"]
    assert about["weights"] == "random"


def test_force(run: Run, refused: Refused, tmp_path: Path) -> None:
    out = tmp_path / "scales.json"
    out.write_text("mine")
    line = ("calibrate", GOLDEN_CHECKPOINT, "--input", IMAGES[0], "--out", out, *CPU)
    assert refused(2, *line) == f"error: --out {out} exists; --force replaces it"
    assert out.read_text() == "mine"
    assert run(*line, "--force")[0] == 0
    assert len(read_scales(out, NUM_LAYERS).attention) == NUM_LAYERS


@pytest.mark.parametrize(
    ("code", "words", "says"),
    [
        (2, ("--input", "gone.png", "--out", "s"), "gone.png: no such file"),
        (2, ("--input", "in.png", "--out", "gone/s"), "its folder does not exist"),
        (2, ("--input", "in.png", "--out", "."), "a folder; expected the name of a file"),
        (2, ("--input", "in.png", "--out", "s", "--margin", "0.5"), "margin is 0.5"),
        (2, ("--input", "in.png", "--out", "s", "--margin", "nan"), "margin is nan"),
        (2, ("--input", "in.png", "--out", "s", "--margin", "much"), "much"),
        (2, ("--input", "in.png", "--out", "s", "--dtype", "fp8"), "fp8"),
        (2, ("--input", "bad.png", "--out", "s", "--device", "cpu"), "bad.png: not recognised"),
        (2, ("--input", "bad.safetensors", "--out", "s", "--device", "cpu"), "not a readable"),
        (2, ("--out", "s"), "--input"),
        (2, ("--input", "in.png"), "--out"),
    ],
)
def test_what_is_refused(
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(IMAGES[0], "in.png")
    for name in ("bad.png", "bad.safetensors"):
        Path(name).write_text("hello")
    before = sorted(os.listdir())
    assert says in refused(code, "calibrate", GOLDEN_CHECKPOINT, *words)
    assert sorted(os.listdir()) == before


def test_no_checkpoint(refused: Refused, tmp_path: Path) -> None:
    line = ("--input", IMAGES[0], "--out", tmp_path / "s", *CPU)
    assert "does not exist" in refused(3, "calibrate", tmp_path / "gone", *line)


def test_no_device(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = ("--input", IMAGES[0], "--out", tmp_path / "s", "--device", "cuda")
    assert "no usable CUDA device" in refused(4, "calibrate", GOLDEN_CHECKPOINT, *line)


@pytest.mark.gpu
def test_on_cuda(checkpoint: Checkpoint) -> None:
    given = [source(random_rows(MIX), MIX)]
    expected = amax_of(calibrate(checkpoint, given))
    exact = calibrate(checkpoint, given, device="cuda")
    assert amax_of(exact) == pytest.approx(expected, rel=1e-3)
    rounded = calibrate(checkpoint, given, device="cuda", dtype="bfloat16")
    assert amax_of(rounded) == pytest.approx(expected, rel=0.03)
