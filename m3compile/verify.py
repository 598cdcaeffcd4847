"""Comparing an artifact with eager, item by item, on a fixed set of grids.

The reference is the eager tower in float32, run on one item at a time at its exact shape. A
bfloat16 artifact is also compared with eager in bfloat16: rounding is no fault, more rounding than
eager is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from m3compile.buckets import segments_of
from m3compile.config import BOUNDS, Bounds, TowerConfig
from m3compile.config.bounds import tightest
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import CheckpointError
from m3compile.loading import load, load_weights
from m3compile.progress import Progress
from m3compile.runtime import Encoder
from m3compile.tower import Tower, make_tower
from m3compile.weights import Checkpoint, load_module_state, open_checkpoint

Grid = tuple[int, int, int]

# Small items of every kind that fill up batches; eager computes each of them once.
_FILLERS: tuple[Grid, ...] = (
    (1, 16, 16), (1, 2, 2), (1, 4, 36), (2, 8, 8), (1, 20, 8), (1, 16, 32), (1, 8, 20), (3, 4, 4),
)  # fmt: skip
# Takes their place where a run has too few segments left for small ones.
_LARGE_FILLER: Grid = (1, 32, 32)
# Attention grows with the square of a segment: on a CPU one of 4,096 tokens takes longer than all
# the rest. Past this many tokens a bucket is filled with several items there.
_LONGEST_CHEAP = 640
# An encoder whose segments are longer than this has no clips that are worth cutting.
_MOST_FRAMES = 256
_SEED = 20_240


class VerifyRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one route showed.

    Attributes:
        route: `bucket`, `exact` or `cut` (an item over several runs).
        budget: tokens of the bucket, or None.
        items: items compared.
        min_cosine: of any token with eager float32.
        max_error, mean_error: `||a - b|| / ||b||` of an item.
        eager_error: largest error of eager in the artifact's own dtype, None for float32.
        passed: whether every item held its bound.
        reason: the first bound that was broken, in words, or "".
    """

    route: str
    budget: int | None
    items: int
    min_cosine: float
    max_error: float
    mean_error: float
    eager_error: float | None
    passed: bool
    reason: str


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every route, and what it was compared with.

    Attributes:
        reference: `checkpoint` (proves conversion and program), or `artifact weights` (proves the
            program only).
    """

    dtype: str
    device: str
    reference: str
    bounds: Bounds
    passed: bool
    summary: str
    rows: tuple[VerifyRow, ...]


def verify(
    path: str | Path, checkpoint: str | Path | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Load an artifact and compare it with eager.

    Args:
        path: the artifact.
        checkpoint: what it was built from; without it, the artifact's own weights serve as the
            reference, which proves the program but not the conversion.

    Raises:
        ArtifactError, CheckpointError: either cannot be opened, or they do not belong together.
    """
    progress = progress or Progress()
    source = open_checkpoint(checkpoint) if checkpoint is not None else None
    with progress.stage("load"):
        encoder = load(path, on_bucket=progress.advance)
    with encoder, progress.stage("verify"):
        if source is not None:
            _require_same_tower(source, encoder.manifest.tower, path)
        return verify_encoder(encoder, source, folder=Path(path), progress=progress)


def _require_same_tower(source: Checkpoint, tower: TowerConfig, path: str | Path) -> None:
    for name in tower.__struct_fields__:
        found, expected = getattr(source.config, name), getattr(tower, name)
        if found != expected:
            raise CheckpointError(
                f"{source.path}: {name} is {found}, and {path} was built from a checkpoint with "
                f"{expected}"
            )


