"""Plans: budgets for a trace.

Compared with: brute force over every ladder, priced by the planner's own cost model; plain loops
over the packer; figures of an H200 that were measured or predicted with another program; and the
builder's reader of configs for what a plan writes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3compile.artifact import read_manifest
from m3compile.buckets import Piece, Planner, RouteTimes, Run, default_ladder, segments_of
from m3compile.buckets.times import CostModel
from m3compile.cli.app import main
from m3compile.config import BuildConfig, TowerConfig, load_build_config
from m3compile.config.build import MAX_TOKENS
from m3compile.errors import InputError, InputNotFoundError, RequestError
from m3compile.plan import (
    Limits,
    MemoryModel,
    PlanReport,
    best_ladder,
    build_file,
    h200_times,
    memory_model,
    optimum,
    plan_traffic,
    read_times,
)
from m3compile.plan.report import POWERS_OF_TWO
from m3compile.plan.search import make_plan, reference_ladder
from m3compile.plan.served import LadderGauge, ServedRuns
from m3compile.plan.simulate import ideal_ms, one_bucket_padding, simulate
from m3compile.plan.workload import Demand, demand_of, workload_of
from m3compile.traffic import Call, Traffic, read_traffic

MIXED = Path(__file__).parent.parent / "bench" / "traffic" / "mixed.jsonl"
MAX_FRAMES = 4
H200 = h200_times()
MEMORY = memory_model()
FREE = MemoryModel(weights=0, largest_token=0, own_token=0, graph=0)


def limits(max_graphs: int, memory_bytes: int | None = None) -> Limits:
    return Limits(max_graphs, MEMORY, memory_bytes)


def plan(calls: Iterable[Call], max_graphs: int, memory_bytes: int | None = None) -> PlanReport:
    return plan_traffic(
        Traffic(tuple(calls)),
        H200,
        limits(max_graphs, memory_bytes),
        max_frames=MAX_FRAMES,
        name="trace",
        times_source="test",
    )


def image(tokens: int) -> tuple[int, int, int]:
    return (1, 2, 2 * tokens)


def cost_of(demand: Demand, ladder: Sequence[int], times: RouteTimes) -> float:
    """By a plain loop over the price that the planner itself goes by."""
    model = CostModel(ladder, times)
    return sum(
        float(weight) * model.price(int(tokens), float(attention))[0]
        for tokens, attention, weight in zip(
            demand.tokens, demand.attention, demand.weight, strict=True
        )
    )


def ladders_of(budgets: Sequence[int], max_graphs: int) -> list[tuple[int, ...]]:
    return [
        ladder
        for count in range(1, max_graphs + 1)
        for ladder in itertools.combinations(budgets, count)
    ]


# --- the dynamic program


@st.composite
def any_times(draw: st.DrawFn, rising: bool = False) -> RouteTimes:
    """Times at a few sizes; they need not grow with them, unless `rising`."""
    budgets = sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=5)))
    ms = st.floats(0.5, 20)
    linear = [draw(ms) for _ in budgets]
    linear = sorted(linear) if rising else linear
    full = [low + draw(st.floats(0, 10)) for low in linear]
    exact = [draw(st.floats(0.5, 40)) for _ in budgets]
    return RouteTimes(
        budgets=tuple(budgets),
        linear_ms=tuple(linear),
        full_ms=tuple(full),
        exact_ms=tuple(exact),
    )


some_runs = st.dictionaries(
    st.tuples(st.integers(1, 14), st.sampled_from([0.0, 0.5, 7.0])),
    st.integers(1, 30).map(float),
    min_size=1,
    max_size=9,
).map(demand_of)


@settings(max_examples=150, deadline=None)
@given(some_runs, any_times(), st.integers(1, 3))
def test_the_dynamic_program_equals_brute_force(
    demand: Demand, times: RouteTimes, max_graphs: int
) -> None:
    found = best_ladder(demand, times, Limits(max_graphs, FREE))
    assert found is not None
    assert len(found) <= max_graphs
    # Every budget there is, not only the sizes of the runs.
    least = min(cost_of(demand, ladder, times) for ladder in ladders_of(range(1, 21), max_graphs))
    assert cost_of(demand, found, times) == pytest.approx(least, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    some_runs,
    any_times(rising=True),
    st.integers(1, 3),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.floats(0, 1),
)
def test_it_equals_brute_force_within_a_memory_limit(
    demand: Demand,
    times: RouteTimes,
    max_graphs: int,
    parts: tuple[int, int, int],
    share: float,
) -> None:
    largest, own, graph = parts
    memory = MemoryModel(weights=100, largest_token=largest, own_token=own, graph=graph)
    ladders = ladders_of(range(1, 21), max_graphs)
    least, most = (pick(map(memory.total, ladders)) for pick in (min, max))
    limited = Limits(max_graphs, memory, int(least - 1 + share * (most - least + 1)))
    allowed = [ladder for ladder in ladders if limited.allow(ladder)]
    found = best_ladder(demand, times, limited)
    # A budget below the smallest run is allowed, and of no use.
    useful = [ladder for ladder in allowed if ladder[-1] >= demand.tokens[0]]
    if found is None:
        assert not useful
        return
    assert limited.allow(found)
    best = min(cost_of(demand, ladder, times) for ladder in allowed)
    assert cost_of(demand, found, times) <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(8, 2000), st.integers(1, 50), min_size=2, max_size=9),
    st.integers(1, 4),
    st.sampled_from([0, 1_000, 100_000]),
    st.sampled_from([0, 1, 1_000, 10_000]),
    st.floats(0, 1),
)
def test_sizes_far_apart_within_a_memory_limit(
    sizes: dict[int, int], max_graphs: int, largest_token: int, own_token: int, share: float
) -> None:
    demand = demand_of({(tokens, 0.0): float(number) for tokens, number in sizes.items()})
    memory = MemoryModel(
        weights=10**6, largest_token=largest_token, own_token=own_token, graph=10**4
    )
    ladders = ladders_of(sorted(sizes), max_graphs)
    least, most = (pick(map(memory.total, ladders)) for pick in (min, max))
    limited = Limits(max_graphs, memory, least + int(share * (most - least)))
    found = best_ladder(demand, H200, limited)
    assert found is not None
    assert limited.allow(found)
    best = min(cost_of(demand, ladder, H200) for ladder in ladders if limited.allow(ladder))
    assert cost_of(demand, found, H200) == pytest.approx(best, rel=1e-9)


def test_fewer_graphs_where_more_gain_nothing() -> None:
    demand = demand_of({(64, 0.1): 5.0, (100, 0.2): 5.0})
    assert best_ladder(demand, H200, limits(9)) == (64, 100)
    flat = RouteTimes(budgets=(128,), linear_ms=(2.0,), full_ms=(2.5,), exact_ms=(9.0,))
    assert best_ladder(demand, flat, limits(9)) == (100,)


def test_the_short_way_through_many_sizes_is_the_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    model = CostModel((MAX_TOKENS,), H200)
    for max_graphs in (1, 2, 7, 20):
        sizes = rng.sample(range(1, 9000), 150)
        demand = demand_of(
            {(b, rng.random() * model.attention(b)): float(rng.randint(1, 30)) for b in sizes}
        )
        monkeypatch.setattr(optimum, "_MANY_CHOICES", MAX_TOKENS)
        expected = best_ladder(demand, H200, limits(max_graphs))
        monkeypatch.setattr(optimum, "_MANY_CHOICES", 1)
        assert best_ladder(demand, H200, limits(max_graphs)) == expected


# --- plans


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=40),
    st.integers(1, 3),
)
def test_a_plan_for_single_images_equals_brute_force(sizes: list[int], max_graphs: int) -> None:
    calls = [(image(tokens),) for tokens in sizes]
    report = plan(calls, max_graphs)
    model = CostModel((MAX_TOKENS,), H200)
    demand = demand_of(
        {(tokens, model.attention(tokens)): float(sizes.count(tokens)) for tokens in sizes}
    )
    # Brute force over at most ten of the sizes: any ladder of them costs no less.
    budgets = sorted(set(sizes))[:10]
    least = min(cost_of(demand, ladder, H200) for ladder in ladders_of(budgets, max_graphs))
    total = report.ladders[0].ms_per_call * len(calls)
    assert total <= least * (1 + 1e-9)
    assert total == pytest.approx(cost_of(demand, report.budgets, H200))
    if len(set(sizes)) <= 10:
        assert total == pytest.approx(least)


grids = st.tuples(
    st.sampled_from([1, 1, 1, 2, 4, 5, 11]),
    st.integers(1, 16).map(lambda side: 2 * side),
    st.integers(1, 24).map(lambda side: 2 * side),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(grids, max_size=8).map(tuple), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from([None, 1_900_000_000, 2_300_000_000]),
)
def test_a_plan_is_never_worse_than_the_default_ladder(
    calls: list[Call], max_graphs: int, memory_bytes: int | None
) -> None:
    if not any(calls):
        return
    workload = workload_of(calls, MAX_FRAMES)
    within = limits(max_graphs, memory_bytes)
    found = make_plan(workload, H200, within).simulation
    assert within.allow(found.ladder)
    reference = reference_ladder(within)
    if reference is not None:
        assert within.allow(reference)
        assert found.cost_ms <= simulate(workload, reference, H200).cost_ms * (1 + 1e-12)
    assert found.cost_ms >= ideal_ms(workload, H200) * (1 - 1e-9)


def test_the_reference_is_the_default_ladder_as_far_as_it_goes() -> None:
    assert reference_ladder(limits(38)) == default_ladder()
    within = reference_ladder(limits(24))
    assert within == default_ladder(800)
    assert len(within) == 24
    assert reference_ladder(limits(1)) == (64,)
    assert reference_ladder(limits(38, 1_700_000_000)) is None


def test_a_largest_budget_lets_items_share_an_exact_run() -> None:
    """Where few graphs are allowed, the packer and the dynamic program alone settle without one."""
    workload = workload_of(read_traffic(MIXED).calls, MAX_FRAMES)
    found = make_plan(workload, H200, limits(4)).simulation
    assert found.ladder[-1] > 2000
    demand = simulate(workload, default_ladder(800), H200).demand
    alone = best_ladder(demand, H200, limits(4))
    assert alone is not None
    assert alone[-1] < 2000
    assert found.cost_ms < 0.98 * simulate(workload, alone, H200).cost_ms


def test_max_items_holds_the_fullest_run() -> None:
    small = (image(1),) * 700
    report = plan([small], 2)
    assert report.max_items == 1024
    assert report.budgets == (700,)
    assert plan([(image(64),)], 2).max_items == BuildConfig().max_items


def test_calls_that_cannot_be_planned_for() -> None:
    with pytest.raises(RequestError, match="no call with an item"):
        plan([(), ()], 4)
    with pytest.raises(RequestError, match=r"memory limit is 1\.73 GB; one graph of 64 tokens"):
        plan([(image(64),)], 4, 1_732_000_000)


# --- the traffic file


def test_the_cost_model_gives_the_published_figures() -> None:
    """95 calls/s with the default ladder, 98 at exact sizes; 46 % padding for powers of two."""
    workload = workload_of(read_traffic(MIXED).calls, MAX_FRAMES)
    default = simulate(workload, default_ladder(), H200)
    assert round(1000 * workload.num_calls / default.cost_ms) == 95
    assert round(1000 * workload.num_calls / ideal_ms(workload, H200)) == 98
    assert round(100 * one_bucket_padding(workload, POWERS_OF_TWO)) == 46


NO_EXACT = msgspec.structs.replace(H200, exact_ms=tuple(1e6 for _ in H200.budgets))


@pytest.mark.parametrize("times", [H200, NO_EXACT], ids=["both routes", "graphs alone"])
def test_padding_and_time_on_the_traffic_file(times: RouteTimes) -> None:
    workload = workload_of(read_traffic(MIXED).calls, MAX_FRAMES)
    found = make_plan(workload, times, limits(24)).simulation
    assert len(found.ladder) <= 24
    assert found.padding < 0.05
    assert found.cost_ms / ideal_ms(workload, times) < 1.04
    if times is NO_EXACT:
        assert found.exact_runs == 0
        # The same measure as the 46 % of powers of two: every call in one bucket, whole.
        assert one_bucket_padding(workload, found.ladder) < 0.05


# --- the simulation


def test_a_simulation_is_the_sum_over_the_packer() -> None:
    calls = read_traffic(MIXED).calls
    ladder = (64, 256, 576, 1296)
    planner = Planner(ladder, 4096, H200)
    ms = padded = real = exact = 0.0
    for call in calls:
        items = [[a * b * c // 4 for a, b, c in segments_of(*grid, MAX_FRAMES)] for grid in call]
        for run in planner.plan(items):
            ms += planner.cost(run)
            exact += run.budget is None
            if run.budget is not None:
                padded += run.budget - run.tokens
                real += run.tokens
    found = simulate(workload_of(calls, MAX_FRAMES), ladder, H200)
    assert found.cost_ms == pytest.approx(ms, rel=0.005)
    assert found.padding == pytest.approx(padded / real, rel=0.02)
    assert found.exact_runs == pytest.approx(exact, abs=2)


def test_equal_calls_are_counted_once() -> None:
    a, b = (1, 4, 4), (1, 8, 8)
    workload = workload_of([(a, b), (b, a), (a,), (a,), (), ((1, 2, 8),)], MAX_FRAMES)
    assert workload.single == {4: 3}
    assert workload.packed == ((((4,), (16,)), 2.0),)
    assert (workload.num_calls, workload.num_items, workload.num_packed) == (5, 7, 2)


def test_a_sample_stands_for_all_calls() -> None:
    rng = random.Random(0)
    calls = [
        tuple(image(rng.randint(8, 500)) for _ in range(rng.randint(2, 6))) for _ in range(1000)
    ]
    full, sample = workload_of(calls, MAX_FRAMES), workload_of(calls, MAX_FRAMES, 100)
    assert len(full.packed) == 1000
    assert len(sample.packed) == 100
    assert sum(weight for _, weight in sample.packed) == pytest.approx(1000)
    for ladder in (default_ladder(), POWERS_OF_TWO):
        expected = simulate(full, ladder, H200).cost_ms
        assert simulate(sample, ladder, H200).cost_ms == pytest.approx(expected, rel=0.01)


# --- memory and times


def test_memory_of_the_measured_encoder() -> None:
    """28 budgets from 64 to 2,560 tokens took 620 MB beside 1.73 GB of weights."""
    ladder = [round(64 * 40 ** (step / 27)) for step in range(28)]
    assert MEMORY.total(ladder) - MEMORY.weights == pytest.approx(620e6, rel=0.01)
    # The largest budget weighs more than all others together.
    assert MEMORY.total(ladder[-1:]) - MEMORY.weights > 620e6 / 2
    tiny = TowerConfig(projector_hidden_size=64, output_size=64)
    assert memory_model(tiny).largest_token == 4 * (1176 + 2 * 1280 + 2 * 5120) * 2
    assert memory_model(tiny, "float32").own_token == 4 * 64


def test_times_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    model = CostModel((64, 4096), H200)
    full = {b: model.linear(b) + model.attention(b) for b in (64, 576, 4096)}
    path.write_text(json.dumps({str(b): 2 * ms for b, ms in full.items()}))
    times = read_times(path)
    # A machine of half the speed: both parts double, launching stays.
    assert times.budgets == (64, 576, 4096)
    assert times.full_ms == pytest.approx([2 * ms for ms in full.values()])
    assert times.linear_ms == pytest.approx([2 * model.linear(b) for b in full])
    assert min(times.exact_ms) == min(H200.exact_ms)
    path.write_bytes(msgspec.json.encode(H200))
    assert read_times(path) == H200


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "{", '{"64": 0}', '{"64": -1}', '{"64": "2"}', '{"64": true}', '{"0": 1}',
        '{"x": 1}', '{"64.5": 1}', '{"99999": 1}', '{"64": 1, "064": 2}', '{"64": 1e999}',
        '{"budgets": [64]}', '{"64": NaN}',
    ],
)  # fmt: skip
def test_bad_times_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"times\.json"):
        read_times(path)
    with pytest.raises(InputNotFoundError, match="does not exist"):
        read_times(tmp_path / "none.json")


# --- what a plan writes


def test_a_plan_is_a_build_config(tmp_path: Path) -> None:
    report = plan(read_traffic(MIXED).calls, 24)
    path = tmp_path / "build.yaml"
    path.write_text(build_file(report))
    assert load_build_config(path) == BuildConfig(budgets=report.budgets, max_items=128)
    base = BuildConfig(
        checkpoint="weights/m3",
        out="exported/m3",
        device="cuda",
        dtype="bfloat16",
        budgets=(64, 256),
        specialize=(64,),
        max_items=64,
        force=True,
    )
    path.write_text(build_file(report, base))
    assert load_build_config(path) == BuildConfig(
        checkpoint="weights/m3",
        device="cuda",
        dtype="bfloat16",
        budgets=report.budgets,
        max_items=128,
    )


def test_the_histogram_holds_every_call_and_budget() -> None:
    report = plan(read_traffic(MIXED).calls, 24)
    bins = report.histogram
    assert sum(bin.calls for bin in bins) == 400
    assert [budget for bin in bins for budget in bin.budgets] == list(report.budgets)
    assert all(low.last + 1 == high.first for low, high in itertools.pairwise(bins))
    assert all(bin.first <= budget <= bin.last for bin in bins for budget in bin.budgets)


# --- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report, plot = (tmp_path / name for name in ("b.yaml", "plan.json", "plan.png"))
    words = ["plan", "--traffic", str(MIXED), "--max-graphs", "24"]
    files = ["--out", str(out), "--json", str(report), "--plot", str(plot)]
    # A second time it replaces its own files.
    for _ in range(2):
        assert main([*words, *files]) == 0
    shown = capsys.readouterr().out
    document = msgspec.json.decode(report.read_bytes(), type=PlanReport)
    assert load_build_config(out).budgets == document.budgets
    assert document.traffic.calls == 400
    assert [ladder.name for ladder in document.ladders] == [
        "plan", "default ladder", "default ladder to 800", "powers of two",
    ]  # fmt: skip
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert all(ladder.name in shown for ladder in document.ladders)
    assert "ideal: exact sizes" in shown
    assert ",".join(map(str, document.budgets)) in shown


def test_the_command_names_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("tokens\n64\nx\n70\n")
    assert main(["plan", "--traffic", str(trace)]) == 2
    assert "line 3: tokens is 'x'" in capsys.readouterr().err
    assert main(["plan", "--traffic", str(trace), "--skip-bad"]) == 0
    shown = capsys.readouterr()
    assert "left out line 3" in shown.err
    assert "budgets: 64,70" in shown.out


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "build.yaml"
    mine.write_text("dtype: float32\n")
    times = tmp_path / "times.json"
    times.write_text('{"64": 2.0}')
    trace = ["--traffic", str(MIXED)]
    for words, reason in [
        ([], "Missing option '--traffic'"),
        (["--traffic", str(tmp_path / "none")], "does not exist"),
        ([*trace, "--out", str(mine)], "--force replaces it"),
        ([*trace, "--out", str(tmp_path / "no" / "b.yaml")], "its folder does not exist"),
        ([*trace, "--json", str(tmp_path / "no" / "p.json")], "its folder does not exist"),
        ([*trace, "--plot", str(tmp_path / "no" / "p.png")], "its folder does not exist"),
        ([*trace, "--plot", str(tmp_path / "p.what")], "expected a name that ends in"),
        ([*trace, "--max-graphs", "0"], "--max-graphs"),
        ([*trace, "--memory-limit", "nan"], "allowed: GB above 0"),
        ([*trace, "--memory-limit", "1"], "the memory limit is 1.00 GB"),
        ([*trace, "--artifact", "a", "--times", str(times)], "give one of them"),
    ]:
        assert main(["plan", *words]) == 2, reason
        error = capsys.readouterr().err
        assert reason in error
        assert error.splitlines()[-1].startswith("error: ")
    assert mine.read_text() == "dtype: float32\n"
    assert main(["plan", *trace, "--artifact", str(tmp_path / "none")]) == 3
    assert main(["plan", *trace, "--out", str(mine), "--force", "--times", str(times)]) == 0
    assert load_build_config(mine).budgets


def test_the_command_plans_for_an_artifact(
    golden_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--traffic", str(MIXED), "--artifact"]
    assert main([*words, str(golden_artifact)]) == 2
    assert "has no measured times" in capsys.readouterr().err
    manifest = msgspec.structs.replace(read_manifest(golden_artifact), times=H200)
    measured, out = tmp_path / "measured", tmp_path / "build.yaml"
    measured.mkdir()
    (measured / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert main([*words, str(measured), "--out", str(out)]) == 0
    assert "measured for measured" in capsys.readouterr().out
    config = load_build_config(out)
    assert config.checkpoint == manifest.build.checkpoint
    assert (config.device, config.dtype) == ("cpu", "float32")


# --- a running encoder


def served(*sizes: int) -> ServedRuns:
    runs = ServedRuns()
    for tokens in sizes:
        runs.add([Run(tokens, tokens, (Piece(0, 0, 1, tokens),))])
    return runs


def test_how_far_a_ladder_is_from_the_best() -> None:
    nothing = LadderGauge((64, 256), None).report({})
    assert (nothing["runs"], nothing["over_best"], nothing["best_budgets"]) == (0, 0.0, [64, 256])
    sizes = [70] * 20 + [250] * 3 + [100]
    counts = served(*sizes).counts()
    report = LadderGauge((256,), None).report(counts)
    model = CostModel((256,), H200)
    demand = demand_of({(b, model.attention(b)): float(sizes.count(b)) for b in set(sizes)})
    least, best = min((cost_of(demand, (b,), H200), b) for b in set(sizes))
    assert report["best_budgets"] == [best]
    assert report["best_ms_per_run"] * len(sizes) == pytest.approx(least)
    assert report["ms_per_run"] * len(sizes) == pytest.approx(cost_of(demand, (256,), H200))
    assert report["over_best"] == pytest.approx(cost_of(demand, (256,), H200) / least - 1)
    assert LadderGauge((best,), None).report(counts)["over_best"] == 0
    assert report["times"] == "H200 cost model"
    assert LadderGauge((best,), H200).report(counts)["times"] == "measured"


def test_the_count_of_runs_is_bounded_by_their_sizes() -> None:
    runs = served(*range(1, 101), *range(1, 101))
    assert len(runs.counts()) == 100
    clip = Run(None, 60, (Piece(0, 0, 3, 30), Piece(1, 0, 1, 30)))
    runs.add([clip])
    assert runs.counts()[60] == (3, 2 * 60**2 + 3 * 10**2 + 30**2)


def test_an_encoder_says_how_far_its_ladder_is(golden_artifact: Path) -> None:
    import torch

    import m3compile

    with m3compile.load(golden_artifact, budgets=[256]) as encoder:
        for _ in range(3):
            encoder.encode(torch.zeros(256, 1176), [[1, 16, 16]])
        encoder.encode_at(torch.zeros(400, 1176), [[1, 20, 20]], 256)
        ladder = encoder.stats()["ladder"]
    assert ladder["runs"] == 3
    assert ladder["best_budgets"] == [64]
    assert ladder["over_best"] > 1
