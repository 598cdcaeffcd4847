"""What a run costs: measured milliseconds, or tokens where nothing was measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

# What a launch costs, in tokens: 1.0 ms against 4 patches of 0.0031 ms each, on an H200.
LAUNCH_TOKENS = 80

# Tokens between two entries of the table behind `CostModel.cover`.
_COVER_STEP = 16

# What an uncaptured run is charged on top: it keeps the host busy for as long as the device, so
# it must be faster by more than noise.
_EXACT_MARGIN = 1.03
# An uncaptured run that takes this many times its replay is bound by launching its kernels.
_BOUND_BY_LAUNCHING = 1.15
# An uncaptured run this much over the fastest one is no longer bound by launching its kernels.
_CLEAR_OF_LAUNCHING = 1.25


class RouteTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured milliseconds per budget; four parallel tuples.

    Attributes:
        budgets: tokens, increasing; any subset of the ladder.
        linear_ms: a replay of the bucket with small segments: nearly everything but attention.
        full_ms: a replay with one segment that fills the bucket.
        exact_ms: the uncaptured program at that shape, one segment; where launching its kernels
            may bind it, with room for a slower host.

    Raises:
        ValueError: the tuples differ in length or are empty, the budgets are not positive and
            increasing, or a time is not a positive number.
    """

    budgets: tuple[int, ...]
    linear_ms: tuple[float, ...]
    full_ms: tuple[float, ...]
    exact_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.budgets or self.budgets[0] < 1:
            raise ValueError(f"budgets is {self.budgets}; allowed: positive numbers of tokens")
        if any(low >= high for low, high in pairwise(self.budgets)):
            raise ValueError(f"budgets is {self.budgets}; allowed: increasing numbers of tokens")
        for name in ("linear_ms", "full_ms", "exact_ms"):
            times = getattr(self, name)
            if len(times) != len(self.budgets):
                raise ValueError(
                    f"{name} has {len(times)} values; allowed: one per budget, {len(self.budgets)}"
                )
            for budget, value in zip(self.budgets, times, strict=True):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(
                        f"{name} of budget {budget} is {value}; allowed: positive milliseconds"
                    )


