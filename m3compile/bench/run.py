"""The stages of a bench, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from m3compile.artifact import WEIGHTS, file_digest
from m3compile.bench.cases import Case, make_cases
from m3compile.bench.ceilings import measure_ceilings
from m3compile.bench.circumstances import describe, subject_of
from m3compile.bench.clock import Clock
from m3compile.bench.judge import Judge
from m3compile.bench.measure import Bench
from m3compile.bench.memory import MemoryGauge
from m3compile.bench.peers import make_peers
from m3compile.bench.records import (
    BenchReport,
    CaseResult,
    Ceilings,
    Memory,
    Startup,
    TrafficResult,
)
from m3compile.bench.request import Request, make_request
from m3compile.bench.runners import EncoderRunner, Runner
from m3compile.bench.startup import measure_startup
from m3compile.bench.summary import summary_rows, title_of, traffic_rows
from m3compile.bench.trace import count_tokens, run_trace
from m3compile.errors import OperationError
from m3compile.host import detect
from m3compile.loading import load
from m3compile.ops import OP_SCHEMA
from m3compile.progress import Progress
from m3compile.runtime import Encoder

_SEED = 7


class _Found(NamedTuple):
    """What was measured, before it is put into a report."""

    ceilings: Ceilings
    startup: Startup
    memory: Memory | None
    cases: list[CaseResult]
    traffic: TrafficResult | None
    notes: list[str]


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
        RequestError: the ladder lacks a budget, the trace is bad, or `against` does not fit.
        ArtifactError: an artifact is missing, damaged or incompatible.
        OperationError: the device failed, or has too little memory.
    """
    progress = progress or Progress()
    with progress.stage("check artifact"):
        request = make_request(
            path,
            budgets=budgets,
            quick=quick,
            traffic=traffic,
            skip_bad=skip_bad,
            against=against,
        )
    device, manifest = request.device, request.manifest
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on_device, torch.no_grad(), _one_line(device):
        found = _measure(request, progress)
    is_right = [case.check.passed for case in found.cases]
    if found.traffic is not None:
        is_right.append(found.traffic.check.passed)
    return BenchReport(
        title=title_of(manifest),
        circumstances=describe(manifest, detect(device.type, OP_SCHEMA, device.index or 0)),
        rows=summary_rows(found.cases),
        traffic_rows=traffic_rows(found.traffic),
        quick=quick,
        passed=all(is_right),
        notes=(*request.notes, *found.notes),
        subject=subject_of(request.folder, manifest),
        ceilings=found.ceilings,
        cases=tuple(found.cases),
        startup=found.startup,
        memory=found.memory,
        traffic=found.traffic,
    )


def _measure(request: Request, progress: Progress) -> _Found:
    folder, manifest, device = request.folder, request.manifest, request.device
    clock = Clock(device, request.effort)
    with progress.stage("measure ceilings"):
        ceilings = measure_ceilings(clock, getattr(torch, manifest.dtype))
    with progress.stage("measure start in a fresh process"):
        if clock.is_cuda:
            # Its memory is needed there.
            torch.cuda.empty_cache()
        startup = measure_startup(folder, device, request.budgets, request.effort.next_calls)
    with ExitStack() as stack:
        gauge = MemoryGauge(device) if clock.is_cuda else None
        with progress.stage("load"):
            encoder = stack.enter_context(load(folder, device, on_bucket=progress.advance))
        memory = gauge.read(manifest.files[WEIGHTS].size) if gauge is not None else None
        ours = EncoderRunner(encoder, f"m3compile ({manifest.build.engine})")
        with progress.stage("make peers"):
            peers = make_peers(request.reference, manifest, device)
            runners = list(peers.runners)
            if request.against is not None:
                other = stack.enter_context(load(request.against, device))
                runners.append(EncoderRunner(other, _other_name(other, request)))
        cases = make_cases(manifest.ladder, request.budgets, encoder.max_segments)
        pixels = _random_pixels(encoder, cases, request)
        bench = Bench(ours, runners, pixels, clock, peers.judge, ceilings)
        results: list[CaseResult] = []
        with progress.stage("measure budgets"):
            for done, case in enumerate(cases, 1):
                results.append(bench.measure(case))
                progress.advance(done, len(cases))
        traffic = None
        if request.trace is not None:
            # Eager alone is no match for graphs; it stands in where there are none.
            rivals = [runner for runner in runners if runner.name != "eager"] or runners
            with progress.stage("run traffic"):
                traffic = _run_traffic(
                    request, [ours, *rivals], pixels, clock, peers.judge, progress
                )
    return _Found(ceilings, startup, memory, results, traffic, peers.notes)


def _run_traffic(
    request: Request,
    runners: Sequence[Runner],
    pixels: Tensor,
    clock: Clock,
    judge: Judge,
    progress: Progress,
) -> TrafficResult:
    assert request.trace is not None
    calls, runs, checks = request.calls, [], []
    passes = request.effort.passes
    for index, runner in enumerate(runners):

        def on_pass(done: int, before: int = index * passes) -> None:
            progress.advance(before + done, len(runners) * passes)

        run, check = run_trace(runner, calls, pixels, clock, judge, on_pass)
        runs.append(run)
        checks.append(check)
    return TrafficResult(
        file=request.trace.name,
        sha256=file_digest(request.trace),
        calls=len(calls),
        items=sum(map(len, calls)),
        tokens=count_tokens(calls),
        check=checks[0],
        runs=tuple(runs),
    )


def _other_name(other: Encoder, request: Request) -> str:
    engine = other.manifest.build.engine
    assert request.against is not None
    is_other_engine = engine != request.manifest.build.engine
    return f"m3compile ({engine if is_other_engine else request.against.resolve().name})"


def _random_pixels(encoder: Encoder, cases: Sequence[Case], request: Request) -> Tensor:
    """(N, patch_dim) on the device, as many rows as the largest batch has."""
    largest = max(4 * case.tokens for case in cases)
    for call in request.calls:
        largest = max(largest, sum(math.prod(grid) for grid in call))
    generator = torch.Generator(encoder.device).manual_seed(_SEED)
    shape = (largest, encoder.manifest.tower.patch_dim)
    # Random, since zeros would cost the card less power.
    pixels = torch.randn(shape, generator=generator, device=encoder.device)
    return pixels.to(encoder.dtype)


@contextmanager
def _one_line(device: torch.device) -> Iterator[None]:
    """Turn what the device throws into an error of ours."""
    try:
        yield
    except OperationError:
        raise
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise OperationError(
            f"out of device memory on {device}, eager and its peers need room beside the "
            f"artifact (--budgets with smaller ones needs less): {reason}"
        ) from error
