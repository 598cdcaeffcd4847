"""What is compared: grids that cover every bucket, its edges, cut clips and exact shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from m3compile.config.build import MAX_TOKENS
from m3compile.runtime import Encoder

Grid = tuple[int, int, int]

# Small items of every kind that fill up batches; eager computes each of them once.
FILLERS: tuple[Grid, ...] = (
    (1, 16, 16), (1, 2, 2), (1, 4, 36), (2, 8, 8), (1, 20, 8), (1, 16, 32), (1, 8, 20), (3, 4, 4),
)  # fmt: skip
# Takes their place where a run has too few segments left for small ones.
LARGE_FILLER: Grid = (1, 32, 32)
# Attention grows with the square of a segment: on a CPU one of 4,096 tokens takes longer than all
# the rest. Past this many tokens a bucket is filled with several items there.
_LONGEST_CHEAP = 640
# An encoder whose segments are longer than this has no clips that are worth cutting.
_MOST_FRAMES = 256
_SEED = 20_240


def random_pixels(grid: Grid, patch_dim: int) -> Tensor:
    """(t*h*w, patch_dim) float32 on the CPU, the same for every item of that many rows."""
    rows = math.prod(grid)
    generator = torch.Generator().manual_seed(_SEED + rows)
    return torch.randn(rows, patch_dim, generator=generator)


def routes(encoder: Encoder) -> Iterator[tuple[str, int | None, list[list[Grid]]]]:
    """Every budget full and at its lower edge, the exact shape, and items cut over runs."""
    slots, largest = encoder.max_segments, encoder.ladder[-1]
    frames = encoder.manifest.tower.vision_segment_max_frames
    is_cuda = encoder.device.type == "cuda"
    previous = 0
    for budget in encoder.ladder:
        batches = []
        for tokens in (budget, previous + 1):
            if tokens <= _LONGEST_CHEAP or (is_cuda and budget == largest):
                batches.append([one_item(tokens)])
            if tokens > _LONGEST_CHEAP or tokens == budget:
                batches.append(_batch(tokens, slots, frames))
        yield "bucket", budget, _distinct(batches)
        previous = budget
    over = min(largest + 1, MAX_TOKENS)
    one_over = is_cuda or over <= _LONGEST_CHEAP
    last = [one_item(over)] if one_over else _batch(over, slots, frames)
    yield "exact", None, _distinct([[one_item(1)], _batch(96, slots, frames), last])
    if frames <= _MOST_FRAMES:
        yield "cut", None, [_cut_items(largest, slots, frames)]


def _distinct(batches: list[list[Grid]]) -> list[list[Grid]]:
    """Without repetitions: in small buckets a batch may be a single item."""
    return [batch for index, batch in enumerate(batches) if batch not in batches[:index]]


def one_item(tokens: int) -> Grid:
    """An image of that many tokens, as close to square as its divisors allow."""
    side = math.isqrt(tokens)
    while tokens % side:
        side -= 1
    return 1, 2 * side, 2 * (tokens // side)


def _tokens(grid: Grid) -> int:
    return math.prod(grid) // 4


def _batch(tokens: int, max_segments: int, max_frames: int) -> list[Grid]:
    """Fillers of one segment, and an item for the rest, that together have that many tokens."""
    grids: list[Grid] = []
    left = tokens
    while left and len(grids) < max_segments - 1:
        after = (max_segments - len(grids) - 1) * _tokens(LARGE_FILLER)
        fitting = [grid for grid in FILLERS if _tokens(grid) <= left and grid[0] <= max_frames]
        grid = fitting[len(grids) % len(fitting)] if fitting else one_item(left)
        if left - _tokens(grid) > after and left >= _tokens(LARGE_FILLER):
            grid = LARGE_FILLER
        grids.append(grid)
        left -= _tokens(grid)
    if left:
        grids.append(one_item(left))
    return grids


def _cut_items(largest: int, max_segments: int, frames: int) -> list[Grid]:
    """Clips: two segments, more tokens than the largest bucket, more segments than a run holds."""
    small = (2 * frames + 1, 4, 4)
    # Segments of a sixteenth of the largest bucket at most: several share a run.
    side = max(1, math.isqrt(largest // 16 // frames))
    per_segment = frames * side * side
    long = (frames * (largest // per_segment + 1) + 1, 2 * side, 2 * side)
    many = (frames * max_segments + 1, 2, 2)
    return [small, long, (1, 4, 4), many]
