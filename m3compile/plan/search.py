"""From a workload to a plan.

Where every call is one run the dynamic program alone gives the best ladder. A call of several
segments may be split, and how depends on the ladder: there, the packer and the dynamic program take
turns, each given what the other made, from a few starts, and the best ladder seen is the plan. The
default ladder, as far as the limits let it go, is one of those seen: no plan is worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from m3compile.buckets import Planner, RouteTimes, default_ladder
from m3compile.config import BuildConfig
from m3compile.config.build import MAX_ITEMS, MAX_TOKENS
from m3compile.errors import RequestError
from m3compile.plan.optimum import best_ladder
from m3compile.plan.runs import Ladder, Limits
from m3compile.plan.simulate import Simulation, simulate
from m3compile.plan.workload import Demand, Workload, demand_of, segments

_MAX_TURNS = 6
# Budgets to choose from while taking turns; the last turn has all.
_CHOICES = 512
# Of the calls of several segments, by tokens: the largest budget of a start.
_START_QUANTILES = (0.5, 0.8, 0.95, 1.0)
# A turn that gains less than this ends them.
_GAIN = 1e-5


@dataclass(frozen=True)
class Plan:
    """What to build.

    Attributes:
        simulation: of the workload on the plan's ladder.
        max_items: most segments in one run.
    """

    simulation: Simulation
    max_items: int

    @property
    def ladder(self) -> Ladder:
        return self.simulation.ladder


def make_plan(workload: Workload, times: RouteTimes, limits: Limits) -> Plan:
    """The budgets of least expected time within the limits.

    Raises:
        RequestError: there is no traffic, or no ladder keeps to the limits.
    """
    if workload.num_calls == 0:
        raise RequestError("the traffic has no call with an item; there is nothing to plan for")
    seen: dict[Ladder, Simulation] = {}

    def look_at(ladder: Ladder) -> Simulation:
        if ladder not in seen:
            seen[ladder] = simulate(workload, ladder, times)
        return seen[ladder]

    def improve(demand: Demand, max_choices: int | None, at_least: int) -> Simulation | None:
        ladder = best_ladder(demand, times, limits, max_choices=max_choices, at_least=at_least)
        return None if ladder is None else look_at(ladder)

    reference = reference_ladder(limits)
    if reference is not None:
        look_at(reference)
    whole = _whole_calls(workload, times)
    if workload.packed:
        for at_least in _starts(workload):
            _take_turns(whole, at_least, improve)
    if seen and workload.packed:
        best = min(seen.values(), key=_cost)
        improve(best.demand, None, best.ladder[-1])
    else:
        improve(whole, None, 0)
    if not seen:
        raise _no_room(whole, limits)
    best = min(seen.values(), key=_cost)
    return Plan(best, _max_items(best.most_segments))


def _starts(workload: Workload) -> list[int]:
    """Largest budgets to start from.

    Items share an exact-shape run only up to the tokens of the largest budget, which the dynamic
    program does not see: it takes a run that is there to be possible at its exact shape.
    """
    totals = [sum(segments(items)) for items, _ in workload.packed]
    marks = np.quantile(totals, _START_QUANTILES, method="higher")
    return sorted({0, *(min(int(mark), MAX_TOKENS) for mark in marks)})


def reference_ladder(limits: Limits) -> Ladder | None:
    """The default ladder up to the largest of its budgets that the limits permit."""
    for largest in reversed(default_ladder()):
        ladder = default_ladder(largest)
        if limits.allow(ladder):
            return ladder
    return None


def _take_turns(
    demand: Demand,
    at_least: int,
    improve: Callable[[Demand, int | None, int], Simulation | None],
) -> None:
    last = float("inf")
    for _ in range(_MAX_TURNS):
        simulation = improve(demand, _CHOICES, at_least)
        if simulation is None or simulation.cost_ms > last * (1 - _GAIN):
            return
        last, demand = simulation.cost_ms, simulation.demand


def _whole_calls(workload: Workload, times: RouteTimes) -> Demand:
    """Every call as one run, or as few as it takes."""
    planner = Planner((MAX_TOKENS,), MAX_ITEMS, times)
    runs: defaultdict[tuple[int, float], float] = defaultdict(float)
    for items, weight in [
        *((((tokens,),), number) for tokens, number in workload.single.items()),
        *workload.packed,
    ]:
        for run in planner.plan(items):
            runs[run.tokens, sum(piece.attention for piece in run.pieces)] += weight
    return demand_of(runs)


def _cost(simulation: Simulation) -> tuple[float, int]:
    return simulation.cost_ms, len(simulation.ladder)


def _max_items(most_segments: int) -> int:
    """Room for the traffic's fullest run, and no less than the default: unused slots are free."""
    return min(MAX_ITEMS, max(BuildConfig().max_items, 1 << (most_segments - 1).bit_length()))


def _no_room(demand: Demand, limits: Limits) -> RequestError:
    smallest = int(demand.tokens[0])
    assert limits.memory_bytes is not None
    return RequestError(
        f"the memory limit is {limits.memory_bytes / 1e9:.2f} GB; one graph of {smallest} tokens "
        f"takes {limits.memory.total((smallest,)) / 1e9:.2f} GB with the weights"
    )
