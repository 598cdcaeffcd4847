"""`bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from m3compile.cli.console import StageProgress, stdout, table
from m3compile.errors import ExitCode, OperationError, RequestError

if TYPE_CHECKING:
    from m3compile.bench import BenchReport
    from m3compile.bench.records import CaseResult, TrafficResult


@click.command()
@click.argument("artifact")
@click.option("--json", "json_file", metavar="FILE", help="Also write the JSON to FILE.")
@click.option("--traffic", metavar="FILE", help="Run a trace: JSON lines with grid_thw, or CSV.")
@click.option("--skip-bad", is_flag=True, help="Leave bad lines of the trace out, and name them.")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw latency over tokens to FILE.")
@click.option("--budgets", help="Measure these budgets only, such as 64,256.")
@click.option("--quick", is_flag=True, help="Few budgets, few repetitions: a smoke test.")
@click.option(
    "--against", metavar="OTHER", help="Another artifact of the same weights, as one more peer."
)
def bench(
    artifact: str,
    json_file: str | None,
    traffic: str | None,
    skip_bad: bool,
    plot_file: str | None,
    budgets: str | None,
    quick: bool,
    against: str | None,
) -> int:
    """Measure ARTIFACT: against the hardware's ceilings, eager, and eager in CUDA graphs.

    Prints tables, then one line of JSON with the circumstances. Exits 1 where a result that was
    timed is out of the artifact's bounds.
    """
    wanted = _read_budgets(budgets)
    if json_file is not None and not Path(json_file).absolute().parent.is_dir():
        raise RequestError(f"--json {json_file}: its folder does not exist")
    from m3compile.bench import bench as run_bench
    from m3compile.bench import encode_report
    from m3compile.bench.plot import draw
    from m3compile.plotting import check_plot

    if plot_file is not None:
        check_plot(Path(plot_file))
    with StageProgress() as progress:
        report = run_bench(
            artifact,
            budgets=wanted,
            quick=quick,
            traffic=traffic,
            skip_bad=skip_bad,
            against=against,
            progress=progress,
        )
    if json_file is not None:
        _write(Path(json_file), encode_report(report, indent=1) + "\n")
    if plot_file is not None:
        draw(report, Path(plot_file))
    _show(report)
    # Plain, so that no console wraps it: it is the last line, for programs.
    print(encode_report(report))
    sys.stdout.flush()
    return ExitCode.OK if report.passed else ExitCode.VERIFICATION


def _read_budgets(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--budgets has {text!r}; allowed: whole numbers, as 64,256") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OperationError(f"cannot write {path}: {error.strerror or error}") from None


def _show(report: BenchReport) -> None:
    console = stdout()
    facts, top = report.circumstances, report.ceilings
    lines = [
        f"{report.title}, engine {facts.engine}, attention {facts.attention}",
        f"{facts.device}, torch {facts.torch}",
        f"ceilings: {top.flops_per_s / 1e12:.4g} TFLOP/s ({top.matrix_size} cubed, {top.dtype}), "
        f"{top.bytes_per_s / 1e12:.3g} TB/s copied",
    ]
    for line in lines:
        console.print(line, markup=False)
    console.print(_budget_table(report.cases))
    _show_start(report)
    if report.traffic is not None:
        console.print(_traffic_table(report.traffic))
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    if report.quick:
        console.print("--quick: few repetitions, not for comparisons", markup=False)
    for case in report.cases:
        if not case.check.passed:
            console.print(f"FAILED: {case.name}: {case.check.reason}", markup=False)
    if report.traffic is not None and not report.traffic.check.passed:
        console.print(f"FAILED: traffic: {report.traffic.check.reason}", markup=False)


def _budget_table(cases: tuple[CaseResult, ...]) -> object:
    peers = list(dict.fromkeys(peer.name for case in cases for peer in case.peers))
    rows = table(
        "milliseconds, medians; peers end to end, or their device time where padding is forced",
        "tokens", "bucket", "padding", "up to", "floor", "replay", "of floor", "end to end",
        "route", *peers, "error",
    )  # fmt: skip
    for case in cases:
        by_name = {peer.name: peer for peer in case.peers}
        cells = []
        for name in peers:
            peer = by_name.get(name)
            timing = (peer.end_to_end or peer.device) if peer is not None else None
            cells.append("-" if timing is None else f"{timing.median_ms:.2f}")
        rows.add_row(
            case.name,
            str(case.budget),
            f"{100 * case.padding:.0f} %",
            f"{100 * case.worst_padding:.0f} %",
            f"{case.floor.ms:.3f}",
            f"{case.replay.median_ms:.3f}",
            f"{100 * case.share_of_floor:.0f} %",
            f"{case.end_to_end.median_ms:.3f}",
            case.route,
            *cells,
            ("not finite" if case.check.error is None else f"{case.check.error:.1e}")
            + ("" if case.check.passed else " FAILED"),
        )
    return rows


def _show_start(report: BenchReport) -> None:
    console, start, memory = stdout(), report.startup, report.memory
    console.print(
        f"start, in a fresh process: load {start.load_ms:.0f} ms, of which capture "
        f"{start.capture_ms:.0f} ms of {start.num_graphs} graphs; first embedding after "
        f"{start.first_embedding_ms:.0f} ms",
        markup=False,
    )
    worst = max(start.first_calls, key=lambda call: call.first_ms / call.next_ms)
    console.print(
        f"first call of a bucket over the median of the next: at most "
        f"{worst.first_ms / worst.next_ms:.2f} times ({worst.first_ms:.2f} and "
        f"{worst.next_ms:.2f} ms, bucket {worst.budget})",
        markup=False,
    )
    if memory is not None:
        console.print(
            f"device memory: weights {memory.weights_bytes / 1e6:.0f} MB, graphs' pool "
            f"{memory.pool_bytes / 1e6:.0f} MB, buffers {memory.buffers_bytes / 1e6:.0f} MB, "
            f"graphs and kernels {memory.graphs_bytes / 1e6:.0f} MB",
            markup=False,
        )


def _traffic_table(traffic: TrafficResult) -> object:
    rows = table(
        f"{traffic.file}: {traffic.calls} calls, {traffic.items} items, {traffic.tokens} tokens; "
        "one call at a time, then back to back",
        "runner", "calls/s", "tokens/s", "p50 ms", "p90 ms", "p99 ms", "back to back", "padding",
        "error",
    )  # fmt: skip
    for run in traffic.runs:
        rows.add_row(
            run.name,
            f"{run.calls_per_s:.1f}",
            f"{run.tokens_per_s:,.0f}",
            f"{run.p50_ms:.2f}",
            f"{run.p90_ms:.2f}",
            f"{run.p99_ms:.2f}",
            f"{run.back_to_back_calls_per_s:.1f}",
            f"{100 * run.padded_share:.1f} %",
            "not finite" if run.error is None else f"{run.error:.1e}",
        )
    return rows
