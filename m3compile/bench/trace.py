"""A trace of calls through a runner: one call at a time, and back to back."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from m3compile.bench.clock import Clock, percentile
from m3compile.bench.judge import Judge, merge
from m3compile.bench.records import Check, TrafficRun
from m3compile.bench.runners import Runner
from m3compile.traffic import Call

Batch = tuple[Tensor, list[tuple[int, int, int]]]

_WARM_UP_CALLS = 10
_CHECKED_CALLS = 8


def count_tokens(calls: Sequence[Call]) -> int:
    """Output tokens of all items of some calls."""
    return sum(math.prod(grid) // 4 for call in calls for grid in call)


def run_trace(
    runner: Runner,
    calls: Sequence[Call],
    pixel_values: Tensor,
    clock: Clock,
    judge: Judge,
    on_pass: Callable[[int], None],
) -> tuple[TrafficRun, Check]:
    """Time a trace and check some of its results.

    Args:
        calls: the items' grids of every call.
        pixel_values: at least as many random rows as the largest call needs; every call takes its
            rows from the start.
        on_pass: told how many passes are done.

    Returns:
        The record, and how the checked calls' results compare with eager float32.
    """
    batches: list[Batch] = [
        (pixel_values[: sum(math.prod(grid) for grid in call)], list(call)) for call in calls
    ]
    for pixels, grids in batches[:_WARM_UP_CALLS]:
        runner.encode(pixels, grids)
    before = runner.padding()
    latencies: list[list[float]] = []
    back_to_back: list[float] = []
    for done in range(1, clock.effort.passes + 1):
        latencies.append([_call_ms(runner, batch, clock) for batch in batches])
        back_to_back.append(_back_to_back(runner, batches, clock))
        on_pass(done)
    real, padded = (now - then for now, then in zip(runner.padding(), before, strict=True))
    checked = [batch for batch in batches if batch[1]]
    checked = checked[:: math.ceil(len(checked) / _CHECKED_CALLS)]
    check = merge([
        judge.check(runner.encode(pixels, grids), judge.expect(pixels, grids))
        for pixels, grids in checked
    ])  # fmt: skip
    run = _record(runner.name, calls, latencies, back_to_back, padded / (real + padded))
    return msgspec.structs.replace(run, checked_calls=len(checked), error=check.error), check


def _record(
    name: str,
    calls: Sequence[Call],
    latencies: Sequence[Sequence[float]],
    back_to_back: Sequence[float],
    padded_share: float,
) -> TrafficRun:
    """Rates and percentiles, from milliseconds of every call and seconds of every pass."""
    num_calls, tokens = len(calls), count_tokens(calls)
    seconds = [sum(one_pass) / 1000 for one_pass in latencies]
    median, median_back_to_back = statistics.median(seconds), statistics.median(back_to_back)
    all_ms = [ms for one_pass in latencies for ms in one_pass]
    return TrafficRun(
        name=name,
        passes=len(latencies),
        calls_per_s=num_calls / median,
        tokens_per_s=tokens / median,
        slowest_calls_per_s=num_calls / max(seconds),
        fastest_calls_per_s=num_calls / min(seconds),
        p50_ms=round(percentile(all_ms, 50), 4),
        p90_ms=round(percentile(all_ms, 90), 4),
        p99_ms=round(percentile(all_ms, 99), 4),
        back_to_back_calls_per_s=num_calls / median_back_to_back,
        back_to_back_tokens_per_s=tokens / median_back_to_back,
        padded_share=padded_share,
        checked_calls=0,
        error=None,
    )


def _call_ms(runner: Runner, batch: Batch, clock: Clock) -> float:
    return clock.wall_ms(lambda: runner.encode(*batch))


def _back_to_back(runner: Runner, batches: Sequence[Batch], clock: Clock) -> float:
    """Seconds for the trace with one synchronisation, at its end."""
    clock.synchronize()
    started = time.perf_counter()
    for pixels, grids in batches:
        runner.encode(pixels, grids)
    clock.synchronize()
    return time.perf_counter() - started
