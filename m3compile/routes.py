"""Measuring the routes of an encoder: what a replay costs at every budget, and what going
uncaptured would."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from m3compile.buckets import RouteTimes
from m3compile.runtime import Encoder

Segment = tuple[int, int, int]

# Per budget and route; fewer runs where one takes long, since their spread is small there.
_MOST_REPEATS, _FEWEST_REPEATS = 9, 3
_BUSY_MS = 60.0

# An uncaptured run that takes this much longer than a replay waits for its launches.
_LAUNCH_BOUND = 1.2
_LAUNCH_SPREAD = 2.0


def measure_routes(
    encoder: Encoder, on_budget: Callable[[int, int], None] | None = None
) -> RouteTimes:
    """Time every bucket of a captured encoder, on random pixels; nobody else should use the GPU.

    What is not attention is found from two replays on real rows, of one segment and of four: rows
    of padding would do the same work on zeros, which runs faster. Launching uncaptured kernels
    takes twice as long in one process as in another on the same machine, so a size that launching
    may bind is given the longest launching that was seen, twice over.

    Args:
        on_budget: told how many budgets are done, and of how many.
    """
    assert encoder.device.type == "cuda"
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(
        4 * encoder.ladder[-1], encoder.manifest.tower.patch_dim, generator=generator
    ).to(encoder.device, encoder.dtype)
    linear, full, exact = [], [], []
    for done, budget in enumerate(encoder.ladder, 1):
        rows = pixels[: 4 * budget]
        one_ms = _median_ms(encoder, budget, _equal_segments(budget, 1), rows)
        four_ms = _median_ms(encoder, budget, _equal_segments(budget, 4), rows)
        # Attention of four is a quarter of that of one.
        linear.append(max(one_ms / 4, min(one_ms, (4 * four_ms - one_ms) / 3)))
        full.append(one_ms)
        exact.append(_median_ms(encoder, None, _equal_segments(budget, 1), rows))
        if on_budget is not None:
            on_budget(done, len(encoder.ladder))
    return RouteTimes(
        budgets=encoder.ladder,
        linear_ms=tuple(linear),
        full_ms=tuple(full),
        exact_ms=tuple(_cautious(exact, full)),
    )


def _cautious(exact_ms: list[float], replay_ms: list[float]) -> list[float]:
    pairs = list(zip(exact_ms, replay_ms, strict=True))
    launching = [exact for exact, replay in pairs if exact > _LAUNCH_BOUND * replay]
    floor = _LAUNCH_SPREAD * max(launching, default=min(exact_ms))
    return [max(exact, floor) for exact in exact_ms]


def _median_ms(
    encoder: Encoder, budget: int | None, segments: list[Segment], rows: torch.Tensor
) -> float:
    run = encoder.prepare_run(budget, segments, rows)
    # The first run is slower; it says how many there is time for.
    _run_ms(run)
    repeats = min(_MOST_REPEATS, max(_FEWEST_REPEATS, round(_BUSY_MS / _run_ms(run))))
    return median(_run_ms(run) for _ in range(repeats))


def _run_ms(run: Callable[[], object]) -> float:
    """The device's time between two events, launching included where nothing is captured."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def _equal_segments(tokens: int, most: int) -> list[Segment]:
    """At most `most` flat segments, equal but for one token, of `tokens` in all."""
    count = min(tokens, most)
    size, longer = divmod(tokens, count)
    return [(1, 2, 2 * (size + (index < longer))) for index in range(count)]
