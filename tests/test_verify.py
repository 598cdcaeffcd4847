"""The judge: its routes are compared with the ladder (every budget, its lower edge, mixes, exact
shapes, clips); its verdicts with faults that are put into the weights, the bounds or the program.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from conftest import BUDGETS, GOLDEN_CHECKPOINT
from crafted import copy, edited
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import m3compile
from m3compile.buckets import default_ladder, segments_of
from m3compile.config import BOUNDS, TINY, Bounds
from m3compile.config.bounds import tightest
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import ArtifactError, CheckpointError, CheckpointNotFoundError
from m3compile.progress import Progress
from m3compile.verify import broken_bound, relative_error, verify, verify_encoder
from m3compile.verify.cases import routes as cases_of

Routes = list[tuple[str, int | None, list[list[tuple[int, int, int]]]]]


def routes(ladder: tuple[int, ...], slots: int, frames: int = 4, device: str = "cpu") -> Routes:
    encoder: Any = SimpleNamespace(
        manifest=SimpleNamespace(
            tower=msgspec.structs.replace(TINY, vision_segment_max_frames=frames)
        ),
        ladder=ladder,
        max_segments=slots,
        device=torch.device(device),
    )
    return list(cases_of(encoder))


def tokens(grids: list[tuple[int, int, int]]) -> int:
    return sum(map(math.prod, grids)) // 4


def segments(grids: list[tuple[int, int, int]], frames: int) -> list[tuple[int, int, int]]:
    return [segment for grid in grids for segment in segments_of(*grid, frames)]


ladders = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=6, unique=True).map(sorted)


@settings(deadline=None, max_examples=150)
@given(ladders, st.integers(1, 300), st.integers(1, 300), st.sampled_from(["cpu", "cuda"]))
@example([MAX_TOKENS], 128, 4, "cpu")
@example([1, MAX_TOKENS], 1, 4, "cuda")
@example([64, 1024], 20, 1, "cpu")
@example([64, 1024], 2, 2, "cpu")
def test_routes_cover_any_ladder(budgets: list[int], slots: int, frames: int, device: str) -> None:
    ladder = tuple(budgets)
    found = routes(ladder, slots, frames, device)
    assert [budget for route, budget, _ in found if route == "bucket"] == list(ladder)
    edges = [1, *(budget + 1 for budget in ladder[:-1])]
    for route, budget, batches in found:
        assert all(batch for batch in batches)
        for batch in batches:
            assert all(t >= 1 and h % 2 == 0 and w % 2 == 0 and h * w > 0 for t, h, w in batch)
            if route != "cut":
                assert tokens(batch) <= (budget or MAX_TOKENS)
                assert len(segments(batch, frames)) <= slots
    for (_, budget, batches), edge in zip(found, edges, strict=False):
        assert {tokens(batch) for batch in batches} >= {budget, edge}
    exact = next(batches for route, _, batches in found if route == "exact")
    assert {tokens(batch) for batch in exact} >= {1, min(ladder[-1] + 1, MAX_TOKENS)}
    if frames <= 256:
        ((_, _, (batch,)),) = [found_route for found_route in found if found_route[0] == "cut"]
        counts = [len(segments_of(*grid, frames)) for grid in batch]
        assert max(counts) > slots
        assert max(tokens([grid]) for grid in batch) > ladder[-1]
        assert any(count == 1 for count in counts)
        assert max(tokens([part]) for part in segments(batch, frames)) <= MAX_TOKENS


def test_the_default_ladder_is_cheap_on_a_cpu() -> None:
    found = routes(default_ladder(), 128)
    largest = [tokens([s]) for _, _, bs in found for b in bs for s in segments(b, 4)]
    # Attention grows with the square: one segment of 4,096 tokens costs what all of these do.
    assert max(largest) < 1000
    assert sum(count * count for count in largest) < 4096**2
    # Each budget is run full and at its edge, and hardly more.
    runs = sum(budget * len(batches) for _, budget, batches in found if budget)
    assert runs < 2.5 * sum(default_ladder())


def test_batches_are_mixed() -> None:
    found = routes(default_ladder(), 128)
    for _, budget, batches in found:
        if budget and budget >= 512:
            kinds = {grid for batch in batches for grid in batch}
            assert len(kinds) >= 8
            assert any(t > 1 for t, _, _ in kinds)
            assert any(w > 4 * h for _, h, w in kinds)


# Verdicts.


@pytest.fixture(scope="module")
def encoder(golden_artifact: Path) -> m3compile.Encoder:
    return m3compile.load(golden_artifact, budgets=[8, 32])


def altered(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The golden checkpoint with one tensor changed."""
    shutil.copytree(GOLDEN_CHECKPOINT, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][name]
    tensors = load_file(shard)
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, shard)
    return folder


