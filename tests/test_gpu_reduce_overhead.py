"""The engine `reduce-overhead` on CUDA: against eager, bit for bit inside a bucket, from threads.

One tiny artifact, compiled once; its caches are read by every other load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN_CHECKPOINT
from gpu_support import SMALL, Eager, Grid, pixels_of, run_python

pytestmark = pytest.mark.gpu

BUDGETS = (16, 64, 256)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from m3compile.config import BuildConfig
    from m3compile.pipeline import build

    out = tmp_path_factory.mktemp("artifacts") / "reduced"
    return build(
        BuildConfig(
            checkpoint=str(GOLDEN_CHECKPOINT),
            out=str(out),
            device="cuda",
            budgets=BUDGETS,
            max_items=8,
            engine="reduce-overhead",
        )
    ).path


@pytest.fixture(scope="module")
def encoder(artifact: Path) -> Iterator:
    from m3compile.loading import load

    with load(artifact) as loaded:
        yield loaded


def test_every_route_agrees_with_eager(encoder) -> None:
    eager = Eager()
    grids: list[Grid] = [(1, 4, 4), SMALL, (1, 24, 24), (1, 40, 40), (1, 2, 2), (9, 8, 8)]
    pixels = [pixels_of(grid, seed) for seed, grid in enumerate(grids)]
    for _ in range(3):
        for one, grid in zip(pixels, grids, strict=True):
            eager.check(encoder.encode(one, [grid])[0], one, grid)
        for got, one, grid in zip(encoder.encode(pixels, grids), pixels, grids, strict=True):
            eager.check(got, one, grid)
    assert encoder.num_graphs == len(BUDGETS)
    assert encoder.stats()["exact_runs"] > 0


def test_neighbours_and_what_a_buffer_held_change_no_bit(encoder) -> None:
    other: Grid = (1, 12, 20)
    a, b = pixels_of(SMALL), pixels_of(other, 1)
    alone = encoder.encode_at([a], [SMALL], 256)[0]
    assert torch.equal(encoder.encode_at([a, 1000 * b], [SMALL, other], 256)[0], alone)
    bad = torch.full_like(b, torch.nan)
    assert torch.equal(encoder.encode_at([bad, a], [other, SMALL], 256)[1], alone)
    assert torch.equal(encoder.encode_at([a], [SMALL], 256)[0], alone)


def test_calls_from_several_streams_and_threads(encoder) -> None:
    grids: list[Grid] = [SMALL, (1, 24, 24), (1, 4, 4), (1, 40, 40)]
    pixels = {grid: pixels_of(grid) for grid in grids}
    expected = {grid: encoder.encode(pixels[grid], [grid])[0] for grid in grids}
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for call in range(20):
                grid = grids[(seed + call) % len(grids)]
                rows = pixels[grid].clone()
                got = encoder.encode(rows, [grid])[0]
                rows.fill_(torch.nan)
                if not torch.equal(got, expected[grid]):
                    wrong.append(f"thread {seed}, call {call}, {grid}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_fresh_process_starts_warm_and_records_nothing_later(artifact: Path) -> None:
    code = """
import sys, time, torch, m3compile
import torch._inductor.cudagraph_trees
started = time.perf_counter()
with m3compile.load(sys.argv[1]) as encoder:
    seconds = time.perf_counter() - started
    from torch._dynamo.utils import counters
    misses = counters["inductor"].get("fxgraph_cache_miss", 0)
    graphs = counters["stats"]["unique_graphs"]

    def refuse(*arguments, **options):
        raise AssertionError("recorded after load")

    torch.cuda.CUDAGraph.capture_begin = refuse
    for tokens in (1, 16, 40, 64, 200, 256, 300):
        rows = torch.randn(4 * tokens, 1176, device="cuda")
        assert encoder.encode(rows, [[1, 2, 2 * tokens]])[0].isfinite().all()
    assert counters["stats"]["unique_graphs"] == graphs
assert "m3compile.tower" not in sys.modules
print("misses", misses, f"load {seconds:.1f} s, memory after close", torch.cuda.memory_allocated())
"""
    done = run_python(code, artifact)
    assert done.stdout.strip().splitlines()[-1].startswith("misses 0 "), done.stdout + done.stderr
    print(done.stdout)
