"""Segments, positions and rotary tables, computed inside the traced program.

Shape legend: P patch rows of a run (padding included), S slots of the segment table,
R rotary pairs of a head (3 * axis_dim / 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from m3compile.config import TowerConfig


class Geometry(NamedTuple):
    """Everything the tower derives from the segment table, once per forward.

    Attributes:
        cu_seqlens: (S + 1,) int32, cumulative patch rows of the segments, from 0.
        segment_of_row: (P,) int64, the slot a row belongs to; the last slot for padding.
        is_real: (P,) bool, false for rows past the last segment.
        positions: (P, 3) int32, time, height and width of a row within its segment.
    """

    cu_seqlens: Tensor
    segment_of_row: Tensor
    is_real: Tensor
    positions: Tensor


def inverse_frequencies(config: TowerConfig) -> Tensor:
    """(axis_dim / 2,) float32: `theta ** (-2 i / axis_dim)`, the same for the three axes.

    Computed in float64 and rounded once, so that every route shares the same bits.
    """
    steps = torch.arange(0, config.axis_dim, 2, dtype=torch.float64, device="cpu")
    exponents = steps / config.axis_dim
    return (config.rope_theta**-exponents).to(torch.float32)


def locate_rows(segments: Tensor, num_rows: int) -> Geometry:
    """Place every row of a run.

    Rows of a frame come merge block by merge block: block rows first, then block columns, and
    inside a 2 x 2 block again row by row.

    Args:
        segments: (S, 3) int32, `t, h, w` in patches of every segment; zero rows are unused.
        num_rows: P, at least the rows that the segments need.
    """
    frames, heights, widths = segments.unbind(1)
    lengths = frames * heights * widths
    ends = torch.cumsum(lengths, 0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0))

    rows = torch.arange(num_rows, dtype=torch.int32, device=segments.device)
    # The number of segments that end at or before a row is the row's slot; unused slots end where
    # the one before them does, so they are counted past.
    slot = (rows[:, None] >= ends[None, :]).sum(1)
    is_real = slot < segments.shape[0]
    slot = slot.clamp(max=segments.shape[0] - 1)

    # An unused slot has no rows; the clamp only keeps padding from dividing by zero.
    frame_rows = (heights * widths).clamp(min=1)[slot]
    block_columns = (widths // 2).clamp(min=1)[slot]
    row = rows - (ends - lengths)[slot]
    time = row // frame_rows
    block = (row % frame_rows) // 4
    inner = row % 4
    height = 2 * (block // block_columns) + inner // 2
    width = 2 * (block % block_columns) + inner % 2
    return Geometry(cu_seqlens, slot, is_real, torch.stack((time, height, width), 1))


def rotary_tables(positions: Tensor, inverse_frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a row's angles, both (P, R) float32.

    Args:
        positions: (P, 3) integer coordinates.
        inverse_frequency: (axis_dim / 2,) float32.
    """
    angles = positions.to(torch.float32)[:, :, None] * inverse_frequency
    angles = angles.flatten(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of q or k in half-split style, in float32.

    Dim `j` pairs with dim `j + R`; dims from `2 R` on pass through.

    Args:
        x: (P, heads, head_dim), any float dtype.
        cos, sin: (P, R) float32.

    Returns:
        (P, heads, head_dim) in the dtype of `x`.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x.to(torch.float32).split((half, half, x.shape[2] - 2 * half), 2)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, 2).to(x.dtype)
