"""What several test files compare with: golden cases, random rows, errors, the eager tower.

Written without the package's own helpers where it can be, so that a fault there is not on both
sides of a comparison.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from m3compile.tower import Tower

Grid = tuple[int, int, int]

CASES = Path(__file__).parent / "goldens" / "tiny-m3" / "cases.safetensors"
PATCH_DIM = 1176
MAX_FRAMES = 4

# float32, through any route: `||a - b|| / ||b||` of an item.
BOUND = 1e-5


class GoldenCase(NamedTuple):
    """A batch and what another implementation made of it; lists have one entry an item."""

    pixel_values: Tensor
    grids: list[Grid]
    outputs: list[Tensor]
    hidden: list[Tensor]


@cache
def golden_cases() -> dict[str, GoldenCase]:
    stored = load_file(CASES)
    cases = {}
    for name in sorted({key.partition(".")[0] for key in stored}):
        grids = [tuple(row) for row in stored[f"{name}.grid_thw"].tolist()]
        rows = [math.prod(grid) for grid in grids]
        cases[name] = GoldenCase(
            stored[f"{name}.pixel_values"],
            grids,
            list(stored[f"{name}.output"].split([count // 4 for count in rows])),
            list(stored[f"{name}.hidden"].split(rows)),
        )
    return cases


GOLDEN_NAMES = sorted(golden_cases())


def random_rows(grids: Sequence[Grid], seed: int = 0) -> Tensor:
    """Normal rows (N, PATCH_DIM) for a batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(map(math.prod, grids)), PATCH_DIM, generator=generator)


def split_rows(rows: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """The rows of each item."""
    return list(rows.split([math.prod(grid) for grid in grids]))


def num_tokens(grid: Grid) -> int:
    return math.prod(grid) // 4


def segments_of_item(grid: Grid) -> list[Grid]:
    frames, height, width = grid
    return [
        (min(MAX_FRAMES, frames - first), height, width) for first in range(0, frames, MAX_FRAMES)
    ]


def segment_table(segments: Sequence[Grid]) -> Tensor:
    return torch.tensor(segments, dtype=torch.int32).reshape(-1, 3)


@torch.no_grad()
def eager(tower: Tower, rows: Tensor, grid: Grid) -> Tensor:
    """The eager tower on one item at its exact shape: (t*h*w / 4, O)."""
    embeddings: Tensor = tower(rows, segment_table(segments_of_item(grid)))[0]
    return embeddings


def error_of(got: Tensor, expected: Tensor) -> float:
    """`||got - expected|| / ||expected||`; NaN passes no bound."""
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def assert_close_to_eager(
    results: Sequence[Tensor], tower: Tower, rows: Tensor, grids: Sequence[Grid]
) -> None:
    assert len(results) == len(grids)
    for index, (result, part) in enumerate(zip(results, split_rows(rows, grids), strict=True)):
        error = error_of(result, eager(tower, part, grids[index]))
        assert error <= BOUND, f"item {index} {grids[index]}: {error:.2e}"


def assert_same_bits(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(results) == len(expected)
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(result, wanted), f"item {index} differs"


def run_fresh(code: str, *arguments: object) -> str:
    """Run code in a fresh interpreter, with `sys.argv[1:]`; its standard output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
