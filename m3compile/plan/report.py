"""A plan with its reasons: what it costs beside other ladders, and the traffic it was made for."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import msgspec
import numpy as np

from m3compile.buckets import RouteTimes, default_ladder
from m3compile.plan.runs import Ladder, Limits
from m3compile.plan.search import make_plan, reference_ladder
from m3compile.plan.simulate import Simulation, ideal_ms, one_bucket_padding, simulate
from m3compile.plan.workload import Workload, workload_of
from m3compile.traffic import Traffic
from m3compile.version import VERSION

POWERS_OF_TWO = (64, 128, 256, 512, 1024, 2048, 4096)
# Of the histogram: two bins to every doubling.
_BINS_PER_OCTAVE = 2


class TrafficSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan was made from.

    Attributes:
        name: the trace.
        calls, items, tokens: in all; calls without an item are left out.
        largest_call: its tokens.
        packed_calls: of several segments, so that the packer decides what they cost.
        simulated_calls: the different ones of them that were simulated; a sample where there are
            more than the planner takes.
        skipped: what was wrong with the lines left out.
    """

    name: str
    calls: int
    items: int
    tokens: int
    largest_call: int
    packed_calls: int
    simulated_calls: int
    skipped: tuple[str, ...]


class LadderReport(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic on one ladder.

    Attributes:
        budgets: in tokens.
        ms_per_call: expected time, calls one after the other.
        over_ideal: how much more that is than the ideal, as a fraction of it.
        padding: padded over real tokens of what runs in graphs.
        one_bucket_padding: what `padding` were if every call took the next larger bucket, whole.
        replays, exact_runs: per 100 calls.
        memory_bytes: predicted, see `memory`.
    """

    name: str
    budgets: tuple[int, ...]
    ms_per_call: float
    over_ideal: float
    padding: float
    one_bucket_padding: float
    replays: float
    exact_runs: float
    memory_bytes: int


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of `first` to `last` tokens, and the plan's budgets among those numbers."""

    first: int
    last: int
    calls: int
    budgets: tuple[int, ...]


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """A plan.

    Attributes:
        budgets, max_items: what to build.
        exact_above: runs of more tokens go at their exact shape.
        times: where the times came from.
        memory_limit: in bytes; None for none.
        exact_run_bytes: predicted for the largest exact run of the traffic, beside the ladder's
            memory and only while it runs; 0 where there is none.
        ideal_ms_per_call: every call in a graph of its exact size.
        ladders: the plan first, then what it is compared with.
        created: UTC, ISO 8601.
    """

    budgets: tuple[int, ...]
    max_items: int
    exact_above: int
    traffic: TrafficSummary
    times: str
    max_graphs: int
    memory_limit: int | None
    exact_run_bytes: int
    ideal_ms_per_call: float
    ladders: tuple[LadderReport, ...]
    histogram: tuple[Bin, ...]
    m3compile: str
    created: str


def plan_traffic(
    traffic: Traffic,
    times: RouteTimes,
    limits: Limits,
    *,
    max_frames: int,
    name: str,
    times_source: str,
) -> PlanReport:
    """Make a plan, and compare it with the default ladder, powers of two and the ideal.

    Args:
        max_frames: frames of a segment, of the tower.
        name, times_source: of the trace and the times, for the report.

    Raises:
        RequestError: there is no call with an item, or no ladder keeps to the limits.
    """
    workload = workload_of(traffic.calls, max_frames)
    plan = make_plan(workload, times, limits)
    ideal = ideal_ms(workload, times)

    def row(title: str, simulation: Simulation) -> LadderReport:
        ladder, per_call = simulation.ladder, 1 / workload.num_calls
        return LadderReport(
            name=title,
            budgets=ladder,
            ms_per_call=simulation.cost_ms * per_call,
            over_ideal=simulation.cost_ms / ideal - 1,
            padding=simulation.padding,
            one_bucket_padding=one_bucket_padding(workload, ladder),
            replays=100 * simulation.replays * per_call,
            exact_runs=100 * simulation.exact_runs * per_call,
            memory_bytes=limits.memory.total(ladder),
        )

    rows = [row("plan", plan.simulation)]
    rows += [
        row(title, simulate(workload, ladder, times)) for title, ladder in _others(limits).items()
    ]
    largest_exact = plan.simulation.largest_exact
    return PlanReport(
        budgets=plan.ladder,
        max_items=plan.max_items,
        exact_above=plan.ladder[-1],
        traffic=TrafficSummary(
            name=name,
            calls=workload.num_calls,
            items=workload.num_items,
            tokens=int(workload.call_tokens.sum()),
            largest_call=int(workload.call_tokens.max()),
            packed_calls=workload.num_packed,
            simulated_calls=len(workload.packed),
            skipped=traffic.skipped,
        ),
        times=times_source,
        max_graphs=limits.max_graphs,
        memory_limit=limits.memory_bytes,
        exact_run_bytes=limits.memory.exact_run(largest_exact),
        ideal_ms_per_call=ideal / workload.num_calls,
        ladders=tuple(rows),
        histogram=_histogram(workload, plan.ladder),
        m3compile=VERSION,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _others(limits: Limits) -> dict[str, Ladder]:
    others = {"default ladder": default_ladder()}
    within = reference_ladder(limits)
    if within is not None and within != default_ladder():
        others[f"default ladder to {within[-1]}"] = within
    return {**others, "powers of two": POWERS_OF_TWO}


def _histogram(workload: Workload, ladder: Sequence[int]) -> tuple[Bin, ...]:
    """Bins of equal width on a logarithmic axis, over the calls and the budgets."""
    lowest = min(int(workload.call_tokens.min()), ladder[0])
    highest = max(int(workload.call_tokens.max()), ladder[-1])
    steps = np.arange(
        np.floor(_BINS_PER_OCTAVE * np.log2(lowest)),
        np.ceil(_BINS_PER_OCTAVE * np.log2(highest + 1)) + 1,
    )
    edges = np.unique(np.ceil(2 ** (steps / _BINS_PER_OCTAVE)).astype(np.int64))
    counts, _ = np.histogram(workload.call_tokens, edges)
    return tuple(
        Bin(
            first=int(first),
            last=int(last) - 1,
            calls=int(count),
            budgets=tuple(budget for budget in ladder if first <= budget < last),
        )
        for first, last, count in zip(edges[:-1], edges[1:], counts, strict=True)
    )
