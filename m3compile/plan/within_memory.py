"""The last step to the best ladder where a memory limit binds: all that a bound does not rule out.

A label is a way to serve the runs up to some budget: its cost, its bytes and its number of graphs.
Labels grow by a budget at a time. One is dropped if another reaches the same budget with no more of
any of the three, or if, at the price of a byte that bounds best, no way to complete it costs less
than the best ladder known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from m3compile.plan.runs import Ladder, Limits, Runs

# Labels that are grown before the search gives up and keeps the best ladder known.
_MAX_GROWN = 20_000
# Less of a gain is none.
_GAIN = 1e-12


class _Label(NamedTuple):
    cost: float
    own_bytes: int
    graphs: int
    ladder: tuple[int, ...]


def improve(
    cost: float, ladder: Ladder, runs: Runs, limits: Limits, price: float, at_least: int
) -> Ladder:
    """The best ladder within the limits, given one of a cost, and a price of a byte for the bound.

    Arguments otherwise as `best_ladder`.
    """
    assert limits.memory_bytes is not None
    count = len(runs.budgets)
    graphs = min(limits.max_graphs, count)
    # Row i + 1: cost of the runs between budgets i and j in bucket j; row 0 from the first run.
    costs = np.full((count + 1, count), np.inf)
    for j in range(count):
        costs[: j + 1, j] = runs.between(j)
    can_end = runs.budgets >= min(at_least, int(runs.budgets[-1]))
    to_go = _least_to_go(costs, runs, price, graphs, can_end)
    labels: list[list[_Label]] = [[] for _ in range(count)]
    grown = 0
    for i in range(-1, count):
        for label in _undominated(labels[i]) if i >= 0 else [_Label(0.0, 0, 0, ())]:
            if i >= 0 and can_end[i] and label.cost + runs.tails[i] < cost * (1 - _GAIN):
                cost, ladder = label.cost + float(runs.tails[i]), label.ladder
            if label.graphs == graphs:
                continue
            if grown == _MAX_GROWN:
                return ladder
            grown += 1
            new_costs = label.cost + costs[i + 1, i + 1 :]
            new_bytes = label.own_bytes + runs.own_bytes[i + 1 :]
            rest = to_go[graphs - label.graphs - 1, i + 1 :]
            floors = new_costs + price * (new_bytes - limits.memory_bytes) + rest
            fits = new_bytes + runs.shared_bytes[i + 1 :] <= limits.memory_bytes
            for step in np.flatnonzero(fits & (floors < cost * (1 - _GAIN))):
                labels[i + 1 + step].append(
                    _Label(
                        float(new_costs[step]),
                        int(new_bytes[step]),
                        label.graphs + 1,
                        (*label.ladder, int(runs.budgets[i + 1 + step])),
                    )
                )
    return ladder


def _least_to_go(
    costs: NDArray[np.float64],
    runs: Runs,
    price: float,
    graphs: int,
    can_end: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """(graphs, D): from each budget on, with at most so many more, cost and priced bytes."""
    count = len(runs.budgets)
    end = np.where(can_end, runs.tails + price * runs.shared_bytes, np.inf)
    to_go = np.tile(end, (graphs, 1))
    for i in range(count - 2, -1, -1):
        steps = costs[i + 1, i + 1 :] + price * runs.own_bytes[i + 1 :]
        further = (to_go[:-1, i + 1 :] + steps).min(axis=1)
        to_go[1:, i] = np.minimum(to_go[1:, i], further)
    return to_go


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels):
        if not any(
            other.own_bytes <= label.own_bytes and other.graphs <= label.graphs for other in kept
        ):
            kept.append(label)
    return kept
