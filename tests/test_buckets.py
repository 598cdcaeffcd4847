"""The ladder, segments, and the plan of a call.

Compared with: costs recomputed here by plain loops from the cost model's definition, linear search,
and brute force over every partition of up to six items.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import timeit
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3compile.buckets import (
    Piece,
    Planner,
    RouteTimes,
    Run,
    budget_for,
    default_ladder,
    segments_of,
)
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import ConfigError, ExitCode, InputError

ANCHORS = (64, 256, 576, 1296, 2304, 4096)
COARSE = (64, 256, 576)
Items = Sequence[Sequence[int]]


def modelled_times(
    ladder: Sequence[int], launch_ms: float = 9.1, noise: float = 0.0, seed: int = 0
) -> RouteTimes:
    """Times of the shape that an H200 shows: 1.0 + 0.0031 N + 3.3e-7 N^2 ms for N patches."""
    rng = random.Random(seed)

    def noisy(value: float) -> float:
        return value * (1 + noise * rng.uniform(-1, 1))

    linear = [noisy(1.0 + 0.0124 * budget) for budget in ladder]
    full = [ms + noisy(5.28e-6 * budget**2) for ms, budget in zip(linear, ladder, strict=True)]
    exact = [max(noisy(launch_ms), noisy(1.01 * ms)) for ms in full]
    return RouteTimes(
        budgets=tuple(ladder), linear_ms=tuple(linear), full_ms=tuple(full), exact_ms=tuple(exact)
    )


# --- the ladder ---


def wastes_less_than_an_eighth(ladder: Sequence[int]) -> bool:
    return all((high - (low + 1)) * 8 < high for low, high in itertools.pairwise(ladder))


def test_default_ladder() -> None:
    ladder = default_ladder()
    assert (ladder[0], ladder[-1]) == (64, 4096)
    assert set(ANCHORS) <= set(ladder)
    assert wastes_less_than_an_eighth(ladder)
    assert all(budget % (16 if budget > 256 else 8) == 0 for budget in ladder)
    # A capture takes 40 ms: the whole ladder has to stay well under three seconds.
    assert len(ladder) == 38


@settings(max_examples=200, deadline=None)
@given(st.integers(1, MAX_TOKENS))
def test_ladder_bound_for_any_largest(largest: int) -> None:
    ladder = default_ladder(largest)
    assert ladder[-1] == largest
    assert {anchor for anchor in ANCHORS if anchor <= largest} <= set(ladder)
    assert all(low < high for low, high in itertools.pairwise(ladder))
    assert wastes_less_than_an_eighth(ladder)
    assert all(budget % (16 if budget > 256 else 8) == 0 for budget in ladder[:-1])
    if largest <= 64:
        assert ladder == (largest,)


def greedy_count(low: int, high: int, step: int) -> int:
    """How many budgets in (low, high], each as far up as the bound and the step permit."""
    count = 0
    while low < high:
        reach = max(b for b in range(low + 1, low + low // 7 + 2) if (b - low - 1) * 8 < b)
        low = high if reach >= high else reach // step * step
        count += 1
    return count


@pytest.mark.parametrize("largest", [65, 74, 75, 255, 293, 294, 700, 3000, 4096, 9999, MAX_TOKENS])
def test_as_few_budgets_as_the_bound_permits(largest: int) -> None:
    ladder = default_ladder(largest)
    stops = [*(anchor for anchor in ANCHORS if anchor < largest), largest]
    for low, high in itertools.pairwise(stops):
        between = sum(low < budget <= high for budget in ladder)
        assert between == greedy_count(low, high, 8 if low < 256 else 16)


@pytest.mark.parametrize("largest", [0, -64, MAX_TOKENS + 1])
def test_impossible_largest_is_refused(largest: int) -> None:
    with pytest.raises(ConfigError, match=f"largest budget is {largest}; allowed"):
        default_ladder(largest)


ladders = st.lists(st.integers(1, 3000), min_size=1, max_size=9, unique=True).map(sorted)


@given(ladders, st.integers(1, 4000))
def test_bisection_equals_linear_search(ladder: list[int], tokens: int) -> None:
    found = [budget for budget in ladder if budget >= tokens]
    assert budget_for(tokens, ladder) == (found[0] if found else None)


def test_budget_edges() -> None:
    assert [budget_for(tokens, COARSE) for tokens in (1, 64, 65, 256, 257, 576, 577)] == [
        *(64, 64, 256, 256, 576, 576, None)
    ]


# --- segments ---


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_segments(t: int, half_h: int, half_w: int, max_frames: int) -> None:
    h, w = 2 * half_h, 2 * half_w
    segments = segments_of(t, h, w, max_frames)
    assert sum(frames for frames, _, _ in segments) == t
    assert {(side_h, side_w) for _, side_h, side_w in segments} == {(h, w)}
    assert all(frames == max_frames for frames, _, _ in segments[:-1])
    assert 1 <= segments[-1][0] <= max_frames


def test_an_image_is_one_segment() -> None:
    assert segments_of(1, 16, 12, 4) == [(1, 16, 12)]
    assert segments_of(4, 16, 12, 4) == [(4, 16, 12)]
    assert segments_of(9, 2, 2, 4) == [(4, 2, 2), (4, 2, 2), (1, 2, 2)]


# --- the plan: what it must hold ---


def check_plan(runs: Sequence[Run], items: Items, ladder: Sequence[int], max_segments: int) -> None:
    """Capacity, every segment once and in order, input order inside a run."""
    seen: list[list[int]] = [[] for _ in items]
    for run in runs:
        assert run.pieces
        assert run.tokens == sum(piece.tokens for piece in run.pieces)
        assert sum(piece.num_segments for piece in run.pieces) <= max_segments
        order = [piece.item for piece in run.pieces]
        assert order == sorted(set(order))
        for piece in run.pieces:
            mine = range(piece.first_segment, piece.first_segment + piece.num_segments)
            seen[piece.item] += mine
            assert piece.tokens == sum(items[piece.item][index] for index in mine)
        if run.budget is not None:
            assert run.budget == budget_for(run.tokens, ladder)
        elif run.tokens > ladder[-1]:
            assert len(run.pieces) == run.pieces[0].num_segments == 1
        assert run.tokens <= MAX_TOKENS
    assert seen == [list(range(len(segments))) for segments in items]
    pieces = Counter(piece.item for run in runs for piece in run.pieces)
    for index, segments in enumerate(items):
        if sum(segments) <= ladder[-1] and len(segments) <= max_segments:
            assert pieces[index] == 1


def reference_cost(
    budget: int | None, segments: Sequence[int], ladder: Sequence[int], times: RouteTimes | None
) -> float:
    """The cost of one run by the definition, in plain loops."""
    tokens = sum(segments)
    if times is None:
        return 80.0 + (tokens if budget is None else budget)
    attention = 0.0
    for segment in segments:
        knot = next((i for i, b in enumerate(times.budgets) if b >= segment), -1)
        whole = max(0.0, times.full_ms[knot] - times.linear_ms[knot])
        attention += whole * (segment / times.budgets[knot]) ** 2
    if budget is not None:
        return times.linear_ms[ladder.index(budget)] + attention
    linear = times.linear_ms[0]
    for low, high in itertools.pairwise(range(len(times.budgets))):
        if times.budgets[low] < tokens <= times.budgets[high]:
            share = (tokens - times.budgets[low]) / (times.budgets[high] - times.budgets[low])
            linear = (1 - share) * times.linear_ms[low] + share * times.linear_ms[high]
    if tokens > times.budgets[-1]:
        linear = times.linear_ms[-1] * tokens / times.budgets[-1]
    pairs = list(zip(times.exact_ms, times.full_ms, strict=True))
    fastest = min(times.exact_ms)
    ratios = [e / f for e, f in pairs if e > 1.25 * fastest]
    ratio = max(1.0, statistics.median(ratios[len(ratios) // 2 :])) if ratios else 1.0
    # Launching bounds it, and it must be faster by more than 3 % of noise.
    floor = max((e for e, f in pairs if e > 1.15 * f), default=fastest)
    return max(floor, 1.03 * ratio * (linear + attention))


def cheapest_route(
    segments: Sequence[int], ladder: Sequence[int], times: RouteTimes | None
) -> float:
    budget = budget_for(sum(segments), ladder)
    if budget is None or times is None:
        return reference_cost(budget, segments, ladder, times)
    return min(reference_cost(route, segments, ladder, times) for route in (budget, None))


def segments_in(run: Run, items: Items) -> list[int]:
    return [
        tokens
        for piece in run.pieces
        for tokens in items[piece.item][
            piece.first_segment : piece.first_segment + piece.num_segments
        ]
    ]


LADDERS = [(64,), COARSE, (64, 128, 256, 512, 1024), default_ladder(576), default_ladder(2304)]


@st.composite
def problems(
    draw: st.DrawFn, max_items: int, *, cut: bool
) -> tuple[tuple[int, ...], int, RouteTimes | None, list[list[int]]]:
    """A ladder, max_segments, times or None, and items; all of them fit a bucket unless `cut`."""
    ladder = draw(st.sampled_from(LADDERS))
    max_segments = draw(st.integers(1, 12))
    times = None
    if draw(st.booleans()):
        # A low launch cost brings the exact route into play.
        launch_ms = draw(st.sampled_from([0.1, 2.0, 9.1]))
        times = modelled_times(ladder, launch_ms, noise=0.1, seed=draw(st.integers(0, 5)))
    largest = ladder[-1]
    items = []
    for _ in range(draw(st.integers(0, max_items))):
        count = draw(st.integers(1, 30 if cut else min(4, max_segments)))
        high = largest + largest // 4 if cut else largest // count
        items.append(draw(st.lists(st.integers(1, high), min_size=count, max_size=count)))
    return ladder, max_segments, times, items


@settings(max_examples=250, deadline=None)
@given(problems(14, cut=True))
def test_any_mix_packs_within_capacity_and_in_order(
    problem: tuple[tuple[int, ...], int, RouteTimes | None, list[list[int]]],
) -> None:
    ladder, max_segments, times, items = problem
    planner = Planner(ladder, max_segments, times)
    runs = planner.plan(items)
    check_plan(runs, items, ladder, max_segments)
    for run in runs:
        inside = segments_in(run, items)
        expected = reference_cost(run.budget, inside, ladder, times)
        assert planner.cost(run) == pytest.approx(expected)
        if times is None:
            assert (run.budget is None) == (run.tokens > ladder[-1])
        else:
            assert expected == pytest.approx(cheapest_route(inside, ladder, times))
    assert planner.plan(items) == runs


@settings(max_examples=200, deadline=None)
@given(problems(60, cut=False))
def test_never_dearer_than_one_run_per_item(
    problem: tuple[tuple[int, ...], int, RouteTimes | None, list[list[int]]],
) -> None:
    ladder, max_segments, times, items = problem
    planner = Planner(ladder, max_segments, times)
    runs = planner.plan(items)
    check_plan(runs, items, ladder, max_segments)
    alone = sum(cheapest_route(segments, ladder, times) for segments in items)
    assert sum(map(planner.cost, runs)) <= alone * (1 + 1e-9)


def partitions(members: list[int]) -> Iterator[list[list[int]]]:
    if not members:
        yield []
        return
    first, *rest = members
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index, group in enumerate(smaller):
            yield [*smaller[:index], [first, *group], *smaller[index + 1 :]]


@settings(max_examples=150, deadline=None)
@given(problems(6, cut=False))
def test_near_the_best_of_all_partitions(
    problem: tuple[tuple[int, ...], int, RouteTimes | None, list[list[int]]],
) -> None:
    ladder, max_segments, times, items = problem
    planner = Planner(ladder, max_segments, times)
    prices: dict[tuple[int, ...], float] = {}

    def price(group: list[int]) -> float:
        key = tuple(group)
        if key not in prices:
            segments = [tokens for index in group for tokens in items[index]]
            fits = sum(segments) <= ladder[-1] and len(segments) <= max_segments
            prices[key] = cheapest_route(segments, ladder, times) if fits else float("inf")
        return prices[key]

    best = min(sum(map(price, groups)) for groups in partitions(list(range(len(items)))))
    found = sum(map(planner.cost, planner.plan(items)))
    assert best * (1 - 1e-9) <= found <= best * 1.011


# --- the plan: cases ---


def budgets_of(runs: Sequence[Run]) -> list[int | None]:
    return [run.budget for run in runs]


def test_edges_of_budgets() -> None:
    planner = Planner(COARSE, 4)
    for tokens, budget in ((64, 64), (65, 256), (256, 256), (576, 576), (577, None), (600, None)):
        expected = [Run(budget, tokens, (Piece(0, 0, 1, tokens),))]
        assert planner.plan([[tokens]]) == planner.plan([tokens]) == expected


def test_five_items_take_two_replays() -> None:
    planner = Planner(COARSE, 4)
    runs = planner.plan([64] * 5)
    assert sorted(len(run.pieces) for run in runs) == [1, 4]
    assert sorted(run.budget or 0 for run in runs) == [64, 256]


def test_twelve_mixed_images() -> None:
    items = [[tokens] for tokens in (64, 576, 65, 9, 600, 256, 100, 1, 300, 575, 64, 30)]
    runs = Planner(COARSE, 4).plan(items)
    check_plan(runs, items, COARSE, 4)
    assert budgets_of(runs).count(None) == 1


def test_three_items_share_one_bucket() -> None:
    ladder = default_ladder()
    (run,) = Planner(ladder, 128).plan([100, 120, 80])
    assert (run.budget, run.tokens) == (320, 300)
    assert [piece.item for piece in run.pieces] == [0, 1, 2]


def test_a_split_that_pays() -> None:
    """One bucket of 4,096 holds both, and two of 1,296 cost less."""
    runs = Planner((64, 1296, 4096), 128).plan([1200, 1250])
    assert budgets_of(runs) == [1296, 1296]
    # 580 + 144 against 780: just over what two launches cost more than one.
    runs = Planner((64, 500, 700), 128).plan([500, 60])
    assert budgets_of(runs) == [500, 64]


def test_thousands_of_items_that_are_cheaper_apart() -> None:
    runs = Planner((64, 1000), 2).plan([64] * 6000)
    assert budgets_of(runs) == [64] * 6000


def test_nothing_to_plan() -> None:
    assert Planner(COARSE, 4).plan([]) == []


def test_long_clip_is_cut_between_segments() -> None:
    items = [[100], [500] * 9 + [20], [30]]
    runs = Planner((64, 576, 1024), 4).plan(items)
    check_plan(runs, items, (64, 576, 1024), 4)
    clip = [piece for run in runs for piece in run.pieces if piece.item == 1]
    assert [piece.num_segments for piece in clip] == [2, 2, 2, 2, 2]
    # Its last piece leaves room, which the other items take.
    assert len(runs) == 5
    assert [piece.item for piece in runs[-1].pieces] == [0, 1, 2]


def test_clip_of_more_segments_than_a_run_holds() -> None:
    items = [[8] * 10]
    runs = Planner(COARSE, 4).plan(items)
    check_plan(runs, items, COARSE, 4)
    assert [run.pieces[0].num_segments for run in runs] == [4, 4, 2]


def test_a_clip_takes_the_cut_without_padding() -> None:
    """Three segments a run would leave 544 of 4,000 tokens unused; two fill 2,304 exactly."""
    runs = Planner((64, 2304, 4000), 128).plan([[1152] * 6])
    assert budgets_of(runs) == [2304] * 3


def test_segment_over_the_largest_budget_runs_alone() -> None:
    items = [[600, 600, 10], [20]]
    runs = Planner(COARSE, 4).plan(items)
    check_plan(runs, items, COARSE, 4)
    assert budgets_of(runs) == [None, None, 64]
    assert [piece.item for piece in runs[-1].pieces] == [0, 1]


def test_segment_over_one_run_names_the_item() -> None:
    planner = Planner(COARSE, 4)
    assert planner.plan([MAX_TOKENS])[0].budget is None
    for item in (MAX_TOKENS + 1, [8, MAX_TOKENS + 1]):
        with pytest.raises(InputError, match=r"^item 1: a segment has 16385 tokens") as caught:
            planner.plan([64, item])
        assert isinstance(caught.value, ValueError)
        assert caught.value.exit_code is ExitCode.REQUEST


@pytest.mark.parametrize("ladder", [(), (0, 64), (64, 64), (128, 64), (64, MAX_TOKENS + 1)])
def test_impossible_ladder_is_refused(ladder: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"budgets is .*; allowed: increasing"):
        Planner(ladder, 4)


def test_no_segments_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_items is 0; allowed: at least 1"):
        Planner(COARSE, 0)


# --- measured times ---


def test_exact_route_where_it_is_cheaper() -> None:
    ladder = (64, 256, 1024)
    planner = Planner(ladder, 8, modelled_times(ladder, launch_ms=5.0))
    # Launching costs 5 ms: more than a replay of 256 tokens, less than one of 1,024.
    assert budgets_of(planner.plan([100])) == [256]
    assert budgets_of(planner.plan([260])) == [None]
    assert budgets_of(planner.plan([1024])) == [1024]
    (packed,) = planner.plan([100, 90, 80])
    assert (packed.budget, len(packed.pieces)) == (None, 3)
    assert planner.cost(packed) == 5.0
    assert planner.cost(Run(1024, packed.tokens, packed.pieces)) > 5.0


def test_attention_counts_segments_not_padding() -> None:
    times = RouteTimes(
        budgets=(100, 200), linear_ms=(1.0, 2.0), full_ms=(2.0, 6.0), exact_ms=(9.0, 20.0)
    )
    planner = Planner((100, 200), 8, times)
    (run,) = planner.plan([[50, 50]])
    assert planner.cost(run) == pytest.approx(1.0 + 2 * 1.0 * 0.5**2)
    (run,) = planner.plan([[50, 150]])
    assert planner.cost(run) == pytest.approx(2.0 + 1.0 * 0.5**2 + 4.0 * 0.75**2)


def test_exact_run_cannot_be_faster_than_its_launches() -> None:
    times = modelled_times(COARSE, launch_ms=50.0)
    planner = Planner(COARSE, 8, times)
    assert budgets_of(planner.plan([300])) == [576]
    (run,) = planner.plan([600])
    assert (run.budget, planner.cost(run)) == (None, 50.0)


def test_noise_cannot_make_attention_negative() -> None:
    times = RouteTimes(budgets=(64,), linear_ms=(2.0,), full_ms=(1.9,), exact_ms=(9.0,))
    planner = Planner((64,), 8, times)
    (run,) = planner.plan([64])
    assert planner.cost(run) == 2.0


def test_times_of_some_budgets_serve_the_whole_ladder() -> None:
    ladder = default_ladder(576)
    planner = Planner(ladder, 8, modelled_times((64, 576)))
    items = [[tokens] for tokens in (10, 70, 300, 500)]
    check_plan(planner.plan(items), items, ladder, 8)


TIMES = {
    "budgets": [64, 128],
    "linear_ms": [1.0, 2.0],
    "full_ms": [1.5, 2.5],
    "exact_ms": [9.0, 9.0],
}


def test_times_round_trip() -> None:
    times = msgspec.json.decode(json.dumps(TIMES), type=RouteTimes)
    assert msgspec.json.decode(msgspec.json.encode(times), type=RouteTimes) == times


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"budgets": []}, "budgets is \\(\\); allowed"),
        ({"budgets": [128, 64]}, "increasing"),
        ({"budgets": [64, 64]}, "increasing"),
        ({"budgets": [0, 64]}, "positive"),
        ({"linear_ms": [1.0]}, "linear_ms has 1 values; allowed: one per budget, 2"),
        ({"full_ms": [1.0, 0.0]}, "full_ms of budget 128 is 0.0; allowed: positive"),
        ({"exact_ms": [-1.0, 1.0]}, "exact_ms of budget 64 is -1.0; allowed: positive"),
        ({"device": "H200"}, "unknown field"),
        ({"budgets": ["64", 128]}, "Expected `int`"),
    ],
)
def test_broken_times_are_refused(change: dict[str, object], part: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=part):
        msgspec.json.decode(json.dumps({**TIMES, **change}), type=RouteTimes)


def test_nan_times_are_refused() -> None:
    with pytest.raises(ValueError, match="linear_ms of budget 64 is nan"):
        RouteTimes(budgets=(64,), linear_ms=(float("nan"),), full_ms=(1.0,), exact_ms=(1.0,))


# --- speed, with room for a busy machine ---


@pytest.mark.parametrize("times", [None, modelled_times(default_ladder())])
def test_planning_is_cheap(times: RouteTimes | None) -> None:
    planner = Planner(default_ladder(), 128, times)
    image = [[256]]
    assert min(timeit.repeat(lambda: planner.plan(image), number=500, repeat=5)) / 500 < 20e-6
    rng = random.Random(0)
    items = [[rng.randint(4, 2000)] for _ in range(5000)]
    assert min(timeit.repeat(lambda: planner.plan(items), number=1, repeat=3)) < 0.1
    check_plan(planner.plan(items), items, planner.ladder, 128)


@pytest.mark.parametrize("max_segments", [3, 4096])
@pytest.mark.parametrize("segments", [[1], [5, 5], [2049], [700, 1400]])
def test_many_equal_items(segments: list[int], max_segments: int) -> None:
    ladder = default_ladder()
    planner = Planner(ladder, max_segments)
    items = [segments] * 3000
    runs = planner.plan(items)
    check_plan(runs, items, ladder, max_segments)
    assert sum(map(planner.cost, runs)) <= 3000 * cheapest_route(segments, ladder, None)


def test_no_torch() -> None:
    code = "import sys, m3compile.buckets; sys.exit({'torch', 'numpy'} & set(sys.modules) != set())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_buckets_smaller_than_a_step_of_the_cost_table() -> None:
    for ladder in ((1,), (8,), (1, 8, 64), (15, 16, 17)):
        tokens = [min(size, ladder[-1]) for size in (3, 7, 64, 5, 8, 9, 1, 1, 1)]
        runs = Planner(ladder, 128).plan(tokens)
        assert sum(run.tokens for run in runs) == sum(tokens)
        assert all(run.budget is not None and run.tokens <= run.budget for run in runs)
