"""The encoder on CUDA: every row of the field's cases, bits, buffers, streams and memory.

Embeddings are compared with the eager float32 tower within the bounds of bfloat16, and bit for
bit where both come from one bucket. One tiny artifact is compiled; `load` is given other ladders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from conftest import BUDGETS
from gpu_support import HUGE, LARGE, SMALL, Eager, Grid, pixels_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def artifact(gpu_artifact: Path) -> Path:
    return gpu_artifact


@pytest.fixture(scope="module")
def encoder(gpu_artifact: Path) -> Iterator:
    from m3compile.loading import load

    with load(gpu_artifact) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def eager() -> Eager:
    return Eager()


def test_verify_passes_on_the_artifacts_own_weights(artifact: Path) -> None:
    from m3compile.verify import verify

    report = verify(artifact)
    assert report.passed, report.summary
    assert report.device == "cuda:0"


def test_route_times_are_measured_and_stored(artifact: Path, encoder) -> None:
    from m3compile.artifact import read_manifest

    times = read_manifest(artifact).times
    assert times is not None
    assert times.budgets == BUDGETS
    assert encoder.manifest.times == times


def test_backend_chosen_by_auto_is_named_with_its_reason(encoder) -> None:
    needs, source = encoder.manifest.requirements, encoder.manifest.provenance
    assert needs.attention_backend.startswith("FLASH_ATTN_")
    assert "self-check" in source.attention_reason
    assert needs.attention_backend in source.attention_reason


def test_rows_left_by_larger_buckets_do_not_reach_small_ones(artifact: Path, eager: Eager) -> None:
    # vllm 57136
    from m3compile.loading import load

    ladder = [64, 256, 1024, 2048, 4096, 8192, 16384]
    with load(artifact, budgets=ladder) as encoder:
        results = []
        for _ in range(3):
            for grid in (SMALL, LARGE, SMALL):
                results.append(encoder.encode(pixels_of(grid), [grid])[0])
                eager.check(results[-1], pixels_of(grid), grid)
        small = [results[index] for index in (0, 2, 3, 5, 6, 8)]
        assert all(torch.equal(small[0], other) for other in small[1:])
        huge = pixels_of(HUGE)
        eager.check(encoder.encode_at(huge, [HUGE], 16384)[0], huge, HUGE)
        in_largest = encoder.encode_at(pixels_of(SMALL), [SMALL], 16384)[0]
        eager.check(in_largest, pixels_of(SMALL), SMALL)


def test_one_length_in_other_segments_gives_other_results(encoder, eager: Eager) -> None:
    # sglang 16902, 37043
    rows = pixels_of((1, 6, 12))
    partitions: list[list[Grid]] = [
        [(1, 4, 4), (1, 4, 6), (1, 4, 8)],
        [(1, 4, 4), (1, 4, 4), (1, 4, 10)],
        [(1, 2, 36)],
        [(1, 6, 12)],
    ]
    whole = []
    for grids in partitions:
        results = encoder.encode_at(rows, grids, 64)
        start = 0
        for grid, result in zip(grids, results, strict=True):
            eager.check(result, rows[start : start + math.prod(grid)], grid)
            start += math.prod(grid)
        whole.append(torch.cat(results))
    for index, one in enumerate(whole):
        assert all(not torch.allclose(one, other, atol=1e-2) for other in whole[index + 1 :])


def test_neighbours_change_no_bit(encoder) -> None:
    # TensorRT-LLM 2183, 2495
    grid_a, grid_b, grid_c = SMALL, (1, 12, 20), (1, 20, 12)
    a, b, c = pixels_of(grid_a), pixels_of(grid_b, 1), pixels_of(grid_c, 2)
    alone = encoder.encode_at([a], [grid_a], 256)[0]
    assert torch.equal(encoder.encode_at([a, b], [grid_a, grid_b], 256)[0], alone)
    assert torch.equal(encoder.encode_at([a, c], [grid_a, grid_c], 256)[0], alone)
    assert torch.equal(encoder.encode_at([b, a], [grid_b, grid_a], 256)[1], alone)
    assert torch.equal(encoder.encode_at([a, 1000 * b], [grid_a, grid_b], 256)[0], alone)
    assert torch.equal(encoder.encode_at([1000 * b, a], [grid_b, grid_a], 256)[1], alone)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("budget", [256, 576, None])
def test_bad_pixels_stay_with_their_item(encoder, value: float, budget: int | None) -> None:
    grid_a, grid_b = SMALL, (1, 12, 20)
    a, b = pixels_of(grid_a), pixels_of(grid_b, 1)
    good = encoder.encode_at([a, b], [grid_a, grid_b], budget)
    bad_rows = b.clone()
    bad_rows[100, 7] = value
    before = encoder.stats()["nonfinite_items"]
    first, second = encoder.encode_at([a, bad_rows], [grid_a, grid_b], budget)
    assert torch.equal(first, good[0])
    is_bad = not math.isfinite(value)
    assert second.isnan().all() if is_bad else second.isfinite().all()
    # Bad rows first: kernels over-read past a segment's end too.
    second, first = encoder.encode_at([bad_rows, a], [grid_b, grid_a], budget)
    assert torch.equal(first, good[0])
    assert encoder.stats()["nonfinite_items"] - before == 2 * is_bad


def test_what_a_buffer_held_before_changes_no_bit(encoder) -> None:
    a, whole = pixels_of(SMALL), pixels_of((1, 32, 32), 3)
    expected = encoder.encode_at(a, [SMALL], 256)[0]
    for value in (math.nan, math.inf, 1e4, 3e38):
        encoder.encode_at(torch.full_like(whole, value), [(1, 32, 32)], 256)
        assert torch.equal(encoder.encode_at(a, [SMALL], 256)[0], expected)


def test_package_with_other_weights_is_refused_and_the_process_lives(
    artifact: Path, encoder
) -> None:
    # pytorch 142246
    from m3compile.artifact import PROGRAM, read_manifest
    from m3compile.errors import ArtifactDamagedError
    from m3compile.loading import load_weights
    from m3compile.program import CompiledProgram

    weights = load_weights(artifact, read_manifest(artifact), encoder.device)
    removed = weights.pop("layers.0.fc1.bias")
    with pytest.raises(ArtifactDamagedError, match=r"missing \['layers.0.fc1.bias'\]"):
        CompiledProgram(artifact / PROGRAM, weights, encoder.device)
    extra = {**weights, "layers.0.fc1.bias": removed, "other": removed}
    with pytest.raises(ArtifactDamagedError, match="'other'"):
        CompiledProgram(artifact / PROGRAM, extra, encoder.device)
    assert encoder.encode(pixels_of(SMALL), [SMALL])[0].isfinite().all()


def test_edges_of_budgets_and_of_item_counts(artifact: Path, eager: Eager) -> None:
    # vllm 8068, vllm-omni 7650
    from m3compile.loading import load

    def one(tokens: int) -> Grid:
        return (1, 2, 2 * tokens)

    with load(artifact, budgets=[64, 256, 576], max_items=4) as encoder:
        for tokens, budget in ((576, 576), (65, 256), (64, 64), (600, None)):
            before = encoder.stats()
            pixels = pixels_of(one(tokens))
            eager.check(encoder.encode(pixels, [one(tokens)])[0], pixels, one(tokens))
            after = encoder.stats()
            assert after["exact_runs"] - before["exact_runs"] == (budget is None)
            for size, count in after["by_budget"].items():
                assert count - before["by_budget"][size] == (size == budget)
        before = encoder.stats()["replays"]
        five = [pixels_of((1, 4, 4), seed) for seed in range(5)]
        results = encoder.encode(five, [(1, 4, 4)] * 5)
        assert encoder.stats()["replays"] - before == 2
        for result, pixels in zip(results, five, strict=True):
            eager.check(result, pixels, (1, 4, 4))


def test_mixed_images_and_clips_come_back_in_input_order(encoder, eager: Eager) -> None:
    sides = [(1, 4, 4), (1, 16, 16), (9, 4, 4), (1, 40, 40), (1, 6, 12), (1, 2, 2)]
    more = [(1, 48, 60), (33, 8, 8), (1, 48, 48), (2, 6, 6), (1, 64, 8), (5, 12, 12)]
    grids: list[Grid] = [*sides, *more]
    pixels = [pixels_of(grid, seed) for seed, grid in enumerate(grids)]
    for rows in (pixels, torch.cat(pixels)):
        for result, one, grid in zip(encoder.encode(rows, grids), pixels, grids, strict=True):
            eager.check(result, one, grid)


def test_artifact_of_another_gpu_is_refused_with_both_named(artifact: Path) -> None:
    from m3compile.artifact import read_manifest
    from m3compile.host import decide, detect
    from m3compile.ops import OP_SCHEMA

    needs = read_manifest(artifact).requirements
    host = detect("cuda", OP_SCHEMA)
    assert decide(needs, host, "cuda").accepted
    other = msgspec.structs.replace(needs, gpu_arch="sm_100", cuda="12.1")
    reasons = " ".join(decide(other, host, "cuda").reasons)
    assert "sm_100" in reasons
    assert str(host.gpu_arch) in reasons
    assert "12.1" in reasons
    assert str(host.cuda) in reasons
