"""The rules of a batch that need no tensor library: grids, and the rows that they ask for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from m3compile.config.shown import shown
from m3compile.errors import InputError

Grid = tuple[int, int, int]
# A segment's largest side: products of three stay far inside 64 bits.
_LARGEST_SIDE = 1 << 20


def read_grids(grid_thw: Any) -> list[Grid]:
    """`grid_thw` as plain ints, every item checked.

    Args:
        grid_thw: (num_items, 3) integers: an array or tensor of any library, or nested lists.

    Raises:
        InputError: naming the item and the rule that it breaks.
    """
    grids = _whole_table(grid_thw) if hasattr(grid_thw, "dtype") else _row_by_row(grid_thw)
    for index, grid in enumerate(grids):
        _check_grid(index, *grid)
    return grids


def check_row_shape(
    name: str, shape: Sequence[int], expected_rows: int, patch_dim: int, grids: Sequence[Grid]
) -> None:
    """Compare the shape of rows of patches with what their grids ask for.

    Args:
        name: what a message calls the rows.
        shape: of the rows, as found.
        expected_rows: sum of t*h*w of `grids`.
        patch_dim: columns of a row.

    Raises:
        InputError: it is another shape.
    """
    if len(shape) != 2 or shape[1] != patch_dim:
        # An empty batch has no rows to be wide.
        if not grids and 0 in shape:
            return
        raise InputError(f"{name} has shape {tuple(shape)}, expected (rows, {patch_dim})")
    if shape[0] != expected_rows:
        last = f" (item {len(grids) - 1} is {list(grids[-1])})" if grids else ""
        raise InputError(
            f"{name} has {shape[0]} rows, expected {expected_rows}: the sum of t*h*w of "
            f"{len(grids)} items{last}"
        )


def _whole_table(grid_thw: Any) -> list[Grid]:
    shape = tuple(grid_thw.shape)
    # Before the dtype: a tensor made from an empty list is float32.
    if shape[:1] == (0,):
        return []
    if not _is_integer(grid_thw.dtype):
        raise InputError(f"grid_thw has dtype {grid_thw.dtype}, expected integers")
    if len(shape) != 2 or shape[1] != 3:
        raise InputError(f"grid_thw has shape {shape}, expected (num_items, 3)")
    return [tuple(row) for row in grid_thw.tolist()]


def _row_by_row(grid_thw: Any) -> list[Grid]:
    if not isinstance(grid_thw, (list, tuple)):
        raise InputError(
            f"grid_thw is a {type(grid_thw).__name__}, expected a tensor or nested lists of ints"
        )
    grids = []
    for index, row in enumerate(grid_thw):
        if hasattr(row, "tolist"):
            row = row.tolist()
        try:
            if not isinstance(row, (list, tuple)) or any(isinstance(side, bool) for side in row):
                raise TypeError
            t, h, w = (operator.index(side) for side in row)
        except (TypeError, ValueError):
            raise InputError(
                f"item {index}: grid is {shown(row)}, expected three integers t, h, w"
            ) from None
        grids.append((t, h, w))
    return grids


def _is_integer(dtype: Any) -> bool:
    """Whether a dtype of NumPy or PyTorch is one of whole numbers; bool is none."""
    if hasattr(dtype, "kind"):
        return dtype.kind in "iu"
    return str(dtype).rpartition(".")[2].startswith(("int", "uint"))


def _check_grid(index: int, t: int, h: int, w: int) -> None:
    if t < 1 or h < 1 or w < 1:
        raise InputError(f"item {index}: grid is {shown([t, h, w])}, every side must be at least 1")
    if h % 2 or w % 2:
        raise InputError(
            f"item {index}: grid is {shown([t, h, w])}, height and width must be multiples of 2 "
            "(spatial_merge_size)"
        )
    if max(t, h, w) > _LARGEST_SIDE:
        raise InputError(
            f"item {index}: grid is {shown([t, h, w])}, a side may be at most {_LARGEST_SIDE} "
            "patches"
        )
