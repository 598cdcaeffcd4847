"""`plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from m3compile.artifact import WEIGHTS, read_manifest, read_preprocess
from m3compile.buckets import RouteTimes, default_ladder
from m3compile.cli.console import StageProgress, stderr, stdout
from m3compile.cli.plan_view import show_plan
from m3compile.config import BuildConfig, PreprocessConfig, TowerConfig
from m3compile.errors import OperationError, RequestError
from m3compile.traffic import read_traffic

if TYPE_CHECKING:
    from m3compile.plan import MemoryModel, PlanReport

_DEFAULT_GRAPHS = len(default_ladder())
_SHOWN_SKIPPED = 5


class _Target(NamedTuple):
    """What is planned for; the released model on an H200 unless an artifact says otherwise."""

    tower: TowerConfig
    preprocess: PreprocessConfig
    memory: MemoryModel
    times: RouteTimes
    times_source: str
    build: BuildConfig | None


@click.command()
@click.option("--traffic", required=True, help="Trace: JSON lines or CSV, one call a line.")
@click.option("--artifact", help="Plan for this artifact, with the times measured for it.")
@click.option("--times", "times_file", help="JSON with replay times, {tokens: milliseconds}.")
@click.option(
    "--max-graphs",
    type=click.IntRange(min=1),
    default=_DEFAULT_GRAPHS,
    show_default=True,
    help="Budgets at most.",
)
@click.option("--memory-limit", type=float, help="GB of device memory, weights included.")
@click.option("--out", help="Where to write the plan as a build config.")
@click.option("--json", "json_file", help="Where to write the report as JSON.")
@click.option("--plot", "plot_file", help="Where to draw the traffic and the budgets, .png.")
@click.option("--skip-bad", is_flag=True, help="Leave out bad lines of the trace, by name.")
@click.option("--force", is_flag=True, help="Let --out replace a build config that is no plan.")
def plan(
    traffic: str,
    artifact: str | None,
    times_file: str | None,
    max_graphs: int,
    memory_limit: float | None,
    out: str | None,
    json_file: str | None,
    plot_file: str | None,
    skip_bad: bool,
    force: bool,
) -> None:
    """Find the budgets that fit a trace of traffic.

    Times of replays come from --artifact, from --times, or else from a cost model of the released
    encoder on an H200.
    """
    from m3compile.plan import Limits, check_build_file, plan_traffic

    if memory_limit is not None and not (math.isfinite(memory_limit) and memory_limit > 0):
        raise RequestError(f"--memory-limit is {memory_limit}; allowed: GB above 0")
    if out is not None:
        check_build_file(Path(out), force)
    if json_file is not None and not Path(json_file).absolute().parent.is_dir():
        raise RequestError(f"--json {json_file}: its folder does not exist")
    if plot_file is not None:
        from m3compile.plotting import check_plot

        check_plot(Path(plot_file))
    target = _target(artifact, times_file)
    max_frames = target.tower.vision_segment_max_frames
    limit_bytes = None if memory_limit is None else int(memory_limit * 1e9)
    with StageProgress() as progress:
        with progress.stage("read traffic"):
            trace = read_traffic(
                traffic, skip_bad=skip_bad, max_frames=max_frames, preprocess=target.preprocess
            )
        with progress.stage("plan"):
            report = plan_traffic(
                trace,
                target.times,
                Limits(max_graphs, target.memory, limit_bytes),
                max_frames=max_frames,
                name=Path(traffic).name,
                times_source=target.times_source,
            )
    for line in trace.skipped[:_SHOWN_SKIPPED]:
        stderr().print(f"warning: left out {line}", markup=False)
    if len(trace.skipped) > _SHOWN_SKIPPED:
        stderr().print(f"warning: left out {len(trace.skipped)} bad lines in all", markup=False)
    show_plan(report)
    _write(report, target.build, out, json_file, plot_file)


def _target(artifact: str | None, times_file: str | None) -> _Target:
    from m3compile.plan import h200_times, memory_model, read_times

    if artifact is not None and times_file is not None:
        raise RequestError("--artifact and --times both name times; give one of them")
    if artifact is not None:
        return _artifact_target(Path(artifact))
    if times_file is not None:
        times, source = read_times(times_file), Path(times_file).name
    else:
        times, source = h200_times(), "cost model of the released encoder on an H200"
    return _Target(TowerConfig(), PreprocessConfig(), memory_model(), times, source, None)


def _artifact_target(folder: Path) -> _Target:
    from m3compile.plan import memory_model

    manifest = read_manifest(folder)
    if manifest.times is None:
        raise RequestError(
            f"{folder} has no measured times; give --times FILE instead, or neither for the cost "
            "model of an H200"
        )
    weights = manifest.files[WEIGHTS].size
    return _Target(
        manifest.tower,
        read_preprocess(folder, manifest),
        memory_model(manifest.tower, manifest.dtype, weights),
        manifest.times,
        f"measured for {folder.name}",
        manifest.build,
    )


def _write(
    report: PlanReport,
    base: BuildConfig | None,
    out: str | None,
    json_file: str | None,
    plot_file: str | None,
) -> None:
    from m3compile.plan import build_file, write_build_file

    written: Sequence[str | None] = (out, json_file, plot_file)
    if out is not None:
        write_build_file(Path(out), build_file(report, base))
    if json_file is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        try:
            Path(json_file).write_bytes(text + b"\n")
        except OSError as error:
            raise OperationError(f"cannot write {json_file}: {error.strerror}") from None
    if plot_file is not None:
        from m3compile.plan.plot import draw

        draw(report, Path(plot_file))
    for name in written:
        if name is not None:
            stdout().print(f"Wrote {name}", markup=False)