class CostModel:
    """Predicts the cost of a run: in milliseconds with `times`, else in tokens.

    A replay costs its bucket's linear part plus the attention of the segments in it: padding
    costs no attention. An uncaptured run has no padding, but cannot be faster than its launches.
    """

    def __init__(self, ladder: Sequence[int], times: RouteTimes | None) -> None:
        self.ladder = tuple(ladder)
        self.measured = times is not None
        self._launch: float = LAUNCH_TOKENS
        self._ratio = 1.0
        self._knots: tuple[int, ...] = ()
        self._linear: tuple[float, ...] = ()
        self._attention: tuple[float, ...] = ()
        if times is not None:
            self._launch = _launch_ms(times)
            self._ratio = _EXACT_MARGIN * _exact_over_full(times)
            self._knots = times.budgets
            self._linear = times.linear_ms
            # Noise can put the full replay under the empty one.
            self._attention = tuple(
                max(0.0, full - linear)
                for full, linear in zip(times.full_ms, times.linear_ms, strict=True)
            )
        self.replays = tuple(self.linear(budget) for budget in self.ladder)
        self._lines = _lines_below(self.ladder, self.replays)
        self._covers = _cover_costs(self.ladder, self.replays)
        # From how many tokens up one replay of bucket i beats any split into several runs.
        self.whole_from = tuple(
            min(_tokens_where(line, cost) for line in self._lines) for cost in self.replays
        )

    def linear(self, tokens: int) -> float:
        """Everything but attention, at `tokens` rows, interpolated between the measured budgets."""
        if not self.measured:
            return LAUNCH_TOKENS + tokens
        knots, values = self._knots, self._linear
        if tokens <= knots[0]:
            return values[0]
        if tokens >= knots[-1]:
            return values[-1] * tokens / knots[-1]
        at = bisect_left(knots, tokens)
        share = (tokens - knots[at - 1]) / (knots[at] - knots[at - 1])
        return values[at - 1] + share * (values[at] - values[at - 1])

    def attention(self, tokens: int) -> float:
        """Attention of one segment: quadratic, scaled from the next measured budget up."""
        if not self.measured:
            return 0.0
        at = min(bisect_left(self._knots, tokens), len(self._knots) - 1)
        share = tokens / self._knots[at]
        return self._attention[at] * share * share

    def exact(self, tokens: int, attention: float) -> float:
        """An uncaptured run of `tokens`, whose segments cost `attention`."""
        return max(self._launch, self._ratio * (self.linear(tokens) + attention))

    def price(self, tokens: int, attention: float) -> tuple[float, int | None]:
        """The cheaper route of a run: its cost, and its budget or None for the exact shape."""
        at = bisect_left(self.ladder, tokens)
        if at == len(self.ladder):
            return self.exact(tokens, attention), None
        replay = self.replays[at] + attention
        if self.measured and replay > self._launch:
            exact = self.exact(tokens, attention)
            if exact < replay:
                return exact, None
        return replay, self.ladder[at]

    def cost(self, budget: int | None, tokens: int, attention: float) -> float:
        """A run by a given route."""
        if budget is None:
            return self.exact(tokens, attention)
        return self.replays[bisect_left(self.ladder, budget)] + attention

    def cover(self, tokens: int) -> float:
        """About what replays for `tokens` cost at least: as if items could be cut anywhere."""
        whole, rest = divmod(tokens, self.ladder[-1])
        return whole * self.replays[-1] + self._covers[-(-rest // _COVER_STEP)]

    def floor(self, tokens: int, num_runs: int) -> float:
        """No `num_runs` or more runs can hold `tokens` for less; attention comes on top."""
        return max(base * num_runs + slope * tokens for base, slope in self._lines)


def _cover_costs(ladder: Sequence[int], replays: Sequence[float]) -> list[float]:
    """Per step of tokens, up to the largest budget: the cheapest replays with that capacity."""
    # A bucket under one step counts as one: the table knows nothing smaller.
    covered = [max(budget, _COVER_STEP) for budget in ladder]
    costs = [0.0]
    for tokens in range(_COVER_STEP, ladder[-1] + _COVER_STEP, _COVER_STEP):
        costs.append(
            min(
                replay + costs[max(0, -(-(tokens - budget) // _COVER_STEP))]
                for budget, replay in zip(covered, replays, strict=True)
            )
        )
    return costs


def _launch_ms(times: RouteTimes) -> float:
    """What an uncaptured run takes at least: the slowest that launching alone explains.

    Not the fastest: small budgets may have a program of their own, with fewer launches.
    """
    bound = [
        exact
        for exact, full in zip(times.exact_ms, times.full_ms, strict=True)
        if exact > _BOUND_BY_LAUNCHING * full
    ]
    return max(bound, default=min(times.exact_ms))


def _exact_over_full(times: RouteTimes) -> float:
    limit = _CLEAR_OF_LAUNCHING * min(times.exact_ms)
    ratios = [
        exact / full
        for exact, full in zip(times.exact_ms, times.full_ms, strict=True)
        if exact > limit
    ]
    return max(1.0, median(ratios[len(ratios) // 2 :])) if ratios else 1.0


def _lines_below(ladder: Sequence[int], replays: Sequence[float]) -> list[tuple[float, float]]:
    """Lines `base + slope * tokens` that no replay lies below, with neither part negative.

    A replay in bucket b holds at most b tokens, so it costs at least `base + slope * tokens`. So
    does an uncaptured run: its linear part lies between those of replays, times at least 1.
    """
    hull: list[tuple[int, float]] = []
    for point in zip(ladder, replays, strict=True):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    lines = [
        (min(replays), 0.0),
        (0.0, min(cost / budget for budget, cost in zip(ladder, replays, strict=True))),
    ]
    for (low, low_cost), (high, high_cost) in pairwise(hull):
        slope = (high_cost - low_cost) / (high - low)
        base = low_cost - slope * low
        if slope >= 0 and base >= 0:
            lines.append((base, slope))
    return lines


def _tokens_where(line: tuple[float, float], cost: float) -> float:
    """From how many tokens up two runs cost at least `cost`."""
    base, slope = line
    if slope > 0:
        return (cost - 2 * base) / slope
    return 0.0 if cost <= 2 * base else math.inf


def _turns_down(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
