"""The caller's batch: checked on the host before any device work, then cut into sources."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m3compile.buckets import Run, segments_of
from m3compile.config import TowerConfig
from m3compile.config.shown import shown
from m3compile.errors import InputError

Grid = tuple[int, int, int]
# A segment's largest side: products of three stay far inside 64 bits.
_LARGEST_SIDE = 1 << 20


class Batch(NamedTuple):
    """A checked batch.

    Attributes:
        grids: (t, h, w) in patches of every item.
        rows: (N, patch_dim), or one such tensor an item.
        starts: first row of every item in `rows`, and N last.
        segments: every item's segments, as (t, h, w).
        segment_tokens: every item's segments, as output tokens.
    """

    grids: list[Grid]
    rows: Tensor | list[Tensor]
    starts: list[int]
    segments: list[Sequence[Grid]]
    segment_tokens: list[Sequence[int]]


def check_batch(pixel_values: Any, grid_thw: Any, config: TowerConfig) -> Batch:
    """Check a batch by the rules of the encoder.

    Args:
        pixel_values: (N, patch_dim) tensor, or a list of one (t*h*w, patch_dim) tensor an item; any
            float dtype, on any device.
        grid_thw: (num_items, 3) integers: a tensor, or nested lists.

    Raises:
        InputError: naming the item and the rule that it breaks.
    """
    grids = _read_grids(grid_thw)
    starts = [0]
    segments: list[Sequence[Grid]] = []
    segment_tokens: list[Sequence[int]] = []
    for index, (t, h, w) in enumerate(grids):
        _check_grid(index, t, h, w)
        starts.append(starts[-1] + t * h * w)
        parts = segments_of(t, h, w, config.vision_segment_max_frames)
        segments.append(parts)
        segment_tokens.append([a * b * c // config.patches_per_token for a, b, c in parts])
    if isinstance(pixel_values, Tensor):
        _check_rows("pixel_values", pixel_values, starts[-1], config, grids)
    elif isinstance(pixel_values, (list, tuple)):
        if len(pixel_values) != len(grids):
            raise InputError(
                f"pixel_values is a list of {len(pixel_values)} tensors, grid_thw has "
                f"{len(grids)} items; expected one tensor an item"
            )
        for index, (part, grid) in enumerate(zip(pixel_values, grids, strict=True)):
            if not isinstance(part, Tensor):
                raise InputError(
                    f"item {index}: pixel_values is a {type(part).__name__}, expected a tensor"
                )
            _check_rows(
                f"item {index}: pixel_values",
                part,
                starts[index + 1] - starts[index],
                config,
                [grid],
            )
        pixel_values = list(pixel_values)
    else:
        raise InputError(
            f"pixel_values is a {type(pixel_values).__name__}, expected a tensor or a list of "
            "tensors"
        )
    return Batch(grids, pixel_values, starts, segments, segment_tokens)


def _read_grids(grid_thw: Any) -> list[Grid]:
    if isinstance(grid_thw, Tensor) or hasattr(grid_thw, "dtype"):
        shape = tuple(grid_thw.shape)
        # Before the dtype: a tensor made from an empty list is float32.
        if shape[:1] == (0,):
            return []
        if grid_thw.dtype in (torch.bool, bool) or not _is_integer(grid_thw.dtype):
            raise InputError(f"grid_thw has dtype {grid_thw.dtype}, expected integers")
        if len(shape) != 2 or shape[1] != 3:
            raise InputError(f"grid_thw has shape {shape}, expected (num_items, 3)")
        if isinstance(grid_thw, Tensor):
            _check_dense("grid_thw", grid_thw)
        return [tuple(row) for row in grid_thw.tolist()]
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
    if isinstance(dtype, torch.dtype):
        return not (dtype.is_floating_point or dtype.is_complex)
    return getattr(dtype, "kind", "") in "iu"


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


def _check_rows(
    name: str, rows: Tensor, expected: int, config: TowerConfig, grids: list[Grid]
) -> None:
    if not rows.dtype.is_floating_point:
        raise InputError(f"{name} has dtype {rows.dtype}, expected a float dtype")
    _check_dense(name, rows)
    shape = tuple(rows.shape)
    if len(shape) != 2 or shape[1] != config.patch_dim:
        # An empty batch has no rows to be wide.
        if not grids and rows.numel() == 0:
            return
        raise InputError(f"{name} has shape {shape}, expected (rows, {config.patch_dim})")
    if shape[0] != expected:
        last = f" (item {len(grids) - 1} is {list(grids[-1])})" if grids else ""
        raise InputError(
            f"{name} has {shape[0]} rows, expected {expected}: the sum of t*h*w of "
            f"{len(grids)} items{last}"
        )


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        kind = "nested" if tensor.is_nested else tensor.layout
        raise InputError(f"{name} is {kind} on {tensor.device}, expected a dense tensor with data")


def run_sources(batch: Batch, run: Run) -> list[Tensor]:
    """The rows of a run's pieces, in order; neighbours in the batch come as one tensor."""
    if isinstance(batch.rows, list):
        return [
            batch.rows[piece.item][
                start - batch.starts[piece.item] : end - batch.starts[piece.item]
            ]
            for piece, (start, end) in zip(run.pieces, _piece_rows(batch, run), strict=True)
        ]
    spans: list[list[int]] = []
    for start, end in _piece_rows(batch, run):
        if spans and spans[-1][1] == start:
            spans[-1][1] = end
        else:
            spans.append([start, end])
    return [batch.rows[start:end] for start, end in spans]


def _piece_rows(batch: Batch, run: Run) -> list[tuple[int, int]]:
    """First and last + 1 row of every piece, counted over the whole batch."""
    spans = []
    for piece in run.pieces:
        t, h, w = batch.segments[piece.item][0]
        # Every segment of an item but its last has the same frames.
        start = batch.starts[piece.item] + piece.first_segment * t * h * w
        spans.append((start, start + 4 * piece.tokens))
    return spans


def run_segments(batch: Batch, run: Run) -> list[Grid]:
    """The segment table of a run: (t, h, w) of every segment, in order."""
    return [
        segment
        for piece in run.pieces
        for segment in batch.segments[piece.item][
            piece.first_segment : piece.first_segment + piece.num_segments
        ]
    ]


def run_items(run: Run) -> list[int]:
    """The item of every segment of a run, in order."""
    return [piece.item for piece in run.pieces for _ in range(piece.num_segments)]
