"""The cheapest budgets for runs of given sizes, by dynamic programming.

The runs are fixed here: each goes to the smallest budget that holds it or, where that is said to
cost less, runs at its exact shape. A budget between two sizes is no better than the smaller one,
unless measured times fall on the way up, and then the point where they end to fall is best: so the
sizes and those points are all the budgets there are to choose from. With `best[k, j]`, the least
cost of the runs up to budget j with k budgets of which j is the largest,

    best[k, j] = min over i < j of best[k - 1, i] + (cost of the runs between i and j in bucket j)

and whatever is over the largest budget runs at its exact shape.

Memory that goes by the largest budget and by the number of graphs is known of every `best[k, j]`.
What goes by the sum of the budgets is not: where the limit rules a better ladder out, it gets a
price, which also bounds how good a ladder can be, and `within_memory` searches what that leaves.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from m3compile.buckets import RouteTimes
from m3compile.plan.runs import Ladder, Limits, Runs
from m3compile.plan.within_memory import improve
from m3compile.plan.workload import Demand

# Where a memory limit binds: budgets to choose from, and fewer for a search that is thinned out.
_CHOICES_PRICED = 512
_CHOICES_PRICED_THIN = 128
# Prices of a byte that are tried, each half of the one before, and then between the best of them.
_NUM_PRICES = 20
_NUM_REFINED = 8
# From so many budgets to choose from on, finding out where to look costs less than it saves.
_MANY_CHOICES = 1024
# Costs this near to each other are the same: the ladder of fewer graphs is taken.
_SAME = 1 + 1e-12


def best_ladder(
    demand: Demand,
    times: RouteTimes,
    limits: Limits,
    *,
    max_choices: int | None = None,
    at_least: int = 0,
) -> Ladder | None:
    """The budgets of least cost, increasing; None if the memory does not hold even one.

    Exact, but for `max_choices`, which thins out the budgets to choose from. A memory limit that
    binds thins them out too, to hundreds; the search there gives up after a number of steps, and
    does not look for a budget inside a stretch where measured times fall.

    Args:
        at_least: tokens that the largest budget has, as far as there are such runs.
    """
    runs = Runs(demand, times, limits.memory, max_choices)
    found = _search(runs, limits, 0.0, at_least)
    if not found.is_bound:
        return found.ladder
    choices = _CHOICES_PRICED if max_choices is None else _CHOICES_PRICED_THIN
    runs = Runs(demand, times, limits.memory, choices)
    found = min(found, _search(runs, limits, 0.0, at_least))
    if found.ladder is None:
        return None
    price = runs.all_exact / int(runs.shared_bytes[0] + runs.own_bytes[0])
    priced = [
        (price / 2**step, _search(runs, limits, price / 2**step, at_least))
        for step in range(_NUM_PRICES)
    ]
    if max_choices is None:
        _refine(priced, runs, limits, at_least)
    found = min(found, *(search for _, search in priced))
    price, tightest = max(priced, key=lambda pair: pair[1].floor)
    assert found.ladder is not None
    if max_choices is not None or tightest.floor * _SAME >= found.cost:
        return found.ladder
    return improve(found.cost, found.ladder, runs, limits, price, at_least)


class _Found(NamedTuple):
    """The best ladder within the limits, at some price of a byte.

    Attributes:
        cost: without the price.
        ladder: None if nothing keeps to the limits.
        floor: no ladder within the limits costs less.
        is_bound: whether the memory limit ruled out a better one.
    """

    cost: float
    ladder: Ladder | None
    floor: float
    is_bound: bool


def _search(runs: Runs, limits: Limits, price: float, at_least: int) -> _Found:
    budgets, count = runs.budgets, len(runs.budgets)
    graphs = min(limits.max_graphs, count)
    # Column 0 stands for no budget below; row k for k budgets.
    best = np.full((graphs + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    held = np.zeros_like(best)
    below = np.zeros(best.shape, dtype=np.int32)
    all_rows = np.arange(graphs)
    groups = _row_groups(graphs, runs)
    for j in range(count):
        between = runs.between(j)
        for rows in groups:
            first = int(below[rows.start + 1 : rows.stop + 1, j].min()) if len(groups) > 1 else 0
            costs = best[rows, first : j + 1] + between[first:]
            below[rows.start + 1 : rows.stop + 1, j + 1] = costs.argmin(axis=1) + first
            best[rows.start + 1 : rows.stop + 1, j + 1] = costs.min(axis=1)
        best[1:, j + 1] += price * runs.own_bytes[j]
        if limits.memory_bytes is not None:
            held[1:, j + 1] = held[all_rows, below[1:, j + 1]] + runs.own_bytes[j]
    held_bytes = held[1:, 1:] + runs.shared_bytes
    totals = best[1:, 1:] - price * held[1:, 1:] + runs.tails
    totals[:, budgets < min(at_least, int(budgets[-1]))] = np.inf
    floor, is_over = -np.inf, np.zeros_like(totals, dtype=bool)
    if limits.memory_bytes is not None:
        is_over = held_bytes > limits.memory_bytes
        floor = float((totals + price * (held_bytes - limits.memory_bytes)).min())
    allowed = np.where(is_over, np.inf, totals)
    least = float(allowed.min())
    if not np.isfinite(least):
        return _Found(np.inf, None, floor, True)
    # The first in row order has the fewest graphs.
    k, j = divmod(int(np.argmax(allowed <= least * _SAME)), count)
    ladder = []
    j += 1
    for row in range(k + 1, 0, -1):
        ladder.append(int(budgets[j - 1]))
        j = int(below[row, j])
    return _Found(least, tuple(reversed(ladder)), floor, bool((totals[is_over] < least).any()))


def _row_groups(graphs: int, runs: Runs) -> list[slice]:
    """Rows k to go through together.

    Where no larger bucket takes less time, the best budget below never falls from one j to the
    next. It lies the higher the more graphs there are, so a few groups of rows, each begun at the
    lowest place that one of its rows may still have, save most of the work.
    """
    if len(runs.budgets) < _MANY_CHOICES or not runs.is_rising:
        return [slice(0, graphs)]
    ends = [1]
    while ends[-1] < graphs:
        ends.append(min(2 * ends[-1], graphs))
    return [slice(low, high) for low, high in pairwise([0, *ends])]


def _refine(priced: list[tuple[float, _Found]], runs: Runs, limits: Limits, at_least: int) -> None:
    """Add prices around the one with the highest floor, which is concave in the price."""
    for _ in range(_NUM_REFINED):
        priced.sort(key=lambda pair: pair[0])
        top = max(range(len(priced)), key=lambda index: priced[index][1].floor)
        for low, high in ((top - 1, top), (top, top + 1)):
            if low >= 0 and high < len(priced):
                middle = (priced[low][0] * priced[high][0]) ** 0.5
                priced.append((middle, _search(runs, limits, middle, at_least)))
