"""`grids`: the rules of a batch that need no tensor library.

Compared with: the same grids as plain tuples; and, in a fresh interpreter, with what is loaded.
What is refused, and in which words, is held through `check_batch` in `test_batch.py` and through
the NumPy loader in `test_onnx.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Grid, run_fresh
from hypothesis import given, settings
from hypothesis import strategies as st

from m3compile.errors import InputError
from m3compile.grids import check_row_shape, read_grids

sides = st.integers(1, 100).map(lambda blocks: 2 * blocks)
grids_strategy = st.lists(st.tuples(st.integers(1, 255), sides, sides), min_size=1, max_size=9)
SPELLINGS: list[Callable[[list[Grid]], Any]] = [
    list,
    np.array,
    torch.tensor,
    lambda grids: np.array(grids, np.uint16),
    lambda grids: torch.tensor(grids, dtype=torch.int16),
    lambda grids: [np.array(grid) for grid in grids],
    lambda grids: tuple(torch.tensor(grid) for grid in grids),
]


@given(grids_strategy, st.sampled_from(SPELLINGS))
@settings(max_examples=100, deadline=None)
def test_every_spelling_reads_the_same(
    grids: list[Grid], spelling: Callable[[list[Grid]], Any]
) -> None:
    found = read_grids(spelling(grids))
    assert found == grids
    assert all(type(side) is int for grid in found for side in grid)


@given(
    grids_strategy, st.integers(0, 8), st.sampled_from([(0, 1), (1, 3), (2, 5), (1, -2), (2, 0)])
)
@settings(max_examples=50, deadline=None)
def test_the_first_wrong_item_is_named(
    grids: list[Grid], place: int, fault: tuple[int, int]
) -> None:
    place %= len(grids)
    axis, value = fault
    wrong = list(grids[place])
    wrong[axis] = value if axis else 0
    grids[place] = (wrong[0], wrong[1], wrong[2])
    with pytest.raises(InputError, match=rf"^item {place}: grid is "):
        read_grids(grids)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.complex64, object, "U3"])
def test_dtypes_that_are_not_whole_numbers(dtype: Any) -> None:
    with pytest.raises(InputError, match="expected integers"):
        read_grids(np.ones((2, 3)).astype(dtype))


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((16,), r"rows has shape \(16,\), expected \(rows, 8\)"),
        ((16, 7), r"rows has shape \(16, 7\), expected \(rows, 8\)"),
        ((15, 8), r"rows has 15 rows, expected 16: .* of 1 items \(item 0 is \[1, 4, 4\]\)"),
    ],
)
def test_rows_of_another_shape(shape: tuple[int, ...], found: str) -> None:
    check_row_shape("rows", (16, 8), 16, 8, [(1, 4, 4)])
    with pytest.raises(InputError, match=found):
        check_row_shape("rows", shape, 16, 8, [(1, 4, 4)])


def test_no_library_is_loaded() -> None:
    code = """
import sys
from m3compile.grids import read_grids
assert read_grids([(1, 4, 4)]) == [(1, 4, 4)]
print(*sys.modules)
"""
    assert {"torch", "numpy"}.isdisjoint(run_fresh(code).split())
