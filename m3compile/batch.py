"""The caller's batch: checked on the host before any device work, then cut into sources."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m3compile.buckets import Run, segments_of
from m3compile.config import TowerConfig
from m3compile.errors import InputError
from m3compile.grids import Grid, check_row_shape, read_grids

_REMEMBERED_FRAMES = 64


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
    if isinstance(grid_thw, Tensor):
        _check_dense("grid_thw", grid_thw)
    grids = read_grids(grid_thw)
    starts = [0]
    for t, h, w in grids:
        starts.append(starts[-1] + t * h * w)
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
    # After the rows, which bound them: a clip's sides alone could ask for any number.
    segments: list[Sequence[Grid]] = []
    segment_tokens: list[Sequence[int]] = []
    sizes = config.vision_segment_max_frames, config.patches_per_token
    for grid in grids:
        # Few sizes make up most traffic; a long clip is not worth its memory.
        cut = _cut_once if grid[0] <= _REMEMBERED_FRAMES else _cut
        parts, tokens = cut(grid, *sizes)
        segments.append(parts)
        segment_tokens.append(tokens)
    return Batch(grids, pixel_values, starts, segments, segment_tokens)


def _cut(
    grid: Grid, max_frames: int, patches_per_token: int
) -> tuple[Sequence[Grid], Sequence[int]]:
    """An item's segments, as (t, h, w) and as output tokens."""
    parts = segments_of(*grid, max_frames)
    return parts, [math.prod(part) // patches_per_token for part in parts]


_cut_once = functools.lru_cache(maxsize=4096)(_cut)


def _check_rows(
    name: str, rows: Tensor, expected: int, config: TowerConfig, grids: list[Grid]
) -> None:
    if not rows.dtype.is_floating_point:
        raise InputError(f"{name} has dtype {rows.dtype}, expected a float dtype")
    _check_dense(name, rows)
    check_row_shape(name, tuple(rows.shape), expected, config.patch_dim, grids)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        kind = "nested" if tensor.is_nested else tensor.layout
        raise InputError(f"{name} is {kind} on {tensor.device}, expected a dense tensor with data")


class PlannedRun(NamedTuple):
    """A run of a batch, and what of it depends on the grids alone.

    Attributes:
        run: which pieces in which bucket.
        segments: (t, h, w) of every segment, in order.
        items: the item of every segment.
        spans: first and last + 1 row of every piece, counted over the whole batch.
    """

    run: Run
    segments: list[Grid]
    items: list[int]
    spans: list[tuple[int, int]]


def plan_run(batch: Batch, run: Run) -> PlannedRun:
    """Everything that a run needs but for its rows."""
    segments: list[Grid] = []
    items: list[int] = []
    spans = []
    for piece in run.pieces:
        parts = batch.segments[piece.item]
        segments += parts[piece.first_segment : piece.first_segment + piece.num_segments]
        items += [piece.item] * piece.num_segments
        # Every segment of an item but its last has the same frames.
        start = batch.starts[piece.item] + piece.first_segment * math.prod(parts[0])
        spans.append((start, start + 4 * piece.tokens))
    return PlannedRun(run, segments, items, spans)


def run_sources(batch: Batch, planned: PlannedRun) -> list[Tensor]:
    """The rows of a run's pieces, in order; neighbours in the batch come as one tensor."""
    rows, spans = batch.rows, planned.spans
    if isinstance(rows, list):
        sources = []
        for piece, (start, end) in zip(planned.run.pieces, spans, strict=True):
            first = batch.starts[piece.item]
            sources.append(rows[piece.item][start - first : end - first])
        return sources
    if len(spans) == 1 and spans[0] == (0, batch.starts[-1]):
        # Making a view takes time, here before a replay.
        return [rows]
    merged: list[list[int]] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return [rows[start:end] for start, end in merged]
