"""Measuring time: on the device between events, or the wall clock around a synchronised call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from m3compile.bench.cases import Effort
from m3compile.bench.records import Timing

Work = Callable[[], object]


def timing_of(samples_ms: Sequence[float]) -> Timing:
    """Median and spread of some samples."""
    return Timing(
        median_ms=round(statistics.median(samples_ms), 4),
        p10_ms=round(percentile(samples_ms, 10), 4),
        p90_ms=round(percentile(samples_ms, 90), 4),
        samples=len(samples_ms),
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` percent of them do not exceed."""
    ordered = sorted(samples)
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]


def finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


class Clock:
    """Times work on one device.

    Args:
        device: where the work runs; on CUDA the work must be on the current stream.
        effort: how often something is repeated.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort
        self.is_cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def wall_ms(self, work: Work) -> float:
        """Wall clock of one call, from an idle device until it is idle again."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return 1000 * (time.perf_counter() - started)

    def end_to_end(self, work: Work) -> Timing:
        """Wall clock of repeated calls, after warming up."""
        return self._repeat(work, self.wall_ms)

    def on_device(self, work: Work) -> Timing:
        """Device time of repeated calls, after warming up; on a CPU their wall clock.

        Every timed call follows another one at once, so that launching a graph hides behind it.
        Work of many small kernels is as slow as the host launches them, and that is counted.
        """
        return self._repeat(work, self._device_ms if self.is_cuda else self.wall_ms)

    def _repeat(self, work: Work, measure: Callable[[Work], float]) -> Timing:
        work()
        estimate = self.wall_ms(work)
        samples = [measure(work) for _ in range(self.effort.repetitions(estimate))]
        return timing_of(samples)

    def _device_ms(self, work: Work) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        start.record()
        work()
        end.record()
        end.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed
