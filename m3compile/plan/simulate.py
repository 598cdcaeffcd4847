"""What traffic costs on a ladder: the loader's own planner, run over the calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m3compile.buckets import Planner, RouteTimes
from m3compile.buckets.times import CostModel
from m3compile.config.build import MAX_ITEMS, MAX_TOKENS
from m3compile.plan.workload import Demand, Workload, demand_of, segments


@dataclass(frozen=True)
class Simulation:
    """A workload served by a ladder. Counts are fractional where a sample stands for all.

    Attributes:
        ladder: budgets in tokens.
        cost_ms: expected time of all calls, one after the other.
        replays, exact_runs: runs in a graph and at the exact shape.
        graph_tokens, padded_tokens: real ones and padding of the runs in graphs.
        most_segments: of any run.
        largest_exact: tokens of the largest exact run; 0 where there is none.
        demand: the runs.
    """

    ladder: tuple[int, ...]
    cost_ms: float
    replays: float
    exact_runs: float
    graph_tokens: float
    padded_tokens: float
    most_segments: int
    largest_exact: int
    demand: Demand

    @property
    def padding(self) -> float:
        """Padded over real tokens of what runs in graphs."""
        return self.padded_tokens / self.graph_tokens if self.graph_tokens else 0.0


def size_model(times: RouteTimes) -> CostModel:
    """Costs that do not depend on a ladder: `linear`, `attention` and `exact` of any size."""
    return CostModel((MAX_TOKENS,), times)


def simulate(workload: Workload, ladder: Sequence[int], times: RouteTimes) -> Simulation:
    """Serve a workload. The number of segments in a run is bounded by nothing but its tokens."""
    planner = Planner(ladder, MAX_ITEMS, times)
    model = CostModel(ladder, times)
    served = _Served()
    for tokens, number in workload.single.items():
        attention = model.attention(tokens)
        cost_ms, budget = model.price(tokens, attention)
        served.add(tokens, attention, budget, cost_ms, number)
    most_segments = 1
    for items, weight in workload.packed:
        for run in planner.plan(items):
            attention = sum(piece.attention for piece in run.pieces)
            cost_ms = model.cost(run.budget, run.tokens, attention)
            served.add(run.tokens, attention, run.budget, cost_ms, weight)
            most_segments = max(most_segments, sum(piece.num_segments for piece in run.pieces))
    return Simulation(
        ladder=tuple(ladder),
        cost_ms=served.cost_ms,
        replays=served.replays,
        exact_runs=served.exact_runs,
        graph_tokens=served.graph_tokens,
        padded_tokens=served.padded_tokens,
        most_segments=most_segments,
        largest_exact=served.largest_exact,
        demand=demand_of(served.runs),
    )


class _Served:
    """Sums over runs."""

    def __init__(self) -> None:
        self.runs: defaultdict[tuple[int, float], float] = defaultdict(float)
        self.cost_ms = self.replays = self.exact_runs = 0.0
        self.graph_tokens = self.padded_tokens = 0.0
        self.largest_exact = 0

    def add(
        self, tokens: int, attention: float, budget: int | None, cost_ms: float, weight: float
    ) -> None:
        self.runs[tokens, attention] += weight
        self.cost_ms += weight * cost_ms
        if budget is None:
            self.exact_runs += weight
            self.largest_exact = max(self.largest_exact, tokens)
        else:
            self.replays += weight
            self.graph_tokens += weight * tokens
            self.padded_tokens += weight * (budget - tokens)


def ideal_ms(workload: Workload, times: RouteTimes) -> float:
    """Every call in one graph of its exact size: no padding, and no launches."""
    model = size_model(times)
    single = sum(
        number * (model.linear(tokens) + model.attention(tokens))
        for tokens, number in workload.single.items()
    )
    return single + sum(
        weight * (model.linear(sum(segments(items))) + sum(map(model.attention, segments(items))))
        for items, weight in workload.packed
    )


def one_bucket_padding(workload: Workload, ladder: Sequence[int]) -> float:
    """Padded over real tokens if every call took the next larger bucket, and none was split.

    Calls over the largest bucket are left out.
    """
    tokens = workload.call_tokens[workload.call_tokens <= ladder[-1]]
    budgets = np.asarray(ladder)[np.searchsorted(ladder, tokens)]
    return float(budgets.sum() / tokens.sum() - 1) if len(tokens) else 0.0