class Steps(Progress):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def start(self, stage: str) -> None:
        self.seen.append(stage)

    def advance(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def test_the_golden_artifact_against_its_checkpoint(golden_artifact: Path) -> None:
    steps = Steps()
    report = verify(golden_artifact, GOLDEN_CHECKPOINT, steps)
    assert report.passed
    assert (report.reference, report.dtype, report.device) == ("checkpoint", "float32", "cpu")
    assert report.bounds == BOUNDS["float32"]
    assert [(row.route, row.budget) for row in report.rows] == [
        *(("bucket", budget) for budget in BUDGETS),
        ("exact", None),
        ("cut", None),
    ]
    for row in report.rows:
        assert row.passed
        assert row.reason == ""
        assert row.items > 0
        assert 0 < row.mean_error <= row.max_error <= 1e-5
        assert 0.999999 < row.min_cosine <= 1.000001
        assert row.eager_error is None
    count = len(report.rows)
    assert [seen for seen in steps.seen if isinstance(seen, str)] == ["load", "verify"]
    assert steps.seen[-count:] == [(done, count) for done in range(1, count + 1)]
    assert report.summary.startswith(f"{count} routes within bounds, largest error")


def test_without_a_checkpoint_it_says_what_that_proves(
    golden_artifact: Path, encoder: m3compile.Encoder
) -> None:
    report = verify_encoder(encoder, None, folder=golden_artifact)
    assert report.passed
    assert report.reference == "artifact weights"


NAMES = [
    "vision_tower.vision_model.embeddings.patch_embedding.weight",
    "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.weight",
    "vision_tower.vision_model.encoder.layers.2.mlp.fc2.bias",
    "patch_merge_mlp.linear_2.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_one_altered_weight(tmp_path: Path, encoder: m3compile.Encoder, name: str) -> None:
    """One number of one tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[7] += 0.5
        return tensor

    from m3compile.weights import open_checkpoint

    source = open_checkpoint(altered(tmp_path / "checkpoint", name, change))
    report = verify_encoder(encoder, source)
    assert not report.passed
    assert "routes out of bounds" in report.summary
    failed = [row for row in report.rows if not row.passed]
    assert all(row.max_error > 1e-5 and "allowed 1e-05" in row.reason for row in failed)


def test_a_checkpoint_of_other_sizes(golden_artifact: Path, tmp_path: Path) -> None:
    from m3compile.weights import init_checkpoint

    other = msgspec.structs.replace(TINY, intermediate_size=640)
    folder = init_checkpoint(tmp_path / "other", other)
    with pytest.raises(CheckpointError, match=r"intermediate_size is 640, and .* with 320"):
        verify(golden_artifact, folder)


def test_what_cannot_be_opened(golden_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify(golden_artifact, tmp_path / "gone")
    with pytest.raises(ArtifactError):
        verify(tmp_path / "gone")


def test_an_artifact_may_ask_for_more_and_not_for_less(
    golden_artifact: Path, tmp_path: Path
) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    for bound, expected in ((1e-9, 1e-9), (1.0, 1e-5), (None, 1e-5)):
        with edited(folder) as manifest:
            manifest["bounds"]["relative_error"] = bound
        with m3compile.load(folder, budgets=[4]) as strict:
            report = verify_encoder(strict, None, folder=folder)
        assert report.bounds.relative_error == expected
        assert report.passed is (bound != 1e-9)


def test_tightest() -> None:
    first = Bounds(relative_error=1e-5, eager_ratio=1.25)
    second = Bounds(relative_error=1e-4, cosine=0.9)
    both = Bounds(relative_error=1e-5, eager_ratio=1.25, cosine=0.9)
    assert tightest(first, second) == tightest(second, first) == both
    assert tightest(both, Bounds(cosine=0.99)).cosine == 0.99


def test_a_program_that_returns_nan_or_zeros_fails(
    golden_artifact: Path, encoder: m3compile.Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = encoder.encode_at
    for spoil in (
        lambda rows: rows * float("nan"),
        torch.zeros_like,
        lambda rows: rows.flip(0),
        lambda rows: rows * (1 + 2e-5),
    ):
        monkeypatch.setattr(
            encoder, "encode_at", lambda *args, s=spoil: [s(rows) for rows in real(*args)]
        )
        assert not verify_encoder(encoder, None, folder=golden_artifact).passed


def test_a_nan_behind_numbers_is_shown(
    golden_artifact: Path, encoder: m3compile.Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one token of the last item of every batch."""
    encode_at = encoder.encode_at

    def spoiled(*arguments: Any) -> list[torch.Tensor]:
        results = [result.clone() for result in encode_at(*arguments)]
        results[-1][-1, 0] = float("nan")
        return results

    monkeypatch.setattr(encoder, "encode_at", spoiled)
    report = verify_encoder(encoder, None, folder=golden_artifact)
    assert not report.passed
    for row in report.rows:
        is_spoiled = row.route != "cut"
        assert math.isnan(row.max_error) == math.isnan(row.min_cosine) == is_spoiled, row
    assert math.isnan(report.worst_tokens[0].cosine)


@pytest.mark.parametrize(
    ("error", "cosine", "eager_error", "reason"),
    [
        (0.0124, 0.9995, 0.01, ""),
        (
            0.0126,
            0.9995,
            0.01,
            "error 1.26e-02, allowed 1.25e-02 (1.25 times eager's own 1.00e-02)",
        ),
        (0.001, 0.998, 0.01, "cosine 0.998000, allowed 0.999"),
        (math.nan, 1.0, 0.01, "error nan"),
        (0.001, math.nan, 0.01, "cosine nan"),
        (0.001, 1.0, math.nan, "allowed nan"),
    ],
)
def test_bounds_of_bfloat16(error: float, cosine: float, eager_error: float, reason: str) -> None:
    found = broken_bound(BOUNDS["bfloat16"], (1, 4, 4), error, cosine, eager_error)
    assert reason in found
    assert bool(found) is bool(reason)


def test_bounds_of_float32() -> None:
    assert broken_bound(BOUNDS["float32"], (1, 4, 4), 9.9e-6, 0.0, None) == ""
    assert "error 1.10e-05, allowed 1e-05" in broken_bound(
        BOUNDS["float32"], (1, 4, 4), 1.1e-5, 1.0, None
    )
    assert broken_bound(BOUNDS["float32"], (1, 4, 4), math.nan, 1.0, None)


def test_relative_error() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_error(expected, expected) == 0
    assert relative_error(
        expected + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), expected
    ) == pytest.approx(0.1)
    assert math.isnan(relative_error(expected * math.nan, expected))
