"""Running both sides on a batch and comparing them, item by item and token by token."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from m3compile.buckets import segments_of
from m3compile.config import BOUNDS, Bounds
from m3compile.config.bounds import tightest
from m3compile.runtime import Encoder
from m3compile.tower import Tower, make_tower
from m3compile.verify.cases import FILLERS, LARGE_FILLER, Grid, random_pixels
from m3compile.weights import whole_state

# Tokens that a report lists.
_NUM_WORST = 10


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


class WorstToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that is far from eager float32.

    Attributes:
        route, budget: as `VerifyRow`.
        grid: of its item.
        token: its place in the item's embeddings.
        cosine: with eager float32.
    """

    route: str
    budget: int | None
    grid: Grid
    token: int
    cosine: float


class Judge:
    """Runs both sides and compares them; eager results of the fillers are kept."""

    def __init__(self, encoder: Encoder, state: dict[str, Tensor]) -> None:
        manifest = encoder.manifest
        config = manifest.tower
        self._encoder = encoder
        # An artifact may ask for more than the project does, never for less; but how far fp8 may
        # be off is its build's own decision.
        self.bounds = manifest.bounds
        if manifest.precision is None:
            self.bounds = tightest(BOUNDS[manifest.dtype], manifest.bounds)
        self._config = config
        self._exact = make_tower(config, state, "TORCH_SDPA")
        self._rounded: Tower | None = None
        if encoder.dtype != torch.float32:
            rounded = whole_state(state, encoder.dtype)
            self._rounded = make_tower(config, rounded, "TORCH_SDPA")
        self._kept: dict[Grid, tuple[Tensor, Tensor, float | None]] = {}
        self._worst: list[WorstToken] = []

    @property
    def worst_tokens(self) -> tuple[WorstToken, ...]:
        """Of all rows so far, the smallest cosine first."""
        return tuple(self._worst)

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
                by_token = torch.cosine_similarity(got, expected, dim=1)
                cosine = float(by_token.min())
                errors.append(error)
                cosines.append(cosine)
                self._note_worst(route, budget, grid, by_token)
                if eager_error is not None:
                    eager_errors.append(eager_error)
                reason = reason or broken_bound(self.bounds, grid, error, cosine, eager_error)
        return VerifyRow(
            route=route,
            budget=budget,
            items=len(errors),
            min_cosine=smallest(cosines),
            max_error=largest(errors),
            mean_error=sum(errors) / len(errors),
            eager_error=max(eager_errors, default=None),
            passed=not reason,
            reason=reason,
        )

    def _note_worst(self, route: str, budget: int | None, grid: Grid, by_token: Tensor) -> None:
        """Keep the tokens that belong to the worst of all; `by_token` (tokens,) has cosines."""
        # NaN is worse than any number, and compares as none.
        ranks = by_token.nan_to_num(nan=-math.inf)
        tokens = ranks.topk(min(_NUM_WORST, len(by_token)), largest=False).indices
        found = (
            WorstToken(route=route, budget=budget, grid=grid, token=token, cosine=cosine)
            for token, cosine in zip(tokens.tolist(), by_token[tokens].tolist(), strict=True)
        )
        self._worst = heapq.nsmallest(
            _NUM_WORST,
            [*self._worst, *found],
            key=lambda token: -math.inf if math.isnan(token.cosine) else token.cosine,
        )

    def _case(self, grid: Grid) -> tuple[Tensor, Tensor, float | None]:
        """Pixels (N, patch_dim), eager float32 (N / 4, O), and the error of eager in our dtype."""
        if grid in self._kept:
            return self._kept[grid]
        pixels = random_pixels(grid, self._config.patch_dim).to(self._encoder.device)
        expected = eager(self._exact, pixels, grid)
        eager_error = None
        if self._rounded is not None:
            rounded = eager(self._rounded, pixels.to(self._encoder.dtype), grid)
            eager_error = relative_error(rounded.to(torch.float32), expected)
        case = (pixels, expected, eager_error)
        if grid in FILLERS or grid == LARGE_FILLER:
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


def largest(values: Sequence[float]) -> float:
    """Of at least one number; NaN where there is one, which Python's `max` may lose."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def smallest(values: Sequence[float]) -> float:
    """As `largest`."""
    return -largest([-value for value in values])


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
