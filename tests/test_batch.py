"""`batch`: what a caller hands to `encode`, checked and cut into the inputs of runs.

Compared with: plain loops over items and segments; each row carries its own number, so that where
it went can be read off it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import PATCH_DIM, Grid, num_tokens, segments_of_item, split_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m3compile import batch as batch_module
from m3compile.batch import check_batch, plan_run, run_sources
from m3compile.buckets import Planner
from m3compile.config import TINY
from m3compile.errors import ExitCode, InputError

GRIDS: list[Grid] = [(1, 4, 4), (5, 2, 4), (1, 2, 2)]
sides = st.integers(1, 4).map(lambda blocks: 2 * blocks)
grids_strategy = st.lists(st.tuples(st.integers(1, 11), sides, sides), min_size=1, max_size=7)


def numbered_rows(grids: list[Grid]) -> Tensor:
    """(N, PATCH_DIM) without the memory of it; row r holds r."""
    return torch.arange(sum(map(math.prod, grids)), dtype=torch.float32)[:, None].expand(
        -1, PATCH_DIM
    )


# --- what is accepted ---


SPELLINGS: dict[str, Callable[[list[Grid]], Any]] = {
    "list of tuples": lambda grids: grids,
    "list of lists": lambda grids: [list(grid) for grid in grids],
    "tuple of tuples": tuple,
    "int64 tensor": torch.tensor,
    "int32 tensor": lambda grids: torch.tensor(grids, dtype=torch.int32),
    "uint8 tensor": lambda grids: torch.tensor(grids, dtype=torch.uint8),
    "transposed tensor": lambda grids: torch.tensor(grids).T.contiguous().T,
    "numpy array": np.array,
    "numpy uint16": lambda grids: np.array(grids, dtype=np.uint16),
    "list of tensors": lambda grids: [torch.tensor(grid) for grid in grids],
    "list of arrays": lambda grids: [np.array(grid) for grid in grids],
    "numpy ints": lambda grids: [tuple(np.int64(side) for side in grid) for grid in grids],
    "tensor ints": lambda grids: [[torch.tensor(side) for side in grid] for grid in grids],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_a_grid(spelling: str) -> None:
    batch = check_batch(numbered_rows(GRIDS), SPELLINGS[spelling](GRIDS), TINY)
    assert batch.grids == GRIDS
    assert all(type(side) is int for grid in batch.grids for side in grid)
    assert batch.starts == [0, 16, 56, 60]
    assert [list(parts) for parts in batch.segments] == [segments_of_item(grid) for grid in GRIDS]
    assert [list(tokens) for tokens in batch.segment_tokens] == [[4], [8, 2], [1]]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
)
def test_any_float_dtype(dtype: torch.dtype) -> None:
    check_batch(torch.zeros(60, PATCH_DIM).to(dtype), GRIDS, TINY)


NOTHING = [
    ([], []),
    ((), ()),
    (torch.empty(0, PATCH_DIM), []),
    (torch.empty(0, PATCH_DIM), torch.empty(0, 3, dtype=torch.int64)),
    (torch.empty(0), torch.empty(0, dtype=torch.int32)),
    # What `torch.tensor` and `np.array` make of an empty list are floats.
    (torch.tensor([]), torch.tensor([])),
    (torch.empty(0, PATCH_DIM), np.array([])),
    (torch.empty(0, PATCH_DIM, dtype=torch.bfloat16), np.empty((0, 3), dtype=np.int32)),
]


@pytest.mark.parametrize(("pixel_values", "grid_thw"), NOTHING)
def test_nothing_is_a_batch(pixel_values: Any, grid_thw: Any) -> None:
    batch = check_batch(pixel_values, grid_thw, TINY)
    assert (batch.grids, batch.starts) == ([], [0])


# --- what is refused ---


def message(pixel_values: Any, grid_thw: Any) -> str:
    """Of the refusal, which every other one of this file has to be like."""
    with pytest.raises(InputError) as caught:
        check_batch(pixel_values, grid_thw, TINY)
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == ExitCode.REQUEST
    found = str(caught.value)
    assert "\n" not in found
    assert len(found) < 300
    return found


@pytest.mark.parametrize(
    ("grid", "rule"),
    [
        ((1, 0, 160), "at least 1"),
        ((0, 4, 4), "at least 1"),
        ((1, -2, 4), "at least 1"),
        ((-1, -2, 2), "at least 1"),
        ((1, 3, 4), "multiples of 2"),
        ((1, 4, 5), "multiples of 2"),
        ((2**20 + 1, 4, 4), "at most 1048576"),
        ((1, 2, 2**64), "at most 1048576"),
        # Python does not print numbers of this size.
        ((1, 10**5000, 2), "at most 1048576"),
        ((-(10**5000), 2, 2), "at least 1"),
    ],
)
@pytest.mark.parametrize("position", [0, 2])
def test_a_grid_that_no_item_has(grid: Grid, rule: str, position: int) -> None:
    grids = list(GRIDS)
    grids[position] = grid
    found = message(numbered_rows(GRIDS), grids)
    assert f"item {position}: grid is " in found
    assert rule in found


@pytest.mark.parametrize(
    "row",
    [
        (1.0, 4, 4),
        (1, 4, 4.5),
        (1, "4", 4),
        "144",
        b"144",
        (True, 4, 4),
        (np.True_, 4, 4),
        (1, 4),
        (1, 4, 4, 4),
        (),
        4,
        None,
        (1, None, 4),
        {1, 4, 6},
        {1: 0, 4: 0, 6: 0},
        ((1,), (4,), (4,)),
        torch.tensor([1.0, 4.0, 4.0]),
        torch.tensor([[1, 4, 4]]),
        torch.tensor(4),
        np.zeros((3, 2)),
        np.array([1.0, 4.0, 4.0]),
        "a" * 10_000,
    ],
)
def test_a_row_that_is_no_grid(row: Any) -> None:
    assert message(numbered_rows(GRIDS), [GRIDS[0], row, GRIDS[2]]).startswith("item 1: grid is ")


@pytest.mark.parametrize(
    ("grid_thw", "found"),
    [
        (torch.tensor([1, 4, 4]), r"shape (3,), expected (num_items, 3)"),
        (torch.ones(1, 2, 3, dtype=torch.int32), "shape (1, 2, 3), expected (num_items, 3)"),
        (torch.ones(2, 4, dtype=torch.int32), "shape (2, 4), expected (num_items, 3)"),
        (torch.tensor(4), "shape (), expected (num_items, 3)"),
        (np.array([1, 4, 4]), "shape (3,), expected (num_items, 3)"),
        (torch.tensor([[1.0, 4.0, 4.0]]), "dtype torch.float32, expected integers"),
        (torch.ones(1, 3, dtype=torch.bool), "dtype torch.bool, expected integers"),
        (torch.ones(1, 3, dtype=torch.complex64), "dtype torch.complex64, expected integers"),
        (np.array([[1.0, 4.0, 4.0]]), "dtype float64, expected integers"),
        (np.array([["1", "4", "4"]]), "expected integers"),
        (np.array([[1, 4, None]], dtype=object), "dtype object, expected integers"),
        (np.ones((1, 3), dtype=bool), "dtype bool, expected integers"),
        (torch.ones(1, 3, dtype=torch.int64).to_sparse(), "torch.sparse_coo"),
        (torch.ones(1, 3, dtype=torch.int64, device="meta"), "meta"),
        ("144", "is a str, expected a tensor or nested lists"),
        (None, "is a NoneType, expected a tensor or nested lists"),
        (iter(GRIDS), "expected a tensor or nested lists"),
        (144, "is a int, expected a tensor or nested lists"),
    ],
)
def test_grids_that_are_no_table(grid_thw: Any, found: str) -> None:
    text = message(numbered_rows(GRIDS), grid_thw)
    assert text.startswith("grid_thw ")
    assert found in text


def test_a_flat_list_of_ints_is_no_table() -> None:
    assert message(numbered_rows(GRIDS), [1, 4, 4]).startswith("item 0: grid is 1, expected three")


ROWS = torch.zeros(60, PATCH_DIM)


@pytest.mark.parametrize(
    ("pixel_values", "found"),
    [
        (ROWS[:59], "has 59 rows, expected 60: the sum of t*h*w of 3 items"),
        (torch.zeros(61, PATCH_DIM), "has 61 rows, expected 60"),
        (ROWS[:0], "has 0 rows, expected 60"),
        (ROWS[:, 1:], "has shape (60, 1175), expected (rows, 1176)"),
        (ROWS[None], "has shape (1, 60, 1176), expected (rows, 1176)"),
        (ROWS.flatten(), "has shape (70560,), expected (rows, 1176)"),
        (ROWS.to(torch.int32), "dtype torch.int32, expected a float dtype"),
        (ROWS.to(torch.uint8), "dtype torch.uint8, expected a float dtype"),
        (ROWS.to(torch.complex64), "dtype torch.complex64, expected a float dtype"),
        (ROWS.to_sparse(), "torch.sparse_coo"),
        (ROWS.to("meta"), "meta"),
        (ROWS.numpy(), "is a ndarray, expected a tensor"),
        (None, "is a NoneType, expected a tensor"),
        (ROWS.tolist()[0], "is a list of 1176 tensors, grid_thw has 3 items"),
    ],
)
def test_rows_that_do_not_fit(pixel_values: Any, found: str) -> None:
    text = message(pixel_values, GRIDS)
    assert text.startswith("pixel_values ")
    assert found in text


def test_nested_tensors_are_refused() -> None:
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([ROWS[:16], ROWS[16:]])
    assert "nested" in message(nested, GRIDS)


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (ROWS[:39], "item 1: pixel_values has 39 rows, expected 40"),
        (ROWS[:40, 1:], "item 1: pixel_values has shape (40, 1175)"),
        (ROWS[:40].long(), "item 1: pixel_values has dtype torch.int64"),
        (ROWS[:40].numpy(), "item 1: pixel_values is a ndarray, expected a tensor"),
        (None, "item 1: pixel_values is a NoneType, expected a tensor"),
    ],
)
def test_a_list_names_its_item(bad: Any, found: str) -> None:
    assert found in message([ROWS[:16], bad, ROWS[:4]], GRIDS)


def test_a_list_has_one_tensor_an_item() -> None:
    found = message([ROWS[:16], ROWS[:40]], GRIDS)
    assert "a list of 2 tensors, grid_thw has 3 items" in found


def test_rows_without_items() -> None:
    assert "has 60 rows, expected 0" in message(ROWS, [])
    assert "a list of 1 tensors, grid_thw has 0 items" in message([ROWS], [])


# --- what runs get ---


def first_rows(start: int, grid: Grid) -> list[int]:
    """The first row of each segment of an item that begins at `start`."""
    return list(itertools.accumulate(map(math.prod, segments_of_item(grid)), initial=start))[:-1]


@given(grids_strategy, st.booleans(), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_runs_cover_every_row_once(grids: list[Grid], as_list: bool, max_segments: int) -> None:
    """A small ladder: items are packed, cut between segments, and run at their exact shape."""
    rows = numbered_rows(grids)
    batch = check_batch(split_rows(rows, grids) if as_list else rows, grids, TINY)
    runs = Planner((2, 8, 24), max_segments).plan(batch.segment_tokens)
    places = [
        (item, segment, first)
        for item, grid in enumerate(grids)
        for segment, first in zip(
            segments_of_item(grid), first_rows(batch.starts[item], grid), strict=True
        )
    ]
    served = []
    for run in runs:
        planned = plan_run(batch, run)
        segments, items = planned.segments, planned.items
        assert len(segments) == len(items) <= max_segments
        sources = torch.cat([part[:, 0] for part in run_sources(batch, planned)]).long()
        assert len(sources) == sum(map(math.prod, segments)) == 4 * run.tokens
        ends = itertools.accumulate(map(math.prod, segments), initial=0)
        for item, segment, (start, end) in zip(
            items, segments, itertools.pairwise(ends), strict=True
        ):
            rows_of_segment = sources[start:end].tolist()
            first = rows_of_segment[0]
            assert rows_of_segment == list(range(first, first + math.prod(segment)))
            served.append((item, segment, first))
    assert sorted(served, key=lambda place: place[2]) == places


@given(grids_strategy)
@settings(max_examples=50, deadline=None)
def test_neighbours_in_the_batch_come_as_one_source(grids: list[Grid]) -> None:
    batch = check_batch(numbered_rows(grids), grids, TINY)
    (run,) = Planner((4096,), 512).plan(batch.segment_tokens)
    assert len(run_sources(batch, plan_run(batch, run))) == 1
    assert run.tokens == sum(map(num_tokens, grids))


def test_a_long_clip_without_its_rows_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segments alone would fill the memory."""

    def never(*sides: int) -> list:
        raise AssertionError("cut into segments")

    monkeypatch.setattr(batch_module, "segments_of", never)
    for rows in (torch.zeros(4, PATCH_DIM), [torch.zeros(4, PATCH_DIM)]):
        with pytest.raises(InputError, match="4 rows, expected 4194304"):
            check_batch(rows, [(1 << 20, 2, 2)], TINY)
