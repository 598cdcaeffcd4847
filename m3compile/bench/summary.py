"""The few rows of a report that a README shows."""

from __future__ import annotations

from collections.abc import Sequence

from m3compile.artifact import Manifest
from m3compile.bench.cases import KEY_TOKENS
from m3compile.bench.floor import count_parameters
from m3compile.bench.records import CaseResult, TrafficResult

Row = dict[str, str | float | int | None]


def title_of(manifest: Manifest) -> str:
    """What was measured, in a few words."""
    dtype = manifest.dtype if manifest.precision is None else f"fp8 and {manifest.dtype}"
    return f"Encoder of {count_parameters(manifest.tower) / 1e6:.0f} M parameters in {dtype}"


def summary_rows(cases: Sequence[CaseResult]) -> tuple[Row, ...]:
    """The sizes that targets are stated for, or all where none of those was measured."""
    shown = [
        case
        for case in cases
        if case.kind == "batch" or (case.kind == "full" and case.tokens in KEY_TOKENS)
    ]
    return tuple(_row(case) for case in shown or cases)


def _row(case: CaseResult) -> Row:
    row: Row = {
        "tokens": case.name,
        "floor, ms": case.floor.ms,
        "replay, ms": case.replay.median_ms,
        "of the floor": f"{100 * case.share_of_floor:.0f} %",
        "end to end, ms": case.end_to_end.median_ms,
    }
    for peer in case.peers:
        if peer.end_to_end is not None:
            row[f"{peer.name}, ms"] = peer.end_to_end.median_ms
    row["error"] = case.check.error
    return row


def traffic_rows(traffic: TrafficResult | None) -> tuple[Row, ...]:
    """One row a runner."""
    if traffic is None:
        return ()
    return tuple(
        {
            traffic.file: run.name,
            "calls/s": run.calls_per_s,
            "back to back, calls/s": run.back_to_back_calls_per_s,
            "tokens/s": run.tokens_per_s,
            "p50, ms": run.p50_ms,
            "p90, ms": run.p90_ms,
            "p99, ms": run.p99_ms,
            "padding": f"{100 * run.padded_share:.1f} %",
        }
        for run in traffic.runs
    )
