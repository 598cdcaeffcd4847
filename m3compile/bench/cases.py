"""Which batches are measured, and how often; over plain ints."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from m3compile.buckets import budget_for
from m3compile.errors import RequestError

Grid = tuple[int, int, int]

# Sizes the project's targets are stated for.
KEY_TOKENS = (64, 256, 576, 1296, 4096)
_QUICK_BUDGETS = 2
_BATCH = (8, 256)
# A small image alone in these buckets shows what padding costs.
_SMALL_TOKENS = 64
_PADDED_BUDGETS = (256, 1024, 4096)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A batch and the bucket it is measured in; fields as in `CaseResult`."""

    name: str
    kind: str
    grids: tuple[Grid, ...]
    budget: int
    worst_padding: float

    @property
    def tokens(self) -> int:
        return sum(math.prod(grid) // 4 for grid in self.grids)


class Effort(msgspec.Struct, frozen=True):
    """How much to measure.

    Attributes:
        least, most: bounds of the repetitions.
        seconds: what the repetitions of one thing may take, between those bounds.
        next_calls: calls after a bucket's first.
        passes: of a trace.
        calls: of a trace that are run, from its start; None for all.
    """

    least: int
    most: int
    seconds: float
    next_calls: int
    passes: int
    calls: int | None

    def repetitions(self, ms: float) -> int:
        """How often something that takes `ms` is measured."""
        return max(self.least, min(self.most, int(1000 * self.seconds / max(ms, 1e-3))))


FULL = Effort(least=5, most=20, seconds=1.5, next_calls=20, passes=3, calls=None)
QUICK = Effort(least=2, most=5, seconds=0.1, next_calls=2, passes=1, calls=10)


def choose_budgets(
    ladder: Sequence[int], wanted: Sequence[int] | None, quick: bool
) -> tuple[int, ...]:
    """The budgets to measure: those asked for, a few, or the ladder.

    Raises:
        RequestError: the ladder lacks one that was asked for.
    """
    if wanted is not None:
        missing = [budget for budget in wanted if budget not in ladder]
        if missing or not wanted:
            raise RequestError(
                f"--budgets has {missing[0] if missing else 'none'}; the artifact's ladder is "
                f"{', '.join(map(str, ladder))}"
            )
        return tuple(sorted(set(wanted)))
    if quick:
        known = [budget for budget in KEY_TOKENS if budget in ladder]
        return tuple((known or list(ladder))[:_QUICK_BUDGETS])
    return tuple(ladder)


def make_cases(ladder: Sequence[int], budgets: Sequence[int], max_segments: int) -> list[Case]:
    """An image that fills each budget, a batch of small images, and padding; smallest first.

    Args:
        ladder: all budgets.
        budgets: those to measure.
        max_segments: most segments in one run.
    """
    cases = [
        _case(str(budget), "full", (square_grid(budget),), budget, ladder) for budget in budgets
    ]
    count, tokens = _BATCH
    bucket = budget_for(count * tokens, ladder)
    if bucket in budgets and count <= max_segments:
        assert bucket is not None
        grids = (square_grid(tokens),) * count
        cases.append(_case(f"{count} x {tokens}", "batch", grids, bucket, ladder))
    for bucket in _PADDED_BUDGETS:
        if bucket in budgets:
            name = f"{_SMALL_TOKENS} in {bucket}"
            cases.append(_case(name, "padded", (square_grid(_SMALL_TOKENS),), bucket, ladder))
    return cases


def _case(
    name: str, kind: str, grids: tuple[Grid, ...], budget: int, ladder: Sequence[int]
) -> Case:
    smaller = [other for other in ladder if other < budget]
    least = (smaller[-1] if smaller else 0) + 1
    return Case(
        name=name, kind=kind, grids=grids, budget=budget, worst_padding=(budget - least) / budget
    )


def square_grid(tokens: int) -> Grid:
    """An image of that many tokens, in patches, as close to square as its divisors allow."""
    side = math.isqrt(tokens)
    while tokens % side:
        side -= 1
    return 1, 2 * side, 2 * (tokens // side)
