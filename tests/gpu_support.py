"""What the CUDA tests share: one tiny artifact a run, and eager towers to compare with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from conftest import GOLDEN_CHECKPOINT

Grid = tuple[int, int, int]

# The grids of cases.md: 64, 1,196 and 4,096 tokens.
SMALL: Grid = (1, 16, 16)
LARGE: Grid = (1, 52, 92)
HUGE: Grid = (1, 128, 128)


@dataclass
class Eager:
    """The eager tower on the GPU, in float32 and in the artifact's bfloat16."""

    checkpoint: Path = GOLDEN_CHECKPOINT

    @cached_property
    def towers(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        from m3compile.tower import make_tower
        from m3compile.weights import load_module_state, open_checkpoint

        checkpoint = open_checkpoint(self.checkpoint)
        state = load_module_state(checkpoint, torch.float32, "cuda")
        rounded = {
            name: tensor if name == "inverse_frequency" else tensor.bfloat16()
            for name, tensor in state.items()
        }
        return tuple(make_tower(checkpoint.config, part, "TORCH_SDPA") for part in (state, rounded))

    def expect(self, pixels: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, float]:
        """Eager float32 (tokens, O), and the error of eager bfloat16."""
        from m3compile.verify import eager, relative_error

        exact, rounded = self.towers
        expected = eager(exact, pixels.cuda().float(), grid)
        own = eager(rounded, pixels.cuda().bfloat16(), grid).float()
        return expected, relative_error(own, expected)

    def check(self, got: torch.Tensor, pixels: torch.Tensor, grid: Grid) -> None:
        """Hold an item to the bounds of bfloat16; also on every token's direction."""
        from m3compile.config import BOUNDS
        from m3compile.verify import relative_error

        bounds = BOUNDS["bfloat16"]
        expected, own_error = self.expect(pixels, grid)
        got = got.float()
        assert got.shape == expected.shape
        assert got.isfinite().all()
        # An item of a few tokens has too few for its own error to be a bound.
        _, typical_error = self.expect(pixels_of(SMALL), SMALL)
        error, allowed = relative_error(got, expected), max(own_error, typical_error)
        assert error <= bounds.eager_ratio * allowed, (grid, error, allowed)
        cosine = torch.cosine_similarity(got, expected, dim=1).min()
        assert cosine >= bounds.cosine, (grid, cosine)


def pixels_of(grid: Grid, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    """(t*h*w, 1176) bfloat16, the same for the same grid and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + math.prod(grid))
    rows = torch.randn(math.prod(grid), 1176, generator=generator)
    return rows.bfloat16().to(device)


def tokens_of(grid: Grid) -> int:
    return math.prod(grid) // 4


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, from the root of the checkout."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        env=os.environ,
    )
