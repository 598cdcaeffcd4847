"""What a running encoder served, and how far its ladder is from the best one for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m3compile.buckets import RouteTimes, Run
from m3compile.buckets.times import CostModel
from m3compile.plan.memory import memory_model
from m3compile.plan.optimum import best_ladder
from m3compile.plan.runs import Limits
from m3compile.plan.times import h200_times
from m3compile.plan.workload import Demand, demand_of

# Budgets that the best ladder is chosen from, at most.
_MAX_CHOICES = 128

# By tokens of a run: how many there were, and the sum of their segments' squared tokens.
Counts = dict[int, tuple[int, float]]


class ServedRuns:
    """Counts runs by tokens: one entry a size, so no more than the tokens of one run.

    Not for several threads at once: the encoder calls it under its lock.
    """

    def __init__(self) -> None:
        self._counts: Counts = {}

    def add(self, runs: Sequence[Run]) -> None:
        """Count the runs of one call."""
        for run in runs:
            # The segments of a piece are frames of one item: equal, but for its last.
            squares = sum(piece.tokens * piece.tokens / piece.num_segments for piece in run.pieces)
            number, total = self._counts.get(run.tokens, (0, 0.0))
            self._counts[run.tokens] = (number + 1, total + squares)

    def counts(self) -> Counts:
        """A copy."""
        return dict(self._counts)


class LadderGauge:
    """Compares a ladder with the best one of as many graphs, for the runs that were served.

    The runs are taken as they were packed. Times are those of the artifact, or else the cost model
    of an H200.
    """

    def __init__(self, ladder: Sequence[int], times: RouteTimes | None) -> None:
        self._ladder = tuple(ladder)
        self._source = "H200 cost model" if times is None else "measured"
        self._times = times or h200_times()
        self._model = CostModel(ladder, self._times)
        self._last: tuple[Counts, dict[str, Any]] = ({}, self._compare({}))

    def report(self, counts: Counts) -> dict[str, Any]:
        """How far the ladder is from the best.

        Returns:
            runs; ms_per_run and best_ms_per_run, predicted for this ladder and for the best one;
            over_best, by which fraction this one is slower; best_budgets; and times, where the
            predictions come from.
        """
        seen, report = self._last
        if counts != seen:
            # One assignment: several threads may ask.
            report = self._compare(counts)
            self._last = counts, report
        return dict(report)

    def _compare(self, counts: Counts) -> dict[str, Any]:
        runs = sum(number for number, _ in counts.values())
        ms = best_ms = 0.0
        best = self._ladder
        if runs:
            demand = self._demand(counts)
            ms = best_ms = _cost(demand, self._model)
            limits = Limits(len(self._ladder), memory_model())
            found = best_ladder(demand, self._times, limits, max_choices=_MAX_CHOICES)
            assert found is not None
            found_ms = _cost(demand, CostModel(found, self._times))
            if found_ms < ms:
                best, best_ms = found, found_ms
        return {
            "runs": runs,
            "ms_per_run": ms / max(1, runs),
            "best_ms_per_run": best_ms / max(1, runs),
            "over_best": ms / best_ms - 1 if runs else 0.0,
            "best_budgets": list(best),
            "times": self._source,
        }

    def _demand(self, counts: Counts) -> Demand:
        runs = {}
        for tokens, (number, squares) in counts.items():
            # As if all segments of these runs had one size.
            segment = squares / number / tokens
            attention = tokens / segment * self._model.attention(round(segment))
            runs[tokens, attention] = float(number)
        return demand_of(runs)


def _cost(demand: Demand, model: CostModel) -> float:
    return sum(
        number * model.price(tokens, attention)[0]
        for tokens, attention, number in zip(
            demand.tokens.tolist(), demand.attention.tolist(), demand.weight.tolist(), strict=True
        )
    )
