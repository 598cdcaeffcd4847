"""The encoder on CUDA: every row of the field's cases, bits, buffers, streams and memory.

Embeddings are compared with the eager float32 tower within the bounds of bfloat16, and bit for
bit where both come from one bucket. One tiny artifact is compiled; `load` is given other ladders.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from conftest import GOLDEN_CHECKPOINT
from gpu_support import (
    BUDGETS,
    HUGE,
    LARGE,
    MAX_ITEMS,
    SMALL,
    Eager,
    Grid,
    pixels_of,
    run_python,
    tokens_of,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from m3compile.config import BuildConfig
    from m3compile.pipeline import build

    out = tmp_path_factory.mktemp("artifacts") / "gpu"
    return build(
        BuildConfig(
            checkpoint=str(GOLDEN_CHECKPOINT),
            out=str(out),
            device="cuda",
            dtype="bfloat16",
            budgets=BUDGETS,
            max_items=MAX_ITEMS,
        )
    ).path


@pytest.fixture(scope="module")
def encoder(artifact: Path) -> Iterator:
    from m3compile.loading import load

    with load(artifact) as loaded:
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


def test_kept_results_survive_later_calls_and_close(artifact: Path) -> None:
    # pytorch 104435, 170604
    from m3compile.loading import load

    with load(artifact, budgets=[64, 256]) as encoder:
        kept = [encoder.encode(pixels_of(SMALL), [SMALL])[0], encoder.encode_at(
            pixels_of(SMALL), [SMALL], None)[0]]  # fmt: skip
        copies = [one.clone() for one in kept]
        for seed in range(5):
            encoder.encode(pixels_of(SMALL, seed), [SMALL])
            encoder.encode(pixels_of((1, 32, 32), seed), [(1, 32, 32)])
    torch.randn(64, 1024, 1024, device="cuda")
    torch.cuda.synchronize()
    assert all(torch.equal(one, copy) for one, copy in zip(kept, copies, strict=True))


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


def test_every_budget_replays_in_a_fresh_process(artifact: Path) -> None:
    # pytorch 123745, 148601
    code = """
import sys, torch, m3compile
with m3compile.load(sys.argv[1]) as encoder:
    assert encoder.num_graphs == len(encoder.ladder)
    for budget in encoder.ladder:
        rows = torch.randn(4 * budget, 1176, device="cuda")
        first, second = (encoder.encode_at(rows, [[1, 2, 2 * budget]], budget)[0] for _ in "ab")
        assert first.isfinite().all() and torch.equal(first, second)
