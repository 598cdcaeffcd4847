"""Traffic in the form that planning needs: counted sizes, and calls to simulate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from m3compile.buckets import segments_of
from m3compile.traffic import Call

# Calls of several segments that are simulated per ladder, at most; 100 to 200 microseconds each.
MAX_SIMULATED = 2000

# Per item the tokens of its segments.
Items = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Demand:
    """Runs to be served, counted; parallel arrays of length n, by increasing tokens.

    Attributes:
        tokens: (n,) int64, of a run.
        attention: (n,) float64, milliseconds of a run's attention.
        weight: (n,) float64, how many such runs there are.
    """

    tokens: NDArray[np.int64]
    attention: NDArray[np.float64]
    weight: NDArray[np.float64]


def demand_of(counts: Mapping[tuple[int, float], float]) -> Demand:
    """From counts by (tokens, attention)."""
    pairs = sorted(counts)
    return Demand(
        np.array([tokens for tokens, _ in pairs], dtype=np.int64),
        np.array([attention for _, attention in pairs], dtype=np.float64),
        np.array([counts[pair] for pair in pairs], dtype=np.float64),
    )


@dataclass(frozen=True)
class Workload:
    """Calls, counted.

    A call of one segment is one run on any ladder, so that its cost is known without the packer;
    the others are simulated. Calls without items are left out.

    Attributes:
        single: how many calls of one segment there are, by its tokens.
        packed: calls of several segments, and how many real ones each stands for.
        num_calls, num_items, num_packed: of the traffic: calls, items, calls of several segments.
        call_tokens: (num_calls,) int64, tokens of every call.
    """

    single: dict[int, int]
    packed: tuple[tuple[Items, float], ...]
    num_calls: int
    num_items: int
    num_packed: int
    call_tokens: NDArray[np.int64]


def workload_of(
    calls: Iterable[Call], max_frames: int, max_simulated: int = MAX_SIMULATED
) -> Workload:
    """Count calls.

    Calls with the same items in any order are one. If more than `max_simulated` calls of several
    segments differ, an even sample of them, by tokens, stands for all: the same one at every use.
    """
    single: Counter[int] = Counter()
    several: Counter[Items] = Counter()
    totals: list[int] = []
    num_items = 0

    @lru_cache(maxsize=1 << 14)
    def tokens_of(t: int, h: int, w: int) -> tuple[int, ...]:
        return tuple(a * b * c // 4 for a, b, c in segments_of(t, h, w, max_frames))

    for call in calls:
        if not call:
            continue
        items = tuple(sorted(tokens_of(*grid) for grid in call))
        totals.append(sum(map(sum, items)))
        num_items += len(items)
        if len(items) == 1 and len(items[0]) == 1:
            single[items[0][0]] += 1
        else:
            several[items] += 1
    return Workload(
        single=dict(sorted(single.items())),
        packed=tuple(_sample(several, max_simulated)),
        num_calls=len(totals),
        num_items=num_items,
        num_packed=several.total(),
        call_tokens=np.array(totals, dtype=np.int64),
    )


def segments(items: Items) -> Iterable[int]:
    """Tokens of every segment of a call."""
    return chain.from_iterable(items)


def _sample(several: Mapping[Items, int], limit: int) -> list[tuple[Items, float]]:
    ordered = sorted(several, key=_tokens)
    if len(ordered) <= limit:
        return [(items, float(several[items])) for items in ordered]
    # Strata of equal count, each stood for by the call in its middle.
    counts = np.array([several[items] for items in ordered], dtype=np.float64)
    ends = np.cumsum(counts)
    middles = (np.arange(limit) + 0.5) * ends[-1] / limit
    chosen = np.searchsorted(ends, middles)
    places, times = np.unique(chosen, return_counts=True)
    each = ends[-1] / limit
    return [
        (ordered[place], float(count * each)) for place, count in zip(places, times, strict=True)
    ]


def _tokens(items: Sequence[Sequence[int]]) -> tuple[int, Sequence[Sequence[int]]]:
    return sum(map(sum, items)), items
