"""Comparing an ONNX file with eager: ONNX Runtime on the CPU, several mixes of grids.

The reference is the eager tower in float32, run on one item at a time at its exact shape. A half
precision file is also compared with eager in its own dtype: rounding is no fault, more rounding
than eager is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from m3compile import onnx
from m3compile.config import Bounds, TowerConfig
from m3compile.onnx_format import BLOCK_LOGITS, CHECK_BOUNDS
from m3compile.progress import Progress
from m3compile.tower import Tower, make_tower
from m3compile.verify import Grid, broken_bound, eager, relative_error

_SEED = 31_337

# Every kind of item once: the smallest, square, wide, tall, a clip of one segment.
_ALONE: tuple[Grid, ...] = ((1, 2, 2), (1, 16, 16), (1, 2, 36), (1, 36, 2), (3, 4, 4))
_MIXES: dict[str, tuple[Grid, ...]] = {
    "images together": ((1, 4, 4), (1, 8, 16), (1, 16, 8), (1, 2, 6)),
    # The same rows, cut at other places.
    "72 rows as three": ((1, 4, 4), (1, 4, 6), (1, 4, 8)),
    "72 rows as three others": ((1, 4, 4), (1, 4, 4), (1, 4, 10)),
    "clips and an image": ((9, 4, 4), (1, 4, 6), (5, 2, 4)),
    "24 items": ((1, 4, 4), (1, 2, 6), (1, 6, 2)) * 8,
}


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one mix showed.

    Attributes:
        mix: what was run together.
        items, patches: of the mix.
        max_error: `||a - b|| / ||b||` of an item, against eager float32.
        min_cosine: of any token with eager float32.
        eager_error: largest error of eager in the file's own dtype, None for float32.
        passed: whether every item held its bound.
        reason: the first bound that was broken, in words, or "".
    """

    mix: str
    items: int
    patches: int
    max_error: float
    min_cosine: float
    eager_error: float | None
    passed: bool
    reason: str


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every mix, and the bounds that were held."""

    runtime: str
    bounds: Bounds
    passed: bool
    summary: str
    rows: tuple[CheckRow, ...]


def check_file(
    path: Path,
    config: TowerConfig,
    exact: Mapping[str, Tensor],
    rounded: Mapping[str, Tensor] | None,
    progress: Progress | None = None,
) -> CheckReport:
    """Run a file on several mixes of grids, and compare every item with eager.

    Args:
        path: the ONNX file.
        config: of the tower.
        exact: its weights in float32.
        rounded: its weights in the file's dtype, None for float32.
        progress: told how many mixes are done.

    Raises:
        ArtifactIncompatibleError: ONNX Runtime's CPU provider lacks a kernel for the dtype.
        OperationError: ONNX Runtime failed.
    """
    import onnxruntime

    encoder = onnx.load(path, max_patches=1 << 20)
    judge = _Judge(encoder, config, exact, rounded)
    mixes = {**_MIXES, "a large image": ((1, 2, 4), _large_image(config))}
    rows = [judge.row("alone", [(grid,) for grid in _ALONE])]
    for mix, grids in mixes.items():
        if progress is not None:
            progress.advance(len(rows), len(mixes) + 2)
        rows.append(judge.row(mix, [grids]))
    rows.append(judge.nonfinite_row())
    failed = [row for row in rows if not row.passed]
    if failed:
        summary = f"{len(failed)} of {len(rows)} mixes out of bounds; {failed[0].mix}: "
        summary += failed[0].reason
    else:
        error = max(row.max_error for row in rows)
        summary = f"{len(rows)} mixes within bounds, largest error {error:.1e}"
    return CheckReport(
        runtime=f"ONNX Runtime {onnxruntime.__version__}, CPUExecutionProvider",
        bounds=judge.bounds,
        passed=not failed,
        summary=summary,
        rows=tuple(rows),
    )


def _large_image(config: TowerConfig) -> Grid:
    """The smallest square image whose attention takes more than one block of queries."""
    patches = math.isqrt(BLOCK_LOGITS // config.num_attention_heads)
    side = 2 * (math.isqrt(patches) // 2 + 1)
    return 1, side, side


class _Judge:
    """Runs both sides and compares them."""

    def __init__(
        self,
        encoder: onnx.OnnxEncoder,
        config: TowerConfig,
        exact: Mapping[str, Tensor],
        rounded: Mapping[str, Tensor] | None,
    ) -> None:
        self.bounds = CHECK_BOUNDS[encoder.metadata.dtype]
        self._encoder = encoder
        self._config = config
        self._exact = make_tower(config, dict(exact), "TORCH_SDPA")
        self._rounded: Tower | None = None
        if rounded is not None:
            self._rounded = make_tower(config, dict(rounded), "TORCH_SDPA")
        self._kept: dict[Grid, tuple[Tensor, Tensor, float | None]] = {}

    def row(self, mix: str, batches: list[tuple[Grid, ...]]) -> CheckRow:
        """Run every batch as one call."""
        grids: list[Grid] = []
        results: list[Tensor] = []
        for batch in batches:
            pixels = [self._case(grid)[0].numpy() for grid in batch]
            found = self._encoder.encode(pixels, [list(grid) for grid in batch])
            grids += batch
            results += [torch.from_numpy(item) for item in found]
        return self._compare(mix, grids, results)

    def nonfinite_row(self) -> CheckRow:
        """Neighbours of an image with one NaN, before padding that is NaN throughout.

        The image itself must come back as NaN, which no bound says; so it is looked at here.
        """
        grids: list[Grid] = [(1, 4, 4), (1, 4, 6), (1, 8, 8)]
        pixels = [self._case(grid)[0] for grid in grids]
        bad = pixels[1].clone()
        bad[5, 7] = math.nan
        padding = torch.full((16, self._config.patch_dim), math.nan)
        rows = torch.cat([pixels[0], bad, pixels[2], padding])
        table = np.array([*grids, (0, 0, 0)], np.int64)
        embeddings = torch.from_numpy(self._encoder.run(rows.numpy(), table))
        tokens = [math.prod(grid) // self._config.patches_per_token for grid in grids]
        first, second, third = embeddings[: sum(tokens)].split(tokens)
        row = self._compare("beside NaN", [grids[0], grids[2]], [first, third])
        if row.passed and not bool(second.isnan().all()):
            reason = "an item with a NaN pixel did not come back as NaN"
            row = msgspec.structs.replace(row, passed=False, reason=reason)
        return row

    def _compare(self, mix: str, grids: list[Grid], results: list[Tensor]) -> CheckRow:
        errors: list[float] = []
        cosines: list[float] = []
        eager_errors: list[float] = []
        reason = ""
        for grid, found in zip(grids, results, strict=True):
            _, expected, eager_error = self._case(grid)
            got = found.to(torch.float32)
            errors.append(relative_error(got, expected))
            cosines.append(float(torch.cosine_similarity(got, expected, dim=1).min()))
            if eager_error is not None:
                eager_errors.append(eager_error)
            reason = reason or broken_bound(self.bounds, grid, errors[-1], cosines[-1], eager_error)
        return CheckRow(
            mix=mix,
            items=len(grids),
            patches=sum(math.prod(grid) for grid in grids),
            max_error=max(errors),
            min_cosine=min(cosines),
            eager_error=max(eager_errors, default=None),
            passed=not reason,
            reason=reason,
        )

    def _case(self, grid: Grid) -> tuple[Tensor, Tensor, float | None]:
        """Pixels (N, patch_dim), eager float32 (N / 4, O), and the error of eager in our dtype."""
        if grid not in self._kept:
            rows = math.prod(grid)
            generator = torch.Generator().manual_seed(_SEED + rows)
            pixels = torch.randn(rows, self._config.patch_dim, generator=generator)
            expected = eager(self._exact, pixels, grid)
            eager_error = None
            if self._rounded is not None:
                dtype = self._rounded.patch_embed.weight.dtype
                rounded = eager(self._rounded, pixels.to(dtype), grid)
                eager_error = relative_error(rounded.to(torch.float32), expected)
            self._kept[grid] = (pixels, expected, eager_error)
        return self._kept[grid]
