"""The stages of a bench, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from m3compile.artifact import WEIGHTS, Manifest, check_files, file_digest, read_manifest
from m3compile.bench.cases import FULL, QUICK, choose_budgets, make_cases
from m3compile.bench.ceilings import measure_ceilings
from m3compile.bench.circumstances import describe, subject_of
from m3compile.bench.clock import Clock
from m3compile.bench.judge import Judge
from m3compile.bench.measure import Bench
from m3compile.bench.memory import MemoryGauge
from m3compile.bench.peers import make_peers
from m3compile.bench.records import BenchReport, TrafficResult
from m3compile.bench.runners import EncoderRunner, Runner
from m3compile.bench.startup import measure_startup
from m3compile.bench.summary import summary_rows, title_of, traffic_rows
from m3compile.bench.trace import count_tokens, run_trace
from m3compile.errors import OperationError, RequestError
from m3compile.host import detect
from m3compile.loading import check_machine, load
from m3compile.ops import OP_SCHEMA
from m3compile.progress import Progress
from m3compile.runtime import Encoder
from m3compile.traffic import Call, read_traffic

_SEED = 7


def bench(
    path: str | Path,
    *,
    budgets: Sequence[int] | None = None,
    quick: bool = False,
    traffic: str | Path | None = None,
    skip_bad: bool = False,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure an artifact on this machine: ceilings, budgets, peers, start and traffic.

    Args:
        path: the artifact.
        budgets: those to measure; None for the whole ladder.
        quick: few budgets, few repetitions: to see that it works, not to compare.
        traffic: a trace to run, see `m3compile.traffic`.
        skip_bad: leave bad lines of the trace out.
        against: another artifact of the same weights, such as one of the other engine.

    Raises:
        RequestError: the ladder lacks a budget, or the trace is bad, or `against` does not fit.
        ArtifactError: an artifact is missing, damaged or incompatible.
        OperationError: the device failed, or has too little memory.
    """
    progress = progress or Progress()
    folder = Path(path)
    manifest = read_manifest(folder)
    chosen = choose_budgets(manifest.ladder, budgets, quick)
    effort = QUICK if quick else FULL
    notes: list[str] = []
    calls: tuple[Call, ...] = ()
    if traffic is not None:
        trace = read_traffic(
            traffic, skip_bad=skip_bad, max_frames=manifest.tower.vision_segment_max_frames
        )
        calls = trace.calls[: effort.calls]
        notes += [f"{Path(traffic).name}: left out {line}" for line in trace.skipped]
    with progress.stage("check artifact"):
        # Digests are computed here too, so that a load below finds the files in the page cache.
        check_files(folder, manifest)
        device = check_machine(folder, manifest, None)
        if against is not None:
            _check_peer_artifact(Path(against), manifest)
    host = detect(device.type, OP_SCHEMA, device.index or 0)
    clock = Clock(device, effort)
    dtype = getattr(torch, manifest.dtype)
    on_device = torch.cuda.device(device) if clock.is_cuda else nullcontext()
    with on_device, torch.no_grad(), _one_line(device):
        with progress.stage("measure ceilings"):
            ceilings = measure_ceilings(clock, dtype)
        with progress.stage("measure start in a fresh process"):
            if clock.is_cuda:
                torch.cuda.empty_cache()
            startup = measure_startup(folder, device, chosen, effort.next_calls)
        gauge = MemoryGauge(device) if clock.is_cuda else None
        with progress.stage("load"):
            encoder = load(folder, device, on_bucket=progress.advance)
        with encoder:
            memory = gauge.read(manifest.files[WEIGHTS].size) if gauge is not None else None
            ours = EncoderRunner(encoder, f"m3compile ({manifest.build.engine})")
            with progress.stage("make peers"):
                peers = make_peers(folder, manifest, device)
                notes += peers.notes
            cases = make_cases(manifest.ladder, chosen, encoder.max_segments)
            with _other_encoder(against, device) as other:
                runners = [*peers.runners, *other]
                pixels = _random_pixels(encoder, [case.grids for case in cases], calls)
                bench = Bench(ours, runners, pixels, clock, peers.judge, ceilings)
                results = []
                with progress.stage("measure budgets"):
                    for done, case in enumerate(cases, 1):
                        results.append(bench.measure(case))
                        progress.advance(done, len(cases))
                traffic_result = None
                if traffic is not None:
                    # Eager alone is no match for graphs; it stands in where there are none.
                    rivals = [r for r in runners if r.name != "eager"] or runners
                    with progress.stage("run traffic"):
                        traffic_result = _run_traffic(
                            Path(traffic), calls, [ours, *rivals], pixels, clock, peers.judge,
                            progress,
                        )  # fmt: skip
    return BenchReport(
        title=title_of(manifest.tower, manifest.dtype),
        circumstances=describe(manifest, host),
        rows=summary_rows(results),
        traffic_rows=traffic_rows(traffic_result),
        quick=quick,
        passed=all(case.check.passed for case in results)
        and (traffic_result is None or traffic_result.check.passed),
        notes=tuple(notes),
        subject=subject_of(folder, manifest),
        ceilings=ceilings,
        cases=tuple(results),
        startup=startup,
        memory=memory,
        traffic=traffic_result,
    )
