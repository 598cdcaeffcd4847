"""What bad pixels do to an encoder: their own segment is NaN and counted, nobody else notices.

Compared with: the same call with clean pixels, in the same bucket, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import (
    BOUND,
    PATCH_DIM,
    Grid,
    assert_same_bits,
    eager,
    error_of,
    num_tokens,
    random_rows,
    segments_of_item,
    split_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import m3compile
from m3compile import Encoder
from m3compile.tower import Tower

NAN, INF = float("nan"), float("inf")
GRIDS: list[Grid] = [(1, 4, 4), (1, 4, 6), (2, 4, 4)]
MIDDLE = 1
NUM_RUN_SLOTS = 40


def is_nan(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all())


def nonfinite_items(encoder: Encoder) -> int:
    count: int = encoder.stats()["nonfinite_items"]
    return count


@pytest.mark.parametrize("budget", [64, 256, 576, None])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("share", ["one pixel", "first row", "last row", "all"])
def test_neighbours_of_a_bad_item_keep_their_bits(
    bad: float, share: str, budget: int | None, encoder: Encoder
) -> None:
    parts = split_rows(random_rows(GRIDS), GRIDS)
    clean = encoder.encode_at(parts, GRIDS, budget)
    spoiled = parts[MIDDLE].clone()
    if share == "one pixel":
        spoiled[11, 700] = bad
    elif share == "all":
        spoiled[:] = bad
    else:
        spoiled[0 if share == "first row" else -1] = bad
    parts[MIDDLE] = spoiled
    results = encoder.encode_at(parts, GRIDS, budget)
    assert is_nan(results.pop(MIDDLE))
    clean.pop(MIDDLE)
    assert_same_bits(results, clean)
    assert nonfinite_items(encoder) == 1


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e17, 1e20, 1e38])
def test_neighbours_of_a_huge_item_keep_their_bits(
    scale: float, encoder: Encoder, eager_tower: Tower
) -> None:
    """Finite pixels whose squares overflow are told and counted, never made into embeddings."""
    parts = split_rows(random_rows(GRIDS), GRIDS)
    clean = encoder.encode_at(parts, GRIDS, 64)
    parts[MIDDLE] = parts[MIDDLE].clamp(-1, 1) * scale
    results = encoder.encode_at(parts, GRIDS, 64)
    huge = results.pop(MIDDLE)
    clean.pop(MIDDLE)
    assert_same_bits(results, clean)
    if abs(scale) < 1e18:
        assert error_of(huge, eager(eager_tower, parts[MIDDLE], GRIDS[MIDDLE])) <= BOUND
        assert nonfinite_items(encoder) == 0
    else:
        assert is_nan(huge)
        assert is_nan(eager(eager_tower, parts[MIDDLE], GRIDS[MIDDLE]))
        assert nonfinite_items(encoder) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_values_beyond_the_encoders_dtype(dtype: torch.dtype, encoder: Encoder) -> None:
    parts = split_rows(random_rows(GRIDS).to(dtype), GRIDS)
    clean = encoder.encode_at(parts, GRIDS, 64)
    parts[MIDDLE] = parts[MIDDLE].clone()
    parts[MIDDLE][3, 3] = 1e300 if dtype == torch.float64 else INF
    results = encoder.encode_at(parts, GRIDS, 64)
    assert is_nan(results[MIDDLE])
    assert_same_bits(results[::2], clean[::2])


@pytest.mark.parametrize("bad_frame", [0, 3, 4, 7, 8])
def test_a_bad_frame_is_its_segments(bad_frame: int, encoder: Encoder) -> None:
    """A clip of nine frames is three segments; two of them are as if nothing had been."""
    grid: Grid = (9, 4, 4)
    rows = random_rows([grid])
    (clean,) = encoder.encode(rows, [grid])
    rows[16 * bad_frame + 5, 9] = NAN
    (spoiled,) = encoder.encode(rows, [grid])
    bad_segment = bad_frame // 4
    for segment in range(3):
        tokens = slice(16 * segment, 16 * (segment + 1))
        if segment == bad_segment:
            assert is_nan(spoiled[tokens])
        else:
            assert torch.equal(spoiled[tokens], clean[tokens])
    assert nonfinite_items(encoder) == 1


def test_an_item_is_counted_once_a_call(golden_artifact: Path) -> None:
    """Cut over several runs and bad in each of them; and beside other bad items."""
    clip: Grid = (40, 4, 4)
    grids: list[Grid] = [(1, 4, 4), clip, (1, 4, 6), (1, 40, 40)]
    parts = split_rows(random_rows(grids), grids)
    parts[1] = parts[1].clone()
    parts[1][::16, 0] = NAN
    with m3compile.load(golden_artifact, budgets=[16, 64], max_items=3) as encoder:
        results = encoder.encode(parts, grids)
        assert encoder.stats()["replays"] >= 4
        assert encoder.stats()["exact_runs"] == 1
        assert [is_nan(result) for result in results] == [False, True, False, False]
        assert nonfinite_items(encoder) == 1
        encoder.encode(parts, grids)
        assert nonfinite_items(encoder) == 2
        # By the exact route too, and several at once.
        parts[3] = parts[3].clone()
        parts[3][-1, -1] = INF
        results = encoder.encode(parts, grids)
        assert [is_nan(result) for result in results] == [False, True, False, True]
        assert nonfinite_items(encoder) == 4
        parts[1], parts[3] = random_rows([clip]), random_rows([(1, 40, 40)])
        assert not any(bool(result.isnan().any()) for result in encoder.encode(parts, grids))
        assert nonfinite_items(encoder) == 4


def test_every_bad_item_is_counted_over_many_calls(encoder: Encoder) -> None:
    """More runs than any ring of pending ones holds, without a look in between."""
    rows = random_rows(GRIDS)
    rows[0, 0] = rows[-1, -1] = NAN
    for _ in range(NUM_RUN_SLOTS):
        encoder.encode(rows, GRIDS)
    assert nonfinite_items(encoder) == 2 * NUM_RUN_SLOTS
    encoder.close()
    assert nonfinite_items(encoder) == 2 * NUM_RUN_SLOTS


@pytest.mark.parametrize("bad", [NAN, INF, 1e38])
def test_what_an_earlier_call_left_does_not_leak(bad: float, encoder: Encoder) -> None:
    """The shared rows are full of it, right behind the last segment and far from it."""
    full: Grid = (1, 48, 48)
    grids: list[Grid] = [(1, 2, 2), (1, 4, 4), (1, 8, 8)]
    rows = {grid: random_rows([grid]) for grid in grids}
    budgets = (16, 64, 256, 576)
    fresh = {
        (grid, budget): encoder.encode_at(rows[grid], [grid], budget)
        for grid in grids
        for budget in budgets
    }
    for (grid, budget), expected in fresh.items():
        encoder.encode_at(torch.full((math.prod(full), PATCH_DIM), bad), [full], 576)
        before = nonfinite_items(encoder)
        assert_same_bits(encoder.encode_at(rows[grid], [grid], budget), expected)
        assert nonfinite_items(encoder) == before


@pytest.fixture(scope="module")
def one_bucket(golden_artifact: Path) -> Iterator[Encoder]:
    """Every call of the property test goes through this one bucket, so bits may be compared."""
    with m3compile.load(golden_artifact, budgets=[512]) as encoder:
        yield encoder


sides = st.integers(1, 3).map(lambda blocks: 2 * blocks)


@given(data=st.data(), grids=st.lists(st.tuples(st.integers(1, 9), sides, sides), min_size=1,
                                      max_size=5))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_bad_segments_of_any_mix(
    data: st.DataObject, grids: list[Grid], one_bucket: Encoder
) -> None:
    segments = [(item, part) for item, grid in enumerate(grids) for part in segments_of_item(grid)]
    bad = data.draw(st.sets(st.integers(0, len(segments) - 1)))
    rows = random_rows(grids)
    parts = [part for _, part in segments]
    clean = torch.cat(one_bucket.encode(rows, grids))
    spoiled = split_rows(rows.clone(), parts)
    for index in bad:
        row = data.draw(st.integers(0, len(spoiled[index]) - 1))
        spoiled[index][row, data.draw(st.integers(0, PATCH_DIM - 1))] = NAN
    before = nonfinite_items(one_bucket)
    found = torch.cat(one_bucket.encode(torch.cat(spoiled), grids))
    tokens = [num_tokens(part) for part in parts]
    for index, (got, expected) in enumerate(
        zip(found.split(tokens), clean.split(tokens), strict=True)
    ):
        assert is_nan(got) if index in bad else torch.equal(got, expected)
    assert nonfinite_items(one_bucket) - before == len({segments[index][0] for index in bad})
