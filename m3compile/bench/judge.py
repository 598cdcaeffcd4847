"""Whether what was timed is right: eager float32 of the same pixels, and the artifact's bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from m3compile.bench.clock import finite
from m3compile.bench.records import Check
from m3compile.bench.runners import item_rows
from m3compile.config import Bounds
from m3compile.tower import Tower
from m3compile.verify import eager, relative_error

Grid = tuple[int, int, int]


class Expected(NamedTuple):
    """Per item: eager float32 (t*h*w / 4, O), and the error of eager in the artifact's dtype."""

    embeddings: list[Tensor]
    eager_errors: list[float | None]


class Judge:
    """Compares results with eager float32.

    Args:
        exact: the tower in float32.
        rounded: the tower in the artifact's dtype, None where that is float32.
        bounds: of the artifact.
    """

    def __init__(self, exact: Tower, rounded: Tower | None, bounds: Bounds) -> None:
        self._exact = exact
        self._rounded = rounded
        self._bounds = bounds

    def expect(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Expected:
        """Eager of every item by itself; `pixel_values` (N, patch_dim) in any float dtype."""
        starts = item_rows(grids)
        embeddings: list[Tensor] = []
        eager_errors: list[float | None] = []
        for index, grid in enumerate(grids):
            pixels = pixel_values[starts[index] : starts[index + 1]]
            exact = eager(self._exact, pixels.to(torch.float32), grid)
            error = None
            if self._rounded is not None:
                rounded = eager(self._rounded, pixels, grid)
                error = relative_error(rounded.to(torch.float32), exact)
            embeddings.append(exact)
            eager_errors.append(error)
        return Expected(embeddings, eager_errors)

    def check(self, results: Sequence[Tensor], expected: Expected) -> Check:
        """Hold every item's result against the bounds."""
        return merge([
            _check_item(got.to(torch.float32), wanted, eager_error, self._bounds)
            for got, wanted, eager_error in zip(results, *expected, strict=True)
        ])  # fmt: skip


def _check_item(got: Tensor, wanted: Tensor, eager_error: float | None, bounds: Bounds) -> Check:
    error = relative_error(got, wanted)
    cosine = float(torch.cosine_similarity(got, wanted, dim=1).min())
    reason = ""
    allowed = math.inf if bounds.relative_error is None else bounds.relative_error
    if bounds.eager_ratio is not None and eager_error is not None:
        allowed = min(allowed, bounds.eager_ratio * eager_error)
    # Written so that NaN breaks a bound.
    if not error <= allowed:
        reason = f"an item has error {error:.2e}, allowed {allowed:.2e}"
    elif bounds.cosine is not None and not cosine >= bounds.cosine:
        reason = f"a token has cosine {cosine:.6f}, allowed {bounds.cosine}"
    return Check(
        error=finite(error),
        eager_error=eager_error,
        min_cosine=finite(cosine),
        passed=not reason,
        reason=reason,
    )


def merge(checks: Sequence[Check]) -> Check:
    """The worst of some checks; a number that one of them lacks is not finite, and is lacking."""
    return Check(
        error=_worst([check.error for check in checks], max),
        eager_error=_worst([check.eager_error for check in checks], max),
        min_cosine=_worst([check.min_cosine for check in checks], min),
        passed=all(check.passed for check in checks),
        reason=next((check.reason for check in checks if check.reason), ""),
    )


def _worst(
    values: Sequence[float | None], pick: Callable[[Iterable[float]], float]
) -> float | None:
    known = [value for value in values if value is not None]
    return pick(known) if known and len(known) == len(values) else None
