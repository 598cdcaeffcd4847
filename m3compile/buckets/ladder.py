"""The ladder of token budgets, and how an item is cut into segments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from m3compile.config.build import MAX_TOKENS
from m3compile.errors import ConfigError

# Sizes that traffic has most of: square images of 8, 16, 24, 36, 48 and 64 tokens a side.
ANCHORS = (64, 256, 576, 1296, 2304, 4096)


def default_ladder(largest: int = 4096) -> tuple[int, ...]:
    """Budgets in tokens, increasing, up to `largest`.

    From 64 tokens up the worst fit leaves less than one eighth of its bucket unused. The anchors
    and `largest` are hit exactly. Between two of them stand as few budgets as that bound permits
    on multiples of 8 tokens (below 256) or of 16 or 32, spread evenly.

    Raises:
        ConfigError: `largest` is not from 1 to the tokens of one run.
    """
    if not 1 <= largest <= MAX_TOKENS:
        raise ConfigError(f"largest budget is {largest}; allowed: from 1 to {MAX_TOKENS} tokens")
    stops = [anchor for anchor in ANCHORS if anchor < largest] + [largest]
    ladder = stops[:1]
    for low, high in pairwise(stops):
        # A matrix tile is 32 tokens high: multiples of it waste none, so they win a tie.
        steps = (32, 16) if low >= 256 else (8,)
        climbs = [_climb(low, high, step) for step in steps]
        fewest = min(climbs, key=len)
        ladder += fewest
    return tuple(ladder)


def budget_for(tokens: int, ladder: Sequence[int]) -> int | None:
    """The smallest budget of an increasing `ladder` that holds `tokens`; None if none does."""
    index = bisect_left(ladder, tokens)
    return ladder[index] if index < len(ladder) else None


def segments_of(t: int, h: int, w: int, max_frames: int) -> list[tuple[int, int, int]]:
    """Cut an item's grid, in patches, into consecutive segments of at most `max_frames` frames.

    A segment `(t, h, w)` has `t * h * w / 4` tokens. Only the last one may be shorter.
    """
    whole, rest = divmod(t, max_frames)
    return [(max_frames, h, w)] * whole + ([(rest, h, w)] if rest else [])


def _climb(low: int, high: int, step: int) -> list[int]:
    """The fewest budgets above `low`, multiples of `step`, then `high`; spread evenly."""
    farthest = [low]
    while _reach(farthest[-1]) < high:
        farthest.append(_reach(farthest[-1]) // step * step)
    count = len(farthest)
    # The greedy climb leaves all slack at its top. Move each budget down to its place in an even
    # (geometric) spread, as far as the one below it still reaches.
    budgets = [high]
    for index in range(count - 1, 0, -1):
        even = low * (high / low) ** (index / count)
        candidate = max(round(even / step) * step, _lowest(budgets[-1], step))
        budgets.append(min(candidate, farthest[index]))
    return budgets[::-1]


def _reach(budget: int) -> int:
    """The largest budget b that may follow: its worst fit has (b - (budget + 1)) * 8 < b."""
    return budget + 1 + budget // 7


def _lowest(budget: int, step: int) -> int:
    """The smallest multiple of `step` from which `budget` is within reach."""
    low = budget * 7 // 8 // step * step
    while _reach(low) < budget:
        low += step
    return low
