"""Cases from the field about the service around an encoding; each test bears its report's name.

Memory, bad requests, empty ones, unused slots, and what is left to do after `load`.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    PATCH_DIM,
    Grid,
    assert_close_to_eager,
    assert_same_bits,
    random_rows,
    run_fresh,
)

import m3compile
from m3compile import Encoder
from m3compile.buckets import default_ladder
from m3compile.errors import ExitCode, InputError
from m3compile.tower import Tower


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


# --- sglang 13940, vllm 28230: memory climbs with varied sizes ---


def test_sglang_13940_memory_stays_and_no_bucket_is_added(golden_artifact: Path) -> None:
    rng = random.Random(0)
    with m3compile.load(golden_artifact, budgets=default_ladder(256)) as encoder:
        ladder = encoder.ladder
        before = 0
        for call in range(300):
            if call == 100:
                before = resident_bytes()
            grids = [
                (rng.choice((1, 1, 1, 5)), 2 * rng.randint(1, 8), 2 * rng.randint(1, 8))
                for _ in range(rng.randint(1, 3))
            ]
            encoder.encode(random_rows(grids, call), grids)
        assert resident_bytes() - before < 64 * 2**20
        assert encoder.stats()["calls"] == 300
        assert tuple(encoder.stats()["by_budget"]) == encoder.ladder == ladder


# --- omlx 3529, vllm 15080, Qwen3-VL 1306: a reshape fails deep inside ---


GOOD: list[Grid] = [(1, 4, 4), (2, 4, 6)]
BAD_BATCHES: list[tuple[Any, str]] = [
    ([(1, 4, 4), (1, 0, 160)], "item 1: grid is [1, 0, 160], every side must be at least 1"),
    ([(1, 3, 4)], "item 0: grid is [1, 3, 4], height and width must be multiples of 2"),
    ([(1, 4, 4), (0, 4, 4)], "item 1: grid is [0, 4, 4], every side must be at least 1"),
    ([(1, -2, 4)], "item 0: grid is [1, -2, 4], every side must be at least 1"),
    ([1, 4, 4], "item 0: grid is 1, expected three integers t, h, w"),
    (torch.tensor([1, 4, 4]), "grid_thw has shape (3,), expected (num_items, 3)"),
    (torch.tensor([[1.0, 4.0, 4.0]]), "grid_thw has dtype torch.float32, expected integers"),
    ([(1, 4, 4), (1.0, 4.0, 4.0)], "item 1: grid is (1.0, 4.0, 4.0), expected three integers"),
    ([(1, 4, 4)], "pixel_values has 64 rows, expected 16: the sum of t*h*w of 1 items"),
    ([(1, 4, 4), (1, 8, 8)], "expected 80: the sum of t*h*w of 2 items (item 1 is [1, 8, 8])"),
]


def test_omlx_3529_bad_batches_do_nothing(encoder: Encoder) -> None:
    rows = random_rows(GOOD)
    expected = encoder.encode(rows, GOOD)
    stats = encoder.stats()
    for grids, rule in BAD_BATCHES:
        with pytest.raises(InputError) as caught:
            encoder.encode(rows, grids)
        assert isinstance(caught.value, ValueError)
        assert caught.value.exit_code == ExitCode.REQUEST
        assert rule in str(caught.value)
        assert encoder.stats() == stats
        with pytest.raises(InputError):
            encoder.encode_at(rows, grids, 64)
        assert_same_bits(encoder.encode_at(rows, GOOD, 16), expected)
        stats = encoder.stats()


def test_omlx_3529_a_segment_beyond_one_run(encoder: Encoder) -> None:
    """65,540 patches in one frame, behind a good item: nothing of the batch runs."""
    grids: list[Grid] = [(1, 4, 4), (1, 2, 32_770)]
    rows = torch.zeros(1, PATCH_DIM).expand(sum(map(math.prod, grids)), PATCH_DIM)
    for encode in (encoder.encode, lambda *batch: encoder.encode_at(*batch, None)):
        with pytest.raises(InputError, match=r"65556 patches|item 1.*65540 patches|16389 tokens"):
            encode(rows, grids)
    assert encoder.stats()["calls"] == encoder.stats()["replays"] == 0
    assert encoder.stats()["exact_runs"] == 0


# --- flash-attention 1537: empty segments in cu_seqlens ---


@pytest.mark.parametrize(
    "grid_thw",
    [
        [[1, 8, 8]],
        ((1, 8, 8),),
        torch.tensor([[1, 8, 8]]),
        torch.tensor([[1, 8, 8]], dtype=torch.int32),
        np.array([[1, 8, 8]]),
        [np.array([1, 8, 8])],
        [(np.int64(1), np.int32(8), np.uint8(8))],
    ],
)
def test_flash_attention_1537_unused_slots(
    grid_thw: Any, golden_artifact: Path, eager_tower: Tower
) -> None:
    rows = random_rows([(1, 8, 8)])
    with m3compile.load(golden_artifact, max_items=8) as encoder:
        results = encoder.encode(rows, grid_thw)
        assert bool(results[0].isfinite().all())
        assert_close_to_eager(results, eager_tower, rows, [(1, 8, 8)])


# --- molmo2 26: zero images hang or crash ---


@pytest.mark.parametrize(
    ("pixel_values", "grid_thw"),
    [
        ([], []),
        (torch.empty(0, PATCH_DIM), torch.empty(0, 3, dtype=torch.int64)),
        (torch.empty(0), torch.empty(0, dtype=torch.int64)),
        (torch.empty(0, PATCH_DIM), torch.tensor([])),
        (torch.empty(0, PATCH_DIM), []),
    ],
)
def test_molmo2_26_nothing_gives_an_empty_list(
    pixel_values: Any, grid_thw: Any, encoder: Encoder
) -> None:
    assert encoder.encode(pixel_values, grid_thw) == []
    assert encoder.encode_at(pixel_values, grid_thw, 64) == []
    assert encoder.encode_at(pixel_values, grid_thw, None) == []
    stats = encoder.stats()
    assert (stats["calls"], stats["items"]) == (3, 0)
    assert (stats["replays"], stats["exact_runs"], stats["real_tokens"]) == (0, 0, 0)


# --- tokenspeed 933: the server says ready, and the first image takes seconds ---

_COUNT_AFTER_LOAD = """
import sys, torch, m3compile
encoder = m3compile.load(sys.argv[1])
pixels = [torch.zeros(4 * tokens, 1176) for tokens in (*encoder.ladder, 600)]
seen = []
quiet = ("object.", "gc.", "builtins.id", "sys._getframe", "code.__new__", "compile", "exec",
         "cpython.", "marshal.", "time.", "weakref.")
sys.addaudithook(lambda event, _: event.startswith(quiet) or seen.append(event))
for rows in pixels:
    for _ in range(2):
        encoder.encode(rows, [(1, 2, len(rows) // 2)])
events = sorted(set(seen))
stats = encoder.stats()
print(stats["replays"], stats["exact_runs"], events)
"""


def test_tokenspeed_933_nothing_is_left_to_do_after_load(golden_artifact: Path) -> None:
    """No import, file, library or process once `load` has returned, whatever the bucket."""
    assert run_fresh(_COUNT_AFTER_LOAD, golden_artifact).strip() == "8 2 []"
