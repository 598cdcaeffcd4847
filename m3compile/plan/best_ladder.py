"""The cheapest budgets for runs of given sizes, by dynamic programming.

The runs are fixed here: each goes to the smallest budget that holds it or, where that is said to
cost less, runs at its exact shape. A budget between two sizes is no better than the smaller one,
unless measured times fall on the way up, and then the point where they end to fall is best: so the
sizes and those points are all the budgets there are to choose from. With `best[k, j]`, the least
cost of the runs up to budget j with k budgets of which j is the largest,

    best[k, j] = min over i < j of best[k - 1, i] + (cost of the runs between i and j in bucket j)

and whatever is over the largest budget runs at its exact shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3compile.buckets import RouteTimes
from m3compile.buckets.times import CostModel
from m3compile.plan.memory import MemoryModel
from m3compile.plan.simulate import size_model
from m3compile.plan.workload import Demand

# Prices of a byte that are tried where a memory limit binds; each is half of the one before.
_NUM_PRICES = 20
_CHOICES_PRICED = 512
# Costs this near to each other are the same: the ladder of fewer graphs is taken.
_SAME = 1 + 1e-12

Ladder = tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What a ladder may take.

    Attributes:
        max_graphs: budgets at most.
        memory: the model of it, used for the report and the limit.
        memory_bytes: the limit; None for none.
    """

    max_graphs: int
    memory: MemoryModel
    memory_bytes: int | None = None

    def allow(self, ladder: Sequence[int]) -> bool:
        """Whether a ladder keeps to both."""
        fits = self.memory_bytes is None or self.memory.total(ladder) <= self.memory_bytes
        return fits and len(ladder) <= self.max_graphs


def best_ladder(
    demand: Demand,
    times: RouteTimes,
    limits: Limits,
    *,
    max_choices: int | None = None,
    at_least: int = 0,
) -> Ladder | None:
    """The budgets of least cost, increasing; None if the memory does not hold even one.

    Exact, but for two cases. `max_choices` thins out the budgets to choose from. And where a memory
    limit binds, what depends on the sum of the budgets, not on the largest or on their number, is
    turned into a price, and the best of the ladders over a range of prices is taken.

    Args:
        at_least: tokens that the largest budget has, as far as there are such runs.
    """
    model = size_model(times)
    runs = _Runs(demand, _choices(demand, times, model, max_choices), model)
    cost, ladder, is_bound = _search(runs, limits, 0.0, at_least)
    if not is_bound:
        return ladder
    runs = _Runs(demand, _choices(demand, times, model, _CHOICES_PRICED), model)
    price = runs.all_exact / limits.memory.total((int(runs.budgets[0]),))
    for step in range(_NUM_PRICES):
        found = _search(runs, limits, price / 2**step, at_least)
        if found[0] < cost:
            cost, ladder, _ = found
    return ladder


class _Runs:
    """A demand and the budgets to choose from, ready for the search.

    Attributes:
        budgets: (D,) tokens, increasing.
        tails: (D,) cost of all runs over each budget.
        all_exact: cost of all runs, uncaptured.
    """

    def __init__(self, demand: Demand, budgets: NDArray[np.int64], model: CostModel) -> None:
        self.budgets = budgets
        self._demand = demand
        self._exact = np.array(
            [
                model.exact(tokens, attention)
                for tokens, attention in zip(
                    demand.tokens.tolist(), demand.attention.tolist(), strict=True
                )
            ]
        )
        self._replays = [model.linear(budget) for budget in budgets.tolist()]
        # Runs up to budget j are the first `ends[j + 1]`; `ends[0]` is none.
        self._ends = np.concatenate(
            ([0], np.searchsorted(demand.tokens, budgets, side="right"))
        ).astype(np.int64)
        exact_ms = np.concatenate(([0.0], np.cumsum(self._exact * demand.weight)))
        self.all_exact = float(exact_ms[-1])
        self.tails = exact_ms[-1] - exact_ms[self._ends[1:]]

    def between(self, j: int) -> NDArray[np.float64]:
        """(j + 1,): cost in bucket j of the runs over no budget, budget 0, ..., budget j - 1."""
        end = self._ends[j + 1]
        costs = np.minimum(self._replays[j] + self._demand.attention[:end], self._exact[:end])
        sums = np.concatenate(([0.0], np.cumsum(costs * self._demand.weight[:end])))
        return sums[-1] - sums[self._ends[: j + 1]]


def _search(
    runs: _Runs, limits: Limits, price: float, at_least: int
) -> tuple[float, Ladder | None, bool]:
    """The best ladder within the limits, at a price in milliseconds a byte.

    Returns:
        its cost without the price, its budgets, and whether the memory limit ruled out a better.
    """
    budgets, memory = runs.budgets, limits.memory
    count = len(budgets)
    graphs = min(limits.max_graphs, count)
    # Column 0 stands for no budget below; row k for k budgets.
    best = np.full((graphs + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    held = np.zeros_like(best)
    below = np.zeros(best.shape, dtype=np.int32)
    rows = np.arange(graphs)
    own_bytes = memory.own_token * budgets + memory.graph
    for j in range(count):
        costs = best[:-1, : j + 1] + runs.between(j)
        chosen = costs.argmin(axis=1)
        best[1:, j + 1] = costs[rows, chosen] + price * own_bytes[j]
        held[1:, j + 1] = held[rows, chosen] + own_bytes[j]
        below[1:, j + 1] = chosen
    totals = (best - price * held)[1:, 1:] + runs.tails
    totals[:, budgets < min(at_least, int(budgets[-1]))] = np.inf
    is_over = np.zeros_like(totals, dtype=bool)
    if limits.memory_bytes is not None:
        total_bytes = memory.weights + memory.largest_token * budgets + held[1:, 1:]
        is_over = total_bytes > limits.memory_bytes
    allowed = np.where(is_over, np.inf, totals)
    least = float(allowed.min())
    if not np.isfinite(least):
        return np.inf, None, True
    # The first in row order has the fewest graphs.
    k, j = divmod(int(np.argmax(allowed <= least * _SAME)), count)
    is_bound = bool((totals[is_over] < least).any())
    ladder = []
    j += 1
    for row in range(k + 1, 0, -1):
        ladder.append(int(budgets[j - 1]))
        j = int(below[row, j])
    return least, tuple(reversed(ladder)), is_bound


def _choices(
    demand: Demand, times: RouteTimes, model: CostModel, limit: int | None
) -> NDArray[np.int64]:
    sizes = np.unique(demand.tokens)
    if limit is not None and len(sizes) > limit:
        # Quantiles of the time: budgets stand close where much of it goes.
        linear = np.array([model.linear(tokens) for tokens in demand.tokens.tolist()])
        shares = np.cumsum(linear * demand.weight)
        marks = np.linspace(0, shares[-1], limit)
        sizes = np.unique(demand.tokens[np.searchsorted(shares, marks).clip(max=len(shares) - 1)])
    knots, linear_ms = np.array(times.budgets), np.array(times.linear_ms)
    ends_fall = knots[1:][linear_ms[1:] < linear_ms[:-1]]
    return np.union1d(sizes, ends_fall[ends_fall > sizes[0]]).astype(np.int64)