assert "m3compile.tower" not in sys.modules and "m3compile.build" not in sys.modules
print("fine")
"""
    done = run_python(code, artifact)
    assert done.stdout.strip().endswith("fine"), done.stderr


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


def test_memory_stays_level_over_many_sizes(artifact: Path) -> None:
    # sglang 13940, vllm 28230, sglang-omni 523
    from m3compile.loading import load

    def device_bytes() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def host_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    generator = random.Random(0)
    rows = torch.randn(4 * 700 * 6, 1176, device="cuda", dtype=torch.bfloat16)
    with load(artifact) as encoder:
        for call in range(2000):
            if call == 100:
                device, host = device_bytes(), host_bytes()
            grids = [
                (1, 2 * generator.randint(1, 26), 2 * generator.randint(1, 26))
                for _ in range(generator.randint(1, 6))
            ]
            encoder.encode(rows[: sum(map(math.prod, grids))], grids)
        assert device_bytes() - device < 64e6
        assert host_bytes() - host < 64e6
        assert encoder.num_graphs == len(encoder.ladder)


@pytest.mark.parametrize(
    "grid",
    [
        *([[1, 0, 160]], [[1, 3, 4]], [[0, 4, 4]], [[1, -2, 4]]),
        *([1, 4, 4], [[1.0, 4.0, 4.0]], [[1, 4, 6]]),
    ],
)
def test_bad_grids_are_refused_before_any_device_work(encoder, grid: list) -> None:
    # omlx 3529, vllm 15080, Qwen3-VL 1306
    before = encoder.stats()
    with pytest.raises(ValueError, match=r"item 0|grid|rows"):
        encoder.encode(torch.zeros(16, 1176, device="cuda"), grid)
    assert encoder.stats() == before
    assert encoder.encode(pixels_of((1, 4, 4)), [(1, 4, 4)])[0].isfinite().all()


def test_zero_images_need_no_replay(encoder) -> None:
    # molmo2 26
    before = encoder.stats()["replays"]
    no_grids = torch.zeros(0, 3, dtype=torch.int64)
    assert encoder.encode(torch.zeros(0, 1176, device="cuda"), no_grids) == []
    assert encoder.encode([], []) == []
    assert encoder.stats()["replays"] == before


def test_nothing_is_captured_after_load(encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    # tokenspeed 933
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("captured after load")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    for tokens in (1, 16, 64, 200, 576, 700):
        grid = (1, 2, 2 * tokens)
        encoder.encode(pixels_of(grid), [grid])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_host_and_device_tensors_give_the_same_bits(encoder, dtype: torch.dtype) -> None:
    pixels = pixels_of(SMALL).to(dtype)
    expected = encoder.encode(pixels, torch.tensor([SMALL], device="cuda"))[0]
    for rows in (pixels.cpu(), pixels.cpu().pin_memory(), [pixels], [pixels.cpu()]):
        assert torch.equal(encoder.encode(rows, torch.tensor([SMALL]))[0], expected)
    mixed = encoder.encode([pixels, pixels.cpu()], [SMALL, SMALL])
    assert torch.equal(mixed[0], encoder.encode([pixels, pixels], [SMALL, SMALL])[0])


def test_a_host_tensor_may_be_overwritten_at_once(encoder) -> None:
    grid = (1, 48, 48)
    rows = pixels_of(grid, device="cpu").pin_memory()
    expected = encoder.encode(rows.clone(), [grid])[0]
    for _ in range(8):
        mine = rows.clone().pin_memory()
        got = encoder.encode(mine, [grid])[0]
        mine.fill_(math.nan)
        assert torch.equal(got, expected)


def test_calls_from_several_streams_and_threads(encoder) -> None:
    grids = [SMALL, (1, 24, 24), (1, 48, 48), (1, 4, 4), (1, 48, 60)]
    pixels = {grid: pixels_of(grid) for grid in grids}
    expected = {grid: encoder.encode(pixels[grid], [grid])[0].clone() for grid in grids}
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in range(60):
                grid = generator.choice(grids)
                # Written on this stream just before: the call has to wait for it.
                rows = torch.full_like(pixels[grid], math.nan)
                rows.copy_(pixels[grid])
                got = encoder.encode(rows, [grid])[0]
                rows.fill_(math.nan)
                if not torch.equal(got, expected[grid]):
                    wrong.append(f"thread {seed}, call {call}, {grid}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("capture", ["lazy", "never"])
def test_other_ways_to_capture_give_the_same_results(artifact: Path, encoder, capture: str) -> None:
    from m3compile.loading import load

    grids = [(1, 48, 48), SMALL, (1, 4, 4), SMALL, (1, 24, 24)]
    with load(artifact, capture=capture) as other:
        assert other.num_graphs == 0
        for grid in grids:
            budget = next(size for size in BUDGETS if size >= tokens_of(grid))
            got = other.encode_at(pixels_of(grid), [grid], budget)[0]
            assert torch.equal(got, encoder.encode_at(pixels_of(grid), [grid], budget)[0])
        assert other.num_graphs == (4 if capture == "lazy" else 0)


def test_close_gives_the_device_memory_back(artifact: Path) -> None:
    from m3compile.errors import EncoderClosedError
    from m3compile.loading import load

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    encoder = load(artifact, budgets=[64, 16384])
    held = torch.cuda.memory_reserved() - before
    encoder.close()
    # What stays are workspaces of cuBLAS, one a stream.
    assert torch.cuda.memory_reserved() - before < 100e6 < 0.5 * held
    with pytest.raises(EncoderClosedError):
        encoder.encode(pixels_of(SMALL), [SMALL])


@pytest.mark.parametrize("allowed_bytes", [120e6, 200e6])
def test_too_little_device_memory_is_said_in_one_line(artifact: Path, allowed_bytes: float) -> None:
    # At first not even the input buffers fit, then not the run.
    code = """
import sys, torch, m3compile
total = torch.cuda.mem_get_info()[1]
torch.cuda.set_per_process_memory_fraction(float(sys.argv[2]) / total)
try:
    m3compile.load(sys.argv[1], budgets=[64, 16384])
except m3compile.M3CompileError as error:
    print(type(error).__name__, error)
"""
    done = run_python(code, artifact, allowed_bytes)
    assert done.stdout.startswith("OperationError out of device memory"), done.stdout + done.stderr
    assert "GB free" in done.stdout
    assert len(done.stdout.strip().splitlines()) == 1
