"""The encoder on CUDA as a server uses it: captures, streams, threads, memory, closing.

Results are compared bit for bit with those of the same bucket made otherwise.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import BUDGETS
from gpu_support import SMALL, pixels_of, run_python, tokens_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def artifact(gpu_artifact: Path) -> Path:
    return gpu_artifact


@pytest.fixture(scope="module")
def encoder(gpu_artifact: Path) -> Iterator:
    from m3compile.loading import load

    with load(gpu_artifact) as loaded:
        yield loaded


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