def verify_encoder(
    encoder: Encoder,
    checkpoint: Checkpoint | None,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a loaded encoder with eager; without a checkpoint, `folder` has its weights."""
    manifest = encoder.manifest
    judge = _Judge(encoder, _reference_state(encoder, checkpoint, folder))
    routes = list(_routes(encoder))
    rows = []
    for done, (route, budget, batches) in enumerate(routes, 1):
        rows.append(judge.row(route, budget, batches))
        if progress is not None:
            progress.advance(done, len(routes))
    failed = [row for row in rows if not row.passed]
    if failed:
        worst = failed[0]
        where = f"{worst.route} {worst.budget or ''}".strip()
        summary = f"{len(failed)} of {len(rows)} routes out of bounds; {where}: {worst.reason}"
    else:
        error = max(row.max_error for row in rows)
        summary = f"{len(rows)} routes within bounds, largest error {error:.1e}"
    return VerifyReport(
        dtype=manifest.dtype,
        device=str(encoder.device),
        reference="artifact weights" if checkpoint is None else "checkpoint",
        bounds=judge.bounds,
        passed=not failed,
        summary=summary,
        rows=tuple(rows),
    )


def _reference_state(
    encoder: Encoder, checkpoint: Checkpoint | None, folder: Path | None
) -> dict[str, Tensor]:
    if checkpoint is not None:
        return load_module_state(checkpoint, torch.float32, encoder.device)
    assert folder is not None
    weights = load_weights(folder, encoder.manifest, encoder.device)
    return {name: tensor.to(torch.float32) for name, tensor in weights.items()}


class _Judge:
    """Runs both sides and compares them; eager results of the fillers are kept."""

    def __init__(self, encoder: Encoder, state: dict[str, Tensor]) -> None:
        config = encoder.manifest.tower
        self._encoder = encoder
        # An artifact may ask for more than the project does, never for less.
        self.bounds = tightest(BOUNDS[encoder.manifest.dtype], encoder.manifest.bounds)
        self._config = config
        self._exact = make_tower(config, state, "TORCH_SDPA")
        self._rounded: Tower | None = None
        if encoder.dtype != torch.float32:
            rounded = {
                name: tensor if name == "inverse_frequency" else tensor.to(encoder.dtype)
                for name, tensor in state.items()
            }
            self._rounded = make_tower(config, rounded, "TORCH_SDPA")
        self._kept: dict[Grid, tuple[Tensor, Tensor, float | None]] = {}

    def row(self, route: str, budget: int | None, batches: list[list[Grid]]) -> VerifyRow:
        errors: list[float] = []
        cosines: list[float] = []
        eager_errors: list[float] = []
        reason = ""
        for grids in batches:
            cases = [self._case(grid) for grid in grids]
            pixels = [case[0] for case in cases]
            if route == "cut":
                results = self._encoder.encode(pixels, grids)
            else:
                results = self._encoder.encode_at(pixels, grids, budget)
            for grid, got, (_, expected, eager_error) in zip(grids, results, cases, strict=True):
                got = got.to(torch.float32)
                error = relative_error(got, expected)
                cosine = float(torch.cosine_similarity(got, expected, dim=1).min())
                errors.append(error)
                cosines.append(cosine)
                if eager_error is not None:
                    eager_errors.append(eager_error)
                reason = reason or broken_bound(self.bounds, grid, error, cosine, eager_error)
        return VerifyRow(
            route=route,
            budget=budget,
            items=len(errors),
            min_cosine=min(cosines),
            max_error=max(errors),
            mean_error=sum(errors) / len(errors),
            eager_error=max(eager_errors, default=None),
            passed=not reason,
            reason=reason,
        )

    def _case(self, grid: Grid) -> tuple[Tensor, Tensor, float | None]:
        """Pixels (N, patch_dim), eager float32 (N / 4, O), and the error of eager in our dtype."""
        if grid in self._kept:
            return self._kept[grid]
        device = self._encoder.device
        rows = math.prod(grid)
        generator = torch.Generator().manual_seed(_SEED + rows)
        pixels = torch.randn(rows, self._config.patch_dim, generator=generator).to(device)
        expected = eager(self._exact, pixels, grid)
        eager_error = None
        if self._rounded is not None:
            rounded = eager(self._rounded, pixels.to(self._encoder.dtype), grid)
            eager_error = relative_error(rounded.to(torch.float32), expected)
        case = (pixels, expected, eager_error)
        if grid in _FILLERS or grid == _LARGE_FILLER:
            self._kept[grid] = case
        return case


def eager(tower: Tower, pixels: Tensor, grid: Grid) -> Tensor:
    """The eager tower on one item at its exact shape: (t*h*w, patch_dim) to (t*h*w / 4, O)."""
    segments = segments_of(*grid, tower.config.vision_segment_max_frames)
    table = torch.tensor(segments, dtype=torch.int32, device=pixels.device)
    with torch.no_grad():
        embeddings: Tensor = tower(pixels, table)[0]
    return embeddings


def relative_error(got: Tensor, expected: Tensor) -> float:
    """`||got - expected|| / ||expected||`; NaN never passes a bound."""
    return float((got - expected).norm() / expected.norm())


def broken_bound(
    bounds: Bounds, grid: Grid, error: float, cosine: float, eager_error: float | None
) -> str:
    """The first bound that an item breaks, in words, or "". Written so that NaN breaks it."""
    if bounds.relative_error is not None and not error <= bounds.relative_error:
        return f"item {list(grid)} has error {error:.2e}, allowed {bounds.relative_error:.0e}"
    if bounds.eager_ratio is not None and eager_error is not None:
        allowed = bounds.eager_ratio * eager_error
        if not error <= allowed:
            return (
                f"item {list(grid)} has error {error:.2e}, allowed {allowed:.2e} "
                f"({bounds.eager_ratio} times eager's own {eager_error:.2e})"
            )
    if bounds.cosine is not None and not cosine >= bounds.cosine:
        return f"item {list(grid)} has a token of cosine {cosine:.6f}, allowed {bounds.cosine}"
    return ""


def _routes(encoder: Encoder) -> Iterator[tuple[str, int | None, list[list[Grid]]]]:
    """Every budget full and at its lower edge, the exact shape, and items cut over runs."""
    slots, largest = encoder.max_segments, encoder.ladder[-1]
    frames = encoder.manifest.tower.vision_segment_max_frames
    is_cuda = encoder.device.type == "cuda"
    previous = 0
    for budget in encoder.ladder:
        batches = []
        for tokens in (budget, previous + 1):
            if tokens <= _LONGEST_CHEAP or (is_cuda and budget == largest):
                batches.append([_one_item(tokens)])
            if tokens > _LONGEST_CHEAP or tokens == budget:
                batches.append(_batch(tokens, slots, frames))
        yield "bucket", budget, _distinct(batches)
        previous = budget
    over = min(largest + 1, MAX_TOKENS)
    one_over = is_cuda or over <= _LONGEST_CHEAP
    last = [_one_item(over)] if one_over else _batch(over, slots, frames)
    yield "exact", None, _distinct([[_one_item(1)], _batch(96, slots, frames), last])
    if frames <= _MOST_FRAMES:
        yield "cut", None, [_cut_items(largest, slots, frames)]


def _distinct(batches: list[list[Grid]]) -> list[list[Grid]]:
    """Without repetitions: in small buckets a batch may be a single item."""
    return [batch for index, batch in enumerate(batches) if batch not in batches[:index]]


def _one_item(tokens: int) -> Grid:
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
        after = (max_segments - len(grids) - 1) * _tokens(_LARGE_FILLER)
        fitting = [grid for grid in _FILLERS if _tokens(grid) <= left and grid[0] <= max_frames]
        grid = fitting[len(grids) % len(fitting)] if fitting else _one_item(left)
        if left - _tokens(grid) > after and left >= _tokens(_LARGE_FILLER):
            grid = _LARGE_FILLER
        grids.append(grid)
        left -= _tokens(grid)
    if left:
        grids.append(_one_item(left))
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
