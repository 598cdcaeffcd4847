"""`bench`: the counted work against sums written out here and against measured floors of an H200;
the peer's packing against its rules, and its forward against the eager tower; records against
their JSON; the command on the golden artifact, with few budgets and few repetitions.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m3compile.artifact import read_manifest
from m3compile.bench import bench, encode_report, read_report
from m3compile.bench import startup as startup_module
from m3compile.bench.captured import CapturedEager, PeerBucket, PeerInputs, PeerModel
from m3compile.bench.cases import FULL, QUICK, choose_budgets, make_cases, square_grid
from m3compile.bench.circumstances import COMMIT_VARIABLE, source_commit
from m3compile.bench.clock import Clock, percentile, timing_of
from m3compile.bench.floor import Work, count_parameters, count_work, floor_of
from m3compile.bench.judge import Judge, merge
from m3compile.bench.packing import PEER_BUDGETS, PEER_MAX_ITEMS, pack_ascending, sequence_ends
from m3compile.bench.peers import make_peers
from m3compile.bench.plot import curves, draw
from m3compile.bench.records import BenchReport, Check
from m3compile.bench.runners import EagerRunner
from m3compile.bench.startup import measure_startup
from m3compile.bench.summary import summary_rows
from m3compile.buckets import default_ladder
from m3compile.cli.app import main
from m3compile.config import BOUNDS, TINY, TowerConfig
from m3compile.errors import DependencyError, ExitCode, InputError, OperationError, RequestError
from m3compile.loading import load_weights
from m3compile.plotting import check_plot
from m3compile.tower import make_tower
from m3compile.weights import tower_tensor_shapes

CPU = torch.device("cpu")
TRACE = (
    '{"grid_thw": [[1, 8, 8], [1, 4, 6]]}\n'
    '{"grid_thw": []}\n'
    '{"grid_thw": [[5, 4, 4]]}\n'
    '{"grid_thw": [[1, 8, 10]]}\n'
)


# Floors.


def test_work_of_a_small_tower() -> None:
    config = TowerConfig(
        hidden_size=12,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=20,
        patch_size=1,
        num_channels=3,
        temporal_patch_size=1,
        projector_hidden_size=7,
        output_size=5,
    )
    # Two segments, of 4 and 8 patches: 12 rows, 3 tokens.
    embed = 12 * (3 * 12)
    block = 12 * (12 * 36 + 12 * 12 + 12 * 20 + 20 * 12)
    attention = 2 * 12 * (4 * 4 + 8 * 8)
    projector = 12 * (12 * 7 + 7 * 5)
    merger = 3 * (4 * 5 * 7 + 7 * 5)
    flops = 2 * (embed + 2 * (block + attention) + projector + merger)
    weights = 36 + 24
    weights += 2 * (48 + 12 * 36 + 36 + 12 * 12 + 12 + 12 * 20 + 20 + 20 * 12 + 12)
    weights += 12 * 7 + 7 + 7 * 5 + 5 + 20 * 7 + 7 + 7 * 5 + 5
    moved = weights + 12 * 3 + 3 * 5
    assert count_work(config, [4, 8], 2) == Work(flops, 2 * moved)


@pytest.mark.parametrize("config", [TINY, TowerConfig()])
def test_parameters_are_those_of_the_weights_table(config: TowerConfig) -> None:
    table = tower_tensor_shapes(config)
    assert count_parameters(config) == sum(math.prod(shape) for shape in table.values())


def test_parameters_of_the_released_encoder() -> None:
    assert round(count_parameters(TowerConfig()) / 1e6) == 866


@pytest.mark.parametrize(
    ("segments", "tokens", "floor_ms", "digit"),
    [
        (1, 64, 0.50, 0.01),
        (1, 256, 2.19, 0.01),
        (1, 576, 5.56, 0.01),
        (1, 1296, 15.7, 0.1),
        (1, 4096, 89.5, 0.1),
        (8, 256, 17.5, 0.1),
    ],
)
def test_floors_of_an_h200(segments: int, tokens: int, floor_ms: float, digit: float) -> None:
    work = count_work(TowerConfig(), [4 * tokens] * segments, 2)
    floor = floor_of(work, 757e12, 4.3e12)
    assert floor.bound == "matrix rate"
    # The rate is known to half a TFLOP/s, the floor to half its last digit.
    assert abs(floor.ms - floor_ms) <= 0.5 * digit + floor_ms * 0.5 / 757


def test_the_longer_of_the_two_bounds() -> None:
    # One token of the released encoder: 1.73 GB of weights against next to no arithmetic.
    floor = floor_of(count_work(TowerConfig(), [4], 2), 757e12, 4.3e12)
    assert floor.bound == "bandwidth"
    assert floor.ms == pytest.approx(0.40, rel=0.02)
    assert floor_of(Work(10, 20), 5.0, 10.0).bound == "matrix rate"


# What is measured.


def test_cases_of_the_default_ladder() -> None:
    ladder = default_ladder()
    cases = {case.name: case for case in make_cases(ladder, ladder, 128)}
    assert [case.budget for case in cases.values() if case.kind == "full"] == list(ladder)
    assert all(case.tokens == case.budget for case in cases.values() if case.kind == "full")
    assert (cases["8 x 256"].tokens, cases["8 x 256"].budget) == (2048, 2048)
    assert (cases["64 in 4096"].tokens, cases["64 in 4096"].budget) == (64, 4096)
    full = [case for case in cases.values() if case.kind == "full"]
    assert all(case.worst_padding < 1 / 8 for case in full if case.budget > 64)


def test_cases_leave_out_what_does_not_fit() -> None:
    names = [case.name for case in make_cases((64, 2048), (2048,), 4)]
    assert names == ["2048"]


@given(st.integers(1, 5000))
def test_square_grid_has_the_tokens(tokens: int) -> None:
    t, h, w = square_grid(tokens)
    assert t * h * w == 4 * tokens
    assert h % 2 == w % 2 == 0


def test_choice_of_budgets() -> None:
    ladder = default_ladder()
    assert choose_budgets(ladder, None, quick=False) == ladder
    assert choose_budgets(ladder, None, quick=True) == (64, 256)
    assert choose_budgets((16, 48), None, quick=True) == (16, 48)
    assert choose_budgets(ladder, [256, 64, 64], quick=True) == (64, 256)
    with pytest.raises(RequestError, match="--budgets has 65; the artifact's ladder is 64, 72"):
        choose_budgets(ladder, [64, 65], quick=False)


def test_long_work_is_repeated_less() -> None:
    assert FULL.repetitions(0.0) == FULL.most
    assert FULL.repetitions(1000 * FULL.seconds / 8) == 8
    assert FULL.repetitions(1e9) == FULL.least


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles(samples: list[float]) -> None:
    for percent in (10, 50, 90, 99, 100):
        value = percentile(samples, percent)
        assert value in samples
        assert sum(sample <= value for sample in samples) >= len(samples) * percent / 100
        below = [sample for sample in samples if sample < value]
        assert len(below) < len(samples) * percent / 100
    timing = timing_of(samples)
    assert timing.p10_ms <= timing.p90_ms


# The captured peer.


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 140)), max_size=60),
    st.sampled_from([PEER_BUDGETS, (64,), (100, 300)]),
)
def test_peer_packs_ascending(items: list[tuple[int, int]], budgets: tuple[int, ...]) -> None:
    tokens, segments = [item[0] for item in items], [item[1] for item in items]
    batches = pack_ascending(tokens, segments, budgets)
    order = [item for batch in batches for item in batch.items]
    assert sorted(order) == list(range(len(items)))
    assert [tokens[item] for item in order] == sorted(tokens)
    for batch in batches:
        assert batch.tokens == sum(tokens[item] for item in batch.items)
        assert len(batch.items) <= PEER_MAX_ITEMS
        used = sum(segments[item] for item in batch.items)
        if batch.budget is None:
            assert len(batch.items) == 1
            assert batch.tokens > budgets[-1] or used > 128
        else:
            assert used <= 128
            assert batch.budget == min(size for size in budgets if size >= batch.tokens)
    for batch, following in pairwise(batches):
        # Greedy: the next item did not fit.
        item = following.items[0]
        assert (
            len(batch.items) == PEER_MAX_ITEMS
            or batch.tokens + tokens[item] > budgets[-1]
            or sum(segments[i] for i in batch.items) + segments[item] > 128
        )


def test_peer_packs_sixteen_at_most() -> None:
    batches = pack_ascending([64] * 20, [1] * 20)
    assert [len(batch.items) for batch in batches] == [16, 4]
    assert [batch.budget for batch in batches] == [1024, 256]


def test_padding_is_one_trailing_sequence() -> None:
    assert sequence_ends([8, 4], 20, 4) == [0, 8, 12, 20, 20, 20]
    assert sequence_ends([8, 12], 20, 2) == [0, 8, 20, 20]
    assert sequence_ends([], 20, 2) == [0, 20, 20, 20]
    with pytest.raises(AssertionError):
        sequence_ends([16, 8], 20, 2)


def call_instead_of_capture(model: PeerModel, inputs: PeerInputs) -> PeerBucket:
    embeddings = model(*inputs)
    return PeerBucket(inputs, lambda: embeddings.copy_(model(*inputs)), embeddings)


def test_captured_peer_computes_what_eager_does(golden_artifact: Path) -> None:
    manifest = read_manifest(golden_artifact)
    weights = load_weights(golden_artifact, manifest, CPU)
    peer = CapturedEager(
        PeerModel(manifest.tower, weights, "TORCH_SDPA", "plain"),
        manifest.tower,
        weights["inverse_frequency"],
        torch.float32,
        call_instead_of_capture,
        budgets=(16, 64),
    )
    eager = EagerRunner(make_tower(manifest.tower, weights, "TORCH_SDPA"))
    # 64 tokens alone in a bucket, two small ones and a clip of two segments with padding, and 70
    # tokens that fit none.
    grids = [(1, 16, 16), (1, 4, 6), (1, 14, 20), (5, 2, 4), (1, 2, 2)]
    pixels = torch.randn(sum(math.prod(grid) for grid in grids), manifest.tower.patch_dim)
    kept = peer.encode(pixels, grids)
    expected = eager.encode(pixels, grids)
    for got, wanted in zip(kept, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert peer.padding() == (64 + 6 + 70 + 10 + 1, 64 - 17)
    assert eager.padding() == (151, 0)
    copies = [rows.clone() for rows in kept]
    peer.encode(-pixels, grids)
    assert all(torch.equal(rows, copy) for rows, copy in zip(kept, copies, strict=True))


def test_captured_peer_prepares_one_run(golden_artifact: Path) -> None:
    manifest = read_manifest(golden_artifact)
    weights = load_weights(golden_artifact, manifest, CPU)
    peer = CapturedEager(
        PeerModel(manifest.tower, weights, "TORCH_SDPA", "plain"),
        manifest.tower,
        weights["inverse_frequency"],
        torch.float32,
        call_instead_of_capture,
        budgets=(4, 16),
    )
    pixels = torch.randn(16, manifest.tower.patch_dim)
    assert peer.prepare(pixels, [(1, 4, 4)])[1] == 4  # type: ignore[index]
    assert peer.prepare(pixels, [(1, 4, 4)], 16)[1] == 16  # type: ignore[index]
    assert peer.prepare(pixels, [(1, 4, 4)], 8) is None
    assert peer.prepare(torch.randn(68, manifest.tower.patch_dim), [(1, 2, 34)]) is None


# Judging.


def test_wrong_results_fail(golden_artifact: Path) -> None:
    judge = make_peers(golden_artifact, read_manifest(golden_artifact), CPU).judge
    grids = [(1, 4, 4), (1, 4, 6)]
    pixels = torch.randn(40, TINY.patch_dim)
    expected = judge.expect(pixels, grids)
    right = [rows.clone() for rows in expected.embeddings]
    assert judge.check(right, expected).passed
    assert judge.check(right, expected).error == 0.0
    wrong = [right[0], right[1] * (1 + 1e-4)]
    check = judge.check(wrong, expected)
    assert not check.passed
    assert "error 1.00e-04, allowed 1.00e-05" in check.reason
    missing = judge.check([right[0], right[1] * float("nan")], expected)
    assert not missing.passed
    assert missing.error is None


def test_rounding_is_held_against_eager_in_the_same_dtype(golden_artifact: Path) -> None:
    manifest = read_manifest(golden_artifact)
    weights = load_weights(golden_artifact, manifest, CPU)
    rounded = {
        name: tensor if name == "inverse_frequency" else tensor.to(torch.bfloat16)
        for name, tensor in weights.items()
    }
    judge = Judge(
        make_tower(manifest.tower, weights, "TORCH_SDPA"),
        make_tower(manifest.tower, rounded, "TORCH_SDPA"),
        BOUNDS["bfloat16"],
    )
    pixels = torch.randn(64, manifest.tower.patch_dim).to(torch.bfloat16)
    expected = judge.expect(pixels, [(1, 8, 8)])
    (eager_error,) = expected.eager_errors
    assert eager_error is not None
    exact = expected.embeddings[0]
    noise = torch.randn(exact.shape)
    noise *= eager_error * exact.norm() / noise.norm()
    assert judge.check([exact + 1.2 * noise], expected).passed
    assert not judge.check([exact + 1.3 * noise], expected).passed


def test_merge_takes_the_worst() -> None:
    def check(error: float | None, reason: str) -> Check:
        return Check(
            error=error, eager_error=None, min_cosine=error, passed=not reason, reason=reason
        )

    merged = merge([check(0.1, ""), check(0.3, "first"), check(0.2, "second")])
    assert merged == Check(
        error=0.3, eager_error=None, min_cosine=0.1, passed=False, reason="first"
    )
    assert merge([check(0.1, ""), check(None, "NaN")]).error is None


# The whole.


@pytest.fixture(scope="module")
def report(golden_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    trace = tmp_path_factory.mktemp("traffic") / "small.jsonl"
    trace.write_text(TRACE, encoding="utf-8")
    return bench(golden_artifact, budgets=[16, 64], quick=True, traffic=trace)


def test_report_has_every_part(report: BenchReport, golden_artifact: Path) -> None:
    manifest = read_manifest(golden_artifact)
    assert report.passed
    assert report.quick
    assert [(case.name, case.route) for case in report.cases] == [
        ("16", "replay"),
        ("64", "replay"),
    ]
    for case in report.cases:
        assert case.check.error is not None
        assert case.check.error <= 1e-5
        assert [peer.name for peer in case.peers] == ["eager"]
        assert QUICK.least <= case.replay.samples <= QUICK.most
        assert case.share_of_floor == pytest.approx(case.floor.ms / case.replay.median_ms)
    assert [call.budget for call in report.startup.first_calls] == [16, 64]
    assert report.memory is None
    assert any("eager captured: left out" in note for note in report.notes)
    assert report.subject.digests["encoder.pt2"] == manifest.files["encoder.pt2"].sha256
    assert "/" not in report.subject.name + str(report.subject.build.checkpoint)


def test_report_of_the_traffic(report: BenchReport) -> None:
    traffic = report.traffic
    assert traffic is not None
    assert (traffic.calls, traffic.items, traffic.tokens) == (4, 4, 16 + 6 + 20 + 20)
    ours, eager = traffic.runs
    assert (ours.name, eager.name) == ("m3compile (aoti)", "eager")
    assert eager.padded_share == 0.0
    # 22, 20 and 20 tokens, each in the bucket of 64, unless two of 16 pay.
    assert 0.0 < ours.padded_share < 1.0
    assert ours.checked_calls == 3
    assert ours.p50_ms <= ours.p90_ms <= ours.p99_ms
    assert ours.slowest_calls_per_s <= ours.calls_per_s <= ours.fastest_calls_per_s


def test_records_survive_json(report: BenchReport, tmp_path: Path) -> None:
    assert msgspec.json.decode(encode_report(report), type=BenchReport) == report
    assert "\n" not in encode_report(report)
    path = tmp_path / "report.json"
    path.write_text(encode_report(report, indent=1), encoding="utf-8")
    assert read_report(path) == report
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="not a report of bench"):
        read_report(path)


def test_summary_shows_the_key_sizes(report: BenchReport) -> None:
    assert [row["tokens"] for row in report.rows] == ["64"]
    (small, _) = report.cases
    assert [row["tokens"] for row in summary_rows([small])] == ["16"]
    assert "eager, ms" in report.rows[0]
    assert [row["small.jsonl"] for row in report.traffic_rows] == ["m3compile (aoti)", "eager"]


def test_update_readme_reads_reports(
    report: BenchReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "tools"))
    import update_readme

    (tmp_path / "tiny.json").write_text(encode_report(report), encoding="utf-8")
    text = update_readme.render(tmp_path)
    assert report.title in text
    assert "| tokens | floor, ms |" in text


def test_plot(report: BenchReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    check_plot(path)
    draw(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    drawn = curves(report)
    assert all([tokens for tokens, _ in points] == [16, 64] for points in drawn.values())
    assert len(drawn) == 4
    with pytest.raises(RequestError, match="its folder does not exist"):
        check_plot(tmp_path / "no" / "plot.png")
    with pytest.raises(RequestError, match=r"expected a name that ends in \."):
        check_plot(tmp_path / "plot.docx")


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"install m3compile\[plot\]"):
        check_plot(tmp_path / "plot.png")


def test_failed_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match=r"ArtifactNotFoundError: .*no such artifact folder"):
        measure_startup(tmp_path / "no", CPU, [16], 1)


def test_slow_calls_are_repeated_less(
    golden_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_module, "_NEXT_SECONDS", 0.0)
    found = startup_module._measure(golden_artifact, CPU, [16], 20)
    assert [call.next_calls for call in found.first_calls] == [1]
    assert found.num_graphs == found.graphs_after == 0


def test_clock_measures_the_work() -> None:
    clock, calls = Clock(CPU, QUICK), []
    timing = clock.end_to_end(lambda: calls.append(None))
    # One to warm up, one to see how long it takes.
    assert len(calls) == timing.samples + 2


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_commit(tmp_path) == (None, None)
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    assert source_commit(tmp_path) == ("abc123", True)
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123-dirty")
    assert source_commit(tmp_path) == ("abc123", False)


# The command.


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    code = main(["bench", *words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_command_ends_in_one_json_line(
    golden_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = [str(golden_artifact), "--quick", "--budgets", "16", "--json", str(out)]
    words += ["--against", str(golden_artifact)]
    code, lines, errors = run(capsys, *words)
    assert code == ExitCode.OK, errors
    last = json.loads(lines[-1])
    assert last == json.loads(out.read_text(encoding="utf-8"))
    assert last["circumstances"]["torch"] == str(torch.__version__)
    peers = [peer["name"] for peer in last["cases"][0]["peers"]]
    assert peers == ["eager", f"m3compile ({golden_artifact.name})"]
    assert any(line.startswith("ceilings: ") for line in lines[:-1])
    assert any(line.startswith("16 ") for line in lines)


def test_command_fails_where_results_are_wrong(
    report: BenchReport,
    golden_artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = report.cases[0]
    broken = msgspec.structs.replace(case.check, passed=False, reason="it is wrong")
    wrong = msgspec.structs.replace(
        report, passed=False, cases=(msgspec.structs.replace(case, check=broken),)
    )
    monkeypatch.setattr("m3compile.bench.bench", lambda *_, **__: wrong)
    code, lines, _ = run(capsys, str(golden_artifact))
    assert code == ExitCode.VERIFICATION
    assert "FAILED: 16: it is wrong" in lines


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--budgets", "64,x"], ExitCode.REQUEST, "--budgets has '64,x'; allowed: whole numbers"),
        (["--budgets", "17"], ExitCode.REQUEST, "--budgets has 17; the artifact's ladder is 16,"),
        (["--json", "no/such/x.json"], ExitCode.REQUEST, "its folder does not exist"),
        (["--traffic", "no-such-file"], ExitCode.REQUEST, "no-such-file does not exist"),
        (["--against", "no-such"], ExitCode.ARTIFACT, "no-such: no such artifact folder"),
    ],
)
def test_bad_requests(
    golden_artifact: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    found, lines, errors = run(capsys, str(golden_artifact), *words)
    assert found == code
    assert lines == []
    assert message in errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRACE + '{"grid_thw": [[1, 3, 4]]}\n', "line 5: item 0"),
        (TRACE + "\n{\n", "line 6"),
        ('{"grid_thw": []}\n', "its calls have no items"),
    ],
)
def test_bad_traces_name_the_line(
    golden_artifact: Path, tmp_path: Path, text: str, message: str
) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=message):
        bench(golden_artifact, traffic=trace)


def test_against_needs_the_same_weights(
    golden_artifact: Path, tmp_path: Path, copy_with_other_weights: Callable[[Path, Path], None]
) -> None:
    copy_with_other_weights(golden_artifact, tmp_path / "other")
    with pytest.raises(RequestError, match=r"--against .*other: has weights"):
        bench(golden_artifact, against=tmp_path / "other")


@pytest.fixture
def copy_with_other_weights() -> Callable[[Path, Path], None]:
    def copy(source: Path, target: Path) -> None:
        target.mkdir()
        manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
        manifest["files"]["weights.safetensors"]["sha256"] = "0" * 64
        (target / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    return copy
