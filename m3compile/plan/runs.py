"""Runs of given sizes, the budgets they may go to, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from m3compile.buckets import RouteTimes
from m3compile.buckets.times import CostModel
from m3compile.plan.memory import MemoryModel
from m3compile.plan.simulate import size_model
from m3compile.plan.workload import Demand

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


class Runs:
    """A demand and the budgets to choose from, ready for a search.

    Attributes:
        budgets: (D,) tokens, increasing.
        tails: (D,) cost of all runs over each budget.
        all_exact: cost of all runs, uncaptured.
        own_bytes: (D,) of each budget's graph, whatever the others are.
        shared_bytes: (D,) of everything else, if each budget is the largest.
        is_rising: whether no larger bucket takes less time.
    """

    def __init__(
        self, demand: Demand, times: RouteTimes, memory: MemoryModel, max_choices: int | None
    ) -> None:
        model = size_model(times)
        self.budgets = _choices(demand, times, model, max_choices)
        self.own_bytes = memory.own_token * self.budgets + memory.graph
        self.shared_bytes = memory.weights + memory.largest_token * self.budgets
        self._demand = demand
        self._exact = np.array(
            [
                model.exact(tokens, attention)
                for tokens, attention in zip(
                    demand.tokens.tolist(), demand.attention.tolist(), strict=True
                )
            ]
        )
        self._replays = [model.linear(budget) for budget in self.budgets.tolist()]
        self.is_rising = all(low <= high for low, high in pairwise(self._replays))
        # Runs up to budget j are the first `ends[j + 1]`; `ends[0]` is none.
        self._ends = np.concatenate(
            ([0], np.searchsorted(demand.tokens, self.budgets, side="right"))
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
