"""The arithmetic behind route times, against sums written out here; the times need a GPU."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3compile.buckets import Planner, RouteTimes
from m3compile.routes import _cautious, _equal_segments

# Measured on an H200: from 576 tokens up launching no longer binds an uncaptured run.
BUDGETS = (64, 256, 576, 1296, 4096)
REPLAY_MS = [2.06, 4.13, 9.19, 25.3, 133.4]
EXACT_MS = [5.03, 6.20, 10.1, 26.0, 134.2]


@given(st.integers(1, 5000), st.integers(1, 128))
def test_equal_segments_fill_the_bucket(tokens: int, most: int) -> None:
    segments = _equal_segments(tokens, most)
    sizes = [math.prod(segment) / 4 for segment in segments]
    assert sum(sizes) == tokens
    assert len(segments) == min(tokens, most)
    assert max(sizes) - min(sizes) <= 1
    assert all(h % 2 == w % 2 == 0 for _, h, w in segments)


def test_launch_bound_sizes_get_twice_the_longest_launching() -> None:
    assert _cautious(EXACT_MS, REPLAY_MS) == [12.4, 12.4, 12.4, 26.0, 134.2]


def test_times_that_nothing_binds_stay() -> None:
    assert _cautious([30.0, 140.0], [29.0, 139.0]) == [60.0, 140.0]


@pytest.mark.parametrize(("tokens", "budget"), [(60, 64), (250, 256), (500, 576), (600, 1296)])
def test_sizes_that_launching_binds_are_replayed(tokens: int, budget: int) -> None:
    full, exact = tuple(REPLAY_MS), tuple(_cautious(EXACT_MS, REPLAY_MS))
    linear = tuple(0.8 * ms for ms in full)
    times = RouteTimes(budgets=BUDGETS, linear_ms=linear, full_ms=full, exact_ms=exact)
    (run,) = Planner(BUDGETS, 128, times).plan([tokens])
    # 600 tokens in the bucket of 1,296 waste far more than launching costs.
    assert run.budget == (None if tokens == 600 else budget)
